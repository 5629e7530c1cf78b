"""Rules given as functions."""

from __future__ import annotations

__all__ = ["AvgFn", "WeightFn"]

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
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
    """A function of torch's kind for custom averages: ``average = fn(average, params, count)``.

    The first update copies. ``count`` counts models: it grows by 1 whatever ``steps`` is. The function sees real and
    complex leaves only; integers and bools take the newest value.

    A ``grouped`` function takes torch tensors together: it is called once for each group of averages of one dtype and
    device, and writes to them in place. New values of another dtype or device are converted together, too: a whole
    group of them is in memory then.

    Args:
        fn: ``fn(average, new, count) -> average`` with two arrays of one shape and dtype; ``grouped``:
            ``fn(averages, news, count)`` with two lists of tensors of the same shapes, dtype and device, the first of
            which it writes to. For torch tensors ``count`` is a 0-d int64 tensor on their device.
        grouped: whether ``fn`` takes lists of tensors and works in place. Default: ``False``.

    Raises:
        TypeError: ``fn`` is not callable. At ``update``: leaves are not torch tensors, if ``grouped``.
        ValueError: at ``update``, ``fn`` returned something of another shape.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.AvgFn(lambda average, new, count: np.maximum(average, new))
        >>> state = rule.init(np.zeros(2))
        >>> for value in ([1.0, 5.0], [3.0, 2.0]):
        ...     state = rule.update(np.asarray(value), state)
        >>> state.average
        array([3., 5.])
        >>> import torch
        >>> rule = functavg.AvgFn(lambda averages, news, count: torch._foreach_maximum_(averages, news), grouped=True)
        >>> state = rule.init([torch.zeros(2)])
        >>> for value in ([1.0, 5.0], [3.0, 2.0]):
        ...     state = rule.update([torch.tensor(value)], state)
        >>> state.average
        [tensor([3., 5.])]

    Source: the ``avg_fn`` and ``multi_avg_fn`` of torch.optim.swa_utils.AveragedModel.
    """

    fn: Callable[[Any, Any, Any], Any]
    _: KW_ONLY
    grouped: bool = False

    def __post_init__(self) -> None:
        check_callable(self.fn, "fn")

    def plan(self, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
        """Return the next state, its average as the intention to copy the first model, then to apply the function."""
        del steps
        if is_host(state.count) and state.count == 0:
            return AverageState(1, Lerp(state.average, params, 1.0), state.memory)
        step = Apply(state.average, params, state.count, self.fn, self.grouped)
        return AverageState(state.count + 1, step, state.memory)
