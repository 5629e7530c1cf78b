"""Pairs the tensors of an average with those of a model, by name, through wrappers at any depth."""

from __future__ import annotations

__all__: list[str] = []

import functools
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import compress
from typing import Any

from torch import Tensor
from torch.nn import Module

from functavg.nn.modes import class_overrides_train, overrides_train
from functavg.trees import some

# Wrappers by module and class, so that nothing is imported to recognise them, with the attribute that holds the model.
_WRAPPERS = {
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
}
_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")
_SPECTRAL_NORM = ("torch.nn.utils.parametrizations", "_SpectralNorm")
_SPECTRAL_NORM_HOOK = ("torch.nn.utils.spectral_norm", "SpectralNorm")

ABSENT = object()
"""Stands for a buffer that is not registered; one registered as None is None."""


def check_module(value: Any, call: str) -> None:
    """Raise a TypeError unless ``value``, the model in ``call``, is a module."""
    if not isinstance(value, Module):
        raise TypeError(f"{call}: model must be a torch.nn.Module, got {type(value).__name__}")


def unwrap(module: Module, resharding: bool = False) -> Module:
    """Return the model inside all wrappers, resharded on every level where ``resharding``.

    Wrappers are known by their class, never by the name of an attribute.

    Raises:
        TypeError: it is a FullyShardedDataParallel, whose parameters are flat shards.
    """
    while True:
        if resharding and is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]
        kind: Any = type(module)
        attribute = _wrapped_attribute(kind)
        if attribute is None:
            return module
        module = getattr(module, attribute)


_open = functools.partial(unwrap, resharding=True)


@functools.lru_cache(1024)
def _wrapped_attribute(kind: type) -> str | None:
    """Return the attribute in which wrappers of this class hold their model, None if the class is not a wrapper."""
    for named, attribute in _WRAPPERS.items():
        if _is_subclass(kind, named):
            return attribute
    if _is_subclass(kind, _FSDP1):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) holds its parameters as flat shards, which cannot be averaged by "
            "name. Use torch.distributed.fsdp.fully_shard (FSDP2), or average inside summon_full_params"
        )
    return None


@functools.lru_cache(1024)
def _is_ordinary(kind: Any) -> bool:
    """Tell whether the tensors of modules of this class can be read as they are: none is wrapped, sharded or merged."""
    return not (_is_subclass(kind, _FSDP2) or _wrapped_attribute(kind) is not None or class_overrides_train(kind))


def reshard(model: Module) -> None:
    """Reshard every FSDP2 module of a model, so that its parameters are the sharded ones that are trained."""
    if sys.modules.get(_FSDP2[0]) is None:
        return
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def is_fully_sharded(module: Module) -> bool:
    """Tell whether FSDP2 has sharded a module."""
    return _is_instance(module, _FSDP2)


