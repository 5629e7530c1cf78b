"""Decays that depend on the clock, for ``EMA(decay)`` and, where a decay is meant per update, for ``WeightFn``.

A schedule is a function of ``u = n + D >= 1``, the clock after this update, in steps: ``schedule(u)`` is the decay and
``schedule.rate(u)`` is ``1 - decay``, formed without cancellation, from which weights are computed. It is a frozen
dataclass: it prints as the call that makes it, compares, hashes and pickles. It computes with host numbers, 0-d tensors
and traced values alike.

An ``EMA`` takes what ``init`` saw for the iterate before the first one: where ``decay(1)`` is not 0, that stays in the
average with the weight ``decay(1) decay(2) ...``. ``EMA(decay, start="copy")`` copies at the first update instead.
"""

from functavg.schedules.base import Schedule as Schedule
from functavg.schedules.clocks import After as After
from functavg.schedules.clocks import PerUpdate as PerUpdate
from functavg.schedules.clocks import Stretched as Stretched
from functavg.schedules.paths import Cosine as Cosine
from functavg.schedules.paths import Linear as Linear
from functavg.schedules.warmups import Constant as Constant
from functavg.schedules.warmups import ExponentialRamp as ExponentialRamp
from functavg.schedules.warmups import HalfLifeRamp as HalfLifeRamp
from functavg.schedules.warmups import InversePower as InversePower
from functavg.schedules.warmups import TFWarmup as TFWarmup

__all__ = [
    "After",
    "Constant",
    "Cosine",
    "ExponentialRamp",
    "HalfLifeRamp",
    "InversePower",
    "Linear",
    "PerUpdate",
    "Schedule",
    "Stretched",
    "TFWarmup",
]
