"""Checks that tensors can take a step towards others, and groups what goes into one call."""

from __future__ import annotations

__all__: list[str] = []

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from functavg.advice import advise
from functavg.kernels.torch.dtensor import check_shape, check_shards, get_shards
from functavg.kernels.torch.groups import COMPLEX, KINDS, PLAIN, POOR, Group, is_transformed, kind_of, refusal
from functavg.kernels.torch.memory import are_disjoint, check_writable, identities
from functavg.kernels.torch.steps import try_steps
from functavg.state import Weight

_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")

# The averages, the new leaves, and the roundings if there are any; ``count`` is the number of averages.
Lists = list[list[Any]]


def prepare(
    averages: list[list[Any]],
    news: list[Any],
    name_of: Callable[[int], str],
    roundings: list[Any] | None = None,
    weights: list[Weight] | None = None,
    inplace: bool = False,
    apart: bool = True,
) -> list[Group] | None:
    """Return the leaves in groups of one call each; None if they may overlap in memory.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average, or tensors overlap; the message names them.
    """
    lists, count = [*averages, news] if roundings is None else [*averages, news, roundings], len(averages)
    if is_transformed():
        if not apart and any(len(set(identities(olds))) != len(olds) for olds in averages):
            return None
        _check_leaves(lists, count, name_of, check_shards)
        return [_make_group(lists, count, [index], (None,) * 3 * len(lists)) for index in range(len(news))]
    shards = get_shards(lists, name_of)
    if shards is not None:
        parts, *more = shards[count:]
        groups = prepare(shards[:count], parts, name_of, more[0] if more else None, weights, inplace, apart)
        return groups and [replace(group, wholes=[_take(olds, group.indices) for olds in averages]) for group in groups]
    groups = _group_at_one_look(lists, count, 0 if apart else count + inplace)
    if groups is None and apart:
        _check_leaves(lists, count, name_of, check_shape)
        rows = _split(len(news), *(list(map(fact, itertools.chain(*lists))) for fact in (_dtype, _device, type)))
        groups = [_make_group(lists, count, some, row) for row, some in rows.items()]
        if weights is not None:
            try_steps(groups, weights, inplace, name_of)
    if apart and inplace:
        for olds in averages:
            check_writable(olds, news, name_of)
    return groups


def _group_at_one_look(lists: Lists, count: int, apart: int) -> list[Group] | None:
    """Return the groups of plain dense tensors that fit; None if that takes a closer look.

    Each fact is read once, in a loop in C, as there may be thousands of leaves. The leaves of the first ``apart`` lists
    have to lie apart in memory. Those without memory (on meta, empty, or partitioned away) take a closer look.
    """
    leaves = list(itertools.chain(*lists))
    if not PLAIN.issuperset(map(type, leaves)):
        return None
    size = len(lists[0])
    try:
        shapes = list(map(_shape, leaves))
        starts = list(map(Tensor.data_ptr, leaves))
    except RuntimeError:  # a nested tensor has no shape, a sparse one no address
        return None
    if 0 in starts or shapes != shapes[:size] * len(lists):
        return None
    if apart and not are_disjoint(leaves[: apart * size], starts[: apart * size]):
        return None
    dtypes, devices = list(map(_dtype, leaves)), list(map(_device, leaves))
    if dtypes.count(dtypes[0]) == devices.count(devices[0]) == len(leaves):  # as in most models
        return None if KINDS[dtypes[0]] is None else [_group_leaves(lists, count, range(size), dtypes[:1])]
    rows = _split(size, dtypes, devices)
    for row in rows:
        kinds: list[Any] = [KINDS[dtype] for dtype in row[: len(lists)]]
        if None in kinds or min(kinds) < kinds[count]:
            return None
    return [_make_group(lists, count, some, row) for row, some in rows.items()]


def _split(size: int, *facts: list[Any]) -> dict[tuple[Any, ...], Sequence[int]]:
    """Group the indices of leaves by their facts; each holds ``size`` values for every list, one list after another."""
    starts = range(0, len(facts[0]), size)
    columns = [fact[start : start + size] for fact in facts for start in starts]
    if [column.count(column[0]) for column in columns] == [size] * len(columns):
        return {tuple([column[0] for column in columns]): range(size)}
    indices: dict[tuple[Any, ...], Any] = {}
    for index, row in enumerate(zip(*columns, strict=True)):
        indices.setdefault(row, []).append(index)
    return indices


def _make_group(lists: Lists, count: int, indices: Sequence[int], row: tuple[Any, ...]) -> Group:
    """Return the group of leaves with a row of dtypes, devices and classes; without classes, those of torch."""
    dtypes, devices, classes = row[: len(lists)], row[len(lists) : 2 * len(lists)], row[2 * len(lists) :]
    alike = dtypes[:count].count(dtypes[count]) == devices[:count].count(devices[count]) == count
    lists = [_take(leaves, indices) for leaves in lists]
    return _group_leaves(lists, count, indices, dtypes, alike, PLAIN.issuperset(classes))


def _group_leaves(
    lists: Lists, count: int, indices: Sequence[int], dtypes: Sequence[Any], alike: bool = True, plain: bool = True
) -> Group:
    """Return the group of leaves of these dtypes, all of them plain tensors or not."""
    averages, news = lists[:count], lists[count]
    roundings = lists[-1] if len(lists) > count + 1 and lists[-1][0] is not lists[0][0] else None
    foreach = (
        plain
        and POOR.isdisjoint(dtypes[:count])
        and not any(map(Tensor.is_neg, itertools.chain(*averages)))  # lazy views, to which grouped kernels do not write
        and (COMPLEX.isdisjoint(dtypes) or not any(map(Tensor.is_conj, itertools.chain(*averages, news))))
    )
    return Group(indices, averages, news, roundings, alike, foreach)


def _take(leaves: list[Any], indices: Sequence[int]) -> list[Any]:
    """Return the leaves at these indices; a range is always that of all leaves."""
    return leaves if type(indices) is range else [leaves[index] for index in indices]


def _check_leaves(
    lists: Lists, count: int, name_of: Callable[[int], str], check: Callable[[Any, Any, Callable[[], str]], None]
) -> None:
    """Check leaf by leaf that the new ones fit into the averages and the roundings."""
    *averages, news = *lists[:count], *lists[count + 1 :], lists[count]
    for index, new in enumerate(news):
        for average in [olds[index] for olds in averages]:
            if not isinstance(new, Tensor):
                raise TypeError(f"{name_of(index)}: expected a torch tensor, got {type(new).__name__}{advise(new)}")
            reason = refusal(average) or refusal(new)
            if reason is not None:
                raise TypeError(f"{name_of(index)}: expected a dense tensor, got {reason}")
            if new.is_meta and not average.is_meta:
                raise TypeError(f"{name_of(index)}: expected a tensor with values, got one on the meta device")
            check(average, new, functools.partial(name_of, index))
            if (kind_of(new) or 0) > (kind_of(average) or 0):
                raise TypeError(f"{name_of(index)}: expected {average.dtype} or what it can hold, got {new.dtype}")
