"""Every rule is the weighted sum that its formula says, on every kind of leaf and every tree, pure and in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optree
import pytest

import functavg
from tests.tables import (
    KINDS,
    LIBRARIES,
    RULES,
    SCALARS,
    TREES,
    Kind,
    Leaf,
    assert_close,
    dtype_name,
    expected,
    made,
    read,
    stream,
)

STEPS = [1, 3, 1, 2, 1]


def averaged(rule: functavg.AveragingRule, trees: Sequence[Any], inplace: bool) -> functavg.AverageState[Any]:
    state = rule.init(trees[0])
    for tree, steps in zip(trees[1:], STEPS, strict=True):
        state = rule.update(tree, state, steps=steps, inplace=inplace)
    return state


def check(name: str, kind: Kind, tree: Any) -> None:
    row = RULES[name]
    iterates = stream(tree, kind.kind, len(STEPS) + 1)
    wanted = expected(row.profile(STEPS), iterates)
    for inplace in (False, True):
        state = averaged(row.rule, [made(kind, iterate) for iterate in iterates], inplace)
        assert_close(state.average, wanted, kind.tolerance)
        assert {dtype_name(leaf) for leaf in optree.tree_leaves(state.average)} <= {kind.held}
        assert state.count == row.count(STEPS)
        assert type(state.count) is int
        assert state.memory == () or not row.is_weight_rule


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_on_every_kind_of_leaf(name: str, kind: str) -> None:
    check(name, KINDS[kind], lambda leaf: {"w": leaf(2, 3), "b": leaf()})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_on_every_tree(name: str, library: str) -> None:
    for tree in TREES.values():
        check(name, LIBRARIES[library], tree)


@pytest.mark.parametrize("name", RULES)
def test_python_and_numpy_scalars_are_0d_arrays(name: str) -> None:
    for kind in SCALARS.values():
        check(name, kind, lambda leaf: {"a": leaf(), "b": [leaf()]})


def test_a_tree_may_mix_libraries_and_dtypes() -> None:
    """Each leaf of a mixed tree is averaged as it would be alone."""
    kinds = {name.replace("-", "_"): kind for name, kind in (KINDS | SCALARS).items()}

    def iterates(kind: Kind) -> list[np.ndarray]:
        return stream(lambda leaf: leaf() if kind in SCALARS.values() else leaf(2, 2), kind.kind, len(STEPS) + 1)

    trees = [{name: kind.make(iterates(kind)[index]) for name, kind in kinds.items()} for index in range(6)]
    for inplace in (False, True):
        average = averaged(functavg.SWA(), trees, inplace).average
        for name, kind in kinds.items():
            assert_close(average[name], expected(RULES["SWA"].profile(STEPS), iterates(kind)), kind.tolerance)
            assert dtype_name(average[name]) == kind.held


@pytest.mark.parametrize("name", RULES)
def test_pure_and_in_place_updates_give_the_same_bits(name: str) -> None:
    iterates = stream(TREES["list"], "f", len(STEPS) + 1)
    for kind in LIBRARIES.values():
        trees = [made(kind, iterate) for iterate in iterates]
        pure, inplace = (averaged(RULES[name].rule, trees, flag).average for flag in (False, True))
        assert_close(pure, optree.tree_map(read, inplace), 0.0)


@pytest.mark.parametrize("name", RULES)
def test_a_constant_is_a_fixed_point_to_the_last_bit(name: str) -> None:
    def tree(leaf: Leaf) -> Any:
        return {"w": leaf(5), "b": leaf()}

    for kind in LIBRARIES.values():
        constant = made(kind, optree.tree_map(lambda array: array / 3.0, stream(tree, "f", 1)[0]))
        average = averaged(RULES[name].rule, [constant] * (len(STEPS) + 1), inplace=True).average
        if isinstance(RULES[name].rule, functavg.AvgFn):  # the function is the user's
            assert_close(average, optree.tree_map(read, constant), kind.tolerance)
        else:
            assert_close(average, optree.tree_map(read, constant), 0.0)
