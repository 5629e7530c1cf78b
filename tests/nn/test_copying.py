"""An average starts from a copy of the model's tensors, and not of the world that hangs on them."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

from functavg import EMA, AveragedModel
from tests.nn.helpers import Net, all_values, bits, fill, parameters_of, quarter, randomise, scalar, tensors, unchanged


def quartered(model, **arguments):
    """Average zeros and then ones."""
    averaged = quarter(model, **arguments)
    averaged.update_parameters(model)
    return averaged


# ---- modules that resist


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("forward", [False, True], ids=["before a forward", "after a forward"])
@pytest.mark.parametrize(
    "make", [nn.utils.weight_norm, parametrizations.weight_norm], ids=["legacy", "parametrization"]
)
def test_weight_norm_is_averaged(make, forward):  # M1
    model = nn.Sequential(make(nn.Linear(2, 2)))
    if forward:
        model(torch.ones(1, 2)).sum().backward()
    averaged = quartered(model)
    assert all_values(averaged) == {0.25}
    averaged(torch.ones(1, 2)).sum().backward()
    averaged.update_parameters(model)


def test_pruned_layers_are_averaged_and_stay_pruned():
    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    model(torch.ones(1, 4)).sum().backward()
    averaged = quartered(model)
    assert all_values(averaged) == {0.25}
    averaged(torch.ones(1, 4))
    assert torch.equal(averaged.module[0].weight, 0.25 * model[0].weight_mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recurrent_layers_compute_with_the_average(dtype):
    """They hold their weights in a list beside their parameters, too."""
    model, wanted = (nn.LSTM(2, 3, num_layers=2, dtype=dtype) for _ in range(2))
    averaged = quartered(model)
    fill(wanted, 0.25)
    batch = torch.randn(4, 1, 2, dtype=dtype)
    assert torch.equal(averaged(batch)[0], wanted(batch)[0])
    averaged.load_state_dict(averaged.double().state_dict(), assign=True)
    fill(model, 0.25)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged(batch.double())[0], wanted.double()(batch.double())[0])


def test_a_model_without_parameters_counts_all_the_same():
    averaged = AveragedModel(nn.ReLU())
    for _ in range(2):
        averaged.update_parameters(nn.ReLU())
    averaged.half().load_state_dict(averaged.state_dict())
    assert (averaged.n_averaged.item(), averaged.state.average) == (2, {})


class Caching(nn.Module):
    """Keeps the output of its last forward, as a tensor and within containers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.last = None

    def forward(self, x):
        self.last = self.layer(x)
        self.history = {"all": [self.last, self.last * 2]}
        return self.last


def test_cached_activations_are_copied_without_their_graph():  # M2
    model = nn.Sequential(Caching())
    model(torch.ones(1, 2))
    averaged = AveragedModel(model, rule=EMA(0.75))
    cached = averaged.module[0].last
    assert torch.equal(cached, model[0].last)
    assert cached.grad_fn is None
    assert averaged.module[0].history["all"][0] is cached
    assert model[0].last.grad_fn is not None
    assert all_values(quartered(model)) == {0.25}


@pytest.mark.parametrize("with_gradients", [True, False])
def test_gradients_stay_behind(with_gradients):  # M3
    model = Net()
    model.cache.requires_grad_()
    if with_gradients:
        (model(torch.randn(4, 3)).sum() + model.cache.sum()).backward()
    averaged = AveragedModel(model)
    assert all(tensor.grad is None for tensor in tensors(averaged.module).values())
    assert averaged.module.cache.requires_grad
    assert averaged.module.hidden[1].weight is averaged.module.inputs.weight
    assert (model.inputs.weight.grad is not None) == with_gradients


def test_frozen_parameters_stay_frozen_and_are_averaged():
    model = Net()
    model.inputs.requires_grad_(False)
    averaged = quartered(model)
    assert not averaged.module.inputs.weight.requires_grad
    assert averaged.module.scale.requires_grad
    assert all_values(averaged) == {0.25}


