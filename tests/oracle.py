"""The oracle: every average as an explicit float64 weighted sum in plain numpy, written from the formulas.

It shares no code with the library. A *profile* maps the steps of successive updates to the weights of what ``init``
saw and of each iterate: ``profile([3, 1]) == [p_0, p_1, p_2]``. With ``t_i`` the time after update ``i`` and ``N`` the
time after the last one, the closed forms below need no running average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Profile = Callable[[Sequence[int]], np.ndarray]


def ema(decay: float) -> Profile:
    """``p_1 = d^(N - t_1)``, then ``p_i = (1 - d^D_i) d^(N - t_i)``."""

    def profile(steps: Sequence[int]) -> np.ndarray:
        span, left = _span_and_left(steps)
        weights = (1.0 - decay**span) * decay**left
        weights[0] = decay ** left[0]
        return np.concatenate([[0.0], weights])

    return profile


def debiased_ema(decay: float) -> Profile:
    """``p_i = (1 - d^D_i) d^(N - t_i) / (1 - d^N)``; at ``d = 1`` the mean over time."""

    def profile(steps: Sequence[int]) -> np.ndarray:
        if decay == 1.0:
            return swa(steps)
        span, left = _span_and_left(steps)
        return np.concatenate([[0.0], (1.0 - decay**span) * decay**left / (1.0 - decay ** span.sum())])

    return profile


def swa(steps: Sequence[int]) -> np.ndarray:
    """``p_i = D_i / N``."""
    return np.concatenate([[0.0], np.asarray(steps, float) / sum(steps)])


def power(gamma: float) -> Profile:
    """``p_i = (t_i / N)^(g+1) - (t_(i-1) / N)^(g+1)``."""

    def profile(steps: Sequence[int]) -> np.ndarray:
        times = np.concatenate([[0.0], np.cumsum(steps)])
        return np.concatenate([[0.0], np.diff((times / times[-1]) ** (gamma + 1.0))])

    return profile


def gamma(sigma_rel: float) -> float:
    """The largest real root of ``g^3 + 7 g^2 + (16 - s^-2) g + (12 - s^-2)``."""
    roots = np.roots([1.0, 7.0, 16.0 - sigma_rel**-2, 12.0 - sigma_rel**-2])
    return float(roots[roots.imag == 0].real.max())


def window(length: int) -> Profile:
    """The mean of the newest iterates, whatever their steps."""

    def profile(steps: Sequence[int]) -> np.ndarray:
        weights = np.zeros(len(steps) + 1)
        weights[1:][-length:] = 1.0 / min(length, len(steps))
        return weights

    return profile


def newest(steps: Sequence[int]) -> np.ndarray:
    """All weight on the last iterate."""
    return np.eye(len(steps) + 1)[-1]


def first(steps: Sequence[int]) -> np.ndarray:
    """All weight on what ``init`` saw."""
    return np.eye(len(steps) + 1)[0]


def of_weights(weight: Callable[[int, int], float]) -> Profile:
    """``p_i = w_i (1 - w_(i+1)) ... (1 - w_k)`` for any weights ``w(n, D)``."""

    def profile(steps: Sequence[int]) -> np.ndarray:
        before = np.cumsum([0, *steps[:-1]])
        weights = np.array([1.0] + [weight(int(n), int(d)) for n, d in zip(before, steps, strict=True)])
        kept = np.cumprod(np.append(1.0 - weights[1:], 1.0)[::-1])[::-1]
        return weights * kept

    return profile


def of_calls(profile: Profile) -> Profile:
    """The profile of a rule that counts calls, whatever their steps."""
    return lambda steps: profile([1] * len(steps))


def average(weights: np.ndarray, iterates: Sequence[Any]) -> np.ndarray:
    """The weighted sum of real or complex arrays, those with a weight of 0 left out; integers: the newest one."""
    chosen = [(weight, np.asarray(value)) for weight, value in zip(weights, iterates, strict=True) if weight != 0]
    if chosen[0][1].dtype.kind in "biu":
        return chosen[-1][1]
    return np.asarray(sum(weight * value for weight, value in chosen))


def _span_and_left(steps: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return ``D_i`` and ``N - t_i``."""
    span = np.asarray(steps, float)
    return span, span.sum() - np.cumsum(span)
