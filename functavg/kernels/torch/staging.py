"""Steps into averages of another dtype or device than the new values, converted through one small buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

STAGE = 2**20
"""Elements of the buffer: small enough to stay in cache."""

_PINNABLE = ("cuda", "xpu")
"""Accelerators that copy to pinned memory of the host faster than to any other."""


def write(olds: list[Tensor], news: list[Tensor], weight: float) -> None:
    """Write one step towards new values of the same dtype and device; a weight of 1 copies."""
    if weight == 1:
        torch._foreach_copy_(olds, news)
    else:
        torch._foreach_lerp_(olds, news, weight)


def write_staged(steps: list[tuple[list[Tensor], float]], news: list[Tensor], narrow: list[list[Tensor]]) -> None:
    """Write the steps of several averages, converting each new value once for all those of one dtype and device.

    Args:
        steps: the averages with their weights.
        news: the new values.
        narrow: nothing, or for a single average the tensors that take its rounding, while it is in cache.
    """
    for dtype, device in dict.fromkeys((olds[0].dtype, olds[0].device) for olds, _ in steps):
        mine = [(olds, weight) for olds, weight in steps if (olds[0].dtype, olds[0].device) == (dtype, device)]
        pin = device.type == "cpu" and news[0].device.type in _PINNABLE
        size = min(STAGE, sum(new.numel() for new in news))
        stage = torch.empty(size, dtype=dtype, device=device, pin_memory=pin)
        for pieces, new_pieces in batches([*(olds for olds, _ in mine), *narrow], news):
            staged = torch._C._nn.unflatten_dense_tensors(stage, new_pieces)
            torch._foreach_copy_(staged, new_pieces)
            for olds, (_, weight) in zip(pieces, mine, strict=False):
                write(olds, staged, weight)
            for roundings in pieces[len(mine) :]:
                torch._foreach_copy_(roundings, pieces[0])


def batches(averages: list[list[Tensor]], news: list[Tensor]) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """Yield the leaves that have elements, large ones in pieces, in batches that fit into the buffer together."""
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for leaves in zip(*averages, news, strict=True):
        for piece in _pieces(leaves):
            numel = piece[-1].numel()
            if numel == 0:  # before torch 2.7, unflatten_dense_tensors loses the shape of what is empty
                continue
            if size + numel > STAGE:
                *olds, new = map(list, zip(*batch, strict=True))
                yield olds, new
                batch, size = [], 0
            batch.append(piece)
            size += numel
    if batch:
        *olds, new = map(list, zip(*batch, strict=True))
        yield olds, new


def _pieces(leaves: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same parts of several tensors of one shape, none larger than the staging buffer."""
    shape = leaves[0].shape
    numel = shape.numel()
    if numel <= STAGE:
        yield leaves
    elif len(shape) > 1 and all(leaf.stride() == leaves[0].stride() for leaf in leaves) and _is_dense(leaves[0]):
        order = sorted(range(len(shape)), key=leaves[0].stride, reverse=True)
        yield from _pieces(tuple(leaf.permute(order).reshape(-1) for leaf in leaves))
    else:
        dim = max(range(len(shape)), key=lambda dim: shape[dim])
        length = max(1, STAGE * shape[dim] // numel)
        for parts in zip(*(torch.split(leaf, length, dim) for leaf in leaves), strict=True):
            yield from _pieces(parts)


def _is_dense(leaf: Tensor) -> bool:
    """Tell whether some order of its dimensions makes a tensor contiguous, so that it can be flattened as a view."""
    order = sorted(range(leaf.ndim), key=leaf.stride, reverse=True)
    return leaf.permute(order).is_contiguous()
