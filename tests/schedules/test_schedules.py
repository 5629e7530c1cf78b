"""Schedules: their formulas, one meaning for every kind of number, values and the errors."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functavg
from functavg import EMA, WeightFn, schedules
from functavg.schedules import (
    After,
    Constant,
    Cosine,
    ExponentialRamp,
    HalfLifeRamp,
    InversePower,
    Linear,
    PerUpdate,
    Stretched,
    TFWarmup,
)

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")


def inverse_power(u, decay, inv_gamma, power, min_decay, start):
    k = max(0.0, u - start)
    return max(min_decay, min(decay, 1 - (1 + k / inv_gamma) ** -power))


def half_cosine(u, first, last, duration):
    t = min(1.0, (u - 1) / duration)
    return last - (last - first) * (1 + math.cos(math.pi * t)) / 2


def line(u, first, last, duration):
    return first + (last - first) * min(1.0, (u - 1) / duration)


# Each schedule with its formula, written naively for host numbers.
FORMULAS = [
    (Constant(0.99), lambda u: 0.99),
    (TFWarmup(0.999), lambda u: min(0.999, (1 + u) / (10 + u))),
    (TFWarmup(0.99, warmup=100, min_decay=0.5), lambda u: max(0.5, min(0.99, (1 + u) / (100 + u)))),
    (InversePower(0.9999), lambda u: inverse_power(u, 0.9999, 1, 2 / 3, 0, 0)),
    (InversePower(1.0, power=1.0), lambda u: inverse_power(u, 1, 1, 1, 0, 0)),
    (
        InversePower(0.99, inv_gamma=10.0, power=0.75, min_decay=0.2, start=7),
        lambda u: inverse_power(u, 0.99, 10, 0.75, 0.2, 7),
    ),
    (ExponentialRamp(0.9999), lambda u: 0.9999 * (1 - math.exp(-u / 2000))),
    (ExponentialRamp(0.9, tau=3), lambda u: 0.9 * (1 - math.exp(-u / 3))),
    (HalfLifeRamp(1000.0), lambda u: 0.5 ** (1 / min(1000, 0.09 * u))),
    (HalfLifeRamp(math.inf, fraction=0.5), lambda u: 0.5 ** (1 / (0.5 * u))),
    (Linear(0.5, 0.999, duration=100), lambda u: line(u, 0.5, 0.999, 100)),
    (Linear(0.9, 0.1, duration=1), lambda u: line(u, 0.9, 0.1, 1)),
    (Cosine(0.996, 1.0, duration=1000), lambda u: half_cosine(u, 0.996, 1, 1000)),
    (After(TFWarmup(0.999), 5), lambda u: 0 if u <= 5 else min(0.999, (1 + u - 5) / (10 + u - 5))),
    (After(0.9, 3), lambda u: 0 if u <= 3 else 0.9),
    (After(0.9, 0), lambda u: 0.9),
    (Stretched(TFWarmup(0.999), 10), lambda u: min(0.999, (1 + u / 10) / (10 + u / 10))),
    (Stretched(After(TFWarmup(0.999), 2), 4), lambda u: 0 if u <= 8 else min(0.999, (u / 4 - 1) / (8 + u / 4))),
]
SCHEDULES = [schedule for schedule, _ in FORMULAS]
CLOCKS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 50, 100, 101, 1000, 1001, 12345, 10**7]

each_formula = pytest.mark.parametrize(("schedule", "formula"), FORMULAS, ids=map(repr, SCHEDULES))
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)


@each_formula
def test_a_schedule_is_its_formula(schedule, formula) -> None:
    for u in CLOCKS:
        value = schedule(u)
        assert isinstance(value, float)
        assert value == pytest.approx(formula(u), rel=1e-13, abs=1e-15)


@each_formula
def test_numpy_numbers_mean_the_same(schedule, formula) -> None:
    for u in CLOCKS:
        for number in (np.int64(u), np.float64(u)):
            assert float(schedule(number)) == pytest.approx(formula(u), rel=1e-13, abs=1e-15)


@each_formula
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_device_counts_give_float64_on_their_device(schedule, formula, dtype) -> None:
    for u in CLOCKS:
        value = schedule(torch.tensor(u, dtype=dtype))
        if not isinstance(schedule, Constant):
            assert value.dtype == torch.float64
            assert value.ndim == 0
        assert float(value) == pytest.approx(formula(u), rel=1e-13, abs=1e-15)


@each_formula
def test_traced_counts_take_one_trace(schedule, formula) -> None:
    traces = []

    @jax.jit
    def traced(u):
        traces.append(u)
        return schedule(u)

    for u in CLOCKS:
        assert float(traced(jax.numpy.asarray(u))) == pytest.approx(formula(u), rel=1e-6, abs=1e-6)
    assert len(traces) == 1


@each_formula
def test_a_rate_is_one_minus_the_decay(schedule, formula) -> None:
    for u in CLOCKS:
        value = schedule.rate(u)
        assert isinstance(value, float)
        assert value == pytest.approx(1 - formula(u), rel=1e-13, abs=1e-15)
        assert schedule(u) == 1.0 - value


@each_formula
@pytest.mark.parametrize("make", [EMA, lambda schedule: WeightFn(PerUpdate(schedule))], ids=["EMA", "PerUpdate"])
def test_weights_in_float32_keep_their_digits(make, schedule, formula) -> None:
    """Also where the decay is so near to 1 that float32 holds few digits of the difference, or none."""
    weight = jax.jit(make(schedule).weight)
    for u in CLOCKS:
        assert float(weight(jax.numpy.asarray(u - 1), 1)) == pytest.approx(1 - formula(u), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("schedule", [HalfLifeRamp(math.inf), InversePower(1.0), TFWarmup(1 - 1e-7)], ids=repr)
def test_weights_of_several_steps_keep_their_digits(schedule) -> None:
    weight = jax.jit(EMA(schedule).weight)
    for u in (1, 30, 10**4, 10**6):
        wanted = -math.expm1(3 * math.log1p(-schedule.rate(u)))
        assert float(weight(jax.numpy.asarray(u - 3.0), 3)) == pytest.approx(wanted, rel=1e-6)


def test_weights_on_a_device_are_exactly_0_and_1_where_the_decay_is_1_and_0() -> None:
    """A weight near 1 would let a NaN of the old average through, one near 0 that of the params."""
    for count in (jax.numpy.asarray(100), torch.tensor(100)):
        for steps in (1, 3):
            assert float(EMA(Cosine(0.996, 1.0, duration=50)).weight(count, steps)) == 0.0
            assert float(EMA(Linear(0.5, 1.0, duration=50)).weight(count, steps)) == 0.0
            assert float(EMA(After(0.9, 200)).weight(count, steps)) == 1.0


class Halving(schedules.Schedule):
    """A user's schedule."""

    def __call__(self, u):
        raise AssertionError("the decay was asked for")

    def rate(self, u):
        return 0.5**u


