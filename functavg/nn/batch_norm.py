"""Re-estimates the running statistics of norms, for weights that no training batch has seen."""

from __future__ import annotations

__all__ = ["update_bn"]

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from functavg.nn import ranks
from functavg.nn.batches import run_model
from functavg.nn.estimating import combine_, estimate_statistics
from functavg.nn.norms import check_unscripted, find_norms, watch_statistics
from functavg.nn.pairing import check_module, unwrap
from functavg.nn.writing import drop_derived_values
from functavg.progress import Progress, check_progress, track
from functavg.trees import some


@torch.no_grad()
def update_bn(
    loader: Iterable[Any],
    model: Module,
    device: int | str | torch.device | None = None,
    *,
    forward: Callable[[Any, Any], object] | None = None,
    progress: Progress = False,
) -> None:
    """Re-estimate the running statistics of every BatchNorm and InstanceNorm of a model, in one pass over the data.

    With ``m_b`` the elements per channel that a BatchNorm sees in batch ``b`` of the ``loader`` (samples times
    positions), and ``mean_b`` and ``var_b`` their mean and unbiased variance, its statistics become

    * ``running_mean = sum(m_b mean_b) / sum(m_b)``,
    * ``running_var = sum(m_b var_b) / sum(m_b)``,

    summed up in float32 at least. So a sample weighs the same in a short last batch as in any other. An InstanceNorm
    with ``track_running_stats=True`` gets the mean over all samples of the mean and variance of each.

    * Subclasses of these, and of their base ``_NormBase``, are estimated too if their forward updates the statistics
      with ``momentum``; those whose forward leaves them alone keep them.
    * A module of another class with running statistics (buffers such as ``running_mean``) is left to its own forward,
      and named in a warning if that has changed them.
    * The statistics of a TorchScript module cannot be estimated; that is an error.

    If the model inside all wrappers is in eval mode, every sub-module trains for the pass. If it is in training mode,
    its sub-modules in eval mode are frozen and keep their statistics; so does a norm that sees no data. Afterwards
    every sub-module has its own mode and momentum again; after an error, its old statistics too. Code under
    ``torch.compile`` runs eagerly in the pass and does not recompile because of it.

    Where ``torch.distributed`` connects several ranks, each has to call this, with its part of the data: the sums go
    over the batches of all, and all end with equal statistics. A rank may have more batches than another, or none. An
    error on one rank becomes an error on each, once they have read their batches. (A model whose forward waits for
    other ranks by itself, as with FSDP or SyncBatchNorm, needs equally many batches on each.)

    Args:
        loader: the batches, read once. The model is called with a tensor as it is, with the first element of a list or
            tuple, and with the items of a mapping as keyword arguments.
        model: the model, bare or in wrappers such as an AveragedModel.
        device: where to move the tensors of each batch, in nested containers too. Default: they stay.
        forward: called as ``forward(model, batch)`` with the whole batch, instead of the model. Default: ``None``.
        progress: ``True`` for a bar (needs rich), or a function ``progress(done, total)`` of batches, called at most
            about a thousand times; ``total`` is None for a loader without a length. Default: ``False``.

    Raises:
        TypeError: ``model`` is not a module, or has scripted norms that are not frozen; or ``progress`` is neither a
            bool nor callable.
        ValueError: the loader is empty, on all ranks; or the ranks do not estimate the same BatchNorms.
        RuntimeError: there was an error on another rank.
        ImportError: a bar is asked for, and rich is not installed.

    Example:
        >>> import torch, functavg
        >>> model = torch.nn.BatchNorm1d(1)
        >>> functavg.update_bn([torch.zeros(98, 1), torch.full((2, 1), 100.0)], model)
        >>> model.running_mean
        tensor([2.])

    Source: torch.optim.swa_utils.update_bn, which weighs batches alike.
    """
    check_module(model, "update_bn(loader, model)")
    check_progress(progress)
    norms = find_norms(model)
    if not norms:
        return
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # without it nothing is compiled; it takes long to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_training(model))
        stack.enter_context(ranks.without_broadcasts(model))
        estimates = {
            name: stack.enter_context(estimate_statistics(norm)) for name, norm in norms.known.items() if norm.training
        }
        changed = stack.enter_context(watch_statistics(norms.others))
        device_of_norms = norms.find_device()
        empty = True
        try:
            check_unscripted(norms.scripted)
            for batch in track(loader, progress, description="update_bn"):
                run_model(model, batch, device, forward)
                empty = False
        except Exception:
            if ranks.are_several():  # the others wait to hear of it
                ranks.agree([], device_of_norms, has_data=False, failed=True)
            raise
        if ranks.are_several():
            empty = not combine_(estimates, device_of_norms, has_data=not empty)
        if empty:
            raise ValueError(
                "the loader is empty, so there is nothing to estimate the statistics from and they stay as they were. "
                "Pass a loader of at least one batch (a generator yields its batches only once)"
            )
    if changed:
        warnings.warn(
            f"update_bn cannot estimate the statistics of {some([f'{n} ({kind})' for n, kind in changed.items()])}, "
            "which are no norms of torch. The pass has changed them as steps of training do, from what they were. "
            "Estimate them by yourself, or derive the class from torch.nn.BatchNorm1d or the like: of its subclasses, "
            "update_bn sets the momentum to 1 and averages the statistics of the batches",
            stacklevel=3,
        )


# ---- what changes for the pass, and is put back


@contextmanager
def _training(model: Module) -> Iterator[None]:
    """Put a model into training mode if it is in eval mode; after the block, give each sub-module its old mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        if not _innermost(model).training:
            model.train()
            drop_derived_values()  # an override of `train` may write to weights
        yield
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # not only the flag: overrides of `train` merge weights and the like
        for module, mode in modes.items():
            module.training = mode
        drop_derived_values()


def _innermost(module: Module) -> Module:
    """Return the model inside all wrappers and averages."""
    try:
        inner = unwrap(module)
    except TypeError:  # FSDP1, which shards parameters but no buffers
        return module
    return _innermost(inner.module) if isinstance(inner, AveragedModel) else inner
