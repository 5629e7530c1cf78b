"""A profile is what running the rule gives, for every rule, nest and function, and equals the closed forms."""

from __future__ import annotations

import inspect
import math
import pickle
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functavg
from functavg import (
    EMA,
    LAWA,
    SWA,
    AverageState,
    AveragingRule,
    AvgFn,
    Every,
    Freeze,
    Latest,
    Partition,
    PowerEMA,
    Profile,
    Several,
    SkipNonFinite,
    WeightFn,
    WeightRule,
    profile,
    schedules,
)
from functavg.combinators.gate import Gate
from functavg.combinators.product import Product
from functavg.plan import Lerp
from functavg.profiles.columns import SAMPLES, Column
from functavg.profiles.reading import read
from functavg.profiles.symbolic import Node
from tests import oracle
from tests.tables import RULES

GAPS = [1, 3, 1, 2, 1, 1, 4, 1, 1, 1, 2, 1]


def ema_in_place(averages: list[Any], news: list[Any], count: Any) -> None:
    torch._foreach_lerp_(averages, news, 0.3)


def mean_in_torch(average: Any, new: Any, count: Any) -> Any:
    return average.lerp(new, 1 / (count + 1))


@dataclass(frozen=True)
class Lookahead(AveragingRule):
    """A custom rule with memory: a slow average of a fast one."""

    def init(self, params: Any, /, *, dtype: Any = None, device: Any = None) -> AverageState[Any]:
        state = super().init(params, dtype=dtype, device=device)
        return state._replace(memory={"fast": super().init(params).average, "calls": 0.0})

    def plan(self, params: Any, state: AverageState[Any], steps: Any) -> AverageState[Any]:
        fast = Lerp(state.memory["fast"], params, 0.5)
        slow = Lerp(Lerp(state.average, state.memory["fast"], 0.25), params, 0.125)
        return AverageState(state.count + steps, slow, {"fast": fast, "calls": state.memory["calls"] + 1.0})


@dataclass(frozen=True)
class Half(WeightRule):
    """A custom weight rule."""

    def weight(self, count: Any, steps: Any) -> Any:
        return 0.5


ROWS = {name: row for name, row in RULES.items() if not isinstance(row.rule, AvgFn)}
ONE = {name: row.rule for name, row in ROWS.items()} | {
    "LAWA": LAWA(3),
    "LAWA-1": LAWA(1),
    "LAWA-long": LAWA(50),
    "custom weight": Half(),
    "custom plan": Lookahead(),
    "Every": Every(EMA(0.9), 2),
    "Every-start": Every(SWA(), 3, start=2),
    "Every-never": Every(EMA(0.9), 100),
    "Every-LAWA": Every(LAWA(2), 2),
    "SkipNonFinite": SkipNonFinite(PowerEMA(3)),
    "Skip-LAWA": SkipNonFinite(LAWA(3)),
    "Every-Skip-LAWA": Every(SkipNonFinite(LAWA(2)), 2),
    "Every-Every-custom": Every(Every(Lookahead(), 2), 3),
    "beyond": WeightFn(lambda count, steps: 1.5),
}
RULES_OF_PARTS = {"a": EMA(0.8), 7: Every(SWA(), 2)}
MANY = {
    "Several": Several({"fast": EMA(0.5), "window": LAWA(2), "mean": SWA()}),
    "Every-Several": Every(Several({"fast": EMA(0.5), "mean": Every(SWA(), 2)}), 2),
    "Partition": Partition(RULES_OF_PARTS, lambda name, leaf: 7 if name == "7" else name),
    "Skip-Partition": SkipNonFinite(Partition(RULES_OF_PARTS, lambda name, leaf: 7 if name == "7" else name)),
    "Several-Partition": Several(
        {"parts": Partition(RULES_OF_PARTS, lambda name, leaf: 7 if name == "7" else name), "mean": SWA()}
    ),
}


