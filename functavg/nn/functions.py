"""Averaging functions of torch's kind: those that torch names, and the rule that applies a user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functavg.checks import check_callable, check_decay
from functavg.functional import lerp
from functavg.rules.base import AveragingRule
from functavg.rules.ema import EMA
from functavg.rules.functions import plan_function
from functavg.rules.swa import SWA
from functavg.scalars import lift
from functavg.state import AverageState, Count, PyTree


@dataclass(frozen=True)
class MultiAvgFn(AveragingRule):
    """A function of torch's kind for custom averages of many tensors in place: ``fn(averages, params, count)``.

    The first update copies. ``count`` counts models: it grows by 1 whatever ``steps`` is. The function is called once
    for each group of averages of one dtype and device, with real and complex tensors only; integers and bools take the
    newest value. As it takes them together, new values of another dtype or device are converted together, too: a whole
    group of them is in memory then.

    Args:
        fn: ``fn(averages, news, count) -> None`` with two lists of tensors of the same shapes, dtype and device, the
            first of which it writes to, and ``count`` a 0-d int64 tensor on their device.

    Raises:
        TypeError: ``fn`` is not callable, or leaves are no torch tensors.

    Example:
        >>> import functavg, torch
        >>> rule = functavg.MultiAvgFn(lambda averages, news, count: torch._foreach_maximum_(averages, news))
        >>> state = rule.init([torch.zeros(2)])
        >>> for value in ([1.0, 5.0], [3.0, 2.0]):
        ...     state = rule.update([torch.tensor(value)], state)
        >>> state.average
        [tensor([3., 5.])]

    Source: the ``multi_avg_fn`` of torch.optim.swa_utils.AveragedModel.
    """

    fn: Callable[[list[Tensor], list[Tensor], Tensor], Any]

    def __post_init__(self) -> None:
        check_callable(self.fn, "fn")

    def plan(self, params: PyTree, state: AverageState[Any], steps: Count) -> AverageState[Any]:
        """Return the next state, its average as the intention to apply the function."""
        del steps
        return plan_function(self.fn, params, state, grouped=True)


@dataclass(frozen=True)
class EMAAvgFn:
    """One step of an EMA for one tensor, as ``get_ema_avg_fn`` makes it; ``rule`` is the EMA that it stands for."""

    decay: float

    @property
    def rule(self) -> EMA:
        """The rule that averages as this function does."""
        return EMA(self.decay)

    def __call__(self, averaged: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        """Return ``decay * averaged + (1 - decay) * current``."""
        del num_averaged
        return lerp(averaged, current, 1.0 - self.decay)


@dataclass(frozen=True)
class EMAMultiAvgFn:
    """One step of an EMA for many tensors in place, as ``get_ema_multi_avg_fn`` makes it."""

    decay: float

    @property
    def rule(self) -> EMA:
        """The rule that averages as this function does."""
        return EMA(self.decay)

    def __call__(self, averaged: Sequence[Tensor], current: Sequence[Tensor], num_averaged: Tensor | int) -> None:
        """Write ``decay * averaged + (1 - decay) * current`` into ``averaged``."""
        del num_averaged
        lerp(list(averaged), list(current), 1.0 - self.decay, inplace=True)


@dataclass(frozen=True)
class SWAAvgFn:
    """One step of an equal mean for one tensor, as ``get_swa_avg_fn`` makes it."""

    @property
    def rule(self) -> SWA:
        """The rule that averages as this function does."""
        return SWA()

    def __call__(self, averaged: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        """Return ``averaged + (current - averaged) / (num_averaged + 1)``."""
        return lerp(averaged, current, 1.0 / (lift(num_averaged) + 1))


@dataclass(frozen=True)
class SWAMultiAvgFn:
    """One step of an equal mean for many tensors in place, as ``get_swa_multi_avg_fn`` makes it."""

    @property
    def rule(self) -> SWA:
        """The rule that averages as this function does."""
        return SWA()

    def __call__(self, averaged: Sequence[Tensor], current: Sequence[Tensor], num_averaged: Tensor | int) -> None:
        """Write ``averaged + (current - averaged) / (num_averaged + 1)`` into ``averaged``."""
        lerp(list(averaged), list(current), 1.0 / (lift(num_averaged) + 1), inplace=True)


def get_ema_avg_fn(decay: float = 0.999) -> EMAAvgFn:
    """Return the function that updates one tensor of an EMA: ``decay * averaged + (1 - decay) * current``.

    Args:
        decay: the decay per update in [0, 1]. Default: 0.999.

    Returns:
        A picklable ``avg_fn`` for :class:`~functavg.AveragedModel` and :class:`~functavg.AvgFn`.

    Raises:
        TypeError: ``decay`` is no number.
        ValueError: ``decay`` is out of range or NaN.

    Example:
        >>> import torch
        >>> get_ema_avg_fn(0.75)(torch.zeros(2), torch.ones(2), 1)
        tensor([0.2500, 0.2500])

    Source: torch.optim.swa_utils.get_ema_avg_fn.
    """
    return EMAAvgFn(check_decay(decay))


def get_ema_multi_avg_fn(decay: float = 0.999) -> EMAMultiAvgFn:
    """Return the function that updates many tensors of an EMA in place.

    Args:
        decay: the decay per update in [0, 1]. Default: 0.999.

    Returns:
        A picklable ``multi_avg_fn`` for :class:`~functavg.AveragedModel` and :class:`~functavg.MultiAvgFn`.

    Raises:
        TypeError: ``decay`` is no number.
        ValueError: ``decay`` is out of range or NaN.

    Example:
        >>> import torch
        >>> averaged = [torch.zeros(2)]
        >>> get_ema_multi_avg_fn(0.75)(averaged, [torch.ones(2)], 1)
        >>> averaged
        [tensor([0.2500, 0.2500])]

    Source: torch.optim.swa_utils.get_ema_multi_avg_fn.
    """
    return EMAMultiAvgFn(check_decay(decay))


def get_swa_avg_fn() -> SWAAvgFn:
    """Return the function that updates one tensor of an equal mean.

    Returns:
        A picklable ``avg_fn`` for :class:`~functavg.AveragedModel` and :class:`~functavg.AvgFn`.

    Example:
        >>> import torch
        >>> get_swa_avg_fn()(torch.zeros(2), torch.ones(2), 3)
        tensor([0.2500, 0.2500])

    Source: torch.optim.swa_utils.get_swa_avg_fn.
    """
    return SWAAvgFn()


def get_swa_multi_avg_fn() -> SWAMultiAvgFn:
    """Return the function that updates many tensors of an equal mean in place.

    Returns:
        A picklable ``multi_avg_fn`` for :class:`~functavg.AveragedModel` and :class:`~functavg.MultiAvgFn`.

    Example:
        >>> import torch
        >>> averaged = [torch.zeros(2)]
        >>> get_swa_multi_avg_fn()(averaged, [torch.ones(2)], 3)
        >>> averaged
        [tensor([0.2500, 0.2500])]

    Source: torch.optim.swa_utils.get_swa_multi_avg_fn.
    """
    return SWAMultiAvgFn()
