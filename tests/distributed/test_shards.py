"""Averages of DTensors and of FSDP2 models, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import functavg
from functavg import AveragedModel
from tests.distributed.processes import Net, everywhere, sharded, spawn
from tests.distributed.two_processes import compare
from tests.nn.helpers import alone


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    with alone():
        yield everywhere()


def set_all(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_two_processes_average_to_the_bits_of_one(tmp_path: Path) -> None:
    spawn(compare, 2, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_twin_averages_shard_by_shard(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    plain = Net().to(dtype)
    model = sharded(plain, mesh)
    averaged = AveragedModel(model, module=sharded(plain, mesh), rule=functavg.EMA(0.75))
    for value in (0.0, 1.0):
        set_all(model, value)
        averaged.update_parameters(model)
    for value in averaged.state.average.values():
        assert isinstance(value, DTensor)
        assert value.dtype == torch.float32
        assert torch.equal(value.full_tensor(), torch.full_like(value.full_tensor(), 0.25))


def test_a_forward_before_the_update_does_not_hide_the_training_weights(mesh: DeviceMesh) -> None:
    """A root group that a no-grad forward left unsharded would be averaged, swapped and trained in its place."""
    plain = Net()
    model = sharded(plain, mesh)
    averaged = AveragedModel(model, module=sharded(plain, mesh), rule=functavg.EMA(0.5))
    x = torch.ones(2, 4)
    for value in (0.0, 1.0):
        set_all(model, value)
        with torch.no_grad():
            model(x)
        averaged.update_parameters(model)
    expected = model(x)
    with functavg.swapped(model, averaged), torch.no_grad():
        assert not torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


def after_forward(model: nn.Module) -> nn.Module:
    """Return a model right after a forward that left its root group unsharded."""
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def test_everything_reads_shards_right_after_a_forward(mesh: DeviceMesh) -> None:
    """Construction, updates, swaps, copy_to, states and checkpoints reshard the model and the average first."""
    model, twin = sharded(Net(), mesh), sharded(Net(), mesh)
    averaged = AveragedModel(after_forward(model), module=after_forward(twin), rule=functavg.EMA(0.5))
    for mine, theirs in zip(averaged.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    for value in (0.0, 1.0):
        set_all(model, value)
        after_forward(averaged.module)
        averaged.update_parameters(after_forward(model))
    after_forward(averaged.module)
    with functavg.swapped(after_forward(model), averaged):
        assert model.scale.full_tensor().tolist() == [0.5] * 3
    after_forward(averaged.module)
    assert all(isinstance(value, DTensor) for value in averaged.state.average.values())
    after_forward(averaged.module)
    averaged.load_state_dict(averaged.state_dict())
    after_forward(averaged.module)
    averaged.copy_to(after_forward(model))
    assert model.scale.full_tensor().tolist() == [0.5] * 3


def test_parameters_read_right_after_a_forward_are_told_to_be_resharded(mesh: DeviceMesh) -> None:
    """Functional rules, and a swap from a dict, see plain tensors where the average has shards, or the other way."""
    model = sharded(Net(), mesh)
    rule, shards = functavg.EMA(0.5), dict(model.named_parameters())
    state = rule.init(shards)
    whole = dict(after_forward(model).named_parameters())
    advice = r"\. Right after a forward FSDP2 modules hold plain tensors: call their reshard\(\) before"
    plain, sharp = "expected a DTensor, got a plain tensor", "expected a plain tensor, got a DTensor"
    with pytest.raises(TypeError, match=r"^tree\['scale'\]: " + plain + advice):
        rule.update(whole, state)
    with pytest.raises(TypeError, match=r"^tree\['scale'\]: " + sharp + advice):
        rule.update(shards, rule.init(whole))
    with pytest.raises(TypeError, match=plain + advice):
        functavg.lerp(shards, whole, 0.5, inplace=True)
    with pytest.raises(TypeError, match=plain + advice), functavg.swapped(model, whole):
        pass
    model.reshard()
    assert rule.update(dict(model.named_parameters()), state).count == 1


def test_a_sharded_model_is_told_to_bring_a_twin(mesh: DeviceMesh) -> None:
    with pytest.raises(
        TypeError, match="fully_shard has sharded; pass a ready copy of the model, sharded alike, as module="
    ):
        AveragedModel(sharded(Net(), mesh))


def test_copy_to_fills_the_shards(mesh: DeviceMesh) -> None:
    model = sharded(Net(), mesh)
    averaged = AveragedModel(model, module=sharded(Net(), mesh), rule=functavg.EMA(0.5))
    averaged.update_parameters(model)
    set_all(model, 7.0)
    averaged.copy_to(model)
    for mine, theirs in zip(averaged.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [
        functavg.EMA(0.75),
        functavg.AvgFn(functavg.get_ema_avg_fn(0.75)),
        functavg.AvgFn(functavg.get_ema_multi_avg_fn(0.75), grouped=True),
        functavg.SkipNonFinite(functavg.Several({"ema": functavg.EMA(0.75)})),
        functavg.Partition({"ema": functavg.EMA(0.75)}, lambda name, leaf: "ema"),
    ],
)
def test_functional_rules_keep_the_layout_of_shards(
    mesh: DeviceMesh, rule: functavg.AveragingRule, dtype: torch.dtype, inplace: bool
) -> None:
    def params(value: float) -> dict[str, torch.Tensor]:
        return {
            "sharded": distribute_tensor(torch.full((3, 2), value, dtype=dtype), mesh, [Shard(0)]),
            "whole": distribute_tensor(torch.full((2,), value, dtype=dtype), mesh, [Replicate()]),
            "plain": torch.full((2,), value, dtype=dtype),
            "count": distribute_tensor(torch.full((2,), int(value)), mesh, [Replicate()]),
        }

    state = rule.init(params(0.0))
    for value in (0.0, 1.0):
        state = rule.update(params(value), state, inplace=inplace)
    average = state.average.get("ema", state.average)
    assert average["sharded"].placements == (Shard(0),)
    assert average["sharded"].dtype == torch.float32
    for name in ("sharded", "whole"):
        assert torch.equal(average[name].full_tensor(), torch.full_like(average[name].full_tensor(), 0.25))
    assert average["plain"].tolist() == [0.25, 0.25]
    assert average["count"].full_tensor().tolist() == [1, 1]


@pytest.mark.parametrize("inplace", [True, False])
def test_shards_together_are_averaged_as_one_by_one(
    mesh: DeviceMesh, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks and steps of whole lists against those of each leaf, over dtypes, placements and several averages."""
    kinds = [
        (torch.float32, Shard(0)),
        (torch.float32, Replicate()),
        (torch.bfloat16, Shard(1)),
        (torch.int64, Shard(0)),
    ]
    rule = functavg.Several({"ema": functavg.EMA(0.9), "lawa": functavg.LAWA(2)})

    def averages() -> list[DTensor]:
        torch.manual_seed(0)
        params = [distribute_tensor((9 * torch.randn(3, 2)).to(dtype), mesh, [placement]) for dtype, placement in kinds]
        state = rule.init(params)
        for _ in range(3):
            state = rule.update(params, state, inplace=inplace)
            params = [parameter + 1 for parameter in params]
        return state.average["ema"] + state.average["lawa"]

    together = averages()
    monkeypatch.setattr("functavg.kernels.torch.dtensor._are_alike", lambda lists, indices: False)
    for one, other, (_, placement) in zip(together, averages(), kinds * 2, strict=True):
        assert one.placements == (placement,)
        assert one.dtype == other.dtype
        assert torch.equal(one.to_local(), other.to_local())


