"""Coefficients with which snapshots of some averages make another one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from functavg.checks import check_integer
from functavg.profiles import Profile, profile
from functavg.profiles.reading import read
from functavg.rules.base import AveragingRule, check_rule, is_rule_class
from functavg.rules.power import PowerEMA
from functavg.rules.swa import SWA

Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Synthesis:
    """How snapshots make an average that was not tracked, and how well: what :func:`solve` returns.

    Attributes:
        coefficients: float64, one for each snapshot, in their order; they sum to 1. Pass them to :func:`combine`.
        residual: ``|sum_k c_k p_k - p| / |p|``, with ``p_k`` the profiles of the snapshots, ``p`` that of the target,
            ``c_k`` the ``coefficients`` and ``| |`` the root of the sum of squares over all iterates. It is the size
            of the error relative to the noise of the target itself, where iterates scatter independently around
            something: at 0.01 the error is a hundredth of what the target has not averaged away. Where they walk at
            random instead, with steps of size ``s``, the error is at most ``s * T / pi * residual * |p|`` after ``T``
            updates.
        amplification: ``sum_k |c_k|``, at least 1: the rounding errors of the snapshots as stored come into the result
            at most so many times as large. Mind it with float16 files.

    Example:
        >>> import functavg
        >>> from functavg import PowerEMA
        >>> found = functavg.posthoc.solve([(PowerEMA(17), 1000), (PowerEMA(7), 1000)], (PowerEMA(7), 1000))
        >>> (found.coefficients.round(6) + 0.0).tolist(), round(found.residual, 6), round(found.amplification, 6)
        ([0.0, 1.0], 0.0, 1.0)
    """

    coefficients: Float64
    residual: float

    @property
    def amplification(self) -> float:
        return float(np.abs(self.coefficients).sum())


def solve(snapshots: Iterable[Any], target: Any) -> Synthesis:
    """Return the coefficients with which snapshots come closest to a target average, before any is loaded.

    The squared distance ``|sum_k c_k p_k - p|^2`` of the profiles is the least that is possible with
    ``sum_k c_k = 1``; ``p_k`` are the profiles of the ``snapshots``, ``p`` that of the ``target``. Any averages of one
    run will do: of several widths, at several times, windows, and raw checkpoints (``Latest()``).

    Snapshots and target are pairs ``(rule, steps)``, with ``steps`` what :func:`functavg.profile` takes, or profiles.
    If all are pairs of a ``PowerEMA`` or ``SWA`` and a number, their products are taken in closed form, in the limit
    of many steps: ``<p_a, p_b> = (g_a + 1)(g_b + 1) / (g_a + g_b + 1) * t_a^g_b / t_b^(g_b + 1)`` for ``t_a <= t_b``,
    ``g`` the exponents and ``t`` the steps. So images may be counted in place of steps. Everything else is computed
    step by step, and exact.

    Args:
        snapshots: what was stored, at least one.
        target: what to make of them. Best at the time of a snapshot: what came after the last one is in none.

    Returns:
        The Synthesis, with coefficients in float64 as the problem is badly conditioned, and the residual to expect.

    Raises:
        TypeError: something is neither a pair nor a Profile, or has several averages.
        ValueError: there are no snapshots; two are of different runs, their updates not at the same steps; an average
            does not keep constants.

    Example:
        >>> import functavg
        >>> from functavg import PowerEMA
        >>> tracked = [(PowerEMA(gamma), steps) for gamma in (17, 7) for steps in range(1000, 8001, 1000)]
        >>> found = functavg.posthoc.solve(tracked, (PowerEMA(10), 8000))
        >>> len(found.coefficients), round(found.residual, 3)
        (16, 0.012)

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2), section 3.
    """
    items = [_check_item(item, f"snapshots[{index}]") for index, item in enumerate(snapshots)]
    if not items:
        raise ValueError("snapshots must hold at least one snapshot, got none")
    items.append(_check_item(target, "target"))
    powers = [_read_power(item) for item in items]
    if all(powers):
        gammas, times = np.array(powers, dtype=np.float64).T
        products = _multiply_powers(gammas, times)
        coefficients = _solve_least_squares(products)
        error = np.append(coefficients, -1.0)
        squared = float(error @ products @ error)
    else:
        vectors = _read_vectors(items)
        products = np.array([[one[: len(two)] @ two[: len(one)] for two in vectors] for one in vectors])
        coefficients = _solve_least_squares(products)
        missing = np.zeros(max(map(len, vectors)))
        for coefficient, vector in zip([*coefficients, -1.0], vectors, strict=True):
            missing[: len(vector)] += coefficient * vector
        squared = float(missing @ missing)
    return Synthesis(coefficients, math.sqrt(max(squared, 0.0) / products[-1, -1]))


def _check_item(item: Any, name: str) -> Profile | tuple[AveragingRule, Any]:
    if isinstance(item, Profile):
        return item
    if isinstance(item, Sequence) and len(item) == 2 and (isinstance(item[0], AveragingRule) or is_rule_class(item[0])):
        rule, steps = check_rule(item[0], f"{name}[0]"), item[1]
        return rule, check_integer(steps, f"{name}[1]", 1) if isinstance(steps, (int, np.integer)) else steps
    raise TypeError(f"{name} must be a Profile or a pair (rule, steps), got {item!r}")


def _read_power(item: Any) -> tuple[float, float] | None:
    """Return exponent and time of a power function, None of anything else."""
    if isinstance(item, Profile) or not isinstance(item[0], (PowerEMA, SWA)) or not isinstance(item[1], int):
        return None
    return item[0].gamma if isinstance(item[0], PowerEMA) else 0.0, float(item[1])


def _multiply_powers(gammas: Float64, times: Float64) -> Float64:
    """Return the integrals of the products of power functions ``(g + 1) t^g / T^(g + 1)``."""
    ratio = np.divide.outer(times, times)  # row over column: the shorter one's time stands above
    shorter = np.minimum(ratio, 1 / ratio) ** np.where(ratio < 1, gammas[None, :], gammas[:, None])
    factors = np.multiply.outer(gammas + 1, gammas + 1) / (np.add.outer(gammas, gammas) + 1)
    products: Float64 = factors * shorter / np.maximum.outer(times, times)
    return products


def _read_vectors(items: Sequence[Any]) -> list[Float64]:
    """Return the weights of each, that of the initial model first; a rule runs once, whatever times are asked for."""
    profiles: list[Any] = list(items)
    runs: dict[AveragingRule, dict[int, Any]] = {}
    for index, item in enumerate(items):
        if not isinstance(item, Profile):
            rule, steps = item
            if isinstance(steps, int):
                runs.setdefault(rule, {})[steps] = None
            else:
                profiles[index] = profile(rule, steps)
    for rule, found in runs.items():
        times = sorted(found)
        found.update(zip(times, read(rule, np.ones(times[-1], np.int64), times), strict=True))
    for index, item in enumerate(profiles):
        if isinstance(item, tuple):
            profiles[index] = runs[item[0]][item[1]]
    longest = max((it.times for it in profiles if isinstance(it, Profile)), key=len)
    for index, it in enumerate(profiles):
        name = f"snapshots[{index}]" if index < len(profiles) - 1 else "target"
        if not isinstance(it, Profile):
            raise TypeError(f"{name} must have one average, got several: name the rule of one of {list(it)}")
        if not abs(it.total - 1.0) < 1e-6:
            raise ValueError(
                f"{name} must be an average that keeps constants, got one whose weights sum to {it.total:g}"
            )
        if not np.array_equal(it.times, longest[: len(it.times)]):
            raise ValueError(
                f"{name} must be of the same run as the others: expected updates at the steps {longest}, got {it.times}"
            )
    return [np.concatenate([[it.initial], it.weights]) for it in profiles]


def _solve_least_squares(products: Float64) -> Float64:
    """Return the coefficients, summing to 1, that bring all but the last closest to the last.

    They are found as a correction to the nearest one. So a target that was tracked is taken as it is.
    """
    gram, wanted = products[:-1, :-1], products[:-1, -1]
    nearest = int(np.argmin(np.diagonal(gram) - 2 * wanted))
    # Products of the differences to the nearest one, scaled to a diagonal of ones.
    matrix = gram - gram[nearest] - gram[:, [nearest]] + gram[nearest, nearest]
    right = wanted - gram[:, nearest] - (wanted[nearest] - gram[nearest, nearest])
    scale = np.sqrt(np.maximum(np.diagonal(matrix), 0.0))
    scale[scale == 0] = 1.0
    coefficients: Float64 = np.linalg.lstsq(matrix / np.outer(scale, scale), right / scale, rcond=None)[0] / scale
    coefficients[nearest] = 0.0
    coefficients[nearest] = 1.0 - math.fsum(coefficients)
    return coefficients