def test_weights_come_from_the_rate_on_the_host_and_on_a_device() -> None:
    """Where 1 - decay would have lost every digit."""
    for rule in (EMA(Halving()), EMA(Stretched(Halving(), 1)), WeightFn(PerUpdate(After(Halving(), 0)))):
        for count in (79, torch.tensor(79.0, dtype=torch.float64)):
            assert float(rule.weight(count, 1)) == 0.5**80
    assert EMA(Halving()).weight(77, 3) == pytest.approx(3 * 0.5**80, rel=1e-15)


def test_a_schedule_of_your_own_gives_its_rate_and_is_called_for_its_decay() -> None:
    class Half(schedules.Schedule):
        def rate(self, u):
            return 0.25

    assert Half()(7) == 0.75
    with pytest.raises(TypeError, match="abstract"):
        schedules.Schedule()


@pytest.mark.parametrize(
    ("rate", "error", "message"),
    [
        ("0.5", TypeError, "rate(u) must be a real number or a 0-d array, got '0.5' of str"),
        (1.5, ValueError, "rate(u) must be in [0, 1], got 1.5"),
        (-0.5, ValueError, "rate(u) must be in [0, 1], got -0.5"),
        (math.nan, ValueError, "rate(u) must be finite, got nan"),
    ],
    ids=repr,
)
def test_a_rate_that_is_no_number_in_range_is_refused(rate, error, message) -> None:
    class Wrong(schedules.Schedule):
        def rate(self, u):
            return rate

    for rule in (EMA(Wrong()), EMA(After(Wrong(), 0)), WeightFn(PerUpdate(Wrong()))):
        for count in (1, torch.tensor(1.0)):
            with pytest.raises(error, match=re.escape(message)):
                rule.weight(count, 1)


