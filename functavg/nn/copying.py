"""Copies a model to start an average from: its tensors, and not the world that hangs on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from functavg.kernels.torch.groups import is_partitioned
from functavg.nn.pairing import tensors, unwrap
from functavg.nn.writing import write
from functavg.trees import some


def twin(model: Module, device: Any = None) -> Module:
    """Return a deep copy of a model without its wrappers, gradients, graphs and expanded memory.

    Args:
        model: the model.
        device: where the copy goes, tensor by tensor. Default: where the model is.

    Raises:
        TypeError: a parameter is not initialised yet or not here, or a module cannot be copied; the message names it.
    """
    model = unwrap(model)
    for name, tensor in tensors(model):
        if is_lazy(tensor):
            raise TypeError(f"{name} is an uninitialised (lazy) parameter; run one forward pass before averaging")
        if is_partitioned(tensor):
            raise TypeError(
                f"{name} is a placeholder of size 0, since an engine has partitioned it away; gather it first, or "
                "shard the model by torch.distributed.fsdp.fully_shard"
            )
    with torch.inference_mode(False), torch.no_grad(), _PlainCopies(device):
        try:
            copied = copy.deepcopy(model, _without_wrappers(model))
        except Exception as error:
            name, culprit = _resisting(model)
            raise TypeError(
                f"cannot copy {name} ({type(culprit).__name__}): {error}. Give it a __deepcopy__, remove what resists, "
                "or pass a ready copy of the model as module="
            ) from error
        return copied if device is None else copied.to(device)  # a module may have more to do than its tensors


def overwritten(module: Module, model: Module) -> Module:
    """Return a ready copy of a model after giving it the model's values.

    Raises:
        TypeError, ValueError: it is no copy of the model, or shares memory with it; nothing was written.
    """
    values = dict(tensors(model))
    theirs = set(map(id, values.values()))
    shared = [name for name, tensor in tensors(module) if id(tensor) in theirs]
    if shared:
        raise ValueError(
            f"module= shares {some(shared)} with the model, whose training an average would overwrite. "
            "Pass a second model, such as copy.deepcopy(model)"
        )
    write(module, values)
    return module


class _PlainCopies(TorchFunctionMode):
    """Makes copies of tensors plain ones.

    What a module has cached (the weight of a legacy weight_norm, an activation of its last forward) is part of a graph,
    which a deep copy refuses; a gradient is not wanted, an expanded buffer cannot be written to, and of two buffers
    over one memory each would be averaged by the updates of both. On their way to another device they make no stop:
    the device of the model need not have room for a second one.
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
                or _is_expanded(tensor)
                or self._is_view(tensor)
            ):
                plain = self._cloned(tensor.detach())
                memo[id(tensor)] = plain.requires_grad_(tensor.is_leaf and tensor.requires_grad)
                return memo[id(tensor)]
        if func is Tensor.clone:  # as the copy of a Parameter does
            return self._cloned(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _cloned(self, tensor: Tensor, **options: Any) -> Tensor:
        return tensor.clone(**options) if self._device is None else tensor.to(self._device, copy=True, **options)

    def _is_view(self, tensor: Tensor) -> bool:
        """Tell whether another tensor over the same memory was copied before."""
        if tensor.layout != torch.strided:
            return False
        known = tensor.untyped_storage() in self._memories
        self._memories.add(tensor.untyped_storage())
        return known


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _without_wrappers(model: Module) -> dict[int, Any]:
    """Return a memo for deepcopy in which each wrapper inside the model stands for a copy of what it wraps."""
    memo: dict[int, Any] = {}
    for module in reversed(list(model.modules())):  # the innermost first
        inner = unwrap(module)
        if inner is not module:
            memo[id(module)] = copy.deepcopy(inner, memo)
    return memo


def _resisting(model: Module) -> tuple[str, Module]:
    """Return the innermost module that cannot be copied, with its name."""
    for name, module in reversed(list(model.named_modules())):
        try:
            copy.deepcopy(module)
        except Exception:  # whatever it is, it is what we look for
            return name or "the model", module
    return "the model", model
