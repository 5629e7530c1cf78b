"""Steps by a user's function."""

from __future__ import annotations

__all__: list[str] = []

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functavg.kernels import dtypes
from functavg.kernels.torch.groups import Group, kind_of
from functavg.kernels.torch.steps import copy_, lerp_leaf, outside_autograd, wrap_shards
from functavg.scalars import is_host
from functavg.state import Count


@outside_autograd
def apply(
    groups: list[Group],
    count: Count,
    fn: Callable[..., Any],
    grouped: bool,
    inplace: bool,
    name_of: Callable[[int], str],
) -> list[Any]:
    """Return the leaves of one average after ``fn(avg, new, count)``, or ``fn(avgs, news, count)`` by groups in place.

    The function sees real and complex tensors only, in one dtype; integers and bools take the newest value.
    """
    result: list[Any] = [None] * sum(len(group.indices) for group in groups)
    counts: dict[torch.device, Tensor] = {}
    for group in groups:
        (olds,) = group.averages
        if kind_of(olds[0]) in (dtypes.BOOL, dtypes.INTEGER):
            leaves = [lerp_leaf(old, new, 1, inplace) for old, new in zip(olds, group.news, strict=True)]
        else:
            device = olds[0].device
            if device not in counts:
                counts[device] = torch.full((), count, device=device) if is_host(count) else count.to(device)
            call = _apply_grouped if grouped else _apply_leaves
            with _outside_autocast(device):
                leaves = call(group, counts[device], fn, inplace, name_of)
            if not is_host(count):  # only the device knows whether this is the first model, which is copied
                first = counts[device] == 0
                leaves = [lerp_leaf(leaf, new, first, inplace) for leaf, new in zip(leaves, group.news, strict=True)]
        for index, leaf in zip(group.indices, wrap_shards(group, [leaves])[0], strict=True):
            result[index] = leaf
    return result


def _outside_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _apply_leaves(
    group: Group, count: Tensor, fn: Callable[..., Any], inplace: bool, name_of: Callable[[int], str]
) -> list[Tensor]:
    leaves = []
    for index, old, new in zip(group.indices, group.averages[0], group.news, strict=True):
        moved = _apply_leaf(old.detach(), new.detach(), count, fn)
        if not isinstance(moved, Tensor) or moved.shape != old.shape:
            got = f"shape {tuple(moved.shape)}" if isinstance(moved, Tensor) else type(moved).__name__
            raise ValueError(
                f"{name_of(index)}: avg_fn must return the new average, a tensor of shape {tuple(old.shape)}, got {got}"
            )
        leaves.append(copy_(old, moved) if inplace else moved.to(old.device, old.dtype, copy=True))
        del moved  # so that the next one can reuse its memory
    return leaves


def _apply_leaf(old: Tensor, new: Tensor, count: Tensor, fn: Callable[..., Any]) -> Any:
    # float8 takes part in no promotion, and every average can hold what has one byte
    common = old.dtype if new.dtype.itemsize == 1 else torch.promote_types(old.dtype, new.dtype)
    return fn(old.to(common), new.to(old.device, common), count)


def _apply_grouped(
    group: Group, count: Tensor, fn: Callable[..., Any], inplace: bool, name_of: Callable[[int], str]
) -> list[Tensor]:
    del name_of
    olds = [old.detach() if inplace else old.detach().clone() for old in group.averages[0]]
    news = [new.detach().to(old.device, old.dtype) for old, new in zip(olds, group.news, strict=True)]
    fn(olds, news, count)
    return group.averages[0] if inplace else olds
