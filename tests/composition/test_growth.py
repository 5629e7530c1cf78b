"""extend: every rule and nest grows by leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import given, settings

import functavg
from functavg import EMA, LAWA, SWA, Every, Partition, Several, SkipNonFinite
from tests.composition import nests
from tests.composition.nests import SHAPES, Update
from tests.composition.test_nests import assert_averages, assert_same, run
from tests.tables import RULES


def smaller(params: Any) -> Any:
    return nests.restricted(params, ["a", "b"])


@settings(max_examples=60, deadline=None)
@given(nests.nests(list(RULES)), nests.streams(max_size=6), nests.streams(max_size=6))
def test_any_nest_grows_by_a_leaf(nest: Any, before: list[Update], after: list[Update]) -> None:
    """Old leaves keep their arrays and go on as if nothing had been; the new one starts from the params."""
    rule, first = nests.rule_of(nest), nests.iterate(0)
    before, after = nests.finite(before), nests.finite(after)
    small = run(rule, smaller(first), [(steps, smaller(params)) for steps, params in before])
    grown = rule.extend(nests.iterate(99), small)
    assert optree.tree_structure(grown) == optree.tree_structure(rule.init(first))
    old = {id(leaf) for leaf in optree.tree_leaves(small.average)}
    new = [leaf for leaf in optree.tree_leaves(grown.average) if id(leaf) not in old]
    assert len(old) + len(new) == len(optree.tree_leaves(grown.average))
    assert all(np.array_equal(leaf, nests.iterate(99)["c"]) for leaf in new)
    for steps, params in after:
        small = rule.update(smaller(params), small, steps=steps)
        grown = rule.update(params, grown, steps=steps)
    known = optree.tree_map(lambda _: None, small.average)
    for path in optree.tree_paths(known, none_is_leaf=True):
        left, right = grown.average, small.average
        for key in path:
            left, right = left[key], right[key]
        np.testing.assert_array_equal(left, right)


@settings(max_examples=30, deadline=None)
@given(nests.nests(list(RULES)), nests.streams(max_size=4))
def test_without_it_the_update_names_what_is_new(nest: Any, updates: list[Update]) -> None:
    """Unless every gate to it is closed."""
    rule = nests.rule_of(nest)
    state = run(rule, smaller(nests.iterate(0)), [(steps, smaller(params)) for steps, params in nests.finite(updates)])
    now = (20, nests.iterate(1))  # opens every gate
    with pytest.raises(ValueError, match=r"missing nothing; unexpected tree\['c'\].*rule\.extend\(params, state\)"):
        rule.update(now[1], state, steps=now[0])


@pytest.mark.parametrize(
    "rule",
    [
        EMA(0.9),
        LAWA(2),
        Every(SkipNonFinite(LAWA(2)), 2),
        Several({"x": EMA(0.9), "y": LAWA(2)}),
        Partition({"x": LAWA(2), "y": EMA(0.9)}, {"a": "x", "b": "y", "c": "x"}),
    ],
    ids=repr,
)
def test_a_leaf_that_would_vanish_is_refused(rule: functavg.AveragingRule) -> None:
    """The error names it and changes nothing."""
    state = rule.init(nests.iterate(0))
    with pytest.raises(ValueError, match=r"^state\.average.*\['c'\] would vanish: the params have no such leaf"):
        rule.extend(smaller(nests.iterate(0)), state)


def test_new_leaves_share_the_clock() -> None:
    """An EMA does not start from them anew."""
    rule = EMA(0.5)
    state = rule.update({"a": np.ones(1)}, rule.init({"a": np.zeros(1)}))
    state = rule.extend({"a": np.zeros(1), "b": np.full(1, 2.0)}, state)
    state = rule.update({"a": np.zeros(1), "b": np.full(1, 4.0)}, state)
    assert (state.average["a"].item(), state.average["b"].item()) == (0.5, 3.0)


def test_new_leaves_of_a_new_label_have_a_clock_of_their_own() -> None:
    """Their first update copies, and a label that had leaves goes on."""
    rule = Partition({"body": EMA(0.5), "adapter": SWA()}, {"a": "body", "b": "body", "c": "adapter"})
    state = rule.init({"a": np.zeros(1)})
    for value in (0.0, 1.0):
        state = rule.update({"a": np.full(1, value)}, state)
    state = rule.extend({name: np.zeros(1) for name in SHAPES}, state)
    state = rule.update({name: np.ones(1) for name in SHAPES}, state)
    assert {name: leaf.item() for name, leaf in state.average.items()} == {"a": 0.75, "b": 0.5, "c": 1.0}
    assert {label: inner.count for label, inner in state.memory.items()} == {"body": 3, "adapter": 1}
    assert state.count == 1


def test_a_new_rule_for_new_leaves_has_a_clock_of_its_own() -> None:
    """The label need not have been known before: extend with the rule that has it."""
    old = Partition({"body": EMA(0.5)}, {"a": "body"})
    new = Partition({"body": EMA(0.5), "adapter": SWA()}, {"a": "body", "c": "adapter"})
    state = old.init({"a": np.zeros(1)})
    for value in (0.0, 1.0):
        state = old.update({"a": np.full(1, value)}, state)
    state = new.extend({"a": np.zeros(1), "c": np.zeros(1)}, state)
    state = new.update({"a": np.ones(1), "c": np.ones(1)}, state)
    assert (state.average["a"].item(), state.average["c"].item(), state.count) == (0.75, 1.0, 1)


def test_the_window_of_a_new_leaf_is_full_of_what_it_starts_from() -> None:
    """It has no history; the mean moves away from its first value as the window fills."""
    rule = LAWA(4)
    state = rule.init({"a": np.zeros(1)})
    for _ in range(4):
        state = rule.update({"a": np.ones(1)}, state)
    state = rule.extend({"a": np.zeros(1), "b": np.full(1, 8.0)}, state)
    state = rule.update({"a": np.ones(1), "b": np.full(1, 12.0)}, state)
    assert (state.average["a"].item(), state.average["b"].item()) == (1.0, 9.0)


def test_growing_by_nothing_changes_nothing() -> None:
    """All arrays stay the same objects."""
    rule = Several({"x": EMA(0.9), "y": Every(LAWA(2), 2)})
    state = run(rule, nests.iterate(0), [(1, nests.iterate(seed)) for seed in range(1, 5)])
    grown = rule.extend(nests.iterate(7), state)
    assert_same(grown, state)
    assert_averages(grown.average, state.average)
