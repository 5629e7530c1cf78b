"""Whether two arrays are the same object."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Hashable, Sequence
from typing import Any

from functavg.scalars import is_compiling


def objects(arrays: Sequence[Any]) -> Sequence[Hashable]:
    """Return keys that are equal for the same object only; a compiler would take an ``id`` for a constant."""
    return arrays if is_compiling() else list(map(id, arrays))


def are_aliased(arrays: Sequence[Any]) -> bool:
    """Tell whether an array occurs more than once."""
    return len(set(objects(arrays))) != len(arrays)
