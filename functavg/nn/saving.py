"""How an average in a module is saved under torch's own keys, and loaded from them."""

from __future__ import annotations

__all__: list[str] = []

import warnings
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel as TorchAveragedModel

from functavg.kernels.torch.dtensor import get_shard
from functavg.kernels.torch.memory import identities
from functavg.nn import pairing
from functavg.nn.extra_state import find_problem, load_extra_state, make_extra_state
from functavg.nn.held_state import HeldState
from functavg.nn.loading import Loading
from functavg.nn.sharing import protect_shared_
from functavg.rules.base import AveragingRule
from functavg.trees import some


class SavedAverage(TorchAveragedModel):
    """The state_dict of an average: ``n_averaged``, ``module.*`` with master copies, the memory of a rule."""

    n_averaged: Tensor
    _held: HeldState
    _loading: Loading | None
    _shared: frozenset[str] = frozenset()
    """The names of the tensors that are the model's own."""

    @property
    @abstractmethod
    def rule(self) -> AveragingRule:
        """The rule that updates follow."""

    @abstractmethod
    def _averaged(self) -> dict[str, Tensor]:
        """Return the tensors that are averaged, by name."""

    def _hook_saving(self) -> None:
        self._loading = None
        self.register_state_dict_post_hook(_finish_saving)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_finish_loading)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the memory of the rule and all averages but the first, named as by ``functavg.to_state_dict``."""
        return make_extra_state(self._held, self.rule)

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take over what ``get_extra_state`` returned.

        Raises:
            TypeError, ValueError: it is from another rule or another model; nothing was changed.
        """
        # torch.distributed.checkpoint passes an object of its own where a file has nothing.
        extra = state if isinstance(state, dict) else {}
        if self._loading is not None:  # the end of the load knows whether it fits
            self._loading.extra = extra
            return
        problem = find_problem(self._held, self.rule, extra)
        if problem is not None:
            raise ValueError(f"{problem}. Load it into an AveragedModel with the rule that wrote it")
        load_extra_state(self._held, self.rule, extra)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what ``state_dict`` returned, of this class or of torch's.

        Args:
            state_dict: the state_dict. Without ``n_averaged``, its weights count as an average of one step.
            strict: whether the keys and the rule that wrote it have to be those of this average. If not, it takes over
                what fits: the weights and the count, and of the memory what was written by a rule of the same class
                under the same name; the rest starts from the loaded average. Where none of the weights under
                ``module.`` is one of its own, nothing is taken over, with a warning. Default: ``True``.
            assign: as for any module.

        Returns:
            The missing and unexpected keys, as for any module. Tensors that are shared with the model stay as they are;
            a warning tells where the state_dict has other values for them.

        Raises:
            RuntimeError: as for any module, or the memory is that of another rule. Nothing was changed then.
        """
        self._undo_broken_load()
        loading = self._loading = Loading(strict)
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except BaseException:
            loading.undo(self)
            raise
        finally:
            self._loading = None

    def _undo_broken_load(self) -> None:
        """Bring back what a load into a module around this one has changed before something in it raised an error."""
        if self._loading is not None:
            self._loading.undo(self)
            self._loading = None

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
        if self._loading is None or self._loading.strict is None:  # as a part of another module
            self._undo_broken_load()
            self._loading = Loading(None)
        self._loading.begin(self, state_dict, prefix, error_msgs)
        if local_metadata.get("assign_to_params_buffers", False):
            _untie_(state_dict, f"{prefix}module.")
        self._loading.end_protection = protect_shared_(state_dict, f"{prefix}module.", self.module, self._shared)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _untie_(state_dict: dict[str, Any], prefix: str) -> None:
    """Copy aliased tensors: once assigned, each would be changed by the updates of both."""
    memories: set[Any] = set()
    for name, tensor in state_dict.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            memory = (tensor.untyped_storage(), tensor.storage_offset())
            if memory in memories:
                state_dict[name] = tensor.clone()
            memories.add(memory)


def _finish_saving(averaged: SavedAverage, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace rounded tensors by their master copies, and leave out an extra state that is None."""
    del local_metadata
    if state_dict.get(f"{prefix}_extra_state", ...) is None:
        del state_dict[f"{prefix}_extra_state"]
    tensors = averaged._averaged()
    masters = averaged._held.masters.get_named(tensors)
    low = {name: tensor for name, tensor in tensors.items() if masters[name] is not tensor}
    if not low:
        return
    prefix = f"{prefix}module."
    saved = {key: value for key, value in state_dict.items() if key.startswith(prefix) and isinstance(value, Tensor)}
    # Hooks may have given a tensor another name, but not another memory.
    by_memory = dict(zip(_identify(low.values()), low, strict=True))
    known = set(tensors) | {name for name, _ in pairing.named_tensors(averaged.module)}
    strangers = []
    for (key, value), memory in zip(saved.items(), _identify(saved.values()), strict=True):
        name = key.removeprefix(prefix).replace("_checkpoint_wrapped_module.", "")
        found = by_memory.get(memory, name)
        if found in low and (value.shape, value.dtype) == (low[found].shape, low[found].dtype):
            state_dict[key] = masters[found]
        elif name not in known and value.dtype in {tensor.dtype for tensor in low.values()}:
            strangers.append(key)
    if strangers:
        warnings.warn(
            f"{some(strangers)} of the state_dict, which hooks of the model made, are none of the tensors that are "
            "averaged: they are saved in low precision. Let hooks rename tensors, and not change them",
            stacklevel=2,
        )


def _identify(tensors: Iterable[Tensor]) -> Sequence[Hashable]:
    return identities(list(map(get_shard, tensors)))


def _finish_loading(averaged: SavedAverage, incompatible_keys: Any) -> None:
    loading = averaged._loading
    if loading is None:
        return
    loading.finish(averaged, incompatible_keys.missing_keys)
    if loading.strict is None:
        averaged._loading = None
