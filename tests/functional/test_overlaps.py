"""A step in place refuses arrays that overlap without being one, and tensors that cannot take it, before it writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import functavg
from functavg import EMA, AveragedModel, Every, Freeze, Latest, Partition, Several
from functavg.kernels.memory import are_disjoint, check_overlaps, footprint

OVERLAPPING: dict[str, Any] = {
    "a transpose": lambda w: (w, w.T),
    "a row of it": lambda w: (w, w[1]),
    "a flat buffer and a slice": lambda w: (w.reshape(-1), w.reshape(-1)[5:9]),
    "slices that overlap": lambda w: (w.reshape(-1)[0:6], w.reshape(-1)[4:10]),
    "columns that overlap": lambda w: (w[:, :3], w[:, 2:]),
}
APART: dict[str, Any] = {
    "slices": lambda w: (w.reshape(-1)[0:8], w.reshape(-1)[8:16]),
    "columns": lambda w: (w[:, :2], w[:, 2:]),
    "every other one": lambda w: (w.reshape(-1)[::2], w.reshape(-1)[1::2]),
    "nothing": lambda w: (w, w[4:]),
}
ONES: dict[str, Any] = {"torch": torch.ones, "numpy": np.ones}
ZEROS: dict[str, Any] = {"torch": torch.zeros, "numpy": np.zeros}


@pytest.mark.parametrize("case", OVERLAPPING)
@pytest.mark.parametrize("library", ONES)
def test_averages_that_overlap_are_refused_in_place_by_name_and_stay(library: str, case: str) -> None:
    whole = ZEROS[library]((4, 4))
    a, b = OVERLAPPING[case](whole)
    news = {"a": ONES[library](tuple(a.shape)), "b": ONES[library](tuple(b.shape))}
    with pytest.raises(ValueError, match=r"tree\['a'\] and tree\['b'\] overlap in memory.*clone of one, or inplace="):
        functavg.lerp({"a": a, "b": b}, news, 0.5, inplace=True)
    assert not whole.any()
    pure = functavg.lerp({"a": a, "b": b}, news, 0.5)
    assert (pure["a"] == 0.5).all()
    assert (pure["b"] == 0.5).all()


@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("library", ONES)
def test_parts_of_one_memory_that_do_not_overlap_are_averaged_each(library: str, case: str) -> None:
    a, b = APART[case](ZEROS[library]((4, 4)))
    news = {"a": ONES[library](tuple(a.shape)), "b": ONES[library](tuple(b.shape))}
    functavg.lerp({"a": a, "b": b}, news, 0.5, inplace=True)
    assert (a == 0.5).all()
    assert (b == 0.5).all()


def test_interleaved_arrays_that_take_too_long_to_tell_apart_count_as_overlapping() -> None:
    shape = (1049, 1049, 1049)
    one = footprint(2**20, shape, (36674, 61119, 85569), 1)
    other = footprint(2**20 + 64023025, shape, (12223, 12224, 1), 1)
    with pytest.raises(ValueError, match=r"^a and b overlap in memory"):
        check_overlaps([one, other], [], "ab".__getitem__)


@pytest.mark.parametrize("inplace", [False, True])
def test_leaves_without_elements_stand_beside_transposed_ones(inplace: bool) -> None:
    old = {"empty": torch.zeros(2, 0), "transposed": torch.zeros(2, 3).T}
    moved = functavg.lerp(old, {"empty": torch.ones(2, 0), "transposed": torch.ones(3, 2)}, 0.5, inplace=inplace)
    assert moved["empty"].shape == (2, 0)
    assert (moved["transposed"] == 0.5).all()


@pytest.mark.parametrize("library", ONES)
def test_a_new_value_that_reads_what_another_step_writes_is_refused(library: str) -> None:
    a, b = ZEROS[library]((2, 2)), ONES[library]((2, 2))
    with pytest.raises(ValueError, match=r"tree\['[ab]'\] and tree\['[ab]'\] of the params overlap"):
        functavg.lerp({"a": a, "b": b}, {"a": b, "b": a}, 0.5, inplace=True)
    with pytest.raises(ValueError, match=r"tree\['a'\] and tree\['a'\] of the params overlap"):
        functavg.lerp({"a": a}, {"a": a.T}, 0.5, inplace=True)
    assert not a.any()


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_disjoint_exactly_if_no_two_share_a_byte(seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts, sizes = rng.integers(0, 60, 5), rng.integers(0, 9, 5)
    cells = [cell for start, size in zip(starts, sizes, strict=True) for cell in range(start, start + size)]
    assert are_disjoint(starts.tolist(), sizes.tolist()) == (len(cells) == len(set(cells)))


# ---- tensors that cannot take a step


class Packed(torch.Tensor):
    """A tensor that can be copied, but not computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "lerp" in getattr(func, "__name__", ""):
            raise NotImplementedError("packed tensors do no arithmetic")
        return super().__torch_function__(func, types, args, kwargs or {})


