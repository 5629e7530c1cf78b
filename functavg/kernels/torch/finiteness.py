"""Whether tensors hold a NaN or an infinity."""

from __future__ import annotations

__all__: list[str] = []

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from functavg.kernels import dtypes
from functavg.kernels.torch.dtensor import all_agree, get_shard
from functavg.kernels.torch.groups import is_transformed, kind_of
from functavg.kernels.torch.staging import batch
from functavg.kernels.torch.steps import outside_autograd


@outside_autograd
def is_finite(leaves: list[Tensor]) -> Tensor | bool:
    """Return whether real and complex leaves hold no NaN and no infinity, as a 0-d tensor; ``True`` if there are none.

    Either shows in the extrema of a leaf, which take one pass and no temporary.
    """
    grouped = not is_transformed()
    groups: dict[Any, list[Tensor]] = {}
    for leaf in map(get_shard, leaves):
        if leaf.numel() > 0:
            groups.setdefault((leaf.dtype, leaf.device, type(leaf) in (Tensor, Parameter)), []).append(leaf)
    flags = [
        torch.stack(_extrema(group, grouped and plain)).isfinite().all()
        for (_, device, plain), group in groups.items()
        if kind_of(group[0]) in (dtypes.REAL, dtypes.COMPLEX) and device.type != "meta"
    ]
    flag = functools.reduce(lambda flag, other: flag & other.to(flag.device), flags) if flags else True
    return all_agree(flag, leaves)


def _extrema(leaves: list[Tensor], grouped: bool) -> list[Tensor]:
    """Return 0-d tensors that are all finite only if the leaves are: on CUDA norms, elsewhere minima and maxima.

    On a CPU the latter take a sixth of the time of a norm. Small leaves are joined first, as each would cost a call.
    """
    if leaves[0].is_complex():
        leaves = [torch.view_as_real(leaf.resolve_conj()) for leaf in leaves]
    narrow = leaves[0].dtype.itemsize == 1  # no reduction knows float8
    if grouped and leaves[0].is_cuda and not narrow:
        return list(torch._foreach_norm(leaves, torch.inf))
    if grouped and not narrow:
        leaves = [
            some[0] if len(some) == 1 else torch._C._nn.flatten_dense_tensors(some) for (some,) in batch([leaves])
        ]
    return [number for leaf in leaves for number in torch.aminmax(leaf.to(torch.bfloat16) if narrow else leaf)]
