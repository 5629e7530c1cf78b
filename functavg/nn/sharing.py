"""Tensors that an average shares with its model: the model's own, which are not averaged and cost no memory."""

from __future__ import annotations

__all__: list[str] = []

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase

from functavg.nn.pairing import is_spectral_vector, named_tensors
from functavg.trees import some

Share = Callable[[str, Tensor], bool]


def find_shared(model: Module, share: Share | None) -> dict[int, Tensor]:
    """Return the tensors of a model to share, by ``id``.

    Running statistics and the vectors of spectral norms, which a forward writes to, are never shared: the average
    would write into the model.

    Raises:
        TypeError: ``share`` is not a function.
    """
    if share is None:
        return {}
    if not callable(share):
        raise TypeError(f"share must be a function share(name, tensor) -> bool, got {share!r}")
    written = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if isinstance(module, _NormBase) or is_spectral_vector(name, module)
    }
    return {id(it): it for name, it in named_tensors(model) if id(it) not in written and share(name, it)}


def name_shared(module: Module, model: Module) -> frozenset[str]:
    """Return the names of the tensors that are the same objects in both."""
    theirs = dict(named_tensors(model))
    return frozenset(name for name, tensor in named_tensors(module) if theirs.get(name) is tensor)


def check_device(model: Module, device: torch.device | None, shared: Collection[int]) -> None:
    """Check that shared tensors are on the device of the average.

    Raises:
        ValueError: one is on another; the message names it.
    """
    for name, tensor in named_tensors(model):
        if id(tensor) in shared and device is not None and tensor.device != device:
            raise ValueError(
                f"{name} is to be shared with the model and is on {tensor.device}, not on device={device}. "
                "Share it where it is, or copy it"
            )


def find_slots(module: Module, wanted: Collection[int]) -> list[tuple[Any, str, Tensor]]:
    """Return where a module holds the tensors of these ids: the store, the name in it and the tensor."""
    stores: list[Any] = [store for part in module.modules() for store in (part._parameters, part._buffers)]
    return [(store, name, tensor) for store in stores for name, tensor in store.items() if id(tensor) in wanted]


@contextmanager
def hidden(module: Module, shared: Collection[int]) -> Iterator[None]:
    """Take tensors out of a module inside a ``with`` block, so that what is done to the module leaves them alone."""
    slots = find_slots(module, shared)
    for store, name, _ in slots:
        store[name] = None
    try:
        yield
    finally:
        for store, name, tensor in slots:
            store[name] = tensor


def find_parameters(module: Module, names: Collection[str]) -> dict[int, Tensor]:
    """Return the parameters of these names by ``id``; a module that moves changes them, but not buffers, in place."""
    named = named_tensors(module) if names else ()
    return {id(it): it for name, it in named if name in names and isinstance(it, Parameter)}


def warn_of_move(shared: Collection[Tensor], fn: Callable[[Tensor], Tensor]) -> None:
    """Warn if a move or conversion, from which shared tensors are left out, would change them."""
    placements = {(tensor.dtype, tensor.device) for tensor in shared if not tensor.is_meta}
    try:
        moved = [fn(torch.empty(0, dtype=dtype, device=device)) for dtype, device in placements]
    except RuntimeError:  # no empty tensor of such a kind can be made
        return
    if any((it.dtype, it.device) != placement for it, placement in zip(moved, placements, strict=True)):
        warnings.warn(
            "the tensors that this average shares with its model stay as they are: move or convert the model, which "
            "they follow",
            stacklevel=4,
        )


def protect_shared_(
    state_dict: dict[str, Any], prefix: str, module: Module, names: Collection[str]
) -> Callable[[], None]:
    """Keep a load of a state_dict from changing shared tensors, by putting them into it instead of its values.

    Hooks of the module may give tensors other names in a state_dict. Those not found in it are then replaced by copies
    in the module. Return the function that ends this, and warns of values that differ from the shared ones.
    """
    shared = {name: tensor for name, tensor in named_tensors(module) if name in names} if names else {}
    found = {name: state_dict[prefix + name] for name in shared if isinstance(state_dict.get(prefix + name), Tensor)}
    different = {name for name, value in found.items() if not _is_equal(shared[name], value)}
    state_dict.update({prefix + name: shared[name] for name in found})
    hooked = any(part._load_state_dict_pre_hooks for part in module.modules())
    others = {id(tensor): tensor for name, tensor in shared.items() if name not in found and hooked}
    slots = find_slots(module, others)
    for store, name, tensor in slots:
        store[name] = copy.deepcopy(tensor)

    def finish() -> None:
        for store, name, tensor in slots:
            given, store[name] = store[name], tensor
            if not _is_equal(tensor, given):
                different.add(name)
        if different:
            warnings.warn(
                f"{some(sorted(different))} of the state_dict differ from those that the average shares with its "
                "model, which stay as they are. Load the model itself with these values",
                stacklevel=2,
            )

    return finish


def _is_equal(tensor: Tensor, value: Tensor) -> bool:
    """Tell whether two tensors have the same values; True if they cannot be compared."""
    if tensor.is_meta or value.is_meta:
        return True
    if tensor.shape != value.shape:
        return False
    try:
        return torch.equal(tensor, value.to(tensor.device, tensor.dtype))
    except (RuntimeError, NotImplementedError, TypeError):  # tensors of other classes need not compare
        return True