@pytest.mark.parametrize("count", [1, torch.tensor(1)], ids=["host", "device"])
def test_an_update_in_place_keeps_the_shards(mesh: DeviceMesh, count: Any) -> None:
    params = [distribute_tensor(torch.ones(4), mesh, [Shard(0)])]
    rule = functavg.EMA(0.5)
    state = rule.update(params, rule.init(params))._replace(count=count)
    shard = state.average[0]
    memory = shard.to_local().data_ptr()
    after = rule.update(params, state, inplace=True).average[0]
    assert after is shard
    assert after.to_local().data_ptr() == memory


def test_a_count_on_the_device_averages_shards_too(mesh: DeviceMesh) -> None:
    rule = functavg.EMA(0.75)
    state = rule.init([distribute_tensor(torch.zeros(4), mesh, [Shard(0)])])._replace(count=torch.tensor(0))
    for value in (0.0, 1.0):
        state = rule.update([distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])], state)
    assert state.average[0].full_tensor().tolist() == [0.25] * 4


def test_one_nan_in_a_shard_skips_the_update(mesh: DeviceMesh) -> None:
    rule = functavg.SkipNonFinite(functavg.SWA())
    state = rule.init([distribute_tensor(torch.zeros(4), mesh, [Shard(0)])])
    for value in (1.0, float("nan")):
        state = rule.update([distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])], state)
    assert state.count == 1
    assert state.average[0].full_tensor().tolist() == [1.0] * 4


