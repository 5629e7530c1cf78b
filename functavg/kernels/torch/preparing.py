"""Checks that tensors can take a step towards others, and groups what goes into one call."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functavg.kernels.torch.dtensor import check_shape, check_shards, get_shards
from functavg.kernels.torch.groups import COMPLEX, KINDS, PLAIN, POOR, Group, is_transformed, kind_of, refusal
from functavg.kernels.torch.memory import are_disjoint, check_writable, identities
from functavg.kernels.torch.steps import try_steps
from functavg.state import Weight

_class = operator.attrgetter("__class__")
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")

Lists = list[list[Any]]
"""The averages, the new leaves, and the roundings if there are any; ``count`` is the number of averages."""


def prepare(
    averages: list[list[Any]],
    news: list[Any],
    name_of: Callable[[int], str],
    roundings: list[Any] | None = None,
    weights: list[Weight] | None = None,
    inplace: bool = False,
    apart: bool = True,
) -> list[Group] | None:
    """Return the groups of leaves that belong into one call each; None where they may not lie apart in memory.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average, or tensors overlap; the message names them.
    """
    lists, count = [*averages, news, *([] if roundings is None else [roundings])], len(averages)
    if is_transformed():
        if not apart and any(len(set(identities(olds))) != len(olds) for olds in averages):
            return None
        _check_leaves(lists, count, name_of, check_shards)
        return [_make_group(lists, count, [index], alike=False, foreach=False) for index in range(len(news))]
    shards = get_shards(lists, name_of)
    if shards is not None:
        olds, (parts, *more) = shards[:count], shards[count:]
        groups = prepare(olds, parts, name_of, more[0] if more else None, weights, inplace, apart)
        return groups and [replace(group, wholes=[_take(olds, group.indices) for olds in averages]) for group in groups]
    groups = _group_at_one_look(lists, count, 0 if apart else count + inplace)
    if groups is None and apart:
        _check_leaves(lists, count, name_of, check_shape)
        groups = _group(lists, count, *(list(map(fact, itertools.chain(*lists))) for fact in (_dtype, _device, _class)))
        if weights is not None:
            try_steps(groups, weights, inplace, name_of)
    if apart and inplace:
        for olds in averages:
            check_writable(olds, news, name_of)
    return groups


def _group_at_one_look(lists: Lists, count: int, apart: int) -> list[Group] | None:
    """Return the groups of plain dense tensors that fit; None where that takes a closer look.

    Each fact is read once, in a loop of C, as there may be thousands of leaves. What has no memory (it is on the meta
    device, empty, or partitioned away) takes a closer look.

    Args:
        lists: the leaves.
        count: the number of averages.
        apart: the number of lists whose leaves have to be found to lie apart in memory.
    """
    size = len(lists[0])
    leaves = list(itertools.chain(*lists))
    if not set(map(type, leaves)) <= PLAIN:
        return None
    try:
        shapes = list(map(_shape, leaves))
        starts = list(map(Tensor.data_ptr, leaves))
    except RuntimeError:  # a nested tensor has no shape, a sparse one no address
        return None
    if 0 in starts or shapes != shapes[:size] * len(lists):
        return None
    if apart and not are_disjoint(leaves[: apart * size], starts[: apart * size]):
        return None
    dtypes = list(map(_dtype, leaves))
    groups = _group(lists, count, dtypes, list(map(_device, leaves)))
    kinds: list[list[Any]] = [[KINDS[dtype] for dtype in dtypes[group.indices[0] :: size]] for group in groups]
    return groups if all(None not in row and min(row) == row[count] for row in kinds) else None


def _group(lists: Lists, count: int, *facts: list[Any]) -> list[Group]:
    """Return the leaves in groups that have all facts in common.

    Args:
        lists: the leaves.
        count: the number of averages.
        facts: dtypes, devices, and classes where they are not all torch's own, of the leaves of one list after another.
    """
    size = len(lists[0])
    columns = [fact[start : start + size] for fact in facts for start in range(0, len(fact), size)]
    indices: dict[Any, Any] = {}
    if all(column.count(column[0]) == size for column in columns):
        indices[()] = range(size)
    else:
        for index, row in enumerate(zip(*columns, strict=True)):
            indices.setdefault(row, []).append(index)
    groups = []
    for some in indices.values():
        dtypes, devices, *classes = [fact[some[0] :: size] for fact in facts]
        alike = dtypes[:count].count(dtypes[count]) == devices[:count].count(devices[count]) == count
        plain = not classes or PLAIN.issuperset(classes[0])
        group = _make_group(lists, count, some, alike=alike, foreach=plain and POOR.isdisjoint(dtypes[:count]))
        group.foreach = group.foreach and not _are_lazy(group, dtypes)
        groups.append(group)
    return groups


def _make_group(lists: Lists, count: int, indices: Sequence[int], *, alike: bool, foreach: bool) -> Group:
    lists = [_take(leaves, indices) for leaves in lists]
    roundings = lists[-1] if len(lists) > count + 1 and lists[-1][0] is not lists[0][0] else None
    return Group(indices, lists[:count], lists[count], roundings, alike, foreach)


def _take(leaves: list[Any], indices: Sequence[int]) -> list[Any]:
    """Return the leaves of these indices; a range is that of all."""
    return leaves if type(indices) is range else [leaves[index] for index in indices]


def _are_lazy(group: Group, kinds: list[torch.dtype]) -> bool:
    """Tell whether there are lazy views: grouped kernels take none of conjugates, and write to none of negatives."""
    averages = list(itertools.chain(*group.averages))
    has_conjugates = not COMPLEX.isdisjoint(kinds) and any(map(Tensor.is_conj, (*averages, *group.news)))
    return has_conjugates or any(map(Tensor.is_neg, averages))


def _check_leaves(
    lists: Lists, count: int, name_of: Callable[[int], str], check: Callable[[Any, Any, Callable[[], str]], None]
) -> None:
    """Check leaf by leaf that new ones fit into the averages and the roundings."""
    for index, new in enumerate(lists[count]):
        for takers in (*lists[:count], *lists[count + 1 :]):
            _check(takers[index], new, functools.partial(name_of, index), check)


def _check(average: Any, new: Any, name_of: Callable[[], str], check: Callable[..., None]) -> None:
    if not isinstance(new, Tensor):
        raise TypeError(f"{name_of()}: expected a torch tensor, got {type(new).__name__}")
    reason = refusal(average) or refusal(new)
    if reason is not None:
        raise TypeError(f"{name_of()}: expected a dense tensor, got {reason}")
    if new.is_meta and not average.is_meta:
        raise TypeError(f"{name_of()}: expected a tensor with values, got one on the meta device")
    check(average, new, name_of)
    if (kind_of(new) or 0) > (kind_of(average) or 0):
        raise TypeError(f"{name_of()}: expected {average.dtype} or what it can hold, got {new.dtype}")
