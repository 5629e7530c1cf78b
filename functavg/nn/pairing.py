"""Pairs the tensors of an average with those of a model, by name, through wrappers at any depth."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Module

from functavg.kernels.torch.groups import PLAIN
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


def unwrap(module: Module) -> Module:
    """Return the model inside all wrappers, which are known by their class and never by an attribute's name.

    Raises:
        TypeError: it is a FullyShardedDataParallel, whose parameters are flat shards.
    """
    while True:
        attribute = _wrapped_attribute(type(module))
        if attribute is None:
            return module
        module = getattr(module, attribute)


def _wrapped_attribute(kind: type) -> str | None:
    """Return the attribute in which modules of this class hold the model that they wrap, None where they wrap none."""
    for named, attribute in _WRAPPERS.items():
        if _is_subclass(kind, named):
            return attribute
    if _is_subclass(kind, _FSDP1):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) holds its parameters as flat shards, which cannot be averaged by "
            "name. Use torch.distributed.fsdp.fully_shard (FSDP2), or average inside summon_full_params"
        )
    return None


def _is_special(kind: type) -> bool:
    """Tell whether modules of this class have to be unwrapped or resharded before their parameters are read."""
    return _is_subclass(kind, _FSDP2) or _wrapped_attribute(kind) is not None


def reshard(model: Module) -> None:
    """Reshard every FSDP2 module of a model, so that its parameters are the sharded ones that are trained."""
    if sys.modules.get(_FSDP2[0]) is None:
        return
    for module in model.modules():
        if _is_instance(module, _FSDP2):
            module.reshard()  # type: ignore[operator]


@dataclass
class Pairs:
    """What an average and a model share: parameters by name, and buffers by name with the modules that have them."""

    averages: dict[Any, Tensor] = field(default_factory=dict)
    news: dict[Any, Tensor] = field(default_factory=dict)
    buffers: list[tuple[str, Module, Module]] = field(default_factory=list)


@dataclass
class Tensors:
    """What one of two models holds that are walked in step."""

    parameters: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)


def pairs(average: Module, model: Module) -> Pairs:
    """Return the parameters and buffers of an average with those of a model.

    The two are walked together, name by name; nothing is remembered from one call to the next, so no parameter that
    was assigned anew can be missed.

    Raises:
        TypeError: the model is an FSDP1 model.
        ValueError: parameters are missing or unexpected; the message names them.
    """
    walk = _Walk()
    walk.visit(unwrap(average), unwrap(model), "")
    if walk.missing or walk.unexpected:
        raise ValueError(
            f"the model does not have the parameters of the average: missing {some(walk.missing)}; "
            f"unexpected {some(walk.unexpected)}. Update from the model that the average was made of, or make a new "
            "AveragedModel"
        )
    return walk.found


def in_step(average: Module, model: Module) -> tuple[Tensors, Tensors] | None:
    """Return the parameters and buffers of both, in one order.

    This is what ``pairs`` finds, many times faster, for two models of plain tensors whose modules, parameters and
    buffers have the same names in the same order and no wrappers; None for all others, and where a buffer of the
    average is a parameter too. (An update that fails in step is planned once more by name. A plan for shards may talk
    to other ranks, which would not be there to answer.)
    """
    try:
        found = _found_in_step(average, unwrap(model))
    except (KeyError, TypeError):  # scripted modules, and others that hold their tensors in their own way; FSDP1
        return None
    return found if found is not None and _are_counterparts(*found) else None


def _found_in_step(average: Module, model: Module) -> tuple[Tensors, Tensors] | None:
    mine, theirs = Tensors(), Tensors()
    modules, others = [average], [model]
    parents: set[int] = set()
    for module, other in zip(modules, others, strict=True):  # both grow on the way
        ours, its = vars(module), vars(other)  # attributes of modules take longer
        old, new = ours["_parameters"], its["_parameters"]
        if old or new:
            if [*old] != [*new]:
                return None
            mine.parameters += old.values()
            theirs.parameters += new.values()
        if its["_buffers"]:  # those that only the average has stay as they are
            old, new = ours["_buffers"], its["_buffers"]
            if [*old] != [*new]:
                return None
            mine.buffers += old.values()
            theirs.buffers += new.values()
        old, new = ours["_modules"], its["_modules"]
        if old or new:
            # A module in two places would be walked twice, and one within itself without end.
            if [*old] != [*new] or None in old.values() or None in new.values() or id(module) in parents:
                return None
            parents.add(id(module))
            modules += old.values()
            others += new.values()
    is_special = any(map(_is_special, {*map(type, modules), *map(type, others)}))
    return None if is_special else (mine, theirs)


def _are_counterparts(mine: Tensors, theirs: Tensors) -> bool:
    """Take out what is None in both; tell whether the rest are pairs of plain tensors, no buffer a parameter too."""
    for ours, its in ((mine.parameters, theirs.parameters), (mine.buffers, theirs.buffers)):
        kinds = {*map(type, ours), *map(type, its)}
        if type(None) in kinds:
            if [tensor is None for tensor in ours] != [tensor is None for tensor in its]:
                return False
            for tensors in (ours, its):
                tensors[:] = [tensor for tensor in tensors if tensor is not None]
        if not kinds - {type(None)} <= PLAIN:
            return False
    return not mine.buffers or set(map(id, mine.buffers)).isdisjoint(map(id, mine.parameters))


def tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers of a model by name, those that are shared under each of their names."""
    return _tensors(unwrap(model), "")


