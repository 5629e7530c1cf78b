"""Conversions between the ways to state how long an average remembers."""

from __future__ import annotations

import math

from functavg.checks import check_at_least, check_decay, check_number, check_positive

__all__ = [
    "decay_from_half_life",
    "decay_from_span",
    "decay_from_time_constant",
    "gamma_from_sigma_rel",
    "half_life_from_decay",
    "scale_decay",
    "sigma_rel_from_gamma",
    "span_from_decay",
    "time_constant_from_decay",
]

_WIDEST = 12.0**-0.5  # the relative width of the equal mean


def decay_from_half_life(half_life: float) -> float:
    """Return the decay at which a weight halves in ``half_life`` steps.

    ``d = 2^(-1/h)`` with ``h`` the ``half_life`` in steps (positive; infinity gives 1). The inverse is
    :func:`half_life_from_decay`.

    Raises:
        TypeError: ``half_life`` is not a number.
        ValueError: ``half_life`` is not positive.

    Example:
        >>> from functavg import units
        >>> units.decay_from_half_life(1)
        0.5
    """
    return float(2.0 ** (-1.0 / check_positive(half_life, "half_life", infinite=True)))


def half_life_from_decay(decay: float) -> float:
    """Return the number of steps in which a weight halves.

    ``h = ln(1/2) / ln d`` with ``d`` the ``decay`` per step in (0, 1]; 1 gives infinity.

    Raises:
        TypeError: ``decay`` is not a number.
        ValueError: ``decay`` is out of range: at 0 nothing is left to halve.

    Example:
        >>> from functavg import units
        >>> round(units.half_life_from_decay(0.999), 3)
        692.801
    """
    return math.log(2.0) * time_constant_from_decay(decay)


def decay_from_span(span: float) -> float:
    """Return the decay of an EMA that is as old as the mean of ``span`` iterates.

    ``d = 1 - 2 / (s + 1)`` with ``s`` the ``span`` in steps (at least 1; infinity gives 1): the mean age of both is
    ``(s - 1) / 2``. The inverse is :func:`span_from_decay`.

    Raises:
        TypeError: ``span`` is not a number.
        ValueError: ``span`` is less than 1 or NaN.

    Example:
        >>> from functavg import units
        >>> round(units.decay_from_span(1999), 6)
        0.999

    Source: the ``span`` of pandas.DataFrame.ewm.
    """
    number = check_number(span, "span")
    if not number >= 1.0:
        raise ValueError(f"span must be at least 1, got {span!r}")
    return 1.0 - 2.0 / (number + 1.0)


def span_from_decay(decay: float) -> float:
    """Return the number of iterates whose mean is as old as the EMA.

    ``s = (1 + d) / (1 - d)`` with ``d`` the ``decay`` per step in [0, 1]; 1 gives infinity. It is also the number of
    equal weights that would average out noise as well as the EMA does.

    Raises:
        TypeError: ``decay`` is not a number.
        ValueError: ``decay`` is out of range or NaN.

    Example:
        >>> from functavg import units
        >>> round(units.span_from_decay(0.999), 6)
        1999.0

    Source: the ``span`` of pandas.DataFrame.ewm.
    """
    number = check_decay(decay)
    return math.inf if number == 1.0 else (1.0 + number) / (1.0 - number)


def decay_from_time_constant(time_constant: float) -> float:
    """Return the decay at which a weight falls to 1/e in ``time_constant`` steps.

    ``d = exp(-1 / tau)`` with ``tau`` the ``time_constant`` in steps (positive; infinity gives 1). The inverse is
    :func:`time_constant_from_decay`.

    Raises:
        TypeError: ``time_constant`` is not a number.
        ValueError: ``time_constant`` is not positive.

    Example:
        >>> from functavg import units
        >>> round(units.decay_from_time_constant(1000), 6)
        0.999
    """
    return math.exp(-1.0 / check_positive(time_constant, "time_constant", infinite=True))


