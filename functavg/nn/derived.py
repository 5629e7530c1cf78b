"""Drops what torch has cached of values derived from weights, after the weights were written to."""

from __future__ import annotations

import sys

import torch

_PARAMETRIZE = "torch.nn.utils.parametrize"


def drop_derived_values() -> None:
    """Drop cached values that were derived from weights, so that the next forward of any module computes them anew.

    These are the casts that ``torch.autocast`` keeps until the outermost of its blocks ends, and the parametrized
    tensors that ``torch.nn.utils.parametrize.cached()`` keeps, under keys that do not tell of which module they are.
    Neither notices that a weight was written to in place. Outside such blocks nothing is cached, and this takes less
    than a microsecond.
    """
    torch.clear_autocast_cache()
    cache = getattr(sys.modules.get(_PARAMETRIZE), "_cache", None)
    if cache:
        cache.clear()
