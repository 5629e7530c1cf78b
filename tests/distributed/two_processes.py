"""What two gloo processes do: train a sharded model and average it beside an unsharded one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import functavg
from functavg import AveragedModel
from functavg.nn import pairing


class Net(nn.Module):
    """A parameter in the root group and one in a group of its own; neither divides by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Sequential(nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def run(rank: int, world: int, folder: str) -> None:
    """Compare the sharded average with the unsharded one, bit for bit, counting collectives."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for dtype in (torch.float32, torch.bfloat16):
        for rule in (functavg.EMA(0.9), functavg.SkipNonFinite(functavg.SWA())):
            _compare(mesh, dtype, rule)
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


def _compare(mesh: dist.DeviceMesh, dtype: torch.dtype, rule: functavg.AveragingRule) -> None:
    torch.manual_seed(0)
    plain = Net().to(dtype)
    model, twin = copy.deepcopy(plain), copy.deepcopy(plain)
    for module in (model, twin):
        fully_shard(module.second, mesh=mesh)
        fully_shard(module, mesh=mesh)
    averaged = AveragedModel(model, module=twin, rule=rule)
    expected = AveragedModel(plain, rule=rule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(8, 4, dtype=dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)  # leaves the root group unsharded
        averaged.update_parameters(model)
        with torch.no_grad():
            for parameter, shard in zip(plain.parameters(), model.parameters(), strict=True):
                parameter.copy_(shard.full_tensor())
        expected.update_parameters(plain)
    for name, value in expected.state.average.items():
        assert torch.equal(averaged.state.average[name].full_tensor(), value), name
    training = [parameter.full_tensor() for parameter in model.parameters()]
    outputs = model(x)
    with functavg.swapped(model, averaged), torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert torch.equal(model(x), outputs)
    pairing.reshard(model)
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(training, model.parameters(), strict=True))
    _refuses_alike(averaged, plain)


def _refuses_alike(averaged: AveragedModel, plain: nn.Module) -> None:
    """Every rank must come to the same verdict, so that none waits for another."""
    before = [value.to_local().clone() for value in averaged.state.average.values()]
    with pytest.raises(TypeError, match="DTensor"):
        averaged.update_parameters(plain)
    after = [value.to_local() for value in averaged.state.average.values()]
    assert all(map(torch.equal, before, after))
