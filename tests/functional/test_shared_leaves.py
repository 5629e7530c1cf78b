"""A pair of the same two mutable arrays is done once and stays shared; where params no longer share, leaves part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import functavg
from tests.tables import KINDS, RULES, WEIGHT_RULES, read

MAKERS = {
    "torch": lambda value: torch.full((2,), value),
    "numpy": lambda value: np.full(2, value),
    "parameter": lambda value: torch.nn.Parameter(torch.full((2,), value)),
}


def tied(leaf: Any) -> dict[str, Any]:
    return {"embedding": leaf, "head": {"weight": leaf}}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("library", MAKERS)
def test_one_array_under_two_keys_is_updated_once_and_stays_shared(library: str, inplace: bool) -> None:
    """S2."""
    make = MAKERS[library]
    rule = functavg.EMA(0.9)
    state = rule.init(tied(make(0.0)))
    for value in (0.0, 1.0):
        state = rule.update(tied(make(value)), state, inplace=inplace)
        assert state.average["embedding"] is state.average["head"]["weight"]
    np.testing.assert_allclose(read(state.average["embedding"]), 0.1, rtol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_updates_a_shared_leaf_once(name: str, inplace: bool) -> None:
    rule = RULES[name].rule
    state, alone = rule.init(tied(torch.zeros(2))), rule.init(torch.zeros(2))
    for value in (1.0, 2.0, 4.0):
        state = rule.update(tied(torch.full((2,), value)), state, inplace=inplace)
        alone = rule.update(torch.full((2,), value), alone)
    assert state.average["embedding"] is state.average["head"]["weight"]
    assert torch.equal(state.average["embedding"], alone.average)


VIEWS = {"torch": torch.Tensor.detach, "numpy": np.ndarray.view, "parameter": torch.Tensor.detach}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("library", MAKERS)
def test_two_views_of_one_memory_are_one_array(library: str, inplace: bool) -> None:
    """As those that state_dict returns for a tied weight."""

    def viewed(value: float) -> dict[str, Any]:
        leaf = MAKERS[library](value)
        return {"embedding": leaf, "head": {"weight": VIEWS[library](leaf)}}

    state = functavg.EMA(0.5).init(viewed(0.0))
    assert state.average["embedding"] is state.average["head"]["weight"]
    for value in (0.0, 1.0):
        state = functavg.EMA(0.5).update(viewed(value), state, inplace=inplace)
    assert state.average["embedding"] is state.average["head"]["weight"]
    assert read(state.average["embedding"]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("library", MAKERS)
def test_a_step_in_place_into_two_views_of_one_memory_is_one(library: str) -> None:
    target = MAKERS[library](0.0)
    functavg.lerp([target, VIEWS[library](target)], [MAKERS[library](1.0)] * 2, 0.5, inplace=True)
    assert read(target).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"tree\[0\] and tree\[1\] share one array"):
        functavg.lerp([target, VIEWS[library](target)], [MAKERS[library](1.0), MAKERS[library](1.0)], 0.5, inplace=True)
    assert read(target).tolist() == [0.5, 0.5]


def test_parts_of_one_memory_are_arrays_of_their_own() -> None:
    flat, new = torch.zeros(6), torch.ones(6)
    functavg.lerp([flat[:3], flat[3:], flat[:0]], [new[:3], new[3:], new[:0]], 0.5, inplace=True)
    assert flat.tolist() == [0.5] * 6


@pytest.mark.parametrize("library", MAKERS)
def test_where_the_params_no_longer_share_a_pure_update_parts_the_leaves(library: str) -> None:
    make = MAKERS[library]
    rule = functavg.EMA(0.5)
    state = rule.update(tied(make(0.0)), rule.init(tied(make(0.0))))
    state = rule.update({"embedding": make(1.0), "head": {"weight": make(2.0)}}, state)
    assert read(state.average["embedding"]).tolist() == [0.5, 0.5]
    assert read(state.average["head"]["weight"]).tolist() == [1.0, 1.0]
    state = rule.update({"embedding": make(1.0), "head": {"weight": make(2.0)}}, state, inplace=True)
    assert read(state.average["embedding"]).tolist() == [0.75, 0.75]
    assert read(state.average["head"]["weight"]).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("name", ["EMA", "AvgFn", "Latest"])
@pytest.mark.parametrize("library", MAKERS)
def test_where_the_params_no_longer_share_an_update_in_place_names_both(library: str, name: str) -> None:
    make, rule = MAKERS[library], RULES[name].rule
    state = rule.update(tied(make(0.0)), rule.init(tied(make(0.0))))
    with pytest.raises(
        ValueError,
        match=r"tree\['embedding'\] and tree\['head'\]\['weight'\] share one array in the average, but not in the "
        r"params; a step in place would mix them. Tie them in the params, or part them in the average: an update with "
        r"inplace=False does",
    ):
        rule.update({"embedding": make(1.0), "head": {"weight": make(2.0)}}, state, inplace=True)
    assert read(state.average["embedding"]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("library", MAKERS)
def test_params_that_share_only_now_are_averaged_each(library: str, inplace: bool) -> None:
    make = MAKERS[library]
    rule = functavg.EMA(0.5)
    state = rule.init({"a": make(0.0), "b": make(1.0)})
    state = rule.update({"a": make(0.0), "b": make(1.0)}, state, inplace=inplace)
    shared = make(2.0)
    state = rule.update({"a": shared, "b": shared}, state, inplace=inplace)
    assert read(state.average["a"]).tolist() == [1.0, 1.0]
    assert read(state.average["b"]).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("inplace", [False, True])
def test_immutable_arrays_and_scalars_are_never_merged_by_identity(inplace: bool) -> None:
    rule = functavg.SWA()
    one = [1.0, np.float64(1.0), 1]
    if "jax-float32" in KINDS:
        one.append(KINDS["jax-float32"].make(np.asarray(1.0)))
    for shared in one:
        state = rule.init({"a": shared, "b": shared})
        state = rule.update({"a": shared, "b": shared}, state, inplace=inplace)
        other = shared + shared
        state = rule.update({"a": shared, "b": other}, state, inplace=inplace)
        assert float(state.average["a"]) == 1
        assert float(state.average["b"]) == (2 if isinstance(shared, int) else 1.5)


@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_shared_and_other_leaves_of_several_libraries_go_together(name: str) -> None:
    rule = RULES[name].rule
    for inplace in (False, True):
        tensor, array = torch.zeros(2), np.zeros(2)
        state = rule.init([tensor, array, tensor, array, 0.0])
        for value in (1.0, 2.0):
            tensor, array = torch.full((2,), value), np.full(2, value)
            state = rule.update([tensor, array, tensor, array, value], state, inplace=inplace)
        assert state.average[0] is state.average[2]
        assert state.average[1] is state.average[3]
        wanted = RULES[name].profile([1, 1]) @ [0.0, 1.0, 2.0]
        for leaf in state.average:
            np.testing.assert_allclose(read(leaf), wanted, rtol=1e-6)


def test_a_view_that_conjugates_or_negates_is_another_array() -> None:
    leaf = torch.tensor([1 + 2j])
    average = functavg.SWA().init({"a": leaf, "b": leaf.conj(), "c": leaf.imag, "d": leaf.conj().imag}).average
    assert [average[name].item() for name in "abcd"] == [1 + 2j, 1 - 2j, 2.0, -2.0]
    with pytest.raises(ValueError, match="share one array in the average"):
        functavg.lerp([average["a"]] * 2, [leaf, leaf.conj()], 0.5, inplace=True)
