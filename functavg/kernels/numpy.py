"""Steps over numpy arrays, in place, in blocks that stay in cache."""

from __future__ import annotations

__all__: list[str] = []

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from functavg.advice import advise
from functavg.kernels import dtypes, memory
from functavg.state import Count, Weight

BLOCK = 2**15
"""Elements of one block: the block, its new values and the scratch buffer stay in the second-level cache."""

Array = NDArray[Any]
Groups = tuple[list[list[Array]], list[Array]]


def refusal(leaf: Any) -> str | None:
    """Return why an array cannot be averaged, or None."""
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array; fill it, or average its data and its mask apart"
    dtype = np.asarray(leaf).dtype
    if dtypes.kind_of(dtype.name) is None:
        return f"a numpy array of dtype {dtype}; only numbers can be averaged"
    return None


def copy(leaf: Any, dtype: str | None, device: Any) -> Array:
    """Return a new array of the values of ``leaf``, in the dtype that its average is held in."""
    if device not in (None, "cpu"):
        raise ValueError(f"device must be None or 'cpu' for numpy arrays, got {device!r}")
    array = np.asarray(leaf)
    held = dtypes.held_in(array.dtype.name, dtype)
    return np.array(array, dtype=array.dtype if held == array.dtype.name else dtypes.named(np, held), copy=True)


def cast(leaf: Any, like: Any) -> Array:
    """Return ``leaf`` with the dtype of ``like``; itself where it has it."""
    return np.asarray(leaf).astype(np.asarray(like).dtype, copy=False)


def identities(leaves: Sequence[Any]) -> list[Hashable]:
    """Return a key for each leaf, equal for aliased arrays: two views may be one weight."""
    return [
        (_address(leaf), leaf.dtype, leaf.shape, leaf.strides) if _has_memory(leaf) else (index,)
        for index, leaf in enumerate(leaves)
    ]


def _are_disjoint(leaves: Sequence[Any]) -> bool:
    """Tell whether all lie apart in memory; False also if one look cannot tell."""
    arrays = list(filter(_has_memory, leaves))
    is_contiguous = all(array.flags.c_contiguous for array in arrays)
    return is_contiguous and memory.are_disjoint(list(map(_address, arrays)), [array.nbytes for array in arrays])


