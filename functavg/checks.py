"""Checks of arguments: each names the argument, says what was expected and what came, and returns the value to use."""

from __future__ import annotations

__all__: list[str] = []

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from functavg.counts import is_integer_array
from functavg.scalars import is_host
from functavg.state import AverageState

if TYPE_CHECKING:
    from functavg.state import Count, Weight


def check_number(value: Any, name: str) -> float:
    """Return ``value`` as a host float.

    Raises:
        TypeError: it is not a real number.
    """
    if type(value) is float:  # the rest is not for compilers
        return value
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__") or np.ndim(value) != 0:
        raise TypeError(f"{name} must be a number, got {value!r} of {type(value).__name__}")
    return float(value)


def check_decay(decay: Any, name: str = "decay") -> float:
    """Return ``decay`` as a host float in [0, 1].

    Raises:
        TypeError: it is not a real number.
        ValueError: it is out of range or NaN.
    """
    number = check_number(decay, name)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {decay!r}")
    return number


def check_positive(value: Any, name: str, *, infinite: bool = False) -> float:
    """Return ``value`` as a host float above 0; infinity only where ``infinite`` allows it.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is out of range or NaN.
    """
    number = check_number(value, name)
    if not number > 0.0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    if number == math.inf and not infinite:
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number


def check_at_least(value: Any, name: str, least: int) -> float:
    """Return ``value`` as a finite host float of at least ``least``.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is out of range or NaN.
    """
    number = check_number(value, name)
    if not least <= number < math.inf:
        raise ValueError(f"{name} must be finite and at least {least}, got {value!r}")
    return number


def check_integer(value: Any, name: str, least: int) -> int:
    """Return ``value`` as a host ``int`` of at least ``least``; arguments of rules are never arrays.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is too small.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r} of {type(value).__name__}")
    return int(check_count(value, name, least))


def check_count(value: Any, name: str, least: int) -> Count:
    """Return ``value`` if it is a count of at least ``least``; a numpy integer becomes a host ``int``.

    Raises:
        TypeError: it is neither an integer nor a 0-d integer array.
        ValueError: it is too small.
    """
    if type(value) is int and value >= least:  # almost always
        return value
    if isinstance(value, (np.integer, np.ndarray)) and np.ndim(value) == 0 and value.dtype.kind in "iu":
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        return value
    if is_integer_array(value):
        return value
    raise TypeError(f"{name} must be an integer or a 0-d integer array, got {value!r} of {type(value).__name__}")


def check_weight(value: Any, name: str = "weight") -> Weight:
    """Return ``value`` if it is a finite number, or a 0-d array (whose value stays where it is).

    Raises:
        TypeError: it is neither, or complex.
        ValueError: it is a host number that is NaN or infinite.
    """
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biufV":  # V: bfloat16
        value = float(value)
    if is_host(value):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}")
        return value
    on_device = getattr(value, "ndim", None) == 0 and not isinstance(value, (np.ndarray, np.generic))
    if on_device and "complex" not in str(value.dtype):
        return value
    raise TypeError(f"{name} must be a real number or a 0-d array, got {value!r} of {type(value).__name__}")


def check_fraction(value: Any, name: str) -> Weight:
    """Return ``value`` if it is a number in [0, 1], or a 0-d array (whose value stays where it is).

    Raises:
        TypeError: it is neither, or complex.
        ValueError: it is a host number that is out of range or NaN.
    """
    weight = check_weight(value, name)
    return check_decay(weight, name) if is_host(weight) else weight


def check_callable(fn: Any, name: str) -> None:
    """Raise a TypeError unless ``fn`` can be called."""
    if not callable(fn):
        raise TypeError(f"{name} must be callable, got {fn!r} of {type(fn).__name__}")


def check_state(state: Any, call: str, name: str = "state") -> None:
    """Raise a TypeError unless ``state``, the argument ``name`` of ``call``, is an AverageState."""
    if not isinstance(state, AverageState):
        raise TypeError(f"{call}: {name} must be an AverageState, got {type(state).__name__}")
