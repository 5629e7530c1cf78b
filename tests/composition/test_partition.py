"""Partition: rules for different leaves, chosen by label."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import functavg
from functavg import EMA, LAWA, SWA, Every, Freeze, Latest, Partition, Several, SkipNonFinite

RULES = {"slow": EMA(0.75), "newest": Latest()}


def by_kind(name: str, leaf: Any) -> str:
    return "newest" if name.endswith("bias") else "slow"


class Layer(NamedTuple):
    weight: Any
    bias: Any


def params(value: float) -> Any:
    return {
        "encoder": [Layer(np.full(2, value), np.full(1, value)), Layer(np.full(2, value), None)],
        "head": {"bias": np.full((), value)},
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "label",
    [
        by_kind,
        {"encoder": [Layer("slow", "newest"), "slow"], "head": "newest"},
        {"encoder": [{"weight": "slow", "bias": "newest"}, "slow"], "head": {"bias": "newest"}, "more": "slow"},
    ],
    ids=["function", "prefix", "tree"],
)
def test_each_leaf_follows_the_rule_of_its_label(label: Any, inplace: bool) -> None:
    """Labels come from a function of the dotted name, or from a tree whose labels may stand for subtrees."""
    rule = Partition(RULES, label)
    state = rule.init(params(0.0))
    for value in (0.0, 1.0):
        state = rule.update(params(value), state, inplace=inplace)
    first, second = state.average["encoder"]
    assert type(first) is type(second) is Layer
    assert (first.weight.tolist(), first.bias.tolist()) == ([0.25, 0.25], [1.0])
    assert (second.weight.tolist(), second.bias) == ([0.25, 0.25], None)
    assert state.average["head"]["bias"].tolist() == 1.0
    assert state.count == 2


def test_names_are_those_of_named_parameters() -> None:
    """The function gets each name and leaf of a module's dict, and of a nested tree the keys joined by dots."""
    seen = []
    rule = Partition({0: SWA()}, lambda name, leaf: seen.append((name, tuple(leaf.shape))) or 0)
    rule.init(dict(torch.nn.Linear(2, 3).named_parameters()))
    assert seen == [("bias", (3,)), ("weight", (3, 2))]
    seen.clear()
    state = rule.init(params(0.0))
    assert seen == [("encoder.0.weight", (2,)), ("encoder.0.bias", (1,)), ("encoder.1.weight", (2,)), ("head.bias", ())]
    rule.update(params(1.0), state)
    assert seen[4:] == seen[:4]


def test_inside_another_partition_names_are_still_whole() -> None:
    """Each rule sees its leaves under the paths of the params."""
    seen = []
    inner = Partition(RULES, lambda name, leaf: seen.append(name) or by_kind(name, leaf))
    rule = Partition({"in": inner, "out": Freeze()}, lambda name, leaf: "in" if "encoder" in name else "out")
    state = rule.init(params(0.0))
    for value in (0.0, 1.0):
        state = rule.update(params(value), state)
    assert set(seen) == {"encoder.0.weight", "encoder.0.bias", "encoder.1.weight"}
    assert state.average["encoder"][0].weight.tolist() == [0.25, 0.25]
    assert state.average["head"]["bias"].tolist() == 0.0


def test_a_tree_of_one_leaf_has_one_label() -> None:
    """The label tree is that label, and the name is empty."""
    for label in ("slow", lambda name, leaf: {"": "slow"}[name]):
        rule = Partition(RULES, label)
        state = rule.init(np.zeros(1))
        for value in (0.0, 1.0):
            state = rule.update(np.full(1, value), state)
        assert state.average.tolist() == [0.25]


def test_params_may_come_in_another_order() -> None:
    """Leaves are paired by path, and keep the average's structure."""
    rule = Partition(RULES, by_kind)
    state = rule.init({"bias": np.zeros(1), "w": np.zeros(1)})
    state = rule.update({"w": np.full(1, 2.0), "bias": np.ones(1)}, state)
    assert {name: leaf.item() for name, leaf in state.average.items()} == {"bias": 1.0, "w": 2.0}


def test_params_without_leaves_have_a_count() -> None:
    """Nothing has a label; the state is updated all the same."""
    rule = Partition(RULES, by_kind)
    assert rule.update({}, rule.init({})).average == {}


