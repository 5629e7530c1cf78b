"""What every rule is: a plan for one update, and for most a weight."""

from __future__ import annotations

__all__ = ["AveragingRule", "WeightRule"]

from abc import ABC, abstractmethod
from typing import Any

from functavg import trees
from functavg.checks import check_count, check_state
from functavg.counts import write_counts_
from functavg.plan import Lerp, check_scalar, copy_leaves, run
from functavg.rules.growth import grow_state
from functavg.rules.saved import Saved
from functavg.scalars import is_host, lift
from functavg.state import AverageState, Count, PyTree, T, Weight


class AveragingRule(ABC):
    """A rule for running averages: pure functions ``init`` and ``update`` over a state that is all there is.

    A rule is a frozen dataclass: it prints as the call that makes it, compares, hashes and pickles. One that
    overrides ``plan`` (and ``init``, where it has memory) can average by anything; one whose step has a single
    weight derives from :class:`WeightRule` instead.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.EMA(0.9)
        >>> state = rule.init({"w": np.zeros(1)})
        >>> state = rule.update({"w": np.zeros(1)}, state)
        >>> state = rule.update({"w": np.ones(1)}, state)
        >>> state.count, state.average["w"].round(6).tolist()
        (2, [0.1])

    Source: the shape of the API is that of optax.GradientTransformation.
    """

    def init(self, params: T, /, *, dtype: Any = None, device: Any = None) -> AverageState[T]:
        """Return the state before the first update: count 0 and a copy of the params as the average.

        Args:
            params: any pytree of arrays; real and complex leaves are averaged, integers and bools take the newest
                value, Python numbers are 0-d arrays and ``None`` is structure.
            dtype: dtype of the real leaves of the average, complex ones take its complex counterpart. Default: that
                of the params, and float32 for those of less than 32 bits.
            device: where the average lives. Default: where the params are.

        Returns:
            The state; its average shares no memory with the params.

        Raises:
            TypeError: a leaf cannot be averaged (sparse, quantised, no array), named by its path.
            ValueError: ``dtype`` cannot hold an average.
        """
        return AverageState(0, copy_leaves(params, dtype=dtype, device=device), ())

    @abstractmethod
    def plan(self, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
        """Return the next state, in which what changes is an intention (see ``functavg.plan``). Touches no array.

        Args:
            params: the newest iterate.
            state: the state before.
            steps: the number of steps since the last update.
        """

    def update(
        self, params: PyTree, state: AverageState[T], /, *, steps: Count = 1, inplace: bool = False
    ) -> AverageState[T]:
        """Return the state after averaging in one more iterate.

        Args:
            params: the newest iterate, with the structure, shapes and kinds of leaves that ``init`` saw; dtypes and
                devices may differ.
            state: the state before.
            steps: the number of steps since the last update, a positive integer. Default: 1.
            inplace: whether to reuse the memory of the average, and of counts that are 0-d torch tensors. ``state``
                must then not be used again. Default: ``False``, which leaves ``state`` as it is; what did not change
                is shared with it.

        Returns:
            The next state.

        Raises:
            TypeError, ValueError: the params do not fit the state, or an argument is out of range. Nothing was
                changed then.
        """
        result: AverageState[T] = run(plan_update(self, params, state, steps), inplace=inplace)
        return result if not inplace or is_host(state.count) else write_counts_(state, result)

    def extend(self, params: PyTree, state: AverageState[T], /) -> AverageState[T]:
        """Return the state grown to params that have more leaves, such as those of a new block or an adapter.

        It is ``init(params)`` with every leaf that the old state has, by path. New leaves start from the params and
        share the clock, but for a ``Partition``, which gives them that of their label.

        Args:
            params: the params with all leaves, the old ones in their old shapes.
            state: the state to grow.

        Returns:
            The grown state; leaves that the old one has are the same arrays.

        Raises:
            TypeError: ``state`` is not an AverageState, or a new leaf cannot be averaged.
            ValueError: a leaf of the old state would vanish or change its shape.

        Example:
            >>> import functavg, numpy as np
            >>> rule = functavg.EMA(0.9)
            >>> state = rule.update({"a": np.ones(1)}, rule.init({"a": np.zeros(1)}))
            >>> rule.extend({"a": np.zeros(1), "b": np.zeros(1)}, state)
            AverageState(count=1, average={'a': array([1.]), 'b': array([0.])}, memory=())
        """
        _check_order(params, state, "extend(params, state)")
        return grow_state(state, self.init(params))

    def resume(self, average: T, count: Count, saved: Saved | None = None, /) -> AverageState[Any]:
        """Return the state that goes on from an average that another rule or another library has made.

        Args:
            average: the average, a tree as ``init`` takes one; it is copied.
            count: how many steps were averaged. Clocks that the memory of the rule has are set to it.
            saved: what is known of the memory, and of further averages. Default: nothing; they start from ``average``.

        Returns:
            The state.

        Example:
            >>> import functavg, numpy as np
            >>> rule = functavg.LAWA(2)
            >>> state = rule.resume({"w": np.ones(1)}, 10)
            >>> rule.update({"w": np.zeros(1)}, state).average
            {'w': array([0.5])}
        """
        state = self.init(average)
        mine = None if saved is None else saved.written_by(self)
        memory = state.memory if mine is None else mine.take(state.memory, mine.memory)
        return state._replace(count=count, memory=memory)

    def _name_memories(self, place: str = "memory") -> dict[str, AveragingRule]:
        """Return the rules that keep a memory, this one and those inside it, by the names that their memories have."""
        return {place: self}


class WeightRule(AveragingRule):
    """A rule of one formula, the weight of the newest iterate: ``average + weight * (params - average)``.

    A custom rule overrides ``weight`` and nothing else.

    Example:
        >>> from dataclasses import dataclass
        >>> import functavg, numpy as np
        >>> @dataclass(frozen=True)
        ... class Half(functavg.WeightRule):
        ...     def weight(self, count, steps):
        ...         return 0.5
        >>> rule = Half()
        >>> rule.update(np.ones(2), rule.init(np.zeros(2))).average
        array([0.5, 0.5])
    """

    @abstractmethod
    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return the weight of the newest iterate.

        Args:
            count: steps averaged before, a host number, or a 0-d array where the state's count is one.
            steps: steps since the last update, likewise.
        """

    def plan(self, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
        """Return the next state, its average as the intention ``Lerp(average, params, weight)``."""
        weight = self.weight(lift(state.count), lift(steps))
        return AverageState(state.count + steps, Lerp(state.average, params, weight), state.memory)


def plan_update(rule: AveragingRule, params: PyTree, state: AverageState[Any], /, steps: Count) -> AverageState[Any]:
    """Check the arguments of one update and return its plan, without carrying it out.

    Raises:
        TypeError, ValueError: an argument is of another kind, or out of range.
    """
    _check_order(params, state, "update(params, state)")
    count, steps = check_count(state.count, "state.count", 0), check_count(steps, "steps", 1)
    if count is not state.count:
        state = state._replace(count=count)
    if not (is_host(count) and is_host(steps)):
        leaves, _ = trees.flatten(state.average)
        check_scalar(count, leaves, "state.count")
        check_scalar(steps, leaves, "steps")
    return rule.plan(params, state, steps)


def check_rule(rule: Any, name: str = "rule") -> AveragingRule:
    """Return ``rule`` if it is one.

    Raises:
        TypeError: it is not a rule.
    """
    if isinstance(rule, AveragingRule):
        return rule
    expected = f"{name} must be an AveragingRule such as EMA(0.999)"
    if is_rule_class(rule):
        raise TypeError(f"{expected}, got the class {rule.__name__}; pass an instance: {rule.__name__}(...)")
    advice = "; to average by a function, wrap it: AvgFn(fn) or WeightFn(fn)" if callable(rule) else ""
    raise TypeError(f"{expected}, got {rule!r} of {type(rule).__name__}{advice}")


def is_rule_class(value: Any) -> bool:
    """Tell whether a value is a class of rules, where an instance of it is meant."""
    return isinstance(value, type) and issubclass(value, AveragingRule)


def _check_order(params: PyTree, state: Any, call: str) -> None:
    """Raise a TypeError unless ``state`` is a state and ``params`` is not."""
    if isinstance(params, AverageState):
        swapped = "" if isinstance(state, AverageState) else "; `params` and `state` are swapped"
        raise TypeError(f"{call}: params must be a tree of arrays, got an AverageState{swapped}")
    check_state(state, call)
