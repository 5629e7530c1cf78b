"""Decays that depend on the clock, for ``EMA(decay)`` and, where a decay is meant per update, for ``WeightFn``.

A schedule is a function of ``u = n + D >= 1``, the clock after this update, in steps. It is a frozen dataclass: it
prints as the call that makes it, compares, hashes and pickles. It computes with host numbers, 0-d tensors and traced
values alike.

``complement(u)`` is ``1 - d(u)``, formed without cancellation. In float32 a decay of about 0.99999 leaves a difference
from 1 that is off by up to 0.3 %; so where the clock is on a device, weights are computed from the complement. A
schedule of your own may have the method, too.

An ``EMA`` trusts a schedule from the first update on: where ``decay(1)`` is not 0, what ``init`` saw stays in the
average with the weight ``decay(1) decay(2) ...``. ``After(decay, 1)`` copies at the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from functavg.scalars import (
    check_integer,
    check_weight,
    cos,
    exp,
    expm1,
    is_host,
    lift,
    log1p,
    maximum,
    minimum,
    sin,
    where,
)
from functavg.units import check_decay, check_positive, real

if TYPE_CHECKING:
    from functavg.state import Count, Weight


@dataclass(frozen=True)
class Constant:
    """The same decay at every step, the first included: ``d(u) = decay``.

    ``EMA(0.999)`` copies at the first update; ``EMA(Constant(0.999))`` takes what ``init`` saw for the iterate before
    it, as target networks and teachers do.

    Args:
        decay: the decay per step in [0, 1].

    Raises:
        TypeError: ``decay`` is no number.
        ValueError: ``decay`` is out of range or NaN.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.EMA(Constant(0.75))
        >>> float(rule.update(np.ones(()), rule.init(np.zeros(()))).average)
        0.25
    """

    decay: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_decay(self.decay))

    def __call__(self, u: Weight) -> Weight:
        """Return the decay."""
        del u
        return self.decay

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay."""
        del u
        return 1.0 - self.decay


@dataclass(frozen=True)
class TFWarmup:
    """The warm-up of TensorFlow: the average is about as wide as a tenth of the time so far.

    ``d(u) = max(min_decay, min(decay, (1 + u) / (w + u)))`` with ``w`` the ``warmup``.

    Args:
        decay: the decay per step at the end, in [0, 1].
        warmup: how slow it is; the ramp reaches ``d`` at about ``u = warmup / (1 - d)``. At least 1. Default: 10.
        min_decay: the decay at least, in [0, decay]. Default: 0.

    Raises:
        TypeError: an argument is no number.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> schedule = TFWarmup(0.999)
        >>> schedule(8), schedule(10**6)
        (0.5, 0.999)

    Source: tf.train.ExponentialMovingAverage with ``num_updates``.
    """

    decay: float
    warmup: float = 10.0
    min_decay: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_decay(self.decay))
        object.__setattr__(self, "warmup", _at_least_one(self.warmup, "warmup"))
        object.__setattr__(self, "min_decay", _check_min_decay(self.min_decay, self.decay))

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        u = lift(u)
        return maximum(minimum((1.0 + u) / (self.warmup + u), self.decay), self.min_decay)

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        ramp = (self.warmup - 1.0) / (self.warmup + lift(u))
        return minimum(maximum(ramp, 1.0 - self.decay), 1.0 - self.min_decay)


