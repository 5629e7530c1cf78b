"""What stands in the place of another argument is taken for what it is, or told where it belongs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import functavg
from functavg import EMA, LAWA, SWA, AveragedModel, Every, Partition, Several, SkipNonFinite
from tests.nn.helpers import fill, scalar

PLACES = ("device", "avg_fn", "multi_avg_fn", "rule")
NESTS = {
    "EMA": EMA(0.75),
    "LAWA": LAWA(2),
    "Every": Every(EMA(0.75), 1),  # combinators have a rule of their own inside, which is not the one
    "SkipNonFinite": SkipNonFinite(EMA(0.75)),
    "Several": Several({"fast": EMA(0.75), "slow": SWA()}),
    "AvgFn": functavg.AvgFn(functavg.get_ema_avg_fn(0.75)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", NESTS.values(), ids=NESTS)
def test_a_rule_in_the_place_of_a_device_or_a_function_is_the_rule(rule, place):
    model = scalar(0.0)
    averaged = AveragedModel(model, **{place: rule})
    assert averaged.rule == rule
    assert (averaged.avg_fn, averaged.multi_avg_fn) == (None, None)
    averaged.update_parameters(model)
    fill(model, 1.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == (0.5 if rule == LAWA(2) else 0.25)
    assert averaged.n_averaged.device.type == "cpu"


def test_a_rule_by_position_is_the_rule():
    assert AveragedModel(scalar(), EMA(0.9)).rule == EMA(0.9)
    assert AveragedModel(scalar(), "cpu", EMA(0.9)).rule == EMA(0.9)
    assert AveragedModel(scalar(), None, None, EMA(0.9)).rule == EMA(0.9)


@pytest.mark.parametrize("place", ["avg_fn", "multi_avg_fn"])
def test_a_rule_assigned_to_a_function_is_the_rule(place):
    averaged = AveragedModel(scalar())
    setattr(averaged, place, Every(EMA(0.9), 10))
    assert averaged.rule == Every(EMA(0.9), 10)
    setattr(averaged, place, EMA)
    with pytest.raises(TypeError, match=r"got the class EMA; pass an instance: EMA\(\.\.\.\)"):
        averaged.update_parameters(scalar())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [EMA, SWA, Every, functavg.AvgFn])
def test_a_class_of_rules_is_told_that_an_instance_is_meant(kind, place):
    advice = rf"such as EMA\(0\.999\), got the class {kind.__name__}; pass an instance: {kind.__name__}\(\.\.\.\)"
    with pytest.raises(TypeError, match=advice):
        AveragedModel(scalar(), **{place: kind})


@pytest.mark.parametrize(
    "call",
    [
        lambda: Every(EMA, 10),
        lambda: SkipNonFinite(EMA),
        lambda: Several({"a": EMA}),
        lambda: Partition({"a": EMA}, "a"),
        lambda: functavg.profile(EMA, 10),
        lambda: functavg.checkpoints.save_state("never.pt", EMA(0.9).init({"w": torch.ones(1)}), EMA),
        lambda: functavg.checkpoints.profile_weights(EMA, [1, 2]),
        lambda: functavg.posthoc.solve([(EMA, 10)], (EMA(0.9), 10)),
    ],
)
def test_all_that_take_a_rule_say_so(call):
    with pytest.raises(TypeError, match=r"got the class EMA; pass an instance: EMA\(\.\.\.\)"):
        call()


def test_a_function_in_the_place_of_a_rule_is_told_how_to_become_one():
    with pytest.raises(TypeError, match=r"of RuleAvgFn; to average by a function, wrap it: AvgFn\(fn\) or WeightFn"):
        AveragedModel(scalar(), rule=functavg.get_ema_avg_fn(0.9))


@pytest.mark.parametrize("value", [EMA(0.9), EMA], ids=repr)
def test_a_rule_in_the_place_of_use_buffers_is_told_where_it_belongs(value):
    with pytest.raises(TypeError, match=re.escape(f"got {value!r}; pass it as rule=")):
        AveragedModel(scalar(), use_buffers=value)


def test_a_module_in_the_place_of_a_device_is_told_where_it_belongs():
    with pytest.raises(TypeError, match=r"got a Linear\. The model comes first; its ready copy is module="):
        AveragedModel(scalar(), scalar())
    with pytest.raises(TypeError, match=r"got a Linear\. The model comes first"):
        AveragedModel(EMA(0.9), nn.Linear(1, 1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"device": EMA(0.9), "rule": EMA(0.9)},
        {"device": EMA(0.9), "avg_fn": functavg.get_ema_avg_fn()},
        {"avg_fn": EMA(0.9), "rule": EMA(0.9)},
        {"avg_fn": EMA(0.9), "multi_avg_fn": EMA(0.9)},
    ],
    ids="+".join,
)
def test_two_rules_are_one_too_many(arguments):
    with pytest.raises(AssertionError, match="Only one of avg_fn, multi_avg_fn and rule"):
        AveragedModel(scalar(), **arguments)
    with pytest.raises(AssertionError, match="two ways to average were given"):
        AveragedModel(scalar(), EMA(0.9), multi_avg_fn=EMA(0.9))
