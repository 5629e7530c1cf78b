"""Which tensors can be averaged, and groups of tensors that go into one call."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from functavg.kernels import dtypes

KINDS = {
    dtype: dtypes.kind_of(dtypes.name_of(dtype)) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""BOOL, INTEGER, REAL or COMPLEX by dtype, None for what cannot be averaged; names are slow to look up."""
COMPLEX = {dtype for dtype, kind in KINDS.items() if kind == dtypes.COMPLEX}
POOR = {dtype for dtype in KINDS if dtype == torch.complex32 or (dtype.is_floating_point and dtype.itemsize == 1)}
"""Dtypes with too few operations in torch for a step: float8 and complex32."""

PLAIN: set[type[Tensor]] = {Tensor, Parameter}
"""The classes of plain tensors; others may compute, place or share their values in their own way."""


@dataclass(eq=False, slots=True)
class Group:
    """Leaves that go into one call: the tensors of each average and the new ones, each list of one dtype and device."""

    indices: Sequence[int]
    averages: list[list[Tensor]]
    news: list[Tensor]
    roundings: list[Tensor] | None
    """Tensors that take the rounding of the first average, if they are not the average itself."""
    alike: bool
    """Whether the new tensors have the dtype and the device of all the averages."""
    foreach: bool
    """Whether the foreach kernels take these tensors; otherwise each leaf is a call of its own."""
    wholes: list[list[Tensor]] | None = None
    """The averages as DTensors where the lists hold their shards."""


def kind_of(leaf: Tensor) -> int | None:
    """Return BOOL, INTEGER, REAL or COMPLEX, and None for what cannot be averaged."""
    return KINDS.get(leaf.dtype)


def refusal(leaf: Any) -> str | None:
    """Return why a tensor cannot be averaged, or None."""
    # torch.compile cannot trace is_lazy; isinstance takes long, as the metaclass of Parameter overrides it.
    if type(leaf) not in PLAIN and isinstance(leaf, (UninitializedBuffer, UninitializedParameter)):
        return "an uninitialised (lazy) parameter; run one forward pass first"
    if is_partitioned(leaf):
        return "a placeholder of size 0, since an engine has partitioned it away; gather it first"
    if leaf.is_nested:
        return "a nested tensor; average its components"
    if leaf.layout != torch.strided:
        return f"a tensor of layout {leaf.layout}; only dense tensors can be averaged (Tensor.to_dense makes one)"
    if kind_of(leaf) is None:
        return f"a tensor of dtype {leaf.dtype}; dequantise or unpack it first"
    return None


def is_partitioned(leaf: Any) -> bool:
    """Tell whether a parameter is an empty placeholder for one that DeepSpeed (ZeRO-3) keeps elsewhere."""
    return hasattr(leaf, "ds_shape") and leaf.numel() == 0


def is_transformed() -> bool:
    """Tell whether a transform is active that has no rule for the foreach kernels: torch.compile, vmap."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
