"""Runs a model on the batches of a loader, of whatever kind."""

from __future__ import annotations

__all__: list[str] = []

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch.nn import Module


def run_model(model: Module, batch: Any, device: Any, forward: Callable[[Any, Any], object] | None) -> None:
    """Call a model with a batch.

    Args:
        model: the model.
        batch: a mapping of keyword arguments, a list or tuple whose first element is the argument, or the argument.
        device: where to move the tensors of the batch; ``None`` leaves them where they are.
        forward: called as ``forward(model, batch)`` instead, unless it is ``None``.
    """
    if forward is not None:
        forward(model, move_batch(batch, device))
    elif isinstance(batch, Mapping):
        model(**move_batch(batch, device))
    else:
        model(move_batch(batch[0] if isinstance(batch, (list, tuple)) else batch, device))


def move_batch(batch: Any, device: Any) -> Any:
    """Return a batch with its tensors, at any depth, moved to a device; the batch itself if that is None."""
    if device is None:
        return batch
    if callable(getattr(batch, "to", None)):  # a tensor, or a container that knows which of its tensors may move
        return batch.to(device)
    if isinstance(batch, Mapping):
        items = {key: move_batch(value, device) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return items
        moved = copy.copy(batch)
        moved.update(items)
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_make"):  # a namedtuple
        return batch._make(move_batch(value, device) for value in batch)
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_batch(value, device) for value in batch)
    return batch
