"""Counts that are 0-d tensors: written in place by an update in place, never read by the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import functavg
from functavg import AverageState, trees
from tests.composition import nests
from tests.tables import jnp

FUNCTIONS = {"AvgFn", "AvgFn-mean"}
each_nest = pytest.mark.parametrize("name", nests.ON_DEVICE)

STEPS = [1, 2, 1, 3, 1, 4]


def params(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return what ``nests.iterate`` returns as tensors; the third one of the stream has a NaN."""
    tensors = {name: torch.tensor(array, device=device) for name, array in nests.iterate(seed).items()}
    if seed == 3:
        tensors["b"].fill_(torch.nan)
    return tensors


def started(rule: functavg.AveragingRule, device: str = "cpu", dtype: torch.dtype = torch.int64) -> AverageState[Any]:
    """Return a state whose counts are all on the device: those in memory follow that of the state at a first update."""
    state = rule.init(params(0, device))
    state = state._replace(count=torch.zeros((), dtype=dtype, device=device))
    return rule.update(params(1, device), state, steps=STEPS[0], inplace=True)


def counts(state: AverageState[Any]) -> list[torch.Tensor]:
    """Return the counts of a state, which are the integers of no dimension in it."""
    found = [leaf for leaf in trees.flatten((state.count, state.memory))[0] if not leaf.dtype.is_floating_point]
    assert all(leaf.ndim == 0 for leaf in found)
    return found


def assert_average(state: AverageState[Any], nest: Any, updates: int) -> None:
    """Assert that a state is what the oracle says of the first updates of the stream."""
    stream = [{name: tensor.numpy() for name, tensor in params(seed).items()} for seed in range(updates + 1)]
    told = list(zip(STEPS, stream[1:], strict=False))
    assert int(state.count) == nests.count(nest, list(stream[0]), told)
    wanted = nests.average(nest, stream[0], told)
    leaves, spec = trees.flatten(state.average)
    wanted_leaves, wanted_spec = trees.flatten(wanted)
    for leaf, value in zip(leaves, trees.align(spec, wanted_spec, wanted_leaves), strict=True):
        np.testing.assert_allclose(leaf.cpu().numpy(), value, rtol=1e-12)


# ---- where they are written


@each_nest
def test_an_update_in_place_writes_every_count_in_place(name: str) -> None:
    """The same tensors come back, with the right values after each update."""
    rule = nests.rule_of(nests.ON_DEVICE[name])
    state = started(rule)
    kept = counts(state)
    assert_average(state, nests.ON_DEVICE[name], 1)
    for seed, steps in enumerate(STEPS[1:], start=2):
        before = state
        state = rule.update(params(seed), state, steps=steps, inplace=True)
        assert all(now is then for now, then in zip(counts(state), kept, strict=True))
        assert before.count is state.count
        assert_average(state, nests.ON_DEVICE[name], seed)


@each_nest
def test_a_pure_update_leaves_every_count_as_it_was(name: str) -> None:
    rule = nests.rule_of(nests.ON_DEVICE[name])
    before = started(rule)
    kept = counts(before)
    values = [int(count) for count in kept]
    after = rule.update(params(2), before, steps=STEPS[1])
    assert [int(count) for count in kept] == values
    assert after.count is not before.count
    assert_average(after, nests.ON_DEVICE[name], 2)


@each_nest
def test_an_update_that_fails_leaves_every_count_as_it_was(name: str) -> None:
    """Nothing of it is written before all of it is known to fit."""
    rule = nests.rule_of(nests.ON_DEVICE[name])
    state = started(rule)
    kept = counts(state)
    values = [int(count) for count in kept]
    bad = params(2) | {"c": torch.ones(3, 2, dtype=torch.float64)}
    with pytest.raises(ValueError, match="expected shape"):
        rule.update(bad, state, steps=9, inplace=True)
    assert [int(count) for count in kept] == values


