"""Weighted sums of trees, of which only one need be in memory at a time."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from functavg import trees as structure
from functavg.checks import check_integer, check_number
from functavg.functional import cast_like
from functavg.plan import Lerp, copy_leaves, run
from functavg.state import AverageState, PyTree, T

CANCELLED = 1e-12
"""Weights whose sum is smaller than this, relative to that of their magnitudes, sum to zero up to rounding."""


def combine(trees: Iterable[T], weights: Iterable[float] | None = None, *, dtype: Any = None) -> T:
    """Return the weighted mean of trees: ``sum_i weights[i] * trees[i] / sum_i weights[i]``.

    Weights may be negative, as those that :func:`solve` finds are: the trees of positive weight and those of negative
    weight are averaged apart, and one step leads from the one mean through the other. So a constant comes out exactly,
    and only rounding errors are amplified, by ``sum_i |w_i| / |sum_i w_i|``.

    Args:
        trees: pytrees of one structure, oldest first; a generator that loads one after the other is enough. Integers
            and bools take the value of the newest tree whose weight is not 0, leaves that share memory stay shared.
        weights: one finite number for each tree, whose sum is not 0; they need not sum to 1. Default: all equal.
        dtype: the dtype to accumulate in, such as ``"float64"``. Default: that of the leaves, and float32 for those of
            less than 32 bits.

    Returns:
        The mean, in the dtypes and on the devices of the newest tree whose weight is not 0. It shares no memory with
        the trees.

    Raises:
        TypeError: ``trees`` is itself a tree, a weight is no number, or a leaf is no array, named by its path.
        ValueError: there is no tree, not one weight for each, or weights that are not finite or sum to 0; a tree does
            not have the structure of the first, what differs is named by its path.

    Example:
        >>> import functavg, numpy as np
        >>> checkpoints = ({"w": np.full(2, value)} for value in (1.0, 2.0, 6.0))
        >>> functavg.posthoc.combine(checkpoints)
        {'w': array([3., 3.])}
        >>> functavg.posthoc.combine([np.array(1.0), np.array(2.0)], [-1, 2])
        array(3.)

    Source: Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves accuracy without
    increasing inference time, 2022; Karras et al., 2024 (EDM2) for sums with negative weights.
    """
    if isinstance(trees, (Mapping, AverageState)) or not isinstance(trees, Iterable):
        raise TypeError(f"trees must be a sequence or an iterator of trees, got {type(trees).__name__}")
    numbers = itertools.repeat(1.0) if weights is None else iter(_checked(weights))
    means = _Means(dtype)
    newest: Any = None
    for index, tree in enumerate(trees):
        weight = next(numbers, None)
        if weight is None:
            raise ValueError(f"weights must hold one number for each tree, got {index} for more trees")
        if weight != 0:
            with naming(f"trees[{index}]"):
                means.add(tree, weight)
            newest = tree
    if weights is not None and (left := len(list(numbers))):
        raise ValueError(f"weights must hold one number for each tree, got {left} more than trees")
    if not means.trees:
        raise ValueError("trees must hold at least one tree, got none")
    result: T = returned(means.joined(), newest)
    return result


class _Means:
    """The mean of the trees of positive weight (True), and that of the trees of negative weight (False)."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.weights = {True: 0.0, False: 0.0}
        self.trees: dict[bool, PyTree] = {}
        self.newest = True

    def add(self, tree: PyTree, weight: float) -> None:
        side = self.newest = weight > 0
        self.weights[side] += weight
        if side in self.trees:
            self.trees[side] = stepped(self.trees[side], tree, weight / self.weights[side])
        elif self.trees:  # a copy in the form of the other mean, which the tree has to fit
            self.trees[side] = run(Lerp(self.trees[not side], tree, 1.0))
        else:
            self.trees[side] = copy_leaves(tree, dtype=self.dtype)

    def joined(self) -> PyTree:
        """Return the mean of all; the two are used up."""
        if len(self.trees) == 1:
            return self.trees[self.newest]
        # Towards the side of the newest tree, from which integers then come.
        weight = self.weights[self.newest] / (self.weights[True] + self.weights[False])
        return stepped(self.trees[not self.newest], self.trees[self.newest], weight)


def window_mean(late: T, early: T, late_count: int, early_count: int) -> T:
    """Return the mean over a window from two running means: ``(e * late - s * early) / (e - s)``.

    With ``late`` the mean of the first ``e`` iterates, ``e`` the ``late_count``, and ``early`` that of the first ``s``
    of them, ``s`` the ``early_count``, it is the mean of the iterates ``s + 1, ..., e``. Rounding errors of the two
    are amplified by ``(e + s) / (e - s)``.

    Args:
        late: the later mean, such as the average of an ``SWA``.
        early: the earlier mean of the same run.
        late_count: how many iterates (steps, where they were weighted by steps) ``late`` is the mean of.
        early_count: likewise for ``early``, at least 0 and less than ``late_count``.

    Returns:
        The mean, in the dtypes and on the devices of ``late``, from which integers and bools are taken.

    Raises:
        TypeError: a count is no integer, or a leaf is no array.
        ValueError: the counts are out of order, or the trees differ in structure.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.posthoc.window_mean(np.array(2.0), np.array(1.0), 3, 1)  # of 1, 2 and 3
        array(2.5)

    Source: ``average_checkpoints_with_averaged_model`` of k2-fsa/icefall, 2022.
    """
    early_count = check_integer(early_count, "early_count", 0)
    late_count = check_integer(late_count, "late_count", early_count + 1)
    weight = late_count / (late_count - early_count)
    result: T = returned(stepped(copy_leaves(early), late, weight), late)
    return result


def stepped(mean: PyTree, tree: PyTree, weight: float) -> PyTree:
    """Return ``mean + weight * (tree - mean)``, where possible in the memory of ``mean``, which is ours."""
    try:
        return run(Lerp(mean, tree, weight), inplace=True)
    except ValueError:  # perhaps leaves that the mean shares and the tree does not: they part
        pass
    return run(Lerp(mean, tree, weight))


def returned(mean: PyTree, like: PyTree) -> PyTree:
    """Return a mean in the dtypes and on the devices of a tree; leaves that share memory stay shared."""
    means, spec = structure.flatten(mean)
    results, _ = structure.flatten(cast_like(mean, like))
    first: dict[tuple[int, Any], Any] = {}
    kept = [first.setdefault((id(old), result.dtype), result) for old, result in zip(means, results, strict=True)]
    return structure.unflatten(spec, kept)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of what was wrong before the message of an error."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from error


def _checked(weights: Iterable[float]) -> list[float]:
    """Return weights as host floats."""
    numbers = [check_number(weight, f"weights[{index}]") for index, weight in enumerate(weights)]
    for index, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ValueError(f"weights[{index}] must be finite, got {number!r}")
    total, size = math.fsum(numbers), math.fsum(map(abs, numbers))
    if numbers and not abs(total) > CANCELLED * size:
        raise ValueError(f"weights must have a sum other than 0, which they are divided by, got {numbers}")
    return numbers
