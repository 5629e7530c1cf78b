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
    """Buffers to copy into those of the average, and those to put in the place of misfits and missing ones."""

    averages: list[Tensor] = field(default_factory=list)
    news: list[Tensor] = field(default_factory=list)
    replaced: list[tuple[str, Module, Module]] = field(default_factory=list)
    spell: Callable[[], list[str]] = list
    """Returns the names of the averages."""


def check_use_buffers(use_buffers: Any) -> None:
    """Raise a TypeError for a rule passed as ``use_buffers``, where it would count as True."""
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
    """Add the buffers to average to ``pairs.averages``; return the others, which are copied, None if there are none.

    Args:
        pairs: the tensors of an average and a model.
        use_buffers: which buffers are averaged, of those that may be.
        never: the names of those that may not. Default: none.
    """
    if not pairs.new_buffers:
        return None
    if not use_buffers and _can_copy_all(pairs):
        return Copies(pairs.buffers, pairs.new_buffers, spell=lambda: [name for name, _, _ in pairs.buffer_owners()])
    names: list[str] = []
    copies = Copies(spell=lambda: names)
    averaged = []
    takers: dict[int, Tensor] = {}
    parameters = dict(zip(map(id, pairs.averages), pairs.news, strict=True))
    columns = zip(pairs.buffer_owners(), pairs.buffers, pairs.new_buffers, strict=True)
    for index, ((path, average, model), old, new) in enumerate(columns):
        name = path.rpartition(".")[2]
        if old is None or old is ABSENT or new is None or id(old) in parameters:
            if parameters.get(id(old), old) is not new:  # one that is tied to a parameter follows it
                copies.replaced.append((name, average, model))
        elif (
            use_buffers
            and path not in never
            and is_averageable(name, model, new)
            and (not callable(use_buffers) or use_buffers(path, new))
        ):
            averaged.append(index)
        elif not _can_take(old, new) or takers.setdefault(id(old), new) is not new:  # tied in the average only
            copies.replaced.append((name, average, model))
        else:
            copies.averages.append(old)
            copies.news.append(new)
            names.append(path)
    pairs.add_buffers(averaged)
    return copies


def check_copies(copies: Copies | None, module: Module) -> Callable[[], None]:
    """Check that buffers can be copied; return the function that does it.

    Args:
        copies: what ``split_buffers`` returned.
        module: the average. Buffers that it lacks come to its device, or to that of the model where it is on several.

    Raises:
        TypeError: a buffer has no values to copy yet; the message names it.
    """
    if copies is None:
        return lambda: None
    actions: list[Callable[[], object]] = [_make_replacement(*replaced, module) for replaced in copies.replaced]
    if copies.averages:
        averages, news = NamedList(copies.averages, copies.spell), NamedList(copies.news, copies.spell)
        actions.insert(0, check_plan(Lerp(averages, news, 1.0), inplace=True))

    def commit() -> None:
        for act in actions:
            act()

    return commit


def _make_replacement(name: str, average: Module, model: Module, module: Module) -> Callable[[], None]:
    """Return the function that replaces a buffer of the average by a copy of the model's."""
    old, new = average._buffers.get(name), model._buffers[name]
    devices = {tensor.device for tensor in module.parameters()} if old is None else {old.device}
    device = devices.pop() if len(devices) == 1 else None
    if new is not None and is_lazy(new):
        raise TypeError(f"the model's buffer {name} is uninitialised (lazy); run one forward pass first")
    if new is not None and new.is_meta and device is not None and device.type != "meta":
        raise TypeError(f"the model's buffer {name} is on the meta device and has no values to copy")
    with torch.inference_mode(False), torch.no_grad():
        buffer = None if new is None else new.detach().clone().to(device)

    def replace_() -> None:
        vars(average).pop(name, None)  # it may have been a plain attribute
        average.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)

    return replace_


def _can_copy_all(pairs: Pairs) -> bool:
    """Tell at one look whether every buffer can be copied into that of the average; False also for rare kinds."""
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
