"""Greedy soups, and merges that stand in for a decay of the learning rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from functavg.posthoc import combine, greedy_soup, merge_coefficients

# ---- soups


def near(goal: float) -> Callable[[Any], float]:
    return lambda tree: -float(np.abs(np.asarray(tree["w"], np.float64) - goal).sum())


def models(*values: float) -> list[dict[str, np.ndarray]]:
    return [{"w": np.array([float(value)])} for value in values]


def test_a_model_comes_in_if_it_makes_the_mean_better() -> None:
    soup, chosen = greedy_soup(models(5, 1, -2, 3, -1.5), near(0))
    # By score: 1, -1.5, -2, 3, 5. (1 - 1.5) / 2 = -0.25 comes in; -2 makes -0.83, stays out; 3 makes 0.83; 5 makes 1.5.
    assert chosen == [1, 4]
    assert soup["w"].tolist() == [-0.25]


def test_the_mean_is_of_all_that_are_in() -> None:
    soup, chosen = greedy_soup(models(3, 1, -2.9), near(0))
    assert chosen == [1, 2, 0]  # 1; (1 - 2.9) / 2 = -0.95; (1 - 2.9 + 3) / 3
    assert soup["w"].item() == pytest.approx(1.1 / 3)


def test_equal_scores_keep_their_order_and_no_gain_is_no_reason() -> None:
    soup, chosen = greedy_soup(models(1, -1, 1, -1), near(0))
    assert chosen == [0, 1]
    assert soup["w"].item() == 0
    assert greedy_soup(models(2, 2, 2), near(0))[1] == [0]


def test_models_that_diverged_are_left_out() -> None:
    soup, chosen = greedy_soup(models(math.nan, 1, math.nan, -1), near(0))
    assert chosen == [1, 3]
    assert soup["w"].item() == 0


def test_the_score_sees_the_dtypes_of_the_models() -> None:
    seen = []

    def score(tree: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append((tree["w"].dtype, tree["w"].item(), tree["n"].item(), tree["w"] is tree["tied"]))
        return -tree["w"].float().abs().sum()

    trees = []
    for index, value in enumerate((2.0, -2.0)):
        leaf = torch.full((1,), value, dtype=torch.bfloat16)
        trees.append({"w": leaf, "tied": leaf, "n": torch.tensor(index)})
    soup, chosen = greedy_soup(trees, score)
    assert chosen == [0, 1]
    assert seen == [
        (torch.bfloat16, 2.0, 0, True),
        (torch.bfloat16, -2.0, 1, True),
        (torch.bfloat16, 0.0, 1, True),
    ]
    assert (soup["w"].dtype, soup["w"].item(), soup["n"].item()) == (torch.bfloat16, 0.0, 1)
    assert [tree["w"].item() for tree in trees] == [2.0, -2.0]


def test_the_mean_is_kept_in_float32_while_it_grows() -> None:
    trees = [{"w": torch.full((1,), 1 + index / 128, dtype=torch.bfloat16)} for index in range(64)]
    count = itertools.count()
    soup, chosen = greedy_soup(trees, lambda tree: next(count))  # anything more is better
    assert len(chosen) == 64
    mean = sum(tree["w"].float() for tree in trees) / 64
    assert soup["w"].item() == mean.to(torch.bfloat16).item()


def test_one_model_at_a_time_is_asked_for() -> None:
    class Files(Sequence[Any]):
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> Any:
            if not 0 <= index < 3:
                raise IndexError(index)
            self.asked.append(index)
            return {"w": np.array([1.0, -1.0, 5.0][index])}

    files = Files()
    soup, chosen = greedy_soup(files, near(0))
    assert (soup["w"].item(), chosen) == (0, [0, 1])
    assert files.asked == [0, 1, 2, 0, 1, 2]
    assert greedy_soup(iter(models(1, -1)), near(0))[1] == [0, 1]


def test_a_single_model_is_a_soup_of_its_own_memory() -> None:
    (tree,) = models(1)
    soup, chosen = greedy_soup([tree], near(0))
    assert chosen == [0]
    soup["w"] += 1
    assert tree["w"].item() == 1


@pytest.mark.parametrize(
    ("trees", "score", "error", "message"),
    [
        ([], near(0), ValueError, "trees must hold at least one tree with a score above -inf, got the scores "),
        (models(math.nan), near(0), ValueError, r"got the scores \[-inf\]"),
        (models(1)[0], near(0), TypeError, "trees must be a sequence or an iterator of trees, got dict"),
        (models(1), 3, TypeError, "score must be callable, got 3 of int"),
        (models(1), lambda tree: "good", TypeError, r"score\(trees\[0\]\) must be a number, got 'good' of str"),
        (models(1), lambda tree: None, TypeError, r"score\(trees\[0\]\) must be a number, got None"),
        ([{"w": np.ones(1)}, {"v": np.ones(1)}], lambda tree: 0, ValueError, r"trees\[1\]: .*missing tree\['w'\]"),
    ],
)
def test_soup_arguments_are_checked(trees: Any, score: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        greedy_soup(trees, score)


# ---- merges


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [0.2, 0.2, 0.2, 0.2, 0.2]),
        ("1-sqrt", [0.4472, 0.1852, 0.1421, 0.1198, 0.1056]),
        ("cosine", [0.0955, 0.25, 0.309, 0.25, 0.0955]),
        (lambda x: 1 - x**2, [0.04, 0.12, 0.2, 0.28, 0.36]),
        (lambda x: 1 - 0.9 * x, [0.18, 0.18, 0.18, 0.18, 0.28]),
    ],
    ids=["linear", "1-sqrt", "cosine", "square", "to a tenth"],
)
def test_merge_coefficients(shape: Any, expected: list[float]) -> None:
    found = merge_coefficients(shape, 5)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
@pytest.mark.parametrize("shape", ["linear", "1-sqrt", "cosine"])
def test_merge_coefficients_sum_to_one(shape: str, n: int) -> None:
    assert math.fsum(merge_coefficients(shape, n)) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt", "cosine"])
def test_a_merge_acts_as_the_decay(shape: str) -> None:
    """With gradients that do not depend on the weights, it is the decayed run exactly."""
    factor = {
        "linear": lambda x: 1 - x,
        "1-sqrt": lambda x: 1 - x**0.5,
        "cosine": lambda x: 0.5 + 0.5 * np.cos(np.pi * x),
    }
    updates = np.random.default_rng(0).normal(size=(8, 3))
    start = np.ones(3)
    constant = start + updates.cumsum(0)
    decayed = start + sum(factor[shape](index / 8) * update for index, update in enumerate(updates))
    np.testing.assert_allclose(combine(list(constant), merge_coefficients(shape, 8)), decayed, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "n", "error", "message"),
    [
        ("sqrt", 3, ValueError, "shape must be one of 'linear', 'cosine', '1-sqrt' or a function, got 'sqrt'"),
        (None, 3, TypeError, "shape must be a string or callable, got None of NoneType"),
        ("linear", 0, ValueError, "n must be an integer of at least 1, got 0"),
        ("linear", 2.5, TypeError, "n must be an integer of at least 1, got 2.5 of float"),
        (lambda x: math.nan, 3, ValueError, r"shape\(0\) must be finite, got nan"),
        (lambda x: 1 if x < 0.5 else math.inf, 2, ValueError, r"shape\(0.5\) must be finite, got inf"),
        (lambda x: x, 3, ValueError, r"shape\(0\) must be 1, .*, got 0.0"),
        (lambda x: "1", 3, TypeError, r"shape\(0\) must be a number, got '1' of str"),
    ],
)
def test_merge_arguments_are_checked(shape: Any, n: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_coefficients(shape, n)
