"""What every rule is: a plan for one update, and for most a weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from functavg import trees
from functavg.checks import check_count
from functavg.counts import match_count, write_count_
from functavg.plan import Lerp, copied, run
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
        return AverageState(0, copied(params, dtype=dtype, device=device), ())

    @abstractmethod
    def plan(self, params: PyTree, state: AverageState[Any], steps: Count) -> AverageState[Any]:
        """Return the next state, in which what changes is an intention (see ``functavg.plan``). Touches no array.

        Args:
            params: the newest iterate.
            state: the state before.
            steps: the number of steps since the last update.
        """

    def update(
        self, params: T, state: AverageState[T], /, *, steps: Count = 1, inplace: bool = False
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
        result: AverageState[T] = run(planned(self, params, state, steps), inplace=inplace)
        return result if not inplace or is_host(state.count) else _counted_in_place(state, result)


def planned(rule: AveragingRule, params: PyTree, state: AverageState[Any], steps: Count) -> AverageState[Any]:
    """Return the plan of one update after checking its arguments, without carrying it out.

    Raises:
        TypeError, ValueError: an argument is none of the kind, or out of range.
    """
    if not isinstance(state, AverageState):
        swapped = " (are `params` and `state` swapped?)" if isinstance(params, AverageState) else ""
        raise TypeError(f"update(params, state): state must be an AverageState, got {type(state).__name__}{swapped}")
    if isinstance(params, AverageState):
        raise TypeError("update(params, state): params must be a tree of arrays, got an AverageState")
    state = state._replace(count=check_count(state.count, "state.count", 0))
    return rule.plan(params, state, check_count(steps, "steps", 1))


def _counted_in_place(before: AverageState[T], after: AverageState[T]) -> AverageState[T]:
    """Return the state ``after`` with its counts in the memory of those ``before``, where they can be written to.

    They come last: whatever fails has left the count as it was.
    """
    olds, old_spec = trees.flatten(before.memory)
    news, spec = trees.flatten(after.memory)
    by_path = dict(zip(old_spec.paths(), olds, strict=True))  # a memory that was loaded may have other containers
    pairs = [(by_path.get(path), new) for path, new in zip(spec.paths(), news, strict=True)]
    takers: dict[int, Any] = {}  # of two counts that were one and are no longer, the first takes its memory
    *memory, count = [
        write_count_(old, new) if takers.setdefault(id(old), new) is new else new
        for old, new in [*pairs, (before.count, after.count)]
    ]
    return AverageState(count, after.average, trees.unflatten(spec, memory))


def divided(rule: AveragingRule, state: AverageState[Any], least: int = 0) -> tuple[Count, Any]:
    """Return the two parts of a memory: a count of the rule's own, made of the kind of the state's, and the rest.

    Raises:
        TypeError, ValueError: the state was made by another rule.
    """
    memory = state.memory
    if not (isinstance(memory, (tuple, list)) and len(memory) == 2):
        raise foreign(rule, f"a memory of two parts, got {type(memory).__name__}")
    return match_count(check_count(memory[0], "state.memory[0]", least), state.count), memory[1]


def foreign(rule: AveragingRule, problem: str) -> ValueError:
    """Return the error for a state that another rule made."""
    name = type(rule).__name__
    return ValueError(f"state is none of {name}: expected {problem}. Pass what {name}(...).init or .update returned")


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

    def plan(self, params: PyTree, state: AverageState[Any], steps: Count) -> AverageState[Any]:
        """Return the next state, its average as the intention ``Lerp(average, params, weight)``."""
        weight = self.weight(lift(state.count), lift(steps))
        return AverageState(state.count + steps, Lerp(state.average, params, weight), state.memory)
