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
    "Stretched",
    "TFWarmup",
]
