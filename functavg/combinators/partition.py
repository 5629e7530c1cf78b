"""Rules for different leaves."""

from __future__ import annotations

__all__ = ["Partition"]

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from functavg import trees
from functavg.combinators.gate import Gate
from functavg.combinators.product import Product, Rules
from functavg.combinators.several import Several
from functavg.plan import Intention, identities
from functavg.rules.base import AveragingRule
from functavg.rules.saved import Saved
from functavg.state import AverageState, Count, PyTree, T


@dataclass(frozen=True)
class Partition(Product):
    """Different rules for different leaves, chosen by label.

    Each rule sees its own leaves under the paths that they have in the params. ``memory`` is ``{label: state without
    its average}``. The clock of a label runs while it has leaves, and the count is the least of these; leaves that
    ``extend`` adds take the clock of their label, which starts from 0 where it had none before.

    Args:
        rules: ``{label: rule}``, at least one. ``Several`` may not be among them, at any depth.
        label: ``label(name, leaf) -> label``, with ``name`` the keys joined by dots as in ``named_parameters``; or a
            tree of labels, in which one label may stand for a whole subtree of the params. A leaf must have the same
            label at every update.

    Raises:
        TypeError: ``rules`` is not a mapping to rules, or one of them has several averages.
        ValueError: ``rules`` is empty. At ``init`` and ``update``: a leaf has no label that is known, or two leaves
            share memory and not their label.

    Example:
        >>> import functavg, numpy as np
        >>> rules = {"slow": functavg.EMA(0.75), "newest": functavg.Latest()}
        >>> rule = functavg.Partition(rules, {"body": "slow", "head": "newest"})
        >>> state = rule.init({"body": [np.zeros(1), np.zeros(1)], "head": np.zeros(1)})
        >>> for value in (0.0, 1.0):
        ...     new = np.full(1, value)
        ...     state = rule.update({"body": [new, new + 1], "head": new}, state)
        >>> state.average
        {'body': [array([0.25]), array([1.25])], 'head': array([1.])}

    Source: optax.partition.
    """

    rules: Mapping[Any, AveragingRule]
    label: Callable[[str, Any], Any] | PyTree = field(hash=False)
    _by_path: dict[tuple[Any, ...], Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", Rules(self.rules))
        if not callable(self.label):
            labels, spec = trees.flatten(self.label)
            object.__setattr__(self, "label", trees.unflatten(spec, labels))  # the caller may change his
            self._by_path.update(zip(trees.keys(spec), labels, strict=True))
        for label, rule in self.rules.items():
            if _has_several(rule):
                raise TypeError(
                    f"rules[{label!r}] must have one average for each leaf, got {rule!r}. "
                    "Put it the other way round: Several({name: Partition(...)})"
                )

    def init(self, params: T, /, *, dtype: Any = None, device: Any = None) -> AverageState[T]:
        leaves, spec = trees.flatten(params)
        division = self._divide(spec, leaves)
        division.check_aliases(leaves)
        states = {
            label: self.rules[label].init(part, dtype=dtype, device=device)
            for label, part in division.split(self.rules, leaves).items()
        }
        return self._join_states(states, division.join(states), states)

    def resume(self, average: T, count: Count, saved: Saved | None = None, /) -> AverageState[Any]:
        """Return the state that goes on; a label without leaves has averaged nothing."""
        mine = None if saved is None else saved.written_by(self)
        leaves, spec = trees.flatten(average)
        division = self._divide(spec, leaves)
        division.check_aliases(leaves)
        states = {}
        for label, leaves_of in division.split(self.rules, leaves).items():
            part = saved if mine is None else mine.part(label, mine.average)
            own = count if label in division.used else 0
            if mine is not None and part is not None:
                own = mine.take(own, f"{mine.memory}.{label}.count")
            states[label] = self.rules[label].resume(leaves_of, own, part)
        return self._join_states(states, division.join(states), division.used or self.rules)

    def plan(self, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
        """Return the plans of all rules that have leaves; their averages are joined when the plan is committed."""
        averages, spec = trees.flatten(state.average)
        leaves, params_spec = trees.flatten(params)
        leaves = trees.align(spec, params_spec, leaves)
        division = self._divide(spec, leaves)
        division.check_aliases(averages)
        news = division.split(self.rules, leaves)
        states = self._split_state(state, division.split(self.rules, averages))
        for label in division.used:
            states[label] = self.rules[label].plan(news[label], states[label], steps)
        return self._join_states(states, division.join(states), division.used or self.rules)

    def _divide(self, spec: Any, leaves: Sequence[Any]) -> _Division:
        """Return the division of a tree by labels."""
        keys = trees.keys(spec)
        if callable(self.label):
            labels = [self.label(".".join(map(str, path)), leaf) for path, leaf in zip(keys, leaves, strict=True)]
        else:
            labels = [self._label_above(path) for path in keys]
        for index, label in enumerate(labels):
            if label not in self.rules:
                raise ValueError(
                    f"{trees.paths(spec)[index]}: expected a label of {list(self.rules)}, got {label!r}. "
                    "Add a rule for it, such as Latest() or Freeze(), or label it otherwise"
                )
        return _Division(spec, keys, labels)

    def _label_above(self, path: tuple[Any, ...]) -> Any:
        """Return the label at this path of the tree of labels, or above it, None if there is none."""
        above = (path[:end] for end in range(len(path) + 1))
        return next((self._by_path[some] for some in above if some in self._by_path), None)


class _Division:
    """A tree divided by labels into parts: nested dicts with the paths of the tree, each with the leaves of a label."""

    def __init__(self, spec: Any, keys: list[tuple[Any, ...]], labels: list[Any]) -> None:
        self.spec = spec
        self.keys = keys
        self.labels = labels
        self.used = list(dict.fromkeys(labels))

    def split(self, all_labels: Iterable[Any], leaves: Sequence[Any]) -> dict[Any, PyTree]:
        """Return the part of each label."""
        parts: dict[Any, Any] = {label: {} for label in all_labels}
        for path, label, leaf in zip(self.keys, self.labels, leaves, strict=True):
            if not path:  # the tree is one array
                parts[label] = leaf
                break
            node = parts[label]
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = leaf
        return parts

    def join(self, states: Mapping[Any, AverageState[Any]]) -> PyTree:
        """Return the tree of these averages, or a node that becomes it when the plan is committed."""
        return _join_parts(self, [states[label].average for label in self.used])

    def check_aliases(self, leaves: Sequence[Any]) -> None:
        """Raise a ValueError where two leaves of different labels share memory, which would be averaged twice."""
        holders: dict[Hashable, int] = {}
        for index, key in enumerate(identities(leaves)):
            first = holders.setdefault(key, index)
            if self.labels[first] != self.labels[index]:
                paths = trees.paths(self.spec)
                raise ValueError(
                    f"{paths[first]} and {paths[index]} share one array, but have the labels "
                    f"{self.labels[first]!r} and {self.labels[index]!r}; give them one label"
                )


class _Parts:
    """A tree whose parts are intentions: a node, which is unflattened as the tree when results replace these."""

    def __init__(self, division: _Division, parts: Sequence[PyTree]) -> None:
        self.division = division
        self.parts = parts


def _join_parts(division: _Division, parts: Sequence[PyTree]) -> PyTree:
    if any(isinstance(part, (*Intention, _Parts)) for part in parts):
        return _Parts(division, parts)
    by_label = dict(zip(division.used, parts, strict=True))
    keys = zip(division.keys, division.labels, strict=True)
    leaves = [functools.reduce(operator.getitem, path, by_label[label]) for path, label in keys]
    return trees.unflatten(division.spec, leaves)


trees.register(_Parts, lambda node: (node.parts, node.division), _join_parts)


def _has_several(rule: AveragingRule) -> bool:
    if isinstance(rule, Gate):
        return _has_several(rule.rule)
    return isinstance(rule, Several) or (isinstance(rule, Product) and any(map(_has_several, rule.rules.values())))
