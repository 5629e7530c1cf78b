"""Exponential moving average."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from functavg import units
from functavg.checks import check_decay, check_weight
from functavg.rules.base import WeightRule
from functavg.scalars import compound, is_host, one_minus_power, where
from functavg.state import Weight


@dataclass(frozen=True)
class EMA(WeightRule):
    """Exponential moving average: each step multiplies the weight of what was averaged before by the decay.

    With ``d`` the ``decay`` per step, ``n`` the count before and ``D`` the steps since the last update, the weight of
    the newest iterate is 1 at ``n = 0`` and then

    * ``1 - d^D``;
    * with ``debias``: ``(1 - d^D) / (1 - d^(n + D))``, the average of an EMA that starts from zero and is divided by
      its total weight (at ``d = 1`` the mean, weighted by duration);
    * with a callable ``decay``: ``1 - decay(u)^D`` of ``u = n + D >= 1``, at ``n = 0`` too.

    Args:
        decay: the decay per step in [0, 1], or a callable of ``u``; if it has a method ``complement(u)``, which gives
            ``1 - decay(u)`` without cancellation, weights on a device come from that. Default: 0.999.
        debias: whether to weigh as an EMA divided by its total weight. Default: ``False``.

    Raises:
        TypeError: ``decay`` is neither a number nor callable, or ``debias`` goes with a callable.
        ValueError: ``decay`` is out of range or NaN.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.EMA(0.9, debias=True)
        >>> state = rule.init(np.zeros(()))
        >>> for value in (1.0, 2.0, 3.0):
        ...     state = rule.update(np.asarray(value), state)
        >>> round(float(state.average), 5)
        2.07011

    Source: Polyak & Juditsky, 1992; torch.optim.swa_utils.get_ema_multi_avg_fn; optax.ema for ``debias``.
    """

    decay: float | Callable[[Any], Any] = 0.999
    _: KW_ONLY
    debias: bool = False

    def __post_init__(self) -> None:
        if not callable(self.decay):
            object.__setattr__(self, "decay", check_decay(self.decay))
        elif self.debias:
            raise TypeError("debias=True needs a constant decay; a callable decay can start at decay(1) = 0 instead")

    @classmethod
    def from_half_life(cls, half_life: float, *, debias: bool = False) -> EMA:
        """Return the EMA in which a weight halves in ``half_life`` steps: ``decay = 2^(-1 / half_life)``.

        Example:
            >>> import functavg
            >>> functavg.EMA.from_half_life(1)
            EMA(decay=0.5, debias=False)
        """
        return cls(units.decay_from_half_life(half_life), debias=debias)

    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return the weight of the newest iterate (see the class)."""
        if callable(self.decay):
            u = count + steps
            # In float32 a decay near 1 has lost the digits of its weight.
            if not is_host(u) and hasattr(self.decay, "complement"):
                return compound(check_weight(self.decay.complement(u), "1 - decay(u)"), steps)
            decay = check_weight(self.decay(u), "decay(u)")
            return one_minus_power(check_decay(decay, "decay(u)") if is_host(decay) else decay, steps)
        if not self.debias:
            return where(count == 0, 1.0, one_minus_power(self.decay, steps))
        if self.decay == 1.0:
            return steps / (count + steps)
        return one_minus_power(self.decay, steps) / one_minus_power(self.decay, count + steps)
