"""Re-estimates the statistics of BatchNorm layers, for weights that no training batch has seen."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from functavg.kernels.torch.steps import copied, lerp_leaf
from functavg.nn import ranks
from functavg.nn.pairing import unwrap

_COUNTER = "num_batches_tracked"
_STATISTICS = ("running_mean", "running_var")


@torch.no_grad()
def update_bn(
    loader: Iterable[Any],
    model: Module,
    device: int | str | torch.device | None = None,
    *,
    forward: Callable[[Any, Any], object] | None = None,
) -> None:
    """Re-estimate the running statistics of every BatchNorm of a model, in one pass over the data.

    With ``m_b`` the elements per channel that a BatchNorm sees in batch ``b`` of the ``loader`` (samples times
    positions), and ``mean_b`` and ``var_b`` their mean and unbiased variance, its statistics become

    * ``running_mean = sum(m_b mean_b) / sum(m_b)``,
    * ``running_var = sum(m_b var_b) / sum(m_b)``,

    summed up in float32 at least. So a sample weighs the same in a short last batch as in any other.

    If the model inside all wrappers is in eval mode, every sub-module trains for the pass. If it is in training mode,
    its sub-modules in eval mode are frozen and keep their statistics; so does a BatchNorm that sees no data. Afterwards
    every sub-module has its mode and momentum again, and after an error the statistics from before. Code under
    ``torch.compile`` runs eagerly in the pass and does not recompile because of it.

    Where ``torch.distributed`` connects several ranks, each has to call this, with its part of the data: the sums go
    over the batches of all, and all end with equal statistics. A rank may have more batches than another, or none. An
    error on one rank becomes an error on each, once they have read their batches. (A model whose forward waits for
    other ranks by itself, as with FSDP or SyncBatchNorm, needs equally many batches on each.)

    Args:
        loader: the batches, read once. The model is called with a tensor as it is, with the first element of a list or
            tuple, and with the items of a mapping as keyword arguments.
        model: the model, bare or in wrappers such as an AveragedModel.
        device: where to move the tensors of each batch, in nested containers too. Default: nowhere.
        forward: called as ``forward(model, batch)``, with the whole batch, instead of all this. Default: ``None``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: the loader is empty, on all ranks; or the ranks do not estimate the same BatchNorms.
        RuntimeError: there was an error on another rank.

    Example:
        >>> import torch, functavg
        >>> model = torch.nn.BatchNorm1d(1)
        >>> functavg.update_bn([torch.zeros(98, 1), torch.full((2, 1), 100.0)], model)
        >>> model.running_mean
        tensor([2.])

    Source: torch.optim.swa_utils.update_bn, which weighs batches alike.
    """
    if not isinstance(model, Module):
        raise TypeError(f"update_bn(loader, model): model must be a torch.nn.Module, got {type(model).__name__}")
    modules = model.named_modules()
    norms = {name: module for name, module in modules if isinstance(module, _BatchNorm) and _has_statistics(module)}
    if not norms:
        return
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and it takes long to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_training(model))
        stack.enter_context(ranks.silent(model))
        estimates = {name: stack.enter_context(_estimating(norm)) for name, norm in norms.items() if norm.training}
        place = next(iter(norms.values())).get_buffer("running_mean").device
        empty = True
        try:
            for batch in loader:
                _run(model, batch, device, forward)
                empty = False
        except Exception:
            if ranks.are_several():  # which wait to hear of it
                ranks.agree([], place, has_data=False, failed=True)
            raise
        if ranks.are_several():
            empty = not _combined(estimates, place, has_data=not empty)
        if empty:
            raise ValueError(
                "the loader is empty, so there is nothing to estimate the statistics from and they stay as they were. "
                "Pass a loader of at least one batch (a generator yields its batches only once)"
            )


def _has_statistics(norm: _BatchNorm) -> bool:
    return norm.track_running_stats and all(norm._buffers.get(name) is not None for name in _STATISTICS)


# ---- what changes for the pass, and is put back


@contextmanager
def _training(model: Module) -> Iterator[None]:
    """Put a model that is in eval mode into training mode, and each sub-module back into its own after."""
    modes = {module: module.training for module in model.modules()}
    try:
        if not _innermost(model).training:
            model.train()
        yield
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # not only the flag: overrides of `train` merge weights and the like
        for module, mode in modes.items():
            module.training = mode


def _innermost(module: Module) -> Module:
    """Return the model inside all wrappers and averages."""
    try:
        inner = unwrap(module)
    except TypeError:  # FSDP1, which shards parameters but no buffers
        return module
    return _innermost(inner.module) if isinstance(inner, AveragedModel) else inner


@dataclass(eq=False)
class _Estimate:
    """The statistics of what one BatchNorm has seen in the pass."""

    norm: _BatchNorm
    count: int = 0  # elements per channel
    averages: dict[str, Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # replicas of DataParallel run in threads

    def add(self, seen: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Average in the statistics that a BatchNorm, or a replica of it, has of the batch it was called with."""
        del output
        size = _elements_per_channel(seen, (*args, *kwargs.values())) if seen.training else 0
        if size == 0:
            return
        with self.lock:
            self.count += size
            for name in _STATISTICS:
                if name in self.averages:
                    lerp_leaf(self.averages[name], getattr(seen, name), size / self.count, inplace=True)
                else:
                    self.averages[name] = copied(getattr(seen, name), None, None)

    def sums(self) -> list[Tensor]:
        """Return what adds up over ranks: the counts of elements and batches, and the statistics by elements."""
        counter = self.norm._buffers.get(_COUNTER)
        batches = 0.0 if counter is None else counter.item()
        if isinstance(self.norm, SyncBatchNorm):  # a batch of it is counted on each rank of its group
            batches /= distributed.get_world_size(self.norm.process_group)
        statistics = [self.averages.get(name, getattr(self.norm, name)).double() * self.count for name in _STATISTICS]
        return [torch.tensor([self.count, batches], dtype=torch.float64), *statistics]

    def take(self, counts: Tensor, *sums: Tensor) -> None:
        """Take the sums over all ranks for its own."""
        self.count, batches = map(round, counts.tolist())
        if self.count > 0:
            self.averages = {name: total / self.count for name, total in zip(_STATISTICS, sums, strict=True)}
            self.averages[_COUNTER] = torch.tensor(batches)


