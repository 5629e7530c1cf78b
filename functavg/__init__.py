"""Averages of the weights of a model while it trains."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from functavg import units as units
from functavg.functional import cast_like as cast_like
from functavg.functional import extend as extend
from functavg.functional import lerp as lerp
from functavg.rules.base import AveragingRule as AveragingRule
from functavg.rules.base import WeightRule as WeightRule
from functavg.rules.constant import Copy as Copy
from functavg.rules.constant import Freeze as Freeze
from functavg.rules.ema import EMA as EMA
from functavg.rules.functions import AvgFn as AvgFn
from functavg.rules.functions import WeightFn as WeightFn
from functavg.rules.power import PowerEMA as PowerEMA
from functavg.rules.swa import SWA as SWA
from functavg.state import AverageState as AverageState
