"""Schedules on another clock: later, slower, or by updates instead of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from functavg.checks import check_decay, check_integer, check_weight
from functavg.scalars import (
    is_host,
    lift,
    where,
)

if TYPE_CHECKING:
    from functavg.state import Count, Weight


@dataclass(frozen=True)
class After:
    """Nothing is remembered until ``start``, then another schedule, whose clock starts there.

    ``d(u) = 0`` for ``u <= start``, so that each update copies, then ``decay(u - start)``.

    Args:
        decay: a schedule, or a constant decay in [0, 1].
        start: steps before it starts, an integer of at least 0.

    Raises:
        TypeError: ``decay`` is neither a number nor callable, or ``start`` is no integer.
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
        object.__setattr__(self, "decay", _check_schedule(self.decay))
        object.__setattr__(self, "start", check_integer(self.start, "start", 0))

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        u = lift(u)
        # Before the start the schedule is asked at its first step and the answer dropped: it may be undefined there.
        started = u > self.start
        return where(started, _value(self.decay, where(started, u - self.start, 1)), 0.0)

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        u = lift(u)
        started = u > self.start
        return where(started, _complement(self.decay, where(started, u - self.start, 1)), 1.0)


@dataclass(frozen=True)
class Stretched:
    """Another schedule on a clock that ticks once in ``interval`` steps: ``d(u) = decay(u / interval)``.

    With ``Every(rule, k)`` and ``Stretched(decay, k)`` a schedule counts updates where it counted steps; with
    ``interval`` the batch size it counts steps where the clock counts samples. The value stays a decay per step.

    Args:
        decay: a schedule.
        interval: steps to one tick, a positive integer.

    Raises:
        TypeError: ``decay`` is not callable, or ``interval`` is no integer.
        ValueError: ``interval`` is not positive.

    Example:
        >>> from functavg.schedules import Stretched, TFWarmup
        >>> TFWarmup(0.999)(8), Stretched(TFWarmup(0.999), 10)(80)
        (0.5, 0.5)
    """

    decay: Callable[[Any], Any]
    interval: int

    def __post_init__(self) -> None:
        if not callable(self.decay):
            raise TypeError(f"decay must be callable, got {self.decay!r} of {type(self.decay).__name__}")
        object.__setattr__(self, "interval", check_integer(self.interval, "interval", 1))

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        return self.decay(lift(u) / self.interval)

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        return _complement(self.decay, lift(u) / self.interval)


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
        object.__setattr__(self, "decay", _check_schedule(self.decay))

    def __call__(self, count: Count, steps: Count) -> Weight:
        """Return the weight of the newest iterate."""
        u = count + steps
        return 1.0 - _checked(self.decay, u) if is_host(u) else _complement(self.decay, u)


def _value(decay: float | Callable[[Any], Any], u: Weight) -> Weight:
    return decay(u) if callable(decay) else decay


def _complement(decay: float | Callable[[Any], Any], u: Weight) -> Weight:
    return decay.complement(u) if hasattr(decay, "complement") else 1.0 - _checked(decay, u)


def _checked(decay: float | Callable[[Any], Any], u: Weight) -> Weight:
    value = check_weight(_value(decay, u), "decay(u)")
    return check_decay(value, "decay(u)") if is_host(value) else value


def _check_schedule(decay: Any) -> float | Callable[[Any], Any]:
    return decay if callable(decay) else check_decay(decay)