def vectors(rule: AveragingRule, gaps: list[int], wrap: Any = np.asarray) -> Any:
    """The average of unit vectors: element 0 is the weight of the initial model, element i that of iterate i."""
    units = np.eye(len(gaps) + 1)
    state = rule.init(wrap(units[0]))
    for unit, gap in zip(units[1:], gaps, strict=True):
        state = rule.update(wrap(unit), state, steps=gap)
    return state.average


def whole(profile: Profile) -> np.ndarray:
    return np.concatenate([[profile.initial], profile.weights])


@pytest.mark.parametrize("gaps", [[1] * 12, GAPS, [2]], ids=["steps", "gaps", "one"])
@pytest.mark.parametrize("name", ONE)
def test_a_profile_is_what_running_the_rule_gives(name: str, gaps: list[int]) -> None:
    rule = ONE[name]
    found = profile(rule, gaps)
    ran = vectors(rule, gaps)
    np.testing.assert_allclose(whole(found), ran, rtol=0, atol=1e-14 * max(1, np.abs(ran).max()))
    assert math.fsum(whole(found)) == pytest.approx(1, abs=1e-12)
    assert found.total == pytest.approx(1, abs=1e-12)
    assert found.times.tolist() == np.cumsum(gaps).tolist()
    assert found.steps == sum(gaps)
    assert found.name == repr(rule)


@pytest.mark.parametrize("name", MANY)
def test_rules_of_several_averages_have_a_profile_each(name: str) -> None:
    rule = MANY[name]
    found = profile(rule, GAPS)
    # Of a partition, a leaf of each label.
    ran = vectors(rule, GAPS, (lambda unit: {"a": unit, "7": unit.copy()}) if "Partition" in name else np.asarray)

    def compare(profiles: Any, averages: Any) -> None:
        if isinstance(profiles, Profile):
            for average in averages.values() if isinstance(averages, dict) else [averages]:
                np.testing.assert_allclose(whole(profiles), average, rtol=0, atol=1e-14)
            return
        assert set(map(str, profiles)) == set(averages)
        for key, inner in profiles.items():
            compare(inner, averages[str(key)])

    compare(found, ran)


def test_a_partition_is_read_by_label_whatever_its_labels_and_names() -> None:
    found = profile(Partition({0: EMA(0.5), "rest": SWA()}, {"body": {"w": 0}, "head": "rest"}), 4)
    assert set(found) == {0, "rest"}
    assert found[0].name == "0"
    np.testing.assert_array_equal(found[0].weights, profile(EMA(0.5), 4).weights)
    np.testing.assert_array_equal(found["rest"].weights, [0.25] * 4)


def test_every_rule_of_the_package_is_tried() -> None:
    def subclasses(base: type) -> set[type]:
        return {base}.union(*map(subclasses, base.__subclasses__()))

    ours = {
        rule
        for rule in subclasses(AveragingRule)
        # A class of a doctest has the name of its module, too, but is not to be found there.
        if rule.__module__.startswith("functavg.")
        and getattr(sys.modules[rule.__module__], rule.__name__, None) is rule
        and not rule.__name__.startswith("_")
        and not inspect.isabstract(rule)
        and rule not in (Gate, Product, AvgFn)
    }
    tried = {*map(type, ONE.values()), *map(type, MANY.values())}
    assert ours <= tried


# ---- closed forms


@pytest.mark.parametrize("gaps", [GAPS, GAPS * 200], ids=["short", "long"])
@pytest.mark.parametrize("name", ROWS)
def test_profiles_equal_the_closed_forms_of_the_oracle(name: str, gaps: list[int]) -> None:
    row = ROWS[name]
    np.testing.assert_allclose(whole(profile(row.rule, gaps)), row.profile(gaps), rtol=0, atol=1e-14)