def time_constant_from_decay(decay: float) -> float:
    """Return the number of steps in which a weight falls to 1/e.

    ``tau = -1 / ln d`` with ``d`` the ``decay`` per step in (0, 1]; 1 gives infinity.

    Raises:
        TypeError: ``decay`` is not a number.
        ValueError: ``decay`` is out of range: at 0 nothing is left to fall.

    Example:
        >>> from functavg import units
        >>> round(units.time_constant_from_decay(0.999), 3)
        999.5
    """
    number = check_number(decay, "decay")
    if not 0.0 < number <= 1.0:
        raise ValueError(f"decay must be in (0, 1], got {decay!r}")
    return math.inf if number == 1.0 else -1.0 / math.log(number)


def scale_decay(decay: float, factor: float) -> float:
    """Return the decay that remembers as many samples when the batch grows by ``factor``.

    ``d^k`` with ``d`` the ``decay`` in [0, 1] and ``k`` the ``factor`` (positive), the new batch size over the old: one
    step then stands for ``k`` old ones. Likewise ``scale_decay(d, 1 / k)`` is the decay per step of a decay ``d`` that
    was meant per update, one in ``k`` steps.

    Raises:
        TypeError: ``decay`` or ``factor`` is not a number.
        ValueError: ``decay`` is out of range, or ``factor`` is not positive and finite.

    Example:
        >>> from functavg import units
        >>> round(units.scale_decay(0.9999, 8), 6)
        0.9992

    Source: Busbridge et al., How to Scale Your EMA, 2023.
    """
    return float(check_decay(decay) ** check_positive(factor, "factor"))


def sigma_rel_from_gamma(gamma: float) -> float:
    """Return the relative width of the power-function EMA with this exponent.

    ``s = sqrt((g + 1) / (g + 3)) / (g + 2)`` with ``g`` the ``gamma`` (finite, at least 0): the standard deviation of
    the profile over the length of training. The inverse is :func:`gamma_from_sigma_rel`.

    Raises:
        TypeError: ``gamma`` is not a number.
        ValueError: ``gamma`` is negative, infinite or NaN.

    Example:
        >>> from functavg import units
        >>> round(units.sigma_rel_from_gamma(6.9372), 4)
        0.1

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2).
    """
    number = check_at_least(gamma, "gamma", 0)
    # Near 0 rounding would lift it above the widest, which the inverse refuses.
    return min(math.sqrt((number + 1.0) / (number + 3.0)) / (number + 2.0), _WIDEST)


def gamma_from_sigma_rel(sigma_rel: float) -> float:
    """Return the exponent of the power-function EMA whose profile has this relative width.

    ``gamma`` is the largest real root of ``g^3 + 7 g^2 + (16 - s^-2) g + (12 - s^-2) = 0`` with ``s`` the
    ``sigma_rel``, the standard deviation of the profile over the length of training, in (0, 12^(-1/2)].

    Raises:
        TypeError: ``sigma_rel`` is not a number.
        ValueError: ``sigma_rel`` is out of range.

    Example:
        >>> from functavg import units
        >>> round(units.gamma_from_sigma_rel(0.10), 4)
        6.9372

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2).
    """
    s = check_number(sigma_rel, "sigma_rel")
    if not 0.0 < s <= _WIDEST:
        raise ValueError(f"sigma_rel must be in (0, {_WIDEST:.6f}], got {sigma_rel!r}")
    # In y = g s the cubic stays of size 1 however small s is: y^3 + 7 s y^2 + (16 s^2 - 1) y + (12 s^3 - s) = 0.
    # Newton's method from above the largest root, where the cubic is increasing and convex, falls onto it.
    y = 1.0 + s
    for _ in range(100):
        value = ((y + 7.0 * s) * y + (16.0 * s * s - 1.0)) * y + (12.0 * s * s - 1.0) * s
        step = value / ((3.0 * y + 14.0 * s) * y + (16.0 * s * s - 1.0))
        y -= step
        if abs(step) <= 1e-15 * max(s, y):
            break
    return max(y / s, 0.0)
