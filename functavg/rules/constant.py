"""The newest iterate, and what `init` saw."""

from __future__ import annotations

from dataclasses import dataclass

from functavg.rules.base import WeightRule
from functavg.state import Weight


@dataclass(frozen=True)
class Latest(WeightRule):
    """The newest iterate: weight 1.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.Latest().update(np.ones(2), functavg.Latest().init(np.zeros(2))).average
        array([1., 1.])
    """

    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return 1."""
        del count, steps
        return 1.0


@dataclass(frozen=True)
class Freeze(WeightRule):
    """The params that ``init`` saw: weight 0, the first update included.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.Freeze().update(np.ones(2), functavg.Freeze().init(np.zeros(2))).average
        array([0., 0.])
    """

    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return 0."""
        del count, steps
        return 0.0
