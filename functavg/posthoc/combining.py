"""Weighted sums of trees, of which only one need be in memory at a time."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from functavg import trees as structure
from functavg.checks import check_number
from functavg.functional import cast_like
from functavg.plan import Lerp, copy_leaves, run
from functavg.progress import Progress, check_progress, track
from functavg.state import AverageState, PyTree, T

CANCELLED = 1e-12
"""Weights whose sum is smaller than this, relative to that of their magnitudes, sum to zero up to rounding."""


def combine(
    trees: Iterable[T], weights: Iterable[float] | None = None, *, dtype: Any = None, progress: Progress = False
) -> T:
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
        progress: ``True`` shows a bar, with rich; a function is called as ``progress(done, total)`` after each tree,
            with a ``total`` of None if it is not known. Default: ``False``.

    Returns:
        The mean, in the dtypes and on the devices of the newest tree whose weight is not 0. It shares no memory with
        the trees.

    Raises:
        TypeError: ``trees`` is itself a tree, a weight is no number, or a leaf is no array, named by its path;
            ``progress`` is neither a bool nor callable.
        ValueError: there is no tree, not one weight for each, or weights that are not finite or sum to 0; a tree does
            not have the structure of the first, what differs is named by its path.
        ImportError: a bar is asked for, and rich is not installed.

    Example:
        >>> import functavg, numpy as np
        >>> checkpoints = ({"w": np.full(2, value)} for value in (1.0, 2.0, 6.0))
        >>> functavg.posthoc.combine(checkpoints)
        {'w': array([3., 3.])}

        With ``early`` the mean of the first ``s`` iterates of a run and ``late`` that of the first ``e``, the mean of
        the iterates ``s + 1, ..., e`` between them, here of 2 and 3:

        >>> early, late, s, e = np.array(1.0), np.array(2.0), 1, 3
        >>> functavg.posthoc.combine([early, late], weights=[-s, e])
        array(2.5)

    Source: Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves accuracy without
    increasing inference time, 2022; Karras et al., 2024 (EDM2) for sums with negative weights;
    ``average_checkpoints_with_averaged_model`` of k2-fsa/icefall, 2022, for the mean between two.
    """
    if isinstance(trees, (Mapping, AverageState, str, os.PathLike)) or not isinstance(trees, Iterable):
        raise TypeError(f"trees must be a sequence or an iterator of trees, got {type(trees).__name__}")
    check_progress(progress)
    known = None if weights is None else _check_weights(weights)
    numbers = itertools.repeat(1.0) if known is None else iter(known)
    total = None if known is None or isinstance(trees, Sized) else len(known)
    means = _Means(dtype)
    newest: Any = None
    for index, tree in enumerate(track(trees, progress, total=total, description="trees")):
        weight = next(numbers, None)
        if weight is None:
            raise ValueError(f"weights must hold one number for each tree, got {index} for more trees")
        if isinstance(tree, (str, os.PathLike)):
            raise TypeError(
                f"trees[{index}] must be a tree of arrays, got the path {tree!r}; "
                "functavg.checkpoints.average averages files, safetensors and those of torch.save"
            )
        if weight != 0:
            with name_errors(f"trees[{index}]", _WHOLE if _is_whole(tree) else ""):
                means.add(tree, weight)
            newest = tree
    if known is not None and (left := len(list(numbers))):
        raise ValueError(f"weights must hold one number for each tree, got {left} more than trees")
    if not means.trees:
        raise ValueError("trees must hold at least one tree, got none")
    result: T = bring_back(means.join(), newest)
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
            self.trees[side] = step_(self.trees[side], tree, weight / self.weights[side])
        elif self.trees:  # a copy in the form of the other mean, which the tree has to fit
            self.trees[side] = run(Lerp(self.trees[not side], tree, 1.0))
        else:
            self.trees[side] = copy_leaves(tree, dtype=self.dtype)

    def join(self) -> PyTree:
        """Return the mean of all; the two are used up."""
        if len(self.trees) == 1:
            return self.trees[self.newest]
        # Towards the side of the newest tree, from which integers then come.
        weight = self.weights[self.newest] / (self.weights[True] + self.weights[False])
        return step_(self.trees[not self.newest], self.trees[self.newest], weight)


def step_(mean: PyTree, tree: PyTree, weight: float) -> PyTree:
    """Return ``mean + weight * (tree - mean)``, where possible in the memory of ``mean``, which is ours."""
    try:
        return run(Lerp(mean, tree, weight), inplace=True)
    except ValueError:  # perhaps leaves that the mean shares and the tree does not: they part
        pass
    return run(Lerp(mean, tree, weight))


def bring_back(mean: PyTree, like: PyTree) -> PyTree:
    """Return a mean in the dtypes and on the devices of a tree; leaves that share memory stay shared."""
    means, spec = structure.flatten(mean)
    results, _ = structure.flatten(cast_like(mean, like))
    first: dict[tuple[int, Any], Any] = {}
    kept = [first.setdefault((id(old), result.dtype), result) for old, result in zip(means, results, strict=True)]
    return structure.unflatten(spec, kept)


@contextlib.contextmanager
def name_errors(name: str, hint: str = "") -> Iterator[None]:
    """Put the name of what was wrong before the message of an error, and a hint behind it where a type was wrong."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError):
            raise TypeError(f"{name}: {error}{hint}") from error
        raise ValueError(f"{name}: {error}") from error


_WHOLE = ". Of a whole checkpoint, pass the dict of weights; functavg.checkpoints.average finds it in files"


def _is_whole(tree: PyTree) -> bool:
    """Tell whether a tree may be a checkpoint, in which weights stand among other things."""
    return isinstance(tree, Mapping) and any(isinstance(value, (str, Mapping)) for value in tree.values())


def _check_weights(weights: Iterable[float]) -> list[float]:
    """Return weights as host floats."""
    numbers = [check_number(weight, f"weights[{index}]") for index, weight in enumerate(weights)]
    for index, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ValueError(f"weights[{index}] must be finite, got {number!r}")
    total, size = math.fsum(numbers), math.fsum(map(abs, numbers))
    if numbers and not abs(total) > CANCELLED * size:
        raise ValueError(f"weights must have a sum other than 0, which they are divided by, got {numbers}")
    return numbers