@dataclass(frozen=True)
class InversePower:
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
        TypeError: an argument is no number, or ``start`` no integer.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> schedule = InversePower(0.9999, power=0.75)
        >>> round(schedule(15), 6), round(schedule(10**4), 6)
        (0.875, 0.999)

    Source: Crowson, k-diffusion, EMAWarmup.
    """

    decay: float
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

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        return maximum(minimum(-expm1(self._log_complement(u)), self.decay), self.min_decay)

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        return minimum(maximum(exp(self._log_complement(u)), 1.0 - self.decay), 1.0 - self.min_decay)

    def _log_complement(self, u: Weight) -> Weight:
        k = maximum(lift(u) - self.start, 0)
        return -self.power * log1p(k / self.inv_gamma)


@dataclass(frozen=True)
class ExponentialRamp:
    """A decay that approaches its end exponentially: ``d(u) = decay (1 - exp(-u / tau))``.

    Args:
        decay: the decay per step at the end, in [0, 1].
        tau: the time constant of the approach in steps, positive. Default: 2000.

    Raises:
        TypeError: an argument is no number.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> round(ExponentialRamp(0.9999)(2000), 5)
        0.63206

    Source: Ultralytics YOLO, ModelEMA.
    """

    decay: float
    tau: float = 2000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_decay(self.decay))
        object.__setattr__(self, "tau", check_positive(self.tau, "tau"))

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        return -self.decay * expm1(-lift(u) / self.tau)

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        return (1.0 - self.decay) + self.decay * exp(-lift(u) / self.tau)


@dataclass(frozen=True)
class HalfLifeRamp:
    """A half-life in proportion to the time so far, up to a limit: ``d(u) = 2^(-1 / min(half_life, fraction u))``.

    Below the limit it is close to the power-function EMA with ``gamma = ln 2 / fraction - 1``, 6.70 for 0.09.

    Args:
        half_life: the half-life at most, in steps; positive, infinity for no limit.
        fraction: the half-life over the time so far, positive. Default: 0.09.

    Raises:
        TypeError: an argument is no number.
        ValueError: an argument is out of range or NaN.

    Example:
        >>> schedule = HalfLifeRamp(half_life=1000, fraction=0.1)
        >>> schedule(10), schedule(10**6) == 2 ** (-1 / 1000)
        (0.5, True)

    Source: the traditional EMA of Karras et al., 2024 (EDM2), whose clock counts images: ``update(..., steps=batch)``.
    """

    half_life: float
    fraction: float = 0.09

    def __post_init__(self) -> None:
        object.__setattr__(self, "half_life", check_positive(self.half_life, "half_life", infinite=True))
        object.__setattr__(self, "fraction", check_positive(self.fraction, "fraction"))

    def __call__(self, u: Weight) -> Weight:
        """Return the decay at the clock ``u``."""
        return exp(self._log(u))

    def complement(self, u: Weight) -> Weight:
        """Return 1 - decay at the clock ``u``, without cancellation."""
        return -expm1(self._log(u))

    def _log(self, u: Weight) -> Weight:
        return -math.log(2.0) / minimum(self.fraction * lift(u), self.half_life)


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
        >>> schedule = Linear(0.5, 1.0, steps=10)
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
        >>> schedule = Cosine(0.996, 1.0, steps=1000)
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
        >>> schedule = After(TFWarmup(0.999), 100)
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
        >>> rule = functavg.WeightFn(PerUpdate(0.75))
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


def _left(schedule: Linear | Cosine, u: Weight) -> Weight:
    """Return the part of the path that is still to go; 1 minus the part gone would cancel near the end."""
    return maximum(schedule.steps - (lift(u) - 1.0), 0.0) / schedule.steps


def _check_schedule(decay: Any) -> float | Callable[[Any], Any]:
    return decay if callable(decay) else check_decay(decay)


def _check_min_decay(min_decay: Any, decay: float) -> float:
    number = real(min_decay, "min_decay")
    if not 0.0 <= number <= decay:
        raise ValueError(f"min_decay must be in [0, decay] = [0, {decay!r}], got {min_decay!r}")
    return number


def _at_least_one(value: Any, name: str) -> float:
    number = real(value, name)
    if not 1.0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and at least 1, got {value!r}")
    return number


def _check_path(schedule: Linear | Cosine) -> None:
    for name in ("first", "last"):
        object.__setattr__(schedule, name, check_decay(getattr(schedule, name), name))
    object.__setattr__(schedule, "steps", check_integer(schedule.steps, "steps", 1))
