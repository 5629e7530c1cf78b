"""Properties of the averages of arbitrary streams with arbitrary steps, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functavg
from tests import oracle

thorough = settings(deadline=None, max_examples=60, database=None)

finite = st.floats(-1e3, 1e3, allow_subnormal=False)
steps = st.lists(st.integers(1, 50), min_size=1, max_size=8)
decays = st.floats(0.0, 1.0)
gammas = st.floats(0.0, 30.0)


@st.composite
def rows(draw: Any) -> tuple[functavg.WeightRule, oracle.Profile]:
    """A rule that copies first, and the oracle of its weights."""
    decay, gamma = draw(decays), draw(gammas)
    return draw(
        st.sampled_from(
            [
                (functavg.EMA(decay), oracle.ema(decay)),
                (functavg.EMA(max(decay, 0.5), debias=True), oracle.debiased_ema(max(decay, 0.5))),
                (functavg.SWA(), oracle.swa),
                (functavg.PowerEMA(gamma), oracle.power(gamma)),
                (functavg.Latest(), oracle.newest),
            ]
        )
    )


@st.composite
def streams(draw: Any, count: int = 1) -> tuple[list[int], np.ndarray]:
    """Steps, and as many iterates for each of ``count`` streams, after one value for ``init``."""
    spans = draw(steps)
    size = count * 3 * (len(spans) + 1)
    flat = draw(st.lists(finite, min_size=size, max_size=size))
    return spans, np.reshape(flat, (count, len(spans) + 1, 3))


def average(rule: functavg.AveragingRule, spans: list[int], iterates: Any, inplace: bool = False) -> Any:
    state = rule.init(iterates[0])
    for iterate, span in zip(iterates[1:], spans, strict=True):
        state = rule.update(iterate, state, steps=span, inplace=inplace)
    return state.average


def impulses(rule: functavg.AveragingRule, spans: list[int]) -> np.ndarray:
    """Return the weights of all iterates, by averaging one unit vector an iterate."""
    return average(rule, spans, np.eye(len(spans) + 1))


@thorough
@given(rows(), streams())
def test_the_average_is_the_weighted_sum_of_the_oracle(row: Any, data: Any) -> None:
    (rule, profile), (spans, (iterates,)) = row, data
    wanted = oracle.average(profile(spans), iterates)
    for inplace in (False, True):
        np.testing.assert_allclose(average(rule, spans, iterates, inplace), wanted, rtol=1e-9, atol=1e-9)
        tensors = average(rule, spans, torch.from_numpy(iterates), inplace)
        np.testing.assert_allclose(tensors.numpy(), wanted, rtol=1e-9, atol=1e-9)


@thorough
@given(rows(), steps)
def test_weights_sum_to_one_and_none_is_negative(row: Any, spans: list[int]) -> None:
    weights = impulses(row[0], spans)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-12)


@thorough
@given(st.floats(0.0, 1.0), steps)
def test_weights_of_any_function_sum_to_one(weight: float, spans: list[int]) -> None:
    np.testing.assert_allclose(impulses(functavg.WeightFn(lambda n, d: weight), spans).sum(), 1.0, rtol=1e-12)


@thorough
@given(rows(), streams())
def test_the_average_stays_between_the_least_and_the_greatest_iterate(row: Any, data: Any) -> None:
    spans, (iterates,) = data
    mean = average(row[0], spans, iterates)
    slack = 1e-12 * np.abs(iterates).max()
    assert (iterates[1:].min(0) - slack <= mean).all()
    assert (mean <= iterates[1:].max(0) + slack).all()


@thorough
@given(rows(), finite, steps)
def test_a_constant_is_a_fixed_point(row: Any, value: float, spans: list[int]) -> None:
    constant = np.full(3, value)
    np.testing.assert_array_equal(average(row[0], spans, [constant] * (len(spans) + 1)), constant)


@thorough
@given(rows(), streams(count=2), finite)
def test_the_average_is_linear(row: Any, data: Any, factor: float) -> None:
    rule, (spans, (one, other)) = row[0], data
    both = average(rule, spans, factor * one + other)
    apart = factor * average(rule, spans, one) + average(rule, spans, other)
    np.testing.assert_allclose(both, apart, rtol=1e-9, atol=1e-6)


@thorough
@given(streams(), st.randoms(use_true_random=False))
def test_the_equal_mean_does_not_depend_on_the_order(data: Any, random: Any) -> None:
    spans, (iterates,) = data
    order = list(range(len(spans)))
    random.shuffle(order)
    shuffled = np.stack([iterates[0], *(iterates[1:][index] for index in order)])
    np.testing.assert_allclose(
        average(functavg.SWA(), [spans[index] for index in order], shuffled),
        average(functavg.SWA(), spans, iterates),
        rtol=1e-9,
        atol=1e-9,
    )


@thorough
@given(st.integers(1, 40), steps)
def test_debiasing_makes_the_start_forgotten(half_life: int, spans: list[int]) -> None:
    """A debiased EMA is the sum of ``d^(N - t)``, divided by the sum of its weights."""
    decay = 2.0 ** (-1.0 / half_life)
    weights = impulses(functavg.EMA(decay, debias=True), spans)
    ends = np.cumsum(spans)
    raw = [
        sum(decay ** (ends[-1] - time) for time in range(end - span + 1, end + 1))
        for end, span in zip(ends, spans, strict=True)
    ]
    np.testing.assert_allclose(weights[1:], np.array(raw) / sum(raw), rtol=1e-9, atol=1e-12)


@thorough
@given(rows(), streams())
def test_an_iterate_that_lasts_counts_as_often(row: Any, data: Any) -> None:
    """Averaging one iterate over D steps is averaging it D times."""
    rule, (spans, (iterates,)) = row[0], data
    repeated = np.concatenate([iterates[:1], np.repeat(iterates[1:], spans, axis=0)])
    np.testing.assert_allclose(
        average(rule, spans, iterates), average(rule, [1] * sum(spans), repeated), rtol=1e-8, atol=1e-8
    )
