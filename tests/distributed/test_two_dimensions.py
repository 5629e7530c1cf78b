"""Meshes of two dimensions: replicas of shards, and shards that FSDP2 makes of those of tensor parallelism."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import functavg
from functavg import AveragedModel
from tests.distributed.processes import Net, assert_same, randomise, sharded, shards_of, spawn


def replicas_of_shards() -> None:
    """Four updates, one of them with a NaN that one shard alone holds, beside those of an unsharded model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rule = functavg.SkipNonFinite(functavg.EMA(0.5))
    for dtype in (torch.float32, torch.bfloat16):
        plain = Net().to(dtype)
        model = sharded(plain, mesh)
        averaged = AveragedModel(model, module=sharded(plain, mesh), rule=rule)
        expected = AveragedModel(plain, rule=rule)
        for seed in range(4):
            for each in (model, plain):
                randomise(each, seed)
            if seed == 2:
                with torch.no_grad():
                    plain.first.weight[4, 0] = torch.nan
                    model.first.weight.copy_(shards_of(plain.first.weight.detach(), model.first.weight))
            averaged.update_parameters(model)
            expected.update_parameters(plain)
        assert averaged.n_averaged == 3
        assert_same(functavg.to_state_dict(averaged.state), functavg.to_state_dict(expected.state))


def shards_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    rule = functavg.Several({"ema": functavg.EMA(0.5), "window": functavg.LAWA(2)})
    model = parallel(plain, mesh)
    averaged = AveragedModel(model, module=parallel(plain, mesh), rule=rule)
    expected = AveragedModel(plain, rule=rule)
    for seed in range(3):
        for each in (model, plain):
            randomise(each, seed)
        with CommDebugMode() as counted:
            averaged.update_parameters(model)
        assert counted.get_total_counts() == 0
        expected.update_parameters(plain)
    assert_same(functavg.to_state_dict(averaged.state), functavg.to_state_dict(expected.state))

    options = StateDictOptions(full_state_dict=True)
    resumed = AveragedModel(model, module=parallel(plain, mesh), rule=rule)
    set_model_state_dict(resumed, get_model_state_dict(averaged, options=options), options=options)
    assert_same(functavg.to_state_dict(resumed.state), functavg.to_state_dict(averaged.state))
    with functavg.swapped(model, averaged):
        assert_same(model.state_dict(), expected.module.state_dict())


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy with tensor parallelism, sharded by FSDP2 along the other dimension."""
    layers = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return fully_shard(parallelize_module(copy.deepcopy(model), mesh["tensor"], layers), mesh=mesh["data"])


def both() -> None:
    torch.manual_seed(0)
    replicas_of_shards()
    shards_of_shards()


def test_four_processes_average_to_the_bits_of_one(tmp_path: Path) -> None:
    spawn(both, 4, tmp_path)
