"""Weight rules go through torch.compile and torch.func.vmap, and stand beside torch.func.grad; results stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functavg
from functavg import AverageState
from tests.tables import ALIKE, WEIGHT_RULES

COMPILED = [name for name in WEIGHT_RULES if name not in ALIKE]


def params(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((2, 3), value),
        "h": torch.full((3,), value, dtype=torch.bfloat16),
        "n": torch.tensor(int(value)),
    }


def assert_equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-6, atol=1e-7)


class Graphs:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def compiled_run(rule: functavg.WeightRule, names: str, count: Any, inplace: bool) -> int:
    """Compare eight compiled updates of some of the params with eager ones; return the number of graphs."""

    def some(value: float) -> dict[str, Any]:
        return {name: leaf for name, leaf in params(value).items() if name in names}

    torch._dynamo.reset()
    graphs = Graphs()

    @torch.compile(fullgraph=True, backend=graphs)
    def step(params: Any, state: AverageState[Any]) -> AverageState[Any]:
        return rule.update(params, state, inplace=inplace)

    eager = rule.init(some(0.0))
    state = rule.init(some(0.0))._replace(count=count)
    for value in range(1, 9):
        state = step(some(value), state)
        eager = rule.update(some(value), eager)
        assert_equal(state.average, eager.average)
        assert int(state.count) == eager.count
    return graphs.count


@pytest.mark.parametrize("name", [name for name in COMPILED if name not in ("Copy", "Freeze")])
def test_compiled_updates_with_a_host_count_are_few_graphs(name: str) -> None:
    """One for the first count, one for all others; no count is compiled anew. Two rules never look at it."""
    assert compiled_run(WEIGHT_RULES[name].rule, "h", 0, inplace=False) <= 3


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_updates_with_a_tensor_count_are_one_graph(name: str) -> None:
    assert compiled_run(WEIGHT_RULES[name].rule, "whn", torch.tensor(0), inplace=True) == 1


def test_steps_and_shared_leaves_compile() -> None:
    rule = functavg.SWA()

    @torch.compile(fullgraph=True, backend="eager")
    def step(params: Any, state: AverageState[Any], steps: int) -> AverageState[Any]:
        return rule.update(params, state, steps=steps)

    def tied(value: float) -> dict[str, torch.Tensor]:
        leaf = torch.full((2,), value)
        return {"a": leaf, "b": leaf}

    compiled = eager = rule.init(tied(0.0))
    for value, steps in ((1.0, 1), (2.0, 3), (4.0, 2)):
        compiled = step(tied(value), compiled, steps)
        eager = rule.update(tied(value), eager, steps=steps)
        assert_equal(compiled.average, eager.average)
    assert compiled.count == 6


def test_inductor_compiles_an_update() -> None:
    rule = functavg.PowerEMA(6.94)
    step = torch.compile(rule.update, fullgraph=True)
    state, eager = rule.init(torch.zeros(3))._replace(count=torch.tensor(0)), rule.init(torch.zeros(3))
    for value in (1.0, 2.0, 4.0):
        new = torch.full((3,), value)
        state, eager = step(new, state), rule.update(new, eager)
        torch.testing.assert_close(state.average, eager.average)


# ---- vmap


def stacked(values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([params(value)[name] for value in values]) for name in params(0.0)}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_vmap_over_models_with_one_count(name: str, inplace: bool) -> None:
    rule = WEIGHT_RULES[name].rule
    average = rule.init(stacked([0.0, 1.0])).average
    singles = [rule.init(params(value)) for value in (0.0, 1.0)]
    for count in range(3):

        def step(params: Any, average: Any, count: int = count) -> Any:
            return rule.update(params, AverageState(count, average), inplace=inplace).average

        average = torch.func.vmap(step)(stacked([count + 1.0, count + 3.0]), average)
        singles = [
            rule.update(params(count + shift), single) for shift, single in zip((1.0, 3.0), singles, strict=True)
        ]
    for index, single in enumerate(singles):
        assert_equal({name: leaf[index] for name, leaf in average.items()}, single.average)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_vmap_over_models_and_their_counts(name: str, inplace: bool) -> None:
    """One model is at its first update, the other is not."""
    rule = WEIGHT_RULES[name].rule
    old = rule.update(params(1.0), rule.init(params(0.0)), steps=4)
    states = [rule.init(params(0.0)), old]
    stack = AverageState(
        torch.tensor([0, 4]),
        {name: torch.stack([state.average[name] for state in states]) for name in old.average},
    )
    step = torch.func.vmap(lambda params, state: rule.update(params, state, steps=2, inplace=inplace))
    for value in (2.0, 5.0):
        stack = step(stacked([value, value + 1]), stack)
        states = [rule.update(params(value + index), state, steps=2) for index, state in enumerate(states)]
    assert stack.count.tolist() == [4, 8]
    for index, state in enumerate(states):
        assert_equal({name: leaf[index] for name, leaf in stack.average.items()}, state.average)


# ---- grad


def test_an_update_stands_beside_torch_func_grad() -> None:
    """A training step that returns its state: gradients flow past the average, not through it."""
    rule = functavg.EMA(0.5)

    def loss(weights: dict[str, torch.Tensor], state: AverageState[Any]) -> Any:
        return (weights["w"] ** 2).sum(), rule.update(weights, state)

    weights = {"w": torch.tensor([1.0, 2.0])}
    state = rule.update(weights, rule.init(weights)._replace(count=torch.tensor(0)))  # an aux of torch holds no int
    grads, state = torch.func.grad(loss, has_aux=True)({"w": torch.tensor([3.0, 4.0])}, state)
    assert grads["w"].tolist() == [6.0, 8.0]
    assert state.average["w"].tolist() == [2.0, 3.0]
    assert not state.average["w"].requires_grad


def test_the_distance_to_an_average_has_gradients_in_the_weights_only() -> None:
    rule = functavg.EMA(0.5)
    state = rule.init({"w": torch.zeros(2)})

    def distance(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        average = rule.update(weights, state._replace(count=1)).average
        return ((weights["w"] - average["w"]) ** 2).sum()

    grads = torch.func.grad(distance)({"w": torch.tensor([2.0, 4.0])})
    assert grads["w"].tolist() == [2.0, 4.0]


def test_vmap_of_grad_of_models_with_their_averages() -> None:
    rule = functavg.SWA()

    def loss(weights: torch.Tensor, state: AverageState[Any]) -> Any:
        return weights.sum() ** 2, rule.update(weights, state)

    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    state = AverageState(torch.tensor([0, 1]), torch.zeros(2, 2))
    grads, state = torch.func.vmap(torch.func.grad(loss, has_aux=True))(weights, state)
    assert grads.tolist() == [[6.0, 6.0], [14.0, 14.0]]
    assert state.average.tolist() == [[1.0, 2.0], [1.5, 2.0]]
