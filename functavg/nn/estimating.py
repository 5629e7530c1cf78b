"""Estimates the running statistics of norms from what they see in one pass over the data."""

from __future__ import annotations

__all__: list[str] = []

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from functavg.kernels.torch.steps import copy, lerp_leaf
from functavg.nn import ranks
from functavg.nn.norms import STATISTICS

_COUNTER = "num_batches_tracked"


@dataclass(eq=False)
class Estimate:
    """The statistics of what one norm has seen in the pass."""

    norm: _NormBase
    start: dict[str, Tensor] | None = None  # the statistics until its forward changes them; None: it is known to
    count: int = 0  # elements per channel; of an InstanceNorm, samples
    averages: dict[str, Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # replicas of DataParallel run in threads

    def add(self, seen: _NormBase, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Average in the statistics of the batch that the norm, or a replica of it, was just called with."""
        del output
        if not seen.training or not self._writes(seen):
            return
        size = _count(seen, (*args, *kwargs.values()))
        if size == 0:
            for name in STATISTICS:
                getattr(seen, name).nan_to_num_()  # the NaN of no elements would stay, even at a momentum of 1
            return
        with self.lock:
            self.count += size
            for name in STATISTICS:
                if name in self.averages:
                    lerp_leaf(self.averages[name], getattr(seen, name), size / self.count, inplace=True)
                else:
                    self.averages[name] = copy(getattr(seen, name), None, None)

    def _writes(self, seen: _NormBase) -> bool:
        """Tell whether the forward changes the statistics; that of a frozen norm does not."""
        if self.start is not None:
            pairs = [(tensor, getattr(seen, name)) for name, tensor in self.start.items()]
            if all(torch.equal(before.to(after.device), after) for before, after in pairs):
                return False
            self.start = None
        return True

    def get_summands(self) -> list[Tensor]:
        """Return what to sum over ranks: the counts of elements and batches, and the statistics times elements."""
        counter = self.norm._buffers.get(_COUNTER)
        batches = 0.0 if counter is None else counter.item()
        if isinstance(self.norm, SyncBatchNorm):  # each rank of its group counts the same batch
            batches /= distributed.get_world_size(self.norm.process_group)
        statistics = [self.averages.get(name, getattr(self.norm, name)).double() * self.count for name in STATISTICS]
        return [torch.tensor([self.count, batches], dtype=torch.float64, device="cpu"), *statistics]

    def take_sums(self, counts: Tensor, *sums: Tensor) -> None:
        """Replace the statistics of this rank by those of all ranks."""
        self.count, batches = map(round, counts.tolist())
        if self.count > 0:
            self.averages = {name: total / self.count for name, total in zip(STATISTICS, sums, strict=True)}
            self.averages[_COUNTER] = torch.tensor(batches, device="cpu")


@contextmanager
def estimate_statistics(norm: _NormBase) -> Iterator[Estimate]:
    """Give a norm the statistics of the data inside the block; after an error, or without data, those it had.

    With a momentum of 1 the running statistics are those of the newest batch, which a hook averages: summed up in 16
    bits they would stop moving after some hundred batches. Other tensors replace those of the norm meanwhile, which
    are written to only when all went well.
    """
    names = [name for name in (*STATISTICS, _COUNTER) if norm._buffers.get(name) is not None]
    own = {name: getattr(norm, name) for name in names}
    lazy = any(map(is_lazy, own.values()))
    momentum = norm.momentum
    starts = _make_starts(norm, own)
    estimate = Estimate(norm)
    if not lazy and not _is_of_torch(norm):
        estimate.start = {name: starts[name].clone() for name in STATISTICS}
    results: dict[str, Tensor] = {}
    handle = norm.register_forward_hook(estimate.add, with_kwargs=True)
    try:
        norm.momentum = 1.0
        for name, tensor in starts.items():
            setattr(norm, name, tensor)
        yield estimate
        if estimate.averages:
            results = {name: estimate.averages.get(name, getattr(norm, name)) for name in names}
    finally:
        handle.remove()
        norm.momentum = momentum
        for name, tensor in own.items():
            setattr(norm, name, tensor)
        if lazy and not any(map(is_lazy, own.values())):
            norm.reset_running_stats()  # it was initialised in the pass
        with torch.inference_mode():  # in which any tensor can be written to
            for name, result in results.items():
                own[name].copy_(result)


def _make_starts(norm: _NormBase, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers that the pass starts from: those of a new norm.

    A custom forward may compute with the statistics, as that of a frozen norm does, so it starts from the old ones.
    """
    there = {name: tensor for name, tensor in own.items() if not is_lazy(tensor)}
    starts = {name: torch.full_like(tensor, float(name == "running_var")) for name, tensor in there.items()}
    if not _is_of_torch(norm):
        starts |= {name: there[name].clone() for name in STATISTICS if name in there and there[name].isfinite().all()}
    return starts


def _is_of_torch(norm: _NormBase) -> bool:
    """Tell whether the forward of a norm is one of torch's, which writes the statistics and does not read them."""
    return type(norm).forward.__module__.split(".")[0] == "torch"


def _count(norm: _NormBase, inputs: tuple[Any, ...]) -> int:
    """Return the weight of the input of a norm: its elements per channel, or samples; 1 if it is not a tensor."""
    for data in inputs:
        if isinstance(data, Tensor):
            if isinstance(norm, _InstanceNorm):  # the mean of the statistics of its samples
                is_batch: bool = data.dim() > norm._get_no_batch_dim()  # type: ignore[no-untyped-call]
                return data.shape[0] if is_batch else 1
            return data.numel() // max(1, norm.num_features)
    return 1


def combine_(estimates: Mapping[str, Estimate], device: torch.device, *, has_data: bool) -> bool:
    """Combine the estimates of all ranks; tell whether any rank has data.

    Raises:
        RuntimeError, ValueError: another rank failed, or estimates other norms.
    """
    known = {
        name: estimate for name, estimate in estimates.items() if not is_lazy(estimate.norm.get_buffer("running_mean"))
    }
    layout = [f"{name} of {estimate.norm.num_features} channels" for name, estimate in known.items()]
    any_data = ranks.agree(layout, device, has_data=has_data)
    if any_data and known:
        parts = [estimate.get_summands() for estimate in known.values()]
        totals = iter(ranks.reduce_sums([tensor for tensors in parts for tensor in tensors], device))
        for estimate, tensors in zip(known.values(), parts, strict=True):
            estimate.take_sums(*itertools.islice(totals, len(tensors)))
    return any_data