@pytest.mark.parametrize("gamma", [0, 1, 6.94, 96.9949])
def test_power_functions_have_their_weights_to_1e_12(gamma: float) -> None:
    ends = (np.arange(5001) / 5000) ** (gamma + 1)
    found = profile(PowerEMA(gamma), 5000)
    np.testing.assert_allclose(found.weights, np.diff(ends), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.weights[2500:], np.diff(ends)[2500:], rtol=1e-9)
    assert found.initial == 0


@pytest.mark.parametrize(
    ("sigma_rel", "gamma"), [(0.05, 16.9722), (0.10, 6.9372), (0.15, 3.5579), (0.20, 1.8262), (0.25, 0.7198)]
)
def test_edm2_widths_are_widths_of_profiles(sigma_rel: float, gamma: float) -> None:
    rule = PowerEMA.from_sigma_rel(sigma_rel)
    assert rule.gamma == pytest.approx(gamma, abs=1e-4)
    found = profile(rule, [1000] * 4000)  # a coarse clock: the gaps compose exactly
    assert found.sigma_rel == pytest.approx(sigma_rel, abs=1e-5)
    assert 1 - found.mean_age / found.steps == pytest.approx((gamma + 1) / (gamma + 2), abs=2e-4)
    effective = (2 * gamma + 1) / (gamma + 1) ** 2 * 4000
    assert found.effective_iterates == pytest.approx(effective, rel=5e-3)


def test_the_mean_has_its_figures() -> None:
    found = profile(SWA(), 1000)
    assert found.mean_age == pytest.approx(999 / 2, rel=1e-12)
    assert found.std == pytest.approx(math.sqrt((1000**2 - 1) / 12), rel=1e-12)
    assert found.sigma_rel == pytest.approx(12**-0.5, rel=1e-5)
    assert found.effective_iterates == pytest.approx(1000, rel=1e-12)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_a_long_ema_has_its_figures(decay: float) -> None:
    found = profile(EMA(decay), 4000)
    assert found.mean_age == pytest.approx(decay / (1 - decay), rel=1e-9)
    assert found.std == pytest.approx(math.sqrt(decay) / (1 - decay), rel=1e-9)
    assert found.effective_iterates == pytest.approx((1 + decay) / (1 - decay), rel=1e-9)
    assert found.half_life == pytest.approx(math.log(0.5) / math.log(decay), rel=1e-9)


def test_equivalent_half_life_makes_an_ema_as_old() -> None:
    found = profile(PowerEMA(6.94), 1000)
    assert profile(EMA.from_half_life(found.half_life), 20000).mean_age == pytest.approx(found.mean_age, rel=1e-9)


@pytest.mark.parametrize(
    ("decay", "mean_time", "sigma_rel", "effective"),
    [
        (lambda u: (1 + u) / (10 + u), 0.900, 0.0905, 0.21),  # TF's warm-up: power 8
        (lambda u: 2 ** (-1 / (0.09 * u)), 0.885, 0.1024, 0.24),  # EDM2's ramp: power 6.70
        (lambda u: 1 - 1 / u, 0.500, 0.2887, 1.0),  # inverse power 1: the mean
    ],
    ids=["tf", "edm2", "inverse"],
)
def test_warm_ups_are_power_functions(decay: Any, mean_time: float, sigma_rel: float, effective: float) -> None:
    found = profile(EMA(decay), 20000)
    assert 1 - found.mean_age / found.steps == pytest.approx(mean_time, abs=6e-4)
    assert found.sigma_rel == pytest.approx(sigma_rel, abs=6e-5)
    assert found.effective_iterates / found.steps == pytest.approx(effective, abs=6e-3)


