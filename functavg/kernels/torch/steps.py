"""Steps ``a + w (x - a)`` over groups of tensors, and new tensors to start from."""

from __future__ import annotations

__all__: list[str] = []

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from functavg.kernels import dtypes
from functavg.kernels.torch.dtensor import wrap_shard
from functavg.kernels.torch.groups import PLAIN, POOR, Group, kind_of
from functavg.kernels.torch.staging import write_, write_staged_
from functavg.scalars import is_host
from functavg.state import Weight

P = ParamSpec("P")
R = TypeVar("R")


def outside_autograd(fn: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autograd and outside inference mode, whose tensors would stay inference tensors."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return fn(*args, **kwargs)

    return run


# ---- new tensors


@outside_autograd
def copy(leaf: Tensor, dtype: str | None, device: Any) -> Tensor:
    """Return a new dense tensor of the values of ``leaf``, in the dtype that its average is held in."""
    held = dtypes.named(torch, dtypes.held_in(dtypes.name_of(leaf.dtype), dtype))
    return leaf.detach().resolve_conj().resolve_neg().to(device=device, dtype=held, copy=True)


@outside_autograd
def cast(leaf: Tensor, like: Tensor) -> Tensor:
    """Return ``leaf`` with the dtype and the device of ``like``; itself if it has them."""
    return leaf.to(device=like.device, dtype=like.dtype)


# ---- steps


def lerp(groups: list[Group], weights: list[Weight], inplace: bool) -> list[list[Any]]:
    """Return, for each average, its leaves after the step ``a + w (x - a)`` with its weight.

    A weight of exactly 1 copies, one of exactly 0 does nothing; integers and bools take the newest value.
    """
    if len(groups) == 1:
        return _lerp_group(groups[0], weights, inplace)
    results: list[list[Any]] = [[None] * sum(len(group.indices) for group in groups) for _ in weights]
    for group in groups:
        for result, leaves in zip(results, _lerp_group(group, weights, inplace), strict=True):
            for index, leaf in zip(group.indices, leaves, strict=True):
                result[index] = leaf
    return results


def _lerp_group(group: Group, weights: list[Weight], inplace: bool) -> list[list[Tensor]]:
    on_host = all(map(is_host, weights))
    if on_host and not any(weights):
        return group.averages if group.wholes is None else group.wholes
    steps = [(olds, _weight_of(weight, olds[0])) for olds, weight in zip(group.averages, weights, strict=True)]
    if not (on_host and group.foreach):
        results = _lerp_leaves(group, steps, inplace)
    elif inplace:
        with torch._C._InferenceMode(True):  # spares the dispatcher's bookkeeping; versions still bump
            _write_group_(group, steps)
        results = group.averages
    else:
        results = _lerp_new(group, steps)
    return wrap_shards(group, results)


def wrap_shards(group: Group, results: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return the results of a group as DTensors if they are shards; its own DTensors if these were written to."""
    if group.wholes is None:
        return results
    return [
        wholes
        if shards is olds
        else [
            whole if shard is old else wrap_shard(shard, whole)
            for shard, old, whole in zip(shards, olds, wholes, strict=True)
        ]
        for shards, olds, wholes in zip(results, group.averages, group.wholes, strict=True)
    ]


def _weight_of(weight: Weight, leaf: Tensor) -> Weight:
    """Return the weight for leaves like this one: integers and bools take the newest value unless it is 0."""
    if is_host(weight) and weight != 0 and kind_of(leaf) in (dtypes.BOOL, dtypes.INTEGER):
        return 1
    return weight


def _write_group_(group: Group, steps: list[tuple[list[Tensor], float]]) -> None:
    if group.alike or all(weight in (0, 1) for _, weight in steps):
        for olds, weight in steps:
            write_(olds, group.news, weight)
        if group.roundings is not None:
            torch._foreach_copy_(group.roundings, group.averages[0])
    else:
        write_staged_(steps, group.news, group.roundings)


@outside_autograd
def _lerp_new(group: Group, steps: list[tuple[list[Tensor], float]]) -> list[list[Tensor]]:
    if group.alike:
        return [_lerp_list(olds, group.news, weight) for olds, weight in steps]
    steps = [([old.clone() for old in olds] if weight != 0 else olds, weight) for olds, weight in steps]
    with torch.inference_mode():
        _write_group_(group, steps)
    return [olds for olds, _ in steps]


def _lerp_list(olds: list[Tensor], news: list[Tensor], weight: float) -> list[Tensor]:
    if weight == 0:
        return olds
    if weight == 1:
        return [torch.empty_like(old, requires_grad=False).copy_(new) for old, new in zip(olds, news, strict=True)]
    return list(torch._foreach_lerp(olds, news, weight))


# ---- leaf by leaf


@outside_autograd
def _lerp_leaves(group: Group, steps: list[tuple[list[Tensor], Weight]], inplace: bool) -> list[list[Tensor]]:
    results = [
        [lerp_leaf(old, new, weight, inplace) for old, new in zip(olds, group.news, strict=True)]
        for olds, weight in steps
    ]
    for rounding, leaf in zip(group.roundings or [], results[0], strict=group.roundings is not None):
        copy_(rounding, leaf)
    return results


def lerp_leaf(old: Tensor, new: Tensor, weight: Weight, inplace: bool) -> Tensor:
    """Return one leaf after the step: the readable reference of the grouped paths, and the path of transforms."""
    if not is_host(weight):
        return _lerp_leaf_where(old, new, weight, inplace)
    if weight == 0:
        return old
    if weight == 1:
        return copy_(old, new) if inplace else new.to(old.device, old.dtype, copy=True)
    start = old.to(_computed_in(old.dtype))
    result = torch.lerp(start, new.to(old.device, start.dtype), weight).to(old.dtype)  # vmap has no rule for lerp_
    return copy_(old, result) if inplace else result


def _lerp_leaf_where(old: Tensor, new: Tensor, weight: Tensor, inplace: bool) -> Tensor:
    """Return one leaf after a step whose weight is a tensor."""
    weight = weight.to(old.device)
    if kind_of(old) in (dtypes.BOOL, dtypes.INTEGER):
        result = torch.where(weight == 0, old, new.to(old.device, old.dtype))
    else:
        low = not old.is_complex() and old.dtype.itemsize < 4
        start = old.to(torch.float32 if low else _computed_in(old.dtype))
        new = new.to(old.device, start.dtype)
        moved = torch.lerp(start, new, weight.to(start.dtype))
        result = torch.where(weight == 1, new, torch.where(weight == 0, start, moved)).to(old.dtype)
    return copy_(old, result) if inplace else result


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    if dtype not in POOR:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


def copy_(old: Tensor, new: Tensor) -> Tensor:
    """Copy into a tensor and return it."""
    old.detach().copy_(new)  # detached, as tensors made in inference mode cannot be written to outside it
    return old


# ---- trials


def try_steps(groups: list[Group], weights: list[Weight], inplace: bool, name_of: Callable[[int], str]) -> None:
    """Check that tensors of classes that are not torch's own can take their steps, by trying them on copies.

    Raises:
        TypeError: one cannot; the message names it.
    """
    for group in groups:
        if not set(map(type, (group.news[0], *[olds[0] for olds in group.averages]))) <= PLAIN:
            for olds, weight in zip(group.averages, weights, strict=True):
                for index, old, new in zip(group.indices, olds, group.news, strict=True):
                    _try_step(old, new, _weight_of(weight, old), inplace, functools.partial(name_of, index))


@outside_autograd
def _try_step(old: Tensor, new: Tensor, weight: Weight, inplace: bool, name_of: Callable[[], str]) -> None:
    try:
        moved = lerp_leaf(old, new, weight, inplace=False)
        if inplace and moved is not old:
            old.clone().copy_(moved)
    except Exception as error:  # whatever a class raises
        raise TypeError(
            f"{name_of()}: cannot average {type(old).__name__} with {type(new).__name__}: {error}. "
            "Leave it as it is or copy it: Partition({..., 'fixed': Freeze(), 'newest': Latest()}, label)"
        ) from error
