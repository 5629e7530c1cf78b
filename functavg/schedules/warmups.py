"""Decays that rise from a low one to a limit, and the one that stays."""

from __future__ import annotations

__all__ = ["Constant", "ExponentialRamp", "HalfLifeRamp", "InversePower", "TFWarmup"]

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from functavg.checks import check_at_least, check_decay, check_integer, check_number, check_positive
from functavg.scalars import exp, expm1, lift, log1p, maximum, minimum
from functavg.schedules.base import Schedule

if TYPE_CHECKING:
    from functavg.state import Weight


@dataclass(frozen=True)
class Constant(Schedule):
    """The same decay at every step, the first included: ``d(u) = decay``.

    ``EMA(0.999)`` copies at the first update; ``EMA(Constant(0.999))`` takes what ``init`` saw for the iterate before
    it, as target networks and teachers do.

    Args:
        decay: the decay per step in [0, 1].

    Raises:
        TypeError: ``decay`` is not a number.
        ValueError: ``decay`` is out of range or NaN.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.EMA(functavg.schedules.Constant(0.75))
        >>> float(rule.update(np.ones(()), rule.init(np.zeros(()))).average)
        0.25
    """

    decay: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_decay(self.decay))

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay, a host number."""
        del u
        return 1.0 - self.decay


@dataclass(frozen=True)
class TFWarmup(Schedule):
    """The warm-up of TensorFlow: the average is about as wide as a tenth of the time so far.

    ``d(u) = max(min_decay, min(decay, (1 + u) / (w + u)))`` with ``w`` the ``warmup``.

    Args:
        decay: the decay per step at the end, in [0, 1].
        warmup: how slow it is; the ramp reaches ``d`` at about ``u = warmup / (1 - d)``. At least 1. Default: 10.
        min_decay: the decay at least, in [0, decay]. Default: 0.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.TFWarmup(0.999)
        >>> schedule(8), schedule(10**6)
        (0.5, 0.999)

    Source: tf.train.ExponentialMovingAverage with ``num_updates``.
    """

    decay: float
    _: KW_ONLY
    warmup: float = 10.0
    min_decay: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_decay(self.decay))
        object.__setattr__(self, "warmup", check_at_least(self.warmup, "warmup", 1))
        object.__setattr__(self, "min_decay", _check_min_decay(self.min_decay, self.decay))

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``."""
        return _clip((self.warmup - 1.0) / (self.warmup + lift(u)), self.min_decay, self.decay)


@dataclass(frozen=True)
class InversePower(Schedule):
    """A power law: the rate falls as a power of the time so far.

    ``d(u) = max(min_decay, min(decay, 1 - (1 + k / g)^(-p)))`` with ``k = max(0, u - start)``, ``g`` the ``inv_gamma``
    and ``p`` the ``power``. With ``p = g = 1`` it is the equal mean of what ``init`` saw and all iterates.

    Args:
        decay: the decay per step at most, in [0, 1].
        inv_gamma: steps in which the ramp takes off, positive. Default: 1.
        power: how fast the rate falls, positive: ``d`` is reached at about ``inv_gamma (1 - d)^(-1/power)`` steps.
            Default: 2/3.
        min_decay: the decay at least, in [0, decay], also before ``start``. Default: 0.
        start: steps before the ramp starts; until then the decay is ``min_decay``. Default: 0.

    Raises:
        TypeError: an argument is not a number, or ``start`` is not an integer.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.InversePower(0.9999, power=0.75)
        >>> round(schedule(15), 6), round(schedule(10**4), 6)
        (0.875, 0.999)

    Source: Crowson, k-diffusion, EMAWarmup.
    """

    decay: float
    _: KW_ONLY
    inv_gamma: float = 1.0
    power: float = 2.0 / 3.0
    min_decay: float = 0.0
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_decay(self.decay))
        object.__setattr__(self, "inv_gamma", check_positive(self.inv_gamma, "inv_gamma"))
        object.__setattr__(self, "power", check_positive(self.power, "power"))
        object.__setattr__(self, "min_decay", _check_min_decay(self.min_decay, self.decay))
        object.__setattr__(self, "start", check_integer(self.start, "start", 0))

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``."""
        k = maximum(lift(u) - self.start, 0)
        return _clip(exp(-self.power * log1p(k / self.inv_gamma)), self.min_decay, self.decay)


@dataclass(frozen=True)
class ExponentialRamp(Schedule):
    """A decay that approaches its end exponentially: ``d(u) = decay (1 - exp(-u / tau))``.

    Args:
        decay: the decay per step at the end, in [0, 1].
        tau: the time constant of the approach in steps, positive. Default: 2000.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> round(functavg.schedules.ExponentialRamp(0.9999)(2000), 5)
        0.63206

    Source: Ultralytics YOLO, ModelEMA.
    """

    decay: float
    tau: float = 2000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_decay(self.decay))
        object.__setattr__(self, "tau", check_positive(self.tau, "tau"))

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``."""
        return (1.0 - self.decay) + self.decay * exp(-lift(u) / self.tau)


@dataclass(frozen=True)
class HalfLifeRamp(Schedule):
    """A half-life in proportion to the time so far, up to a limit: ``d(u) = 2^(-1 / min(half_life, fraction u))``.

    Below the limit it is close to the power-function EMA with ``gamma = ln 2 / fraction - 1``, 6.70 for 0.09.

    Args:
        half_life: the half-life at most, in steps; positive, infinity for no limit.
        fraction: the half-life over the time so far, positive. Default: 0.09.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> import functavg
        >>> schedule = functavg.schedules.HalfLifeRamp(half_life=1000, fraction=0.1)
        >>> schedule(10), schedule(10**6) == 2 ** (-1 / 1000)
        (0.5, True)

    Source: the traditional EMA of Karras et al., 2024 (EDM2), whose clock counts images: ``update(..., steps=batch)``.
    """

    half_life: float
    fraction: float = 0.09

    def __post_init__(self) -> None:
        object.__setattr__(self, "half_life", check_positive(self.half_life, "half_life", infinite=True))
        object.__setattr__(self, "fraction", check_positive(self.fraction, "fraction"))

    def rate(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``."""
        return -expm1(-math.log(2.0) / minimum(self.fraction * lift(u), self.half_life))


def _clip(rate: Weight, min_decay: float, decay: float) -> Weight:
    """Return the rate of the decay between these two that is nearest."""
    return minimum(maximum(rate, 1.0 - decay), 1.0 - min_decay)


def _check_min_decay(min_decay: Any, decay: float) -> float:
    number = check_number(min_decay, "min_decay")
    if not 0.0 <= number <= decay:
        raise ValueError(f"min_decay must be in [0, decay] = [0, {decay!r}], got {min_decay!r}")
    return number
