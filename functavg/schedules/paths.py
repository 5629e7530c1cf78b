"""Decays that go from a first value to a last one in a number of steps."""

from __future__ import annotations

__all__ = ["Cosine", "Linear"]

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from functavg.checks import check_decay, check_integer
from functavg.scalars import lift, maximum, sin
from functavg.schedules.base import Schedule

if TYPE_CHECKING:
    from functavg.state import Weight


@dataclass(frozen=True)
class _Path(Schedule):
    """A decay ``d = s first + (1 - s) last``; subclasses say how the share ``s`` of ``first`` falls from 1 to 0."""

    first: float
    last: float
    _: KW_ONLY
    duration: int

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            object.__setattr__(self, name, check_decay(getattr(self, name), name))
        object.__setattr__(self, "duration", check_integer(self.duration, "duration", 1))

    @abstractmethod
    def _share(self, remaining: Weight) -> Weight:
        """Return the share of ``first``, given the fraction of the path that remains."""

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``."""
        # 1 minus the fraction gone would cancel near the end.
        share = self._share(maximum(self.duration - (lift(u) - 1.0), 0.0) / self.duration)
        return share * (1.0 - self.first) + (1.0 - share) * (1.0 - self.last)


@dataclass(frozen=True)
class Linear(_Path):
    """A straight line from ``first`` at ``u = 1`` to ``last``, reached ``duration`` steps later and then kept.

    ``d(u) = (1 - t) first + t last`` with ``t = min(1, (u - 1) / duration)``.

    Args:
        first: the decay of the first step, in [0, 1].
        last: the decay at the end, in [0, 1].
        duration: steps from ``first`` to ``last``, a positive integer.

    Raises:
        TypeError: a decay is not a number, or ``duration`` is not an integer.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.Linear(0.5, 1.0, duration=10)
        >>> schedule(1), schedule(6), schedule(100)
        (0.5, 0.75, 1.0)
    """

    def _share(self, remaining: Weight) -> Weight:
        """Return the fraction of the path that remains."""
        return remaining


@dataclass(frozen=True)
class Cosine(_Path):
    """Half a cosine from ``first`` at ``u = 1`` to ``last``, reached ``duration`` steps later and then kept.

    ``d(u) = last - (last - first) (1 + cos(pi t)) / 2`` with ``t = min(1, (u - 1) / duration)``.

    Args:
        first: the decay of the first step, in [0, 1].
        last: the decay at the end, in [0, 1]; 1 for a teacher that comes to rest.
        duration: steps from ``first`` to ``last``, a positive integer.

    Raises:
        TypeError: a decay is not a number, or ``duration`` is not an integer.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.Cosine(0.996, 1.0, duration=1000)
        >>> schedule(1), round(schedule(501), 6), schedule(1001)
        (0.996, 0.998, 1.0)

    Source: Grill et al., Bootstrap Your Own Latent, 2020; Caron et al., Emerging Properties in Self-Supervised Vision
    Transformers (DINO), 2021.
    """

    def _share(self, remaining: Weight) -> Weight:
        """Return half a cosine of the fraction gone, ``(1 + cos(pi t)) / 2``."""
        return sin(0.5 * math.pi * remaining) ** 2
