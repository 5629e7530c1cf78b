"""What is saved, copied and loaded goes on exactly as if nothing had happened."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import swa_utils as torch_swa_utils

import functavg
from functavg import EMA, SWA, AveragedModel, swa_utils
from functavg.combinators import Several
from functavg.rules.lawa import LAWA
from tests.nn.helpers import EVERY_WAY, FUNCTIONS, Net, bits, contents, fill, randomise, scalar, tensors, unchanged

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def train(averaged, model, seeds):
    for seed in seeds:
        randomise(model, seed)
        averaged.update_parameters(model)


def averaged_net(dtype, seeds=range(4), **arguments):
    model = Net().to(dtype)
    averaged = AveragedModel(model, **arguments)
    train(averaged, model, seeds)
    return averaged, model


def through_file(state, weights_only=True):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


# ---- copies and pickles

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda averaged: pickle.loads(pickle.dumps(averaged)),
    "torch.save": lambda averaged: through_file(averaged, weights_only=False),
}


@pytest.mark.parametrize("make", COPIES)
@DTYPES
@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_copy_averages_on_as_the_original_does(way, dtype, make):
    averaged, model = averaged_net(dtype, use_buffers=dtype == torch.bfloat16, **EVERY_WAY[way])
    other = COPIES[make](averaged)
    assert type(other) is AveragedModel
    assert other.rule == averaged.rule
    assert contents(other) == contents(averaged)
    shared = {tensor.data_ptr() for tensor in tensors(averaged).values()}
    assert not shared & {tensor.data_ptr() for tensor in tensors(other).values()}
    with unchanged(averaged):
        train(other, model, range(4, 7))
    train(averaged, model, range(4, 7))
    assert contents(other) == contents(averaged)


@pytest.mark.parametrize("make", COPIES)
def test_a_copy_goes_on_from_what_was_given_to_the_module_by_hand(make):
    averaged, model = averaged_net(torch.bfloat16, rule=EMA(0.75))
    fill(averaged.module, 0.0)
    other = COPIES[make](averaged)
    fill(model, 1.0)
    other.update_parameters(model)
    assert {value for average in other.state.average.values() for value in average.flatten().tolist()} == {0.25}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_functions_print_compare_and_pickle(name):
    for function in FUNCTIONS[name][0].values():
        assert pickle.loads(pickle.dumps(function)) == function
        assert copy.deepcopy(function) == function


def test_a_compiled_average_can_be_copied_and_pickled():
    averaged = AveragedModel(scalar(2.0), rule=EMA(0.5))
    averaged.compile(backend="eager")
    for other in (copy.deepcopy(averaged), pickle.loads(pickle.dumps(averaged))):
        assert other(torch.ones(1, 1)).item() == 2.0


def test_a_copy_knows_by_itself_how_much_it_averaged():
    averaged, _ = averaged_net(torch.float32)
    other = copy.deepcopy(averaged)
    other.n_averaged.fill_(9)
    assert (averaged.state.count, other.state.count) == (4, 9)


class Labelled(AveragedModel):
    """An average as users derive one: with a name, a forward and a buffer of its own."""

    def __init__(self, model, name, **arguments):
        super().__init__(model, **arguments)
        self.name = name
        self.register_buffer("own", torch.tensor(1.0))

    def forward(self, x):
        return super().forward(x) + self.own


@DTYPES
def test_a_subclass_averages_saves_and_copies_as_its_base(dtype):
    model = scalar(1.0, dtype)
    averaged = Labelled(model, "a", rule=EMA(0.75))
    for value in (0.0, 1.0):
        fill(model, value)
        averaged.update_parameters(model)
    assert averaged(torch.ones(1, 1, dtype=dtype)).item() == 1.25
    other = copy.deepcopy(averaged)
    assert (type(other), other.name) == (Labelled, "a")
    fresh = Labelled(scalar(0.0, dtype), "b", rule=EMA(0.75))
    fresh.load_state_dict(through_file(averaged.state_dict()))
    for each in (averaged, other, fresh):
        each.update_parameters(model)
    assert contents(averaged) == contents(other) == contents(fresh)


# ---- resuming


def is_saved(name, buffer):
    """Tell whether state_dicts hold a buffer of the model."""
    return name != "cache"


@DTYPES
@pytest.mark.parametrize(("use_buffers", "assign"), [(False, False), (True, True)], ids=["", "buffers, assign"])
@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(way, dtype, use_buffers, assign):
    arguments = EVERY_WAY[way] | {"use_buffers": is_saved if use_buffers else False}
    averaged, model = averaged_net(dtype, **arguments)
    saved = through_file({"average": averaged.state_dict(), "model": model.state_dict()})
    train(averaged, model, range(4, 9))

    model = Net().to(dtype)
    randomise(model, 100)
    resumed = AveragedModel(model, **arguments)
    model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["average"], assign=assign)
    train(resumed, model, range(4, 9))
    assert contents(resumed) == contents(averaged)
    assert resumed.n_averaged.dtype == torch.int64


@DTYPES
@pytest.mark.parametrize("way", ["EMA", "LAWA", "Several", "get_swa_multi_avg_fn"])
def test_saving_and_loading_at_every_step_changes_nothing(way, dtype):
    averaged, model = averaged_net(dtype, **EVERY_WAY[way])
    other = copy.deepcopy(averaged)
    for seed in range(4, 8):
        randomise(model, seed)
        for each in (averaged, other):
            each.update_parameters(model)
        other.load_state_dict(through_file(other.state_dict()))
        assert contents(other) == contents(averaged)


class Parent(nn.Module):
    """A training module that holds the model and its average, as those of frameworks do."""

    def __init__(self, dtype, way):
        super().__init__()
        self.net = Net().to(dtype)
        self.average = nn.ModuleList([AveragedModel(self.net, **EVERY_WAY[way])])


@DTYPES
@pytest.mark.parametrize("way", ["EMA", "LAWA", "Several", "avg_fn"])
def test_an_average_may_be_part_of_another_module(way, dtype):
    """state_dict, load_state_dict, moves and copies go through the parent."""

    def make(seeds):
        parent = Parent(dtype, way)
        train(parent.average[0], parent.net, seeds)
        return parent

    parent = make(range(4))
    state = parent.state_dict()
    assert {key.removeprefix("average.0.") for key in state if key.startswith("average.0.")} == set(
        parent.average[0].state_dict()
    )
    if dtype == torch.bfloat16:
        assert state["average.0.module.scale"].dtype == torch.float32
        assert state["net.scale"].dtype == torch.bfloat16
    loaded = make(range(90, 92))
    loaded.load_state_dict(through_file(state))
    moved = copy.deepcopy(parent).double().to(dtype)
    others = [loaded, copy.deepcopy(parent), pickle.loads(pickle.dumps(parent)), moved]
    assigned = make(())
    assigned.to("meta").load_state_dict(through_file(state), assign=True)
    others.append(assigned)
    emptied = make(()).to("meta").to_empty(device="cpu")
    emptied.load_state_dict(through_file(state))
    others.append(emptied)
    everyone = [parent, *others]
    for seed in range(4, 7):
        randomise(parent.net, seed)
        for each in everyone:
            each.net.load_state_dict(parent.net.state_dict())
            each.net.cache = each.average[0].module.cache = parent.net.cache.clone()  # is in no state_dict
            each.average[0].update_parameters(each.net)
    for other in others:
        assert contents(other.average[0]) == contents(parent.average[0])


# ---- what a state_dict holds


@DTYPES
@pytest.mark.parametrize("way", [name for name in EVERY_WAY if name not in ("LAWA",)])
def test_the_keys_are_those_of_torch(way, dtype):
    averaged, model = averaged_net(dtype, **EVERY_WAY[way])
    theirs = torch_swa_utils.AveragedModel(model).state_dict()
    ours = averaged.state_dict()
    extra = ours.pop("_extra_state", None)
    assert list(ours) == list(theirs)
    assert (extra is None) == (averaged.state.memory == ())
    assert ours._metadata == theirs._metadata
    parameters = {f"module.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    for key, value in ours.items():
        assert value.dtype == (torch.float32 if key in parameters else theirs[key].dtype)
        assert not value.requires_grad


@DTYPES
def test_prefix_destination_and_keep_vars_work_as_in_torch(dtype):
    averaged, _ = averaged_net(dtype, rule=EMA(0.9))
    plain = averaged.state_dict()
    assert list(averaged.state_dict(prefix="a.b.")) == [f"a.b.{key}" for key in plain]
    destination = {"before": 1}
    assert averaged.state_dict(destination=destination, prefix="x.") is destination
    assert list(destination) == ["before", *(f"x.{key}" for key in plain)]
    for state in (averaged.state_dict(prefix="a.b."), destination, averaged.state_dict(keep_vars=True)):
        values = [bits(value) for value in state.values() if isinstance(value, torch.Tensor)]
        assert values == [bits(value) for value in plain.values()]
    kept = averaged.state_dict(keep_vars=True)
    if dtype == torch.float32:
        assert kept["module.scale"] is averaged.module.scale
    assert kept["n_averaged"] is averaged.n_averaged
    with pytest.warns(FutureWarning, match="Positional args are being deprecated"):
        positional = averaged.state_dict({}, "p.", False)
    assert list(positional) == [f"p.{key}" for key in plain]
    assert bits(positional["p.module.scale"]) == bits(plain["module.scale"])


def test_the_memory_of_a_rule_has_the_names_of_a_functional_state_dict():
    rule = Several({"a": SWA(), "b": LAWA(2)})
    averaged, _ = averaged_net(torch.bfloat16, rule=rule)
    extra = averaged.get_extra_state()
    assert extra.pop("module") == "average.a"
    assert extra.pop("rules") == {"memory": repr(rule), "memory.b.memory": "LAWA(window=2)"}
    whole = functavg.to_state_dict(averaged.state)
    assert set(extra) == {name for name in whole if name != "count" and not name.startswith("average.a.")}
    assert all(bits(value) == bits(whole[name]) for name, value in extra.items() if isinstance(value, torch.Tensor))
    assert {type(value) for value in extra.values()} == {torch.Tensor, int}
    assert all(value.dtype == torch.float32 for value in extra.values() if isinstance(value, torch.Tensor))
    assert AveragedModel(scalar()).get_extra_state() is None


def test_a_state_dict_of_an_average_is_not_aliased_by_what_was_loaded():
    averaged, model = averaged_net(torch.bfloat16, rule=Several({"a": SWA(), "b": LAWA(2)}))
    saved = through_file(averaged.state_dict())
    before = {key: bits(value) for key, value in saved.items() if isinstance(value, torch.Tensor)}
    memory = {key: bits(value) for key, value in saved["_extra_state"].items() if isinstance(value, torch.Tensor)}
    averaged.load_state_dict(saved)
    train(averaged, model, range(3))
    assert {key: bits(value) for key, value in saved.items() if isinstance(value, torch.Tensor)} == before
    extra = saved["_extra_state"]
    assert {key: bits(value) for key, value in extra.items() if isinstance(value, torch.Tensor)} == memory


def test_hooks_of_users_may_rename_keys():
    """What is saved and loaded under other names is the float32 average all the same."""

    def rename(module, state, prefix, metadata):
        for key in list(state):
            state[f"ema.{key}"] = state.pop(key)

    def restore(module, state, prefix, *args):
        for key in list(state):
            state[key.removeprefix("ema.")] = state.pop(key)

    averaged, model = averaged_net(torch.bfloat16, rule=EMA(0.9))
    before = contents(averaged)
    averaged.register_state_dict_post_hook(rename)
    averaged.register_load_state_dict_pre_hook(restore)
    state = through_file(averaged.state_dict())
    assert set(state) == {f"ema.{key}" for key in AveragedModel(model).state_dict()}
    assert state["ema.module.scale"].dtype == torch.float32
    averaged.update_parameters(model)
    averaged.load_state_dict(state)
    assert contents(averaged) == before


def test_a_distributed_checkpoint_holds_the_float32_average():
    averaged, model = averaged_net(torch.bfloat16, rule=Several({"a": EMA(0.9), "b": LAWA(2)}))
    state = get_model_state_dict(averaged)
    assert state["module.scale"].dtype == torch.float32
    other = AveragedModel(Net().bfloat16(), rule=averaged.rule)
    set_model_state_dict(other, state)
    train(averaged, model, range(4, 6))
    train(other, model, range(4, 6))
    assert contents(other) == contents(averaged)


def test_wrappers_inside_a_ready_module_do_not_hide_the_float32_average():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def make():
        return nn.Sequential(checkpoint_wrapper(scalar(1.0, torch.bfloat16)))

    model = make()
    averaged = AveragedModel(model, rule=EMA(0.999), module=make())
    averaged.update_parameters(model)
    fill(model, 2.0)
    averaged.update_parameters(model)
    state = through_file(averaged.state_dict())
    assert {key: value.dtype for key, value in state.items()} == {
        "n_averaged": torch.int64,
        "module.0.weight": torch.float32,
    }
    assert state["module.0.weight"].item() == pytest.approx(1.001)
    before = contents(averaged)
    averaged.update_parameters(model)
    averaged.load_state_dict(state)
    assert contents(averaged) == before


# ---- torch's state_dicts


def alike(ours, theirs, exact):
    assert ours.n_averaged.item() == theirs.n_averaged.item()
    mine = dict(ours.module.named_parameters(remove_duplicate=False))
    for name, parameter in theirs.module.named_parameters(remove_duplicate=False):
        if exact:
            assert bits(mine[name]) == bits(parameter), name
        else:
            torch.testing.assert_close(mine[name], parameter, rtol=1e-6, atol=1e-6)


TORCH_FUNCTIONS = {
    "get_ema_multi_avg_fn": "multi_avg_fn",
    "get_swa_multi_avg_fn": "multi_avg_fn",
    "get_ema_avg_fn": "avg_fn",
    "get_swa_avg_fn": "avg_fn",
}


@pytest.mark.parametrize(
    ("name", "use_buffers"),
    [
        (name, flag)
        for name in TORCH_FUNCTIONS
        for flag in (False, True)
        if (name, flag) != ("get_swa_multi_avg_fn", True)
    ],
)  # with the one left out, torch fails on integer buffers
def test_float32_state_dicts_load_both_ways_and_go_on_alike(name, use_buffers):
    model = Net()
    ours, theirs = (
        module.AveragedModel(model, use_buffers=use_buffers, **{TORCH_FUNCTIONS[name]: getattr(module, name)()})
        for module in (swa_utils, torch_swa_utils)
    )
    exact = name == "get_ema_multi_avg_fn"
    for seed in range(3):
        randomise(model, seed)
        ours.update_parameters(model)
        theirs.update_parameters(model)
        alike(ours, theirs, exact)
    for strict in (True, False):
        ours_then, theirs_then = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
        assert not any(ours.load_state_dict(theirs_then, strict=strict))
        assert not any(theirs.load_state_dict(ours_then, strict=strict))
        for seed in range(3, 6):
            randomise(model, seed)
            ours.update_parameters(model)
            theirs.update_parameters(model)
            alike(ours, theirs, False)


def test_bfloat16_state_dicts_load_both_ways():
    """Torch gets the rounding of our average, and ours goes on from what torch's holds."""
    model = Net().bfloat16()
    ours = AveragedModel(model, multi_avg_fn=functavg.get_ema_multi_avg_fn(0.75))
    theirs = torch_swa_utils.AveragedModel(model, multi_avg_fn=torch_swa_utils.get_ema_multi_avg_fn(0.75))
    for seed in range(3):
        randomise(model, seed)
        ours.update_parameters(model)
        theirs.update_parameters(model)
    received = copy.deepcopy(theirs)
    received.load_state_dict(ours.state_dict())
    alike(ours, received, exact=True)
    ours.load_state_dict(theirs.state_dict())
    alike(ours, theirs, exact=True)
    fill(model, 1.0)
    before = {name: value.float() for name, value in theirs.module.state_dict().items()}
    for averaged in (ours, theirs, received):
        averaged.update_parameters(model)
    for name, value in ours.state.average.items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(theirs.module.get_parameter(name).float(), value, rtol=2**-7, atol=2**-7)


