"""Steps over arrays of the Array API standard, JAX's among them, which are never written to."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from functavg.advice import advise
from functavg.kernels import dtypes, eager_jax
from functavg.kernels import numpy as host
from functavg.scalars import is_host
from functavg.state import Count, Weight

Groups = tuple[list[list[Any]], list[Any]]

_FOREIGN = (np.ndarray, np.generic, bool, int, float, complex)
"""What becomes an array of the averages' library."""


def refusal(leaf: Any) -> str | None:
    """Return why an array cannot be averaged, or None."""
    if _kind(leaf) is None:
        return f"an array of dtype {leaf.dtype}; only numbers can be averaged"
    return None


def copy(leaf: Any, dtype: str | None, device: Any) -> Any:
    """Return a new array of the values of ``leaf``, in the dtype that its average is held in."""
    library = leaf.__array_namespace__()
    name = _name(leaf.dtype)
    held = dtypes.held_in(name, dtype)
    # A dtype that is given, even the same one, ends what JAX calls a weak type; an update would end it and trace anew.
    array = library.asarray(
        leaf, dtype=leaf.dtype if held == _name(leaf.dtype) else dtypes.named(library, held), copy=True
    )
    return array if device is None else array.to_device(device)


def cast(leaf: Any, like: Any) -> Any:
    """Return ``leaf`` with the dtype and the device of ``like``; itself where it has them."""
    library = like.__array_namespace__()
    return _placed(library.astype(library.asarray(leaf), like.dtype, copy=False), like)


def identities(leaves: Sequence[Any]) -> Sequence[Hashable]:
    """Return a key for each leaf, all different: nothing is written to, so aliases cannot matter."""
    return range(len(leaves))


def prepare(averages: list[list[Any]], news: list[Any], name_of: Callable[[int], str], *options: Any) -> Groups:
    """Return all leaves as arrays of the averages' library; nothing is written to, so they may share memory.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average; the message names it.
    """
    del options
    if not _all_fit(averages, news):
        news = [_check_leaf([olds[index] for olds in averages], new, index, name_of) for index, new in enumerate(news)]
    return averages, news


def _all_fit(averages: list[list[Any]], news: list[Any]) -> bool:
    """Tell whether all new leaves are arrays that fit as they are, by one look at each column, as there may be many."""
    if any(issubclass(kind, _FOREIGN) or not hasattr(kind, "__array_namespace__") for kind in set(map(type, news))):
        return False
    shapes, new_dtypes = [new.shape for new in news], [new.dtype for new in news]
    pairs = {pair for olds in averages for pair in zip((old.dtype for old in olds), new_dtypes, strict=True)}
    kinds = [(_kind_of(old), _kind_of(new)) for old, new in pairs]
    return all(new is not None and new <= (old or 0) for old, new in kinds) and all(
        [old.shape for old in olds] == shapes for olds in averages
    )


def _check_leaf(olds: list[Any], new: Any, index: int, name_of: Callable[[int], str]) -> Any:
    """Return a new leaf as an array of the averages' library."""
    library = olds[0].__array_namespace__()
    foreign = isinstance(new, _FOREIGN)
    if not foreign and not hasattr(new, "__array_namespace__"):
        raise TypeError(
            f"{name_of(index)}: expected an array of {library.__name__}, got {type(new).__name__}{advise(new)}"
        )
    reason = host.refusal(new) if foreign else refusal(new)
    if reason is not None:
        raise TypeError(f"{name_of(index)}: expected an array of numbers, got {reason}")
    new = library.asarray(new) if foreign else new
    for old in olds:
        if old.shape != new.shape:
            raise ValueError(f"{name_of(index)}: expected shape {old.shape}, got {new.shape}; nothing is broadcast")
        if (_kind(new) or 0) > (_kind(old) or 0):
            raise TypeError(f"{name_of(index)}: expected {old.dtype} or what it can hold, got {new.dtype}")
    return new


def lerp(groups: Groups, weights: list[Weight], inplace: bool) -> list[list[Any]]:
    """Return, for each average, its leaves after the step ``a + w (x - a)`` with its weight.

    A weight of exactly 1 copies, one of exactly 0 does nothing; integers and bools take the newest value.
    """
    del inplace
    averages, news = groups
    moving = [index for index, weight in enumerate(weights) if not (is_host(weight) and weight in (0, 1))]
    results: dict[int, list[Any]] = {}
    if moving and eager_jax.takes([*averages, news], weights):
        step = _move if all(is_host(weights[index]) for index in moving) else lerp_leaf
        moved = eager_jax.step(step, [averages[index] for index in moving], news, [weights[index] for index in moving])
        results = dict(zip(moving, moved, strict=True))
    return [
        results.get(index) or [lerp_leaf(old, _placed(new, old), weight) for old, new in zip(olds, news, strict=True)]
        for index, (olds, weight) in enumerate(zip(averages, weights, strict=True))
    ]


def apply(
    groups: Groups,
    count: Count,
    fn: Callable[..., Any],
    grouped: bool,
    inplace: bool,
    name_of: Callable[[int], str],
) -> list[Any]:
    """Return the leaves of an average after ``fn(avg, new, count)``; integers, bools and the first model are copied."""
    del inplace
    if grouped:
        raise TypeError("a grouped function (multi_avg_fn) works on torch tensors only; use AvgFn(fn) for other arrays")
    (olds,), news = groups
    leaves = []
    for index, (old, new) in enumerate(zip(olds, news, strict=True)):
        new = _placed(new, old)
        if _is_whole(old):
            leaves.append(lerp_leaf(old, new, 1))
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
        leaves.append(moved if is_host(count) else lerp_leaf(moved, new, count == 0))
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


def _name(dtype: Any) -> str:
    return getattr(dtype, "name", str(dtype))


def _kind_of(dtype: Any) -> int | None:
    return dtypes.kind_of(_name(dtype))


def _kind(leaf: Any) -> int | None:
    return _kind_of(leaf.dtype)


def lerp_leaf(old: Any, new: Any, weight: Weight) -> Any:
    """Return one leaf after the step ``a + w (x - a)``: the readable step, which traced values take as it is."""
    library = old.__array_namespace__()
    if is_host(weight):
        if weight == 0:
            return old
        return _copy(new, old.dtype) if weight == 1 else _move(old, new, weight)
    new = library.astype(new, old.dtype)
    moved = new if _is_whole(old) else library.where(weight == 1, new, _move(old, new, weight))
    return library.where(weight == 0, old, moved)


def _move(old: Any, new: Any, weight: Weight) -> Any:
    """Return one leaf after a step whose weight is neither 0 nor 1; it is exact where the two are equal."""
    if _is_whole(old):
        return _copy(new, old.dtype)
    library = old.__array_namespace__()
    if not is_host(weight):
        weight = library.astype(weight, library.finfo(old.dtype).dtype)  # the real dtype of this precision
    return old + weight * (library.astype(new, old.dtype) - old)


def _copy(array: Any, dtype: Any) -> Any:
    return array.__array_namespace__().asarray(array, dtype=dtype, copy=True)


def _is_whole(array: Any) -> bool:
    """Tell whether an array takes the newest values instead of being averaged."""
    return _kind(array) in (dtypes.BOOL, dtypes.INTEGER)
