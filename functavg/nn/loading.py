"""One load of a state_dict into an average: it takes over what fits, or changes nothing."""

from __future__ import annotations

__all__: list[str] = []

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from functavg.kernels.torch.dtensor import get_shard, is_sharded
from functavg.nn.extra_state import find_problem, load_extra_state, make_extra_state, resume_from
from functavg.nn.sharing import find_slots
from functavg.rules.saved import get_shape
from functavg.trees import some

Slot = tuple[dict[str, Any], str]
"""The store of a module and the name of a tensor in it."""


@dataclass
class Loading:
    """What one ``load_state_dict`` has to know from its beginning to its end.

    While torch loads the module, master copies replace its low-precision tensors, so that their values arrive
    unrounded, whatever hooks do to names.

    Args:
        strict: whether everything has to fit; None: the module around the average decides.

    Attributes:
        end_protection: called at the end of the load (see ``sharing.protect_shared_``).
    """

    strict: bool | None
    extra: dict[str, Any] = field(default_factory=dict)
    end_protection: Callable[[], None] = lambda: None
    _backup: Any = None
    _places: dict[int, tuple[Tensor, Tensor, list[Slot]]] = field(default_factory=dict)

    def begin(self, averaged: Any, keys: Mapping[str, Any], prefix: str, errors: list[str]) -> None:
        """Replace tensors by their master copies, and keep what the load may overwrite."""
        self._prefix, self._errors, self._known_errors = prefix, errors, len(errors)
        self._weights = [name for name in keys if name.startswith(f"{prefix}module.")]
        self._has_count = f"{prefix}n_averaged" in keys
        held, tensors = averaged._held, averaged._averaged()
        masters = held.masters.get_named(tensors)
        if not _cannot_fail(averaged, keys, prefix):
            self._backup = Backup(averaged, masters)
        low = {id(tensor): masters[name] for name, tensor in tensors.items() if masters[name] is not tensor}
        for store, name, tensor in find_slots(averaged.module, low):
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
        held, rule = averaged._held, averaged.rule
        key = f"{self._prefix}_extra_state"
        is_missing = key in missing
        if is_missing and make_extra_state(held, rule) is None:
            missing.remove(key)
        own = [f"{self._prefix}module.{name}" for name in averaged._averaged()]
        if self._weights and own and not self.strict and set(own) <= set(missing):
            self.undo(averaged)
            warnings.warn(
                f"nothing of the state_dict was taken over: it has {some(self._weights)}, and the average {some(own)}. "
                "Rename its keys",
                stacklevel=2,
            )
            return
        self._end_protection()
        self._round(averaged)
        averaged.n_averaged = averaged.n_averaged.to(torch.int64)
        if self._weights and not self._has_count:
            warnings.warn(
                f"the state_dict has no {self._prefix}n_averaged: its weights are taken for an average of count 1, "
                "so the next update averages them instead of replacing them",
                stacklevel=2,
            )
            averaged.n_averaged = held.write_count(averaged.n_averaged, 1)
        if self._weights or not is_missing:
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
        count = held.read_count(averaged.n_averaged)
        held.was_reset = False  # the rest of the state has come with the count
        held.mark_start(() if count else averaged._averaged().values())

    def undo(self, averaged: Any) -> None:
        """Restore everything that the load has changed."""
        self._end_protection()
        for tensor, _, slots in self._places.values():
            for store, name in slots:
                store[name] = tensor
        self._places = {}
        if self._backup is not None:
            self._backup.restore(averaged)

    def _end_protection(self) -> None:
        end, self.end_protection = self.end_protection, lambda: None
        end()

    def _round(self, averaged: Any) -> None:
        """Write the rounding of the loaded values into the tensors that master copies stood for."""
        masters = averaged._held.masters
        pairs = []
        for tensor, master, slots in self._places.values():
            store, name = slots[0]
            given: Tensor = store[name]
            if given is not master:  # assigned
                with torch.inference_mode(False):  # master copies of inference tensors would not be trusted
                    given = given.detach().clone() if given.is_inference() else given.detach()
                    low, is_parameter = given.to(tensor.dtype), isinstance(tensor, Parameter)
                    tensor = Parameter(low, requires_grad=tensor.requires_grad) if is_parameter else low
                    master = given.to(master.dtype)
            for store, name in slots:
                store[name] = tensor
            pairs.append((tensor, master.detach()))
        self._places = {}
        masters.write_([tensor for tensor, _ in pairs], [master for _, master in pairs])

    def _take_over(self, averaged: Any, problem: str) -> None:
        """Take over what fits of the state of another rule, or of a smaller model."""
        held, rule, tensors = averaged._held, averaged.rule, averaged._averaged()
        values = {name: value.detach() for name, value in held.masters.get_named(tensors).items()}
        count = held.read_count(averaged.n_averaged)
        state = resume_from(held, rule, self.extra, count, values)
        with torch.inference_mode(False), torch.no_grad():
            held.take_over_(state, tensors)
        averaged.n_averaged = held.write_count(averaged.n_averaged, int(state.count))
        warnings.warn(
            f"{problem}. The average and its count go on; what is missing started from the average, or anew",
            stacklevel=2,
        )


def _cannot_fail(averaged: Any, given: Mapping[str, Any], prefix: str) -> bool:
    """Tell whether a load cannot fail: the state_dict has what the average has, in the same shapes, and no hook is run.

    Nothing has to be kept then.
    """
    if any(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks for part in averaged.module.modules()):
        return False
    own = averaged.state_dict(prefix=prefix)
    given = {name: value for name, value in given.items() if name.startswith(prefix)}
    if own.keys() != given.keys():
        return False
    extra = given.get(f"{prefix}_extra_state", {})
    return find_problem(averaged._held, averaged.rule, extra if isinstance(extra, dict) else {}) is None and all(
        get_shape(value) == get_shape(given[name]) and is_sharded(value) == is_sharded(given[name])
        for name, value in own.items()
    )


class Backup:
    """Everything that a load may overwrite: which tensors the modules hold, and their values, on the CPU."""

    def __init__(self, averaged: Any, masters: Mapping[str, Tensor]) -> None:
        self._stores = [
            (store, dict(store)) for part in averaged.modules() for store in (part._parameters, part._buffers)
        ]
        everything = [tensor for _, content in self._stores for tensor in content.values()] + list(masters.values())
        distinct = {id(tensor): tensor for tensor in everything if tensor is not None and not tensor.is_meta}
        self._tensors = list(distinct.values())
        self._values = [get_shard(tensor).detach().to("cpu", copy=True) for tensor in self._tensors]
        tensors = averaged._averaged()
        self._masters = list(tensors.values()), [masters[name] for name in tensors]
        self._held = averaged._held
        self._rest = self._held.memory, self._held.averages
        self._count = self._held.read_count(averaged.n_averaged)
        self._was_written = self._held.were_written(self._masters[0])

    def restore(self, averaged: Any) -> None:
        """Restore everything."""
        with torch.inference_mode(False), torch.no_grad():
            for store, content in self._stores:
                store.clear()
                store.update(content)
            for tensor, value in zip(self._tensors, self._values, strict=True):
                get_shard(tensor).copy_(value)
        self._held.memory, self._held.averages = self._rest
        self._held.masters.keep(*self._masters)
        if not self._was_written:
            self._held.mark_start(() if self._count else self._masters[0])
        averaged.n_averaged = self._held.write_count(averaged.n_averaged, self._count)
