"""What does not fit is refused on every rank alike, by name, before anything is written or anybody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import functavg
from functavg import AveragedModel
from tests.distributed.processes import Net, everywhere, sharded, spawn

RULES = {
    "EMA": functavg.EMA(0.5),
    "LAWA": functavg.LAWA(2),
    "AvgFn-grouped": functavg.AvgFn(functavg.get_ema_multi_avg_fn(0.5), grouped=True),
    "SkipNonFinite": functavg.SkipNonFinite(functavg.SWA()),
    "Several": functavg.Several({"a": functavg.EMA(0.5), "b": functavg.SWA()}),
    "Partition": functavg.Partition({"a": functavg.EMA(0.5)}, lambda name, leaf: "a"),
}


def in_another_form(mesh: DeviceMesh) -> dict[str, tuple[Tensor, type[Exception], str]]:
    """Return tensors that do not fit one of (4, 2) that is sharded by its rows, and how each is refused."""
    whole, world = torch.zeros(4, 2), dist.get_world_size()
    square = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    return {
        "plain": (whole, TypeError, "expected a DTensor, got a plain tensor.*full_tensor"),
        "columns": (
            distribute_tensor(whole, mesh, [Shard(1)]),
            ValueError,
            r"expected the placements .*Shard\(dim=0\).*, got .*Shard\(dim=1\).*redistribute",
        ),
        "replicated": (
            distribute_tensor(whole, mesh, [Replicate()]),
            ValueError,
            "expected the placements .*Shard.*, got .*Replicate.*redistribute",
        ),
        "another mesh": (
            distribute_tensor(whole, square, [Replicate(), Shard(0)]),
            ValueError,
            "expected shards on DeviceMesh.*, got DeviceMesh",
        ),
        "fewer ranks": (
            distribute_tensor(whole, DeviceMesh("cpu", [0]), [Shard(0)]),
            ValueError,
            "expected shards on DeviceMesh.*, got DeviceMesh",
        ),
        "reshaped": (
            distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]),
            ValueError,
            r"expected shape \(4, 2\), got \(5, 2\); nothing is broadcast",
        ),
        "partitioned away": (
            distribute_tensor(torch.zeros(0), mesh, [Shard(0)]),
            ValueError,
            r"expected shape \(4, 2\), got \(0,\); a parameter of size 0 is one that an engine has partitioned away",
        ),
    }


def bits(tree: Any) -> list[Any]:
    """Return this rank's part of all that a tree holds."""
    leaves = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in torch.utils._pytree.tree_leaves(tree)]
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@contextmanager
def refused(error: type[Exception], message: str, *kept: Any) -> Iterator[None]:
    """Assert an error on this rank, and that nothing has changed."""
    before = bits(kept)
    with pytest.raises(error, match=message):
        yield
    assert bits(kept) == before


def functional() -> None:
    mesh = everywhere()
    fitting = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    params = {"first": fitting, "w": fitting.clone()}
    others = in_another_form(mesh).values()
    for rule in RULES.values():
        state = rule.update(params, rule.init(params))
        for other, error, message in others:
            for inplace in (True, False):
                with refused(error, rf"^tree\['w'\]: {message}", state):
                    rule.update({"first": fitting * 2, "w": other}, state, inplace=inplace)
        with refused(ValueError, r"missing tree\['w'\]", state):
            rule.update({"first": fitting}, state)
    state = functavg.SWA().init(params)
    for other, error, message in others:
        with refused(error, f"^average.w: {message}", state):
            functavg.from_state_dict(state, functavg.to_state_dict(state) | {"average.w": other})


def of_modules() -> None:
    """AveragedModel, swapped and copy_to, both ways: between sharded, differently sharded and whole models."""
    mesh = everywhere()
    plain = Net()
    models = {
        "sharded": sharded(plain, mesh),
        "replicated": sharded(plain, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))),
        "plain": plain,
    }
    for rule in (functavg.EMA(0.5), functavg.LAWA(2)):
        for name, model in models.items():
            averaged = AveragedModel(model, module=like(model), rule=rule)
            averaged.update_parameters(model)
            for other_name, other in models.items():
                if other_name != name:
                    _refuses(averaged, other, {name, other_name})
            averaged.update_parameters(model)
            assert averaged.n_averaged == 2


def _refuses(averaged: AveragedModel, model: nn.Module, names: set[str]) -> None:
    """Refuse the model to the average, and the average to the model."""
    error, forth, back = ValueError, *["expected shards on DeviceMesh.*, got DeviceMesh"] * 2
    if "plain" in names:
        error, kinds = TypeError, ["a DTensor", "a plain tensor"]
        forth, back = ("expected {}, got {}".format(*order) for order in (kinds, kinds[::-1]))
    if not isinstance(next(averaged.module.parameters()), DTensor):
        forth, back = back, forth
    kept = averaged.state_dict(), model.state_dict()
    with refused(error, rf"tree\['[\w.]+'\]: {forth}", *kept):
        averaged.update_parameters(model)
    with refused(error, rf"tree\['[\w.]+'\]: {back}", *kept):
        averaged.copy_to(model)
    with refused(error, rf"tree\['[\w.]+'\]: {back}", *kept), functavg.swapped(model, averaged):
        pytest.fail("swapped")
    with refused(error, rf"tree\['[\w.]+'\]: {forth}", *kept):
        AveragedModel(model, module=like(averaged.module))


def like(model: nn.Module) -> nn.Module:
    """Return a new Net that is sharded as another one."""
    parameter = next(model.parameters())
    return sharded(Net(), parameter.device_mesh) if isinstance(parameter, DTensor) else Net()


def test_functional_rules_refuse_on_every_rank(tmp_path: Path) -> None:
    spawn(functional, 2, tmp_path)


def test_modules_refuse_on_every_rank(tmp_path: Path) -> None:
    spawn(of_modules, 2, tmp_path)


@pytest.mark.parametrize("rule", [functavg.EMA(0.5), functavg.LAWA(2)])
def test_a_parameter_that_an_engine_has_partitioned_away_is_named_with_advice(rule: functavg.AveragingRule) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    averaged = AveragedModel(model, rule=rule)
    averaged.update_parameters(model)
    weight = model[0].weight.data
    model[0].weight.data = torch.empty(0)
    advice = "a parameter of size 0 is one that an engine has partitioned away, gather it first"
    before = bits(averaged.state_dict())
    with pytest.raises(ValueError, match=rf"0\.weight'\]: expected shape \(2, 2\), got \(0,\); {advice}"):
        averaged.update_parameters(model)
    for write in (averaged.copy_to, lambda model: functavg.swapped(model, averaged).__enter__()):
        with pytest.raises(ValueError, match=rf"0\.weight'\]: expected shape \(0,\), got \(2, 2\); {advice}"):
            write(model)
    assert bits(averaged.state_dict()) == before
    model[0].weight.data = weight
    averaged.update_parameters(model)
    assert averaged.n_averaged == 2
