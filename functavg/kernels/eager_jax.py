"""One jitted call for the arrays of JAX outside any trace: to start one operation on each would cost far more.

JAX is never imported: whoever has an array of it has loaded it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from functavg.scalars import is_host
from functavg.state import Weight

LeafStep = Callable[[Any, Any, Any], Any]
"""``fn(old, new, weight)`` of one leaf; all are traced, so it may branch on dtypes but not on values."""


def takes(lists: Sequence[Sequence[Any]], weights: Sequence[Weight]) -> bool:
    """Tell whether all leaves are arrays of JAX and all weights numbers or such arrays, none of them traced."""
    first = next(itertools.chain(*lists), None)
    if first is None or first.__array_namespace__().__name__ != "jax.numpy":
        return False
    jax = sys.modules["jax"]
    kinds = set(map(type, itertools.chain(*lists, (weight for weight in weights if not is_host(weight)))))
    return all(issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer) for kind in kinds)


def step(fn: LeafStep, averages: Sequence[list[Any]], news: list[Any], weights: Sequence[Weight]) -> list[list[Any]]:
    """Return, for each average, its leaves after ``fn(old, new, weight)``, placed as the old ones are.

    The leaves of one sharding take one call, as a call takes no arrays that are committed to different devices. It
    compiles once for a structure: weights are arguments.
    """
    homes = [leaf.sharding for leaf in averages[0]]
    if any([leaf.sharding for leaf in olds] != homes for olds in averages[1:]):
        return [step(fn, [olds], news, [weight])[0] for olds, weight in zip(averages, weights, strict=True)]
    *averages, news = [_strengthen(leaves) for leaves in (*averages, news)]
    scalars = _strengthen([np.asarray(weight, np.float64) if is_host(weight) else weight for weight in weights])
    if [leaf.sharding for leaf in news] != homes:  # to_device of JAX takes shardings, too
        news = [new if new.sharding == home else new.to_device(home) for new, home in zip(news, homes, strict=True)]
    # In one call with what is committed to its device, all would come to be so.
    committed = [any(leaf.committed for leaf in leaves) for leaves in zip(news, *averages, strict=True)]
    calls: dict[Any, list[int]] = {}
    for index, key in enumerate(zip(homes, committed, strict=True)):
        calls.setdefault(key, []).append(index)
    for (home, is_committed), indices in calls.items():
        olds = [[leaves[index] for index in indices] for leaves in averages]
        moved = _jitted(home if is_committed else None)(fn, olds, [news[index] for index in indices], scalars)
        for leaves, results in zip(averages, moved, strict=True):
            for index, result in zip(indices, results, strict=True):
                leaves[index] = result
    return averages


def _strengthen(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays that are not weakly typed, as results never are: a call would be compiled for either kind."""
    return [
        array.__array_namespace__().asarray(array, dtype=array.dtype) if getattr(array, "weak_type", False) else array
        for array in arrays
    ]


@functools.cache
def _jitted(sharding: Any) -> Callable[..., Any]:
    """Return the jitted step whose results have this sharding, None for where JAX puts them."""
    jax: Any = sys.modules["jax"]
    jitted: Callable[..., Any] = jax.jit(_step, static_argnums=0, out_shardings=sharding)
    return jitted


def _step(fn: LeafStep, averages: list[list[Any]], news: list[Any], weights: list[Any]) -> list[list[Any]]:
    return [
        [fn(old, new, weight) for old, new in zip(olds, news, strict=True)]
        for olds, weight in zip(averages, weights, strict=True)
    ]
