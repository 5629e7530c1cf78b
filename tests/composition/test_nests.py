"""Any nest of rules: pure, in place, traced and from a file it gives the average that the definitions give."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functavg
from functavg import AverageState
from tests.composition import nests
from tests.composition.nests import Update
from tests.tables import RULES

DRAWN = list(RULES)
TRACED = [name for name, row in RULES.items() if not isinstance(row.rule, functavg.AvgFn)]

BIG = (
    "several",
    {
        "p": ("every", 3, 2, ("skip", ("partition", {"x": "EMA", "y": "LAWA"}, {"a": "x", "b": "y", "c": "y"}))),
        "q": ("skip", ("every", 2, 0, ("every", 2, 1, "SWA"))),
        "r": ("partition", {"x": ("skip", "LAWA"), "y": "PowerEMA"}, {"a": "y", "b": "x", "c": "x"}),
    },
)
"""A nest of everything."""


def to_torch(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: torch.tensor(np.asarray(leaf)), tree)


def assert_averages(got: Any, wanted: Any, rtol: float = 1e-12) -> None:
    """Assert equal structure and values, NaN and infinities included."""
    assert optree.tree_structure(got) == optree.tree_structure(wanted)
    for left, right in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        assert left.shape == right.shape
        whole = np.isfinite(right)
        np.testing.assert_allclose(left[whole], right[whole], rtol=rtol)
        assert not np.isfinite(left[~whole]).any()  # whether inf - inf or inf is a matter of order


def assert_same(left: Any, right: Any) -> None:
    """Assert that two trees are equal bit for bit."""
    left_leaves, left_spec = optree.tree_flatten(left)
    right_leaves, right_spec = optree.tree_flatten(right)
    assert left_spec == right_spec
    for one, other in zip(left_leaves, right_leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def run(
    rule: functavg.AveragingRule,
    first: Any,
    updates: Sequence[Update],
    made: Callable[[Any], Any] = copy.deepcopy,
    inplace: bool = False,
) -> AverageState[Any]:
    state = rule.init(made(first))
    for steps, params in updates:
        state = rule.update(made(params), state, steps=steps, inplace=inplace)
    return state


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@settings(max_examples=150, deadline=None)
@given(nests.nests(DRAWN), nests.streams(), st.sampled_from([copy.deepcopy, to_torch]))
def test_any_nest_gives_the_average_of_its_definition(nest: Any, updates: list[Update], made: Any) -> None:
    """Pure and in place, on numpy and torch, with uneven gaps and what is not finite."""
    first = nests.iterate(0)
    rule = nests.rule_of(nest)
    for inplace in (False, True):
        state = run(rule, first, updates, made, inplace)
        assert_averages(state.average, nests.average(nest, first, updates))
        assert state.count == nests.count(nest, list(first), updates)
        assert type(state.count) is int


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@settings(max_examples=60, deadline=None)
@given(nests.nests(DRAWN), nests.streams())
def test_a_pure_update_leaves_the_state_before_as_it_was(nest: Any, updates: list[Update]) -> None:
    """The old state, its memory included, still has its bits after the update."""
    rule = nests.rule_of(nest)
    state = rule.init(nests.iterate(0))
    for steps, params in updates:
        before = copy.deepcopy(state)
        new = rule.update(params, state, steps=steps)
        assert_same(state, before)
        state = new


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@settings(max_examples=60, deadline=None)
@given(nests.nests(DRAWN), nests.streams())
def test_the_memory_has_one_structure_from_init_on(nest: Any, updates: list[Update]) -> None:
    """A scan or a compiled update can carry the state, and a checkpoint of it can be told beforehand."""
    rule = nests.rule_of(nest)
    state = rule.init(nests.iterate(0))
    assert optree.tree_structure(run(rule, nests.iterate(0), updates)) == optree.tree_structure(state)


@settings(max_examples=40, deadline=None)
@given(nests.nests(DRAWN), nests.streams(min_size=2), st.data())
def test_a_pickled_state_goes_on_bit_for_bit(nest: Any, updates: list[Update], data: st.DataObject) -> None:
    """T3: half-way through a file, the rule as well as the state."""
    updates = nests.finite(updates)
    half = data.draw(st.integers(0, len(updates)))
    rule, first = nests.rule_of(nest), nests.iterate(0)
    whole = run(rule, first, updates)
    loaded, state = pickle.loads(pickle.dumps((rule, run(rule, first, updates[:half]))))
    assert loaded == rule
    for steps, params in updates[half:]:
        state = loaded.update(params, state, steps=steps, inplace=True)
    assert_same(state, whole)


@settings(max_examples=60, deadline=None)
@given(nests.nests(DRAWN), nests.streams())
def test_a_rule_prints_as_the_call_that_makes_it(nest: Any, updates: list[Update]) -> None:
    """What ``repr`` shows makes an equal rule (functions have no such text), with an equal hash."""
    del updates
    rule = nests.rule_of(nest)
    again = pickle.loads(pickle.dumps(rule))
    assert again == rule
    assert hash(again) == hash(copy.deepcopy(rule)) == hash(rule)
    if "<function" not in repr(rule):
        assert eval(repr(rule), vars(functavg)) == rule


@settings(max_examples=40, deadline=None)
@given(nests.nests(DRAWN), nests.streams(), st.booleans())
def test_a_failing_update_changes_nothing(nest: Any, updates: list[Update], inplace: bool) -> None:
    """A leaf of another shape is refused by its path before the first write, in whatever nest."""
    updates = nests.finite(updates)
    rule, first = nests.rule_of(nest), nests.iterate(0)
    state = run(rule, first, updates)
    before = copy.deepcopy(state)
    wrong = nests.iterate(9) | {"c": np.zeros((3, 3))}
    reached = nests.count(nest, ["c"], updates) < nests.count(nest, ["c"], [*updates, (2, wrong)])
    if reached:
        with pytest.raises(ValueError, match=r"^tree\['c'\]: expected shape \(2, 3\), got \(3, 3\)"):
            rule.update(wrong, state, steps=2, inplace=inplace)
        assert_same(state, before)


# ---- counts on the device, and transforms


@settings(max_examples=60, deadline=None)
@given(nests.nests(TRACED), nests.streams(), st.booleans())
def test_a_count_on_the_device_changes_no_average(nest: Any, updates: list[Update], inplace: bool) -> None:
    """Gates become weights of 0, which leak no NaN; every count that the state holds becomes a tensor."""
    rule, first = nests.rule_of(nest), nests.iterate(0)
    state = rule.init(to_torch(first))
    state = state._replace(count=torch.tensor(state.count))
    for steps, params in updates:
        state = rule.update(to_torch(params), state, steps=steps, inplace=inplace)
    assert_averages(state.average, nests.average(nest, first, updates))
    assert int(state.count) == nests.count(nest, list(first), updates)
    assert isinstance(state.count, torch.Tensor)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(nests.nests(TRACED), nests.streams(min_size=3))
def test_any_nest_is_carried_through_a_scan(nest: Any, updates: list[Update]) -> None:
    """The state that ``init`` made is the carry as it is."""
    jax = pytest.importorskip("jax")
    rule, first = nests.rule_of(nest), nests.iterate(0)

    def step(state: AverageState[Any], update: Any) -> tuple[AverageState[Any], None]:
        steps, params = update
        return rule.update(params, state, steps=steps), None

    stream = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *((np.asarray(gap), x) for gap, x in updates))
    state, _ = jax.lax.scan(step, rule.init(jax.tree.map(jax.numpy.asarray, first)), stream)
    assert_averages(state.average, nests.average(nest, first, updates), rtol=1e-5)
    assert int(state.count) == nests.count(nest, list(first), updates)


UPDATES = [(index % 3 + 1, nests.iterate(index)) for index in range(1, 9)]
UPDATES[4][1]["a"][0] = np.nan
COMPILED = (
    "several",
    {"p": ("every", 3, 2, ("skip", "LAWA")), "q": ("partition", {"x": "EMA", "y": "SWA"}, {"a": "x", "c": "y"})},
)


def small(params: Any) -> Any:
    """Return two leaves only, as tensors; tracing takes seconds."""
    return to_torch(nests.restricted(params, ["a", "c"]))


@pytest.mark.slow
def test_a_nest_compiles_to_one_graph_with_its_counts_on_the_device() -> None:
    """No graph break and no recompilation, whatever the gates do."""
    rule, first = nests.rule_of(COMPILED), nests.restricted(nests.iterate(0), ["a", "c"])
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def step(params: Any, state: AverageState[Any], steps: Any) -> AverageState[Any]:
        return rule.update(params, state, steps=steps, inplace=True)

    state = optree.tree_map(torch.as_tensor, rule.init(small(first)))
    for steps, params in UPDATES:
        state = step(small(params), state, torch.tensor(steps))
    updates = [(steps, nests.restricted(params, ["a", "c"])) for steps, params in UPDATES]
    assert_averages(state.average, nests.average(COMPILED, first, updates))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "nest",
    [
        ("several", {"p": "SWA", "q": ("partition", {"x": "EMA", "y": "PowerEMA"}, {"a": "x", "c": "y"})}),
        ("every", 3, 1, "EMA-debias"),
    ],
    ids=["products", "every"],
)
def test_what_reads_no_flag_compiles_with_a_host_count_too(nest: Any) -> None:
    """Several and Partition of weight rules keep their counts on the host; the gate of an Every is a branch there."""
    rule, first = nests.rule_of(nest), nests.restricted(nests.iterate(0), ["a", "c"])
    step = torch.compile(rule.update, fullgraph=True, dynamic=True, backend="eager")
    state = rule.init(small(first))
    updates = [(1, nests.restricted(nests.iterate(index), ["a", "c"])) for index in range(1, 8)]
    for index, (_, params) in enumerate(updates):
        state = (rule.update if index < 2 else step)(small(params), state)
    assert_averages(state.average, nests.average(nest, first, updates))
    assert state.count == nests.count(nest, ["a", "c"], updates)
    assert type(state.count) is int


def test_a_nest_of_everything_maps_over_models() -> None:
    """torch.func.vmap over three models at once, each with counts of its own."""
    rule, first = nests.rule_of(BIG), nests.iterate(0)
    streams = [UPDATES, UPDATES[::-1], UPDATES[4:] + UPDATES[:4]]
    states = [rule.init(to_torch(first)) for _ in streams]
    stacked = torch.utils._pytree.tree_map(lambda *leaves: torch.stack([*map(torch.as_tensor, leaves)]), *states)
    for updates in zip(*streams, strict=True):
        params = optree.tree_map(lambda *leaves: torch.stack(leaves), *(to_torch(params) for _, params in updates))
        steps = torch.tensor([steps for steps, _ in updates])
        stacked = torch.func.vmap(lambda x, state, gap: rule.update(x, state, steps=gap))(params, stacked, steps)
    for index, updates in enumerate(streams):
        got = optree.tree_map(lambda leaf, index=index: leaf[index], stacked.average)
        assert_averages(got, nests.average(BIG, first, updates))