def test_the_clock_of_a_label_without_leaves_stands_still() -> None:
    """And the count is the least of the others."""
    rule = Partition({"a": SWA(), "b": Every(SWA(), 2), "none": SWA()}, lambda name, leaf: name)
    state = rule.init({"a": np.zeros(1), "b": np.zeros(1)})
    for _ in range(3):
        state = rule.update({"a": np.ones(1), "b": np.ones(1)}, state)
    assert {label: inner.count for label, inner in state.memory.items()} == {"a": 3, "b": 2, "none": 0}
    assert state.count == 2


def test_a_leaf_that_is_skipped_holds_up_its_own_label_only() -> None:
    """Each rule sees its own leaves."""
    rule = Partition({"a": SkipNonFinite(SWA()), "b": SkipNonFinite(SWA())}, lambda name, leaf: name)
    state = rule.init({"a": np.zeros(1), "b": np.zeros(1)})
    state = rule.update({"a": np.full(1, np.nan), "b": np.ones(1)}, state)
    assert (state.average["a"].item(), state.average["b"].item()) == (0.0, 1.0)
    assert [state.memory[label].memory[0] for label in "ab"] == [1, 0]


def test_a_window_keeps_the_leaves_of_its_label_only() -> None:
    """Memory is not spent on what other rules average."""
    rule = Partition({"window": LAWA(2), "newest": Latest()}, {"a": "window", "b": "newest"})
    _, ring = rule.init({"a": np.zeros(1), "b": np.zeros(1)}).memory["window"].memory
    assert [list(tree) for tree in ring] == [["a"], ["a"]]


# ---- shared leaves


@pytest.mark.parametrize("inplace", [False, True])
def test_tied_leaves_of_one_label_stay_tied(inplace: bool) -> None:
    """S1: updated once."""
    rule = Partition({"a": EMA(0.9), "b": SWA()}, {"x": "a", "y": "a", "z": "b"})
    leaf = torch.zeros(1)
    state = rule.init({"x": leaf, "y": leaf, "z": torch.zeros(1)})
    for value in (0.0, 1.0):
        leaf = torch.full((1,), value)
        state = rule.update({"x": leaf, "y": leaf, "z": leaf}, state, inplace=inplace)
    assert state.average["x"] is state.average["y"] is not state.average["z"]
    assert state.average["x"].item() == pytest.approx(0.1)


def test_tied_leaves_of_two_labels_are_refused() -> None:
    """They would be averaged twice, or come apart; the error names both."""
    rule = Partition(RULES, {"embedding": "slow", "head": "newest"})
    leaf = torch.zeros(1)
    message = (
        r"^tree\['embedding'\] and tree\['head'\] share one array, but have the labels 'slow' and 'newest'; "
        "give them one label"
    )
    with pytest.raises(ValueError, match=message):
        rule.init({"embedding": leaf, "head": leaf})
    apart = rule.init({"embedding": torch.zeros(1), "head": torch.zeros(1)})
    tied = apart._replace(average={"embedding": leaf, "head": leaf})
    with pytest.raises(ValueError, match=message):
        rule.update({"embedding": leaf, "head": leaf}, tied, inplace=True)
    assert leaf.item() == 0.0
    for value in (0.0, 1.0):  # params that share may go into averages that do not
        leaf = torch.full((1,), value)
        apart = rule.update({"embedding": leaf, "head": leaf}, apart, inplace=True)
    assert (apart.average["embedding"].item(), apart.average["head"].item()) == (0.25, 1.0)


def test_equal_scalars_are_not_shared_memory() -> None:
    """Python interns small numbers."""
    rule = Partition(RULES, {"a": "slow", "b": "newest"})
    assert rule.update({"a": 1.0, "b": 1.0}, rule.init({"a": 0.5, "b": 0.5})).count == 1


# ---- structure


