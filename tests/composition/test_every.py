"""Every: which updates get through, and what the inner rule is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functavg
from functavg import EMA, SWA, AverageState, AvgFn, Every, Freeze, PowerEMA, WeightFn
from tests.tables import mean_step

RULES = [EMA(0.9), EMA(0.0), EMA(1.0), EMA(0.9, debias=True), EMA(1.0, debias=True), PowerEMA(6.94), PowerEMA(0), SWA()]


def run(rule: functavg.AveragingRule, values: Any, steps: int = 1) -> AverageState[Any]:
    state = rule.init(np.zeros(()))
    for value in values:
        state = rule.update(np.asarray(float(value)), state, steps=steps, inplace=True)
    return state


class Told(WeightFn):
    """A rule that writes down what it is told."""

    def __init__(self) -> None:
        calls: list[tuple[int, int]] = []
        super().__init__(lambda count, steps: calls.append((count, steps)) or 0.5)
        object.__setattr__(self, "calls", calls)


# ---- the clock


@pytest.mark.parametrize("interval", [1, 10])
def test_a_decay_is_per_step_whatever_the_interval(interval: int) -> None:
    """C1."""
    state = run(Every(EMA(0.99), interval), [0.0] * 10 + [1.0] * 100)
    assert float(state.average) == pytest.approx(1 - 0.99**100, rel=1e-12)
    assert state.count == 110


@pytest.mark.parametrize("rule", [SWA(), AvgFn(mean_step)], ids=["SWA", "AvgFn"])
@pytest.mark.parametrize("start", [0, 7])
def test_the_snapshots_of_a_mean_weigh_the_same(rule: functavg.AveragingRule, start: int) -> None:
    """C1b: five of them, also where the first comes later than an interval after the beginning."""
    values = np.zeros(50 + start)
    for snapshot in range(5):
        values[start + 10 * (snapshot + 1) - 1] = 10.0**snapshot
    state = run(Every(rule, 10, start=start), values)
    assert float(state.average) == pytest.approx(0.2 * 11111)
    assert state.count == (50 if rule == SWA() else 5)


def test_a_power_ema_keeps_its_digits_behind_a_traced_gate() -> None:
    """C1c: at step 10^7 in float32; the naive form is off by 20 %."""
    jax = pytest.importorskip("jax")
    rule = Every(PowerEMA(6.94), 100)
    update = jax.jit(rule.update)
    state = AverageState(10**7, jax.numpy.zeros(3), (99, ()))
    state = update(jax.numpy.ones(3), state)
    assert int(state.count) == 10**7 + 100
    np.testing.assert_allclose(state.average, PowerEMA(6.94).weight(10**7, 100), rtol=1e-6)
    assert np.array_equal(update(jax.numpy.full(3, 9.0), state).average, state.average)


@pytest.mark.parametrize(("interval", "steps"), [(10, 1), (100, 1), (1, 10), (100, 10), (1, 100)])
def test_a_power_ema_has_its_width_whatever_the_interval(interval: int, steps: int) -> None:
    """C2: weight(t) = t / N averages to (g + 1) / (g + 2), by ``steps`` and by ``Every``."""
    state = run(Every(PowerEMA(6.94), interval), np.arange(steps, 20001, steps) / 20000, steps)
    assert state.count == 20000
    assert float(state.average) == pytest.approx(0.888, abs=3e-3)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 7), st.lists(st.floats(-8, 8), min_size=1, max_size=8))
def test_skipping_constant_params_changes_no_average(
    rule: functavg.AveragingRule, interval: int, values: list[float]
) -> None:
    """Where the params are constant between updates, an interval gives what every step gives, as ``steps`` does."""
    each_step = run(rule, np.repeat(values, interval))
    for state in (run(Every(rule, interval), np.repeat(values, interval)), run(rule, values, interval)):
        assert float(state.average) == pytest.approx(float(each_step.average), rel=1e-9, abs=1e-12)
        assert state.count == each_step.count


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 7), st.lists(st.integers(1, 6), max_size=12))
def test_the_inner_rule_is_told_every_step_after_start(interval: int, start: int, gaps: list[int]) -> None:
    """What it is told and what waits add up to the time since ``start``, and every gap is at least an interval."""
    told = Told()
    rule = Every(told, interval, start=start)
    state = rule.init(np.zeros(()))
    for gap in gaps:
        state = rule.update(np.ones(()), state, steps=gap)
        assert state.memory[0] < interval
    steps = [step for _, step in told.calls]
    assert sum(steps) + state.memory[0] == sum(gaps) - start
    assert all(step >= interval for step in steps)
    assert [count for count, _ in told.calls] == [sum(steps[:index]) for index in range(len(steps))]
    assert state.count == sum(steps)


def test_the_first_update_is_an_interval_after_start() -> None:
    """Until then the state is as ``init`` made it."""
    rule = Every(SWA(), 3, start=4)
    state = rule.init(np.zeros(()))
    counts = []
    for _ in range(14):
        state = rule.update(np.ones(()), state)
        counts.append(state.count)
        assert float(state.average) == (1.0 if state.count else 0.0)
    assert counts == [0] * 6 + [3] * 3 + [6] * 3 + [9] * 2


def test_intervals_inside_one_another_wait_for_each_other() -> None:
    """The outer one tells its gap, which the inner one adds up."""
    told = Told()
    rule = Every(Every(told, 5), 3)
    state = rule.init(np.zeros(()))
    for _ in range(13):
        state = rule.update(np.ones(()), state)
    assert told.calls == [(0, 6), (6, 6)]
    assert state.memory == (1, (0, ()))


# ---- a closed gate


@pytest.mark.parametrize("inplace", [False, True])
def test_a_closed_gate_does_no_work(inplace: bool) -> None:
    """With a host count the arrays stay the same objects, and the params are not even looked at."""
    rule = Every(EMA(0.9), 3)
    state = rule.init({"w": torch.zeros(2)})
    after = rule.update({"w": torch.full((2,), torch.nan)}, state, inplace=inplace)
    assert after.average["w"] is state.average["w"]
    assert (after.count, after.memory) == (0, (1, ()))


def test_a_closed_gate_lets_no_nan_through_on_a_device() -> None:
    """There it is a weight of exactly 0: integers stay, too."""
    rule = Every(SWA(), 2)
    state = rule.init({"w": torch.zeros(2), "n": torch.tensor(3)})._replace(count=torch.tensor(0))
    state = rule.update({"w": torch.full((2,), torch.nan), "n": torch.tensor(4)}, state, inplace=True)
    assert state.average["w"].tolist() == [0.0, 0.0]
    assert state.average["n"].item() == 3
    state = rule.update({"w": torch.ones(2), "n": torch.tensor(5)}, state, inplace=True)
    assert state.average["w"].tolist() == [1.0, 1.0]
    assert state.average["n"].item() == 5
    assert all(isinstance(count, torch.Tensor) for count in (state.count, state.memory[0]))


@pytest.mark.parametrize("steps", [np.int64(2), torch.tensor(2)], ids=repr)
def test_steps_may_be_any_integer(steps: Any) -> None:
    """One on a device makes a count there."""
    state = Every(SWA(), 2).update(torch.ones(1), Every(SWA(), 2).init(torch.zeros(1)), steps=steps)
    assert int(state.count) == 2
    assert isinstance(state.count, type(steps)) or type(state.count) is int
    assert state.average.tolist() == [1.0]


def test_frozen_stays_frozen_behind_any_gate() -> None:
    """A weight of 0 is 0 with the gate open, too."""
    assert float(run(Every(Freeze(), 2), [5.0] * 4).average) == 0.0


def test_a_function_of_averages_is_refused_behind_a_traced_gate() -> None:
    """No weight can close it; with a host count it works."""
    rule = Every(AvgFn(mean_step), 2)
    assert float(run(rule, [1.0, 2.0, 3.0, 4.0]).average) == 3.0
    state = rule.init(torch.zeros(1))._replace(count=torch.tensor(1))
    with pytest.raises(TypeError, match=r"^AvgFn cannot stand behind a gate .*Expected a host count, got a 0-d array"):
        rule.update(torch.ones(1), state)


# ---- arguments and states


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Every(EMA(), 0), ValueError, "interval must be an integer of at least 1, got 0"),
        (lambda: Every(EMA(), -3), ValueError, "interval must be an integer of at least 1, got -3"),
        (lambda: Every(EMA(), 2.0), TypeError, r"interval must be an integer of at least 1, got 2\.0 of float"),
        (lambda: Every(EMA(), True), TypeError, "interval must be an integer of at least 1, got True of bool"),
        (lambda: Every(EMA(), "2"), TypeError, "interval must be an integer of at least 1, got '2' of str"),
        (lambda: Every(EMA(), torch.tensor(2)), TypeError, r"interval must be .*, got tensor\(2\) of Tensor"),
        (lambda: Every(EMA(), 2, start=-1), ValueError, "start must be an integer of at least 0, got -1"),
        (lambda: Every(EMA(), 2, start=False), TypeError, "start must be an integer of at least 0, got False of bool"),
        (lambda: Every(0.9, 2), TypeError, r"rule must be an AveragingRule such as EMA\(0\.999\), got 0\.9 of float"),
        (lambda: Every(EMA, 2), TypeError, r"rule must be .*; pass an instance: EMA\(\.\.\.\)"),
    ],
)
def test_a_bad_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    """T6: by name and value."""
    with pytest.raises(error, match="^" + message):
        make()


def test_numpy_integers_become_plain_ones() -> None:
    """So the rule prints and compares as one made with them."""
    rule = Every(EMA(0.9), np.int32(2), start=np.int64(1))
    assert repr(rule) == "Every(rule=EMA(decay=0.9, debias=False, start='copy'), interval=2, start=1)"
    assert rule == Every(EMA(0.9), 2, start=1)


def test_the_state_of_another_rule_is_refused() -> None:
    """The error says whose state it is not."""
    with pytest.raises(
        ValueError, match=r"^the state was not made by Every: expected a memory of two parts, got tuple\. Pass what"
    ):
        Every(EMA(), 2).update(np.ones(1), EMA().init(np.ones(1)))
    state = EMA().init(np.ones(1))._replace(memory=(-3, ()))
    with pytest.raises(ValueError, match=r"^state\.memory\[0\] must be an integer of at least -1, got -3"):
        Every(EMA(), 2, start=1).update(np.ones(1), state)
