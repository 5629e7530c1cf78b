"""One load of a state_dict into an average: it takes over what fits, or changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from functavg import trees
from functavg.kernels.torch.dtensor import distribute, get_shard, is_sharded
from functavg.nn.held_state import HeldState
from functavg.rules.base import AveragingRule
from functavg.rules.saved import Saved, load_leaves
from functavg.saving import to_state_dict
from functavg.state import AverageState

Slot = tuple[dict[str, Any], str]
"""The store of a module and the name of a tensor in it."""


# ---- the extra state: what neither the count nor the module holds


def make_extra_state(held: HeldState, rule: AveragingRule) -> dict[str, Any] | None:
    """Return the memory of a rule and averages beside the first, None where there are none.

    Numbers and tensors have the names of ``functavg.to_state_dict``. ``rules`` tells which rule wrote each memory,
    ``module`` which average the module holds.
    """
    values = to_state_dict(AverageState(0, held.averages, held.memory))
    del values["count"]
    if not values:
        return None
    memories = {
        place: repr(inner)
        for place, inner in rule._name_memories().items()
        if any(name == place or name.startswith(f"{place}.") for name in values)
    }
    return {"rules": memories, "module": ".".join(("average", *held.keys)), **values}


def find_problem(held: HeldState, rule: AveragingRule, extra: dict[str, Any]) -> str | None:
    """Return why an extra state is not that of this rule and this model, None where it is."""
    own = make_extra_state(held, rule) or {}
    mine, theirs = _get_values(own), _get_values(extra)
    missing = [name for name in mine if name not in theirs]
    unexpected = [name for name in theirs if name not in mine]
    reshaped = [
        f"{name} of shape {_shape(theirs[name])} for {_shape(mine[name])}"
        for name in mine
        if name in theirs and _shape(theirs[name]) != _shape(mine[name])
    ]
    if not (missing or unexpected or reshaped) and _get_kinds(own) == _get_kinds(extra):
        return None
    writer = extra.get("rules", {}).get("memory", "a rule without memory, such as EMA, or another library")
    return (
        f"the memory of the average was written by {writer} and is read by {rule!r}: missing {trees.some(missing)}; "
        f"unexpected {trees.some(unexpected)}; reshaped {trees.some(reshaped)}"
    )


def load_extra_state(held: HeldState, rule: AveragingRule, extra: dict[str, Any]) -> None:
    """Take over an extra state that fits.

    Raises:
        TypeError, ValueError: it is that of other shards; nothing was changed.
    """
    own = _get_values(make_extra_state(held, rule) or {})
    with torch.inference_mode(False):
        loaded = load_leaves(list(own), list(own.values()), _shard_alike(_get_values(extra), own))
    _, spec = trees.flatten((held.averages, held.memory))
    held.averages, held.memory = trees.unflatten(spec, loaded)


def _get_values(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name not in ("rules", "module")}


def _get_kinds(extra: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the classes of the rules that wrote an extra state; with other numbers they read the same memory."""
    return extra.get("module"), {place: rule.partition("(")[0] for place, rule in extra.get("rules", {}).items()}


