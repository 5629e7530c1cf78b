"""Averaging functions of torch's kind: those that torch names, made of rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from functavg.checks import check_decay
from functavg.functional import lerp
from functavg.rules.base import WeightRule
from functavg.rules.ema import EMA
from functavg.rules.swa import SWA
from functavg.scalars import lift
from functavg.state import Weight


@dataclass(frozen=True)
class RuleAvgFn:
    """One step of a rule for one tensor; an AveragedModel averages by the ``rule`` itself."""

    rule: WeightRule

    def __call__(self, averaged: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        """Return ``averaged + weight * (current - averaged)``."""
        return lerp(averaged, current, _weight(self.rule, num_averaged))


@dataclass(frozen=True)
class RuleMultiAvgFn:
    """One step of a rule for many tensors in place; an AveragedModel averages by the ``rule`` itself."""

    rule: WeightRule

    def __call__(self, averaged: Sequence[Tensor], current: Sequence[Tensor], num_averaged: Tensor | int) -> None:
        """Write ``averaged + weight * (current - averaged)`` into ``averaged``."""
        lerp(list(averaged), list(current), _weight(self.rule, num_averaged), inplace=True)


def _weight(rule: WeightRule, num_averaged: Tensor | int) -> Weight:
    """Return the weight of the newest model; torch's EMA never looks at the number, not even to copy the first."""
    return rule.weight(1 if isinstance(rule, EMA) else lift(num_averaged), 1)


def get_ema_avg_fn(decay: float = 0.999) -> RuleAvgFn:
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
    return RuleAvgFn(EMA(check_decay(decay)))


def get_ema_multi_avg_fn(decay: float = 0.999) -> RuleMultiAvgFn:
    """Return the function that updates many tensors of an EMA in place.

    Args:
        decay: the decay per update in [0, 1]. Default: 0.999.

    Returns:
        A picklable ``multi_avg_fn`` for :class:`~functavg.AveragedModel` and a grouped :class:`~functavg.AvgFn`.

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
    return RuleMultiAvgFn(EMA(check_decay(decay)))


def get_swa_avg_fn() -> RuleAvgFn:
    """Return the function that updates one tensor of an equal mean.

    Returns:
        A picklable ``avg_fn`` for :class:`~functavg.AveragedModel` and :class:`~functavg.AvgFn`.

    Example:
        >>> import torch
        >>> get_swa_avg_fn()(torch.zeros(2), torch.ones(2), 3)
        tensor([0.2500, 0.2500])

    Source: torch.optim.swa_utils.get_swa_avg_fn.
    """
    return RuleAvgFn(SWA())


def get_swa_multi_avg_fn() -> RuleMultiAvgFn:
    """Return the function that updates many tensors of an equal mean in place.

    Returns:
        A picklable ``multi_avg_fn`` for :class:`~functavg.AveragedModel` and a grouped :class:`~functavg.AvgFn`.

    Example:
        >>> import torch
        >>> averaged = [torch.zeros(2)]
        >>> get_swa_multi_avg_fn()(averaged, [torch.ones(2)], 3)
        >>> averaged
        [tensor([0.2500, 0.2500])]

    Source: torch.optim.swa_utils.get_swa_multi_avg_fn.
    """
    return RuleMultiAvgFn(SWA())
