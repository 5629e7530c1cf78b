"""An average that shares tensors with its model: they are the model's own, and the rest is averaged as ever."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functavg
from functavg import EMA, SWA, AveragedModel, swapped
from tests.nn.helpers import EVERY_WAY, bits, contents, parameters_of, unchanged
from tests.nn.helpers import tensors as tensors_of


class Adapter(nn.Module):
    """A layer over a frozen base, of which a low-rank product is trained, with a quantised table beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.tied_weight = self.base.weight
        self.a = nn.Parameter(torch.ones(2, 4))
        self.b = nn.Parameter(torch.zeros(4, 2))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(6, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.base(x) + x @ self.a.T @ self.b.T) * self.scale.mean()


def is_frozen(name: str, tensor: Tensor) -> bool:
    return not tensor.requires_grad


SHARED = {"base.weight", "base.bias", "tied_weight", "table", "scale"}


def train(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(value)


def shared(averaged: AveragedModel, model: nn.Module) -> set[str]:
    theirs = tensors_of(model)
    return {name for name, tensor in tensors_of(averaged.module).items() if theirs[name] is tensor}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("way", EVERY_WAY)
def test_what_is_not_shared_is_averaged_as_without_sharing(way, use_buffers, dtype):
    model = Adapter().to(dtype)
    averages = [
        AveragedModel(model, use_buffers=use_buffers, share=share, **EVERY_WAY[way]) for share in (is_frozen, None)
    ]
    before = {name: bits(tensor) for name, tensor in tensors_of(model).items() if name in SHARED}
    for value in (1.0, 2.0, 3.0, 5.0):
        train(model, value)
        for averaged in averages:
            averaged.update_parameters(model)
    one, other = averages
    assert shared(one, model) == SHARED
    assert shared(other, model) == set()
    assert {name: bits(tensor) for name, tensor in tensors_of(model).items() if name in SHARED} == before
    assert one.state_dict().keys() == other.state_dict().keys()
    mine, theirs = (functavg.to_state_dict(averaged.state) for averaged in averages)
    assert not [name for name in mine if name.endswith(tuple(SHARED))]
    assert all(bits(value) == bits(theirs[name]) for name, value in mine.items())
    mine, theirs = one.state_dict(), other.state_dict()
    assert all(bits(mine[key]) == bits(theirs[key].to(mine[key].dtype)) for key in mine if key != "_extra_state")


def test_shared_tensors_take_no_memory():
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(2, 2))
    averaged = AveragedModel(model, rule=functavg.LAWA(4), share=lambda name, tensor: name.startswith("0."))
    held = {tensor.untyped_storage().data_ptr() for tensor in model[0].parameters()}
    assert {tensor.untyped_storage().data_ptr() for tensor in averaged.module[0].parameters()} == held
    kept = [leaf for leaf in functavg.to_state_dict(averaged.state).values() if isinstance(leaf, Tensor)]
    assert max(leaf.numel() for leaf in kept) == 4


@pytest.mark.parametrize("update", [True, False])
def test_swaps_and_copies_leave_shared_tensors_alone(update):
    model = Adapter()
    averaged = AveragedModel(model, rule=SWA(), share=is_frozen)
    train(model, 1.0)
    if update:
        averaged.update_parameters(model)
    train(model, 3.0)
    if update:
        averaged.update_parameters(model)
    versions = {name: tensors_of(model)[name]._version for name in SHARED}
    with swapped(model, averaged):
        assert model.a[0, 0].item() == (2.0 if update else 3.0)
    assert model.a[0, 0].item() == 3.0
    averaged.copy_to(model)
    assert model.a[0, 0].item() == (2.0 if update else 3.0)
    assert {name: tensors_of(model)[name]._version for name in SHARED} == versions
    assert shared(averaged, model) == SHARED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copy_to_gives_another_model_the_base_too(dtype):
    model, other = Adapter().to(dtype), Adapter().to(dtype)
    averaged = AveragedModel(model, share=is_frozen)
    averaged.update_parameters(model)
    averaged.copy_to(other)
    assert parameters_of(other) == parameters_of(model)