def packed(value: float) -> torch.Tensor:
    return torch.full((2,), value).as_subclass(Packed)


RULES: dict[str, Any] = {
    "EMA": EMA(0.5),
    "Every": Every(EMA(0.5), 1),
    "Several": Several({"fast": EMA(0.5), "slow": EMA(0.75)}),
    "Partition": Partition({"all": EMA(0.5)}, lambda name, leaf: "all"),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_class_of_tensors_without_arithmetic_is_named_before_anything_is_written(name: str, inplace: bool) -> None:
    rule = RULES[name]
    state = rule.init({"a": torch.zeros(2), "b": torch.zeros(2)})
    leaves: list[Any] = []

    def pack(tree: Any) -> Any:
        leaves.append(tree["a"])
        return {"a": tree["a"], "b": packed(0.0)}

    several = name == "Several"
    average = {key: pack(tree) for key, tree in state.average.items()} if several else pack(state.average)
    state = state._replace(average=average)
    state = rule.update({"a": torch.ones(2), "b": packed(1.0)}, state)  # the first only copies
    before = [leaf.clone() for leaf in (state.average["fast"]["a"] if several else state.average["a"],)]
    with pytest.raises(TypeError, match=r"tree\['b'\]: cannot average .*packed tensors do no.*Partition.*Freeze\(\)"):
        rule.update({"a": torch.full((2,), 9.0), "b": packed(9.0)}, state, inplace=inplace)
    after = state.average["fast"]["a"] if several else state.average["a"]
    assert torch.equal(before[0], after)


@pytest.mark.parametrize("rest", [Latest(), Freeze()])
def test_such_a_tensor_can_be_copied_or_left_as_it_is(rest: functavg.AveragingRule) -> None:
    rule = Partition({"mean": EMA(0.5), "rest": rest}, {"a": "mean", "b": "rest"})
    state = rule.init({"a": torch.zeros(2), "b": torch.zeros(2)})
    state = state._replace(average={"a": torch.zeros(2), "b": packed(0.0)})
    for _ in range(2):
        state = rule.update({"a": torch.ones(2), "b": packed(1.0)}, state, inplace=True)
    assert state.average["b"].tolist() == ([1.0, 1.0] if rest == Latest() else [0.0, 0.0])


def with_packed() -> nn.ModuleDict:
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), "packed": nn.Module()})
    model["packed"].weight = nn.Parameter(packed(0.0), requires_grad=False)
    return model


def test_an_adapter_names_the_parameter_and_changes_nothing() -> None:
    model = with_packed()
    averaged = AveragedModel(model, module=with_packed(), rule=EMA(0.5))
    averaged.update_parameters(model)
    before = averaged.module["linear"].weight.clone()
    with torch.no_grad():
        model["linear"].weight.add_(1.0)
    with pytest.raises(TypeError, match=r"tree\['packed.weight'\]: cannot average"):
        averaged.update_parameters(model)
    assert torch.equal(averaged.module["linear"].weight, before)
    assert averaged.n_averaged.item() == 1


def test_a_new_value_that_overlaps_an_average_at_another_address_is_refused() -> None:
    buffer = torch.arange(6.0)
    before = buffer.clone()
    with pytest.raises(ValueError, match=r"tree\['a'\] and tree\['b'\] of the params overlap"):
        functavg.lerp(
            {"a": buffer[:4], "b": torch.zeros(2)}, {"a": torch.zeros(4), "b": buffer[1:3]}, 1.0, inplace=True
        )
    with pytest.raises(ValueError, match=r"tree\['a'\] and tree\['a'\] of the params overlap"):
        functavg.lerp({"a": buffer[1:5]}, {"a": buffer[:4]}, 0.5, inplace=True)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lazy_views_of_conjugates_and_negatives_are_written_to(dtype: torch.dtype, weight: float) -> None:
    for old in (torch.ones(3, dtype=torch.complex64).conj(), (1j * torch.ones(3, dtype=torch.complex64)).conj().imag):
        wanted = old.clone() + weight * (5 - old.clone())
        result = functavg.lerp(
            [torch.ones(2, dtype=dtype), old], [torch.ones(2), torch.full((3,), 5.0)], weight, inplace=True
        )
        assert torch.equal(result[1].resolve_neg().resolve_conj(), wanted)


def test_a_memory_that_is_an_array_is_no_empty_one() -> None:
    from dataclasses import dataclass

    from functavg.plan import Lerp

    @dataclass(frozen=True)
    class Counting(functavg.AveragingRule):
        def plan(self, params: Any, state: Any, steps: Any, /) -> Any:
            return functavg.AverageState(state.count + steps, Lerp(state.average, params, 0.5), state.memory + 1)

    rule = Counting()
    state = rule.init({"a": np.ones(2)})._replace(memory=np.zeros(3))
    state = rule.update({"a": np.zeros(2)}, state)
    assert state.memory.tolist() == [1, 1, 1]
    assert state.average["a"].tolist() == [0.5, 0.5]