# ---- loading what is not quite right


@DTYPES
def test_a_checkpoint_without_a_count_is_an_average_of_one(dtype):
    model = scalar(0.0, dtype)
    averaged = AveragedModel(model, rule=EMA(0.9))
    state = averaged.state_dict()
    del state["n_averaged"]
    with pytest.warns(UserWarning, match="no n_averaged: its weights are taken for an average of count 1"):
        averaged.load_state_dict(state, strict=False)
    fill(model, 10.0)
    averaged.update_parameters(model)
    assert averaged.state.average["weight"].item() == pytest.approx(1.0)
    assert averaged.n_averaged.item() == 2


def test_a_checkpoint_without_a_count_in_a_parent_warns_with_its_name():
    parent = nn.ModuleDict({"ema": AveragedModel(scalar(3.0))})
    state = parent.state_dict()
    del state["ema.n_averaged"]
    with pytest.warns(UserWarning, match=r"no ema\.n_averaged"):
        parent.load_state_dict(state, strict=False)
    assert parent["ema"].n_averaged.item() == 1


def test_a_state_dict_of_other_things_leaves_the_count_without_a_warning():
    averaged, _ = averaged_net(torch.float32)
    with unchanged(averaged):
        averaged.load_state_dict({}, strict=False)
        averaged.load_state_dict({"optimizer": torch.ones(1)}, strict=False)


