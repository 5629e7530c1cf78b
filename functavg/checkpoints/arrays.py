"""Arrays of any library as tensors, and back, without copying where they lie on the host."""

from __future__ import annotations

__all__: list[str] = []

from typing import Any

import numpy as np
import torch
from torch import Tensor

from functavg.kernels import dtypes


def to_tensor(value: Any) -> Tensor:
    """Return an array as a tensor on the host.

    Raises:
        TypeError: torch has no such dtype, or it is one shard of an array.
    """
    if isinstance(value, Tensor):
        if hasattr(value, "to_local"):
            raise TypeError("it is a DTensor: save it with torch.distributed.checkpoint, or save the full tensors")
        return value.detach().cpu()
    array = np.asarray(value)
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"its dtype {array.dtype.name} is none of torch's")
    data = np.require(array, requirements=["C", "W"]).reshape(-1).view(np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(array.shape)


def to_numpy(tensor: Tensor) -> Any:
    """Return a tensor as an array of numpy; ml_dtypes has the dtypes that numpy has not.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = dtypes.named(np, dtypes.name_of(tensor.dtype))
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


def memory_of(tensor: Tensor) -> Any:
    """Return what is equal for tensors that are one, None for those without elements."""
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return place if tensor.numel() else None
