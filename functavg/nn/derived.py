"""Drops what torch has cached of values derived from weights, after the weights were written to."""

from __future__ import annotations

import sys

import torch
from torch.nn import Module

_PARAMETRIZE = "torch.nn.utils.parametrize"


def drop_derived_values(model: Module) -> None:
    """Drop cached values that were derived from the weights of a model, so that the next forward computes them anew.

    These are the casts that ``torch.autocast`` keeps until the outermost of its blocks ends, and the parametrized
    tensors of the model that ``torch.nn.utils.parametrize.cached()`` keeps. Neither notices that a weight was written
    to in place. Outside such blocks nothing is cached, and this takes less than a microsecond.
    """
    torch.clear_autocast_cache()
    parametrize = sys.modules.get(_PARAMETRIZE)
    cache = getattr(parametrize, "_cache", None)  # by the identity of the parametrized module, and the tensor's name
    if cache:
        modules = set(map(id, model.modules()))
        for key in [key for key in cache if key[0] in modules]:
            del cache[key]
