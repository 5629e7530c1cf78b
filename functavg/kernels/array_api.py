"""Steps over arrays of the Array API standard, JAX's among them, which are never written to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from functavg.kernels import dtypes
from functavg.kernels import numpy as host
from functavg.scalars import is_host
from functavg.state import Count, Weight

Groups = tuple[list[list[Any]], list[Any]]


def refusal(leaf: Any) -> str | None:
    """Return why an array cannot be averaged, or None."""
    if _kind(leaf) is None:
        return f"an array of dtype {leaf.dtype}; only numbers can be averaged"
    return None


def copy(leaf: Any, dtype: str | None, device: Any) -> Any:
    """Return a new array of the values of ``leaf``, in the dtype that its average is held in."""
    library = leaf.__array_namespace__()
    held = dtypes.held_in(_name(leaf), dtype)
    # A dtype that is given, even the same one, ends what JAX calls a weak type; an update would end it and trace anew.
    array = library.asarray(leaf, dtype=leaf.dtype if held == _name(leaf) else dtypes.named(library, held), copy=True)
    return array if device is None else array.to_device(device)


def cast(leaf: Any, like: Any) -> Any:
    """Return ``leaf`` with the dtype and the device of ``like``; itself where it has them."""
    library = like.__array_namespace__()
    return _placed(library.astype(library.asarray(leaf), like.dtype, copy=False), like)


def are_disjoint(averages: Sequence[Any], news: Sequence[Any] = ()) -> bool:
    """Return True: nothing is written to."""
    del averages, news
    return True


def identities(leaves: Sequence[Any]) -> Sequence[Hashable]:
    """Return what differs for all leaves: no write could tell whether two lie over one memory."""
    return range(len(leaves))


def check_writable(averages: Sequence[Any], news: Sequence[Any], name_of: Callable[[int], str]) -> None:
    """Do nothing: nothing is written to."""
    del averages, news, name_of


def try_steps(groups: Groups, weights: list[Weight], inplace: bool, name_of: Callable[[int], str]) -> None:
    """Do nothing: what cannot be computed raises before anything is written."""
    del groups, weights, inplace, name_of


def prepare(
    averages: list[list[Any]], news: list[Any], name_of: Callable[[int], str], roundings: None = None
) -> Groups:
    """Return all leaves as arrays of the averages' library.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average; the message names it.
    """
    del roundings  # only modules of torch hold the rounding of an average
    arrays = []
    for index, new in enumerate(news):
        library = averages[0][index].__array_namespace__()
        foreign = isinstance(new, (np.ndarray, np.generic, bool, int, float, complex))
        if not foreign and not hasattr(new, "__array_namespace__"):
            raise TypeError(f"{name_of(index)}: expected an array of {library.__name__}, got {type(new).__name__}")
        reason = host.refusal(new) if foreign else refusal(new)
        if reason is not None:
            raise TypeError(f"{name_of(index)}: expected an array of numbers, got {reason}")
        new = library.asarray(new) if foreign else new
        for olds in averages:
            old = olds[index]
            if old.shape != new.shape:
                raise ValueError(f"{name_of(index)}: expected shape {old.shape}, got {new.shape}; nothing is broadcast")
            if (_kind(new) or 0) > (_kind(old) or 0):
                raise TypeError(f"{name_of(index)}: expected {old.dtype} or what it can hold, got {new.dtype}")
        arrays.append(new)
    return averages, arrays


def lerp(groups: Groups, weights: list[Weight], inplace: bool) -> list[list[Any]]:
    """Return, for each average, its leaves after the step ``a + w (x - a)`` with its weight.

    A weight of exactly 1 copies, one of exactly 0 does nothing; integers and bools take the newest value.
    """
    del inplace
    averages, news = groups
    return [
        [_lerp_leaf(old, _placed(new, old), weight) for old, new in zip(olds, news, strict=True)]
        for olds, weight in zip(averages, weights, strict=True)
    ]


def apply(
    groups: Groups,
    count: Count,
    fn: Callable[..., Any],
    grouped: bool,
    inplace: bool,
    name_of: Callable[[int], str],
) -> list[Any]:
    """Return the leaves of one average after ``fn(avg, new, count)``; integers and bools take the newest value."""
    del inplace
    if grouped:
        raise TypeError("a grouped function (multi_avg_fn) works on torch tensors only; use AvgFn(fn) for other arrays")
    (olds,), news = groups
    leaves = []
    for index, (old, new) in enumerate(zip(olds, news, strict=True)):
        new = _placed(new, old)
        if _kind(old) in (dtypes.BOOL, dtypes.INTEGER):
            leaves.append(_lerp_leaf(old, new, 1))
            continue
        library = old.__array_namespace__()
        # float8 takes part in no promotion, and every average can hold what has one byte
        common = old.dtype if getattr(new.dtype, "itemsize", 0) == 1 else library.result_type(old, new)
        moved = fn(library.astype(old, common), library.astype(new, common), count)
        if getattr(moved, "shape", None) != old.shape:
            raise ValueError(
                f"{name_of(index)}: avg_fn must return the new average, an array of shape {old.shape}, "
                f"got {getattr(moved, 'shape', type(moved).__name__)}"
            )
        moved = library.astype(moved, old.dtype, copy=True)
        # Only the device knows whether this is the first model, which is copied.
        leaves.append(moved if is_host(count) else _lerp_leaf(moved, new, count == 0))
    return leaves


def is_finite(leaves: list[Any]) -> Any:
    """Return whether real and complex leaves hold no NaN and no infinity, as a 0-d array."""
    result: Any = True
    for leaf in leaves:
        if _kind(leaf) in (dtypes.REAL, dtypes.COMPLEX):
            library = leaf.__array_namespace__()
            result = library.all(library.isfinite(leaf)) & result
    return result


def _placed(array: Any, like: Any) -> Any:
    """Return an array on the device of another one, in JAX also with its sharding; traced arrays have none."""
    here, there = getattr(array, "device", None), getattr(like, "device", None)
    return array if here is None or there is None or here == there else array.to_device(there)


def _name(leaf: Any) -> str:
    return getattr(leaf.dtype, "name", str(leaf.dtype))


def _kind(leaf: Any) -> int | None:
    return dtypes.kind_of(_name(leaf))


def _lerp_leaf(old: Any, new: Any, weight: Weight) -> Any:
    library = old.__array_namespace__()
    whole = _kind(old) in (dtypes.BOOL, dtypes.INTEGER)
    if is_host(weight):
        if weight == 0:
            return old
        if weight == 1 or whole:
            return library.asarray(new, dtype=old.dtype, copy=True)
        return _blend(old, library.astype(new, old.dtype), weight)
    new = library.astype(new, old.dtype)
    if whole:
        return library.where(weight == 0, old, new)
    moved = _blend(old, new, library.astype(weight, _real(library, old)))
    return library.where(weight == 1, new, library.where(weight == 0, old, moved))


def _blend(old: Any, new: Any, weight: Weight) -> Any:
    """Return ``old + weight (new - old)``, which is exact where the two are equal."""
    return old + weight * (new - old)


def _real(library: Any, array: Any) -> Any:
    """Return the real dtype of the precision of an array."""
    return library.finfo(array.dtype).dtype
