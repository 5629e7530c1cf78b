"""What was saved of a state: values by name, brought into the forms of leaves, and taken over by the rules."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from functavg import kernels, trees
from functavg.counts import match_count
from functavg.plan import identities
from functavg.scalars import is_host
from functavg.state import T


@dataclass(frozen=True)
class Saved:
    """What a file holds of the state of some rule, seen from the place of one rule in it.

    Args:
        values: numbers and arrays by the names that ``to_state_dict`` gives them.
        rules: what wrote each memory, by the name of the memory: the ``repr`` of the rule.
        memory: the name of the memory of this place.
        average: the name of the average of this place.
    """

    values: Mapping[str, Any]
    rules: Mapping[str, str] = field(default_factory=dict)
    memory: str = "memory"
    average: str = "average"

    def written_by(self, rule: object) -> Saved | None:
        """Return what a rule of this class wrote, in this place or behind gates in it; None if none did."""
        writer = self.rules.get(self.memory, "").partition("(")[0]
        if writer == type(rule).__name__:
            return self
        inner = f"{self.memory}.1"  # the place of the memory behind a gate
        return replace(self, memory=inner).written_by(rule) if inner in self.rules else None

    def part(self, key: Any, average: str | None = None) -> Saved | None:
        """Return what is saved of one rule of several, None if there is none.

        Args:
            key: its key.
            average: the name of its average. Default: its key below the average of this place.
        """
        if f"{self.memory}.{key}.count" not in self.values:
            return None
        return replace(self, memory=f"{self.memory}.{key}.memory", average=average or f"{self.average}.{key}")

    def count_entries(self, place: str) -> int:
        """Return how many entries of a list or tuple are saved."""
        number = 0
        while any(name.startswith(f"{place}.{number}.") or name == f"{place}.{number}" for name in self.values):
            number += 1
        return number

    def take(self, tree: T, place: str) -> T:
        """Return a tree with what is saved under a name in the place of each leaf that it fits, by name and shape."""
        leaves, spec = trees.flatten(tree)
        names = [f"{place}.{name}" if name else place for name in trees.names(spec)]
        fits = [
            index
            for index, (name, leaf) in enumerate(zip(names, leaves, strict=True))
            if name in self.values and get_shape(self.values[name]) == get_shape(leaf)
        ]
        loaded = load_leaves([names[index] for index in fits], [leaves[index] for index in fits], self.values)
        keys = identities(leaves)
        known = {keys[index]: value for index, value in zip(reversed(fits), reversed(loaded), strict=True)}
        taken: T = trees.unflatten(spec, [known.get(key, leaf) for key, leaf in zip(keys, leaves, strict=True)])
        return taken


def load_leaves(names: Sequence[str], leaves: Sequence[Any], saved: Mapping[str, Any]) -> list[Any]:
    """Return saved numbers and arrays in the forms of leaves, in new memory; leaves that are one array stay one.

    Raises:
        TypeError: a value is of another type than its leaf; the message has its name.
        ValueError: a value has another shape or other shards.
    """
    loaded: list[Any] = [None] * len(leaves)
    by_kernel: dict[str | None, list[int]] = {}
    for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if is_host(leaf):
            loaded[index] = _convert_number(saved[name], leaf, name)
        else:
            by_kernel.setdefault(kernels.kernel_name(leaf), []).append(index)
    for kernel_name, indices in by_kernel.items():
        if kernel_name is None:
            raise TypeError(f"{names[indices[0]]}: the leaf of `like` is neither a number nor an array")
        kernel = kernels.load(kernel_name)
        news = [_convert_array(saved[names[index]], leaves[index], kernel_name) for index in indices]
        olds = [_move_off_meta(leaves[index], new) for index, new in zip(indices, news, strict=True)]
        groups = kernel.prepare([olds], news, lambda index, indices=indices: names[indices[index]])
        (results,) = kernel.lerp(groups, [1.0], False)
        for index, result in zip(indices, results, strict=True):
            loaded[index] = result
    firsts: dict[Hashable, Any] = {}
    return [firsts.setdefault(key, value) for key, value in zip(identities(leaves), loaded, strict=True)]


def get_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, () for anything else."""
    return tuple(getattr(value, "shape", ()))


def _convert_number(value: Any, like: float, name: str) -> float:
    """Return a value as a host number; it may have become a 0-d array on its way."""
    number = value.item() if getattr(value, "shape", None) == () else value
    kind = int if isinstance(like, int) else float
    if not isinstance(number, (int, kind)) or isinstance(number, bool) != isinstance(like, bool):
        raise TypeError(f"{name}: expected a number like {like!r}, got {value!r} of {type(value).__name__}")
    return number


def _convert_array(value: Any, like: Any, kernel_name: str) -> Any:
    """Return a value for an array; a host count becomes a device count where ``like`` is one."""
    if type(value) is int and kernel_name != "numpy" and like.ndim == 0:
        return match_count(value, like)
    return value


def _move_off_meta(like: Any, value: Any) -> Any:
    """Return an array to load a value like: ``like``, or one on the device of the value where that is on meta."""
    if getattr(like, "is_meta", False) and hasattr(value, "is_meta"):
        return like.new_empty(like.shape, device=value.device)
    return like
