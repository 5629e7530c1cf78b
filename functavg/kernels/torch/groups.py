"""Which tensors fit together, and which of them go into one call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from functavg.advice import advise
from functavg.kernels import dtypes
from functavg.kernels.torch.dtensor import check_shape, check_shards, get_shards

# Asked for each leaf at each update, which names are too slow for.
_KINDS = {
    dtype: dtypes.kind_of(dtypes.name_of(dtype)) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
PLAIN = {Tensor, Parameter}
"""Classes of tensors that are no more than that; others may compute, place or share their values in their own way."""

# Attributes of thousands of tensors are read in loops of C.
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")
_placement = operator.attrgetter("dtype", "device")
_class_and_placement = operator.attrgetter("__class__", "dtype", "device")


@dataclass(eq=False, slots=True)
class Group:
    """Leaves of one dtype and device: for each average its tensors, and the new ones."""

    indices: Sequence[int]
    averages: list[list[Tensor]]
    news: list[Tensor]
    roundings: list[Tensor] | None
    """Tensors that take the rounding of the first average, if they are not the average itself."""
    alike: bool
    """Whether the new tensors have the dtype and the device of all the averages."""
    plain: bool
    """Whether all are tensors of torch's own classes."""
    foreach: bool
    """Whether the grouped kernels know these tensors; elsewhere each leaf is a call of its own."""
    wholes: list[list[Tensor]] | None = None
    """The averages as DTensors where the lists hold their shards."""


def kind_of(leaf: Tensor) -> int | None:
    """Return BOOL, INTEGER, REAL or COMPLEX, and None for what cannot be averaged."""
    return _KINDS.get(leaf.dtype)


def refusal(leaf: Any) -> str | None:
    """Return why a tensor cannot be averaged, or None."""
    # is_lazy does not go through torch.compile; isinstance takes long, as the metaclass of Parameter has its own.
    if type(leaf) not in PLAIN and isinstance(leaf, (UninitializedBuffer, UninitializedParameter)):
        return "an uninitialised (lazy) parameter; run one forward pass first"
    if is_partitioned(leaf):
        return "a placeholder of size 0, since an engine has partitioned it away; gather it first"
    if leaf.is_nested:
        return "a nested tensor; average its components"
    if leaf.layout != torch.strided:
        return f"a tensor of layout {leaf.layout}; only dense tensors can be averaged (Tensor.to_dense makes one)"
    if kind_of(leaf) is None:
        return f"a tensor of dtype {leaf.dtype}; dequantise or unpack it first"
    return None


def is_partitioned(leaf: Any) -> bool:
    """Tell whether a parameter is an empty placeholder for one that DeepSpeed (ZeRO-3) keeps elsewhere."""
    return hasattr(leaf, "ds_shape") and leaf.numel() == 0


