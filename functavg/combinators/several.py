"""Several averages of one stream of params."""

from __future__ import annotations

__all__ = ["Several"]

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from functavg.combinators.product import Product, Rules
from functavg.rules.base import AveragingRule
from functavg.rules.saved import Saved
from functavg.state import AverageState, Count, PyTree


@dataclass(frozen=True)
class Several(Product):
    """Several averages of the same params, which are read and converted once.

    ``average`` is ``{name: average}``, ``memory`` is ``{name: state without its average}``, and the count is the least
    of theirs. It cannot stand inside a ``Partition``, which has one average for each leaf.

    Args:
        rules: ``{name: rule}``, at least one.

    Raises:
        TypeError: ``rules`` is not a mapping of strings to rules.
        ValueError: ``rules`` is empty.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.Several({"fast": functavg.EMA(0.5), "slow": functavg.EMA(0.75)})
        >>> state = rule.init(np.zeros(1))
        >>> for value in (0.0, 1.0):
        ...     state = rule.update(np.full(1, value), state)
        >>> state.average
        {'fast': array([0.5]), 'slow': array([0.25])}

    Source: the profiles of two widths that Karras et al., 2024 (EDM2) keep for one training run.
    """

    rules: Mapping[str, AveragingRule]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", Rules(self.rules))
        for name in self.rules:
            if not isinstance(name, str):
                raise TypeError(f"rules must be named by strings, got {name!r} of {type(name).__name__}")

    def init(self, params: PyTree, /, *, dtype: Any = None, device: Any = None) -> AverageState[Any]:
        states = {name: rule.init(params, dtype=dtype, device=device) for name, rule in self.rules.items()}
        return self._join_states(states, {name: state.average for name, state in states.items()}, states)

    def resume(self, average: PyTree, count: Count, saved: Saved | None = None, /) -> AverageState[Any]:
        """Return the state that goes on: each average that was saved from there, the others from ``average``."""
        mine = None if saved is None else saved.written_by(self)
        states = {}
        for name, rule in self.rules.items():
            part = saved if mine is None else mine.part(name)
            if mine is None or part is None:
                states[name] = rule.resume(average, count, part)
            else:
                own = mine.take(count, f"{mine.memory}.{name}.count")
                states[name] = rule.resume(part.take(average, part.average), own, part)
        return self._join_states(states, {name: state.average for name, state in states.items()}, states)

    def plan(self, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
        """Return the plans of all rules; they name the same params, so that these are read and converted once."""
        before = self._split_state(state, state.average)
        states = {name: rule.plan(params, before[name], steps) for name, rule in self.rules.items()}
        return self._join_states(states, {name: state.average for name, state in states.items()}, states)