@pytest.mark.parametrize("make", [EMA, lambda schedule: WeightFn(PerUpdate(schedule))], ids=["EMA", "PerUpdate"])
def test_a_plain_function_may_return_a_host_number_for_a_device_count(make) -> None:
    count = torch.tensor(3.0, dtype=torch.float64)
    assert float(make(lambda u: 0.75).weight(count, 1)) == 0.25
    assert float(make(After(lambda u: 0.75, 2)).weight(count, 1)) == 0.25
    with pytest.raises(ValueError, match=re.escape("decay(u) must be in [0, 1], got 1.5")):
        make(lambda u: 1.5).weight(count, 1)


@pytest.mark.parametrize("schedule", {type(schedule): schedule for schedule in SCHEDULES}.values(), ids=repr)
def test_a_compiled_weight_takes_one_graph_for_all_device_counts(schedule) -> None:
    rule, graphs = EMA(schedule), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    weight = torch.compile(rule.weight, fullgraph=True, backend=backend)
    for count in (0, 1, 5, 1000):
        assert float(weight(torch.tensor(count), 1)) == pytest.approx(rule.weight(count, 1), rel=1e-12)
    assert len(graphs) <= 1


@given(st.sampled_from(SCHEDULES), st.integers(1, 10**15))
def test_a_decay_stays_between_0_and_1(schedule, u: int) -> None:
    assert 0.0 <= schedule(u) <= 1.0
    assert 0.0 <= schedule.rate(u) <= 1.0


@given(st.sampled_from([it for it in SCHEDULES if it != Linear(0.9, 0.1, duration=1)]), st.integers(1, 10**6))
def test_a_decay_never_falls(schedule, u: int) -> None:
    assert schedule(u + 1) >= schedule(u) - 1e-15


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 1000), st.integers(1, 2000))
def test_a_path_stays_between_its_ends_and_keeps_the_last(first: float, last: float, steps: int, u: int) -> None:
    """Up to the unit in the last place of 1 that the rate is rounded to."""
    for path in (Linear(first, last, duration=steps), Cosine(first, last, duration=steps)):
        low, high = sorted((first, last))
        assert low - 2**-52 <= path(u) <= min(high + 2**-52, 1.0)
        assert path.rate(1) == 1.0 - first
        assert path.rate(steps + 1) == path.rate(steps + 1000) == 1.0 - last


@each_schedule
def test_a_schedule_is_a_value(schedule) -> None:
    namespace = {**vars(schedules), "inf": math.inf}
    assert eval(repr(schedule), namespace) == schedule
    assert hash(eval(repr(schedule), namespace)) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert eval(repr(PerUpdate(schedule)), namespace) == PerUpdate(schedule)
    assert pickle.loads(pickle.dumps(WeightFn(PerUpdate(schedule)))) == WeightFn(PerUpdate(schedule))
    with pytest.raises(FrozenInstanceError):
        setattr(schedule, fields(schedule)[0].name, 0.5)


def test_a_schedule_prints_as_its_call() -> None:
    assert repr(EMA(After(TFWarmup(0.999), 100))) == (
        "EMA(decay=After(decay=TFWarmup(decay=0.999, warmup=10.0, min_decay=0.0), start=100), debias=False, "
        "start='init')"
    )


def average_of(rule, values, *, start=100.0, steps=1):
    state = rule.init(np.asarray(start))
    for value in values:
        state = rule.update(np.asarray(value), state, steps=steps)
    return float(state.average)


def test_a_schedule_is_trusted_from_the_first_update() -> None:
    assert average_of(EMA(Constant(0.75)), [0.0]) == 75.0
    assert average_of(EMA(0.75), [0.0]) == 0.0
    assert average_of(EMA(TFWarmup(0.999)), [0.0]) == pytest.approx(100 * 2 / 11)
    assert average_of(EMA(After(0.75, 1)), [0.0, 8.0]) == 2.0


