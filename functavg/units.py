"""Conversions between the ways to state how long an average remembers, and checks of their ranges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def real(value: Any, name: str) -> float:
    """Return ``value`` as a host float.

    Raises:
        TypeError: it is no real number.
    """
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__") or np.ndim(value) != 0:
        raise TypeError(f"{name} must be a number, got {value!r} of {type(value).__name__}")
    return float(value)


def check_decay(decay: Any, name: str = "decay") -> float:
    """Return ``decay`` as a host float in [0, 1]."""
    number = real(decay, name)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {decay!r}")
    return number


def decay_from_half_life(half_life: float) -> float:
    """Return the decay after which, in ``half_life`` steps, a weight has halved.

    ``d = 2^(-1/h)`` with ``h`` the ``half_life`` in steps (positive; infinity gives 1).

    Raises:
        TypeError: ``half_life`` is no number.
        ValueError: ``half_life`` is not positive.

    Example:
        >>> decay_from_half_life(1)
        0.5
    """
    number = real(half_life, "half_life")
    if not number > 0.0:
        raise ValueError(f"half_life must be positive, got {half_life!r}")
    return float(2.0 ** (-1.0 / number))


def gamma_from_sigma_rel(sigma_rel: float) -> float:
    """Return the exponent of the power-function EMA whose profile has this relative width.

    ``gamma`` is the largest real root of ``g^3 + 7 g^2 + (16 - s^-2) g + (12 - s^-2) = 0`` with ``s`` the
    ``sigma_rel``, the standard deviation of the profile over the length of training, in (0, 12^(-1/2)].

    Raises:
        TypeError: ``sigma_rel`` is no number.
        ValueError: ``sigma_rel`` is out of range.

    Example:
        >>> round(gamma_from_sigma_rel(0.10), 4)
        6.9372

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2).
    """
    number = real(sigma_rel, "sigma_rel")
    widest = 12.0**-0.5
    if not 0.0 < number <= widest:
        raise ValueError(f"sigma_rel must be in (0, {widest:.6f}], got {sigma_rel!r}")
    t = number**-2
    # Newton's method from above the largest root, where the cubic is increasing and convex, falls onto it.
    gamma = math.sqrt(t) + 1.0
    for _ in range(100):
        value = ((gamma + 7.0) * gamma + (16.0 - t)) * gamma + (12.0 - t)
        step = value / ((3.0 * gamma + 14.0) * gamma + (16.0 - t))
        gamma -= step
        if abs(step) <= 1e-15 * max(1.0, gamma):
            break
    return max(gamma, 0.0)