def as_dict(store: Any) -> dict[str, Any]:
    """Return what a module holds by name; that of a scripted module is no dict."""
    return store if isinstance(store, dict) else dict(store.items())


def is_averageable(name: str, module: Module, buffer: Tensor) -> bool:
    """Tell whether a buffer may be averaged: it is real or complex, and no vector of a spectral norm.

    The vectors of a spectral norm belong to one weight; the mean of two of them belongs to none.
    """
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return False
    if _is_instance(module, _SPECTRAL_NORM):
        return name not in ("_u", "_v")
    return not any(
        _is_instance(hook, _SPECTRAL_NORM_HOOK) and name in (f"{hook.name}_u", f"{hook.name}_v")  # type: ignore[attr-defined]
        for hook in module._forward_pre_hooks.values()
    )


class _Walk:
    """One walk through an average and a model together."""

    def __init__(self) -> None:
        self.found = Pairs()
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        self._wraps: dict[type, bool] = {}  # asked once for each class, as models have few classes and many modules

    def visit(self, average: Module, model: Module, prefix: str) -> None:
        """Pair what is in two modules and below them."""
        pair = (id(average), id(model))
        if pair in self._seen:
            return
        self._seen.add(pair)
        self._pair_parameters(as_dict(average._parameters), as_dict(model._parameters), prefix)
        for name in as_dict(model._buffers):
            self.found.buffers.append((prefix + name, average, model))
        children, others = as_dict(average._modules), as_dict(model._modules)
        for name, child in children.items():
            other = others.get(name)
            if child is not None and other is not None:
                self.visit(self._unwrap(child), self._unwrap(other), f"{prefix}{name}.")
            elif child is not None:
                self.missing += _parameter_names(child, f"{prefix}{name}.")
        for name, other in others.items():
            if other is not None and children.get(name) is None:
                self.unexpected += _parameter_names(other, f"{prefix}{name}.")

    def _pair_parameters(self, mine: dict[str, Any], theirs: dict[str, Any], prefix: str) -> None:
        for name, tensor in mine.items():
            other = theirs.get(name)
            if tensor is not None and other is not None:
                self.found.averages[prefix + name] = tensor
                self.found.news[prefix + name] = other
            elif tensor is not None:
                self.missing.append(prefix + name)
        for name, other in theirs.items():
            if other is not None and mine.get(name) is None:
                self.unexpected.append(prefix + name)

    def _unwrap(self, module: Module) -> Module:
        kind = type(module)
        if kind not in self._wraps:
            self._wraps[kind] = _wrapped_attribute(kind) is not None
        return unwrap(module) if self._wraps[kind] else module


def _tensors(module: Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            if tensor is not None:
                yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(unwrap(child), f"{prefix}{name}.")


def _parameter_names(module: Module, prefix: str) -> list[str]:
    return [prefix + name for name, _ in unwrap(module).named_parameters()]


def _is_instance(value: Any, named: tuple[str, str]) -> bool:
    return _is_subclass(type(value), named)


def _is_subclass(kind: type, named: tuple[str, str]) -> bool:
    """Tell whether a class is the named one or derived from it; a class whose module is not loaded has none."""
    source, name = named
    return source in sys.modules and issubclass(kind, getattr(sys.modules[source], name))