def test_start_says_whether_the_first_update_copies() -> None:
    assert average_of(EMA(0.75, start="init"), [0.0]) == 75.0
    assert average_of(EMA(0.75, start="copy"), [0.0]) == 0.0
    assert average_of(EMA(Constant(0.75), start="copy"), [0.0, 8.0]) == 2.0
    assert average_of(EMA(lambda u: 0.75, start="copy"), [0.0, 8.0]) == 2.0
    assert average_of(EMA(0.5, start="init"), [0.0], steps=2) == 25.0


def test_inverse_power_with_power_1_is_the_mean_of_all() -> None:
    assert average_of(EMA(InversePower(1.0, power=1.0)), [1.0, 2.0, 6.0], start=3.0) == pytest.approx(3.0)
    assert average_of(EMA(InversePower(1.0, power=1.0, start=1)), [1.0, 2.0, 6.0]) == pytest.approx(3.0)


def test_min_decay_holds_before_the_start_but_not_under_after() -> None:
    assert InversePower(0.9, min_decay=0.25, start=10)(3) == 0.25
    assert After(InversePower(0.9, min_decay=0.25), 10)(3) == 0.0
    assert After(InversePower(0.9, min_decay=0.7), 10)(11) == 0.7


def test_after_asks_the_schedule_only_where_it_is_defined() -> None:
    asked = []
    schedule = After(lambda u: asked.append(u) or 0.5, 4)
    assert [schedule(u) for u in (1, 4, 5, 7)] == [0.0, 0.0, 0.5, 0.5]
    assert asked == [1, 1, 1, 3]


@given(st.floats(0, 1), st.integers(1, 1000), st.integers(1, 1000))
def test_a_decay_per_update_ignores_the_gap(decay: float, count: int, steps: int) -> None:
    assert WeightFn(PerUpdate(decay)).weight(count, steps) == 1.0 - decay
    assert WeightFn(PerUpdate(TFWarmup(decay))).weight(count, steps) == TFWarmup(decay).rate(count + steps)


def test_a_decay_per_step_does_not() -> None:
    assert EMA(Constant(0.9)).weight(10, 3) == pytest.approx(1 - 0.9**3)
    assert EMA(HalfLifeRamp(math.inf, 0.5)).weight(8, 2) == pytest.approx(1 - 0.5 ** (2 / 5))


def test_stretched_counts_updates_where_the_schedule_counted_steps() -> None:
    values = np.random.default_rng(0).normal(size=20)
    every_step = average_of(EMA(TFWarmup(0.9)), values)
    every_tenth = average_of(WeightFn(PerUpdate(Stretched(TFWarmup(0.9), 10))), values, steps=10)
    assert every_tenth == pytest.approx(every_step, rel=1e-13)


def test_a_constant_decay_per_update_is_a_root_per_step() -> None:
    values = np.random.default_rng(0).normal(size=20)
    per_update = average_of(WeightFn(PerUpdate(After(0.9, 10))), values, steps=10)
    per_step = average_of(EMA(functavg.units.scale_decay(0.9, 1 / 10)), values, steps=10)
    assert per_update == pytest.approx(per_step, rel=1e-13)


def test_per_update_computes_with_a_device_count() -> None:
    weight = WeightFn(PerUpdate(TFWarmup(0.999))).weight(torch.tensor(7.0, dtype=torch.float64), 1)
    assert isinstance(weight, torch.Tensor)
    assert float(weight) == 0.5


def test_per_update_checks_what_a_schedule_returns() -> None:
    with pytest.raises(ValueError, match=r"decay\(u\) must be in \[0, 1\], got 1.5"):
        WeightFn(PerUpdate(lambda u: 1.5)).weight(0, 1)
    with pytest.raises(ValueError, match=r"decay\(u\) must be finite, got nan"):
        WeightFn(PerUpdate(lambda u: math.nan)).weight(0, 1)
    with pytest.raises(TypeError, match=r"decay\(u\) must be a .*number or a 0-d array, got 'x' of str"):
        WeightFn(PerUpdate(lambda u: "x")).weight(0, 1)


