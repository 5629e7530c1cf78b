"""A rule that is updated every so many steps."""

from __future__ import annotations

__all__ = ["Every"]

from dataclasses import KW_ONLY, dataclass
from typing import Any

from functavg.checks import check_integer
from functavg.combinators.gate import Gate
from functavg.rules.base import AveragingRule, check_rule
from functavg.scalars import maximum, where
from functavg.state import Count, PyTree


@dataclass(frozen=True)
class Every(Gate):
    """A rule that is updated every ``interval`` steps, with the number of steps since its last update.

    With ``D`` the steps since ``start`` or since the last update that got through, an update gets through when
    ``D >= interval``: in single steps, those at ``start + interval``, ``start + 2 interval``, ... The inner rule is
    updated with ``steps=D``, always. So a decay is per step whatever the interval, and the snapshots of an equal mean
    weigh the same. Until the first one the state stays as ``init`` made it, with count 0.

    ``memory`` is the steps since the inner rule's last update (until ``start``: minus those that are left) and the
    memory of the inner rule. Where the state's count is a 0-d array, so is that; a closed gate then is a weight of 0.

    Args:
        rule: the rule to update.
        interval: steps between two updates, at least 1.
        start: steps to let pass before. Default: 0.

    Raises:
        TypeError: ``rule`` is not a rule, or a number is not an integer.
        ValueError: ``interval`` is less than 1, or ``start`` negative.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.Every(functavg.SWA(), 10)
        >>> state = rule.init(np.zeros(()))
        >>> for step in range(1, 51):
        ...     state = rule.update(np.asarray(float(step)), state)
        >>> state.count, float(state.average)
        (50, 30.0)

    Source: optax.MultiSteps for the shape of it; the decay is per step as in Karras et al., 2024 (EDM2).
    """

    rule: AveragingRule
    interval: int
    _: KW_ONLY
    start: int = 0

    def __post_init__(self) -> None:
        check_rule(self.rule)
        object.__setattr__(self, "interval", check_integer(self.interval, "interval", 1))
        object.__setattr__(self, "start", check_integer(self.start, "start", 0))

    @property
    def least(self) -> int:
        return -self.start

    def ask(self, params: PyTree, /, own: Count, steps: Count, on_host: bool) -> tuple[Any, Count, Count]:
        del params, on_host
        waited = own + steps
        is_open = waited >= self.interval
        # The maximum changes nothing where the gate is open; where it is closed it keeps the weights finite.
        return is_open, where(is_open, 0, waited), maximum(waited, self.interval)