def test_long_runs_lose_no_weight() -> None:
    decays = 1 - np.arange(1.0, 50_001) ** -0.75
    kept = np.append(np.cumprod(decays[:0:-1])[::-1], 1.0)
    found = profile(EMA(lambda u: 1 - u**-0.75), 50_000)
    np.testing.assert_allclose(found.weights, (1 - decays) * kept, rtol=1e-10, atol=1e-300)
    assert math.fsum(whole(found)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("rule", [LAWA(200), SkipNonFinite(LAWA(200))], ids=str)
def test_of_a_window_only_the_window_is_run(rule: AveragingRule) -> None:
    found = profile(rule, 100_000)
    assert found.weights[-200:] == pytest.approx(1 / 200, rel=1e-12)
    assert not found.weights[:-200].any()
    assert found.total == pytest.approx(1, abs=1e-12)


@given(
    gaps=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    gamma=st.floats(0, 100),
    decay=st.floats(0, 1),
    interval=st.integers(1, 20),
)
def test_any_gaps_sum_to_one_and_agree_with_the_oracle(
    gaps: list[int], gamma: float, decay: float, interval: int
) -> None:
    for rule, wanted in (
        (PowerEMA(gamma), oracle.power(gamma)),
        (EMA(decay), oracle.ema(decay)),
        (EMA(decay, debias=True), None),
        (Every(SWA(), interval), None),
    ):
        ran = wanted(gaps) if wanted else vectors(rule, gaps)
        np.testing.assert_allclose(whole(profile(rule, gaps)), ran, rtol=0, atol=1e-12)


def test_several_profiles_of_one_run_are_those_of_single_runs() -> None:
    for rule in (PowerEMA(3), LAWA(3), Every(EMA(0.9), 2), Lookahead()):
        for updates, found in zip([1, 4, 9], read(rule, np.array(GAPS), [1, 4, 9]), strict=True):
            alone = profile(rule, GAPS[:updates])
            np.testing.assert_allclose(whole(found), whole(alone), rtol=0, atol=1e-15)
            np.testing.assert_array_equal(found.times, alone.times)


def test_one_intention_may_span_several_averages() -> None:
    class Pair(AveragingRule):
        def init(self, params: Any, /, *, dtype: Any = None, device: Any = None) -> AverageState[Any]:
            first, second = (super(Pair, self).init(params).average for _ in range(2))
            return AverageState(0, {"new": first, "old": second}, ())

        def plan(self, params: Any, state: AverageState[Any], steps: Any) -> AverageState[Any]:
            news = {"new": params, "old": state.average["new"]}
            return AverageState(state.count + steps, Lerp(state.average, news, 0.5), ())

    found = profile(Pair(), GAPS)
    ran = vectors(Pair(), GAPS)
    for name in ("new", "old"):
        np.testing.assert_allclose(whole(found[name]), ran[name], rtol=0, atol=1e-15)
        assert found[name].name == name


# ---- a million updates


def plain(rule: WeightRule, gaps: list[int]) -> np.ndarray:
    """The sum that a profile stands for, from the newest iterate on, with the weights of host counts."""
    result, kept, times = [], 1.0, np.cumsum(gaps).tolist()
    for time, gap in zip(times[::-1], gaps[::-1], strict=True):
        weight = float(rule.weight(time - gap, gap))
        result.append(weight * kept)
        kept *= 1 - weight
    return np.array([kept, *result[::-1]])


class FromCount(WeightRule):
    """A rule that branches on its count, which no array allows."""

    def weight(self, count: Any, steps: Any) -> Any:
        return 1.0 if count == 0 else min(1.0, 3.0 / (count + steps))


LONG = {
    "EMA": EMA(0.999),
    "EMA-0": EMA(0.0),
    "EMA-1": EMA(1.0),
    "debiased": EMA(0.99, debias=True),
    "mean": EMA(1.0, debias=True),
    "SWA": SWA(),
    "PowerEMA": PowerEMA(6.94),
    "Latest": Latest(),
    "Freeze": Freeze(),
    "Constant": EMA(schedules.Constant(0.99)),
    "TFWarmup": EMA(schedules.TFWarmup(0.9999)),
    "InversePower": EMA(schedules.InversePower(0.9999)),
    "ExponentialRamp": EMA(schedules.ExponentialRamp(0.999)),
    "HalfLifeRamp": EMA(schedules.HalfLifeRamp(500)),
    "Linear": EMA(schedules.Linear(0.5, 0.999, duration=1000)),
    "Cosine": EMA(schedules.Cosine(0.9, 1.0, duration=2000)),
    "After": EMA(schedules.After(schedules.TFWarmup(0.999), 100)),
    "Stretched": EMA(schedules.Stretched(schedules.TFWarmup(0.999), 10)),
    "PerUpdate": WeightFn(schedules.PerUpdate(schedules.TFWarmup(0.999))),
    "lambda": EMA(lambda u: 1 - u**-0.75),
    "numpy": EMA(lambda u: 0.99 * -np.expm1(-u / 50)),
    "math": EMA(lambda u: 0.99 * -math.expm1(-u / 50)),
    "min": EMA(lambda u: min(0.99, (1 + u) / (10 + u))),
    "where": WeightFn(lambda count, steps: np.where(count < 500, 0.5, 0.01)),
    "branches": FromCount(),
    "Half": Half(),
    "divmod": WeightFn(lambda count, steps: 0.125 * (1 + divmod(count, 4)[1])),
    "periodic": WeightFn(lambda count, steps: (count % 100 == 0) * 0.5),
    "beyond": WeightFn(lambda count, steps: 1 + 1 / (count + 2) ** 2),
    "negative": WeightFn(lambda count, steps: -1 / (count + 2) ** 2),
    "by kind": WeightFn(lambda count, steps: 0.1 if isinstance(count, int) else 0.2),
    "a vector": WeightFn(lambda count, steps: 0.25 if isinstance(count, int) else np.zeros(3)),
}


@pytest.mark.parametrize("gaps", [[1] * 3000, [1 + 7 * (index % 3) for index in range(3000)]], ids=["steps", "gaps"])
@pytest.mark.parametrize("name", LONG)
def test_long_profiles_are_the_sum_of_host_weights(name: str, gaps: list[int]) -> None:
    """To rounding: that of a weight is 1e-16, relative to 1, where it is formed as 1 minus a decay."""
    found = profile(LONG[name], gaps)
    np.testing.assert_allclose(whole(found), plain(LONG[name], gaps), rtol=1e-9, atol=1e-15)


ONE_BY_ONE = {"math", "min", "where", "branches", "beyond", "negative", "by kind", "a vector"}


@pytest.mark.parametrize("name", LONG)
def test_formulas_give_all_weights_in_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the samples that are compared. Where they branch, or leave [0, 1], hosts are asked update by update."""
    calls: list[Any] = []
    weight = type(LONG[name]).weight
    counted = lambda self, count, steps: (calls.append(count), weight(self, count, steps))[1]  # noqa: E731
    monkeypatch.setattr(type(LONG[name]), "weight", counted)
    found = profile(LONG[name], 3000)
    assert isinstance(calls[0], Column)
    if name in ONE_BY_ONE:
        assert len(calls) >= 3000
    else:
        assert 30 < len(calls) <= 1 + SAMPLES
    assert len(found.weights) == 3000


def test_a_decay_that_is_out_of_range_only_late_is_found() -> None:
    """Formulas check numbers, and no arrays."""
    with pytest.raises(ValueError, match=r"decay\(u\) must be in \[0, 1\], got 1.1"):
        profile(EMA(lambda u: 0.9 + 0.2 * (u >= 777)), 1000)
    with pytest.raises(ZeroDivisionError):
        profile(WeightFn(lambda count, steps: 1 / (count - 500)), 1000)
    with pytest.raises(TypeError, match="weight must be a real number or a 0-d array, got 'much' of str"):
        profile(WeightFn(lambda count, steps: "much"), 1000)


def test_a_formula_of_ufuncs_with_options_is_asked_update_by_update() -> None:
    """A column takes plain calls only."""
    rule = WeightFn(lambda count, steps: np.add(count, 1.0, dtype=np.float64) ** -1)
    np.testing.assert_allclose(profile(rule, 1000).weights, 1e-3, rtol=1e-9)


def test_a_product_of_weights_beyond_1_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match="weights and initial must be finite"):
        profile(WeightFn(lambda count, steps: 11.0), 1000)


@pytest.mark.parametrize("start", [0, 5, 2000])
@pytest.mark.parametrize("interval", [1, 3, 64])
def test_long_intervals_are_those_of_the_updates_that_get_through(interval: int, start: int) -> None:
    gaps = [1 + (index % 4) for index in range(500)]
    last, through = start, []
    for index, time in enumerate(np.cumsum(gaps).tolist()):
        if time - last >= interval:
            through.append((index, time - last))
            last = time
    inner = plain(PowerEMA(3), [told for _, told in through]) if through else np.ones(1)
    wanted = np.zeros(501)
    wanted[[0, *(1 + index for index, _ in through)]] = inner
    for rule in (Every(PowerEMA(3), interval, start=start), SkipNonFinite(Every(PowerEMA(3), interval, start=start))):
        np.testing.assert_allclose(whole(profile(rule, gaps)), wanted, rtol=1e-9, atol=1e-15)


def test_a_rule_that_overrides_more_than_its_weight_is_run() -> None:
    class Twice(WeightRule):
        def weight(self, count: Any, steps: Any) -> Any:
            return 0.5

        def plan(self, params: Any, state: AverageState[Any], steps: Any) -> AverageState[Any]:
            once = super().plan(params, state, steps)
            return once._replace(average=Lerp(once.average, params, 0.5))

    np.testing.assert_allclose(profile(Twice(), 3).weights, [0.75 / 16, 0.75 / 4, 0.75])


# ---- progress


def test_progress_of_what_is_asked_update_by_update() -> None:
    for rule in (FromCount(), Lookahead(), Every(Lookahead(), 1), Several({"one": Lookahead()})):
        reports: list[Any] = []
        profile(rule, 100, progress=lambda done, total, reports=reports: reports.append((done, total)))
        assert reports == [(done, 100) for done in range(1, 101)]


@pytest.mark.parametrize("rule", [EMA(), FromCount()], ids=["at once", "one by one"])
def test_progress_is_checked(rule: AveragingRule, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"progress must be a bool or a function of \(done, total\), got 'yes' of str"):
        profile(rule, 5, progress="yes")
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"progress=True needs rich, .*: pip install 'functavg\[progress\]'"):
        profile(rule, 5, progress=True)


# ---- functions of averages


@pytest.mark.parametrize(
    "rule",
    [
        AvgFn(mean_in_torch),
        AvgFn(ema_in_place, grouped=True),
        Every(AvgFn(mean_in_torch), 2),
        Several({"one": EMA(0.9), "other": AvgFn(ema_in_place, grouped=True)}),
    ],
    ids=["AvgFn", "AvgFn-grouped", "Every", "Several"],
)
def test_functions_of_averages_have_no_profile_and_learn_how_to_have_one(rule: AveragingRule) -> None:
    with pytest.raises(TypeError, match=r"has no profile.*Write it as a WeightRule") as caught:
        profile(rule, 5)
    example = textwrap.dedent(str(caught.value).split("\n\n")[1])
    names: dict[str, Any] = {"functavg": functavg, "dataclass": dataclass}
    exec(example, names)
    np.testing.assert_allclose(profile(names["Mean"](), 4).weights, 0.25)


def test_a_step_from_the_result_of_a_function_has_no_profile() -> None:
    class Both(AveragingRule):
        def plan(self, params: Any, state: AverageState[Any], steps: Any) -> AverageState[Any]:
            applied = functavg.AvgFn(lambda average, new, count: new).plan(params, state, steps)
            return applied._replace(average=Lerp(applied.average, params, 0.5))

    with pytest.raises(TypeError, match="WeightRule"):
        profile(Both(), 5)


def test_plans_that_compute_with_arrays_are_refused() -> None:
    class Doubled(AveragingRule):
        def plan(self, params: Any, state: AverageState[Any], steps: Any) -> AverageState[Any]:
            return AverageState(state.count + steps, Lerp(state.average, 2 * params, 0.5), ())

    with pytest.raises(ValueError, match=r"plan computes with arrays itself, .* got .*2\."):
        profile(Doubled(), 5)


# ---- arguments


@pytest.mark.parametrize(
    ("rule", "steps", "error", "message"),
    [
        (EMA, 5, TypeError, r"rule must be an AveragingRule .*, got the class EMA; pass an instance: EMA\(\.\.\.\)"),
        (0.9, 5, TypeError, "rule must be an AveragingRule .*, got 0.9 of float"),
        (EMA(), 0, ValueError, "steps must be an integer of at least 1, got 0"),
        (EMA(), -3, ValueError, "steps must be an integer of at least 1, got -3"),
        (EMA(), 2.5, TypeError, "steps must be an integer .*, got 2.5 of float"),
        (EMA(), True, TypeError, "steps must be an integer .*, got True"),
        (EMA(), None, TypeError, "steps must be an integer .*, got None"),
        (EMA(), "7", TypeError, r"steps\[0\] must be an integer .*, got '7'"),
        (EMA(), [1, 0], ValueError, r"steps\[1\] must be an integer of at least 1, got 0"),
        (EMA(), [1, 1.5], TypeError, r"steps\[1\] must be an integer"),
        (EMA(), [], ValueError, "steps must be .* at least one gap, got none"),
    ],
)
def test_arguments_are_checked(rule: Any, steps: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        profile(rule, steps)


@pytest.mark.parametrize(
    "steps",
    [np.int64(3), np.array(3), [1, 1, 1], np.array([1, 1, 1]), iter([1, 1, 1])],
    ids=lambda it: type(it).__name__,
)
def test_steps_may_be_any_integers(steps: Any) -> None:
    np.testing.assert_allclose(profile(SWA(), steps).weights, 1 / 3, rtol=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.5], [1]), r"weights and times must be vectors of one length .* \(2,\) and \(1,\)"),
        (([], []), "at least 1"),
        (([[1.0]], [[1]]), "must be vectors"),
        (([math.nan], [1]), "weights and initial must be finite"),
        (([0.5, 0.5], [1, 1]), "times must increase from above 0"),
        (([1.0], [0]), "times must increase from above 0"),
    ],
)
def test_profiles_are_checked(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Profile(*arguments)


def test_the_initial_weight_is_checked() -> None:
    with pytest.raises(ValueError, match=r"weights and initial must be finite, got \[1.\] and inf"):
        Profile([1.0], [1], initial=math.inf)


# ---- what a profile is


def test_the_initial_model_counts_as_an_iterate_at_time_0() -> None:
    frozen = profile(Freeze(), 10)
    assert (frozen.initial, frozen.mean_age, frozen.std, frozen.effective_iterates) == (1, 10, 0, 1)
    found = Profile(np.array([0.25, 0.25]), np.array([2, 4]), initial=0.5)
    assert found.mean_age == 0.5 * 4 + 0.25 * 2
    assert found.std == pytest.approx(math.sqrt(0.5 * 1.5**2 + 0.25 * 0.5**2 + 0.25 * 2.5**2))
    assert found.effective_iterates == 1 / (0.25 + 2 * 0.0625)
    assert found.sigma_rel == found.std / 4


def test_the_newest_iterate_has_no_age() -> None:
    found = profile(Latest(), 10)
    assert (found.mean_age, found.std, found.half_life, found.effective_iterates) == (0, 0, 0, 1)


def test_what_negative_weights_leave_undefined_is_nan() -> None:
    found = Profile(np.array([-1.0, 2.0]), np.array([1, 2]))
    assert found.mean_age == -1
    assert math.isnan(found.std)
    assert math.isnan(found.half_life)
    nothing = Profile(np.zeros(1), np.array([1]))
    assert math.isnan(nothing.mean_age)
    assert math.isnan(nothing.effective_iterates)


def test_profiles_do_not_change_and_pickle() -> None:
    weights = np.array([0.5, 0.5])
    found = Profile(weights, np.array([1, 2]))
    weights[0] = 7
    assert found.weights[0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        found.weights[0] = 1
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again.weights, found.weights)


def test_profiles_print() -> None:
    found = profile(EMA(0.9), 1000)
    assert str(found).splitlines()[0] == "EMA(decay=0.9, debias=False, start='copy') after 1000 steps"
    assert "  mean age            9 steps" in str(found).splitlines()
    assert "  half-life           6.579 steps" in str(found).splitlines()
    expected = "steps=1000, mean_age=9, sigma_rel=0.009487, effective_iterates=19)"
    assert repr(found) == f"Profile(EMA(decay=0.9, debias=False, start='copy'), {expected}"


def test_plots_are_drawn() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    try:
        ax = profile(Every(SWA(), 10), 55).plot()
        assert ax.lines[0].get_xdata().tolist() == [10, 20, 30, 40, 50]
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "weight")
        assert profile(WeightFn(lambda count, steps: 0.01), 500).plot(ax, label="slow", color="k") is ax
        assert [text.get_text() for text in ax.get_legend().get_texts()] == [repr(Every(SWA(), 10)), "slow"]
        assert ax.lines[1].get_color() == "k"
        assert ax.get_xlim()[1] >= 500
    finally:
        pyplot.close("all")


def test_without_matplotlib_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = profile(SWA(), 3)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'functavg\[plot\]'"):
        found.plot()


def test_reading_weights_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, functavg; "
        "functavg.profile(functavg.Every(functavg.LAWA(3), 2), 500); functavg.profile(functavg.SWA(), 500); "
        "assert not {'torch', 'jax', 'matplotlib', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.timeout(30)
def test_a_past_that_comes_in_by_many_ways_is_followed_once() -> None:
    """Each of two arrays depends on both: 2^200 ways lead from the average to the first iterate."""

    class Mixed(AveragingRule):
        def init(self, params: Any, /, *, dtype: Any = None, device: Any = None) -> AverageState[Any]:
            state = super().init(params, dtype=dtype, device=device)
            return state._replace(memory=super().init(params).average)

        def plan(self, params: Any, state: AverageState[Any], steps: Any) -> AverageState[Any]:
            one = Lerp(Lerp(state.average, state.memory, 0.5), params, 0.125)
            other = Lerp(Lerp(state.memory, state.average, 0.25), params, 0.125)
            return AverageState(state.count + steps, one, other)

    np.testing.assert_allclose(profile(Mixed(), 200).weights, 0.125 * 0.875 ** np.arange(200)[::-1], rtol=1e-12)


def test_what_does_not_sum_to_one_shows_it() -> None:
    found = Profile([0.81, 0.18, 0.2], [1, 2, 3])
    assert found.total == pytest.approx(1.19)
    assert "total               1.19" in str(found)
    assert "total" not in str(profile(EMA(0.9), 3))
    ages = np.array([2.0, 1.0, 0.0])
    assert found.mean_age == pytest.approx(found.weights @ ages / 1.19)
    assert found.effective_iterates == pytest.approx(1.19**2 / (found.weights**2).sum())


def test_nodes_of_a_long_run_can_be_deleted() -> None:
    """A chain would overflow the stack if each node deleted the next by recursion."""
    node = Node(0, index=0)
    for order in range(200_000):
        node = Node(order, old=node)
    del node
