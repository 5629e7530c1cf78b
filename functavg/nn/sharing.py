"""Tensors that an average shares with its model: the model's own, which are not averaged and cost no memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase

from functavg.nn.pairing import is_spectral_vector, tensors
from functavg.trees import some

Share = Callable[[str, Tensor], bool]


def find_shared(model: Module, share: Share | None) -> dict[int, Tensor]:
    """Return the tensors of a model to share, by identity.

    What a forward writes to, running statistics and the vectors of spectral norms, is never shared: the average would
    write into the model.

    Raises:
        TypeError: ``share`` is no function.
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
    return {id(tensor): tensor for name, tensor in tensors(model) if id(tensor) not in written and share(name, tensor)}


def name_shared(module: Module, model: Module) -> frozenset[str]:
    """Return the names of the tensors that are the same objects in both."""
    theirs = dict(tensors(model))
    return frozenset(name for name, tensor in tensors(module) if theirs.get(name) is tensor)


def check_device(model: Module, device: torch.device | None, shared: Collection[int]) -> None:
    """Check that shared tensors are on the device of the average.

    Raises:
        ValueError: one is on another; the message names it.
    """
    for name, tensor in tensors(model):
        if id(tensor) in shared and device is not None and tensor.device != device:
            raise ValueError(
                f"{name} is to be shared with the model and is on {tensor.device}, not on device={device}. "
                "Share it where it is, or copy it"
            )


@contextmanager
def hidden(module: Module, shared: Collection[int]) -> Iterator[None]:
    """Take tensors out of a module, so that what is done to all of them inside is not done to these."""
    stores: list[Any] = [store for part in module.modules() for store in (part._parameters, part._buffers)]
    slots = [(store, name, tensor) for store in stores for name, tensor in store.items() if id(tensor) in shared]
    for store, name, _ in slots:
        store[name] = None
    try:
        yield
    finally:
        for store, name, tensor in slots:
            store[name] = tensor


def find_parameters(module: Module, names: Collection[str]) -> dict[int, Tensor]:
    """Return the parameters of these names by identity; buffers are not changed in place when a module moves."""
    return {id(it): it for name, it in tensors(module) if name in names and isinstance(it, Parameter)} if names else {}


def warn_of_move(shared: Collection[Tensor], fn: Callable[[Tensor], Tensor]) -> None:
    """Warn where a move or conversion, which shared tensors do not take part in, would change them."""
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


def keep_shared_(state_dict: dict[str, Any], prefix: str, module: Module, names: Collection[str]) -> Callable[[], None]:
    """Keep a load of a state_dict from writing into shared tensors: they stand in it for their own values.

    Where hooks of the module give tensors other names in a state_dict, copies stand in the module for those that are
    not found. Return the function that ends this, and warns of values that are not those of the shared tensors.
    """
    shared = {name: tensor for name, tensor in tensors(module) if name in names} if names else {}
    found = {name: state_dict[prefix + name] for name in shared if isinstance(state_dict.get(prefix + name), Tensor)}
    different = {name for name, value in found.items() if not _is_equal(shared[name], value)}
    state_dict.update({prefix + name: shared[name] for name in found})
    parts = list(module.modules())
    hooked = any(part._load_state_dict_pre_hooks for part in parts)
    others = {id(tensor): tensor for name, tensor in shared.items() if name not in found and hooked}
    slots: list[tuple[Any, str, Tensor]] = []
    stores: list[Any] = [store for part in parts for store in (part._parameters, part._buffers)]
    for store in stores:
        for name, tensor in store.items():
            if id(tensor) in others:
                slots.append((store, name, tensor))
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
    """Tell whether a value is that of a tensor, as far as it has one that can be compared."""
    if tensor.is_meta or value.is_meta:
        return True
    if tensor.shape != value.shape:
        return False
    try:
        return torch.equal(tensor, value.to(tensor.device, tensor.dtype))
    except (RuntimeError, NotImplementedError, TypeError):  # tensors of other classes need not compare
        return True
