"""What an AveragedModel keeps beside its module: the memory of its rule, and further averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functavg import trees
from functavg.identity import are_shared
from functavg.kernels.torch import dtensor
from functavg.rules.base import AveragingRule
from functavg.state import AverageState, Count

Values = dict[str, Tensor]


class Beside:
    """The state of a rule less its count and its first average, which a module holds.

    Args:
        rule: the rule; one that keeps the ``init`` of its base has nothing beside.
        values: the tensors to average, by name.
    """

    def __init__(self, rule: AveragingRule, values: Values) -> None:
        self.memory: Any = ()
        self._keys: tuple[str, ...] = ()  # where the first average stands among several
        self._averages: Any = None  # the averages with None in its place
        self._tied = are_shared(list(values.values()))
        if type(rule).init is not AveragingRule.init:
            state = rule.init(values)
            self._keys = _first(state.average, trees.flatten(values)[1])
            self.keep(state)

    def state(self, count: Count, values: Values | trees.NamedList) -> AverageState[Any]:
        """Return the whole state, with the values of the first average."""
        remembers = type(self.memory) is not tuple or len(self.memory) > 0
        if remembers and isinstance(values, dict):  # a rule that gets no names remembers no tensors
            tied = are_shared(list(values.values()))
            if self._tied and not tied:
                self._part()
            self._tied = tied
        return AverageState(count, _put(self._averages, self._keys, values), self.memory)

    def keep(self, state: AverageState[Any]) -> None:
        """Keep what the module does not hold."""
        self.memory = state.memory
        self._averages = _put(state.average, self._keys, None)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move all tensors as ``fn`` does, without changing their dtypes."""
        done: dict[int, Tensor] = {}  # what is shared stays shared

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in done:
                moved = fn(leaf)
                done[id(leaf)] = moved if moved.dtype == leaf.dtype else leaf.to(moved.device)
            return done[id(leaf)]

        self.memory, self._averages = trees.tree_map(move, (self.memory, self._averages))

    def _part(self) -> None:
        """Give tied tensors memory of their own, where the first average is tied no more: moves may part parameters."""
        known: set[int] = set()

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) not in known:
                known.add(id(leaf))
                return leaf
            return leaf.clone()

        self.memory, self._averages = trees.tree_map(part, (self.memory, self._averages))

    def extra_state(self) -> dict[str, Any] | None:
        """Return everything as a plain dict of tensors and numbers by path, None where there is nothing."""
        leaves, spec = trees.flatten((self._averages, self.memory))
        return dict(zip(trees.paths(spec), leaves, strict=True)) or None

    def load(self, extra: dict[str, Any] | None) -> None:
        """Take over what ``extra_state`` returned.

        Raises:
            TypeError, ValueError: it is that of another rule or of another model; nothing was changed.
        """
        leaves, spec = trees.flatten((self._averages, self.memory))
        paths = trees.paths(spec)
        if not isinstance(extra, dict):  # None, or what torch.distributed.checkpoint puts where a file has nothing
            extra = {}
        if set(paths) != set(extra):
            lacks, has = sorted(set(paths) - set(extra)), sorted(set(extra) - set(paths))
            raise ValueError(
                f"the extra state is that of another rule or model: it lacks {lacks[:4]} and has {has[:4]}. "
                "Load it into an AveragedModel with the rule that it was saved with"
            )
        with torch.inference_mode(False):
            loaded = [_like(extra[path], leaf, path) for path, leaf in zip(paths, leaves, strict=True)]
        firsts = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, Tensor)}
        shared = [loaded[firsts.get(id(leaf), index)] for index, leaf in enumerate(leaves)]
        self._averages, self.memory = trees.unflatten(spec, shared)


def _first(average: Any, spec: Any) -> tuple[str, ...]:
    """Return the keys that lead to the first tree of this structure."""
    if trees.flatten(average)[1] == spec:
        return ()
    key = next(iter(average))
    return (key, *_first(average[key], spec))


def _put(averages: Any, keys: tuple[str, ...], values: Any) -> Any:
    """Return the averages with ``values`` where the keys lead."""
    if not keys:
        return values
    return {**averages, keys[0]: _put(averages[keys[0]], keys[1:], values)}


def _like(value: Any, leaf: Any, path: str) -> Any:
    if not isinstance(leaf, Tensor):
        return value
    if not isinstance(value, Tensor) or value.shape != leaf.shape:
        shape = tuple(getattr(value, "shape", ()))
        raise ValueError(f"{path} of the extra state must have shape {tuple(leaf.shape)}, got {shape}")
    if dtensor.is_sharded(leaf) and not dtensor.is_sharded(value):  # whole tensors of a full_state_dict
        value = dtensor.distribute(value, leaf)
    dtensor.check_shards(leaf, value, lambda: f"{path} of the extra state")
    device = value.device if leaf.is_meta else leaf.device  # onto meta, no value could be loaded
    return value.detach().to(device=device, dtype=leaf.dtype, copy=True)
