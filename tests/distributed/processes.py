"""Work that several gloo processes do together, and models that are the same in any number of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

PATIENCE = timedelta(seconds=120)
"""How long a process waits for another one before it fails."""


class Net(nn.Module):
    """A parameter in the root group and one in a group of its own; neither divides by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Sequential(nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def spawn(work: Callable[..., None], world: int, folder: Path, *args: Any) -> None:
    """Run ``work(*args)`` in processes of one group; what one of them raises is raised here."""
    store = folder / f"{work.__name__}-{world}"
    mp.spawn(_run, args=(work, world, f"file://{store}", args), nprocs=world)


def _run(rank: int, work: Callable[..., None], world: int, store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=PATIENCE)
    work(*args)
    dist.barrier()
    dist.destroy_process_group()


def everywhere() -> DeviceMesh:
    """Return a mesh of all processes."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy of a Net that is sharded in two groups."""
    model = copy.deepcopy(model)
    fully_shard(model.second, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Give the parameters new values, the same ones however they are sharded."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        new = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.copy_(shards_of(new, parameter) if isinstance(parameter, DTensor) else new)


def shards_of(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Return a tensor that every process has in the layout of a DTensor."""
    replicated = distribute_tensor(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
    return replicated.redistribute(placements=like.placements)


def whole(value: Any) -> Any:
    """Return a DTensor gathered; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two flat dicts of numbers and tensors, sharded or not, are equal to the bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        left, right = whole(value), whole(other[name])
        assert type(left) is type(right), name
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), name
        else:
            assert left == right, name
