"""Gives a ready copy of a model the model's values, to start an average from."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from functavg.kernels.torch.memory import identities
from functavg.nn.modes import unmerged
from functavg.nn.pairing import is_sharded, tensors, unwrap
from functavg.nn.resisting import find_device
from functavg.nn.sharing import Share, check_device, hidden
from functavg.nn.writing import write
from functavg.trees import some


def overwrite_(module: Module, model: Module, device: Any = None, share: Share | None = None) -> Module:
    """Give a ready copy of a model the model's values; return it without its wrappers.

    Args:
        module: the copy. Tensors that require no gradient, and those that ``share`` tells, may be those of the model
            under the same name; they are left alone.
        model: the model.
        device: where the copy goes. Default: where it is.
        share: as for ``copy_model``. Default: none.

    Raises:
        TypeError, ValueError: it is no copy of the model, or shares other memory with it, or what it shares is not on
            the device; nothing was written.
        RuntimeError: the device is not available.
    """
    if not isinstance(module, Module):
        raise TypeError(f"module= must be a ready copy of the model, a torch.nn.Module, got {type(module).__name__}")
    mine, theirs = dict(tensors(module)), dict(tensors(model))
    marks = list(identities([*mine.values(), *theirs.values()]))
    taken = set(marks[len(mine) :])
    shared = {
        name
        for name, tensor in mine.items()
        if theirs.get(name) is tensor and (not tensor.requires_grad or (share is not None and share(name, tensor)))
    }
    aliased = [name for name, mark in zip(mine, marks, strict=False) if name not in shared and mark in taken]
    if aliased or unwrap(module) is unwrap(model):
        raise ValueError(
            f"module= shares {some(aliased or list(mine))} with the model, whose training an average would overwrite. "
            "Pass a second model, such as copy.deepcopy(model)"
        )
    target, own = find_device(device), {id(mine[name]) for name in shared}
    check_device(module, target, own)
    with unmerged(module, model):
        write(module, {name: tensor for name, tensor in tensors(model) if name not in shared})
    module = _unwrap_parts(module, set(model.modules()))
    if device is None:
        return module
    with hidden(module, own):
        return module.to(target)


def _unwrap_parts(module: Module, others: set[Module]) -> Module:
    """Return a module without its wrappers, and take off those inside it, but not inside other modules."""
    for part in set(module.modules()) - others:
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = _unwrap_unless_sharded(child)
    return _unwrap_unless_sharded(module)


def _unwrap_unless_sharded(module: Module) -> Module:
    return module if is_sharded(module) else unwrap(module)  # the hooks of a sharded wrapper gather what it holds
