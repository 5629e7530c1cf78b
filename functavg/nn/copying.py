"""Copies a model, or its values into a ready copy, to start an average from."""

from __future__ import annotations

__all__: list[str] = []

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from functavg.kernels.torch.groups import is_partitioned
from functavg.kernels.torch.memory import identities, is_expanded
from functavg.nn.modes import unmerged
from functavg.nn.pairing import is_fully_sharded, named_tensors, unwrap
from functavg.nn.resisting import find_device, find_resisting, is_out_of_memory
from functavg.nn.sharing import Share, check_device, find_shared, hidden
from functavg.nn.writing import write
from functavg.trees import some


def copy_model(model: Module, device: Any = None, share: Share | None = None) -> Module:
    """Return a deep copy of a model without its wrappers, gradients, graphs and expanded memory.

    Args:
        model: the model.
        device: where the copy goes, tensor by tensor. Default: where the model is.
        share: ``share(name, tensor)`` tells which tensors the copy shares with the model instead, such as those of a
            frozen base: they are the same objects in both, under each of their names, and so are their attributes (such
            as a quantisation state). Names are those of ``named_parameters`` and ``named_buffers``, without those of
            wrappers. Default: none.

    Raises:
        ValueError: there is no such device, or a shared tensor is on another one.
        RuntimeError: the device is not available. Where memory runs out, the error is that of the allocator.
        TypeError: a parameter is uninitialised or partitioned away, the model is sharded by FSDP2, or a module cannot
            be copied; the message names it.
    """
    if not isinstance(model, Module):
        raise TypeError(f"model must be the torch.nn.Module to average, got {type(model).__name__}")
    target = find_device(device)
    model = unwrap(model)
    if any(map(is_fully_sharded, model.modules())):
        raise TypeError(
            "cannot copy what fully_shard has sharded; pass a ready copy of the model, sharded alike, as module="
        )
    shared = find_shared(model, share)
    check_device(model, target, shared)
    for name, tensor in named_tensors(model):
        if id(tensor) not in shared:
            _check_copyable(name, tensor)
    with torch.inference_mode(False), torch.no_grad(), _PlainCopies(target) as copies:
        try:
            memo = _make_memo(shared)
            _copy_wrapped(model, memo)
            copied: Module = copy.deepcopy(model, memo)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            copies.forget()
            where = find_resisting(model, shared) or f"the model ({type(model).__name__}): {error}"
            raise TypeError(
                f"cannot copy {where}. Give it a __deepcopy__, remove what resists, or pass a ready copy of the model "
                "as module="
            ) from error
    _separate_parametrizations(copied)
    if device is not None:  # its tensors are there already, but a module may hold more
        with hidden(copied, shared):
            copied = copied.to(target)
    return copied


