"""Averages of the weights of a model while it trains.

Pure rules over trees of arrays (``EMA(0.999).init``, ``.update``), and ``AveragedModel``, their adapter to torch
modules. Importing this package loads no array library but numpy; names that need torch load it when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from functavg import posthoc as posthoc
from functavg import schedules as schedules
from functavg import units as units
from functavg.combinators import Every as Every
from functavg.combinators import Partition as Partition
from functavg.combinators import Several as Several
from functavg.combinators import SkipNonFinite as SkipNonFinite
from functavg.functional import cast_like as cast_like
from functavg.functional import lerp as lerp
from functavg.profiles import Profile as Profile
from functavg.profiles import profile as profile
from functavg.rules.base import AveragingRule as AveragingRule
from functavg.rules.base import WeightRule as WeightRule
from functavg.rules.constant import Freeze as Freeze
from functavg.rules.constant import Latest as Latest
from functavg.rules.ema import EMA as EMA
from functavg.rules.functions import AvgFn as AvgFn
from functavg.rules.functions import WeightFn as WeightFn
from functavg.rules.lawa import LAWA as LAWA
from functavg.rules.power import PowerEMA as PowerEMA
from functavg.rules.swa import SWA as SWA
from functavg.saving import from_state_dict as from_state_dict
from functavg.saving import to_state_dict as to_state_dict
from functavg.state import AverageState as AverageState

if TYPE_CHECKING:
    from functavg import checkpoints as checkpoints
    from functavg import swa_utils as swa_utils
    from functavg.nn.averaged_model import AveragedModel as AveragedModel
    from functavg.nn.batch_norm import update_bn as update_bn
    from functavg.nn.functions import get_ema_avg_fn as get_ema_avg_fn
    from functavg.nn.functions import get_ema_multi_avg_fn as get_ema_multi_avg_fn
    from functavg.nn.functions import get_swa_avg_fn as get_swa_avg_fn
    from functavg.nn.functions import get_swa_multi_avg_fn as get_swa_multi_avg_fn
    from functavg.nn.swap import swapped as swapped
    from functavg.nn.targets import soft_update as soft_update

__version__ = "0.1.0"

_NEEDS_TORCH = {
    "AveragedModel": "functavg.nn.averaged_model",
    "get_ema_avg_fn": "functavg.nn.functions",
    "get_ema_multi_avg_fn": "functavg.nn.functions",
    "get_swa_avg_fn": "functavg.nn.functions",
    "get_swa_multi_avg_fn": "functavg.nn.functions",
    "soft_update": "functavg.nn.targets",
    "swapped": "functavg.nn.swap",
    "update_bn": "functavg.nn.batch_norm",
}

__all__ = [
    "EMA",
    "LAWA",
    "SWA",
    "AverageState",
    "AveragedModel",
    "AveragingRule",
    "AvgFn",
    "Every",
    "Freeze",
    "Latest",
    "Partition",
    "PowerEMA",
    "Profile",
    "Several",
    "SkipNonFinite",
    "WeightFn",
    "WeightRule",
    "cast_like",
    "checkpoints",
    "from_state_dict",
    "get_ema_avg_fn",
    "get_ema_multi_avg_fn",
    "get_swa_avg_fn",
    "get_swa_multi_avg_fn",
    "lerp",
    "posthoc",
    "profile",
    "schedules",
    "soft_update",
    "swa_utils",
    "swapped",
    "to_state_dict",
    "units",
    "update_bn",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    if name in ("checkpoints", "swa_utils"):
        return importlib.import_module(f"functavg.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
