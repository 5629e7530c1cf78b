"""Profiles of rules, read off their plans; no array is computed with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from functavg import trees
from functavg.checks import check_count
from functavg.combinators.gate import Gate
from functavg.combinators.partition import Partition
from functavg.combinators.product import Rules
from functavg.combinators.several import Several
from functavg.combinators.skip_non_finite import SkipNonFinite
from functavg.profiles.tracing import Node, Run, node_of, shares
from functavg.profiles.weights import Profile
from functavg.rules.base import AveragingRule
from functavg.rules.lawa import LAWA


def profile(rule: AveragingRule, steps: int | Iterable[int]) -> Any:
    """Return the weight that each past iterate has in the average after some updates.

    With ``w_i`` the weight that the ``rule`` gives to the newest iterate in its update ``i``, iterate ``i`` has the
    weight ``p_i = w_i prod_{j > i} (1 - w_j)`` in the end. It is read off the rule's plans, of which it takes any that
    is linear in the iterates: weight rules, windows, combinators and custom rules; functions of torch's kind are tried
    on unit vectors. ``SkipNonFinite`` reads as if all were finite.

    Args:
        rule: the rule, a combinator or a custom one.
        steps: the number of updates of one step each; or the gaps, the steps before each update, oldest first, as they
            are passed to ``update(..., steps=)``.

    Returns:
        The Profile. ``{name: Profile}`` for ``Several`` and ``{label: Profile}`` for ``Partition``, also inside other
        combinators.

    Raises:
        TypeError: ``rule`` is no rule, or ``steps`` no number or sequence of integers.
        ValueError: ``steps`` or a gap is less than 1; a function is not linear; a plan computes with arrays itself.

    Example:
        >>> import functavg
        >>> functavg.profile(functavg.SWA(), 4).weights
        array([0.25, 0.25, 0.25, 0.25])
        >>> functavg.profile(functavg.Every(functavg.EMA(0.5), 2), 6).weights
        array([0.    , 0.0625, 0.    , 0.1875, 0.    , 0.75  ])

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2).
    """
    gaps = check_gaps(steps)
    (tree,) = read(rule, gaps, [len(gaps)])
    return tree


def check_gaps(steps: Any) -> Sequence[int]:
    """Return the gap before each update."""
    if not isinstance(steps, Iterable) or getattr(steps, "ndim", 1) == 0:
        return [1] * int(check_count(steps, "steps", 1))
    gaps = [int(check_count(gap, f"steps[{index}]", 1)) for index, gap in enumerate(steps)]
    if not gaps:
        raise ValueError("steps must be an integer of at least 1 or hold at least one gap, got none")
    return gaps


def read(rule: AveragingRule, gaps: Sequence[int], at: Iterable[int]) -> Iterator[Any]:
    """Yield the profile after each number of updates in ``at``, which increase, of one run of the rule."""
    if not isinstance(rule, AveragingRule):
        call = f" (did you mean {rule.__name__}()?)" if isinstance(rule, type) else ""
        raise TypeError(f"rule must be an averaging rule, got {rule!r} of {type(rule).__name__}{call}")
    times = np.cumsum(np.asarray(gaps, dtype=np.int64))
    reach = _reach(rule)
    run = Run(_without_labels(rule))
    known: dict[Node, NDArray[np.float64]] = {}
    for updates in at:
        if reach is not None:
            run = Run(_without_labels(rule), max(0, updates - reach))
        for gap in gaps[run.updates : updates]:
            run.update(gap)
        leaves, spec = trees.flatten(run.state.average)
        bare = len(leaves) == 1 and leaves[0] is run.state.average
        profiles = []
        for name, leaf in zip([repr(rule)] if bare else trees.names(spec), leaves, strict=True):
            node = node_of(leaf)
            known[node] = vector = shares(node, 1 + updates, known)
            profiles.append(Profile(vector[1:], times[:updates], float(vector[0]), name))
        yield trees.unflatten(spec, profiles)


def _reach(rule: AveragingRule) -> int | None:
    """Return how many of the newest updates decide what the average is, None where all may."""
    if type(rule) is SkipNonFinite:
        return _reach(rule.rule)
    return rule.window if type(rule) is LAWA else None


@dataclass(frozen=True)
class _OfEachLabel(Several):
    """What the rules of a Partition do to one leaf of each label."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", Rules(self.rules))


def _without_labels(rule: AveragingRule) -> AveragingRule:
    """Return the rule with what a Partition does to a leaf of each label in its place."""
    if isinstance(rule, Gate):
        return replace(rule, rule=_without_labels(rule.rule))  # type: ignore[type-var]
    if isinstance(rule, (Partition, Several)):
        inner = {key: _without_labels(each) for key, each in rule.rules.items()}
        return _OfEachLabel(inner) if isinstance(rule, Partition) else Several(inner)
    return rule
