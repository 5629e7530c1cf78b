"""Puts an average into a model for a while."""

from __future__ import annotations

__all__ = ["swapped"]

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.swa_utils import AveragedModel as TorchAveragedModel

from functavg import trees
from functavg.advice import advise, is_tensordict
from functavg.nn import pairing
from functavg.nn.averaged_model import AveragedModel
from functavg.nn.writing import exchange
from functavg.scalars import is_host
from functavg.state import AverageState

M = TypeVar("M", bound=Module)


def swapped(
    model: M,
    average: Module | AverageState[Any] | Mapping[str, Tensor],
    *,
    backup_device: int | str | torch.device | None = None,
) -> AbstractContextManager[M]:
    """Compute with an average inside a ``with`` block, and with the training weights again after it.

    The average is copied into the model's own tensors, which optimizers, hooks and compiled code go on to hold; the
    training weights come back however the block is left. Blocks nest. A swap takes memory for the training weights
    while it lasts; to compute with ``averaged.module`` takes none.

    Args:
        model: the model, in any wrapper.
        average: an AveragedModel (its parameters, and the buffers that it averages), the state of a functional rule,
            or ``{name: tensor}``. Tensors of the model whose names it does not have are left alone. One that has
            averaged nothing yet (count 0) changes nothing.
        backup_device: where to keep the training weights meanwhile, such as ``"cpu"``. Default: where they are.

    Returns:
        A context manager that yields the model.

    Raises:
        TypeError, ValueError: the average does not fit the model; nothing was written. At exit: tensors were replaced
            inside the block by others that cannot take the training weights; the message names them, and all others
            have theirs again. An error of the block stays that error, with a note.

    Example:
        >>> import functavg, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> with functavg.swapped(model, {"weight": torch.ones(1, 1)}):
        ...     model.weight.item()
        1.0
        >>> model.weight.item()
        2.0
    """
    if isinstance(average, Module):
        average = pairing.unwrap(average)
    if isinstance(average, AveragedModel):
        return average.swapped(model, backup_device=backup_device)
    return exchange(model, lambda: _read(average), backup_device, [average] if isinstance(average, Module) else [])


def _read(average: Any) -> Mapping[str, Tensor]:
    """Return the values of an average by name."""
    if isinstance(average, TorchAveragedModel):
        everything = pairing.named_tensors(average.module) if average.n_averaged > 0 else ()
        return {name: tensor for name, tensor in everything if average.use_buffers or isinstance(tensor, Parameter)}
    if isinstance(average, AverageState):
        if is_host(average.count) and average.count == 0:
            return {}
        leaves, spec = trees.flatten(average.average)
        return dict(zip(trees.names(spec), leaves, strict=True))
    if not isinstance(average, Mapping) or is_tensordict(average):
        raise TypeError(
            "average must be an AveragedModel, an AverageState or a mapping from names to tensors, "
            f"got {type(average).__name__}{advise(average)}"
        )
    return average
