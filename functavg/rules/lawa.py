"""Mean of a window of iterates."""

from __future__ import annotations

__all__ = ["LAWA"]

from dataclasses import dataclass
from typing import Any

from functavg.checks import check_integer
from functavg.plan import Lerp, copy_leaves
from functavg.rules.base import AveragingRule
from functavg.rules.memory import split_memory, state_mismatch
from functavg.rules.saved import Saved
from functavg.scalars import lift, maximum, where
from functavg.state import AverageState, Count, PyTree, T


@dataclass(frozen=True)
class LAWA(AveragingRule):
    """Latest weight averaging: the mean of the newest iterates, kept in a ring.

    With ``k`` the ``window`` and ``x_u`` the params of update ``u``, the average is the mean of ``x_(u-k+1)``, ...,
    ``x_u``, or of all there are. Iterates weigh the same, however many steps lie between them. The mean is taken anew
    at every update: it costs ``k`` reads, and nothing is ever subtracted, so nothing drifts.

    ``memory`` is the number of iterates seen and the ``k`` newest of them, each held as the average is. ``count``
    counts steps, as everywhere.

    Args:
        window: the number of iterates to average, at least 1.

    Raises:
        TypeError: ``window`` is not an integer.
        ValueError: ``window`` is less than 1.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.LAWA(2)
        >>> state = rule.init(np.zeros(()))
        >>> for value in (1.0, 2.0, 4.0):
        ...     state = rule.update(np.asarray(value), state)
        >>> float(state.average)
        3.0

    Source: Kaddour, Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest Weight Averaging, 2022.
    """

    window: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", check_integer(self.window, "window", 1))

    def init(self, params: T, /, *, dtype: Any = None, device: Any = None) -> AverageState[T]:
        ring = tuple(copy_leaves(params, dtype=dtype, device=device) for _ in range(self.window))
        return super().init(params, dtype=dtype, device=device)._replace(memory=(0, ring))

    def resume(self, average: T, count: Count, saved: Saved | None = None, /) -> AverageState[T]:
        """Return the state that goes on: with the iterates that were saved, else with copies of the average."""
        state = self.init(average)
        mine = None if saved is None else saved.written_by(self)
        window = 0 if mine is None else mine.count_entries(f"{mine.memory}.1")
        if mine is None or window == 0:
            return state._replace(count=count, memory=(count, state.memory[1]))
        seen = mine.take(0, f"{mine.memory}.0")
        first = max(0, seen - min(window, self.window))
        left_out = 0 if window == self.window else first  # of another window, the oldest kept is the first of the ring
        ring = list(state.memory[1])
        for index in range(first, seen):
            slot = (index - left_out) % self.window
            ring[slot] = mine.take(ring[slot], f"{mine.memory}.1.{index % window}")
        return state._replace(count=count, memory=(seen - left_out, tuple(ring)))

    def plan(self, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
        """Return the next state: the average as a chain of steps over the ring, and the ring with the oldest replaced.

        The chain reads the params instead of the oldest iterate, so the two may be committed in either order.
        """
        seen, ring = split_memory(self, state)
        if len(ring) != self.window:
            raise state_mismatch(self, f"a window of {self.window} iterates, got {len(ring)}")
        oldest = seen % self.window
        average, terms = state.average, 0
        for index, iterate in enumerate(ring):
            stays = (index < seen) & (index != oldest)
            terms = terms + stays
            average = Lerp(average, iterate, where(stays, 1.0 / maximum(lift(terms), 1), 0.0))
        # The params come last, as integers take the newest value.
        average = Lerp(average, params, 1.0 / (lift(terms) + 1))
        ring = tuple(Lerp(iterate, params, where(index == oldest, 1.0, 0.0)) for index, iterate in enumerate(ring))
        return AverageState(state.count + steps, average, (seen + 1, ring))
