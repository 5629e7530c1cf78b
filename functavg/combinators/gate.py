"""Gates: combinators of one rule that let some updates through."""

from __future__ import annotations

__all__: list[str] = []

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from functavg import trees
from functavg.checks import check_weight
from functavg.plan import Apply, Lerp
from functavg.rules.base import AveragingRule
from functavg.rules.memory import split_memory
from functavg.rules.saved import Saved
from functavg.scalars import is_host, minimum, where
from functavg.state import AverageState, Count, PyTree, T


class Gate(AveragingRule):
    """A rule behind a gate, which is open at some updates; at the others its count, average and memory stay the same.

    A subclass says when (``ask``) and keeps one count of its own: ``memory = (own, memory of the inner rule)``. What
    the host knows is a branch, so a closed gate does no work. Where only a device knows whether the gate is open, the
    update is planned as if it were, with weights that are 0 where it is closed.
    """

    rule: AveragingRule

    @property
    def least(self) -> int:
        """The own count before the first update, which is also the least that it can be: 0, unless overridden."""
        return 0

    @abstractmethod
    def ask(self, params: PyTree, /, own: Count, steps: Count, on_host: bool) -> tuple[Any, Count, Count]:
        """Return whether the gate is open, the own count after the update, and the steps to pass to the inner rule.

        Args:
            params: the newest iterate.
            own: the own count before.
            steps: the number of steps since the last update.
            on_host: whether the answer may be read from a device, once.
        """

    def init(self, params: T, /, *, dtype: Any = None, device: Any = None) -> AverageState[T]:
        inner = self.rule.init(params, dtype=dtype, device=device)
        return inner._replace(memory=(self.least, inner.memory))

    def resume(self, average: T, count: Count, saved: Saved | None = None, /) -> AverageState[Any]:
        """Return the state that goes on; what lies behind the gate may have been saved with it or without it."""
        mine = None if saved is None else saved.written_by(self)
        inner = self.rule.resume(average, count, saved if mine is None else replace(mine, memory=f"{mine.memory}.1"))
        own = minimum(0, self.least + count) if mine is None else mine.take(0, f"{mine.memory}.0")
        return inner._replace(memory=(own, inner.memory))

    def _name_memories(self, place: str = "memory") -> dict[str, AveragingRule]:
        return {place: self, **self.rule._name_memories(f"{place}.1")}

    def plan(self, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
        """Return the plan of the inner rule if the gate is open, else the state before."""
        own, memory = split_memory(self, state, self.least)
        inner = state._replace(memory=memory)
        is_open, own, inner_steps = self.ask(params, own, steps, is_host(state.count))
        if not is_host(is_open):
            inner = _gate_plan(is_open, self.rule.plan(params, inner, inner_steps), inner)
        elif is_open:
            inner = self.rule.plan(params, inner, inner_steps)
        return inner._replace(memory=(own, inner.memory))


def _gate_plan(is_open: Any, planned: AverageState[Any], state: AverageState[Any]) -> AverageState[Any]:
    """Return the plan that changes nothing where the gate is closed, which only a device knows."""
    pairs = trees.pair_prefix(planned.memory, state.memory)
    memory = iter([_gate_leaf(is_open, new, old) for new, old in pairs])
    return AverageState(
        where(is_open, planned.count, state.count),
        trees.tree_map(lambda average: _gate_leaf(is_open, average, average), planned.average),
        trees.tree_map(lambda _: next(memory), planned.memory),
    )


def _gate_leaf(is_open: Any, new: Any, old: Any) -> Any:
    if isinstance(new, Lerp):
        return Lerp(_gate_leaf(is_open, new.old, new.old), new.new, where(is_open, check_weight(new.weight), 0.0))
    if isinstance(new, Apply):
        raise TypeError(
            "AvgFn cannot stand behind a gate (Every, SkipNonFinite) in a state with a device count: no weight can "
            "close the gate for a function of averages. Expected a host count, got a 0-d array; use a host count, or "
            "a rule with a weight such as WeightFn"
        )
    return new if new is old else where(is_open, new, old)
