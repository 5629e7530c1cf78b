"""Coefficients with which a merge of checkpoints stands in for a decay of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from functavg.checks import check_integer, check_number

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "1-sqrt": lambda x: 1.0 - math.sqrt(x),
}


def merge_coefficients(shape: str | Callable[[float], Any], n: int) -> NDArray[np.float64]:
    """Return the coefficients of a merge that acts as a decay of the learning rate: ``c_j = w_j - w_(j+1)``.

    A merge ``sum_j c_j x_j`` of checkpoints ``x_1, ..., x_n`` along a run weighs the update between ``x_(i-1)`` and
    ``x_i`` by ``w_i = sum_(j >= i) c_j``: as if the learning rate had been multiplied by it. So a constant rate, merged
    afterwards, gives what the decay ``w_i = shape((i - 1) / n)``, ``w_(n+1) = 0``, would have given to first order.

    Args:
        shape: the decay over its course ``x`` from 0 to 1: ``"linear"``, ``1 - x`` (the equal mean); ``"cosine"``,
            ``(1 + cos(pi x)) / 2``; ``"1-sqrt"``, ``1 - sqrt(x)``; or a function with ``shape(0) = 1``.
        n: the number of checkpoints, at least 1.

    Returns:
        float64 of shape ``(n,)``, for the oldest checkpoint first; they sum to 1. Pass them to :func:`combine`.

    Raises:
        TypeError: ``shape`` is neither a string nor a function to numbers, or ``n`` is no integer.
        ValueError: ``shape`` is unknown, not finite, or not 1 at 0; ``n`` is less than 1.

    Example:
        >>> import functavg
        >>> functavg.posthoc.merge_coefficients("1-sqrt", 5).round(4)
        array([0.4472, 0.1852, 0.1421, 0.1198, 0.1056])

    Source: Tian et al., WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM Pre-training, 2025.
    """
    n = check_integer(n, "n", 1)
    if not isinstance(shape, str) and not callable(shape):
        raise TypeError(f"shape must be a string or callable, got {shape!r} of {type(shape).__name__}")
    if isinstance(shape, str) and shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(map(repr, SHAPES))} or a function, got {shape!r}")
    decay = SHAPES[shape] if isinstance(shape, str) else shape
    factors = [check_number(decay(index / n), f"shape({index / n:g})") for index in range(n)]
    for index, factor in enumerate(factors):
        if not math.isfinite(factor):
            raise ValueError(f"shape({index / n:g}) must be finite, got {factor!r}")
    if not abs(factors[0] - 1.0) <= 1e-9:
        raise ValueError(f"shape(0) must be 1, the factor before the decay, got {factors[0]!r}")
    return -np.diff(factors, append=0.0)
