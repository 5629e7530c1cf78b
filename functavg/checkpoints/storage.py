"""The dtypes in which tensors are stored."""

from __future__ import annotations

from typing import Any

import torch

from functavg.checkpoints.tensors import TensorInfo


def check_dtype(dtype: Any) -> str | None:
    """Return the name of a floating dtype, None where none was asked for.

    Raises:
        ValueError: it is none.
    """
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype of torch or its name, got {dtype!r}")
    return str(found).removeprefix("torch.")


def stored_as(info: TensorInfo, wanted: str | None) -> TensorInfo:
    """Return what a tensor is stored as; integers and bools stay what they are."""
    if wanted is None or not info.is_averaged:
        return info
    if info.torch_dtype.is_complex:
        wanted = "complex128" if wanted == "float64" else "complex64"
    return TensorInfo(wanted, info.shape)
