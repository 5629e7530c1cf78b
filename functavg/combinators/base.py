"""What combinators are: doors, with one rule behind them, and products of several rules."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from functavg import trees
from functavg.checks import check_count, check_weight
from functavg.counts import match_count
from functavg.plan import Apply, Lerp
from functavg.rules.base import AveragingRule, divided, foreign
from functavg.scalars import is_host, minimum, where
from functavg.state import AverageState, Count, PyTree, T


class Door(AveragingRule):
    """A rule behind a door that opens at some updates; at the others its count, average and memory stay as they are.

    A subclass says when (``ask``) and keeps one count of its own: ``memory = (own, memory of the inner rule)``. What
    the host knows is a branch, so a closed door does no work. A door that only a device knows to be open is planned
    as open, with weights that are 0 where it is closed.
    """

    rule: AveragingRule

    @property
    @abstractmethod
    def least(self) -> int:
        """The own count before the first update, which it never falls below."""

    @abstractmethod
    def ask(self, params: PyTree, own: Count, steps: Count, on_host: bool) -> tuple[Any, Count, Count]:
        """Return whether the door is open, the own count afterwards, and the steps to tell the inner rule.

        Args:
            params: the newest iterate.
            own: the own count before.
            steps: the number of steps since the last update.
            on_host: whether the answer may be read from a device, once.
        """

    def init(self, params: T, /, *, dtype: Any = None, device: Any = None) -> AverageState[T]:
        inner = self.rule.init(params, dtype=dtype, device=device)
        return inner._replace(memory=(self.least, inner.memory))

    def plan(self, params: PyTree, state: AverageState[Any], steps: Count) -> AverageState[Any]:
        """Return the plan of the inner rule if the door is open, else the state before."""
        own, memory = divided(self, state, self.least)
        inner = state._replace(memory=memory)
        is_open, own, told = self.ask(params, own, steps, is_host(state.count))
        if not is_host(is_open):
            inner = _gated(is_open, self.rule.plan(params, inner, told), inner)
        elif is_open:
            inner = self.rule.plan(params, inner, told)
        return inner._replace(memory=(own, inner.memory))


class Product(AveragingRule):
    """Several rules that are updated together; ``memory = {key: state of a rule without its average}``."""

    rules: Mapping[Any, AveragingRule]

    def _inner(self, state: AverageState[Any], averages: Mapping[Any, PyTree]) -> dict[Any, AverageState[Any]]:
        """Return the state of each rule."""
        if not isinstance(state.memory, dict) or state.memory.keys() != self.rules.keys():
            got = list(state.memory) if isinstance(state.memory, dict) else type(state.memory).__name__
            raise foreign(self, f"a memory of {list(self.rules)}, got {got}")
        return {
            key: AverageState(
                match_count(check_count(count, f"state.memory[{key!r}].count", 0), state.count), averages[key], memory
            )
            for key, (count, _, memory) in state.memory.items()
        }

    def _joined(
        self, states: Mapping[Any, AverageState[Any]], average: PyTree, counting: Iterable[Any]
    ) -> AverageState[Any]:
        """Return the state of all; its count is the least of the rules ``counting``."""
        # While torch.compile traces, a plain dict without arrays is no tree.
        memory = OrderedDict((key, states[key]._replace(average=())) for key in self.rules)
        return AverageState(functools.reduce(minimum, [states[key].count for key in counting]), average, memory)


class Rules(Mapping[Any, AveragingRule]):
    """Rules by key: a mapping that does not change, and so hashes.

    Raises:
        TypeError: it is no mapping, or one of them is no rule.
        ValueError: it is empty.
    """

    def __init__(self, rules: Mapping[Any, AveragingRule]) -> None:
        if not isinstance(rules, Mapping):
            raise TypeError(f"rules must be a dict of rules, got {rules!r} of {type(rules).__name__}")
        if not rules:
            raise ValueError(f"rules must have at least one rule, got {rules!r}")
        self._rules = {key: check_rule(rule, f"rules[{key!r}]") for key, rule in rules.items()}

    def __getitem__(self, key: Any) -> AveragingRule:
        return self._rules[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))

    def __repr__(self) -> str:
        return repr(self._rules)


def check_rule(rule: Any, name: str = "rule") -> AveragingRule:
    """Return ``rule`` if it is one.

    Raises:
        TypeError: it is none.
    """
    if isinstance(rule, AveragingRule):
        return rule
    made = f"; an instance is meant: {rule.__name__}(...)" if isinstance(rule, type) else ""
    raise TypeError(f"{name} must be an AveragingRule such as EMA(0.999), got {rule!r} of {type(rule).__name__}{made}")


def _gated(is_open: Any, planned: AverageState[Any], state: AverageState[Any]) -> AverageState[Any]:
    """Return the plan that changes nothing where a door is closed, which only a device knows."""
    kept = trees.beneath(planned.memory, state.memory)
    memory = iter([_gated_leaf(is_open, new, old) for new, old in kept])
    return AverageState(
        where(is_open, planned.count, state.count),
        trees.tree_map(lambda average: _gated_leaf(is_open, average, average), planned.average),
        trees.tree_map(lambda _: next(memory), planned.memory),
    )


def _gated_leaf(is_open: Any, new: Any, old: Any) -> Any:
    if isinstance(new, Lerp):
        return Lerp(_gated_leaf(is_open, new.old, new.old), new.new, where(is_open, check_weight(new.weight), 0.0))
    if isinstance(new, Apply):
        raise TypeError(
            "a function of averages (AvgFn, MultiAvgFn) cannot stand behind a door that only the device knows to be "
            "open: Every and SkipNonFinite then need a state with host counts, got a 0-d array"
        )
    return new if new is old else where(is_open, new, old)
