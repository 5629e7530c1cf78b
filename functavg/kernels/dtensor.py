"""Shards: what a DTensor holds on this rank, and the facts about it that are equal on all ranks.

Checks use those facts alone, so every rank comes to the same verdict without talking to another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(leaf: Tensor) -> bool:
    """Tell whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def check(average: Any, new: Any, where: Callable[[], str]) -> None:
    """Check that the shards of two tensors correspond, if they are sharded.

    Raises:
        TypeError: one is a DTensor and the other is not.
        ValueError: they are DTensors of other meshes or placements.
    """
    if is_sharded(average) != is_sharded(new):
        expected, got = ("a DTensor", "a plain tensor") if is_sharded(average) else ("a plain tensor", "a DTensor")
        raise TypeError(
            f"{where()}: expected {expected}, got {got}. Shard both alike (AveragedModel: pass a sharded copy of the "
            "model as module=), or gather the DTensor with full_tensor()"
        )
    if not is_sharded(average):
        return
    if average.device_mesh is not new.device_mesh and average.device_mesh != new.device_mesh:
        raise ValueError(f"{where()}: expected shards on {average.device_mesh}, got {new.device_mesh}")
    if average.placements != new.placements:
        raise ValueError(
            f"{where()}: expected the placements {average.placements}, got {new.placements}; "
            "redistribute one of them first"
        )


def shards(lists: Sequence[Sequence[Any]]) -> list[list[Tensor]] | None:
    """Return what this rank holds of lists of DTensors, if those of all lists are laid out alike; else None.

    This is ``check`` and ``local`` of each leaf, many times faster.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not all(set(map(type, leaves)) == {module.DTensor} for leaves in lists):
        return None
    first, *others = map(_layouts, lists)
    if any(other != first for other in others):
        return None
    return [[leaf._local_tensor for leaf in leaves] for leaves in lists]


def _layouts(leaves: Sequence[Any]) -> tuple[list[Any], ...]:
    """Return meshes, placements and whole shapes; lists of the same objects compare fast."""
    specs = [leaf._spec for leaf in leaves]
    metas = [spec.tensor_meta for spec in specs]
    return [spec.mesh for spec in specs], [spec.placements for spec in specs], [meta.shape for meta in metas]


def local(leaf: Any) -> Tensor:
    """Return what this rank holds of a DTensor, without a graph; any other tensor as it is."""
    shard: Tensor = leaf._local_tensor if is_sharded(leaf) else leaf
    return shard


def like(shard: Tensor, whole: Any) -> Any:
    """Return the DTensor of this shard that is laid out as another one; for any other tensor the shard itself."""
    if not is_sharded(whole):
        return shard
    return type(whole).from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def distributed(tensor: Tensor, whole: Any) -> Any:
    """Return a tensor that every rank holds as a DTensor that is laid out as another one, without talking to a rank."""
    module = sys.modules["torch.distributed.tensor"]
    replicated = [module.Replicate()] * whole.device_mesh.ndim
    everywhere = module.DTensor.from_local(tensor, whole.device_mesh, replicated, run_check=False)
    return everywhere.redistribute(placements=whole.placements)


def agreed(flag: Tensor | bool, leaves: Sequence[Any]) -> Tensor | bool:
    """Return whether a flag holds on all ranks that share the DTensors among the leaves: one scalar all-reduce a mesh.

    Ranks of a mesh that hold nothing of a leaf take part too; those outside of it are not asked.
    """
    meshes = dict.fromkeys(leaf.device_mesh for leaf in leaves if is_sharded(leaf))
    for mesh in meshes:
        if mesh.get_coordinate() is None:
            continue
        distributed = sys.modules["torch.distributed"]
        votes = torch.as_tensor(flag, dtype=torch.int32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            distributed.all_reduce(votes, op=distributed.ReduceOp.MIN, group=mesh.get_group(dim))
        flag = votes == 1
    return flag
