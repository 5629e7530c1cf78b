"""What ranks tell each other about a pass that each makes over its part of the data."""

from __future__ import annotations

__all__: list[str] = []

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from functavg.trees import some


def are_several() -> bool:
    """Tell whether this process is one of several that torch.distributed connects."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def without_broadcasts(model: Module) -> Iterator[None]:
    """Keep DistributedDataParallel from broadcasting buffers before a forward: a rank may have no batch to run."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    before = [wrapper.broadcast_buffers for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.broadcast_buffers = False
        yield
    finally:
        for wrapper, broadcasts in zip(wrappers, before, strict=True):
            wrapper.broadcast_buffers = broadcasts


def agree(layout: list[str], device: torch.device, *, has_data: bool, failed: bool = False) -> bool:
    """Return whether any rank has data. Every rank has to call this, even one that failed.

    Args:
        layout: names of what is estimated, the same on all ranks.
        device: where to reduce, if the ranks can do so there.
        has_data: whether this rank has data.
        failed: whether this rank is about to raise an error of its own. Default: ``False``.

    Raises:
        RuntimeError: another rank failed.
        ValueError: the layouts differ.
    """
    failing = dist.get_rank() if failed else -1
    mark = zlib.crc32(repr(layout).encode())
    verdict = torch.tensor([failing, has_data, mark, -mark], dtype=torch.int64, device=_reducing_device(device))
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    failing, any_data, largest, smallest = verdict.tolist()
    if failed:
        return False
    if failing >= 0:
        raise RuntimeError(
            f"update_bn failed on rank {failing}, whose own error says why; the statistics stay as they were"
        )
    if largest != -smallest:
        raise ValueError(
            f"the ranks do not estimate the same BatchNorms, on this one {some(layout)}. Make the model alike on every "
            "rank, with the same modes, and run one batch through it before where it is lazy"
        )
    return bool(any_data)


def reduce_sums(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the sum of each tensor over all ranks, in float64, by one all-reduce."""
    flat = torch.cat([tensor.to(_reducing_device(device), torch.float64).flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _reducing_device(device: torch.device) -> torch.device:
    """Return this device if the ranks can reduce there, else the first one where they can."""
    kinds = [kind.partition(":")[0] for kind in dist.get_backend_config().split(",")]
    return device if device.type in kinds else torch.device(kinds[0])