@contextmanager
def _estimating(norm: _BatchNorm) -> Iterator[_Estimate]:
    """Give a BatchNorm the statistics of what it sees inside; on an error, or where it sees nothing, those it had.

    With a momentum of 1 the running statistics are those of the newest batch, which a hook averages: summed up in 16
    bits they would stop moving after some hundred batches. They stand in tensors beside its own, so that nothing is
    written to these before all went well.
    """
    names = [name for name in (*_STATISTICS, _COUNTER) if norm._buffers.get(name) is not None]
    own = {name: getattr(norm, name) for name in names}
    lazy = any(map(is_lazy, own.values()))
    momentum = norm.momentum
    estimate = _Estimate(norm)
    results: dict[str, Tensor] = {}
    handle = norm.register_forward_hook(estimate.add, with_kwargs=True)
    try:
        norm.momentum = 1.0
        for name, tensor in own.items():
            if not is_lazy(tensor):
                setattr(norm, name, torch.full_like(tensor, float(name == "running_var")))
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


def _combined(estimates: Mapping[str, _Estimate], device: torch.device, *, has_data: bool) -> bool:
    """Let every estimate be that of the data of all ranks; tell whether there are any.

    Raises:
        RuntimeError, ValueError: another rank failed, or estimates other BatchNorms.
    """
    known = {
        name: estimate for name, estimate in estimates.items() if not is_lazy(estimate.norm.get_buffer("running_mean"))
    }
    layout = [f"{name} of {estimate.norm.num_features} channels" for name, estimate in known.items()]
    any_data = ranks.agree(layout, device, has_data=has_data)
    if any_data and known:
        mine = [estimate.sums() for estimate in known.values()]
        totals = iter(ranks.summed([tensor for tensors in mine for tensor in tensors], device))
        for estimate, tensors in zip(known.values(), mine, strict=True):
            estimate.take(*itertools.islice(totals, len(tensors)))
    return any_data


def _elements_per_channel(norm: _BatchNorm, inputs: tuple[Any, ...]) -> int:
    """Return how many elements of each channel a BatchNorm was called with; 1 where its input is no tensor."""
    for data in inputs:
        if isinstance(data, Tensor):
            return data.numel() // max(1, norm.num_features)
    return 1


# ---- batches


def _run(model: Module, batch: Any, device: Any, forward: Callable[[Any, Any], object] | None) -> None:
    if forward is not None:
        forward(model, _moved(batch, device))
    elif isinstance(batch, Mapping):
        model(**_moved(batch, device))
    else:
        model(_moved(batch[0] if isinstance(batch, (list, tuple)) else batch, device))


def _moved(batch: Any, device: Any) -> Any:
    """Return a batch with the tensors in it, at any depth, on a device; the same batch where that is None."""
    if device is None:
        return batch
    if callable(getattr(batch, "to", None)):  # a tensor, or a container that knows which of its tensors may move
        return batch.to(device)
    if isinstance(batch, Mapping):
        items = {key: _moved(value, device) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return items
        moved = copy.copy(batch)
        moved.update(items)
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_make"):  # a namedtuple
        return batch._make(_moved(value, device) for value in batch)
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
