"""Shards: what a DTensor holds on this rank, and the facts about it that are equal on all ranks.

Checks use those facts alone, so every rank comes to the same verdict without talking to another.
"""

from __future__ import annotations

__all__: list[str] = []

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(leaf: Any) -> bool:
    """Tell whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def check_shards(average: Any, new: Any, name_of: Callable[[], str]) -> None:
    """Check that the shards of two tensors correspond, if they are sharded.

    Raises:
        TypeError: one is a DTensor and the other is not.
        ValueError: their meshes or placements differ.
    """
    if is_sharded(average) != is_sharded(new):
        expected, got = ("a DTensor", "a plain tensor") if is_sharded(average) else ("a plain tensor", "a DTensor")
        raise TypeError(
            f"{name_of()}: expected {expected}, got {got}. Right after a forward FSDP2 modules hold plain tensors: "
            "call their reshard() before reading parameters. Else shard both alike (AveragedModel: pass a sharded copy "
            "of the model as module=), or gather the DTensor with full_tensor()"
        )
    if not is_sharded(average):
        return
    if average.device_mesh is not new.device_mesh and average.device_mesh != new.device_mesh:
        raise ValueError(f"{name_of()}: expected shards on {average.device_mesh}, got {new.device_mesh}")
    if average.placements != new.placements:
        raise ValueError(
            f"{name_of()}: expected the placements {average.placements}, got {new.placements}; "
            "redistribute one of them first"
        )
    check_shape(average, new, name_of)


def check_shape(average: Any, new: Any, name_of: Callable[[], str]) -> None:
    """Check that two tensors have the same shape, that of the whole tensor if they are sharded.

    Raises:
        ValueError: they do not.
    """
    if average.shape != new.shape:
        hint = "a parameter of size 0 is one that an engine has partitioned away, gather it first"
        raise ValueError(
            f"{name_of()}: expected shape {tuple(average.shape)}, got {tuple(new.shape)}; "
            + (hint if 0 in (average.numel(), new.numel()) else "nothing is broadcast")
        )


def get_shards(lists: Sequence[Sequence[Any]], name_of: Callable[[int], str]) -> list[list[Tensor]] | None:
    """Return the lists with each DTensor replaced by the shard of this rank, None if there are no DTensors.

    Args:
        lists: averages and new values, leaf by leaf.
        name_of: returns the path of a leaf.

    Raises:
        TypeError, ValueError: shards do not correspond; the message names the leaf.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    kinds = [list(map(type, leaves)) for leaves in lists]
    if not any(issubclass(kind, module.DTensor) for kind in set().union(*kinds)):
        return None
    indices = [[index for index, kind in enumerate(column) if kind is module.DTensor] for column in kinds]
    if any(column != indices[0] for column in indices[1:]) or not _are_alike(lists, indices[0]):
        *averages, news = lists
        for index, new in enumerate(news):
            for olds in averages:
                check_shards(olds[index], new, lambda index=index: name_of(index))  # type: ignore[misc]
    return [list(map(get_shard, leaves)) for leaves in lists]


def _are_alike(lists: Sequence[Sequence[Any]], indices: list[int]) -> bool:
    """Tell whether the DTensors at these indices have the same meshes, placements and shapes in all lists."""
    first, *others = (_layouts([leaves[index] for index in indices]) for leaves in lists)
    return all(other == first for other in others)  # fast: items that are the same object count as equal


def _layouts(leaves: Sequence[Any]) -> tuple[list[Any], ...]:
    specs = [leaf._spec for leaf in leaves]
    metas = [spec.tensor_meta for spec in specs]
    return [spec.mesh for spec in specs], [spec.placements for spec in specs], [meta.shape for meta in metas]


def get_shard(leaf: Any) -> Tensor:
    """Return the shard of this rank of a DTensor, without a graph; any other tensor as it is."""
    shard: Tensor = leaf._local_tensor if is_sharded(leaf) else leaf
    return shard


def wrap_shard(shard: Tensor, like: Any) -> Any:
    """Return the DTensor of this shard, laid out like ``like``; the shard itself if that is a plain tensor."""
    if not is_sharded(like):
        return shard
    return type(like).from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def distribute(tensor: Tensor, like: Any) -> Any:
    """Return a tensor that every rank holds as a DTensor laid out like ``like``, without communication."""
    module = sys.modules["torch.distributed.tensor"]
    replicated = [module.Replicate()] * like.device_mesh.ndim
    everywhere = module.DTensor.from_local(tensor, like.device_mesh, replicated, run_check=False)
    return everywhere.redistribute(placements=like.placements)


def all_agree(flag: Tensor | bool, leaves: Sequence[Any]) -> Tensor | bool:
    """Return whether a flag holds on all ranks that hold the DTensors among the leaves.

    It takes one scalar all-reduce for each dimension of a mesh. Ranks of a mesh whose shards are empty take part too.
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
