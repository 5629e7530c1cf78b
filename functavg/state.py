"""The state of an average: how much was averaged, the average itself, and what else its rule remembers."""

from __future__ import annotations

__all__: list[str] = []

from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from typing import TypeAlias

T = TypeVar("T")

PyTree: TypeAlias = Any
"""Any nesting of the containers that optree knows, with arrays as leaves."""

Count: TypeAlias = Any
"""A host ``int``, or in its place a 0-d integer array (also a traced one)."""

Weight: TypeAlias = Any
"""A host ``float``, or in its place a 0-d array (also a traced one)."""


if TYPE_CHECKING:

    class AverageState(NamedTuple, Generic[T]):
        """What type checkers see: generic in the tree."""

        count: Count
        average: T
        memory: Any = ()

else:
    # torch 2.6 takes for a named tuple, and so for a tree, only what derives from tuple and from nothing else.
    class AverageState(NamedTuple):
        """The state of an average, one type for every rule and combinator.

        A named tuple, and so a pytree for optree, JAX and torch: it goes through ``jax.jit``, ``jax.lax.scan``,
        ``torch.func.vmap`` and ``torch.compile`` as it is.

        Attributes:
            count: how much has been averaged, in the rule's unit (steps); 0 means nothing yet. A host ``int``: neither
                reading nor writing it touches a device. A 0-d integer array may stand in its place; the weight of an
                update is then computed with it, on its device, and an update in place writes to it if it is a torch
                tensor.
            average: the average, with the structure of the params. Always usable as weights, it needs no read-out.
            memory: whatever else the rule remembers, of one structure from ``init`` on; ``()`` for every weight rule.

        Example:
            >>> import functavg, numpy as np
            >>> functavg.SWA().init({"w": np.zeros(2)})
            AverageState(count=0, average={'w': array([0., 0.])}, memory=())
        """

        count: Count
        average: T
        memory: Any = ()

        __class_getitem__ = classmethod(GenericAlias)
