"""A rule that skips params that are not finite."""

from __future__ import annotations

__all__ = ["SkipNonFinite"]

import functools
import operator
from dataclasses import dataclass
from typing import Any

from functavg import kernels, trees
from functavg.combinators.gate import Gate
from functavg.rules.base import AveragingRule, check_rule
from functavg.scalars import where
from functavg.state import Count, PyTree


@dataclass(frozen=True)
class SkipNonFinite(Gate):
    """A rule that skips params with a NaN or an infinity, in any leaf: nothing is averaged then.

    A skipped update counts for nothing: its steps are not passed on to the inner rule, as a GradScaler's skipped steps
    are not. So the count is that of the steps that were averaged, and nothing decays while there is nothing new.

    ``memory`` is the number of updates skipped and the memory of the inner rule. The test reads all the params, and
    one flag from their device; where the state's count is a 0-d array the flag stays there, and a skip is a weight
    of 0. Cheapest as ``Every(SkipNonFinite(rule), interval)``, which tests only what would be averaged.

    Args:
        rule: the rule to update.

    Raises:
        TypeError: ``rule`` is not a rule.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.SkipNonFinite(functavg.SWA())
        >>> state = rule.init(np.zeros(()))
        >>> for value in (1.0, np.nan, 2.0):
        ...     state = rule.update(np.asarray(value), state)
        >>> state
        AverageState(count=2, average=array(1.5), memory=(1, ()))

    Source: optax.apply_if_finite.
    """

    rule: AveragingRule

    def __post_init__(self) -> None:
        check_rule(self.rule)

    def ask(self, params: PyTree, /, own: Count, steps: Count, on_host: bool) -> tuple[Any, Count, Count]:
        is_finite = _all_finite(params)
        if on_host:
            is_finite = bool(is_finite)
        return is_finite, where(is_finite, own, own + 1), steps


def _all_finite(params: PyTree) -> Any:
    """Return whether all numbers are finite: a bool, or a 0-d array, which the caller may read."""
    by_kernel: dict[str, list[Any]] = {}
    for leaf in trees.flatten(params)[0]:
        name = kernels.kernel_name(leaf)
        if name is not None:  # what is no array is refused by name when the plan is checked
            by_kernel.setdefault(name, []).append(leaf)
    flags = [kernels.load(name).is_finite(leaves) for name, leaves in by_kernel.items()]
    return functools.reduce(operator.and_, flags, True)
