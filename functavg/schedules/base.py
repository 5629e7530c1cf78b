"""What every schedule is: a rate that depends on the clock."""

from __future__ import annotations

__all__ = ["Schedule"]

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from functavg.checks import check_decay, check_fraction

if TYPE_CHECKING:
    from functavg.state import Weight


class Schedule(ABC):
    """A decay that depends on the clock, given by its rate: ``rate(u) = 1 - decay(u)``.

    A schedule of your own overrides ``rate`` and forms it without cancellation: in float32 a decay of about 0.99999
    leaves a difference from 1 that is off by up to 0.3 %, and weights are computed from that difference. As a frozen
    dataclass it prints as its call, compares, hashes and pickles. Plain arithmetic, as in the example, computes with
    host numbers, 0-d arrays and traced values alike.

    Example:
        >>> from dataclasses import dataclass
        >>> import functavg
        >>> @dataclass(frozen=True)
        ... class Harmonic(functavg.schedules.Schedule):
        ...     def rate(self, u):
        ...         return 1 / (u + 1)
        >>> Harmonic()(3), functavg.EMA(Harmonic()).weight(2, 1)
        (0.75, 0.25)
    """

    @abstractmethod
    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay, in [0, 1].

        Args:
            u: the clock after the update, in steps: at least 1, a host number, or a 0-d array where the count is one.
        """

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``, ``1 - rate(u)``."""
        return 1.0 - self.rate(u)


def rate_of(decay: float | Callable[[Any], Any], u: Weight) -> Weight:
    """Return 1 - decay at the clock ``u``, of a schedule, of a function that gives the decay, or of a constant.

    Raises:
        TypeError: what the function returned is not a number.
        ValueError: it is a host number that is out of range or NaN.
    """
    if isinstance(decay, Schedule):
        return check_fraction(decay.rate(u), "rate(u)")
    return 1.0 - (check_fraction(decay(u), "decay(u)") if callable(decay) else decay)


def check_schedule(decay: Any) -> float | Callable[[Any], Any]:
    """Return ``decay`` if it is callable, and as a host float if it is a number in [0, 1].

    Raises:
        TypeError: it is neither a number nor callable.
        ValueError: it is out of range or NaN.
    """
    return decay if callable(decay) else check_decay(decay)
