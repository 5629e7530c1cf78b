"""The average never shares memory with the params, nor does a pure update write to anything it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import pytest
import torch

import functavg
from tests.tables import KINDS, RULES, SCALARS, TREES, made, read, stream

MUTABLE = [name for name, kind in KINDS.items() if kind.mutable and name != "torch-parameter"]


def overwrite(leaf: Any) -> None:
    """Overwrite an array in place with values that appear nowhere else."""
    if isinstance(leaf, torch.Tensor):
        leaf.detach().copy_(torch.full_like(leaf.detach(), 77, dtype=torch.float32))
    else:
        leaf[...] = 77


@pytest.mark.parametrize("kind", MUTABLE)
@pytest.mark.parametrize("name", RULES)
def test_overwriting_the_params_leaves_the_average(name: str, kind: str) -> None:
    rule, make = RULES[name].rule, KINDS[kind].make
    for inplace in (False, True):
        params = [make(np.ones(3)) for _ in range(3)]
        states = [rule.init(params[0])]
        for new in params[1:]:
            states.append(rule.update(new, states[-1], inplace=inplace))
        before = read(states[-1].average).copy()
        for leaf in params:
            overwrite(leaf)
        np.testing.assert_array_equal(read(states[-1].average), before)


@pytest.mark.parametrize("kind", MUTABLE)
@pytest.mark.parametrize("name", RULES)
def test_a_pure_update_writes_to_nothing_it_was_given(name: str, kind: str) -> None:
    rule = RULES[name].rule
    iterates = [made(KINDS[kind], iterate) for iterate in stream(TREES["list"], KINDS[kind].kind, 4)]
    states = [rule.init(iterates[0])]
    seen = [optree.tree_map(lambda leaf: read(leaf).copy(), [states[0].average, *iterates])]
    for iterate in iterates[1:]:
        states.append(rule.update(iterate, states[-1]))
        seen.append(optree.tree_map(lambda leaf: read(leaf).copy(), states[-1].average))
    given = optree.tree_leaves([states[0].average, *iterates])
    for leaf, value in zip(given, optree.tree_leaves(seen[0]), strict=True):
        np.testing.assert_array_equal(read(leaf), value)
    for state, values in zip(states[1:], seen[1:], strict=True):
        for leaf, value in zip(optree.tree_leaves(state.average), optree.tree_leaves(values), strict=True):
            np.testing.assert_array_equal(read(leaf), value)


@pytest.mark.parametrize("kind", [name for name in MUTABLE if "torch" in name or "numpy" in name])
def test_an_update_in_place_keeps_the_arrays_of_the_average(kind: str) -> None:
    rule, make = functavg.EMA(0.5), KINDS[kind].make
    state = rule.init({"w": make(np.zeros(3))})
    leaf = state.average["w"]
    for value in (1, 0, 1):
        state = rule.update({"w": make(np.full(3, value))}, state, inplace=True)
        assert state.average["w"] is leaf


def test_a_read_only_numpy_average_is_replaced_as_immutable_arrays_are() -> None:
    average = np.zeros(3)
    average.setflags(write=False)
    moved = functavg.lerp({"w": average}, {"w": np.ones(3)}, 0.5, inplace=True)
    copied = functavg.lerp({"w": average}, {"w": np.ones(3)}, 1.0, inplace=True)
    assert moved["w"].tolist() == [0.5] * 3
    assert copied["w"].tolist() == [1.0] * 3
    assert average.tolist() == [0.0] * 3
    rule = functavg.AvgFn(lambda average, new, count: (average + new) / 2)
    state = rule.update({"w": np.ones(3)}, functavg.AverageState(1, {"w": average}), inplace=True)
    assert state.average["w"].tolist() == [0.5] * 3


def test_a_user_function_may_return_what_it_was_given() -> None:
    for make in (np.ones, torch.ones):
        for pick in (lambda average, new, count: new, lambda average, new, count: average):
            rule = functavg.AvgFn(pick)
            for inplace in (False, True):
                params = make(3)
                state = functavg.AverageState(1, rule.init(params).average)
                average = rule.update(params, state, inplace=inplace).average
                overwrite(params)
                assert average.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("jax")])
@pytest.mark.parametrize("name", RULES)
def test_donated_jax_params_leave_the_average(name: str, kind: str) -> None:
    """A buffer that is donated is deleted, and with it every array that shares it."""
    jax = pytest.importorskip("jax")
    rule, make = RULES[name].rule, KINDS[kind].make
    params = [make(np.ones(3)) for _ in range(3)]
    state = rule.init(params[0])
    for new in params[1:]:
        state = rule.update(new, state)
    for leaf in params:
        leaf.delete()
    np.testing.assert_array_equal(read(state.average), np.ones(3))
    assert not jax.tree_util.tree_leaves(state.average)[0].is_deleted()


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_an_average_of_jax_arrays_takes_numpy_arrays_without_sharing_them(weight: float) -> None:
    jnp = pytest.importorskip("jax.numpy")
    params = np.ones(1024, np.float32)
    average = functavg.lerp(jnp.ones(1024), params, weight)
    overwrite(params)
    assert set(read(average).tolist()) == {1.0}


def test_expanded_tensors_are_materialised() -> None:
    expanded = torch.ones(1, 2).expand(3, 2)
    rule = functavg.SWA()
    for inplace in (False, True):
        state = rule.init({"w": expanded})
        assert state.average["w"].is_contiguous()
        for value in (torch.arange(6.0).view(3, 2), expanded, expanded):
            state = rule.update({"w": value}, state, inplace=inplace)
        np.testing.assert_allclose(read(state.average["w"]), (np.arange(6.0).reshape(3, 2) + 2) / 3, rtol=1e-6)


def test_conjugate_and_negative_views_are_resolved() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    rule = functavg.EMA(0.5)
    for view in (base.conj(), base.conj().imag, torch._neg_view(base)):
        for inplace in (False, True):
            state = rule.init({"w": view})
            assert not state.average["w"].is_conj()
            assert not state.average["w"].is_neg()
            for _ in range(3):
                state = rule.update({"w": view}, state, inplace=inplace)
            np.testing.assert_array_equal(read(state.average["w"]), read(view.resolve_conj().resolve_neg().clone()))
    assert base.tolist() == [1 + 2j, 3 - 4j]


def test_an_average_of_itself_stays() -> None:
    for make in (lambda: np.arange(4.0), lambda: torch.arange(4.0)):
        average = {"w": make()}
        assert functavg.lerp(average, average, 0.5, inplace=True)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", SCALARS)
def test_scalars_become_arrays_of_their_own(kind: str) -> None:
    state = functavg.SWA().init({"a": SCALARS[kind].make(np.asarray(1)), "b": SCALARS[kind].make(np.asarray(1))})
    assert isinstance(state.average["a"], np.ndarray)
    assert state.average["a"] is not state.average["b"]