UNIT = "must be in [0, 1]"
POSITIVE = "must be positive"
OUT_OF_RANGE = [
    *((Constant, {"decay": decay}, "decay", UNIT) for decay in (-0.1, 1.1, math.nan)),
    (TFWarmup, {"decay": 1.1}, "decay", UNIT),
    (TFWarmup, {"decay": 0.9, "warmup": 0.5}, "warmup", "must be finite and at least 1"),
    (TFWarmup, {"decay": 0.9, "warmup": math.inf}, "warmup", "must be finite and at least 1"),
    (TFWarmup, {"decay": 0.9, "warmup": math.nan}, "warmup", "must be finite and at least 1"),
    (TFWarmup, {"decay": 0.9, "min_decay": 0.95}, "min_decay", "must be in [0, decay] = [0, 0.9]"),
    (InversePower, {"decay": math.nan}, "decay", UNIT),
    (InversePower, {"decay": 0.9, "inv_gamma": 0}, "inv_gamma", POSITIVE),
    (InversePower, {"decay": 0.9, "inv_gamma": math.inf}, "inv_gamma", "must be finite"),
    (InversePower, {"decay": 0.9, "power": -1}, "power", POSITIVE),
    (InversePower, {"decay": 0.9, "power": math.inf}, "power", "must be finite"),
    (InversePower, {"decay": 0.9, "min_decay": -0.1}, "min_decay", "must be in [0, decay] = [0, 0.9]"),
    (InversePower, {"decay": 0.9, "min_decay": math.nan}, "min_decay", "must be in [0, decay] = [0, 0.9]"),
    (InversePower, {"decay": 0.9, "start": -1}, "start", "must be an integer of at least 0"),
    (ExponentialRamp, {"decay": 2}, "decay", UNIT),
    (ExponentialRamp, {"decay": 0.9, "tau": 0}, "tau", POSITIVE),
    (ExponentialRamp, {"decay": 0.9, "tau": math.inf}, "tau", "must be finite"),
    (HalfLifeRamp, {"half_life": 0}, "half_life", POSITIVE),
    (HalfLifeRamp, {"half_life": 10, "fraction": -1}, "fraction", POSITIVE),
    (HalfLifeRamp, {"half_life": 10, "fraction": math.inf}, "fraction", "must be finite"),
    (Linear, {"first": -1, "last": 1, "duration": 10}, "first", UNIT),
    (Linear, {"first": 0, "last": 1.5, "duration": 10}, "last", UNIT),
    (Linear, {"first": 0, "last": 1, "duration": 0}, "duration", "must be an integer of at least 1"),
    (Cosine, {"first": math.nan, "last": 1, "duration": 10}, "first", UNIT),
    (Cosine, {"first": 0, "last": -1, "duration": 10}, "last", UNIT),
    (Cosine, {"first": 0, "last": 1, "duration": -5}, "duration", "must be an integer of at least 1"),
    (After, {"decay": 1.1, "start": 0}, "decay", UNIT),
    (After, {"decay": 0.9, "start": -1}, "start", "must be an integer of at least 0"),
    (Stretched, {"decay": Constant(0.9), "interval": 0}, "interval", "must be an integer of at least 1"),
    (PerUpdate, {"decay": -0.5}, "decay", UNIT),
]


@pytest.mark.parametrize(("schedule", "arguments", "name", "allowed"), OUT_OF_RANGE)
def test_an_argument_out_of_range_is_named_with_what_is_allowed(schedule, arguments, name, allowed) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} {allowed}, got {arguments[name]!r}")):
        schedule(**arguments)