def _check_copyable(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise TypeError(f"{name} is an uninitialised (lazy) parameter; run one forward pass before averaging")
    if is_partitioned(tensor):
        raise TypeError(
            f"{name} is a placeholder of size 0, since an engine has partitioned it away; gather it first, or "
            "shard the model by torch.distributed.fsdp.fully_shard"
        )


def _make_memo(shared: dict[int, Tensor]) -> dict[int, Any]:
    """Return a memo with which deepcopy keeps shared tensors and their attributes instead of copying them."""
    attached = [value for tensor in shared.values() for value in vars(tensor).values() if not isinstance(value, Module)]
    return {id(value): value for value in attached} | shared


def _copy_wrapped(model: Module, memo: dict[int, Any]) -> None:
    """Add to a memo what makes deepcopy replace each wrapper inside a model by a copy of what it wraps."""
    for module in reversed(list(model.modules())):  # the innermost first
        inner = unwrap(module)
        if inner is not module:
            memo[id(module)] = copy.deepcopy(inner, memo)


def _separate_parametrizations(module: Module) -> None:
    """Give parametrized parts of a copy classes of their own.

    ``parametrize.cached()`` keeps tensors under the module that a class was made for. A deep copy has the class of the
    original, and would compute with its weights.
    """
    parametrize: Any = sys.modules.get("torch.nn.utils.parametrize")
    for part in module.modules() if parametrize is not None else ():
        parametrizations: Any = part.parametrizations if parametrize.is_parametrized(part) else ()
        kind, names = type(part), list(parametrizations)
        if names and all(isinstance(vars(kind).get(name), property) for name in names):
            part.__class__ = kind.__bases__[0]
            parametrize._inject_new_class(part)
            for name in names:
                parametrize._inject_property(part, name)


def overwrite_(module: Module, model: Module, device: Any = None, share: Share | None = None) -> Module:
    """Copy the values of a model into a ready copy; return the copy without its wrappers.

    Args:
        module: the copy. Tensors that require no gradient, and those that ``share`` selects, may be those of the model
            under the same name; they are left alone.
        model: the model.
        device: where the copy goes. Default: where it is.
        share: as for ``copy_model``. Default: none.

    Raises:
        TypeError, ValueError: ``module`` is not a copy of the model, or shares other memory with it, or shares tensors
            that are not on the device; nothing was written.
        RuntimeError: the device is not available.
    """
    if not isinstance(module, Module):
        raise TypeError(f"module= must be a ready copy of the model, a torch.nn.Module, got {type(module).__name__}")
    mine, theirs = dict(named_tensors(module)), dict(named_tensors(model))
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
        write(module, {name: tensor for name, tensor in named_tensors(model) if name not in shared})
    module = _unwrap_parts(module, set(model.modules()))
    if device is None:
        return module
    with hidden(module, own):
        return module.to(target)


def _unwrap_parts(module: Module, others: set[Module]) -> Module:
    """Return a module without its wrappers, after removing those inside it, but not inside ``others``."""
    for part in set(module.modules()) - others:
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = _unwrap_unless_sharded(child)
    return _unwrap_unless_sharded(module)


def _unwrap_unless_sharded(module: Module) -> Module:
    return module if is_fully_sharded(module) else unwrap(module)  # the hooks of a sharded wrapper gather what it holds


class _PlainCopies(TorchFunctionMode):
    """Copies tensors without their graphs, gradients, expansion and shared memory.

    A deep copy refuses tensors that are part of a graph, as a module may cache (the weight of a legacy weight_norm, an
    activation of the last forward). An expanded buffer cannot be written to, and of two buffers over one memory each
    would be averaged by the updates of both. Copies go straight to their device: that of the model need not have room
    for a second one.
    """

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._memories: set[Any] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo and (
                self._device is not None
                or not tensor.is_leaf
                or tensor.grad is not None
                or is_expanded(tensor)
                or self._is_view(tensor)
            ):
                plain = self._cloned(tensor.detach())
                memo[id(tensor)] = plain.requires_grad_(tensor.is_leaf and tensor.requires_grad)
                return memo[id(tensor)]
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:  # from a subclass without a copy of its own; a clone may do
                if is_out_of_memory(error):
                    raise
                plain = self._cloned(tensor.detach())
                if type(plain) is not type(tensor):
                    raise
                vars(plain).update(copy.deepcopy(vars(tensor), memo))
                memo[id(tensor)] = plain.requires_grad_(tensor.requires_grad)
                return plain
        if func is Tensor.clone:  # which copying a Parameter calls
            return self._cloned(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _cloned(self, tensor: Tensor, **options: Any) -> Tensor:
        return tensor.clone(**options) if self._device is None else tensor.to(self._device, copy=True, **options)

    def forget(self) -> None:
        """Forget what was copied before."""
        self._memories.clear()

    def _is_view(self, tensor: Tensor) -> bool:
        """Tell whether another tensor over the same memory was copied before."""
        if tensor.layout != torch.strided:
            return False
        known = tensor.untyped_storage() in self._memories
        self._memories.add(tensor.untyped_storage())
        return known
