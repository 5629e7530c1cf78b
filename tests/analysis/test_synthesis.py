"""Averages made after training from snapshots of others: exact where they can be, else as close as was foretold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functavg import EMA, LAWA, SWA, AveragingRule, Every, Freeze, Latest, PowerEMA, Profile, Several, profile
from functavg.posthoc import Synthesis, combine, solve
from functavg.posthoc.synthesis import _multiply_powers
from tests import oracle

STEPS = 400
WIDTHS = (0.05, 0.10)


def edm2(count: int, last: int = STEPS, widths: tuple[float, ...] = WIDTHS) -> list[tuple[AveragingRule, int]]:
    """Pairs of the widths tracked by default, at equal distances."""
    return [(PowerEMA.from_sigma_rel(width), last * k // count) for width in widths for k in range(1, count + 1)]


def whole(rule: AveragingRule, steps: int, size: int = STEPS) -> np.ndarray:
    found = profile(rule, steps)
    return np.pad(np.concatenate([[found.initial], found.weights]), (0, size - steps))


def stored(pairs: list[tuple[AveragingRule, int]], iterates: np.ndarray) -> list[np.ndarray]:
    """The snapshots of a run, each as its running rule gives it."""
    states: dict[tuple[AveragingRule, int], np.ndarray] = {}
    for rule in {rule for rule, _ in pairs}:
        state = rule.init(iterates[0])
        for step, iterate in enumerate(iterates[1:], start=1):
            state = rule.update(iterate, state)
            states[rule, step] = state.average
    return [states[pair] for pair in pairs]


def rms(values: np.ndarray) -> float:
    return math.sqrt((values**2).mean())


# ---- exact


@pytest.mark.parametrize("index", [3, 7, 12])
def test_a_tracked_average_is_reproduced_exactly(index: int) -> None:
    iterates = np.random.default_rng(0).normal(size=(STEPS + 1, 5)).cumsum(0)
    tracked = edm2(8)
    found = solve(tracked, tracked[index])
    np.testing.assert_array_equal(found.coefficients, np.eye(16)[index])
    assert found.residual < 1e-7
    snapshots = stored(tracked, iterates)
    np.testing.assert_array_equal(combine(snapshots, found.coefficients), snapshots[index])


@pytest.mark.parametrize("given_as", ["pairs", "profiles"])
def test_windows_come_from_two_means(given_as: str) -> None:
    pairs = [(SWA(), 300), (SWA(), STEPS), (EMA(0.5), STEPS)]
    snapshots = pairs if given_as == "pairs" else [profile(*pair) for pair in pairs]
    found = solve(snapshots, (LAWA(100), STEPS))
    np.testing.assert_allclose(found.coefficients, [-3, 4, 0], atol=1e-12)
    assert found.residual < 1e-12
    assert found.amplification == pytest.approx(7)


def test_raw_checkpoints_make_any_window_of_them() -> None:
    found = solve([(Latest(), 10 * k) for k in range(1, 41)], (Every(LAWA(5), 10), STEPS))
    np.testing.assert_allclose(found.coefficients, [0.0] * 35 + [0.2] * 5, atol=1e-12)
    assert found.residual < 1e-12


def test_the_initial_model_is_part_of_the_profile() -> None:
    assert solve([(SWA(), 10)], (Freeze(), 10)).residual == pytest.approx(math.sqrt(1.1))
    target = Profile(np.array([0.0] * 9 + [0.75]), np.arange(1, 11), initial=0.25)
    found = solve([(Freeze(), 5), (Latest(), 10)], target)
    np.testing.assert_allclose(found.coefficients, [0.25, 0.75], atol=1e-15)


def test_snapshots_may_be_younger_than_the_target_and_given_by_gaps() -> None:
    gaps = [2, 3, 1, 4]
    found = solve([(SWA(), gaps[:2]), (SWA(), gaps), profile(SWA(), [*gaps, 5])], (SWA(), gaps))
    np.testing.assert_allclose(found.coefficients, [0, 1, 0], atol=1e-14)


def test_the_same_snapshot_twice_is_no_problem() -> None:
    found = solve([(EMA(0.9), 50), (EMA(0.9), 50), (SWA(), 50)], (EMA(0.5), 50))
    again = solve([(EMA(0.9), 50), (SWA(), 50)], (EMA(0.5), 50))
    assert found.coefficients.sum() == pytest.approx(1, abs=1e-12)
    assert found.coefficients[:2].sum() == pytest.approx(again.coefficients[0])
    assert found.residual == pytest.approx(again.residual)


# ---- foretold


@pytest.mark.parametrize(
    ("count", "condition", "expected"),
    [(8, 5e2, {0.03: 1e-2, 0.15: 1e-3}), (64, 1.6e6, {0.03: 8e-6, 0.15: 3e-7}), (256, 4.6e8, {0.03: 3e-8, 0.15: 1e-9})],
)
def test_residuals_of_edm2(count: int, condition: float, expected: dict[float, float]) -> None:
    tracked = edm2(count, last=2**30)  # images: in closed form, any time costs the same
    for width, squared in expected.items():
        found = solve(tracked, (PowerEMA.from_sigma_rel(width), 2**30))
        assert found.residual**2 == pytest.approx(squared, rel=0.5)
        assert math.fsum(found.coefficients) == pytest.approx(1, abs=1e-12)
        assert found.coefficients.dtype == np.float64
    gammas, times = np.array([(rule.gamma, steps) for rule, steps in tracked]).T
    assert np.linalg.cond(_multiply_powers(gammas, times)) == pytest.approx(condition, rel=0.5)


@given(
    gammas=st.tuples(st.floats(0, 50), st.floats(0, 50)),
    times=st.tuples(st.floats(1, 1e9), st.floats(1, 1e9)),
)
def test_closed_form_products_are_integrals(gammas: tuple[float, float], times: tuple[float, float]) -> None:
    (short, g_short), (long, g_long) = sorted(zip(times, gammas, strict=True))
    # Of (g + 1) / T * (t / T)^g: the integral over [0, short], by hand.
    constant = (g_short + 1) / short * (g_long + 1) / long * (short / long) ** g_long
    integral = constant * short / (g_short + g_long + 1)
    products = _multiply_powers(np.array(gammas), np.array(times))
    assert products[0, 1] == pytest.approx(integral, rel=1e-9)
    assert products[1, 0] == pytest.approx(products[0, 1], rel=1e-12)


def test_the_closed_form_is_the_limit_of_many_steps() -> None:
    exact_snapshots = [profile(*pair) for pair in edm2(8, 1000)]
    for width in (0.03, 0.075, 0.15, 0.25):
        target = (PowerEMA.from_sigma_rel(width), 1000)
        limit = solve(edm2(8, 1000), target)
        exact = solve(exact_snapshots, target)
        assert exact.residual == pytest.approx(limit.residual, rel=0.1)
        np.testing.assert_allclose(exact.coefficients, limit.coefficients, atol=0.05)


def test_the_residual_is_the_error_where_iterates_scatter() -> None:
    iterates = np.random.default_rng(1).normal(size=(STEPS + 1, 1500))
    pairs = [*edm2(4), (EMA(0.97), 250), (LAWA(15), STEPS), (Latest(), 390)]
    snapshots = stored(pairs, iterates)
    for width in (0.03, 0.15, 0.25):
        target = (PowerEMA.from_sigma_rel(width), STEPS)
        found = solve(pairs, target)
        wanted = whole(*target) @ iterates
        error = combine(snapshots, found.coefficients) - wanted
        assert rms(error) / rms(wanted) == pytest.approx(found.residual, rel=0.08)


@pytest.mark.parametrize("exact", [True, False])
def test_the_error_is_within_the_bound_where_iterates_walk(exact: bool) -> None:
    iterates = np.random.default_rng(2).normal(size=(STEPS + 1, 1000)).cumsum(0)
    pairs = edm2(8)
    snapshots = stored(pairs, iterates)
    for width in (0.03, 0.15, 0.25):
        target = (PowerEMA.from_sigma_rel(width), STEPS)
        found = solve([profile(*pair) for pair in pairs] if exact else pairs, target)
        wanted = whole(*target)
        error = rms(combine(snapshots, found.coefficients) - wanted @ iterates)
        assert 0 < error < STEPS / math.pi * found.residual * np.linalg.norm(wanted)
        assert error < found.residual * rms(wanted @ iterates - iterates[-1])  # and that far the target lags behind


def test_the_coefficients_are_the_best_that_sum_to_one() -> None:
    pairs = [(EMA(0.9), 40), (EMA(0.97), 40), (SWA(), 20), (SWA(), 40)]
    found = solve(pairs, (PowerEMA(5), 40))
    columns = np.stack([whole(*pair, size=40) for pair in pairs], axis=1)
    wanted = oracle.power(5)([1] * 40)

    def distance(coefficients: np.ndarray) -> float:
        return float(np.linalg.norm(columns @ coefficients - wanted) / np.linalg.norm(wanted))

    assert found.residual == pytest.approx(distance(found.coefficients), rel=1e-12)
    generator = np.random.default_rng(3)
    for _ in range(100):
        away = generator.normal(size=4) * 10.0 ** generator.integers(-6, 0)
        assert distance(found.coefficients + away - away.mean()) >= found.residual


def test_amplification_is_that_of_rounding() -> None:
    assert Synthesis(np.array([-3.0, 4.0]), 0.0).amplification == 7
    assert solve([(SWA(), 5)], (SWA(), 9)).amplification == 1


# ---- arguments


@pytest.mark.parametrize(
    ("snapshots", "target", "error", "message"),
    [
        ([], (SWA(), 3), ValueError, "snapshots must hold at least one snapshot, got none"),
        ([(SWA(), 3), SWA()], (SWA(), 3), TypeError, r"snapshots\[1\] must be a Profile or a pair .*, got SWA\(\)"),
        ([(3, SWA())], (SWA(), 3), TypeError, r"snapshots\[0\] must be a Profile or a pair"),
        ([(SWA(), 3)], 0.05, TypeError, "target must be a Profile or a pair .*, got 0.05"),
        ([(SWA(), 0)], (SWA(), 3), ValueError, r"snapshots\[0\]\[1\] must be an integer of at least 1, got 0"),
        ([(SWA(), 3)], (SWA(), 2.5), TypeError, "steps must be an integer"),
        ([(SWA(), 3)], (Several({"a": SWA()}), 3), TypeError, r"target must have one average, got several: .*\['a'\]"),
        ([(Several({"a": SWA()}), 3)], (SWA(), 3), TypeError, r"snapshots\[0\] must have one average"),
        ([(SWA(), [2, 2])], (EMA(0.9), 3), ValueError, r"snapshots\[0\] must be of the same run .* got \[2 4\]"),
        (
            [Profile(np.array([0.69, 0.19, 0.5]), np.arange(1, 4))],
            (SWA(), 3),
            ValueError,
            r"snapshots\[0\] must be an average that keeps constants, .* 1.38",
        ),
        ([(SWA(), 3)], Profile(np.zeros(3), np.arange(1, 4)), ValueError, "target must be .* weights sum to 0"),
        ([(SWA(), 3)], (SWA(), [2, 2]), ValueError, r"target must be of the same run"),
    ],
)
def test_arguments_are_checked(snapshots: Any, target: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        solve(snapshots, target)