def test_errors_name_paths_of_the_params() -> None:
    """Of a reshaped, a missing, an unexpected leaf, and of one that cannot be averaged."""
    rule = Partition(RULES, by_kind)
    state = rule.init(params(0.0))
    before = copy.deepcopy(state)
    wrong = params(1.0)
    wrong["encoder"][1] = Layer(np.zeros(3), None)
    with pytest.raises(ValueError, match=r"^tree\['encoder'\]\[1\]\['weight'\]: expected shape \(2,\), got \(3,\)"):
        rule.update(wrong, state, inplace=True)
    with pytest.raises(ValueError, match=r"missing tree\['head'\]\['bias'\]; unexpected tree\['tail'\]"):
        rule.update({"encoder": wrong["encoder"], "tail": np.zeros(1)}, state, inplace=True)
    with pytest.raises(TypeError, match=r"^tree\['encoder'\]\['weight'\]: cannot average str"):
        rule.init({"encoder": Layer("x", np.zeros(1))})
    np.testing.assert_array_equal(state.average["encoder"][0].weight, before.average["encoder"][0].weight)
    assert state.count == 0


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (lambda name, leaf: "fast", r"tree\['a'\]: expected a label of \['slow', 'newest'\], got 'fast'\. Add a rule"),
        (lambda name, leaf: None, r"tree\['a'\]: expected a label of \['slow', 'newest'\], got None"),
        ({"a": "slow", "b": {"c": "fast"}}, r"tree\['b'\]\['c'\]: expected a label of .*, got 'fast'"),
        ({"a": "slow"}, r"tree\['b'\]\['c'\]: expected a label of .*, got None"),
        ({"a": {"x": "slow"}, "b": "slow"}, r"tree\['a'\]: expected a label of .*, got None"),
    ],
)
def test_an_unknown_label_is_refused(label: Any, message: str) -> None:
    """By the path of the leaf, at ``init`` and at ``update``."""
    tree = {"a": np.zeros(1), "b": {"c": np.zeros(1)}}
    with pytest.raises(ValueError, match="^" + message):
        Partition(RULES, label).init(tree)
    with pytest.raises(ValueError, match="^" + message):
        Partition(RULES, label).update(tree, Partition(RULES, "slow").init(tree))


def test_labels_may_be_anything_that_hashes() -> None:
    """Such as what a test of a name returns."""
    rule = Partition({True: Latest(), False: Freeze()}, lambda name, leaf: leaf.ndim > 1)
    state = rule.update({"w": np.ones((2, 2)), "b": np.ones(2)}, rule.init({"w": np.zeros((2, 2)), "b": np.zeros(2)}))
    assert (state.average["w"].sum(), state.average["b"].sum()) == (4.0, 0.0)


# ---- the value


@pytest.mark.parametrize(
    "inner",
    [
        Several({"a": EMA()}),
        Every(Several({"a": EMA()}), 2),
        SkipNonFinite(Every(Several({"a": EMA()}), 2)),
        Partition({"x": SWA()}, "x"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("outer", [lambda rule: rule, lambda rule: Every(rule, 3), SkipNonFinite])
def test_several_averages_of_one_leaf_are_refused(inner: Any, outer: Any) -> None:
    """At any depth, when the rule is made; a Partition may stand in another one."""
    if isinstance(inner, Partition):
        assert Partition({"p": outer(inner)}, "p").init(np.zeros(1)).count == 0
        return
    with pytest.raises(
        TypeError, match=r"^rules\['p'\] must have one average for each leaf, got .*Put it the other way"
    ):
        Partition({"q": SWA(), "p": outer(inner)}, "p")
    with pytest.raises(TypeError, match=r"^rules\['p'\] must have one average for each leaf"):
        Several({"s": Partition({"p": outer(inner)}, "p")})


def test_it_is_a_value_although_it_is_given_dicts() -> None:
    """It prints as its call, compares, hashes; what the caller does to rules and labels later is nothing to it."""
    labels: dict[str, Any] = {"a": "slow", "b": ["newest"]}
    rule = Partition(RULES, labels)
    text = repr(rule)
    assert text.startswith(
        "Partition(rules={'slow': EMA(decay=0.75, debias=False, start='copy'), 'newest': Latest()}, label={'a': 'slow'"
    )
    labels["a"] = "newest"
    labels["b"].append("slow")
    assert repr(rule) == text
    assert rule == eval(text) == copy.deepcopy(rule)
    assert hash(rule) == hash(eval(text))
    assert rule != Partition(RULES, labels)
    assert Partition(RULES, by_kind) == Partition(RULES, by_kind) != rule


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Partition({}, "a"), ValueError, r"rules must have at least one rule, got \{\}"),
        (lambda: Partition(EMA(), "a"), TypeError, r"rules must be a dict of rules, got EMA\(.*\) of EMA"),
        (lambda: Partition({"a": None}, "a"), TypeError, r"rules\['a'\] must be an AveragingRule .*, got None"),
    ],
)
def test_a_bad_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    """T6: by name and value."""
    with pytest.raises(error, match="^" + message):
        make()


def test_the_state_of_other_rules_is_refused() -> None:
    """The error says which labels it has, and which it should have."""
    with pytest.raises(
        ValueError, match=r"^the state was not made by Partition: expected a memory of \['slow', 'newest'\], got tuple"
    ):
        Partition(RULES, "slow").update(np.ones(1), functavg.EMA().init(np.ones(1)))
