"""Updates run outside autograd, inference mode and autocast, and what they return can be used in any of them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import optree
import pytest
import torch

import functavg
from tests.tables import RULES, read


def params(value: float) -> dict[str, Any]:
    return {
        "w": torch.nn.Parameter(torch.full((3,), value)),
        "h": torch.nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16)),
        "n": torch.tensor(int(value)),
    }


MODES = {
    "plain": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_updates_in_any_mode_give_the_same_and_stay_usable_in_any_other(name: str, inplace: bool) -> None:
    """T4."""
    rule = RULES[name].rule
    wanted = rule.init(params(0.0))
    for value in (1.0, 2.0, 4.0):
        wanted = rule.update(params(value), wanted)
    for first in MODES.values():
        for then in MODES.values():
            with first():
                state = rule.update(params(1.0), rule.init(params(0.0)), inplace=inplace)
            with then():
                state = rule.update(params(2.0), state, inplace=inplace)
            state = rule.update(params(4.0), state, inplace=inplace)
            for leaf, value in zip(optree.tree_leaves(state.average), optree.tree_leaves(wanted.average), strict=True):
                assert torch.equal(leaf, value)
                assert leaf.dtype == value.dtype
                assert not leaf.is_inference()
                assert not leaf.requires_grad
                assert leaf.grad_fn is None


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_params_of_inference_mode_are_averaged_outside(name: str, inplace: bool) -> None:
    rule = RULES[name].rule
    with torch.inference_mode():
        trees = [params(value) for value in (0.0, 1.0, 2.0)]
    state = rule.init(trees[0])
    for tree in trees[1:]:
        state = rule.update(tree, state, inplace=inplace)
    np.testing.assert_allclose(read(state.average["w"]), RULES[name].profile([1, 1]) @ [0.0, 1.0, 2.0], rtol=1e-6)
    assert not state.average["w"].is_inference()


def test_an_average_with_gradients_is_updated_in_place() -> None:
    """A model's own parameters are such an average, where an average is written back."""
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    zeros = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    functavg.lerp(dict(model.named_parameters()), zeros, 0.5, inplace=True)
    assert torch.equal(model.weight, before / 2)
    assert model.weight.is_leaf
    assert model.weight.requires_grad


@pytest.mark.parametrize("weight", [0.5, 1.0, torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writing_in_place_bumps_versions(weight: Any, dtype: torch.dtype) -> None:
    """Autograd then notices that a tensor which it had saved was changed."""
    average = torch.zeros(3)
    version = average._version
    functavg.lerp({"w": average}, {"w": torch.ones(3, dtype=dtype)}, weight, inplace=True)
    assert average._version > version


def test_a_user_function_runs_outside_autograd_inference_mode_and_autocast() -> None:
    def fn(average: torch.Tensor, new: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert average.is_meta or not torch.is_autocast_enabled(average.device.type)
        assert not new.requires_grad
        return average @ torch.eye(3) + new

    rule = functavg.AvgFn(fn)
    weights = {"w": torch.nn.Parameter(torch.ones(3)), "meta": torch.ones(3, device="meta")}
    for mode in MODES.values():
        with mode():
            state = rule.update(weights, rule.update(weights, rule.init(weights)))
        assert state.average["w"].dtype == torch.float32
        assert state.average["w"].tolist() == [2.0] * 3


def test_the_memory_of_an_update_holds_no_graph_of_the_params() -> None:
    weight = torch.ones(2, requires_grad=True)
    derived = weight * 2
    state = functavg.EMA(0.5).update({"w": derived}, functavg.EMA(0.5).init({"w": derived}))
    assert state.average["w"].grad_fn is None
    derived.sum().backward()
    assert weight.grad is not None
