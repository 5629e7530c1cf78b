"""Steps towards new values of another dtype or device, which are converted through one small buffer."""

from __future__ import annotations

__all__: list[str] = []

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

STAGE = 2**20
"""Elements of the buffer: small enough to stay in cache."""

_PINNABLE = ("cuda", "xpu")
"""Accelerators that copy to pinned memory of the host faster than to any other."""


def write_(olds: list[Tensor], news: list[Tensor], weight: float) -> None:
    """Write one step towards new values of the same dtype and device; a weight of 1 copies, one of 0 does nothing."""
    if weight == 1:
        torch._foreach_copy_(olds, news)
    elif weight != 0:
        torch._foreach_lerp_(olds, news, weight)


def write_staged_(
    steps: list[tuple[list[Tensor], float]], news: list[Tensor], roundings: list[Tensor] | None = None
) -> None:
    """Write the steps of several averages, converting each new value once for all those of one dtype and device.

    Args:
        steps: the averages with their weights.
        news: the new values.
        roundings: tensors that take the rounding of the only average, while it is in cache.
    """
    steps = [(olds, weight) for olds, weight in steps if weight != 0]
    for dtype, device in dict.fromkeys((olds[0].dtype, olds[0].device) for olds, _ in steps):
        mine = [(olds, weight) for olds, weight in steps if (olds[0].dtype, olds[0].device) == (dtype, device)]
        pin = device.type == "cpu" and news[0].device.type in _PINNABLE
        size = min(STAGE, sum(map(Tensor.numel, news)))
        stage = torch.empty(size, dtype=dtype, device=device, pin_memory=pin)
        lists = [news, *(olds for olds, _ in mine), *([] if roundings is None else [roundings])]
        for new_parts, *parts in batch(lists):
            staged = _convert(new_parts, stage)
            for olds, (_, weight) in zip(parts, mine, strict=False):
                write_(olds, staged, weight)
            if roundings is not None:
                torch._foreach_copy_(parts[-1], parts[0])


def _convert(leaves: list[Tensor], stage: Tensor) -> list[Tensor]:
    """Return leaves in the dtype and on the device of the buffer, in its memory."""
    if len(leaves) == 1:
        staged = [stage[: leaves[0].numel()].view(leaves[0].shape)]
        staged[0].copy_(leaves[0])
        return staged
    flat = torch._C._nn.flatten_dense_tensors(leaves)
    stage = stage[: flat.numel()]
    stage.copy_(flat)
    parts = torch.split(stage, list(map(Tensor.numel, leaves)))
    return list(map(Tensor.view_as, parts, leaves)) if any(leaf.ndim != 1 for leaf in leaves) else list(parts)


def batch(lists: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield the leaves in batches that fit into the buffer, large ones in pieces, without empty ones.

    Args:
        lists: leaves of the same shapes in each list.
    """
    numels = list(map(Tensor.numel, lists[0]))
    if sum(numels) <= STAGE and all(numels):
        yield lists
        return
    waiting: list[tuple[Tensor, ...]] = []
    size = 0
    for piece in itertools.chain.from_iterable(map(_divide, zip(*lists, strict=True))):
        numel = piece[0].numel()
        if size + numel > STAGE:
            yield list(map(list, zip(*waiting, strict=True)))
            waiting, size = [], 0
        waiting.append(piece)
        size += numel
    if waiting:
        yield list(map(list, zip(*waiting, strict=True)))


def _divide(leaves: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same parts of several tensors of one shape, none empty and none larger than the staging buffer."""
    shape = leaves[0].shape
    numel = shape.numel()
    if numel <= STAGE:
        if numel > 0:
            yield leaves
    elif len(shape) > 1 and all(leaf.stride() == leaves[0].stride() for leaf in leaves) and _is_dense(leaves[0]):
        order = sorted(range(len(shape)), key=leaves[0].stride, reverse=True)
        yield from _divide(tuple(leaf.permute(order).reshape(-1) for leaf in leaves))
    else:
        dim = max(range(len(shape)), key=lambda dim: shape[dim])
        length = max(1, STAGE * shape[dim] // numel)
        for parts in zip(*(torch.split(leaf, length, dim) for leaf in leaves), strict=True):
            yield from _divide(parts)


def _is_dense(leaf: Tensor) -> bool:
    """Tell whether some order of its dimensions makes a tensor contiguous, so that it can be flattened as a view."""
    order = sorted(range(leaf.ndim), key=leaf.stride, reverse=True)
    return leaf.permute(order).is_contiguous()