def test_expanded_buffers_are_given_memory():
    model = scalar()
    model.register_buffer("mask", torch.zeros(1).expand(4, 3))
    averaged = quartered(model, use_buffers=True)
    model.mask = torch.ones(4, 3)
    averaged.update_parameters(model)
    assert averaged.module.mask.tolist() == [[0.25] * 3] * 4


def test_memory_formats_and_modes_are_kept():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)
    model[1].eval()
    averaged = quartered(model)
    assert averaged.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert [module.training for module in averaged.module] == [True, False]


def test_hooks_and_attributes_come_along():
    model = scalar(2.0)
    model.config = {"name": ["x"]}
    model.register_forward_hook(double)
    averaged = AveragedModel(model)
    assert averaged(torch.ones(1, 1)).item() == 4.0
    assert averaged.module.config == model.config
    assert averaged.module.config["name"] is not model.config["name"]


def double(module, args, output):
    """A forward hook."""
    return 2 * output


class Locked(nn.Module):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.lock = threading.Lock()


def test_what_resists_is_named():
    model = nn.ModuleDict({"a": scalar(), "b": nn.Sequential(nn.ReLU(), Locked())})
    with pytest.raises(TypeError, match=r"cannot copy b\.1 \(Locked\): .*lock.*module="):
        AveragedModel(model)
    with pytest.raises(TypeError, match=r"cannot copy the model \(Locked\): .*Give it a __deepcopy__"):
        AveragedModel(Locked())


def test_what_only_the_whole_resists_is_said_of_the_model():
    class Whole(nn.Module):
        tries = 0

        def __deepcopy__(self, memo):
            Whole.tries += 1
            if Whole.tries == 1:
                raise RuntimeError("once")
            return scalar()

    with pytest.raises(TypeError, match=r"cannot copy the model \(Whole\): once"):
        AveragedModel(Whole())


def test_lazy_parameters_are_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(TypeError, match=r"0\.weight is an uninitialised \(lazy\) parameter; run one forward pass"):
        AveragedModel(model)
    model(torch.ones(1, 3))
    assert all_values(quartered(model)) == {0.25}


def test_lazy_buffers_are_refused_by_name():
    with pytest.raises(TypeError, match="running_mean is an uninitialised"):
        AveragedModel(nn.LazyBatchNorm1d(affine=False))


def test_the_model_is_left_as_it_is():
    model = Net()
    model(torch.randn(4, 3)).sum().backward()
    objects = {name: id(tensor) for name, tensor in tensors(model).items()}
    with unchanged(model):
        AveragedModel(model, use_buffers=True, dtype=torch.float64)
        AveragedModel(model, device="meta")
    assert {name: id(tensor) for name, tensor in tensors(model).items()} == objects
    assert model.inputs.weight.grad is not None


def test_an_average_does_not_keep_its_model_alive():
    model = Net()
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    reference = weakref.ref(model)
    del model
    assert reference() is None


# ---- module=


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use_buffers", [False, True])
def test_a_ready_module_is_overwritten_and_used(dtype, use_buffers):
    model, ready = Net().to(dtype), Net().to(dtype)
    randomise(model, 0)
    randomise(ready, 1)
    averaged = AveragedModel(model, rule=EMA(0.75), use_buffers=use_buffers, module=ready)
    assert averaged.module is ready
    assert parameters_of(ready) == parameters_of(model)
    other = AveragedModel(model, rule=EMA(0.75), use_buffers=use_buffers)
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
        other.update_parameters(model)
    assert parameters_of(averaged) == parameters_of(other)


def test_a_model_that_resists_is_averaged_with_a_ready_module():
    model = Locked()
    averaged = quartered(model, module=Locked())
    assert all_values(averaged) == {0.25}