def test_a_function_that_raises_half_way_leaves_the_count_as_it_was() -> None:
    """The count is written last."""
    calls: list[int] = []

    def fails_at_the_fifth(average: Any, new: Any, count: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise ArithmeticError
        return new

    rule = functavg.AvgFn(fails_at_the_fifth)
    state = started(rule)
    with pytest.raises(ArithmeticError):
        rule.update(params(2), state, inplace=True)
    assert int(state.count) == 1


def test_a_count_keeps_its_dtype() -> None:
    """It is written to, not replaced."""
    rule = functavg.Every(functavg.SWA(), 2)
    state = started(rule, dtype=torch.int32)
    state = rule.update(params(2), state, steps=torch.tensor(2), inplace=True)
    assert int(state.count) == 3
    assert state.count.dtype == state.memory[0].dtype == torch.int32


def test_a_count_follows_to_the_device_where_it_is_computed() -> None:
    """To bring it back in place, the host would have to wait for that device."""
    state = AverageState(torch.tensor(3), torch.zeros(2, device="meta"))
    after = functavg.SWA().update(
        torch.ones(2, device="meta"), state, steps=torch.ones((), dtype=torch.int64, device="meta"), inplace=True
    )
    assert after.count.is_meta
    assert state.count.item() == 3


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
@pytest.mark.parametrize("updated_in_inference_mode", [False, True])
def test_a_count_is_written_in_and_outside_of_inference_mode(
    made_in_inference_mode: bool, updated_in_inference_mode: bool
) -> None:
    rule = functavg.SWA()
    with torch.inference_mode(made_in_inference_mode):
        count = torch.tensor(1)
    state = AverageState(count, torch.zeros(2))
    with torch.inference_mode(updated_in_inference_mode):
        state = rule.update(torch.ones(2), state, inplace=True)
    assert state.count is count
    assert count.item() == 2


def test_a_memory_that_was_loaded_may_have_other_containers() -> None:
    """A dict in another order, a list where a tuple was."""
    rule = functavg.Several({"b": functavg.LAWA(2), "a": functavg.SWA()})
    state = rule.update(torch.ones(2), rule.init(torch.zeros(2))._replace(count=torch.tensor(0)))
    (_, average, (seen, ring)), mean = state.memory["b"], state.memory["a"]
    loaded = {"a": mean, "b": AverageState(torch.tensor(1), average, [seen, list(ring)])}
    after = rule.update(torch.ones(2), state._replace(memory=loaded), inplace=True)
    assert after.memory["a"].count is mean.count
    assert after.memory["b"].memory[0] is seen
    assert (mean.count.item(), seen.item()) == (2, 2)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", [name for name in nests.ON_DEVICE if name not in FUNCTIONS])
def test_members_of_an_ensemble_count_for_themselves(name: str, inplace: bool) -> None:
    """Under vmap, over states stacked leaf by leaf; two members at different steps, one with a NaN."""
    rule = nests.rule_of(nests.ON_DEVICE[name])
    members = [started(rule), rule.update(params(2), started(rule), steps=STEPS[1])]
    stack = tree_map(lambda *leaves: torch.stack(leaves), *members)
    places = [leaf.data_ptr() for leaf in tree_leaves(stack)]
    news = [params(2), params(3)]
    stacked = {leaf: torch.stack([new[leaf] for new in news]) for leaf in news[0]}
    before = [leaf.clone() for leaf in tree_leaves(stack)]
    step = torch.func.vmap(lambda params, state: rule.update(params, state, steps=2, inplace=inplace))
    after = step(stacked, stack)
    if inplace:
        assert [leaf.data_ptr() for leaf in tree_leaves(after)] == places
    else:
        assert all(leaf.equal(then) for leaf, then in zip(tree_leaves(stack), before, strict=True))
    for index, (new, member) in enumerate(zip(news, members, strict=True)):
        wanted = rule.update(new, member, steps=2)
        got = tree_map(lambda leaf, index=index: leaf[index], after)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.skipif(jnp is None, reason="jax is not installed")
def test_immutable_counts_are_replaced() -> None:
    """What JAX holds cannot be written to, and does not change."""
    rule = functavg.Every(functavg.SWA(), 2)
    before = rule.init(jnp.zeros(2))._replace(count=jnp.asarray(0))
    after = rule.update(jnp.ones(2), before, steps=2, inplace=True)
    assert (int(before.count), int(after.count)) == (0, 2)


# ---- who reads them


class NoReads(TorchDispatchMode):
    """Refuses every operation whose result depends on values that the host has to wait for."""

    refused = ("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.refused:
            raise AssertionError(f"the host reads a device: {func}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [bool, int, torch.nonzero, lambda tensor: tensor.equal(tensor)])
def test_a_read_would_be_noticed(read: Callable[[torch.Tensor], Any]) -> None:
    with NoReads(), pytest.raises(AssertionError, match="the host reads a device"):
        read(torch.tensor(1))


@pytest.mark.parametrize("inplace", [False, True])
@each_nest
def test_no_update_reads_what_a_device_counts(name: str, inplace: bool) -> None:
    rule = nests.rule_of(nests.ON_DEVICE[name])
    state = started(rule)
    news = [params(seed) for seed in range(2, 5)]
    with NoReads():
        for new in news:
            state = rule.update(new, state, inplace=inplace)
    assert int(state.memory[0] if name == "SkipNonFinite" else 1) == 1


@pytest.mark.parametrize("inplace", [False, True])
@each_nest
def test_updates_run_where_nothing_has_a_value(name: str, inplace: bool) -> None:
    """On the meta device, whose tensors can be read by nobody."""
    rule = nests.rule_of(nests.ON_DEVICE[name])
    state = started(rule, "meta")
    for seed in range(2, 5):
        state = rule.update(params(seed, "meta"), state, inplace=inplace)
    assert all(leaf.is_meta for leaf in trees.flatten(state)[0])


# ---- CUDA graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in nests.ON_DEVICE if name not in FUNCTIONS])
def test_a_replayed_cuda_graph_counts_on(name: str) -> None:
    """An update captured once gives at each replay what an eager one gives; the params are written to in place."""
    rule = nests.rule_of(nests.ON_DEVICE[name])

    def mixed(seed: int) -> dict[str, torch.Tensor]:
        tensors = params(seed, "cuda")
        return tensors | {"a": tensors["a"].bfloat16(), "n": torch.tensor(seed, device="cuda")}

    def partitioned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {leaf: tensor for leaf, tensor in tensors.items() if name != "Partition" or leaf in nests.SHAPES}

    read = partitioned(mixed(0))
    eager = rule.init(read)
    state = rule.init(read)._replace(count=torch.zeros((), dtype=torch.int64, device="cuda"))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # the first one also brings the counts in memory onto the device
            state = rule.update(read, state, inplace=True)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        eager = rule.update(read, eager)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rule.update(read, state, inplace=True)
    before, after = trees.flatten(state)[0], trees.flatten(captured)[0]
    assert all(new is old for new, old in zip(after, before, strict=True))

    for seed in range(1, 6):
        new = partitioned(mixed(seed))
        for leaf, tensor in new.items():
            read[leaf].copy_(tensor)
        graph.replay()
        eager = rule.update(new, eager)
        assert int(state.count) == eager.count
        torch.testing.assert_close(state.average, eager.average, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_two_counts_that_were_one_tensor_and_are_no_longer_part() -> None:
    """A partition of one label has its count; grown by another, it has the least of two."""
    rule = functavg.Partition({"x": functavg.SWA(), "y": functavg.SWA()}, lambda name, leaf: name)
    averages = []
    for inplace in (False, True):
        state = rule.init({"x": torch.zeros(1)})._replace(count=torch.tensor(0))
        for value in (1.0, 2.0):
            state = rule.update({"x": torch.tensor([value])}, state)
        state = rule.extend({"x": torch.zeros(1), "y": torch.zeros(1)}, state)
        for value in (3.0, 4.0):
            params = {name: torch.tensor([value]) for name in "xy"}
            state = rule.update(params, state, inplace=inplace)
        assert [int(state.memory[label].count) for label in "xy"] == [4, 2]
        averages.append([state.average[name].item() for name in "xy"])
    assert averages == [[2.5, 3.5]] * 2


# ---- of which library they are


MIXES = {
    "torch and jax": (lambda: torch.ones(2), jnp.asarray, "jaxlib.ArrayImpl"),
    "jax and torch": (lambda: jnp.ones(2), torch.tensor, "torch.Tensor"),
    "torch and meta": (lambda: torch.ones(2), lambda value: torch.tensor(value, device="meta"), "on the meta device"),
    "numpy and meta": (lambda: np.ones(2), lambda value: torch.tensor(value, device="meta"), "on the meta device"),
    "both and jax": (lambda: [np.ones(2), torch.ones(2)], jnp.asarray, "jaxlib.ArrayImpl"),
}


@pytest.mark.skipif(jnp is None, reason="needs jax")
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", nests.ON_DEVICE)
def test_a_count_that_leaves_cannot_be_computed_with_is_named(name: str, mix: str) -> None:
    """Nothing is changed then, and the host number works."""
    make, lift, got = MIXES[mix]
    rule = nests.rule_of(nests.ON_DEVICE[name])
    params = {leaf: make() for leaf in nests.iterate(0)}
    state = rule.init(params)
    advice = rf".* a 0-d array that leaves of .* can be computed with, got .*{got}.*\. Read it into a plain number"
    for inplace in (False, True):
        with pytest.raises(TypeError, match=r"^state\.count must be a plain number, or" + advice):
            rule.update(params, state._replace(count=lift(3)), inplace=inplace)
        with pytest.raises(TypeError, match="^steps must be a plain number, or" + advice):
            rule.update(params, state, steps=lift(3), inplace=inplace)
    assert rule.update(params, state, steps=3).count in (0, 1, 3)


@pytest.mark.skipif(jnp is None, reason="needs jax")
@pytest.mark.parametrize("mix", MIXES)
def test_a_weight_that_leaves_cannot_be_computed_with_is_named(mix: str) -> None:
    make, lift, got = MIXES[mix]
    tree = {"a": make()}
    for update in (
        lambda: functavg.lerp(tree, tree, lift(0.5), inplace=True),
        lambda: functavg.WeightFn(lambda count, steps: lift(0.5)).update(tree, functavg.SWA().init(tree)),
        lambda: functavg.EMA(lambda u: lift(0.5)).update(tree, functavg.SWA().init(tree)),
    ):
        with pytest.raises(TypeError, match=rf"^the weight must be a plain number.*, got .*{got}"):
            update()


@pytest.mark.skipif(jnp is None, reason="needs jax")
def test_numpy_takes_counts_of_any_library() -> None:
    for lift in (torch.tensor, jnp.asarray):
        state = functavg.SWA().init(np.zeros(2))._replace(count=lift(1))
        assert functavg.SWA().update(np.ones(2), state).average.tolist() == [0.5, 0.5]