class Pairs:
    """The tensors of an average and of a model in columns; their names are spelled only on request.

    Attributes:
        averages: the parameters of the average.
        news: those of the model, in the same order.
        buffers: for each buffer of the model that of the average, or ``ABSENT``; None is a buffer registered as None.
        new_buffers: those of the model, in the same order.
        may_be_merged: whether modules in eval mode may have merged weights (see ``modes.unmerged``).
    """

    may_be_merged = False
    _kept: list[int] | None = None  # which parameters are paired; None: all
    _kept_buffers: list[int] | None = None
    _averaged_buffers: Sequence[int] = ()

    def __init__(self) -> None:
        self.averages: list[Any] = []
        self.news: list[Any] = []
        self.buffers: list[Any] = []
        self.new_buffers: list[Any] = []
        self._parameter_spans: list[_Span] = []
        self._buffer_spans: list[_Span] = []
        self._unpaired: list[tuple[_Node | None, Any, Any]] = []

    def names(self) -> list[str]:
        """Return the names of ``averages``, as ``named_parameters`` and ``named_buffers`` spell them."""
        names = [name for name, _, _ in _spell(self._parameter_spans)]
        if self._kept is not None:
            names = [names[index] for index in self._kept]
        if self._averaged_buffers:
            buffers = self.buffer_owners()
            names += [buffers[index][0] for index in self._averaged_buffers]
        return names

    def buffer_owners(self) -> list[tuple[str, Module, Module]]:
        """Return the name of each buffer, and the two modules that hold it."""
        owners = _spell(self._buffer_spans)
        return owners if self._kept_buffers is None else [owners[index] for index in self._kept_buffers]

    def add_buffers(self, indices: list[int]) -> None:
        """Add these buffers to the tensors that are averaged, after the parameters."""
        self._averaged_buffers = indices
        self.averages += [self.buffers[index] for index in indices]
        self.news += [self.new_buffers[index] for index in indices]

    def leave_out(self, names: Collection[str]) -> list[tuple[Any, Any, str]]:
        """Leave out tensors by name; return those that are not the same object in the average and the model.

        Returns:
            For each, the store of the average that holds it, that of the model, and its name in both.
        """
        parameters, buffers = _spell(self._parameter_spans), _spell(self._buffer_spans)
        kept = list(range(len(parameters))) if self._kept is None else self._kept
        stay = [parameters[index][0] not in names for index in kept]
        self._kept = list(compress(kept, stay))
        self.averages, self.news = list(compress(self.averages, stay)), list(compress(self.news, stay))
        stay = [name not in names for name, _, _ in buffers]
        self._kept_buffers = list(compress(range(len(buffers)), stay))
        self.buffers, self.new_buffers = list(compress(self.buffers, stay)), list(compress(self.new_buffers, stay))
        stores: list[tuple[str, Any, Any]] = [
            (name, module._parameters, other._parameters) for name, module, other in parameters
        ]
        stores += [(name, module._buffers, other._buffers) for name, module, other in buffers]
        found = [(mine, theirs, name.rpartition(".")[2]) for name, mine, theirs in stores if name in names]
        return [(mine, theirs, key) for mine, theirs, key in found if mine.get(key) is not theirs.get(key)]

    def drop_none(self, called: str, advice: str) -> None:
        """Leave out parameters that are None in both, and check that no other is missing.

        Raises:
            ValueError: a parameter is missing in one of the two; the message names all of them.
        """
        if type(None) not in {*map(type, self.averages), *map(type, self.news)} and not self._unpaired:
            return
        missing: list[int] = []
        unexpected: list[int] = []
        kept = []
        for index, (old, new) in enumerate(zip(self.averages, self.news, strict=True)):
            if old is not None and new is not None:
                kept.append(index)
            elif old is not new:
                (missing if new is None else unexpected).append(index)
        spelled = [name for name, _, _ in _spell(self._parameter_spans)] if missing or unexpected else []
        lacks, has = [spelled[index] for index in missing], [spelled[index] for index in unexpected]
        for node, module, other in self._unpaired:
            lacks += _parameter_names(module, _prefix(node))
            has += _parameter_names(other, _prefix(node))
        if lacks or has:
            raise ValueError(
                f"the model does not have the parameters of the {called}: missing {some(lacks)}; "
                f"unexpected {some(has)}. {advice}"
            )
        self._kept = kept
        self.averages = [self.averages[index] for index in kept]
        self.news = [self.news[index] for index in kept]


_Node = tuple[Any, str]  # the node of the parent, None for the whole model, and the name in it
_Span = tuple[_Node | None, list[str], Module, Module]  # names of consecutive tensors, with the modules that hold them