def _shard_alike(values: dict[str, Any], likes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with whole tensors, as of a full state_dict, sharded where their likes are."""
    return {
        name: distribute(value, likes[name])
        if isinstance(value, Tensor) and not is_sharded(value) and is_sharded(likes.get(name))
        else value
        for name, value in values.items()
    }


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


# ---- one load


@dataclass
class Loading:
    """What one ``load_state_dict`` has to know from its beginning to its end.

    While torch loads the module, the master copies of its low-precision tensors stand in their places: so their values
    arrive unrounded, whatever hooks do to names.

    Args:
        strict: whether everything has to fit; None: the module around the average decides.
    """

    strict: bool | None
    extra: dict[str, Any] = field(default_factory=dict)
    _backup: Any = None
    _places: dict[int, tuple[Any, Tensor, list[Slot]]] = field(default_factory=dict)

    def begin(self, averaged: Any, keys: Mapping[str, Any], prefix: str, errors: list[str]) -> None:
        """Put the master copies into the places of their tensors, and keep what the load may overwrite."""
        self._prefix, self._errors, self._known_errors = prefix, errors, len(errors)
        self._has_weights = any(name.startswith(f"{prefix}module.") for name in keys)
        self._has_count = f"{prefix}n_averaged" in keys
        held, tensors = averaged._held, averaged._averaged()
        masters = held.masters.get_named(tensors)
        if not _is_sure(averaged, keys, prefix):
            self._backup = Backup(averaged, masters)
        low = {id(tensor): masters[name] for name, tensor in tensors.items() if masters[name] is not tensor}
        stores = [store for part in averaged.module.modules() for store in (part._parameters, part._buffers)]
        for store in stores:
            for name, tensor in store.items():
                if id(tensor) in low:
                    master = low[id(tensor)]
                    if isinstance(tensor, Parameter):
                        master = Parameter(master, requires_grad=tensor.requires_grad)
                    _, master, slots = self._places.setdefault(id(tensor), (tensor, master, []))
                    slots.append((store, name))
                    store[name] = master

    def finish(self, averaged: Any, missing: list[str]) -> None:
        """Put the tensors back with the rounding of what was loaded, and take over the rest, or undo everything."""
        if len(self._errors) > self._known_errors:
            self.undo(averaged)
            return
        self._round(averaged)
        held, rule = averaged._held, averaged.rule
        averaged.n_averaged = averaged.n_averaged.to(torch.int64)
        key = f"{self._prefix}_extra_state"
        is_missing = key in missing
        if self._has_weights and not self._has_count:
            warnings.warn(
                f"the state_dict has no {self._prefix}n_averaged: its weights are taken for an average of count 1, "
                "so the next update averages them instead of replacing them",
                stacklevel=2,
            )
            averaged.n_averaged = held.write_count(averaged.n_averaged, 1)
        if self._has_weights or not is_missing:
            problem = find_problem(held, rule, self.extra)
            if problem is None:
                load_extra_state(held, rule, self.extra)
            elif self.strict:
                self._errors.append(
                    f"{problem}. Load it into an AveragedModel with the rule that wrote it; or with strict=False, "
                    "which takes over what fits."
                )
            else:
                self._take_over(averaged, problem)
                missing += [] if is_missing else [key]
        if is_missing and make_extra_state(held, rule) is None:
            missing.remove(key)
        count = held.read_count(averaged.n_averaged)
        held.mark_start(() if count else averaged._averaged().values())

    def undo(self, averaged: Any) -> None:
        """Bring everything back that the load has changed."""
        for tensor, _, slots in self._places.values():
            for store, name in slots:
                store[name] = tensor
        self._places = {}
        if self._backup is not None:
            self._backup.restore(averaged)

    def _round(self, averaged: Any) -> None:
        """Write the rounding of the loaded values into the tensors that master copies stood for."""
        masters = averaged._held.masters
        pairs = []
        for tensor, master, slots in self._places.values():
            given = slots[0][0][slots[0][1]]
            if given is not master:  # assigned
                low = given.detach().to(tensor.dtype)
                is_parameter = isinstance(tensor, Parameter)
                tensor = Parameter(low, requires_grad=tensor.requires_grad) if is_parameter else low
                master = given.to(master.dtype) if given.dtype != tensor.dtype else None
            for store, name in slots:
                store[name] = tensor
            if master is not None:
                pairs.append((tensor, master.detach()))
        self._places = {}
        masters.write_([tensor for tensor, _ in pairs], [master for _, master in pairs])

    def _take_over(self, averaged: Any, problem: str) -> None:
        """Take over what fits of the state of another rule, or of a smaller model."""
        held, rule, tensors = averaged._held, averaged.rule, averaged._averaged()
        values = {name: value.detach() for name, value in held.masters.get_named(tensors).items()}
        own = _get_values(make_extra_state(held, rule) or {})
        place = self.extra.get("module", "average")
        saved = _shard_alike(_get_values(self.extra), own) | {
            f"{place}.{name}": value for name, value in values.items()
        }
        count = held.read_count(averaged.n_averaged)
        with torch.inference_mode(False), torch.no_grad():
            state = rule.resume(values, count, Saved(saved, self.extra.get("rules", {})))
            held.take_over_(state, tensors)
        averaged.n_averaged = held.write_count(averaged.n_averaged, int(state.count))
        warnings.warn(
            f"{problem}. The average and its count go on; what is missing started from the average, or anew",
            stacklevel=2,
        )


def _is_sure(averaged: Any, given: Mapping[str, Any], prefix: str) -> bool:
    """Tell whether a state_dict has all that the average has, in the same shapes, and nothing else, and no hook reads it.

    A load of it does not fail, so that nothing has to be kept.
    """
    if any(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks for part in averaged.module.modules()):
        return False
    own = averaged.state_dict(prefix=prefix)
    given = {name: value for name, value in given.items() if name.startswith(prefix)}
    if own.keys() != given.keys():
        return False
    extra = given.get(f"{prefix}_extra_state", {})
    return find_problem(averaged._held, averaged.rule, extra if isinstance(extra, dict) else {}) is None and all(
        _shape(value) == _shape(given[name]) and is_sharded(value) == is_sharded(given[name])
        for name, value in own.items()
    )


class Backup:
    """Everything that a load may overwrite: values, on the CPU, and which tensors stand where."""

    def __init__(self, averaged: Any, masters: Mapping[str, Tensor]) -> None:
        self._stores = [
            (store, dict(store)) for part in averaged.modules() for store in (part._parameters, part._buffers)
        ]
        everything = [tensor for _, content in self._stores for tensor in content.values()] + list(masters.values())
        self._tensors = list({id(tensor): tensor for tensor in everything if tensor is not None}.values())
        self._values = [
            get_shard(tensor).detach().to("cpu", copy=True) for tensor in self._tensors if not tensor.is_meta
        ]
        self._tensors = [tensor for tensor in self._tensors if not tensor.is_meta]
        tensors = averaged._averaged()
        self._masters = list(tensors.values()), [masters[name] for name in tensors]
        self._held = averaged._held
        self._rest = self._held.memory, self._held.averages
        self._count = self._held.read_count(averaged.n_averaged)

    def restore(self, averaged: Any) -> None:
        """Bring everything back."""
        with torch.inference_mode(False), torch.no_grad():
            for store, content in self._stores:
                store.clear()
                store.update(content)
            for tensor, value in zip(self._tensors, self._values, strict=True):
                get_shard(tensor).copy_(value)
        self._held.memory, self._held.averages = self._rest
        self._held.masters.keep(*self._masters)
        averaged.n_averaged = self._held.write_count(averaged.n_averaged, self._count)
