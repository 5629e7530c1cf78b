"""Rules are values: frozen, printed as the call that makes them, compared, hashed, pickled, copied."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch

import functavg
from functavg import EMA, SWA, AvgFn, Freeze, Latest, PowerEMA, WeightFn
from tests.tables import RULES, WEIGHT_RULES, ema_step, quarter, ramp


@pytest.mark.parametrize("name", RULES)
def test_rules_pickle_compare_hash_and_copy(name: str) -> None:
    rule = RULES[name].rule
    for again in (pickle.loads(pickle.dumps(rule)), copy.copy(rule), copy.deepcopy(rule), dataclasses.replace(rule)):
        assert again == rule
        assert hash(again) == hash(rule)
        assert type(again) is type(rule)
    assert len({RULES[other].rule for other in RULES} | {rule}) == len({repr(RULES[other].rule) for other in RULES})


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (EMA(), "EMA(decay=0.999, debias=False, start='copy')"),
        (EMA(np.float32(0.5)), "EMA(decay=0.5, debias=False, start='copy')"),
        (EMA(torch.tensor(0.5), debias=True), "EMA(decay=0.5, debias=True, start='copy')"),
        (EMA.from_half_life(2, debias=True), "EMA(decay=0.7071067811865476, debias=True, start='copy')"),
        (EMA(1), "EMA(decay=1.0, debias=False, start='copy')"),
        (EMA(0.5, start="init"), "EMA(decay=0.5, debias=False, start='init')"),
        (SWA(), "SWA()"),
        (PowerEMA(2), "PowerEMA(gamma=2.0)"),
        (Latest(), "Latest()"),
        (Freeze(), "Freeze()"),
    ],
    ids=str,
)
def test_a_rule_prints_as_the_call_that_makes_it(rule: functavg.AveragingRule, text: str) -> None:
    assert repr(rule) == text
    assert eval(text) == rule


def test_rules_with_functions_print_them() -> None:
    assert repr(EMA(ramp)) == f"EMA(decay={ramp!r}, debias=False, start='init')"
    assert repr(WeightFn(quarter)) == f"WeightFn(fn={quarter!r})"
    assert repr(AvgFn(ema_step)) == f"AvgFn(fn={ema_step!r}, grouped=False)"


@pytest.mark.parametrize("name", RULES)
def test_rules_are_frozen(name: str) -> None:
    rule = RULES[name].rule
    for field in dataclasses.fields(rule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, field.name, 0.5)


def test_a_start_that_is_the_default_is_the_same_rule() -> None:
    assert EMA(0.9) == EMA(0.9, start="copy") != EMA(0.9, start="init")
    assert EMA.from_half_life(1, start="init") == EMA(0.5, start="init")
    assert EMA(ramp) == EMA(ramp, start="init") != EMA(ramp, start="copy")


def test_rules_of_other_arguments_differ() -> None:
    emas = [EMA(0.9), EMA(0.99), EMA(0.9, debias=True), EMA(0.9, start="init"), EMA(ramp), EMA(ramp, start="copy")]
    rules = [*emas, PowerEMA(1), PowerEMA(2), SWA(), Latest(), Freeze()]
    assert len(set(rules)) == len(rules)


@pytest.mark.parametrize("name", RULES)
def test_states_pickle_and_average_on(name: str) -> None:
    rule = RULES[name].rule
    state = rule.update({"w": torch.ones(2)}, rule.init({"w": torch.zeros(2)}))
    file = io.BytesIO()
    torch.save(state._asdict(), file)
    file.seek(0)
    loaded = functavg.AverageState(**torch.load(file, weights_only=True))
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), loaded):
        assert type(again) is functavg.AverageState
        new = {"w": torch.full((2,), 3.0)}
        left, right = rule.update(new, again), rule.update(new, state)
        assert left.count == right.count
        assert torch.equal(left.average["w"], right.average["w"])


@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_a_state_is_a_named_tuple_of_three(name: str) -> None:
    state = RULES[name].rule.init({"w": np.ones(2)})
    count, average, memory = state
    assert (count, memory) == (0, ())
    assert average is state.average
    assert functavg.AverageState(0, average) == (0, average, ())
    assert functavg.AverageState[dict](0, average) == state


def test_a_custom_rule_is_one_formula() -> None:
    @dataclasses.dataclass(frozen=True)
    class Half(functavg.WeightRule):
        def weight(self, count: float, steps: float) -> float:
            return 0.5**steps

    state = Half().update(np.ones(2), Half().init(np.zeros(2)), steps=2)
    assert state.average.tolist() == [0.25, 0.25]
    assert state.count == 2


@pytest.mark.parametrize("base", [functavg.AveragingRule, functavg.WeightRule])
def test_the_bases_are_abstract(base: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()


@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_a_weight_on_the_host_is_a_number_between_0_and_1(name: str) -> None:
    rule = WEIGHT_RULES[name].rule
    for count in (0, 1, 10, 10**7):
        for steps in (1, 10, 10**4):
            weight = rule.weight(count, steps)
            assert isinstance(weight, (int, float))
            assert 0 <= weight <= 1
