"""Rules given as functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from functavg.checks import check_callable
from functavg.plan import Apply, Lerp
from functavg.rules.base import AveragingRule, WeightRule
from functavg.scalars import is_host
from functavg.state import AverageState, Count, PyTree, Weight


@dataclass(frozen=True)
class WeightFn(WeightRule):
    """Any weight as a function: ``average + fn(count, steps) * (params - average)``, from the first update on.

    Args:
        fn: ``fn(count, steps) -> weight``, with ``count`` the steps averaged before and ``steps`` those since the last
            update. Return 1 at ``count == 0`` to start from the first iterate rather than from what ``init`` saw.

    Raises:
        TypeError: ``fn`` is not callable, or does not return a number.
        ValueError: the weight is not finite.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.WeightFn(lambda count, steps: 0.25)
        >>> float(rule.update(np.ones(()), rule.init(np.zeros(()))).average)
        0.25
    """

    fn: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        check_callable(self.fn, "fn")

    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return ``fn(count, steps)``."""
        return self.fn(count, steps)


@dataclass(frozen=True)
class AvgFn(AveragingRule):
    """A function of torch's kind for custom averages, leaf by leaf: ``average = fn(average, params, count)``.

    The first update copies. ``count`` counts models: it grows by 1 whatever ``steps`` is. The function sees real and
    complex leaves only; integers and bools take the newest value.

    Args:
        fn: ``fn(average, new, count) -> average`` with two arrays of one shape and dtype; for torch tensors ``count``
            is a 0-d int64 tensor on their device.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` returned something of another shape.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.AvgFn(lambda average, new, count: np.maximum(average, new))
        >>> state = rule.init(np.zeros(2))
        >>> for value in ([1.0, 5.0], [3.0, 2.0]):
        ...     state = rule.update(np.asarray(value), state)
        >>> state.average
        array([3., 5.])

    Source: the ``avg_fn`` of torch.optim.swa_utils.AveragedModel.
    """

    fn: Callable[[Any, Any, Any], Any]

    def __post_init__(self) -> None:
        check_callable(self.fn, "fn")

    def plan(self, params: PyTree, state: AverageState[Any], steps: Count) -> AverageState[Any]:
        """Return the next state, its average as the intention to apply the function."""
        del steps
        return plan_function(self.fn, params, state)


def plan_function(
    fn: Callable[..., Any], params: PyTree, state: AverageState[Any], *, grouped: bool = False
) -> AverageState[Any]:
    """Return the plan of a rule that counts models: copy the first one, then apply a function."""
    if is_host(state.count) and state.count == 0:
        return AverageState(1, Lerp(state.average, params, 1.0), state.memory)
    return AverageState(state.count + 1, Apply(state.average, params, state.count, fn, grouped), state.memory)
