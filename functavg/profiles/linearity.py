"""Whether a user's function is linear, and with which coefficients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from functavg.plan import Apply, run

# The first two are the unit vectors that tell the coefficients, the others tell whether these explain everything.
OLD = np.array([1.0, 0.0, 0.0, 1.0, -2.0, 300.0])
NEW = np.array([0.0, 1.0, 0.0, 1.0, 5.0, -100.0])

TOLERANCE = 1e-6
"""Relative to the probes: a function that computes in float32 passes."""


Float64 = NDArray[np.float64]

Call = Callable[[Apply, Float64, Float64], Any]
"""How to call a function with arrays of one library."""


class Linear:
    """The coefficients of functions that are linear in the average and the new value."""

    def __init__(self) -> None:
        self._last: Call = _with_numpy
        self._seen: dict[int, Any] = {}

    def coefficients(self, intention: Apply) -> tuple[float, float]:
        """Return ``a`` and ``b`` of ``fn(old, new, count) = a * old + b * new``.

        Raises:
            ValueError: the function is not linear, or fails on arrays of every library.
        """
        moved = self._moved(intention, OLD, NEW)
        keep, take = float(moved[0]), float(moved[1])
        _check(intention, keep, take, OLD, NEW, moved)
        if id(intention.fn) not in self._seen:
            self._seen[id(intention.fn)] = intention.fn
            # Other values all over show what depends on the whole array, such as its norm.
            _check(intention, keep, take, -3 * NEW, OLD, self._moved(intention, -3 * NEW, OLD))
        return keep, take

    def _moved(self, intention: Apply, old: Float64, new: Float64) -> Float64:
        """Return what the function makes of the probes, in the first library that it works with."""
        failures = []
        for call in sorted(_calls(intention.grouped), key=lambda it: it is not self._last):
            try:
                moved = np.asarray(call(intention, old, new), dtype=np.float64)
            except Exception as error:  # whatever a function raises on arrays that it was not written for
                failures.append(error)
            else:
                if moved.shape != old.shape:
                    raise ValueError(
                        f"{intention.fn!r} must return the new average, an array of shape {old.shape}, "
                        f"got shape {moved.shape}"
                    )
                self._last = call
                return moved
        reasons = dict.fromkeys(f"{type(error).__name__}: {error}".splitlines()[0] for error in failures)
        message = f"{intention.fn!r} fails on arrays of every library that is loaded: {'; '.join(reasons)}"
        raise ValueError(message) from failures[0]


def _check(intention: Apply, keep: float, take: float, old: Float64, new: Float64, moved: Float64) -> None:
    """Raise a ValueError unless ``moved`` is ``keep * old + take * new``."""
    expected = keep * old + take * new
    fits = np.abs(moved - expected) <= TOLERANCE * (1 + np.abs(old) + np.abs(new))
    if not fits.all():
        at = int(np.argmin(fits))
        raise ValueError(
            f"{intention.fn!r} is not linear, and only averages that are linear in the iterates have a profile: "
            f"at count {intention.count} it moves an average of {old[at]:g} and a new value of {new[at]:g} to "
            f"{moved[at]:.6g}, where {keep:.6g} * average + {take:.6g} * new is {expected[at]:.6g}"
        )


def _calls(grouped: bool) -> list[Call]:
    if grouped:
        return [_with_torch]
    return [_with_numpy, _with_torch, _with_jax] if "jax" in sys.modules else [_with_numpy, _with_torch]


def _with_numpy(intention: Apply, old: Float64, new: Float64) -> Any:
    # Not by way of `run`, which would take most of the time.
    return intention.fn(old.copy(), new.copy(), int(intention.count))


def _with_torch(intention: Apply, old: Float64, new: Float64) -> Any:
    import torch

    return run(replace(intention, old=[torch.tensor(old)], new=[torch.tensor(new)]))[0]


def _with_jax(intention: Apply, old: Float64, new: Float64) -> Any:
    asarray = sys.modules["jax"].numpy.asarray
    return run(replace(intention, old=[asarray(old)], new=[asarray(new)]))[0]
