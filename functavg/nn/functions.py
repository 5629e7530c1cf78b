"""Averaging functions under torch's names, made of rules."""

from __future__ import annotations

__all__ = ["get_ema_avg_fn", "get_ema_multi_avg_fn", "get_swa_avg_fn", "get_swa_multi_avg_fn"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from functavg.checks import check_decay
from functavg.functional import lerp
from functavg.rules.base import AveragingRule, WeightRule, check_rule, is_rule_class
from functavg.rules.ema import EMA
from functavg.rules.functions import AvgFn
from functavg.rules.swa import SWA
from functavg.scalars import lift
from functavg.state import Weight


@dataclass(frozen=True)
class RuleAvgFn:
    """One step of a rule for one tensor; an AveragedModel averages by the ``rule`` itself."""

    rule: WeightRule

    def __call__(self, averaged: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        """Return ``averaged + weight * (current - averaged)``."""
        return lerp(averaged, current, _get_weight(self.rule, num_averaged))


@dataclass(frozen=True)
class RuleMultiAvgFn:
    """One step of a rule for many tensors in place; an AveragedModel averages by the ``rule`` itself."""

    rule: WeightRule

    def __call__(self, averaged: Sequence[Tensor], current: Sequence[Tensor], num_averaged: Tensor | int) -> None:
        """Write ``averaged + weight * (current - averaged)`` into ``averaged``."""
        lerp(list(averaged), list(current), _get_weight(self.rule, num_averaged), inplace=True)


def rule_of(fn: Any, grouped: bool) -> AveragingRule:
    """Return the rule that an averaging function stands for.

    Args:
        fn: a function with a ``rule``, any other function, or a rule.
        grouped: whether it takes many tensors and works in place.
    """
    if is_rule_class(fn):
        check_rule(fn)
    own = fn if isinstance(fn, AveragingRule) else getattr(fn, "rule", None)
    return own if isinstance(own, AveragingRule) else AvgFn(fn, grouped=grouped)


def sort_options(device: Any, avg_fn: Any, multi_avg_fn: Any, rule: Any) -> tuple[Any, Any, Any, AveragingRule | None]:
    """Return these arguments of an AveragedModel, each in its own place.

    A rule may be passed as ``device`` or as a function, and a ``multi_avg_fn`` as ``device``, as torch's documentation
    does.

    Raises:
        AssertionError: more than one way to average was given.
        TypeError: ``device`` is a module, or ``rule`` is not a rule or is the class of one.
    """
    if isinstance(device, Module):
        raise TypeError(
            f"device must be a device, got a {type(device).__name__}. The model comes first; its ready copy is module="
        )
    if isinstance(device, AveragingRule) or callable(device):
        if multi_avg_fn is not None:
            raise AssertionError("two ways to average were given: multi_avg_fn, and another in the place of device")
        device, multi_avg_fn = None, device
    if sum(given is not None for given in (avg_fn, multi_avg_fn, rule)) > 1:
        raise AssertionError("Only one of avg_fn, multi_avg_fn and rule should be provided")
    fn = avg_fn if multi_avg_fn is None else multi_avg_fn
    if isinstance(fn, AveragingRule) or is_rule_class(fn):
        avg_fn, multi_avg_fn, rule = None, None, fn
    return device, avg_fn, multi_avg_fn, None if rule is None else check_rule(rule)


def _get_weight(rule: WeightRule, num_averaged: Tensor | int) -> Weight:
    """Return the weight of the newest model; torch's EMA ignores ``num_averaged``, even for the first model."""
    return rule.weight(1 if isinstance(rule, EMA) else lift(num_averaged), 1)


def get_ema_avg_fn(decay: float = 0.999) -> RuleAvgFn:
    """Return the function that updates one tensor of an EMA: ``decay * averaged + (1 - decay) * current``.

    Args:
        decay: the decay per update in [0, 1]. Default: 0.999.

    Returns:
        A picklable ``avg_fn`` for :class:`~functavg.AveragedModel` and :class:`~functavg.AvgFn`.

    Raises:
        TypeError: ``decay`` is not a number.
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
        TypeError: ``decay`` is not a number.
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
