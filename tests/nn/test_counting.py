"""The count off the CPU is read when it may have changed, and not otherwise."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functavg
from functavg import EMA, SWA, AveragedModel, PowerEMA, swapped
from tests.nn.helpers import EVERY_WAY, Net, contents, fill, parameters_of, randomise, scalar, tensors
from tests.tables import ramp


class Elsewhere(Tensor):
    """A 0-d tensor that says it is on an accelerator, and counts how often it is read."""

    reads = 0

    @property
    def device(self):
        return torch.device("cuda", 0)

    is_cpu = False

    def __deepcopy__(self, memo):
        return self.as_subclass(Tensor).clone().as_subclass(Elsewhere)

    def __int__(self):
        Elsewhere.reads += 1
        return int(self.as_subclass(Tensor))


class NoReads(TorchDispatchMode):
    """Raises where a number is read off a tensor: on an accelerator, the host would wait for it there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read off a tensor"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere():
    """An average whose count lies on an accelerator, as far as it can tell."""
    model = scalar(1.0)
    averaged = AveragedModel(model, rule=EMA(0.5))
    place(averaged, 0)
    return averaged, model


def place(averaged, count):
    averaged.n_averaged = torch.tensor(count).as_subclass(Elsewhere)
    Elsewhere.reads = 0


def test_reading_a_count_is_noticed():
    with pytest.raises(AssertionError, match="a number was read"), NoReads():
        torch.ones(()).item()
    place(AveragedModel(scalar()), 0)
    int(torch.ones(()).as_subclass(Elsewhere))
    assert Elsewhere.reads == 1


def test_a_count_elsewhere_is_read_by_the_first_update_alone(elsewhere):
    averaged, model = elsewhere
    averaged.update_parameters(model)
    assert Elsewhere.reads == 1
    with NoReads():
        for _ in range(5):
            averaged.update_parameters(model)
            assert averaged.state.count
            with swapped(model, averaged):
                pass
            averaged.copy_to(model)
    assert Elsewhere.reads == 1
    assert int(averaged.n_averaged) == 6


