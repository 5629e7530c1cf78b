"""Keeps modules that merge weights in eval mode from doing so while weights are read and written."""

from __future__ import annotations

__all__: list[str] = []

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module


def overrides_train(module: Module) -> bool:
    """Tell whether the class of a module has a ``train`` of its own, which may change weights."""
    kind: Any = type(module)
    return class_overrides_train(kind)


@functools.lru_cache(1024)
def class_overrides_train(kind: type) -> bool:
    """Tell whether a class has a ``train`` of its own; torch's own classes merge nothing."""
    owner = next(base for base in kind.__mro__ if "train" in vars(base))
    return not owner.__module__.startswith("torch.")


@contextmanager
def unmerged(*models: Module) -> Iterator[None]:
    """Put modules that override ``train`` into training mode inside a ``with`` block, and back into their modes after.

    Some modules merge weights when they leave training mode: LoRA layers add a product to the weight of a frozen layer,
    and subtract it when they enter training mode again. If merged weights were averaged or exchanged, the product of
    another model would be subtracted. Nothing tells which modules merge, so ``train`` is called twice on all that are
    in eval mode.
    """
    layers: dict[Module, dict[Module, bool]] = {}
    waiting = list(models)
    while waiting:
        module = waiting.pop()
        if overrides_train(module) and not module.training:
            layers[module] = {part: part.training for part in module.modules()}
        else:
            waiting += module.children()
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer, modes in layers.items():
            layer.train(False)
            for part, mode in modes.items():  # outer modules come first
                if part.training == mode:
                    continue
                if overrides_train(part):
                    part.train(mode)
                part.training = mode
