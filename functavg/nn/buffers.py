"""Which buffers of a model are averaged, and how the others follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from functavg.kernels.torch.groups import refusal
from functavg.nn.pairing import Pairs, as_dict, is_averageable


@dataclass
class Replacement:
    """A buffer to give to a module of the average."""

    module: Module
    name: str
    buffer: Tensor | None
    persistent: bool

    def carry_out(self) -> None:
        """Give the buffer to the module, in the place of whatever had its name."""
        vars(self.module).pop(self.name, None)  # an attribute before it was a buffer
        self.module.register_buffer(self.name, self.buffer, persistent=self.persistent)


UseBuffers = bool | Callable[[str, Tensor], bool]


@dataclass
class Copies:
    """Buffers to copy: into those that the average has, and in place of those that do not fit or are not there."""

    averages: list[Tensor] = field(default_factory=list)
    news: list[Tensor] = field(default_factory=list)
    replaced: list[tuple[str, Module, Module]] = field(default_factory=list)


def divide(pairs: Pairs, use_buffers: UseBuffers) -> Copies:
    """Move the buffers that are averaged to the tensors of ``pairs``; return the others."""
    copies = Copies()
    takers: dict[int, Tensor] = {}
    parameters = dict(zip(map(id, pairs.averages.values()), pairs.news.values(), strict=True))
    for path, average, model in pairs.buffers:
        name, mine = path.rpartition(".")[2], as_dict(average._buffers)
        old, new = mine.get(name), model._buffers[name]
        if old is None or new is None:
            if old is not new or name not in mine:
                copies.replaced.append((name, average, model))
        elif id(old) in parameters:  # it follows the parameter that it is
            if parameters[id(old)] is not new:
                copies.replaced.append((name, average, model))
        elif use_buffers and is_averageable(name, model, new) and _wanted(use_buffers, path, new):
            pairs.averages[path], pairs.news[path] = old, new
        elif not _can_take(old, new) or takers.setdefault(id(old), new) is not new:  # shared, and parted in the model
            copies.replaced.append((name, average, model))
        else:
            copies.averages.append(old)
            copies.news.append(new)
    return copies


def replacements(copies: Copies, device: Callable[[], torch.device | None]) -> list[Replacement]:
    """Return copies of the buffers that the average does not have, or not in their shape.

    Args:
        copies: what ``divide`` returned.
        device: tells where the average lives, for buffers that it did not have; ``None``: where the model's are.

    Raises:
        TypeError: a buffer has no values to copy yet; the message names it.
    """
    made = []
    for name, average, model in copies.replaced:
        old, new = average._buffers.get(name), model._buffers[name]
        place = device() if old is None else old.device
        if new is not None and is_lazy(new):
            raise TypeError(f"the model's buffer {name} is uninitialised (lazy); run one forward pass first")
        if new is not None and new.is_meta and place is not None and place.type != "meta":
            raise TypeError(f"the model's buffer {name} is on the meta device and has no values to copy")
        buffer = None if new is None else new.detach().clone().to(place)
        made.append(Replacement(average, name, buffer, name not in model._non_persistent_buffers_set))
    return made


def _can_take(old: Tensor, new: Tensor) -> bool:
    """Tell whether one dense tensor can be copied into another."""
    if refusal(old) is not None or refusal(new) is not None or (new.is_meta and not old.is_meta):
        return False
    return old.shape == new.shape and torch.can_cast(new.dtype, old.dtype)


def _wanted(use_buffers: UseBuffers, path: str, buffer: Tensor) -> bool:
    return bool(use_buffers(path, buffer)) if callable(use_buffers) else use_buffers
