"""Schedules on another clock: later, slower, or by updates instead of steps."""

from __future__ import annotations

__all__ = ["After", "PerUpdate", "Stretched"]

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from functavg.checks import check_callable, check_integer
from functavg.scalars import lift, where
from functavg.schedules.base import Schedule, check_schedule, rate_of

if TYPE_CHECKING:
    from functavg.state import Count, Weight


@dataclass(frozen=True)
class After(Schedule):
    """A decay of 0 until ``start``, then another schedule, whose clock starts there.

    ``d(u) = 0`` for ``u <= start``, so that each update copies, then ``decay(u - start)``.

    Args:
        decay: a schedule, or a constant decay in [0, 1].
        start: steps before it starts, an integer of at least 0.

    Raises:
        TypeError: ``decay`` is neither a number nor callable, or ``start`` is not an integer.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.After(functavg.schedules.TFWarmup(0.999), 100)
        >>> schedule(100), schedule(108)
        (0.0, 0.5)
    """

    decay: float | Callable[[Any], Any]
    start: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_schedule(self.decay))
        object.__setattr__(self, "start", check_integer(self.start, "start", 0))

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``."""
        u = lift(u)
        started = u > self.start
        # Until the start the schedule is asked for its first step, and the answer dropped: earlier it may be undefined.
        return where(started, rate_of(self.decay, where(started, u - self.start, 1)), 1.0)


@dataclass(frozen=True)
class Stretched(Schedule):
    """Another schedule on a clock that ticks once in ``interval`` steps: ``d(u) = decay(u / interval)``.

    With ``Every(rule, k)`` and ``Stretched(decay, k)`` a schedule counts updates where it counted steps; with
    ``interval`` the batch size it counts steps where the clock counts samples. The value stays a decay per step.

    Args:
        decay: a schedule.
        interval: steps to one tick, a positive integer.

    Raises:
        TypeError: ``decay`` is not callable, or ``interval`` is not an integer.
        ValueError: ``interval`` is not positive.

    Example:
        >>> from functavg.schedules import Stretched, TFWarmup
        >>> TFWarmup(0.999)(8), Stretched(TFWarmup(0.999), 10)(80)
        (0.5, 0.5)
    """

    decay: Callable[[Any], Any]
    interval: int

    def __post_init__(self) -> None:
        check_callable(self.decay, "decay")
        object.__setattr__(self, "interval", check_integer(self.interval, "interval", 1))

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``."""
        return rate_of(self.decay, lift(u) / self.interval)


@dataclass(frozen=True)
class PerUpdate:
    """A decay per update instead of per step, as a function for ``WeightFn``: the weight is ``1 - decay(n + D)``.

    Many libraries average every ``k`` steps with a decay that is meant for one update, so that the average remembers
    ``k`` times as long. ``Every(WeightFn(PerUpdate(decay)), k)`` does so: the gap does not enter the weight. The
    schedule still counts steps; ``PerUpdate(Stretched(decay, k))`` counts updates. A constant decay per update is
    also ``EMA(units.scale_decay(decay, 1 / k))``, which copies at the first update.

    Args:
        decay: a schedule, or a constant decay in [0, 1].

    Raises:
        TypeError: ``decay`` is neither a number nor callable.
        ValueError: a decay is out of range or NaN.

    Example:
        >>> import functavg
        >>> rule = functavg.WeightFn(functavg.schedules.PerUpdate(0.75))
        >>> rule.weight(0, 1), rule.weight(0, 10)
        (0.25, 0.25)
    """

    decay: float | Callable[[Any], Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_schedule(self.decay))

    def __call__(self, count: Count, steps: Count) -> Weight:
        """Return the weight of the newest iterate."""
        return rate_of(self.decay, count + steps)
