"""Which tensors fit together, and which of them go into one call."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from functavg.kernels import dtensor, dtypes
from functavg.scalars import is_compiling

# Asked for each leaf at each update, which names are too slow for.
_KINDS = {
    dtype: dtypes.kind_of(dtypes.name_of(dtype)) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
PLAIN = {Tensor, Parameter}
"""Classes of tensors that are no more than that; others may compute, place or share their values in their own way."""

# Attributes of thousands of tensors are read in loops of C. Facts are what leaves of one call have in common.
_shape = operator.attrgetter("shape")
_plain_facts = operator.attrgetter("dtype", "device", "layout")
_facts = operator.attrgetter("__class__", "dtype", "device")


@dataclass(frozen=True)
class Group:
    """Leaves of one dtype and device: for each average its tensors, and the new ones."""

    indices: Sequence[int]
    averages: list[list[Tensor]]
    news: list[Tensor]
    alike: bool
    """Whether the new tensors have the dtype and the device of all the averages."""
    foreach: bool
    """Whether the grouped kernels know these tensors; elsewhere each leaf is a call of its own."""
    wholes: list[list[Tensor]] | None = None
    """The DTensors of which ``averages`` are the shards."""


def kind_of(leaf: Tensor) -> int | None:
    """Return BOOL, INTEGER, REAL or COMPLEX, and None for what cannot be averaged."""
    return _KINDS.get(leaf.dtype)


def refusal(leaf: Any) -> str | None:
    """Return why a tensor cannot be averaged, or None."""
    if isinstance(leaf, (UninitializedBuffer, UninitializedParameter)):  # is_lazy does not go through torch.compile
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


def identities(leaves: Sequence[Any]) -> Sequence[Hashable]:
    """Return what is equal for tensors in one place of memory: two objects may be one weight, as in a state_dict."""
    if is_compiling():  # which would take numbers for constants
        return leaves
    kinds = set(map(type, leaves))
    if is_transformed() or kinds.isdisjoint(PLAIN):
        return list(map(id, leaves))
    if kinds <= PLAIN:
        with contextlib.suppress(RuntimeError):  # sparse tensors have no one place
            pointers = set(map(Tensor.data_ptr, leaves))
            if len(pointers) == len(leaves):
                return range(len(leaves))
    return list(map(_identity, leaves))


def _identity(leaf: Any) -> Hashable:
    if type(leaf) not in PLAIN or leaf.is_nested or leaf.layout != torch.strided or leaf.data_ptr() == 0:
        return id(leaf)
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def prepared(
    averages: list[list[Any]], news: list[Any], where: Callable[[int], str], inplace: bool = False
) -> list[Group]:
    """Return the groups of leaves that belong into one call each.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average; the message names it.
    """
    lists = [*averages, news]
    transformed = is_transformed()
    shards = None if transformed else dtensor.shards(lists)
    if shards is not None:
        groups = prepared(shards[:-1], shards[-1], where, inplace)
        if len(groups) == 1:
            return [replace(groups[0], wholes=averages)]
        return [
            replace(group, wholes=[[olds[index] for index in group.indices] for olds in averages]) for group in groups
        ]
    alike = not transformed and _are_alike(lists)
    if alike:
        places = _places(lists, _plain_facts)
        _check_all(lists, [indices[0] for indices in places], where)  # what else is checked is the same in a group
    else:
        _check_all(lists, range(len(news)), where)
        places = [[index] for index in range(len(news))] if transformed else _places(lists, _facts)
    if inplace and not transformed:
        for olds in averages:
            if not (alike and all(map(Tensor.is_contiguous, olds))):
                _check_writable(olds, where)
    if len(places) == 1:
        return [_group(places[0], lists, transformed)]
    return [
        _group(indices, [[leaves[index] for index in indices] for leaves in lists], transformed) for indices in places
    ]


def _are_alike(lists: list[list[Any]]) -> bool:
    """Tell, faster than leaf by leaf, whether all lists hold plain tensors, and those of the same shapes."""
    if not all(set(map(type, leaves)) <= PLAIN for leaves in lists):
        return False
    try:
        shapes = list(map(_shape, lists[0]))
        return all(list(map(_shape, leaves)) == shapes for leaves in lists[1:])
    except RuntimeError:  # a nested tensor, which has no shape
        return False


def _places(lists: list[list[Any]], facts: Callable[[Any], Hashable]) -> list[Sequence[int]]:
    """Return the places of the leaves that have these facts in common in all lists."""
    if all(len(set(map(facts, leaves))) == 1 for leaves in lists):
        return [range(len(lists[0]))]
    places: dict[Hashable, list[int]] = {}
    for index, key in enumerate(zip(*[map(facts, leaves) for leaves in lists], strict=True)):
        places.setdefault(key, []).append(index)
    return list(places.values())


def _group(indices: Sequence[int], lists: list[list[Any]], transformed: bool) -> Group:
    first = [leaves[0] for leaves in lists]
    alike = all(leaf.dtype == first[0].dtype and leaf.device == first[0].device for leaf in first)
    wholes = None
    if dtensor.is_sharded(first[0]) and not transformed:
        wholes = lists[:-1]
        lists = [[dtensor.local(leaf) for leaf in leaves] for leaves in lists]
    foreach = not transformed and all(type(leaves[0]) in PLAIN and _is_grouped(leaves) for leaves in lists)
    return Group(indices, lists[:-1], lists[-1], alike, foreach, wholes)


def _is_grouped(leaves: list[Tensor]) -> bool:
    """Tell whether the grouped kernels can write to tensors of one dtype: not to views of conjugates."""
    return not (leaves[0].is_complex() and any(leaf.is_conj() for leaf in leaves))


def _check_writable(averages: list[Any], where: Callable[[int], str]) -> None:
    for index, leaf in enumerate(averages):
        if any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True)):
            raise TypeError(
                f"{where(index)}: expected an average with memory for each element, got an expanded tensor, which "
                "cannot be written to in place; pass its clone(), or inplace=False"
            )


def _check_all(lists: list[list[Any]], indices: Iterable[int], where: Callable[[int], str]) -> None:
    *averages, news = lists
    for index in indices:
        for olds in averages:
            _check(olds[index], news[index], functools.partial(where, index))


def _check(average: Any, new: Any, where: Callable[[], str]) -> None:
    if not isinstance(new, Tensor):
        raise TypeError(f"{where()}: expected a torch tensor, got {type(new).__name__}")
    reason = refusal(average) or refusal(new)
    if reason is not None:
        raise TypeError(f"{where()}: expected a dense tensor, got {reason}")
    dtensor.check(average, new, where)
    if new.is_meta and not average.is_meta:
        raise TypeError(f"{where()}: expected a tensor with values, got one on the meta device")
    if average.shape != new.shape:
        hint = "a parameter of size 0 is one that an engine has partitioned away, gather it first"
        raise ValueError(
            f"{where()}: expected shape {tuple(average.shape)}, got {tuple(new.shape)}; "
            + (hint if 0 in (average.numel(), new.numel()) else "nothing is broadcast")
        )
    if (kind_of(new) or 0) > (kind_of(average) or 0):
        raise TypeError(f"{where()}: expected {average.dtype} or what it can hold, got {new.dtype}")
