"""Writes averages into a model by name, for good or for a while, and drops what was derived from its weights."""

from __future__ import annotations

__all__: list[str] = []

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from functavg.functional import lerp
from functavg.nn import pairing
from functavg.nn.modes import unmerged
from functavg.nn.resisting import find_device
from functavg.trees import some

M = TypeVar("M", bound=Module)

_PARAMETRIZE = "torch.nn.utils.parametrize"


def _find_targets(model: Module, values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model that have the names of the values, and the values; tied ones once.

    Raises:
        ValueError: the model has no such tensors; the message names them.
    """
    known = _name_tensors(model, values)
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(
            f"the model has no tensors named {some(unknown)}; it has {some(list(known))}. "
            "Names are those of named_parameters and named_buffers, without those of wrappers"
        )
    distinct = {id(known[name]): name for name in reversed(list(values))}
    return {name: known[name] for name in distinct.values()}, {name: values[name] for name in distinct.values()}


def _name_tensors(model: Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a model by name, and by the longer names that wrappers give them if ``names`` has any."""
    known = dict(pairing.named_tensors(model))
    if all(name in known for name in names):
        return known
    spelled = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {name: tensor for named in spelled for name, tensor in named} | known


def write(model: Module, values: Mapping[str, Any]) -> None:
    """Copy values into the tensors of a model in place; FSDP2 modules are resharded before and after.

    Raises:
        TypeError, ValueError: a value does not fit; nothing was written.
    """
    pairing.reshard(model)
    tensors, news = _find_targets(model, values)
    lerp(tensors, news, 1.0, inplace=True)
    drop_derived_values()
    pairing.reshard(model)


@contextmanager
def exchange(
    model: M, read: Callable[[], Mapping[str, Any]], backup_device: Any = None, source: Iterable[Module] = ()
) -> Iterator[M]:
    """Write values into the tensors of a model inside a ``with`` block, and restore their old values after it.

    Args:
        model: the model.
        read: returns the values by name.
        backup_device: where to keep the old values. Default: where each is.
        source: the modules that hold the values. Default: none.

    Yields:
        The model.

    Raises:
        TypeError, ValueError: a value does not fit, or the backup would hold no values; nothing was written. At exit:
            tensors of the model were replaced by others that cannot take the old values; the message names them, and
            all others were restored. An error of the block stays that error, with a note.
        RuntimeError: the device is not available.
    """
    pairing.check_module(model, "swapped(model, average)")
    device = find_device(backup_device)
    with unmerged(model, *source):
        values = read()
        pairing.reshard(model)
        tensors, _ = _find_targets(model, values)
        if device is not None and device.type == "meta" and not all(tensor.is_meta for tensor in tensors.values()):
            raise ValueError("backup_device='meta' keeps no values, and the training weights would be lost; pass 'cpu'")
        with torch.inference_mode(False), torch.no_grad():
            before = {
                name: tensor.detach().clone() if device is None else tensor.detach().to(device, copy=True)
                for name, tensor in tensors.items()
            }
        write(model, values)
    try:
        yield model
    except BaseException as error:
        with unmerged(model):
            problem = _restore_(model, before)
        if problem is not None and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(problem)
        raise
    with unmerged(model):
        problem = _restore_(model, before)
    if problem is not None:
        raise ValueError(problem)


def _restore_(model: Module, before: Mapping[str, Tensor]) -> str | None:
    """Restore the old values of all tensors that can take them; return a message that names the others."""
    pairing.reshard(model)
    there = _name_tensors(model, before)
    values = {name: value for name, value in before.items() if name in there}
    lost = [name for name, value in values.items() if there[name].is_meta and not value.is_meta]
    problems = [f"{name} (it is on the meta device)" for name in lost]
    values = {name: value for name, value in values.items() if name not in lost}
    try:
        write(model, values)
    except (TypeError, ValueError):  # nothing was written, so those that fit are written one by one
        for name, value in values.items():
            try:
                write(model, {name: value})
            except (TypeError, ValueError) as error:
                problems.append(f"{name} ({error})")
    if not problems:
        return None
    return (
        f"swapped could not give these tensors their training weights back: {some(problems)}. They were "
        "replaced or moved inside the block; all others are restored"
    )


def drop_derived_values() -> None:
    """Drop cached values that were derived from weights, so that the next forward of any module computes them anew.

    These are the casts that ``torch.autocast`` keeps until the outermost of its blocks ends, and the parametrized
    tensors that ``torch.nn.utils.parametrize.cached()`` keeps, under keys that do not tell of which module they are.
    Neither notices that a weight was written to in place. Outside such blocks nothing is cached, and this takes less
    than a microsecond.
    """
    torch.clear_autocast_cache()
    cache = getattr(sys.modules.get(_PARAMETRIZE), "_cache", None)
    if cache:
        cache.clear()
