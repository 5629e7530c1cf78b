"""Decays that go from a first value to a last one in a number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from functavg.checks import check_decay, check_integer
from functavg.scalars import (
    cos,
    lift,
    maximum,
    minimum,
    sin,
)

if TYPE_CHECKING:
    from functavg.state import Weight


@dataclass(frozen=True)
class Linear:
    """A straight line from ``first`` at ``u = 1`` to ``last``, reached ``steps`` steps later and then kept.

    ``d(u) = (1 - t) first + t last`` with ``t = min(1, (u - 1) / steps)``.

    Args:
        first: the decay of the first step, in [0, 1].
        last: the decay at the end, in [0, 1].
        steps: how long it takes, a positive integer.

    Raises:
        TypeError: a decay is no number, or ``steps`` no integer.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.Linear(0.5, 1.0, steps=10)
        >>> schedule(1), schedule(6), schedule(100)
        (0.5, 0.75, 1.0)
    """

    first: float
    last: float
    steps: int

    def __post_init__(self) -> None:
        _check_path(self)

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        t = minimum((lift(u) - 1.0) / self.steps, 1.0)
        return (1.0 - t) * self.first + t * self.last

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        left = _left(self, u)
        return left * (1.0 - self.first) + (1.0 - left) * (1.0 - self.last)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from ``first`` at ``u = 1`` to ``last``, reached ``steps`` steps later and then kept.

    ``d(u) = last - (last - first) (1 + cos(pi t)) / 2`` with ``t = min(1, (u - 1) / steps)``.

    Args:
        first: the decay of the first step, in [0, 1].
        last: the decay at the end, in [0, 1]; 1 for a teacher that comes to rest.
        steps: how long it takes, a positive integer.

    Raises:
        TypeError: a decay is no number, or ``steps`` no integer.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.Cosine(0.996, 1.0, steps=1000)
        >>> schedule(1), round(schedule(501), 6), schedule(1001)
        (0.996, 0.998, 1.0)

    Source: Grill et al., Bootstrap Your Own Latent, 2020; Caron et al., Emerging Properties in Self-Supervised Vision
    Transformers (DINO), 2021.
    """

    first: float
    last: float
    steps: int

    def __post_init__(self) -> None:
        _check_path(self)

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        t = minimum((lift(u) - 1.0) / self.steps, 1.0)
        rest = 0.5 + 0.5 * cos(math.pi * t)
        return rest * self.first + (1.0 - rest) * self.last

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        rest = sin(0.5 * math.pi * _left(self, u)) ** 2
        return rest * (1.0 - self.first) + (1.0 - rest) * (1.0 - self.last)


def _left(schedule: Linear | Cosine, u: Weight) -> Weight:
    """Return the part of the path that is still to go; 1 minus the part gone would cancel near the end."""
    return maximum(schedule.steps - (lift(u) - 1.0), 0.0) / schedule.steps


def _check_path(schedule: Linear | Cosine) -> None:
    for name in ("first", "last"):
        object.__setattr__(schedule, name, check_decay(getattr(schedule, name), name))
    object.__setattr__(schedule, "steps", check_integer(schedule.steps, "steps", 1))
