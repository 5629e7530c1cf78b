"""Weighted means of trees: values, leaf policy, one tree at a time, and every error."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functavg import SWA
from functavg.posthoc import combine
from tests.tables import KINDS, LIBRARIES, TREES, assert_close, dtype_name, made, read, stream

FLOATS = st.floats(-1e6, 1e6, allow_subnormal=False)
WEIGHTS = st.lists(st.integers(-5000, 5000).map(lambda number: number / 100), min_size=1, max_size=6).filter(
    lambda weights: abs(math.fsum(weights)) > 0.01 * sum(map(abs, weights)) > 0
)

# ---- the small inputs of the field


def test_o1_shared_leaves_of_checkpoint_files_stay_shared(tmp_path: Any) -> None:
    for name in "ab":
        shared = torch.ones(3)
        torch.save({"emb": shared, "head": shared}, tmp_path / f"{name}.pt")
    result = combine(torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in "ab")
    assert result["emb"] is result["head"]
    assert result["emb"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [None, [1, 2, 3], [-1, 3, -1], [1, -3, 3]])
def test_shared_leaves_are_averaged_once(dtype: torch.dtype, weights: list[float] | None) -> None:
    trees = [dict.fromkeys("ab", torch.full((3,), value, dtype=dtype)) for value in (1.0, 2.0, 5.0)]
    result = combine(trees, weights)
    assert result["a"] is result["b"]
    assert result["a"].dtype == dtype
    wanted = np.average([1, 2, 5], weights=weights)
    assert result["a"].tolist() == pytest.approx([wanted] * 3, rel=4e-3 if dtype == torch.bfloat16 else 1e-6)


def test_leaves_that_are_shared_no_longer_part() -> None:
    shared = torch.ones(2)
    result = combine([{"a": shared, "b": shared}, {"a": torch.ones(2), "b": torch.full((2,), 3.0)}])
    assert (result["a"].tolist(), result["b"].tolist()) == ([1, 1], [2, 2])


def test_o2_integer_counters_take_the_newest() -> None:
    result = combine([{"n": torch.tensor(20)}, {"n": torch.tensor(21)}])
    assert result["n"].dtype == torch.int64
    assert result["n"].item() == 21


def test_o3_300_bfloat16_checkpoints_of_one() -> None:
    result = combine({"w": torch.ones(4, dtype=torch.bfloat16)} for _ in range(300))
    assert result["w"].dtype == torch.bfloat16
    assert result["w"].tolist() == [1.0] * 4


def test_low_precision_does_not_stall() -> None:
    values = [torch.full((), 1.0 if index < 150 else 2.0, dtype=torch.bfloat16) for index in range(300)]
    assert combine(values).item() == 1.5


# ---- values, on every library and kind of leaf


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 4.0, 1.0], [2.0, -1.5, 1.0, -0.25], [-3.0, 0.0, 4.0, 0.0]])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_leaf(kind: str, weights: list[float] | None) -> None:
    leaf_kind = KINDS[kind]
    trees = stream(TREES["dict"], leaf_kind.kind, 4)
    result = combine((made(leaf_kind, tree) for tree in trees), weights)
    shares = np.full(4, 0.25) if weights is None else np.array(weights) / sum(weights)
    for key, leaf in result.items():
        assert dtype_name(leaf) == dtype_name(leaf_kind.make(trees[0][key]))
        if leaf_kind.kind in "iub":
            newest = max(np.flatnonzero(shares))
            np.testing.assert_array_equal(read(leaf), trees[newest][key])
            continue
        wanted = sum(share * tree[key] for share, tree in zip(shares, trees, strict=True))
        in_dtype = read(leaf_kind.make(wanted))
        np.testing.assert_allclose(read(leaf), in_dtype, rtol=0.13 if "float8" in kind else 1e-2, atol=0.02)
        if dtype_name(leaf) in ("float32", "float64", "complex64", "complex128"):
            np.testing.assert_allclose(read(leaf), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_tree(library: str, tree: str) -> None:
    kind = KINDS[library]
    trees = stream(TREES[tree], "f", 3)
    result = combine([made(kind, each) for each in trees], [1, -2, 2])
    import optree

    wanted = optree.tree_map(lambda one, two, three: one - 2 * two + 2 * three, *trees)
    assert_close(result, wanted, 2e-6)


@given(value=FLOATS, weights=WEIGHTS)
def test_a_constant_comes_out_exactly(value: float, weights: list[float]) -> None:
    trees = [{"w": np.full(2, value), "x": np.full(2, value, np.float32)} for _ in weights]
    result = combine(trees, weights)
    assert result["w"].tolist() == [value] * 2
    assert result["x"].tolist() == [np.float32(value)] * 2


@given(values=st.data(), weights=WEIGHTS)
def test_it_is_the_weighted_sum(values: st.DataObject, weights: list[float]) -> None:
    trees = [np.array(values.draw(FLOATS)) for _ in weights]
    total = math.fsum(weights)
    wanted = math.fsum(weight * float(tree) for weight, tree in zip(weights, trees, strict=True)) / total
    largest = max(abs(float(tree)) for tree in trees)
    amplification = sum(map(abs, weights)) / abs(total)
    assert float(combine(trees, weights)) == pytest.approx(wanted, abs=1e-14 * amplification * largest + 1e-300)


@given(weights=st.lists(st.integers(0, 99), min_size=1, max_size=6).filter(any), factor=st.floats(0.01, 100))
def test_a_mean_stays_between_the_least_and_the_largest_whatever_the_scale(weights: list[int], factor: float) -> None:
    trees = [np.array(float(index)) for index in range(len(weights))]
    result = float(combine(trees, weights))
    assert 0 <= result <= len(weights) - 1
    assert float(combine(trees, [factor * weight for weight in weights])) == pytest.approx(result, rel=1e-12)


def test_partial_sums_of_weights_may_vanish() -> None:
    trees = [np.array(float(index)) for index in range(4)]
    assert float(combine(trees, [1, -1, 1, 1])) == pytest.approx((0 - 1 + 2 + 3) / 2)
    assert float(combine(trees, [1e-9, 1, -1, 1])) == pytest.approx((1 - 2 + 3) / (1 + 1e-9))


def test_accumulating_in_float64_keeps_more_digits() -> None:
    generator = np.random.default_rng(0)
    trees = [generator.normal(size=1000).astype(np.float32) for _ in range(16)]
    weights = generator.normal(size=16)
    weights[0] += 0.01 - weights.sum()  # much is amplified
    wanted = sum(weight * tree.astype(np.float64) for weight, tree in zip(weights, trees, strict=True)) / weights.sum()
    plain, careful = combine(trees, weights), combine(trees, weights, dtype="float64")
    assert plain.dtype == careful.dtype == np.float32
    np.testing.assert_array_equal(careful, wanted.astype(np.float32))
    assert np.abs(plain - wanted).max() > 3 * np.abs(careful - wanted).max()


def test_integers_come_from_the_newest_tree_that_has_a_weight() -> None:
    trees = [{"n": np.array(index), "w": np.array(float(index))} for index in range(4)]
    for weights, newest in (([1, 1, 1, 1], 3), ([3, 1, 1, -1], 3), ([-1, -1, -1, 5], 3), ([2, -1, 0, 0], 1)):
        assert combine(trees, weights)["n"] == newest


def test_the_newest_tree_sets_the_dtypes() -> None:
    result = combine([{"w": torch.ones(2)}, {"w": torch.full((2,), 2.0, dtype=torch.bfloat16)}])
    assert result["w"].dtype == torch.bfloat16
    assert result["w"].tolist() == [1.5, 1.5]
    assert combine([{"w": torch.ones(2)}, {"w": torch.ones(2).bfloat16()}], [1, 0])["w"].dtype == torch.float32


def test_a_single_tree_is_copied() -> None:
    tree = {"w": torch.nn.Parameter(torch.ones(2)), "n": 3, "half": torch.ones(1, dtype=torch.float16)}
    result = combine([tree])
    assert not result["w"].requires_grad
    result["w"] += 1
    result["half"] += 1
    assert tree["w"].tolist() == [1, 1]
    assert tree["half"].tolist() == [1]
    assert result["n"] == 3


def test_nothing_that_was_passed_changes() -> None:
    trees = [{"w": torch.full((2,), float(value))} for value in range(4)]
    combine(trees, [1, -2, 3, -1])
    assert [tree["w"].tolist() for tree in trees] == [[value] * 2 for value in range(4)]


def test_one_tree_at_a_time_is_enough() -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    def load() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal most
        for value in range(20):
            most = max(most, sum(ref() is not None for ref in alive))
            leaf = torch.full((2,), float(value))
            alive.append(weakref.ref(leaf))
            yield {"w": leaf}
            del leaf

    assert combine(load(), np.ones(20))["w"].tolist() == [9.5, 9.5]
    assert most <= 1


# ---- errors


def nothing() -> Iterator[Any]:
    raise AssertionError("nothing is to be loaded")
    yield


@pytest.mark.parametrize(
    ("trees", "weights", "error", "message"),
    [
        (dict.fromkeys("ab", 1.0), None, TypeError, "trees must be a sequence or an iterator of trees, got dict"),
        (SWA().init(np.ones(2)), None, TypeError, "trees must be .* of trees, got AverageState"),
        (3.0, None, TypeError, "trees must be .* of trees, got float"),
        ([], None, ValueError, "trees must hold at least one tree, got none"),
        ([], [], ValueError, "trees must hold at least one tree, got none"),
        ([1.0, 2.0], [1.0], ValueError, "weights must hold one number for each tree, got 1 for more trees"),
        ([1.0], [1.0, 2.0], ValueError, "weights must hold one number for each tree, got 1 more than trees"),
        (nothing(), [1.0, math.nan], ValueError, r"weights\[1\] must be finite, got nan"),
        (nothing(), [math.inf], ValueError, r"weights\[0\] must be finite, got inf"),
        (nothing(), [1.0, "2"], TypeError, r"weights\[1\] must be a number, got '2' of str"),
        (nothing(), [1.0, -1.0], ValueError, r"weights must have a sum other than 0, .*, got \[1.0, -1.0\]"),
        (nothing(), [0.1, 0.2, -0.3], ValueError, "weights must have a sum other than 0"),
        (nothing(), [0, 0], ValueError, "weights must have a sum other than 0"),
    ],
)
def test_arguments_are_checked(trees: Any, weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        combine(trees, weights)


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 2, -1], [-1, 1, 1]])
@pytest.mark.parametrize(
    ("third", "error", "message"),
    [
        ({"b": np.ones(2)}, ValueError, r"trees\[2\]: .*missing tree\['a'\]; unexpected tree\['b'\]"),
        ({"a": np.ones(3)}, ValueError, r"trees\[2\]: tree\['a'\]: expected shape \(2,\), got \(3,\)"),
        ({"a": "text"}, TypeError, r"trees\[2\]: tree\['a'\]: expected a numpy array or a number, got str"),
        ({"a": np.ones(2) * 1j}, TypeError, r"trees\[2\]: tree\['a'\]: expected float64 or what it can hold"),
    ],
)
def test_trees_that_do_not_fit_are_named(third: Any, error: type[Exception], message: str, weights: Any) -> None:
    with pytest.raises(error, match=message):
        combine([{"a": np.ones(2)}, {"a": np.ones(2)}, third], weights)


def test_leaves_that_are_no_arrays_are_named() -> None:
    with pytest.raises(TypeError, match=r"trees\[0\]: tree\['config'\]: cannot average str"):
        combine([{"config": "text"}])


@pytest.mark.parametrize("path", ["step-1.safetensors", Path("step-1.pt")])
def test_paths_are_refused_with_the_name_of_what_averages_files(path: Any) -> None:
    with pytest.raises(
        TypeError, match=r"trees\[0\] must be a tree .*got the path .*functavg.checkpoints.average .*safetensors"
    ):
        combine([path, path])
    with pytest.raises(TypeError, match="trees must be a sequence or an iterator of trees, got"):
        combine(path)


def test_whole_checkpoints_are_refused_with_the_name_of_what_finds_the_weights_in_files() -> None:
    checkpoint = {"model": {"w": np.ones(2)}, "git": "0123abc"}
    with pytest.raises(
        TypeError, match=r"trees\[0\]: tree\['git'\]: .*pass the dict of weights; functavg.checkpoints.average"
    ):
        combine([checkpoint])


def test_what_loading_raises_comes_through() -> None:
    def load() -> Iterator[Any]:
        yield np.ones(1)
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match=r"^gone$"):
        combine(load())


def test_dtype_is_checked() -> None:
    with pytest.raises(ValueError, match="dtype must be real or complex floating of at least 16 bits, got int8"):
        combine([np.ones(1)], dtype="int8")


# ---- windows


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_a_window_from_two_means(make: Callable[..., Any]) -> None:
    values = np.random.default_rng(0).normal(size=(50, 3))
    early, late = (make(values[:count].mean(0)) for count in (20, 50))
    np.testing.assert_allclose(np.asarray(combine([early, late], weights=[-20, 50])), values[20:].mean(0), rtol=1e-12)


def test_a_window_from_two_states_of_a_mean() -> None:
    """Integers are those of the later one."""
    rule = SWA()
    state = rule.init({"w": np.zeros(2), "n": np.array(0)})
    states = []
    for step in range(1, 31):
        state = rule.update({"w": np.full(2, float(step)), "n": np.array(step)}, state)
        states.append(state)
    early, late = states[9], states[-1]
    result = combine([early.average, late.average], weights=[-early.count, late.count])
    np.testing.assert_allclose(result["w"], np.mean(range(11, 31)))
    assert result["n"] == 30


def test_a_window_from_the_beginning_is_the_mean() -> None:
    """A mean of nothing is not looked at, whatever it holds; dtypes are those of the later mean."""
    early, late = {"w": torch.tensor([math.nan])}, {"w": torch.tensor([1.5], dtype=torch.bfloat16)}
    result = combine([early, late], weights=[0, 10])
    assert result["w"].dtype == torch.bfloat16
    assert result["w"].item() == 1.5
    assert result["w"] is not late["w"]


@given(value=FLOATS, early=st.integers(0, 10**9), length=st.integers(1, 10**9))
def test_a_constant_window_comes_out_exactly(value: float, early: int, length: int) -> None:
    assert combine([np.array(value), np.array(value)], weights=[-early, early + length]) == value


# ---- progress


@pytest.mark.parametrize(
    ("make", "weights", "total"), [(list, None, 3), (iter, [1, 0, 1], 3), (iter, None, None)], ids=str
)
def test_each_tree_is_reported(make: Callable[..., Any], weights: Any, total: int | None) -> None:
    reports: list[Any] = []
    combine(make([np.ones(2)] * 3), weights, progress=lambda done, total: reports.append((done, total)))
    assert reports == [(1, total), (2, total), (3, total)]


def test_progress_is_checked_before_anything_is_loaded() -> None:
    with pytest.raises(TypeError, match="progress must be a bool or a function"):
        combine(nothing(), progress=3)
