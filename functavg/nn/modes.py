"""Keeps apart what modules merge in eval mode, while weights are read and written."""

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

    Some merge weights when they leave training mode, as LoRA layers add a product of theirs to the weight of a frozen
    layer, and take it out again when they enter it. Merged weights are not what is trained: exchanged or averaged, they
    would be taken apart with those of another model. Nothing tells which modules do that, so ``train`` of all
    that are in eval mode is called, twice. Modes are those of before afterwards.
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
            for part, mode in modes.items():  # what is inside comes later
                if part.training == mode:
                    continue
                if overrides_train(part):
                    part.train(mode)
                part.training = mode
