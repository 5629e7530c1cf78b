"""Products: combinators of several rules that are updated together."""

from __future__ import annotations

__all__: list[str] = []

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from functavg.checks import check_count
from functavg.counts import match_count
from functavg.rules.base import AveragingRule, check_rule
from functavg.rules.memory import state_mismatch
from functavg.scalars import minimum
from functavg.state import AverageState, PyTree


class Product(AveragingRule):
    """Several rules that are updated together; ``memory = {key: state of a rule without its average}``."""

    rules: Mapping[Any, AveragingRule]

    def _split_state(self, state: AverageState[Any], averages: Mapping[Any, PyTree]) -> dict[Any, AverageState[Any]]:
        """Return the state of each rule.

        Raises:
            TypeError, ValueError: the state was made by another rule.
        """
        if not isinstance(state.memory, dict) or state.memory.keys() != self.rules.keys():
            got = list(state.memory) if isinstance(state.memory, dict) else type(state.memory).__name__
            raise state_mismatch(self, f"a memory of {list(self.rules)}, got {got}")
        states = {}
        for key, (count, _, memory) in state.memory.items():
            count = check_count(count, f"state.memory[{key!r}].count", 0)
            states[key] = AverageState(match_count(count, state.count), averages[key], memory)
        return states

    def _name_memories(self, place: str = "memory") -> dict[str, AveragingRule]:
        named: dict[str, AveragingRule] = {place: self}
        for key, rule in self.rules.items():
            named |= rule._name_memories(f"{place}.{key}.memory")
        return named

    def _join_states(
        self, states: Mapping[Any, AverageState[Any]], average: PyTree, counting: Iterable[Any]
    ) -> AverageState[Any]:
        """Return one state of all; its count is the least of the rules ``counting``."""
        # While torch.compile traces, a plain dict without arrays is no tree.
        memory = OrderedDict((key, states[key]._replace(average=())) for key in self.rules)
        return AverageState(functools.reduce(minimum, [states[key].count for key in counting]), average, memory)


class Rules(Mapping[Any, AveragingRule]):
    """Rules by key: a mapping that cannot be changed, and so hashes, unlike a dict.

    Raises:
        TypeError: it is not a mapping, or a value is not a rule.
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
