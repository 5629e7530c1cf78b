"""Profiles of rules: their weights over a run, under whatever combinators."""

from __future__ import annotations

__all__ = ["profile"]

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from functavg import trees
from functavg.checks import check_count
from functavg.combinators.every import Every
from functavg.combinators.partition import Partition
from functavg.combinators.several import Several
from functavg.combinators.skip_non_finite import SkipNonFinite
from functavg.profiles import symbolic
from functavg.profiles.columns import weigh
from functavg.profiles.weights import Profile
from functavg.progress import Progress, check_progress
from functavg.rules.base import AveragingRule, WeightRule, check_rule
from functavg.rules.functions import AvgFn
from functavg.rules.lawa import LAWA
from functavg.state import PyTree

Gaps = NDArray[np.int64]
"""The steps before each update."""


@overload
def profile(rule: Several, steps: int | Iterable[int], *, progress: Progress = False) -> dict[str, Any]: ...
@overload
def profile(rule: Partition, steps: int | Iterable[int], *, progress: Progress = False) -> dict[Any, Any]: ...
@overload
def profile(rule: WeightRule | LAWA, steps: int | Iterable[int], *, progress: Progress = False) -> Profile: ...
@overload
def profile(rule: AveragingRule, steps: int | Iterable[int], *, progress: Progress = False) -> Any: ...
def profile(rule: AveragingRule, steps: int | Iterable[int], *, progress: Progress = False) -> Any:
    """Return the weight that each past iterate has in the average after some updates.

    With ``w_i`` the weight that the ``rule`` gives to the newest iterate in its update ``i``, iterate ``i`` has the
    weight ``p_i = w_i prod_{j > i} (1 - w_j)`` in the end. A formula that takes arrays, as those of the package do,
    gives the ``w_i`` of a million updates in a moment; one that branches on its count is asked update by update. What
    has no single weight, as windows and custom plans, has a symbolic profile, of any plan that is linear in the
    iterates. ``SkipNonFinite`` reads as if all were finite.

    Args:
        rule: the rule, a combinator or a custom one.
        steps: the number of updates of one step each; or the gaps, the steps before each update, oldest first, as they
            are passed to ``update(..., steps=)``.
        progress: ``True`` shows a bar, with rich, where updates are taken one by one; a function is called as
            ``progress(done, total)``. Default: ``False``.

    Returns:
        The Profile. ``{name: Profile}`` for ``Several`` and ``{label: Profile}`` for ``Partition``, also inside other
        combinators.

    Raises:
        TypeError: ``rule`` is not a rule, or applies a function of averages (``AvgFn``), whose weights are not known;
            ``steps`` is not a number or sequence of integers; ``progress`` is neither a bool nor callable.
        ValueError: ``steps`` or a gap is less than 1; a weight is not finite; a plan computes with arrays itself.
        ImportError: a bar is asked for, and rich is not installed.

    Example:
        >>> import functavg
        >>> functavg.profile(functavg.SWA(), 4).weights
        array([0.25, 0.25, 0.25, 0.25])
        >>> functavg.profile(functavg.Every(functavg.EMA(0.5), 2), 6).weights
        array([0.    , 0.0625, 0.    , 0.1875, 0.    , 0.75  ])

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2).
    """
    check_progress(progress)
    gaps = check_gaps(steps)
    (tree,) = read(rule, gaps, [len(gaps)], progress)
    return tree


def check_gaps(steps: Any) -> Gaps:
    """Return the gap before each update."""
    if not isinstance(steps, Iterable) or getattr(steps, "ndim", 1) == 0:
        return np.ones(int(check_count(steps, "steps", 1)), np.int64)
    known = isinstance(steps, np.ndarray) and steps.dtype.kind in "iu" and bool((steps >= 1).all())
    if not known:
        steps = [int(check_count(gap, f"steps[{index}]", 1)) for index, gap in enumerate(steps)]
    gaps = np.array(steps, np.int64)
    if not gaps.size:
        raise ValueError("steps must be an integer of at least 1 or hold at least one gap, got none")
    return gaps


def read(rule: AveragingRule, gaps: Gaps, at: Sequence[int], progress: Progress = False) -> Iterator[Any]:
    """Yield the profile after each number of updates in ``at``, which increase, of one run of the rule."""
    check_rule(rule)
    times = np.cumsum(gaps)
    for updates, tree in zip(at, _read_weights(rule, gaps, at, progress), strict=True):
        leaves, spec = trees.flatten(tree)
        names = [repr(rule)] if isinstance(tree, np.ndarray) else trees.names(spec)
        profiles = [
            Profile(vector[1:], times[:updates], initial=float(vector[0]), name=name)
            for name, vector in zip(names, leaves, strict=True)
        ]
        yield trees.unflatten(spec, profiles)


def _read_weights(rule: AveragingRule, gaps: Gaps, at: Sequence[int], progress: Progress) -> Iterator[PyTree]:
    """Yield the weights after each number of updates, that of the initial model first: a vector for each average."""
    if type(rule) is SkipNonFinite:
        yield from _read_weights(rule.rule, gaps, at, progress)
    elif type(rule) is Every:
        yield from _read_every(rule, gaps, at, progress)
    elif type(rule) is Several or type(rule) is Partition:
        inner = [_read_weights(each, gaps, at, progress) for each in rule.rules.values()]
        for vectors in zip(*inner, strict=True):
            yield dict(zip(rule.rules, vectors, strict=True))
    elif isinstance(rule, AvgFn):
        raise TypeError(f"{rule!r}: {symbolic.AS_WEIGHT_RULE}")
    elif isinstance(rule, WeightRule) and (type(rule).init, type(rule).plan) == (WeightRule.init, WeightRule.plan):
        weights = weigh(rule, gaps, progress)
        for updates in at:
            yield _compose(weights[:updates])
    else:
        yield from symbolic.read(rule, gaps.tolist(), at, progress)


def _read_every(rule: Every, gaps: Gaps, at: Sequence[int], progress: Progress) -> Iterator[PyTree]:
    """Yield what the inner rule makes of the updates that get through, and the weight 0 for all others."""
    last, indices = rule.start, []
    for index, time in enumerate(np.cumsum(gaps).tolist()):
        if time - last >= rule.interval:
            indices.append(index)
            last = time
    through = np.array(indices, np.int64)
    told = np.diff(np.cumsum(gaps)[through], prepend=rule.start)
    counts = np.searchsorted(through, at).tolist()

    def spread(vector: NDArray[np.float64], updates: int) -> NDArray[np.float64]:
        result = np.zeros(1 + updates)
        result[0] = vector[0]
        result[1 + through[: len(vector) - 1]] = vector[1:]
        return result

    for updates, tree in zip(at, _read_weights(rule.rule, told, counts, progress), strict=True):
        yield trees.tree_map(lambda vector, updates=updates: spread(vector, updates), tree)


def _compose(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weight of each iterate in the end; a plain product minds signs, zeros and what underflows."""
    with np.errstate(over="ignore", invalid="ignore"):  # a profile says that it is not finite
        kept = np.cumprod(np.append(1.0, 1.0 - weights[::-1]))[::-1]  # by all later updates
        composed: NDArray[np.float64] = kept * np.append(1.0, weights)
    return composed