def _check_writable(averages: Sequence[Any], news: Sequence[Any], name_of: Callable[[int], str]) -> None:
    """Check that no average that is written to shares an element with another one or with a new value.

    Raises:
        ValueError: two overlap; the message names both.
    """
    written = [leaf if _has_memory(leaf) and leaf.flags.writeable else None for leaf in averages]
    pairs = zip(identities(averages), identities(news), news, strict=False)
    others = [new if new_key != key and _has_memory(new) else None for key, new_key, new in pairs]
    memory.check_overlaps(written, others, name_of)


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.size > 0


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def prepare(
    averages: list[list[Any]],
    news: list[Any],
    name_of: Callable[[int], str],
    roundings: None = None,
    weights: list[Weight] | None = None,
    inplace: bool = False,
    apart: bool = True,
) -> Groups | None:
    """Return all leaves as arrays; None if they may not lie apart in memory.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average, or arrays overlap; the message names them.
    """
    del roundings, weights  # only modules of torch hold the rounding of an average, and numbers can take every step
    if not apart and not _are_disjoint([*itertools.chain(*averages), *(news if inplace else ())]):
        return None
    arrays = []
    for index, new in enumerate(news):
        if not isinstance(new, (np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(
                f"{name_of(index)}: expected a numpy array or a number, got {type(new).__name__}{advise(new)}"
            )
        reason = refusal(new)
        if reason is not None:
            raise TypeError(f"{name_of(index)}: expected an array of numbers, got {reason}")
        array = np.asarray(new)
        for olds in averages:
            old = np.asarray(olds[index])
            if refusal(old) is not None:
                raise TypeError(f"{name_of(index)}: the average holds {refusal(old)}")
            if old.shape != array.shape:
                raise ValueError(
                    f"{name_of(index)}: expected shape {old.shape}, got {array.shape}; nothing is broadcast"
                )
            if _kind(array) > _kind(old):
                raise TypeError(f"{name_of(index)}: expected {old.dtype} or what it can hold, got {array.dtype}")
        arrays.append(array)
    if apart and inplace:
        for olds in averages:
            _check_writable(olds, news, name_of)
    return [[np.asarray(old) for old in olds] for olds in averages], arrays


def lerp(groups: Groups, weights: list[Weight], inplace: bool) -> list[list[Array]]:
    """Return, for each average, its leaves after the step ``a + w (x - a)`` with its weight.

    A weight of exactly 1 copies, one of exactly 0 does nothing; integers and bools take the newest value.
    """
    averages, news = groups
    return [
        [_lerp_leaf(old, new, float(weight), inplace) for old, new in zip(olds, news, strict=True)]
        for olds, weight in zip(averages, weights, strict=True)
    ]


def apply(
    groups: Groups,
    count: Count,
    fn: Callable[..., Any],
    grouped: bool,
    inplace: bool,
    name_of: Callable[[int], str],
) -> list[Array]:
    """Return the leaves of an average after ``fn(avg, new, count)``; integers, bools and the first model are copied."""
    if grouped:
        raise TypeError("a grouped function (multi_avg_fn) works on torch tensors only; use AvgFn(fn) for numpy arrays")
    (olds,), news = groups
    leaves = []
    first = int(count) == 0  # a rule cannot know it where the count is a 0-d array
    for index, (old, new) in enumerate(zip(olds, news, strict=True)):
        if first or _kind(old) in (dtypes.BOOL, dtypes.INTEGER):
            leaves.append(_lerp_leaf(old, new, 1.0, inplace))
            continue
        common = old.dtype if new.itemsize == 1 else np.promote_types(old.dtype, new.dtype)  # float8 has none
        moved = np.asarray(fn(old.astype(common, copy=False), new.astype(common, copy=False), int(count)))
        if moved.shape != old.shape:
            raise ValueError(
                f"{name_of(index)}: avg_fn must return the new average, an array of shape {old.shape}, "
                f"got shape {moved.shape}"
            )
        target = old if _writable(old, inplace) else np.empty_like(old)
        target[...] = moved
        leaves.append(target)
    return leaves


def is_finite(leaves: list[Any]) -> bool:
    """Return whether real and complex leaves hold no NaN and no infinity."""
    arrays = map(np.asarray, leaves)
    return all(
        bool(np.isfinite(part).all())
        for array in arrays
        if _kind(array) in (dtypes.REAL, dtypes.COMPLEX)
        for part, _ in _blocks(array, array)
    )


def _kind(array: Array) -> int:
    return dtypes.kind_of(array.dtype.name) or 0


def _writable(array: Array, inplace: bool) -> bool:
    """Tell whether to write into an average: a read-only one is replaced, as every immutable array is."""
    return inplace and array.flags.writeable


def _lerp_leaf(old: Array, new: Array, weight: float, inplace: bool) -> Array:
    if weight == 0:
        return old
    if weight == 1 or _kind(old) in (dtypes.BOOL, dtypes.INTEGER):
        target = old if _writable(old, inplace) else np.empty_like(old)
        target[...] = new
        return target
    target = old if _writable(old, inplace) else old.copy()
    scratch = np.empty(min(BLOCK, old.size), old.dtype)
    for part, new_part in _blocks(target, new):
        _lerp_block(part, new_part, weight, scratch[: part.size].reshape(part.shape))
    return target


def _lerp_block(old: Array, new: Array, weight: float, scratch: Array) -> None:
    """Write one step into a block, in the form that is exact at its nearer end."""
    new = new.astype(old.dtype, copy=False)
    if weight < 0.5:
        np.subtract(new, old, out=scratch)
        np.multiply(scratch, weight, out=scratch)
        np.add(old, scratch, out=old)
    else:
        np.subtract(old, new, out=scratch)
        np.multiply(scratch, 1 - weight, out=scratch)
        np.add(new, scratch, out=old)


def _blocks(old: Array, new: Array) -> Iterator[tuple[Array, Array]]:
    """Yield the same parts of two arrays of one shape, as views, none larger than a block."""
    if old.size <= BLOCK:
        yield old, new
    elif old.ndim > 1 and old.flags.c_contiguous and new.flags.c_contiguous:
        yield from _blocks(old.reshape(-1), new.reshape(-1))
    elif old.ndim > 1 and old.flags.f_contiguous and new.flags.f_contiguous:
        yield from _blocks(old.T.reshape(-1), new.T.reshape(-1))
    else:
        axis = int(np.argmax(old.shape))
        length = max(1, BLOCK * old.shape[axis] // old.size)
        ahead = (slice(None),) * axis
        for start in range(0, old.shape[axis], length):
            part = (*ahead, slice(start, start + length))
            yield from _blocks(old[part], new[part])