def test_what_is_trained_or_replaced_all_the_same_is_followed():
    model = Adapter()
    averaged = AveragedModel(model, rule=EMA(0.5), share=is_frozen)
    with torch.no_grad():
        model.base.weight.fill_(7.0)
    assert torch.equal(averaged.module.base.weight, model.base.weight)
    model.base.weight = model.tied_weight = nn.Parameter(torch.full((4, 4), 9.0))
    model.table = torch.zeros(8, dtype=torch.int8)
    averaged.update_parameters(model)
    assert shared(averaged, model) == SHARED
    assert averaged.module.tied_weight is averaged.module.base.weight is model.base.weight


@pytest.mark.parametrize(
    "copy_", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_its_own_until_it_is_updated(copy_):
    model = Adapter()
    averaged = AveragedModel(model, rule=EMA(0.5), share=is_frozen)
    averaged.update_parameters(model)
    again = copy_(averaged)
    assert shared(again, model) == set()
    assert contents(again) == contents(averaged)
    train(model, 3.0)
    for each in (averaged, again):
        each.update_parameters(model)
    assert shared(again, model) == SHARED
    assert contents(again) == contents(averaged)
    model, both = copy.deepcopy((model, averaged))
    assert shared(both, model) == SHARED


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_loads_without_touching_the_model(dtype, assign):
    """What is averaged is loaded; other values of the base are told, and the model's stay."""
    model = Adapter().to(dtype)
    averaged = AveragedModel(model, rule=EMA(0.5), share=is_frozen)
    for value in (1.0, 2.0):
        train(model, value)
        averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(averaged.state_dict(), file)

    def load(into: AveragedModel) -> None:
        file.seek(0)
        into.load_state_dict(torch.load(file), assign=assign)

    again = AveragedModel(model, rule=EMA(0.5), share=is_frozen)
    with unchanged(model):
        load(again)
    assert shared(again, model) == SHARED
    assert contents(again) == contents(averaged)
    other = Adapter().to(dtype)
    again = AveragedModel(other, rule=EMA(0.5), share=is_frozen)
    with (
        unchanged(other),
        pytest.warns(UserWarning, match=r"base\.bias, base\.weight, tied_weight of the .*differ from those that the"),
    ):
        load(again)
    assert shared(again, other) == SHARED
    assert again.state.count == 2
    assert bits(again.module.a) == bits(averaged.module.a)


def test_a_checkpoint_without_the_base_loads():
    model = Adapter()
    averaged = AveragedModel(model, share=is_frozen)
    averaged.update_parameters(model)
    saved = {key: value for key, value in averaged.state_dict().items() if key.removeprefix("module.") not in SHARED}
    with unchanged(model):
        averaged.load_state_dict(saved, strict=False)
    assert shared(averaged, model) == SHARED


def test_a_checkpoint_of_another_shape_of_the_base_is_told_and_loads():
    model = Adapter()
    averaged = AveragedModel(model, share=is_frozen)
    saved = averaged.state_dict() | {"module.scale": torch.ones(4)}
    with unchanged(model), pytest.warns(UserWarning, match="^scale of the state_dict differ from those that the"):
        averaged.load_state_dict(saved)
    assert shared(averaged, model) == SHARED


def test_a_checkpoint_whose_base_has_no_values_loads():
    model = Adapter()
    averaged = AveragedModel(model, share=is_frozen)
    saved = averaged.state_dict() | {"module.scale": torch.ones(3, device="meta")}
    with unchanged(model):
        averaged.load_state_dict(saved)
    assert shared(averaged, model) == SHARED


def rename(old: str, new: str):
    """Return a hook that gives a tensor another name in a state_dict."""

    def hook(module, state_dict, prefix, *rest):
        if prefix + old in state_dict:
            state_dict[prefix + new] = state_dict.pop(prefix + old)

    return hook


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_through_hooks_that_rename_leaves_the_model_alone(assign):
    model = Adapter()
    model.base.register_state_dict_post_hook(rename("weight", "kernel"))
    model.base.register_load_state_dict_pre_hook(rename("kernel", "weight"))
    averaged = AveragedModel(model, rule=EMA(0.5), share=is_frozen)
    train(model, 2.0)
    averaged.update_parameters(model)
    again = AveragedModel(model, rule=EMA(0.5), share=is_frozen)
    with unchanged(model):
        again.load_state_dict(copy.deepcopy(averaged.state_dict()), assign=assign)
    assert contents(again) == contents(averaged)
    other = averaged.state_dict() | {"module.base.kernel": torch.zeros(4, 4)}
    with (
        unchanged(model),
        pytest.warns(UserWarning, match="weight of the state_dict differ from those that the average"),
    ):
        again.load_state_dict(other, assign=assign)
    assert shared(again, model) == SHARED


def test_a_load_that_fails_leaves_the_model_as_it_was():
    model = Adapter()
    averaged = AveragedModel(model, share=is_frozen)
    saved = averaged.state_dict() | {"module.a": torch.zeros(9), "module.base.bias": torch.full((4,), 5.0)}
    with unchanged(model, averaged), warnings.catch_warnings(), pytest.raises(RuntimeError, match="size mismatch"):
        warnings.simplefilter("ignore")
        averaged.load_state_dict(saved)
    assert shared(averaged, model) == SHARED


def test_a_move_that_changes_nothing_shared_says_nothing():
    model = Adapter()
    averaged = AveragedModel(model, share=is_frozen)
    averaged.to("cpu").float().share_memory()
    assert {"base.weight", "base.bias", "tied_weight"} <= shared(averaged, model)


@pytest.mark.parametrize(
    "move",
    [lambda it: it.double(), lambda it: it.bfloat16(), lambda it: it.to("meta"), lambda it: it.to_empty(device="meta")],
)
def test_a_move_leaves_the_parameters_of_the_model_alone_and_says_so(move):
    model = Adapter()
    averaged = AveragedModel(model, share=is_frozen)
    with unchanged(model), pytest.warns(UserWarning, match="stay as they are: move or convert the model"):
        move(averaged)
    assert {"base.weight", "base.bias", "tied_weight"} <= shared(averaged, model)
    assert averaged.module.a.dtype != torch.float32 or averaged.module.a.is_meta


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*deprecated")
def test_a_move_of_shared_tensors_that_no_empty_one_stands_for_says_nothing():
    model = Adapter()
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    model.packed = nn.Parameter(quantised, requires_grad=False)
    averaged = AveragedModel(model, share=is_frozen)
    averaged.cpu()
    assert averaged.module.packed is model.packed


def test_an_average_follows_a_model_that_was_converted():
    model = Adapter()
    averaged = AveragedModel(model, rule=EMA(0.5), share=is_frozen)
    model.double()
    averaged.double()
    averaged.update_parameters(model)
    assert shared(averaged, model) == SHARED
    assert {tensor.dtype for tensor in tensors_of(averaged.module).values()} == {torch.float64, torch.int64, torch.int8}


def test_running_statistics_are_never_shared():
    """A forward in training mode, and update_bn, would write into the model."""
    model = Adapter()
    averaged = AveragedModel(model, share=lambda name, tensor: True)
    averaged.update_parameters(model)
    with unchanged(model):
        functavg.update_bn([torch.randn(8, 4) + 5.0], averaged)
        averaged.train()(torch.randn(8, 4))
    assert averaged.module.norm.running_mean.abs().sum() > 0
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    average = AveragedModel(layer, share=lambda name, tensor: True)
    with unchanged(layer):
        average.train()(torch.randn(2, 4))


def test_on_meta_the_average_follows_the_model():
    with torch.device("meta"):
        model = Adapter()
    averaged = AveragedModel(model, share=is_frozen)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in tensors_of(model).values():
            tensor.zero_()
    averaged.to_empty(device="cpu")
    averaged.update_parameters(model)
    assert shared(averaged, model) == SHARED
    assert {tensor.device.type for tensor in tensors_of(averaged.module).values()} == {"cpu"}


def test_what_is_shared_has_to_be_on_the_device():
    model = Adapter()
    with pytest.raises(
        ValueError, match=r"tied_weight is to be shared with the model and is on cpu, not on device=meta"
    ):
        AveragedModel(model, "meta", share=is_frozen)
    twin = copy.deepcopy(model)
    twin.base = model.base
    twin.tied_weight = model.tied_weight
    with (
        unchanged(model),
        pytest.raises(ValueError, match=r"tied_weight is to be shared with the model and is on cpu"),
    ):
        AveragedModel(model, "meta", module=twin)
    averaged = AveragedModel(model, "cpu", share=is_frozen)
    assert shared(averaged, model) == SHARED


def test_a_ready_module_may_have_in_common_what_is_frozen_or_said_to_be_shared():
    model = Adapter()
    twin = copy.deepcopy(model)
    twin.base, twin.tied_weight, twin.table = model.base, model.tied_weight, model.table
    averaged = AveragedModel(model, module=twin, rule=EMA(0.5))
    train(model, 3.0)
    averaged.update_parameters(model)
    assert shared(averaged, model) == SHARED - {"scale"}
    assert "base.weight" not in averaged.state.average
    twin = copy.deepcopy(model)
    twin.a = model.a
    with pytest.raises(ValueError, match="module= shares a with the model"):
        AveragedModel(model, module=twin)
    averaged = AveragedModel(model, module=twin, share=lambda name, tensor: name == "a")
    averaged.update_parameters(model)
    assert shared(averaged, model) == {"a"}


@pytest.mark.parametrize("answer", [1, np.True_, "yes", torch.tensor(True)], ids=repr)
def test_a_predicate_answers_with_any_truth(answer):
    model = Adapter()
    assert shared(AveragedModel(model, share=lambda name, tensor: name == "a" and answer), model) == {"a"}


@pytest.mark.parametrize("share", [True, ["a"], "a"], ids=repr)
def test_share_must_be_a_function(share):
    with pytest.raises(TypeError, match=r"share must be a function share\(name, tensor\) -> bool, got"):
        AveragedModel(Adapter(), share=share)


def test_names_are_those_without_wrappers():
    names: list[str] = []
    model = Adapter()
    AveragedModel(nn.DataParallel(model), share=lambda name, tensor: names.append(name))
    assert set(names) == set(tensors_of(model)) - {f"norm.{name}" for name, _ in model.norm.named_buffers()}


class Packed(Tensor):
    """A tensor subclass that can do no arithmetic, as packed ones."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(word in func.__name__ for word in ("lerp", "copy_", "clone", "mul", "add")):
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Incomparable(Tensor):
    """A tensor subclass that does not compare."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.equal:
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_shared_tensors_that_cannot_be_compared_load_and_stay():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Incomparable), requires_grad=False)
    averaged = AveragedModel(model, share=is_frozen)
    averaged.load_state_dict(averaged.state_dict() | {"module.weight": torch.zeros(2, 2)})
    assert averaged.module.weight is model.weight


def test_tensors_that_resist_arithmetic_are_shared():
    model = nn.ModuleDict({"packed": nn.Linear(2, 2), "plain": nn.Linear(2, 2)})
    model["packed"].weight = nn.Parameter(torch.ones(2, 2).as_subclass(Packed), requires_grad=False)
    averaged = AveragedModel(model, rule=EMA(0.5), share=lambda name, tensor: name == "packed.weight")
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    with swapped(model, averaged):
        pass
    averaged.copy_to(model)
    assert averaged.module["packed"].weight is model["packed"].weight