NUMBER = "must be a number"
INTEGER = "must be an integer of at least"
OF_ANOTHER_KIND = [
    (Constant, {"decay": "0.9"}, "decay", NUMBER),
    (TFWarmup, {"decay": 0.9, "warmup": None}, "warmup", NUMBER),
    (TFWarmup, {"decay": 0.9, "min_decay": "0"}, "min_decay", NUMBER),
    (InversePower, {"decay": [0.9]}, "decay", NUMBER),
    (InversePower, {"decay": 0.9, "inv_gamma": "1"}, "inv_gamma", NUMBER),
    (InversePower, {"decay": 0.9, "start": 1.5}, "start", INTEGER),
    (ExponentialRamp, {"decay": 0.9, "tau": True}, "tau", NUMBER),
    (HalfLifeRamp, {"half_life": "10"}, "half_life", NUMBER),
    (HalfLifeRamp, {"half_life": 10, "fraction": 1j}, "fraction", NUMBER),
    (Linear, {"first": "0", "last": 1, "duration": 10}, "first", NUMBER),
    (Cosine, {"first": 0, "last": 1, "duration": 1.0}, "duration", INTEGER),
    (After, {"decay": "0.9", "start": 0}, "decay", NUMBER),
    (After, {"decay": 0.9, "start": None}, "start", INTEGER),
    (Stretched, {"decay": 0.9, "interval": 10}, "decay", "must be callable"),
    (Stretched, {"decay": Constant(0.9), "interval": 0.5}, "interval", INTEGER),
    (PerUpdate, {"decay": None}, "decay", NUMBER),
]


@pytest.mark.parametrize(("schedule", "arguments", "name", "expected"), OF_ANOTHER_KIND)
def test_an_argument_of_another_kind_is_named_with_what_is_expected(schedule, arguments, name, expected) -> None:
    value = arguments[name]
    message = re.escape(f"{name} {expected}") + ".*" + re.escape(f", got {value!r} of {type(value).__name__}")
    with pytest.raises(TypeError, match=message):
        schedule(**arguments)


def profile_of(schedule, total):
    """The weight of each of ``total`` iterates in the final average, from the decays alone."""
    decays = schedule(torch.arange(1, total + 1)).numpy()
    left = np.append(np.cumprod(decays[::-1])[::-1][1:], 1.0)
    return (1.0 - decays) * left


@pytest.mark.parametrize(
    ("schedule", "total", "mean", "spread", "samples"),
    [
        (TFWarmup(1.0), 20_000, 0.900, 0.0905, 0.21),
        (HalfLifeRamp(math.inf, 0.09), 20_000, 0.885, 0.1024, 0.24),
        (InversePower(1.0, power=1.0), 20_000, 0.500, 0.2887, 1.0),
        (InversePower(1.0, power=3 / 4), 200_000, 0.954, 0.044, 0.093),
        (InversePower(1.0, power=2 / 3), 200_000, 0.983, 0.017, 0.034),
    ],
    ids=repr,
)
def test_the_width_of_each_warm_up(schedule, total, mean, spread, samples) -> None:
    weights, time = profile_of(schedule, total), np.arange(1, total + 1) / total
    assert weights.sum() == pytest.approx(1.0, abs=1e-3)
    assert weights @ time == pytest.approx(mean, abs=6e-4)
    assert math.sqrt(weights @ time**2 - (weights @ time) ** 2) == pytest.approx(spread, abs=6e-4)
    assert 1.0 / (weights @ weights) / total == pytest.approx(samples, abs=6e-3)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (After(InversePower(0.9999), 1), {1: 0.0, 2: 0.37004, 3: 0.51925, 4: 0.60315, 5: 0.65800}),
        (InversePower(0.9999), {10: 0.798}),
        (InversePower(1.0, power=1.0, start=1), {1: 0.0}),
        (TFWarmup(0.999), {1: 2 / 11}),
        (TFWarmup(0.999, warmup=50), {1: 2 / 51}),
        (After(TFWarmup(0.9999), 1), {1: 0.0, 2: 0.18182}),
        (ExponentialRamp(0.9999, 2000), {1: 0.0005, 100: 0.04877, 2000: 0.63206}),
        (HalfLifeRamp(1e9, 0.09), {100: 2 ** (-1 / 9)}),
        (Cosine(0.996, 1.0, duration=100), {1: 0.996, 51: 0.998, 101: 1.0}),
    ],
    ids=repr,
)
def test_the_first_values_that_were_measured(schedule, values) -> None:
    digits = {u: schedule(u) for u in values}
    assert digits == pytest.approx(values, abs=5e-6 if 10 not in values else 5e-4)