def test_missing_and_unexpected_keys_raise_as_in_torch():
    averaged, _ = averaged_net(torch.bfloat16)
    state = averaged.state_dict()
    state["module.unknown"] = state.pop("module.scale")
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"module.scale".*Unexpected key.*"module.unknown"'):
        averaged.load_state_dict(state)
    result = averaged.load_state_dict(state, strict=False)
    assert result.missing_keys == ["module.scale"]
    assert result.unexpected_keys == ["module.unknown"]


@DTYPES
def test_values_of_another_shape_raise_as_in_torch_and_are_not_kept(dtype):
    averaged, _ = averaged_net(dtype)
    state = averaged.state_dict()
    before = bits(averaged.state.average["inputs.bias"])
    state["module.inputs.bias"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"size mismatch for module\.inputs\.bias"):
        averaged.load_state_dict(state)
    assert bits(averaged.state.average["inputs.bias"]) == before


@pytest.mark.parametrize(
    "convert", [torch.Tensor.half, torch.Tensor.double, torch.Tensor.int], ids=["half", "double", "int"]
)
@pytest.mark.parametrize("assign", [False, True], ids=["", "assign"])
def test_the_count_stays_an_integer_whatever_is_loaded(convert, assign):
    averaged, model = averaged_net(torch.float32)
    state = averaged.state_dict()
    state["n_averaged"] = convert(state["n_averaged"])
    averaged.load_state_dict(state, assign=assign)
    assert (averaged.n_averaged.dtype, averaged.n_averaged.item()) == (torch.int64, 4)
    averaged.update_parameters(model)
    assert (averaged.n_averaged.dtype, averaged.n_averaged.item()) == (torch.int64, 5)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_of_any_precision_can_be_loaded(dtype, saved):
    model = scalar(0.0, dtype)
    averaged = AveragedModel(model, rule=EMA(0.75))
    value = torch.full((1, 1), 1.2345, dtype=saved)
    averaged.load_state_dict({"n_averaged": torch.tensor(5), "module.weight": value})
    assert averaged.state.average["weight"].dtype == torch.float32
    assert averaged.state.average["weight"].item() == value.float().item()
    averaged.update_parameters(model)
    assert averaged.state.average["weight"].item() == pytest.approx(0.75 * value.item(), rel=1e-6)


def test_loading_into_the_module_alone_is_an_edit_by_hand():
    averaged, model = averaged_net(torch.bfloat16, rule=EMA(0.75))
    averaged.module.load_state_dict({key: torch.zeros_like(value) for key, value in model.state_dict().items()})
    fill(model, 1.0)
    averaged.update_parameters(model)
    assert set(averaged.state.average["inputs.bias"].tolist()) == {0.25}


def test_loading_warns_of_nothing():
    averaged, _ = averaged_net(torch.bfloat16, rule=LAWA(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averaged.load_state_dict(averaged.state_dict())
