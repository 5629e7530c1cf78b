"""Finds what keeps a model from being copied: a device, memory, or a module and its attribute."""

from __future__ import annotations

__all__: list[str] = []

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from functavg.nn.pairing import named_tensors


def find_device(device: Any) -> torch.device | None:
    """Return a device with its index, after checking that it is available; None for None.

    Raises:
        TypeError, ValueError: it is not a device.
        RuntimeError: it is not available.
    """
    if device is None:
        return None
    try:
        if not isinstance(device, int):  # the kind of accelerator is known only where there is one
            device = torch.device(device)
    except TypeError:
        raise TypeError(f"device must be a torch.device, its name or its index, got {device!r}") from None
    except RuntimeError:
        raise ValueError(f"device must be one that torch knows, such as 'cpu' or 'cuda:0', got {device!r}") from None
    try:
        return torch.empty(0, device=device).device
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise RuntimeError(f"device {str(device)!r} is not available: {reason}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory has run out, of an accelerator or of the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in text for words in ("out of memory", "not enough memory", "allocate memory")
    )


def find_resisting(model: Module, shared: Collection[int]) -> str | None:
    """Return the innermost module that cannot be copied, with the attribute and the error.

    Args:
        model: the model.
        shared: the identities of tensors that need not be copied.
    """
    everything = {id(part): part for part in (*model.modules(), *(tensor for _, tensor in named_tensors(model)))}
    for name, module in reversed(list(model.named_modules())):
        where = f"{name or 'the model'} ({type(module).__name__})"
        attributes = {**module._parameters, **module._buffers, **vars(module)}
        for attribute, value in attributes.items():
            copies = isinstance(value, Tensor) and id(value) not in shared
            memo = {} if copies else dict(everything)  # copies nothing else, to save memory
            if (error := _try_copying(value, memo)) is not None:
                return f"{where}: its attribute {attribute} resists: {error}"
        rest = {key: part for key, part in everything.items() if part is not module}
        if (error := _try_copying(module, rest)) is not None:
            return f"{where}: {error}"
    return None


def _try_copying(value: Any, memo: dict[int, Any]) -> Exception | None:
    """Return the error that copying a value raises."""
    try:
        copy.deepcopy(value, memo)
    except Exception as error:  # any error is what we look for
        if is_out_of_memory(error):
            raise
        return error
    return None
