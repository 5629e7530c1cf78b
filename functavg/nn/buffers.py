"""Which buffers of a model are averaged, and how the others follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from functavg.nn.pairing import Pairs, is_averageable

UseBuffers = bool | Callable[[str, Tensor], bool]


@dataclass
class Copies:
    """Buffers to copy: into those that the average has, and in place of those that do not fit or are not there."""

    averages: dict[str, Tensor] = field(default_factory=dict)
    news: dict[str, Tensor] = field(default_factory=dict)
    replaced: dict[str, Tensor | None] = field(default_factory=dict)


def divide(pairs: Pairs, use_buffers: UseBuffers) -> Copies:
    """Move the buffers that are averaged to the tensors of ``pairs``; return the others."""
    copies = Copies()
    for path, (average, model) in pairs.buffers.items():
        name = path.rpartition(".")[2]
        old, new = average._buffers.get(name), model._buffers[name]
        if old is None or new is None:
            if old is not new or name not in average._buffers:
                copies.replaced[path] = new
        elif is_averageable(name, model, new) and _wanted(use_buffers, path, new):
            pairs.averages[path], pairs.news[path] = old, new
        elif old.shape != new.shape or not torch.can_cast(new.dtype, old.dtype):
            copies.replaced[path] = new
        else:
            copies.averages[path], copies.news[path] = old, new
    return copies


def replace(pairs: Pairs, copies: Copies) -> None:
    """Give the average copies of the buffers that it does not have, or not in their shape."""
    for path, new in copies.replaced.items():
        average, model = pairs.buffers[path]
        name = path.rpartition(".")[2]
        buffer = None if new is None else new.detach().clone().to(_place(average._buffers.get(name), new, pairs))
        average.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)


def _wanted(use_buffers: UseBuffers, path: str, buffer: Tensor) -> bool:
    return bool(use_buffers(path, buffer)) if callable(use_buffers) else bool(use_buffers)


def _place(old: Tensor | None, new: Tensor, pairs: Pairs) -> torch.device:
    """Return the device for a copy: that of what it replaces, else one on which the average lives."""
    if old is not None:
        return old.device
    devices = [tensor.device for tensor in pairs.averages.values()]
    return new.device if new.device in devices or not devices else devices[0]
