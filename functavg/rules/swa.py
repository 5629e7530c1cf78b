"""Equal mean."""

from __future__ import annotations

__all__ = ["SWA"]

from dataclasses import dataclass

from functavg.rules.base import WeightRule
from functavg.state import Weight


@dataclass(frozen=True)
class SWA(WeightRule):
    """Stochastic weight averaging: the mean of all iterates, weighted by how long each lasted.

    With ``n`` the count before and ``D`` the steps since the last update, the weight of the newest iterate is
    ``D / (n + D)``.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.SWA()
        >>> state = rule.init(np.zeros(()))
        >>> for value in (1.0, 2.0, 6.0):
        ...     state = rule.update(np.asarray(value), state)
        >>> float(state.average)
        3.0

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018.
    """

    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return the weight of the newest iterate (see the class)."""
        return steps / (count + steps)