def test_a_plain_tensor_against_shards_is_refused_both_ways(mesh: DeviceMesh) -> None:
    rule = functavg.SWA()
    shards, plain = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}, {"w": torch.zeros(4)}
    with pytest.raises(TypeError, match=r"tree\['w'\]: expected a DTensor, got a plain tensor"):
        rule.update(plain, rule.init(shards))
    with pytest.raises(TypeError, match=r"tree\['w'\]: expected a plain tensor, got a DTensor"):
        rule.update(shards, rule.init(plain))


def test_an_average_that_is_not_sharded_says_so(mesh: DeviceMesh) -> None:
    plain = Net()
    with pytest.raises(TypeError, match=r"tree\['[\w.]+'\]: expected a plain tensor, got a DTensor.*module="):
        AveragedModel(plain).update_parameters(sharded(plain, mesh))


def test_other_placements_and_meshes_are_refused(mesh: DeviceMesh) -> None:
    rule = functavg.SWA()
    state = rule.init([distribute_tensor(torch.zeros(4), mesh, [Shard(0)])])
    with pytest.raises(ValueError, match=r"tree\[0\]: expected the placements .*Shard.*got .*Replicate"):
        rule.update([distribute_tensor(torch.zeros(4), mesh, [Replicate()])], state)
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"tree\[0\]: expected shards on .*, got "):
        rule.update([distribute_tensor(torch.zeros(4), other, [Shard(0), Replicate()])], state)
    with pytest.raises(ValueError, match=r"tree\[0\]: expected shape \(4,\), got \(5,\)"):
        rule.update([distribute_tensor(torch.zeros(5), mesh, [Shard(0)])], state)


def test_an_update_of_shards_calls_no_collective(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    params = [distribute_tensor(torch.zeros(4), mesh, [Shard(0)])]
    rule = functavg.EMA(0.9)
    state = rule.update(params, rule.init(params))
    with CommDebugMode() as counted:
        state = rule.update(params, state, inplace=True)
        rule.update(params, state)
    assert counted.get_total_counts() == 0


def test_what_skips_asks_the_ranks_once_an_update_whatever_does_not_fit(mesh: DeviceMesh) -> None:
    """A buffer that was resized on one rank alone must not make it ask once more than the others."""
    from torch.distributed.tensor.debug import CommDebugMode

    def model() -> nn.Module:
        made = nn.Module()
        made.weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        made.register_buffer("cache", torch.zeros(2))
        return made

    trained = model()
    averaged = AveragedModel(trained, module=model(), rule=functavg.SkipNonFinite(functavg.SWA()))
    averaged.update_parameters(trained)
    for misfit in (torch.zeros(3), torch.eye(3).to_sparse(), None):
        trained.cache = misfit
        with CommDebugMode() as counted:
            averaged.update_parameters(trained)
        assert counted.get_total_counts() == 1
    trained.weight = nn.Parameter(distribute_tensor(torch.zeros(5), mesh, [Shard(0)]))
    with CommDebugMode() as counted, pytest.raises(ValueError, match=r"expected shape \(4,\), got \(5,\)"):
        averaged.update_parameters(trained)
    assert counted.get_total_counts() == 1
