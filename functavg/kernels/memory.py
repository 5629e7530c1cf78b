"""Which arrays overlap in memory without being the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

EFFORT = 10_000
"""How long to search for an element that two interleaved arrays share; undecided counts as shared."""


def are_disjoint(starts: Sequence[int], sizes: Iterable[int]) -> bool:
    """Tell whether spans of memory are disjoint: each ends before the next one starts.

    Starts and ends are sorted apart, which needs no pairs: spans are disjoint exactly if no span starts before all that
    started earlier have ended.
    """
    ends = sorted(map(operator.add, starts, sizes))
    return all(map(operator.le, ends, sorted(starts)[1:]))


def footprint(pointer: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> NDArray[Any]:
    """Return a numpy array that lies where another array does; its elements must never be read.

    Args:
        pointer: address of the first element, on any device.
        shape: shape of the array.
        strides: strides in bytes.
        itemsize: bytes of an element.
    """
    return np.asarray(_Interface(pointer, tuple(shape), tuple(strides), itemsize))


class _Interface:
    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }


def check_overlaps(
    averages: Sequence[NDArray[Any] | None], news: Sequence[NDArray[Any] | None], name_of: Callable[[int], str]
) -> None:
    """Check that no average shares an element with another one or with a new value.

    Args:
        averages: footprints of the arrays to write to; None for one that has no memory of its own.
        news: nothing, or footprints of the new values; None for one that may share memory.
        name_of: returns the path of a leaf.

    Raises:
        ValueError: two share an element; the message names both.
    """
    pair = _find_overlap([*averages, *news], len(averages))
    if pair is not None:
        names = [
            name_of(index % len(averages)) + (" of the params" if index >= len(averages) else "") for index in pair
        ]
        raise ValueError(
            f"{names[0]} and {names[1]} overlap in memory without being one array; a step in place would mix them. "
            "Pass a clone of one, or inplace=False"
        )


def _find_overlap(footprints: Sequence[NDArray[Any] | None], written: int) -> tuple[int, int] | None:
    """Return the indices of two arrays that share an element, at least one of the first ``written``."""
    spans = sorted(
        (*_bounds(array), index) for index, array in enumerate(footprints) if array is not None and array.size > 0
    )
    reaching: list[tuple[int, int]] = []  # end and index of the arrays before that may reach this one
    for start, end, index in spans:
        reaching = [(reach, other) for reach, other in reaching if reach > start]
        for _, other in reaching:
            first, second = min(index, other), max(index, other)
            if first < written and _share_element(footprints[first], footprints[second]):
                return first, second
        reaching.append((end, index))
    return None


def _share_element(one: Any, other: Any) -> bool:
    try:
        return np.shares_memory(one, other, max_work=EFFORT)  # type: ignore[arg-type]  # numpy takes any number
    except np.exceptions.TooHardError:
        return True


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses of the first byte of an array and of the one behind its last."""
    start = end = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        reach = (size - 1) * stride
        start, end = (start + reach, end) if reach < 0 else (start, end + reach)
    return start, end + array.itemsize