def pair(
    average: Module,
    model: Module,
    *,
    called: str = "average",
    advice: str = "Update from the model that the average was made of, or make a new AveragedModel",
) -> Pairs:
    """Return the parameters and buffers of an average with those of a model, in the order of ``named_parameters``.

    The two are walked together, module by module. Nothing is remembered from one call to the next, so no parameter that
    was assigned anew can be missed. FSDP2 modules are resharded on the way.

    Args:
        average: the module that is to be written to.
        model: the module that is read.
        called: what messages call the average.
        advice: what they advise.

    Raises:
        TypeError: the model is an FSDP1 model.
        ValueError: parameters are missing or unexpected; the message names them.
    """
    pairs = Pairs()
    averages, news, unpaired = pairs.averages, pairs.news, pairs._unpaired
    seen: set[tuple[int, int]] = set()
    ordinary: set[type] = set()  # classes found to be so
    waiting: list[tuple[_Node | None, Any, Any]] = [(None, average, model)]
    while waiting:
        node, module, other = waiting.pop()
        if type(module) not in ordinary or type(other) not in ordinary:
            if module is None or other is None:
                if module is not other:
                    unpaired.append((node, module, other))
                continue
            kinds: set[Any] = {type(module), type(other)}
            if all(map(_is_ordinary, kinds)):
                ordinary |= kinds
            else:
                module, other = _open(module), _open(other)
                pairs.may_be_merged |= any(overrides_train(it) and not it.training for it in (module, other))
        pair = (id(module), id(other))
        if pair in seen:
            continue
        seen.add(pair)
        mine, theirs = module._parameters, other._parameters
        if mine or theirs:
            names = [*mine.keys()]
            if names == [*theirs.keys()]:
                averages += mine.values()
                news += theirs.values()
            else:
                names += [name for name in as_dict(theirs) if name not in mine]
                averages += map(as_dict(mine).get, names)
                news += map(as_dict(theirs).get, names)
            pairs._parameter_spans.append((node, names, module, other))
        theirs = other._buffers
        if theirs:  # buffers that only the average has stay as they are
            mine, names = as_dict(module._buffers), [*theirs.keys()]
            pairs.buffers += [mine.get(name, ABSENT) for name in names]
            pairs.new_buffers += theirs.values()
            pairs._buffer_spans.append((node, names, module, other))
        mine, theirs = module._modules, other._modules
        if mine or theirs:
            names = [*mine.keys()]
            if names == [*theirs.keys()]:
                children = zip(names, mine.values(), theirs.values(), strict=True)
            else:
                names += [name for name in as_dict(theirs) if name not in mine]
                children = zip(names, map(as_dict(mine).get, names), map(as_dict(theirs).get, names), strict=True)
            waiting += [((node, name), ours, its) for name, ours, its in children][::-1]  # the first is taken first
    pairs.drop_none(called, advice)
    return pairs


def _spell(spans: list[_Span]) -> list[tuple[str, Module, Module]]:
    return [
        (prefix + name, module, other)
        for node, names, module, other in spans
        for prefix in [_prefix(node)]
        for name in names
    ]


def _prefix(node: _Node | None) -> str:
    prefix = ""
    while node is not None:
        node, name = node
        prefix = f"{name}.{prefix}"
    return prefix


def named_tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers of a model by name, those that are tied under each of their names.

    FSDP2 modules are resharded on the way.
    """
    return _walk(model, "")


def as_dict(store: Any) -> dict[str, Any]:
    """Return a store of a module as a dict, which that of a scripted module is not."""
    return store if isinstance(store, dict) else dict(store.items())


def is_averageable(name: str, module: Module, buffer: Tensor) -> bool:
    """Tell whether a buffer may be averaged: it is real or complex, persistent, and not a vector of a spectral norm.

    A buffer that no state_dict holds is no state: its average would be lost with the first checkpoint. The vectors of a
    spectral norm belong to one weight; the mean of two of them belongs to none.
    """
    if not (buffer.is_floating_point() or buffer.is_complex()) or name in module._non_persistent_buffers_set:
        return False
    return not is_spectral_vector(name, module)


def is_spectral_vector(name: str, module: Module) -> bool:
    """Tell whether a buffer is a vector of a spectral norm, which a forward in training mode writes to."""
    if _is_instance(module, _SPECTRAL_NORM):
        return name in ("_u", "_v")
    return any(
        _is_instance(hook, _SPECTRAL_NORM_HOOK) and name in (f"{hook.name}_u", f"{hook.name}_v")  # type: ignore[attr-defined]
        for hook in module._forward_pre_hooks.values()
    )


def _walk(module: Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    module = _open(module)
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            if tensor is not None:
                yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _parameter_names(module: Module | None, prefix: str) -> list[str]:
    return [] if module is None else [prefix + name for name, _ in unwrap(module).named_parameters()]


def _is_instance(value: Any, named: tuple[str, str]) -> bool:
    return _is_subclass(type(value), named)


def _is_subclass(kind: type, named: tuple[str, str]) -> bool:
    """Tell whether a class is the named one or derived from it; nothing is if its module is not loaded."""
    source, name = named
    return source in sys.modules and issubclass(kind, getattr(sys.modules[source], name))
