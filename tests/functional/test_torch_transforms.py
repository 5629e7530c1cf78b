"""Rules go through torch.compile and torch.func.vmap, and stand beside torch.func.grad; results stay equal.

Members of ensembles that count for themselves are in ``test_device_counts``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import functavg
from functavg import AverageState, schedules
from tests.tables import ALIKE, WEIGHT_RULES

LABELS = {"w": "x", "h": "y", "n": "y"}
COMPILED = {name: row.rule for name, row in WEIGHT_RULES.items() if name not in ALIKE} | {
    "schedule-power": functavg.EMA(schedules.InversePower(0.99)),
    "schedule-after": functavg.EMA(schedules.After(schedules.TFWarmup(0.9), 2)),
    "schedule-per-update": functavg.WeightFn(schedules.PerUpdate(schedules.Stretched(schedules.HalfLifeRamp(99), 2))),
    "Several": functavg.Several({"fast": functavg.EMA(0.9), "slow": functavg.PowerEMA(3)}),
    "Partition": functavg.Partition({"x": functavg.EMA(0.9, debias=True), "y": functavg.SWA()}, LABELS),
    "nested": functavg.Several({"p": functavg.Partition({"x": functavg.SWA(), "y": functavg.Latest()}, LABELS)}),
}
# These branch on a host count, or read a flag; on a device they do not.
COMPILED_ON_DEVICE = COMPILED | {
    "LAWA": functavg.LAWA(3),
    "Every": functavg.Every(functavg.EMA(0.9), 3, start=1),
    "SkipNonFinite": functavg.SkipNonFinite(functavg.SWA()),
    "gates": functavg.Every(functavg.SkipNonFinite(functavg.Several({"a": functavg.EMA(0.9)})), 2),
}


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


def on_device(state: AverageState[Any]) -> AverageState[Any]:
    """Return the state with its counts, those in memory too, as 0-d tensors."""
    return tree_map_only(int, torch.tensor, state)


def compiled_run(rule: functavg.AveragingRule, names: str, device: bool, inplace: bool) -> int:
    """Compare eight compiled updates of some of the params with eager ones; return the number of graphs."""

    def some(value: float) -> dict[str, Any]:
        return {name: leaf for name, leaf in params(value).items() if name in names}

    torch._dynamo.reset()
    graphs = Graphs()

    @torch.compile(fullgraph=True, backend=graphs)
    def step(params: Any, state: AverageState[Any]) -> AverageState[Any]:
        return rule.update(params, state, inplace=inplace)

    eager = rule.init(some(0.0))
    state = rule.init(some(0.0))
    if device:
        state = on_device(state)
    for value in range(1, 9):
        before = state
        state = step(some(value), state)
        eager = rule.update(some(value), eager)
        torch.testing.assert_close(state.average, eager.average, rtol=1e-6, atol=1e-7)
        assert int(state.count) == eager.count
        if device and inplace:
            assert all(new is old for new, old in zip(tree_leaves(state), tree_leaves(before), strict=True))
    return graphs.count


@pytest.mark.parametrize("name", [name for name in COMPILED if name not in ("Latest", "Freeze")])
def test_compiled_updates_with_host_counts_are_few_graphs(name: str) -> None:
    """One for the first count, one for all others; no count is compiled anew. Two rules never look at it."""
    names = "whn" if "rules" in vars(COMPILED[name]) else "h"
    assert compiled_run(COMPILED[name], names, device=False, inplace=False) <= 3


@pytest.mark.parametrize("name", ["EMA", "schedule-after", "Several"])
def test_compiled_updates_in_place_with_host_counts_are_few_graphs(name: str) -> None:
    assert compiled_run(COMPILED[name], "whn", device=False, inplace=True) <= 3


@pytest.mark.parametrize("name", COMPILED_ON_DEVICE)
def test_compiled_updates_in_place_with_tensor_counts_are_one_graph(name: str) -> None:
    """They write to the tensors of the state they are given."""
    assert compiled_run(COMPILED_ON_DEVICE[name], "whn", device=True, inplace=True) == 1


@pytest.mark.parametrize("name", ["EMA", "Partition", "gates"])
def test_compiled_pure_updates_with_tensor_counts_are_one_graph(name: str) -> None:
    assert compiled_run(COMPILED_ON_DEVICE[name], "wh" if name == "EMA" else "whn", device=True, inplace=False) == 1


@pytest.mark.parametrize("name", ["EMA-debias", "PowerEMA", "schedule-power", "Several"])
def test_no_count_however_large_is_compiled_anew(name: str) -> None:
    torch._dynamo.reset()
    graphs = Graphs()
    rule = COMPILED[name]
    step = torch.compile(rule.update, fullgraph=True, backend=graphs)
    start, new = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for count in (0, 1, 2, 1000, 10**7, 2**40):
        state = tree_map_only(int, lambda _, count=count: count, rule.init(start))
        after, wanted = step(new, state), rule.update(new, state)
        torch.testing.assert_close(after.average, wanted.average, rtol=1e-12, atol=0)
        assert after.count == wanted.count == count + 1
    assert graphs.count <= 3


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


def test_inductor_compiles_an_update_in_place() -> None:
    """Of low precision and whole numbers, behind gates: the count and the averages are written where they are."""
    rule = functavg.Every(functavg.Several({"ema": functavg.EMA(0.9), "window": functavg.LAWA(2)}), 2)
    step = torch.compile(rule.update, fullgraph=True)
    eager, state = rule.init(params(0.0)), on_device(rule.init(params(0.0)))
    places = tree_leaves(state)
    for value in range(1, 7):
        state, eager = step(params(value), state, inplace=True), rule.update(params(value), eager)
        torch.testing.assert_close(state.average, eager.average)
        assert int(state.count) == eager.count
        assert all(new is old for new, old in zip(tree_leaves(state), places, strict=True))


def test_inductor_compiles_an_update() -> None:
    rule = functavg.PowerEMA(6.94)
    step = torch.compile(rule.update, fullgraph=True)
    state, eager = rule.init(torch.zeros(3))._replace(count=torch.tensor(0)), rule.init(torch.zeros(3))
    for value in (1.0, 2.0, 4.0):
        new = torch.full((3,), value)
        state, eager = step(new, state), rule.update(new, eager)
        torch.testing.assert_close(state.average, eager.average)


# ---- vmap


def test_a_state_is_a_tree_to_every_torch() -> None:
    """Old ones know a named tuple by its only base; it can be subscripted all the same."""
    assert AverageState.__bases__ == (tuple,)
    assert AverageState[int](1, 2) == (1, 2, ())
    assert tree_leaves(AverageState(1, {"w": 2})) == [1, 2]


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
@pytest.mark.parametrize("name", ["EMA-debias", "PowerEMA", "Several"])
def test_vmap_over_models_with_one_count_on_the_device(name: str, inplace: bool) -> None:
    """``in_dims`` and ``out_dims`` say that there is one; in place it counts once for all members."""
    rule = COMPILED[name]
    state = on_device(rule.init(stacked([0.0, 1.0])))
    dims = AverageState(None, 0, tree_map(lambda _: None, state.memory))
    step = torch.func.vmap(
        lambda params, state: rule.update(params, state, inplace=inplace), in_dims=(0, dims), out_dims=dims
    )
    count, singles = state.count, [rule.init(params(value)) for value in (0.0, 1.0)]
    for value in (1.0, 5.0, 2.0):
        state = step(stacked([value, value + 2]), state)
        singles = [
            rule.update(params(value + shift), single) for shift, single in zip((0.0, 2.0), singles, strict=True)
        ]
    assert (state.count.item(), count.item()) == (3, 3 if inplace else 0)
    for index, single in enumerate(singles):
        member = tree_map(lambda leaf, index=index: leaf[index], state.average)
        torch.testing.assert_close(member, single.average, rtol=1e-6, atol=1e-7)


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


def test_vmap_over_models_with_a_leaf_in_two_places() -> None:
    def step(old: Any, new: Any) -> Any:
        return functavg.lerp({"a": old, "b": old}, {"a": new, "b": new}, 0.5, inplace=True)

    old = torch.zeros(3, 2)
    moved = torch.func.vmap(step)(old, torch.ones(3, 2))
    for each in (old, *moved.values()):
        assert (each == 0.5).all()


def test_vmap_of_grad_of_models_with_their_averages() -> None:
    rule = functavg.SWA()

    def loss(weights: torch.Tensor, state: AverageState[Any]) -> Any:
        return weights.sum() ** 2, rule.update(weights, state)

    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    state = AverageState(torch.tensor([0, 1]), torch.zeros(2, 2))
    grads, state = torch.func.vmap(torch.func.grad(loss, has_aux=True))(weights, state)
    assert grads.tolist() == [[6.0, 6.0], [14.0, 14.0]]
    assert state.average.tolist() == [[1.0, 2.0], [1.5, 2.0]]


def test_an_in_place_update_stands_inside_torch_func_grad() -> None:
    """Of a state that comes in as an argument, as gradients ask of everything that is written to."""
    rule = functavg.EMA(0.5)

    def loss(weights: dict[str, torch.Tensor], state: AverageState[Any]) -> Any:
        return (weights["w"] ** 2).sum(), rule.update(weights, state, inplace=True)

    state = AverageState(torch.tensor(1), {"w": torch.zeros(2)})
    grads, after = torch.func.grad(loss, has_aux=True)({"w": torch.tensor([3.0, 4.0])}, state)
    assert grads["w"].tolist() == [6.0, 8.0]
    assert after.average["w"].tolist() == state.average["w"].tolist() == [1.5, 2.0]
    assert (after.count.item(), state.count.item()) == (2, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_ensemble_trains_and_averages_in_one_vmapped_step(compiled: bool) -> None:
    """functional_call, grad and the update inside vmap, over params and states stacked leaf by leaf."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]
    x = torch.randn(3, 8, 3)
    y = x.sum(-1, keepdim=True)
    means = functavg.Partition({"w": functavg.LAWA(2), "b": functavg.SWA()}, lambda name, _: name.split(".")[-1][0])
    rule = functavg.Several({"ema": functavg.Every(functavg.EMA(0.9), 2), "means": means})

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(models[0], weights, (x,)), y)

    def step(weights: dict[str, torch.Tensor], state: AverageState[Any], x: torch.Tensor, y: torch.Tensor) -> Any:
        gradients = torch.func.grad(loss)(weights, x, y)
        weights = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
        return weights, rule.update(weights, state)

    singles = []
    for model in models:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        singles.append((weights, on_device(rule.init(weights))))
    together = tree_map(lambda *leaves: torch.stack(leaves), *singles)
    train = torch.func.vmap(step)
    if compiled:
        train = torch.compile(train, fullgraph=True, backend="eager")
    for _ in range(5):
        together = train(*together, x, y)
        singles = [step(*single, x[index], y[index]) for index, single in enumerate(singles)]
    wanted = tree_map(lambda *leaves: torch.stack(leaves), *singles)
    torch.testing.assert_close(together, wanted, rtol=1e-5, atol=1e-6)


# ---- export


class Updating(torch.nn.Module):
    """An update as the forward of a module, which is what torch exports."""

    def __init__(self, rule: functavg.AveragingRule, count: Any) -> None:
        super().__init__()
        self.rule, self.count = rule, count

    def forward(self, average: Any, new: Any) -> Any:
        return self.rule.update(new, AverageState(self.count, average)).average


@pytest.mark.parametrize("rule", [functavg.EMA(0.75), functavg.PowerEMA(3.0)], ids=repr)
def test_an_update_can_be_exported(rule: functavg.AveragingRule) -> None:
    old, new = {"a": torch.zeros(2), "b": torch.ones(3)}, {"a": torch.ones(2), "b": torch.zeros(3)}
    updating = Updating(rule, 4)
    exported = torch.export.export(updating, (old, new), strict=False).module()
    assert_equal(exported(old, new), updating(old, new))
    assert_equal(exported(new, old), updating(new, old))
