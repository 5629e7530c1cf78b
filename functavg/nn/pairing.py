"""Pairs the tensors of an average with those of a model, by name, through wrappers at any depth."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Module

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
        wrappers = _known(_WRAPPERS)
        attribute = next((name for kind, name in wrappers if isinstance(module, kind)), None)
        if attribute is not None:
            module = getattr(module, attribute)
            continue
        if _is_instance(module, _FSDP1):
            raise TypeError(
                "FullyShardedDataParallel (FSDP1) holds its parameters as flat shards, which cannot be averaged by "
                "name. Use torch.distributed.fsdp.fully_shard (FSDP2), or average inside summon_full_params"
            )
        return module


def reshard(model: Module) -> None:
    """Reshard every FSDP2 module of a model, so that its parameters are the sharded ones that are trained."""
    if sys.modules.get(_FSDP2[0]) is None:
        return
    for module in model.modules():
        if _is_instance(module, _FSDP2):
            module.reshard()  # type: ignore[operator]


@dataclass
class Pairs:
    """What an average and a model have in common: parameters by name, and buffers by name and the modules they are in."""

    averages: dict[str, Tensor] = field(default_factory=dict)
    news: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, tuple[Module, Module]] = field(default_factory=dict)


def pairs(average: Module, model: Module) -> Pairs:
    """Return the parameters and buffers of an average with those of a model.

    The two are walked together, name by name; nothing is remembered from one call to the next, so no parameter that
    was assigned anew can be missed.

    Raises:
        TypeError: the model is an FSDP1 model.
        ValueError: parameters are missing or unexpected; the message names them.
    """
    found = Pairs()
    lone: tuple[list[str], list[str]] = ([], [])
    _walk(unwrap(average), unwrap(model), "", found, lone, set(), _known(_WRAPPERS))
    missing, unexpected = (some(names) for names in lone)
    if any(lone):
        raise ValueError(
            f"the model does not have the parameters of the average: missing {missing}; unexpected {unexpected}. "
            "Update from the model that the average was made of, or make a new AveragedModel"
        )
    return found


def tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers of a model by name, those that are shared under each of their names."""
    return _tensors(unwrap(model), "")


def is_averageable(name: str, module: Module, buffer: Tensor) -> bool:
    """Tell whether a buffer may be averaged: it is real or complex, and no vector of a spectral norm.

    The vectors of a spectral norm belong to one weight; the mean of two of them belongs to none.
    """
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return False
    if _is_instance(module, _SPECTRAL_NORM):
        return name not in ("_u", "_v")
    return not any(
        _is_instance(hook, _SPECTRAL_NORM_HOOK) and name in (f"{hook.name}_u", f"{hook.name}_v")
        for hook in module._forward_pre_hooks.values()
    )


def _walk(
    average: Module,
    model: Module,
    prefix: str,
    found: Pairs,
    lone: tuple[list[str], list[str]],
    seen: set[tuple[int, int]],
    wrappers: list[tuple[type, str]],
) -> None:
    if (id(average), id(model)) in seen:
        return
    seen.add((id(average), id(model)))
    theirs = model._parameters
    for name, tensor in average._parameters.items():
        other = theirs.get(name)
        if tensor is not None and other is not None:
            found.averages[prefix + name] = tensor
            found.news[prefix + name] = other
        elif tensor is not None:
            lone[0].append(prefix + name)
    for name, other in theirs.items():
        if other is not None and average._parameters.get(name) is None:
            lone[1].append(prefix + name)
    for name in model._buffers:
        found.buffers[prefix + name] = (average, model)
    for name, child in average._modules.items():
        if child is None:
            continue
        other_child = model._modules.get(name)
        if other_child is None:
            lone[0].extend(_parameter_names(child, f"{prefix}{name}."))
            continue
        if wrappers:
            child, other_child = unwrap(child), unwrap(other_child)
        _walk(child, other_child, f"{prefix}{name}.", found, lone, seen, wrappers)
    for name, other_child in model._modules.items():
        if other_child is not None and average._modules.get(name) is None:
            lone[1].extend(_parameter_names(other_child, f"{prefix}{name}."))


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


def some(names: list[str], most: int = 8) -> str:
    """Return names for a message, cut where there are many."""
    shown = ", ".join(names[:most]) or "nothing"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _known(classes: dict[tuple[str, str], str]) -> list[tuple[type, str]]:
    """Return those of the named classes whose modules are loaded: only of these can there be instances."""
    return [
        (getattr(sys.modules[source], name), attribute)
        for (source, name), attribute in classes.items()
        if source in sys.modules
    ]


def _is_instance(value: Any, named: tuple[str, str]) -> bool:
    source, name = named
    return source in sys.modules and isinstance(value, getattr(sys.modules[source], name))