def test_a_ready_module_may_be_in_another_precision():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, module=scalar(0.0, torch.float32), rule=EMA(0.999))
    averaged.update_parameters(model)
    fill(model, 2.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == pytest.approx(1.001)


def test_a_ready_module_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="the model has no tensors named bias; it has weight"):
        AveragedModel(nn.Linear(1, 1), module=scalar())
    with pytest.raises(ValueError, match=r"weight.*expected shape \(1, 1\), got \(2, 2\)"):
        AveragedModel(nn.Linear(2, 2, bias=False), module=scalar())


def test_a_ready_module_that_shares_memory_with_the_model_is_refused():
    """Such an average would be the model, and every update would move the training weights."""
    model = Net()
    for ready in (model, copy.copy(model)):
        with unchanged(model), pytest.raises(ValueError, match=r"module= shares .* with the model"):
            AveragedModel(model, module=ready)


# ---- dtype=


@pytest.mark.parametrize("name", [False, True], ids=["torch.dtype", "name"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_may_be_held_in_more(dtype, name):
    model = scalar(1.0, dtype)
    averaged = AveragedModel(model, rule=EMA(1 - 1e-12), dtype="float64" if name else torch.float64)
    averaged.update_parameters(model)
    fill(model, 2.0)
    averaged.update_parameters(model)
    assert averaged.state.average["weight"].dtype == torch.float64
    assert averaged.state.average["weight"].item() == pytest.approx(1 + 1e-12, rel=1e-15)
    assert averaged.module.weight.dtype == dtype
    assert averaged.state_dict()["module.weight"].dtype == torch.float64
    other = AveragedModel(model, rule=EMA(1 - 1e-12), dtype=torch.float64)
    other.load_state_dict(averaged.state_dict())
    assert bits(other.state.average["weight"]) == bits(averaged.state.average["weight"])


def test_an_average_of_bfloat16_may_opt_out_of_float32():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, rule=EMA(0.9999), dtype=torch.bfloat16)
    for value in (1.0, 2.0):
        fill(model, value)
        averaged.update_parameters(model)
    assert averaged.state.average["weight"].dtype == torch.bfloat16
    assert averaged.state_dict()["module.weight"].dtype == torch.bfloat16
    assert averaged.module.weight.item() == 1.0  # which is why float32 is the default


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_an_average_may_be_held_in_less(narrow):
    model = Net().double()
    averaged = AveragedModel(model, rule=EMA(0.75), dtype=narrow)
    assert averaged.module.hidden[1].weight is averaged.module.inputs.weight
    for value in (0.0, 1.0):
        fill(model, value)
        averaged.update_parameters(model)
    assert {parameter.dtype for parameter in averaged.module.parameters()} == {narrow}
    assert averaged.module.ids.dtype == torch.int64
    assert all_values(averaged) == {0.25}
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.float64, torch.int64}


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (torch.int32, ValueError, "dtype must be real or complex floating of at least 16 bits, got int32"),
        (torch.float8_e4m3fn, ValueError, "at least 16 bits, got float8_e4m3fn"),
        ("float17", ValueError, "dtype must be one that torch has, got float17"),
        ("ema", TypeError, "dtype must be a dtype.*got 'ema'"),
        (3.5, TypeError, "dtype must be a dtype.*got 3.5"),
    ],
)
def test_a_dtype_must_be_able_to_hold_an_average(dtype, error, message):
    with pytest.raises(error, match=message):
        AveragedModel(scalar(), dtype=dtype)


class Made(TorchDispatchMode):
    """Collects the devices of new memory."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.devices.append(result.device.type)
        return result


def test_a_copy_for_another_device_makes_no_stop_on_that_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.ones(2, 2)).sum().backward()
    with Made() as made:
        averaged = AveragedModel(model, device="meta")
    assert {tensor.device.type for tensor in tensors(averaged).values()} == {"meta"}
    assert made.devices == ["meta"] * 7
    assert all(isinstance(parameter, nn.Parameter) for parameter in averaged.module.parameters())
    assert [parameter.requires_grad for parameter in averaged.module.parameters()] == [True] * 4
