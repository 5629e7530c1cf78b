"""How an average in a module is saved under torch's own keys, and loaded from them."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel as TorchAveragedModel

from functavg.nn.beside import Beside
from functavg.nn.counting import HostCount
from functavg.nn.master_copies import MasterCopies
from functavg.rules.base import AveragingRule


class SavedAverage(TorchAveragedModel):
    """The state_dict of an average: ``n_averaged``, ``module.*`` with wide values, the memory of a rule."""

    n_averaged: Tensor
    _masters: MasterCopies
    _count: HostCount
    _beside: Beside
    _loaded: dict[str, Tensor]

    @property
    @abstractmethod
    def rule(self) -> AveragingRule:
        """The rule that updates follow."""

    @abstractmethod
    def _averaged(self) -> dict[str, Tensor]:
        """Return the tensors that are averaged, by name."""

    def _hook_saving(self) -> None:
        self._loaded = {}
        self.register_state_dict_post_hook(_finish_saving)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_finish_loading)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the memory of the rule, and averages beside the first, as tensors and numbers by path."""
        return self._beside.extra_state()

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take over what ``get_extra_state`` returned.

        Raises:
            ValueError: it is that of another rule or of another model.
        """
        self._beside.load(state)

    def _saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are averaged by the names that the state_dict of the module has."""
        averaged = set(map(id, self._averaged().values()))
        parameters = self.module.named_parameters(remove_duplicate=False)
        tensors = dict(parameters) | dict(self.module.named_buffers(remove_duplicate=False))
        # Wrappers for activation checkpoints, which a ready module may have, leave themselves out of a state_dict.
        names = {name: name.replace("_checkpoint_wrapped_module.", "") for name in tensors}
        return {names[name]: tensor for name, tensor in tensors.items() if id(tensor) in averaged}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the count, and put aside the wide values: the module is loaded with their rounding."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.n_averaged = self.n_averaged.to(torch.int64)
        tensors = self._saved_tensors()
        self._loaded = {}
        for name, value in self._masters.get_named(tensors).items():
            new = state_dict.get(f"{prefix}module.{name}")
            if not isinstance(new, Tensor) or new.layout != torch.strided:
                continue
            if value is not tensors[name] and new.dtype != tensors[name].dtype:
                self._loaded[name] = new
                state_dict[f"{prefix}module.{name}"] = new.to(tensors[name].dtype)
        if local_metadata.get("assign_to_params_buffers", False):
            _part(state_dict, f"{prefix}module.")
        has_weights = any(key.startswith(f"{prefix}module.") for key in state_dict)
        if f"{prefix}_extra_state" in missing_keys and self.get_extra_state() is None:
            missing_keys.remove(f"{prefix}_extra_state")
        elif f"{prefix}_extra_state" in missing_keys and has_weights:
            warnings.warn(
                f"the state_dict has no {prefix}_extra_state, the memory of {self.rule!r}, which goes on from the "
                "memory that it has; after none of its own updates the next one starts anew from the model",
                stacklevel=2,
            )
        if f"{prefix}n_averaged" in missing_keys and has_weights:
            warnings.warn(
                f"the state_dict has no {prefix}n_averaged: its weights are taken for an average of count 1, "
                "so the next update averages them instead of replacing them",
                stacklevel=2,
            )
            self.n_averaged = self._count.write(self.n_averaged, 1)


def _part(state_dict: dict[str, Any], prefix: str) -> None:
    """Give tensors over one memory a memory each: assigned, each would be changed by the updates of both."""
    places: set[Any] = set()
    for name, tensor in state_dict.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            place = (tensor.untyped_storage(), tensor.storage_offset())
            if place in places:
                state_dict[name] = tensor.clone()
            places.add(place)


def _finish_saving(averaged: SavedAverage, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put the wide values in the place of their rounding, and leave out the memory of a rule that has none."""
    del local_metadata
    tensors = averaged._saved_tensors()
    for name, value in averaged._masters.get_named(tensors).items():
        if value is not tensors[name] and f"{prefix}module.{name}" in state_dict:
            state_dict[f"{prefix}module.{name}"] = value
    if state_dict.get(f"{prefix}_extra_state", ...) is None:
        del state_dict[f"{prefix}_extra_state"]


def _finish_loading(averaged: SavedAverage, incompatible_keys: Any) -> None:
    """Remember the wide values of the tensors that were loaded with their rounding."""
    del incompatible_keys
    tensors = averaged._saved_tensors()
    averaged._masters.load((tensors[name], value) for name, value in averaged._loaded.items())
    averaged._loaded = {}
