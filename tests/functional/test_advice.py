"""What is no tree of arrays is refused with how to make it one, by whatever takes a tree, and nothing is changed."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import functavg
from functavg import EMA, LAWA, AverageState, Partition, Several, SkipNonFinite, cast_like, lerp, swapped

tensordict = pytest.importorskip("tensordict")

MODEL = nn.Linear(2, 2)
NAMED = r"; pass a container whose entries have names or an order, such as dict\(model\.named_parameters\(\)\)"
MODULE = r"; pass dict\(module\.named_parameters\(\)\), or use functavg\.AveragedModel"
FUNCTION = r"; pass a tree of arrays, such as dict\(model\.named_parameters\(\)\), not the function"
TENSORDICT = r"; pass its \.to_dict\(\)"


@dataclass
class Weights:
    weight: Any
    bias: Any


def tensors() -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in MODEL.named_parameters()}


def tensor_dict() -> Any:
    return tensordict.TensorDict({"weight": torch.ones(2, 2), "deep": {"bias": torch.ones(2)}})


NO_TREES: dict[str, tuple[Callable[[], Any], str]] = {
    "parameters": (MODEL.parameters, NAMED),
    "named_parameters": (MODEL.named_parameters, NAMED),
    "map": (lambda: map(torch.clone, MODEL.parameters()), NAMED),
    "iterator": (lambda: iter([torch.ones(1)]), NAMED),
    "keys": (lambda: MODEL.state_dict().keys(), NAMED),
    "values": (lambda: MODEL.state_dict().values(), NAMED),
    "items": (lambda: tensors().items(), NAMED),
    "set": (lambda: set(MODEL.parameters()), NAMED),
    "module": (lambda: MODEL, MODULE),
    "ParameterDict": (lambda: nn.ParameterDict({"weight": torch.ones(1)}), MODULE),
    "AveragedModel": (lambda: functavg.AveragedModel(MODEL), MODULE),
    "TensorDict": (tensor_dict, TENSORDICT),
    "TensorDictParams": (lambda: tensordict.TensorDictParams(tensor_dict()), TENSORDICT),
    "method": (lambda: MODEL.parameters, FUNCTION),
    "function": (lambda: tensors, FUNCTION),
    "mapping": (lambda: types.MappingProxyType(tensors()), r"; pass it as dict\(\.\.\.\)"),
    "UserDict": (lambda: collections.UserDict(tensors()), r"; pass it as dict\(\.\.\.\)"),
    "optimizer": (lambda: torch.optim.SGD(MODEL.parameters(), lr=0.1), "; pass the parameters, such as dict"),
    "dataclass": (lambda: Weights(torch.ones(1), torch.ones(1)), r"; pass its vars\(\.\.\.\), or register the class"),
}
RULES = {
    "EMA": EMA(0.9),
    "LAWA": LAWA(2),
    "SkipNonFinite": SkipNonFinite(EMA(0.9)),
    "Several": Several({"a": EMA(0.9)}),
    "Partition": Partition({"a": EMA(0.9)}, lambda name, leaf: "a"),
}


@pytest.fixture(params=NO_TREES.values(), ids=NO_TREES)
def no_tree(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_tell_how_to_make_a_tree(rule: functavg.AveragingRule, no_tree: Any) -> None:
    make, advice = no_tree
    with pytest.raises(TypeError, match=r"^tree: cannot average .*Expected a dense array of numbers" + advice):
        rule.init(make())
    with pytest.raises(TypeError, match=r"^tree\['a'\]\[0\]: cannot average .*" + advice):
        rule.init({"a": [make()]})
    state = rule.init(tensors())
    before = functavg.to_state_dict(rule.update(tensors(), state))
    for inplace in (False, True):
        with pytest.raises(TypeError, match="^tree: expected an array, got .*" + advice):
            rule.update(make(), state, inplace=inplace)
        with pytest.raises(TypeError, match=r"^tree\['weight'\]: expected an? .*, got .*" + advice):
            rule.update({**tensors(), "weight": make()}, state, inplace=inplace)
    with pytest.raises(TypeError, match="^tree: cannot average .*" + advice):
        rule.extend(make(), state)
    after = functavg.to_state_dict(rule.update(tensors(), state))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_one_step_tells_how_to_make_a_tree(no_tree: Any) -> None:
    make, advice = no_tree
    average = tensors()
    for inplace in (False, True):
        with pytest.raises(TypeError, match="^tree: expected an array, got .*" + advice):
            lerp(average, make(), 0.5, inplace=inplace)
        with pytest.raises(TypeError, match="^tree: expected an array, got .*" + advice):
            lerp(make(), average, 0.5, inplace=inplace)
        with pytest.raises(TypeError, match="^tree: the average holds .*, which is no array" + advice):
            lerp(make(), make(), 0.5, inplace=inplace)
    for name, tensor in tensors().items():
        assert torch.equal(average[name], tensor)


@pytest.mark.parametrize("array", [torch.ones(2), np.ones(2)], ids=["torch", "numpy"])
def test_where_one_array_is_meant_they_tell_it_too(array: Any, no_tree: Any) -> None:
    make, advice = no_tree
    with pytest.raises(TypeError, match="^tree: expected a .*, got .*" + advice):
        lerp(array, make(), 0.5)
    with pytest.raises(TypeError, match="^tree: expected arrays of one library, got .*" + advice):
        cast_like(make(), array)
    with pytest.raises(TypeError, match="^tree: expected arrays of one library, got .*" + advice):
        cast_like(array, make())


def test_a_cast_tells_how_to_make_a_tree(no_tree: Any) -> None:
    make, advice = no_tree
    with pytest.raises(TypeError, match="^tree: expected an array, got .*" + advice):
        cast_like(make(), tensors())
    with pytest.raises(TypeError, match="^tree: expected an array, got .*" + advice):
        cast_like(tensors(), make())


def test_what_the_advice_says_works() -> None:
    trees = [tensor_dict().to_dict(), tensordict.TensorDictParams(tensor_dict()).to_dict(), tensors()]
    trees += [dict(types.MappingProxyType(tensors())), dict(collections.UserDict(tensors())), list(MODEL.parameters())]
    trees += [vars(Weights(torch.ones(1), torch.ones(1))), dict(nn.ParameterDict({"w": torch.ones(1)}))]
    for tree in trees:
        state = EMA(0.5).init(tree)
        assert EMA(0.5).update(tree, state).count == 1


def test_a_leaf_of_no_known_kind_is_to_be_left_out() -> None:
    for leaf in ("text", object(), nn.Linear, EMA(0.9)):
        with pytest.raises(TypeError, match=r"Expected a dense array of numbers; leave it out of the params$"):
            EMA(0.9).init({"a": leaf})


def test_saved_and_swapped_values_must_be_dicts_too() -> None:
    state: AverageState[Any] = EMA(0.9).init(tensors())
    with pytest.raises(TypeError, match="saved must be a dict, got TensorDict" + TENSORDICT):
        functavg.from_state_dict(state, tensor_dict())
    for value, advice in ((tensor_dict(), TENSORDICT), (MODEL.named_parameters(), NAMED), (MODEL, MODULE)):
        with pytest.raises(TypeError, match="average must be .*, got .*" + advice), swapped(MODEL, value):
            pass


@pytest.mark.parametrize("value", [MODEL.parameters(), tensors(), EMA(0.9)], ids=lambda value: type(value).__name__)
def test_what_is_no_module_is_told_so_by_all_that_take_one(value: Any) -> None:
    averaged = functavg.AveragedModel(MODEL)
    name = type(value).__name__
    with pytest.raises(TypeError, match=rf"update_parameters\(model\): model must be a torch.nn.Module, got {name}"):
        averaged.update_parameters(value)
    with pytest.raises(TypeError, match=rf"copy_to\(model\): model must be a torch.nn.Module, got {name}"):
        averaged.copy_to(value)
    with (
        pytest.raises(TypeError, match=r"swapped\(model, average\): model must be a torch.nn.Module"),
        swapped(value, {}),
    ):
        pass
    with pytest.raises(TypeError, match=r"swapped\(model, average\): model must be a torch.nn.Module"):
        averaged.swapped(value).__enter__()
    with pytest.raises(TypeError, match=r"update_bn\(loader, model\): model must be a torch.nn.Module"):
        functavg.update_bn([], value)
    with pytest.raises(TypeError, match=r"model must be the torch\.nn\.Module to average"):
        functavg.AveragedModel(value)
