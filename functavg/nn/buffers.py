"""Which buffers of a model are averaged, and how the others follow it."""

from __future__ import annotations

__all__: list[str] = []

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from functavg.kernels import dtypes
from functavg.kernels.torch.dtensor import get_shard
from functavg.kernels.torch.groups import PLAIN, kind_of, refusal
from functavg.nn.pairing import ABSENT, Pairs, is_averageable
from functavg.plan import Lerp, check_plan
from functavg.rules.base import AveragingRule, is_rule_class
from functavg.trees import NamedList

UseBuffers = bool | Callable[[str, Tensor], bool]

_facts = operator.attrgetter("shape", "dtype", "device", "layout")


@dataclass
class Copies:
    """Buffers to copy: into those that the average has, and in place of those that do not fit or are not there."""

    averages: list[Tensor] = field(default_factory=list)
    news: list[Tensor] = field(default_factory=list)
    replaced: list[tuple[str, Module, Module]] = field(default_factory=list)
    spell: Callable[[], list[str]] = list
    """Returns the names of the averages."""


def check_use_buffers(use_buffers: Any) -> None:
    """Raise a TypeError where a rule stands in the place of ``use_buffers``, which takes any value for a truth."""
    if isinstance(use_buffers, AveragingRule) or is_rule_class(use_buffers):
        raise TypeError(
            f"use_buffers must be a bool or a function f(name, buffer), got {use_buffers!r}; pass it as rule="
        )


def name_infinite(named: Iterable[tuple[str, Tensor]]) -> frozenset[str]:
    """Return the names of buffers that hold an infinity, as masks of attention do: a step from it to itself is NaN."""
    return frozenset(name for name, tensor in named if not isinstance(tensor, Parameter) and _is_infinite(tensor))


def _is_infinite(buffer: Tensor) -> bool:
    if refusal(buffer) is not None or kind_of(buffer) not in (dtypes.REAL, dtypes.COMPLEX) or buffer.is_meta:
        return False
    values = get_shard(buffer)
    return bool((values.float() if values.itemsize == 1 else values).isinf().any())  # isinf knows no float8


def split_buffers(pairs: Pairs, use_buffers: UseBuffers, never: Collection[str] = ()) -> Copies | None:
    """Move the buffers that are averaged to the averages of ``pairs``; return the others, None where there are none.

    Args:
        pairs: the tensors of an average and a model.
        use_buffers: which buffers are averaged, of those that may be.
        never: the names of those that may not. Default: none.
    """
    if not pairs.new_buffers:
        return None
    if not use_buffers and _fit(pairs):
        return Copies(pairs.buffers, pairs.new_buffers, spell=lambda: [name for name, _, _ in pairs.buffer_owners()])
    copies = Copies()
    averaged = []
    names: list[str] = []
    copies.spell = lambda: names
    takers: dict[int, Tensor] = {}
    parameters = dict(zip(map(id, pairs.averages), pairs.news, strict=True))
    columns = zip(pairs.buffer_owners(), pairs.buffers, pairs.new_buffers, strict=True)
    for index, ((path, average, model), old, new) in enumerate(columns):
        name = path.rpartition(".")[2]
        if old is None or old is ABSENT or new is None:
            if old is not new:
                copies.replaced.append((name, average, model))
        elif id(old) in parameters:  # it follows the parameter that it is
            if parameters[id(old)] is not new:
                copies.replaced.append((name, average, model))
        elif use_buffers and _may_be_averaged(path, model, new, never) and _is_wanted(use_buffers, path, new):
            averaged.append(index)
        elif not _can_take(old, new) or takers.setdefault(id(old), new) is not new:  # tied, and parted in the model
            copies.replaced.append((name, average, model))
        else:
            copies.averages.append(old)
            copies.news.append(new)
            names.append(path)
    pairs.average_buffers(averaged)
    return copies


def check_copies(copies: Copies | None, find_device: Callable[[], torch.device | None]) -> Callable[[], None]:
    """Check that buffers can be copied; return the function that does it.

    Args:
        copies: what ``split_buffers`` returned.
        find_device: returns the device of the average, for buffers that it did not have; ``None``: where the model's
            are.

    Raises:
        TypeError: a buffer has no values to copy yet; the message names it.
    """
    if copies is None:
        return lambda: None
    replacements = [_make_replacement(*replaced, find_device) for replaced in copies.replaced]
    steps = []
    if copies.averages:
        averages, news = NamedList(copies.averages, copies.spell), NamedList(copies.news, copies.spell)
        steps.append(check_plan(Lerp(averages, news, 1.0), inplace=True))

    def commit() -> None:
        for step in steps:
            step()
        for replace_ in replacements:
            replace_()

    return commit


def _make_replacement(
    name: str, average: Module, model: Module, find_device: Callable[[], torch.device | None]
) -> Callable[[], None]:
    """Return the function that gives a module of the average a copy of a buffer, in the place of what had its name."""
    old, new = average._buffers.get(name), model._buffers[name]
    device = find_device() if old is None else old.device
    if new is not None and is_lazy(new):
        raise TypeError(f"the model's buffer {name} is uninitialised (lazy); run one forward pass first")
    if new is not None and new.is_meta and device is not None and device.type != "meta":
        raise TypeError(f"the model's buffer {name} is on the meta device and has no values to copy")
    with torch.inference_mode(False), torch.no_grad():
        buffer = None if new is None else new.detach().clone().to(device)

    def replace_() -> None:
        vars(average).pop(name, None)  # an attribute before it was a buffer
        average.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)

    return replace_


def _fit(pairs: Pairs) -> bool:
    """Tell, faster than one by one, whether all buffers can be copied into those that the average has."""
    olds, news = pairs.buffers, pairs.new_buffers
    if not {*map(type, olds), *map(type, news)} <= PLAIN:
        return False
    try:
        facts = list(map(_facts, olds))
    except RuntimeError:  # a nested tensor has no shape
        return False
    keys = set(map(id, olds))
    return (
        facts == list(map(_facts, news))
        and all(layout == torch.strided for *_, layout in facts)
        and None not in map(kind_of, olds)
        and len(keys) == len(olds)
        and keys.isdisjoint(map(id, pairs.averages))
    )


def _can_take(old: Tensor, new: Tensor) -> bool:
    """Tell whether one dense tensor can be copied into another."""
    if refusal(old) is not None or refusal(new) is not None or (new.is_meta and not old.is_meta):
        return False
    return old.shape == new.shape and torch.can_cast(new.dtype, old.dtype)


def _may_be_averaged(path: str, module: Module, buffer: Tensor, never: Collection[str]) -> bool:
    return is_averageable(path.rpartition(".")[2], module, buffer) and path not in never


def _is_wanted(use_buffers: UseBuffers, path: str, buffer: Any) -> bool:
    return bool(use_buffers(path, buffer)) if callable(use_buffers) else use_buffers
