"""FSDP2 models, here of one process: averaged shard by shard, and never left with the average in their full weights."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functavg
from functavg import EMA, AveragedModel, swapped
from functavg.combinators import Several
from functavg.rules.lawa import LAWA
from tests.nn.helpers import alone, fill
from tests.tables import ema_step

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
WAYS = {
    "EMA": {"rule": EMA(0.75)},
    "avg_fn": {"avg_fn": ema_step},
    "multi_avg_fn": {"multi_avg_fn": functavg.get_ema_multi_avg_fn(0.75)},
    "Several": {"rule": Several({"a": EMA(0.75), "b": LAWA(2)})},
}


@pytest.fixture(scope="module", autouse=True)
def group():
    with alone():
        yield


def plain(dtype=torch.float32):
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(dtype)


def sharded(dtype=torch.float32):
    """Return a model with parameters both in a group of their own and in the root's."""
    model = plain(dtype)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def values(model):
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {value for parameter in parameters for value in parameter.flatten().tolist()}


def averaged_pair(way, dtype):
    """Return a sharded model at 1 and its average, which has seen 0 and then 1, after forwards that gather."""
    model = sharded(dtype)
    averaged = AveragedModel(model, module=sharded(dtype), use_buffers=True, **WAYS[way])
    for value in (0.0, 1.0):
        fill(model, value)
        with torch.no_grad():
            model(torch.randn(4, 3, dtype=dtype))
        averaged.update_parameters(model)
    return model, averaged


@pytest.mark.parametrize("way", WAYS)
@DTYPES
def test_a_sharded_model_is_averaged_shard_by_shard(dtype, way):
    model, averaged = averaged_pair(way, dtype)
    assert all(isinstance(parameter, DTensor) for parameter in averaged.module.parameters())
    assert values(averaged.module) == {0.25}
    state = averaged.state_dict()
    assert state["module.2.weight"].dtype == torch.float32
    other = AveragedModel(model, module=sharded(dtype), use_buffers=True, **WAYS[way])
    other.load_state_dict(state)
    for each in (averaged, other):
        each.update_parameters(model)
        assert values(each.module) == {0.4375}


@DTYPES
def test_training_goes_on_with_the_training_weights(dtype):
    model, averaged = averaged_pair("EMA", dtype)
    batch = torch.randn(4, 3, dtype=dtype)
    model.eval()
    with torch.no_grad():
        before = model(batch)
        averaged.update_parameters(model)
        assert torch.equal(model(batch), before)
        with swapped(model, averaged):
            assert not torch.equal(model(batch), before)
        assert torch.equal(model(batch), before)
    output = model(batch)
    assert torch.equal(output, before)
    output.sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_copy_to_writes_the_shards():
    model, averaged = averaged_pair("EMA", torch.bfloat16)
    with torch.no_grad():
        model(torch.randn(4, 3, dtype=torch.bfloat16))
    averaged.copy_to(model)
    assert values(model) == {0.25}


def test_what_is_sharded_and_what_is_not_do_not_mix():
    whole, shards = AveragedModel(plain()), AveragedModel(sharded(), module=sharded())
    with pytest.raises(TypeError, match=r"0\.weight.*expected a plain tensor, got a DTensor.*module="):
        whole.update_parameters(sharded())
    with pytest.raises(TypeError, match=r"0\.weight.*expected a DTensor, got a plain tensor"):
        shards.update_parameters(plain())
    assert whole.n_averaged.item() == shards.n_averaged.item() == 0


def test_plain_tensors_are_averaged_where_no_class_of_sharded_ones_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    assert functavg.lerp({"w": torch.zeros(2)}, {"w": torch.ones(2)}, 0.5)["w"].tolist() == [0.5, 0.5]


def test_a_memory_of_whole_tensors_is_loaded_as_shards():
    """As a full state_dict holds it."""
    model, averaged = averaged_pair("Several", torch.float32)
    saved = averaged.state_dict()
    extra = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in saved["_extra_state"].items()
    }
    assert any(isinstance(value, DTensor) for value in saved["_extra_state"].values())
    other = AveragedModel(model, module=sharded(), use_buffers=True, **WAYS["Several"])
    other.load_state_dict(saved | {"_extra_state": extra})
    for each in (averaged, other):
        each.update_parameters(model)
    for name, value in averaged.get_extra_state().items():
        if isinstance(value, DTensor):
            again = other.get_extra_state()[name]
            assert again.placements == value.placements
            assert torch.equal(again.full_tensor(), value.full_tensor())


def test_where_nothing_is_sharded_fsdp_need_not_be_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    model = plain()
    averaged = AveragedModel(model, rule=EMA(0.75), use_buffers=True)
    for value in (0.0, 1.0):
        fill(model, value)
        averaged.update_parameters(model)
    with swapped(model, averaged):
        assert values(model) == {0.25}
    assert "torch.distributed.fsdp" not in sys.modules


def test_a_sharded_model_without_a_ready_module_is_refused_with_advice():
    with pytest.raises(
        TypeError, match="fully_shard has sharded; pass a ready copy of the model, sharded alike, as module="
    ):
        AveragedModel(sharded())


def test_a_placeholder_of_a_parameter_that_an_engine_partitioned_away_is_refused():
    """As DeepSpeed leaves them; a parameter that has no elements is another matter."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("none", nn.Parameter(torch.empty(0, 2)))
    AveragedModel(model).update_parameters(model)
    model[0].weight.ds_shape, model[0].weight.data = model[0].weight.shape, torch.empty(0)
    with pytest.raises(TypeError, match=r"^0\.weight is a placeholder of size 0.*gather it first"):
        AveragedModel(model)
    with pytest.raises(TypeError, match=r"^tree\['0\.weight'\]: cannot average Parameter: a placeholder of size 0"):
        EMA().init(dict(model.named_parameters()))
