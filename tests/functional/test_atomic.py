"""A failing update leaves average and count as they were, whatever fails and wherever it stands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch

import functavg
from tests.tables import KINDS, RULES, SCALARS, read

GOOD = np.array([0.0, 1.0])


def broken_leaf(kind: str, fault: str) -> Any:
    """Return a leaf that cannot go into an average of leaves of this kind."""
    make = (KINDS | SCALARS)[kind].make
    if fault == "reshaped":
        return np.ones((3, 3)) if kind in SCALARS else make(np.ones((3, 3)))
    if fault == "broadcastable":
        return np.ones((1, 2)) if kind in SCALARS else make(np.ones((1, 2)))
    if fault == "another library":
        return torch.ones(2) if "torch" not in kind else np.ones(2)
    if fault == "no array":
        return "text"
    if fault == "refused dtype":
        return torch.eye(2).to_sparse() if "torch" in kind else np.array([None, None])
    assert fault == "another kind"
    if "torch" in kind:
        return torch.ones(2, dtype=torch.complex64)
    return KINDS["jax-complex64" if "jax" in kind else "numpy-complex64"].make(np.ones(2))


TREE_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda good: {name: leaf for name, leaf in good.items() if name != "b"},
    "unexpected": lambda good: {**good, "extra": good["b"]},
    "renamed": lambda good: {"a": good["a"], "x": good["b"], "c": good["c"]},
    "nested": lambda good: {**good, "b": [good["b"]]},
    "none": lambda good: {**good, "b": None},
    "a bare leaf": lambda good: good["b"],
    "a state": lambda good: functavg.AverageState(0, good),
}
LEAF_FAULTS = ["reshaped", "broadcastable", "another library", "no array", "refused dtype", "another kind"]


def state_and_params(kind: str, rule: functavg.AveragingRule) -> tuple[functavg.AverageState[Any], dict[str, Any]]:
    """Return a state that has been updated and new params, in a tree that mixes in other kinds."""
    make = (KINDS | SCALARS)[kind].make

    def edge(values: Any) -> dict[str, Any]:
        tensor = torch.tensor(values)
        return {"t": tensor, "h": tensor.to(torch.bfloat16), "n": np.array(values)}

    def tree(values: Any) -> dict[str, Any]:
        return {"a": edge(values), "b": make(values[0] if kind in SCALARS else values), "c": edge(values)}

    return rule.update(tree(GOOD), rule.init(tree(GOOD))), tree(1 - GOOD)


def snapshot(state: functavg.AverageState[Any]) -> list[Any]:
    return [(leaf, read(leaf).copy()) for leaf in optree.tree_leaves(state.average)]


def assert_untouched(state: functavg.AverageState[Any], before: list[Any]) -> None:
    assert state.count == 1
    for leaf, (old, values) in zip(optree.tree_leaves(state.average), before, strict=True):
        assert leaf is old
        np.testing.assert_array_equal(read(leaf), values)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("fault", TREE_FAULTS)
@pytest.mark.parametrize("name", ["EMA", "AvgFn", "Latest", "Freeze"])
def test_a_tree_that_does_not_fit_changes_nothing(name: str, fault: str, inplace: bool) -> None:
    rule = RULES[name].rule
    state, params = state_and_params("torch-float32", rule)
    before = snapshot(state)
    with pytest.raises((TypeError, ValueError)):
        rule.update(TREE_FAULTS[fault](params), state, inplace=inplace)
    assert_untouched(state, before)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (name, fault)
        for name, kind in (KINDS | SCALARS).items()
        for fault in LEAF_FAULTS
        if not (kind.kind == "c" and fault == "another kind")  # complex leaves hold every kind
    ],
)
def test_a_leaf_that_does_not_fit_changes_nothing(kind: str, fault: str) -> None:
    """The bad leaf stands between leaves of other kinds."""
    for name, inplace in itertools.product(("EMA", "AvgFn"), (False, True)):
        rule = RULES[name].rule
        state, params = state_and_params(kind, rule)
        before = snapshot(state)
        params["b"] = broken_leaf(kind, fault)
        with pytest.raises((TypeError, ValueError), match=r"^tree\['b'\]: expected "):
            rule.update(params, state, inplace=inplace)
        assert_untouched(state, before)


@pytest.mark.parametrize("fault", LEAF_FAULTS)
@pytest.mark.parametrize("name", RULES)
def test_the_bad_leaf_may_stand_first_or_last(name: str, fault: str) -> None:
    rule = RULES[name].rule
    for place, inplace in itertools.product((("a", "h"), ("a", "n"), ("c", "t"), ("c", "n")), (False, True)):
        state, params = state_and_params("torch-float32", rule)
        before = snapshot(state)
        params[place[0]][place[1]] = broken_leaf("numpy-float64" if place[1] == "n" else "torch-float32", fault)
        with pytest.raises((TypeError, ValueError), match=rf"^tree\['{place[0]}'\]\['{place[1]}'\]: expected "):
            rule.update(params, state, inplace=inplace)
        assert_untouched(state, before)


BAD_CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "steps": (functavg.EMA(), {"steps": 0}),
    "NaN decay": (functavg.EMA(lambda u: float("nan")), {}),
    "decay out of range": (functavg.EMA(lambda u: 1.5), {}),
    "NaN weight": (functavg.WeightFn(lambda count, steps: float("nan")), {}),
    "text weight": (functavg.WeightFn(lambda count, steps: "0.5"), {}),
    "a function that raises": (functavg.WeightFn(lambda count, steps: 1 / 0), {}),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_argument_or_function_changes_nothing(case: str, inplace: bool) -> None:
    rule, arguments = BAD_CALLS[case]
    state, params = state_and_params("torch-bfloat16", functavg.SWA())
    before = snapshot(state)
    with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
        rule.update(params, state, inplace=inplace, **arguments)
    assert_untouched(state, before)


def test_a_user_function_that_raises_half_way_leaves_the_count() -> None:
    def fails_second(average: Any, new: Any, count: Any, calls: list[int] = []) -> Any:  # noqa: B006
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("half-way")
        return new

    rule = functavg.AvgFn(fails_second)
    state = functavg.AverageState(1, {"a": torch.zeros(1), "b": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="half-way"):
        rule.update({"a": torch.ones(1), "b": torch.ones(1)}, state, inplace=True)
    assert state.count == 1
    assert state.average["b"].item() == 0


def new_part(average: Any, new: Any, count: Any) -> Any:
    return new[:1]


def nothing(average: Any, new: Any, count: Any) -> None:
    return None


@pytest.mark.parametrize("kind", ["torch-float32", "numpy-float32", "jax-float32"])
def test_a_user_function_must_return_the_shape_of_the_average(kind: str) -> None:
    if kind not in KINDS:
        pytest.skip("JAX is not installed")
    make = KINDS[kind].make
    for wrong, got in ((new_part, r"\(1,\)"), (nothing, r"(NoneType|shape \(\))")):
        rule = functavg.AvgFn(wrong)
        state = functavg.AverageState(1, {"w": make(np.ones(2))})
        message = r"tree\['w'\]: avg_fn must return the new average, an? (array|tensor) of shape \(2,\), got .*" + got
        with pytest.raises(ValueError, match=message):
            rule.update({"w": make(np.ones(2))}, state)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_tensor_without_values_is_refused_before_anything_is_written(inplace: bool) -> None:
    averages = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(TypeError, match=r"^tree\['b'\]: expected a tensor with values, got one on the meta device"):
        functavg.lerp(averages, {"a": torch.ones(1), "b": torch.ones(1, device="meta")}, 0.5, inplace=inplace)
    assert averages["a"].item() == 0


def test_an_average_without_memory_of_its_own_is_refused_in_place_before_anything_is_written() -> None:
    averages = {"a": torch.zeros(2), "b": torch.zeros(1).expand(2)}
    params = {name: torch.ones(2) for name in averages}
    with pytest.raises(TypeError, match=r"^tree\['b'\]: expected an average with memory.*got an expanded tensor"):
        functavg.lerp(averages, params, 0.5, inplace=True)
    assert averages["a"].tolist() == [0, 0]
    assert functavg.lerp(averages, params, 0.5)["b"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32], ids=str)
@pytest.mark.parametrize("weight", [0.5, torch.tensor(0.5)], ids=["host", "device"])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_a_step_of_a_dtype_that_torch_hardly_computes_with_is_rounded_once(dtype: torch.dtype, weight: Any) -> None:
    averages = {"a": torch.zeros(2), "b": torch.zeros(2).to(dtype)}
    params = {"a": torch.ones(2), "b": torch.ones(2).to(dtype)}
    for inplace in (False, True):
        result = functavg.lerp(averages, params, weight, inplace=inplace)
        assert result["b"].dtype == dtype
        assert result["b"].to(torch.complex64).tolist() == result["a"].tolist() == [0.5, 0.5]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_a_nested_tensor_beside_tied_leaves_is_named() -> None:
    tied = torch.zeros(2)
    params = {"a": tied, "b": tied, "c": torch.nested.nested_tensor([torch.zeros(1)])}
    with pytest.raises(TypeError, match=r"^tree\['c'\]: expected a dense tensor, got a nested tensor"):
        functavg.lerp({"a": tied, "b": tied, "c": torch.zeros(1)}, params, 0.5)


def test_a_conjugated_average_is_written_through() -> None:
    average = torch.zeros(1, dtype=torch.complex64).conj()
    functavg.lerp([average], [torch.tensor([1 + 2j])], 0.5, inplace=True)
    assert average.item() == 0.5 + 1j


@pytest.mark.parametrize("index", [0, 1])
def test_a_parameter_that_an_engine_has_partitioned_away_is_named_wherever_it_stands(index: int) -> None:
    averages = [torch.zeros(0), torch.zeros(0), torch.zeros(2)]
    params = [torch.ones(0), torch.ones(0), torch.ones(2)]
    params[index].ds_shape = (4,)  # type: ignore[attr-defined]  # of DeepSpeed
    with pytest.raises(TypeError, match=rf"^tree\[{index}\]: expected a dense tensor, got a placeholder of size 0"):
        functavg.lerp(averages, params, 0.5, inplace=True)
    assert averages[2].tolist() == [0, 0]
