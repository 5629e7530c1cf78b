"""The state behind a module that holds an average: all that is not in its tensors and its count buffer."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from functavg import trees
from functavg.functional import lerp
from functavg.identity import are_aliased
from functavg.nn.master_copies import MasterCopies
from functavg.nn.trusted import Trusted
from functavg.rules.base import AveragingRule
from functavg.state import AverageState, Count

Values = dict[str, Tensor]


class HeldState:
    """An AverageState whose average, or the first of several, a module holds in its own tensors, rounded.

    The count is in a buffer. On the CPU it is read from there each time, which waits for nothing. Elsewhere the count
    that was last read or written is trusted while the buffer is (see ``Trusted``). A meta buffer has no value: the
    count of the host holds.

    Attributes:
        masters: the averages in the precision that they are averaged in.
        memory: the memory of the rule.
        was_reset: whether somebody has set the count back to 0, so that the rule has to begin anew.

    Args:
        dtype: the dtype that averages are held in. Default: that of the tensors, at least float32.
    """

    def __init__(self, dtype: Any = None) -> None:
        self.masters: MasterCopies = MasterCopies(dtype)
        self.memory: Any = ()
        self.averages: Any = None  # all averages, with None for the first
        self.keys: tuple[str, ...] = ()  # that lead to the first of several averages
        self.was_reset: bool = False
        self._tied = False
        self._count = 0
        self._known_count = Trusted()
        self._start: list[tuple[Tensor, int]] = []

    def init_(self, rule: AveragingRule, tensors: Values) -> None:
        """Start from the tensors to average, as the ``init`` of the rule does."""
        self.memory, self.averages, self.keys = (), None, ()
        self.was_reset = False
        self._tied = are_aliased(list(tensors.values()))
        if type(rule).init is not AveragingRule.init:
            values = self.masters.get_named(tensors)
            state = rule.init(values)
            self.keys = _find_first(state.average, trees.flatten(values)[1])
            self.keep(state)
        self.mark_start(tensors.values())

    # ---- the count

    def read_count(self, buffer: Tensor) -> int:
        """Return the count."""
        before = self._count
        if buffer.is_cpu:
            self._count = int(buffer)
        elif not buffer.is_meta and self._known_count.get([buffer]) is None:
            self._count = int(buffer)
            self._known_count.keep([buffer], [self._count])
        self.was_reset |= before > 0 and self._count == 0
        return self._count

    def write_count(self, buffer: Tensor, count: int) -> Tensor:
        """Write the count; return the buffer, a new one where the old cannot be written to."""
        if buffer.is_inference():
            with torch.inference_mode(False):
                buffer = torch.full_like(buffer, count)
        else:
            buffer.fill_(count)
        self._count = count
        if not buffer.is_cpu:
            self._known_count.keep([buffer], [count])
        return buffer

    # ---- the state

    def state(self, count: Count, values: Values | trees.NamedList) -> AverageState[Any]:
        """Return the whole state, with the values of the first average; untie the memory if these are tied no more."""
        remembers = type(self.memory) is not tuple or len(self.memory) > 0
        if remembers and isinstance(values, dict):  # a rule that gets no names remembers no tensors
            tied = are_aliased(list(values.values()))
            if self._tied and not tied:
                self._untie()
            self._tied = tied
        return AverageState(count, _put(self.averages, self.keys, values), self.memory)

    def keep(self, state: AverageState[Any]) -> None:
        """Keep the memory and all averages but the first, which the module holds."""
        self.memory = state.memory
        self.averages = _put(state.average, self.keys, None)

    def take_over_(self, state: AverageState[Any], tensors: Values) -> None:
        """Keep a whole state, with its first average written to these tensors."""
        self.keep(state)
        average = state.average
        for key in self.keys:
            average = average[key]
        olds = list(tensors.values())
        copies = self.masters.get(olds)
        lerp(dict(zip(tensors, copies, strict=True)), average, 1.0, inplace=True)
        if copies is not olds:
            self.masters.write_(olds, copies)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` to all tensors of the memory and of the averages but the first, and keep their dtypes."""
        done: dict[int, Tensor] = {}  # aliased tensors stay aliased

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in done:
                moved = fn(leaf)
                done[id(leaf)] = moved if moved.dtype == leaf.dtype else leaf.to(moved.device)
            return done[id(leaf)]

        self.memory, self.averages = trees.tree_map(move, (self.memory, self.averages))

    def _untie(self) -> None:
        """Copy tied tensors of the memory, as a move may have untied the parameters."""
        known: set[int] = set()

        def untie(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) not in known:
                known.add(id(leaf))
                return leaf
            return leaf.clone()

        self.memory, self.averages = trees.tree_map(untie, (self.memory, self.averages))

    # ---- weights that somebody else wrote before the first update

    def mark_start(self, tensors: Iterable[Tensor]) -> None:
        """Remember the tensors as they are before the first update."""
        self._start = [(tensor, _get_version(tensor)) for tensor in tensors]

    def were_written(self, tensors: list[Tensor]) -> bool:
        """Tell whether somebody wrote to the tensors or replaced them since ``mark_start``."""
        if len(tensors) != len(self._start):
            return False
        return any(
            _get_version(tensor) != version if tensor is start else not _are_equal(tensor, start)
            for tensor, (start, version) in zip(tensors, self._start, strict=True)
        )

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the versions of tensors, which a copy does not have."""
        return vars(self) | {"_known_count": Trusted(), "_start": [tensor for tensor, _ in self._start]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore everything, with the versions that the tensors have now."""
        vars(self).update(state)
        self._start = [(tensor, _get_version(tensor)) for tensor in state["_start"]]


def _find_first(average: Any, spec: Any) -> tuple[str, ...]:
    """Return the keys that lead to the first tree of this structure."""
    if trees.flatten(average)[1] == spec:
        return ()
    key = next(iter(average))
    return (key, *_find_first(average[key], spec))


def _put(averages: Any, keys: tuple[str, ...], values: Any) -> Any:
    """Return the averages with ``values`` where the keys lead."""
    if not keys:
        return values
    return {**averages, keys[0]: _put(averages[keys[0]], keys[1:], values)}


def _get_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _are_equal(tensor: Tensor, start: Tensor) -> bool:
    """Tell whether a tensor holds the values of the start; True if they cannot be compared."""
    if type(tensor) is not type(start) or tensor.is_meta or start.is_meta:
        return True
    return tensor.shape == start.shape and torch.equal(tensor.detach(), start.detach().to(tensor))
