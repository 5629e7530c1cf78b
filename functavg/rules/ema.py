"""Exponential moving average."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from functavg import units
from functavg.rules.base import WeightRule
from functavg.scalars import compound, one_minus_power, where
from functavg.schedules.base import check_schedule, rate_of
from functavg.state import Weight

Start = Literal["copy", "init"]


@dataclass(frozen=True)
class EMA(WeightRule):
    """Exponential moving average: each step multiplies the weight of what was averaged before by the decay.

    A constant decay copies the params at the first update; a decay that is a function takes what ``init`` saw for the
    iterate before the first one. ``start`` says which explicitly.

    With ``d`` the ``decay`` per step, ``n`` the count before and ``D`` the steps since the last update, the weight of
    the newest iterate is

    * ``1 - d^D``, with ``d = decay(n + D)`` where ``decay`` is a function;
    * 1 at ``n = 0`` with ``start="copy"``;
    * ``(1 - d^D) / (1 - d^(n + D))`` with ``debias``: the average of an EMA that starts from zero and is divided by its
      total weight (at ``d = 1`` the mean, weighted by duration).

    Args:
        decay: the decay per step in [0, 1], or a function of the clock ``u = n + D >= 1`` that returns one, such as a
            :class:`~functavg.schedules.Schedule`. Default: 0.999.
        debias: whether to weigh as an EMA divided by its total weight; for constant decays only. Default: ``False``.
        start: ``"copy"`` to copy the params at the first update, ``"init"`` to average them into what ``init`` saw.
            Default: ``"copy"`` for a number, ``"init"`` for a function.

    Raises:
        TypeError: ``decay`` is neither a number nor callable, or ``debias`` goes with a function.
        ValueError: ``decay`` is out of range or NaN, ``start`` is neither of the two, or ``debias`` goes with
            ``start="init"``.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.EMA(0.9, debias=True)
        >>> state = rule.init(np.zeros(()))
        >>> for value in (1.0, 2.0, 3.0):
        ...     state = rule.update(np.asarray(value), state)
        >>> round(float(state.average), 5)
        2.07011
        >>> functavg.EMA(0.75).weight(0, 1), functavg.EMA(0.75, start="init").weight(0, 1)
        (1.0, 0.25)

    Source: Polyak & Juditsky, 1992; torch.optim.swa_utils.get_ema_multi_avg_fn; optax.ema for ``debias``.
    """

    decay: float | Callable[[Any], Any] = 0.999
    _: KW_ONLY
    debias: bool = False
    start: Start | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check_schedule(self.decay))
        if self.start is None:
            object.__setattr__(self, "start", "init" if callable(self.decay) else "copy")
        if self.start not in ("copy", "init"):
            raise ValueError(f"start must be 'copy' or 'init', got {self.start!r}")
        if self.debias and callable(self.decay):
            raise TypeError(
                f"debias=True needs a constant decay, got {self.decay!r}; "
                "a function can start from the first iterate with start='copy' instead"
            )
        if self.debias and self.start == "init":
            raise ValueError("debias=True leaves no weight on what `init` saw, got start='init'; leave one of them out")

    @classmethod
    def from_half_life(cls, half_life: float, *, debias: bool = False, start: Start | None = None) -> EMA:
        """Return the EMA in which a weight halves in ``half_life`` steps: ``decay = 2^(-1 / half_life)``.

        Example:
            >>> import functavg
            >>> functavg.EMA.from_half_life(1).decay
            0.5
        """
        return cls(units.decay_from_half_life(half_life), debias=debias, start=start)

    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return the weight of the newest iterate (see the class)."""
        if callable(self.decay):
            weight = compound(rate_of(self.decay, count + steps), steps)
        else:
            weight = one_minus_power(self.decay, steps)
        if self.debias:
            return steps / (count + steps) if self.decay == 1.0 else weight / one_minus_power(self.decay, count + steps)
        return weight if self.start == "init" else where(count == 0, 1.0, weight)