@pytest.mark.parametrize("way", [name for name in EVERY_WAY if name != "SkipNonFinite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rule_reads_a_number_in_an_update(dtype, way):
    model = Net().to(dtype)
    averaged = AveragedModel(model, use_buffers=True, **EVERY_WAY[way])
    place(averaged, 0)
    averaged.update_parameters(model)
    with NoReads():
        for steps in (1, 2, 1):
            averaged.update_parameters(model, steps=steps)
    assert Elsewhere.reads == 1


CHANGES = {
    "fill_": lambda averaged: averaged.n_averaged.fill_(7),
    "add_": lambda averaged: averaged.n_averaged.add_(6),
    "assignment": lambda averaged: place(averaged, 7),
    "load_state_dict": lambda averaged: averaged.load_state_dict(
        averaged.state_dict() | {"n_averaged": torch.tensor(7)}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_count_that_changed_is_read_anew(elsewhere, change):
    averaged, model = elsewhere
    averaged.update_parameters(model)
    Elsewhere.reads = 0
    CHANGES[change](averaged)
    assert averaged.state.count == 7
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert Elsewhere.reads == 1
    assert int(averaged.n_averaged) == 9


@pytest.mark.parametrize("where", ["cpu", "elsewhere"])
def test_a_copy_reads_its_own_count(where):
    averaged = AveragedModel(scalar())
    if where == "elsewhere":
        place(averaged, 0)
    averaged.update_parameters(scalar())
    other = copy.deepcopy(averaged)
    other.n_averaged.fill_(5)
    averaged.n_averaged.fill_(3)
    assert (other.state.count, averaged.state.count) == (5, 3)


def test_a_count_on_the_cpu_is_read_at_every_update():
    """What collectives and ``.data`` write there bumps no version, and still is seen."""
    model = scalar(1.0)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    averaged.n_averaged.data.fill_(3)
    fill(model, 5.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == 2.0


# ---- meta


@pytest.mark.parametrize("rule", [EMA(), SWA(), EMA(debias=True), PowerEMA(6.94), EMA(ramp)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_run_on_a_model_on_meta(dtype, rule):
    with torch.device("meta"):
        model = Net().to(dtype)
        averaged = AveragedModel(model, rule=rule, use_buffers=True)
    assert averaged.n_averaged.is_meta
    for count in (1, 2):
        with NoReads():
            averaged.update_parameters(model)
        assert averaged.state.count == count
    assert all(tensor.is_meta for tensor in tensors(averaged).values())


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_is_that_of_the_average_and_its_count(device):
    model = Net()
    averaged = AveragedModel(model, device, rule=EMA(0.9))
    assert {tensor.device.type for tensor in tensors(averaged).values()} == {"meta"}
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert averaged.state.count == 2
    assert {tensor.device.type for tensor in tensors(model).values()} == {"cpu"}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_a_device_may_be_given_in_every_form(device):
    averaged = AveragedModel(Net(), device=device)
    assert {tensor.device.type for tensor in tensors(averaged).values()} == {"cpu"}


def test_the_host_keeps_the_count_of_an_average_that_goes_to_meta():
    averaged = AveragedModel(scalar())
    averaged.load_state_dict(averaged.state_dict() | {"n_averaged": torch.tensor(7)})
    averaged.to("meta")  # nothing has read the count since
    assert averaged.state.count == 7
    assert copy.deepcopy(averaged).state.count == 7
    parent = nn.ModuleList([averaged]).to_empty(device="cpu")
    assert (parent[0].n_averaged.item(), parent[0].n_averaged.dtype) == (7, torch.int64)


def test_an_average_on_the_cpu_follows_a_model_on_another_device_only_if_it_has_values():
    averaged = AveragedModel(scalar())
    with pytest.raises(TypeError, match=r"^tree\['weight'\]: expected a tensor with values, got one on the meta"):
        averaged.update_parameters(scalar().to("meta"))


# ---- memory


class Allocations(TorchDispatchMode):
    """Remembers the size of the largest new memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def test_allocations_are_noticed():
    with Allocations() as allocations:
        torch.ones(1000).add_(1).view(-1)
        assert allocations.largest == 4000
        torch.ones(1000).double()
    assert allocations.largest == 8000


@pytest.mark.parametrize("name", ["rule", "multi_avg_fn"])
def test_an_update_of_low_precision_makes_no_temporary_of_the_size_of_the_model(name):
    argument = EMA(0.9) if name == "rule" else functavg.get_ema_multi_avg_fn(0.9)
    model = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)  # 8 MiB in bfloat16
    averaged = AveragedModel(model, **{name: argument})
    averaged.update_parameters(model)
    with Allocations() as allocations:
        for _ in range(2):
            averaged.update_parameters(model)
    assert allocations.largest <= 4 * 2**20


# ---- where it starts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_default_device_of_meta_changes_nothing_for_a_model_with_values(way, dtype):
    """Construction, updates, copies, checkpoints, swaps and refreshed statistics are those of the CPU."""

    def average(place):
        model = Net().to(dtype)
        randomise(model, 9)
        data = [torch.linspace(-1, 1, 12).reshape(4, 3).to(dtype)]
        with place:
            averaged = AveragedModel(model, use_buffers=True, **EVERY_WAY[way])
            for seed in range(4):
                with torch.device("cpu"):
                    randomise(model, seed)
                averaged.update_parameters(copy.deepcopy(model))
            again = AveragedModel(model, use_buffers=True, **EVERY_WAY[way])
            again.load_state_dict(copy.deepcopy(averaged).state_dict())
            again.update_parameters(model)
            with functavg.swapped(model, again):
                functavg.update_bn(data, model)
                inside = parameters_of(model)
        return inside, contents(again)

    assert average(contextlib.nullcontext()) == average(torch.device("meta"))


def test_a_set_default_device_leaves_the_count_on_the_cpu():
    model = scalar()
    torch.set_default_device("meta")
    try:
        averaged = AveragedModel(model)
    finally:
        torch.set_default_device(None)
    assert averaged.n_averaged.device.type == "cpu"
    averaged.update_parameters(model)
    assert averaged.n_averaged.item() == 1