def is_transformed() -> bool:
    """Tell whether a transform is at work that has no rule for the grouped kernels: a compiler, vmap."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def prepare(
    averages: list[list[Any]],
    news: list[Any],
    name_of: Callable[[int], str],
    roundings: list[Any] | None = None,
) -> list[Group]:
    """Return the groups of leaves that belong into one call each.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average; the message names it.
    """
    lists = [*averages, news] if roundings is None else [*averages, news, roundings]
    transformed = is_transformed()
    shards = None if transformed else get_shards(lists, name_of)
    if shards is not None:
        groups = prepare(shards[: len(averages)], shards[len(averages)], name_of, *shards[len(averages) + 1 :])
        return [replace(group, wholes=[_take(olds, group.indices) for olds in averages]) for group in groups]
    takers = averages if roundings is None else [*averages, roundings]
    indices: list[Sequence[int]]
    if not transformed and _are_alike(lists):
        indices = [range(len(news))] if all(map(_is_uniform, lists)) else _split(lists, _placement)
        _check_all(takers, news, [some[0] for some in indices], name_of)  # what else is checked is one in a group
    else:
        _check_all(takers, news, range(len(news)), name_of)
        indices = [[index] for index in range(len(news))] if transformed else _split(lists, _class_and_placement)
    return [_group(some, [_take(leaves, some) for leaves in lists], len(averages), transformed) for some in indices]


def _take(leaves: list[Any], indices: Sequence[int]) -> list[Any]:
    return leaves if type(indices) is range else [leaves[index] for index in indices]


def _are_alike(lists: list[list[Any]]) -> bool:
    """Tell, faster than leaf by leaf, whether all lists hold dense plain tensors, and those of the same shapes."""
    if not set().union(*[map(type, leaves) for leaves in lists]) <= PLAIN:
        return False
    try:
        shapes = list(map(_shape, lists[0]))
        for leaves in lists[1:]:
            if list(map(_shape, leaves)) != shapes:
                return False
        for leaves in lists:
            list(map(Tensor.data_ptr, leaves))
    except RuntimeError:  # a nested tensor has no shape, a sparse one no address
        return False
    return True


def _is_uniform(leaves: list[Any]) -> bool:
    """Tell, faster than by ``_split``, whether all tensors have one dtype and one device."""
    dtypes_, devices = list(map(_dtype, leaves)), list(map(_device, leaves))
    return dtypes_.count(dtypes_[0]) == devices.count(devices[0]) == len(leaves)


def _split(lists: list[list[Any]], facts_of: Callable[[Any], Hashable]) -> list[Sequence[int]]:
    """Return the indices of the leaves that have these facts in common in all lists."""
    columns = [list(map(facts_of, leaves)) for leaves in lists]
    indices: dict[Hashable, list[int]] = {}
    for index, facts in enumerate(zip(*columns, strict=True)):
        indices.setdefault(facts, []).append(index)
    return list(indices.values())


def _group(indices: Sequence[int], lists: list[list[Any]], averages: int, transformed: bool) -> Group:
    first, new = lists[0][0], lists[averages][0]
    alike = all(leaves[0].dtype == new.dtype and leaves[0].device == new.device for leaves in lists[:averages])
    plain = all(type(leaves[0]) in PLAIN for leaves in lists)
    foreach = (
        plain
        and not transformed
        and not (any(map(_has_conjugates, lists)) or any(map(_has_negatives, lists[:averages])))
    )
    roundings = lists[averages + 1] if len(lists) > averages + 1 and lists[averages + 1][0] is not first else None
    return Group(indices, lists[:averages], lists[averages], roundings, alike, plain, foreach)


def _has_conjugates(leaves: list[Tensor]) -> bool:
    """Tell whether there are lazy views of conjugates, which the grouped kernels do not take."""
    return leaves[0].is_complex() and any(map(Tensor.is_conj, leaves))


def _has_negatives(averages: list[Tensor]) -> bool:
    """Tell whether there are lazy views of negatives, to which the grouped kernels cannot write."""
    return any(map(Tensor.is_neg, averages))


def _check_all(
    averages: list[list[Any]], news: list[Any], indices: Iterable[int], name_of: Callable[[int], str]
) -> None:
    for index in indices:
        for olds in averages:
            _check(olds[index], news[index], functools.partial(name_of, index))


def _check(average: Any, new: Any, name_of: Callable[[], str]) -> None:
    if not isinstance(new, Tensor):
        raise TypeError(f"{name_of()}: expected a torch tensor, got {type(new).__name__}{advise(new)}")
    reason = refusal(average) or refusal(new)
    if reason is not None:
        raise TypeError(f"{name_of()}: expected a dense tensor, got {reason}")
    check_shards(average, new, name_of)
    if new.is_meta and not average.is_meta:
        raise TypeError(f"{name_of()}: expected a tensor with values, got one on the meta device")
    check_shape(average, new, name_of)
    if (kind_of(new) or 0) > (kind_of(average) or 0):
        raise TypeError(f"{name_of()}: expected {average.dtype} or what it can hold, got {new.dtype}")
