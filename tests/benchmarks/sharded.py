"""Shards: the update of DTensors beside that of the tensors that they hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import functavg
from tests.benchmarks.contenders import DECAY, functional
from tests.benchmarks.measure import Work


def of_shards(count: int = 100, size: int = 64) -> dict[str, Work]:
    """Return the updates of square DTensors on a mesh of this process alone, and of their local tensors."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    sharded = {
        f"layer{index}.weight": distribute_tensor(torch.randn(size, size), mesh, [Shard(0)]) for index in range(count)
    }
    local = {name: shards.to_local().clone() for name, shards in sharded.items()}
    rule = functavg.EMA(DECAY)
    return {
        "local tensors, in place": functional(rule, local, inplace=True),
        "DTensors, in place": functional(rule, sharded, inplace=True),
    }
