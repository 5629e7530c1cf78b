"""States of models that grew."""

from __future__ import annotations

__all__: list[str] = []

from typing import Any

from functavg import trees
from functavg.rules.saved import get_shape
from functavg.state import AverageState, T


def grow_state(state: AverageState[Any], fresh: AverageState[T]) -> AverageState[T]:
    """Return ``fresh``, the state that ``init`` makes of the grown params, with every leaf of ``state``, by path.

    Raises:
        ValueError: a leaf of ``state`` would vanish or change its shape.
    """
    leaves, spec = trees.flatten(fresh)
    old_leaves, old_spec = trees.flatten(state)
    indices = {path: index for index, path in enumerate(spec.paths())}
    for name, path, old in zip(trees.paths(old_spec), old_spec.paths(), old_leaves, strict=True):
        where = name.replace("tree", "state", 1)
        if path not in indices:
            raise ValueError(
                f"{where} would vanish: the params have no such leaf. "
                "Pass params with every leaf that the state has, or start anew with `init`"
            )
        shape, new_shape = map(get_shape, (old, leaves[indices[path]]))
        if shape != new_shape:
            raise ValueError(
                f"{where} has shape {shape}, the params have {new_shape}; extend adds leaves and resizes none"
            )
        leaves[indices[path]] = old
    grown: AverageState[T] = trees.unflatten(spec, leaves)
    return grown
