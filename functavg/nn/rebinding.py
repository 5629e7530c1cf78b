"""Binds what stands in the place of a ``forward`` to the copy of a module: a deep copy keeps functions as they are."""

from __future__ import annotations

__all__: list[str] = []

import functools
import warnings
from types import FunctionType, MethodType
from typing import Any

from torch.nn import Module

from functavg.trees import some

_DEPTH = 8
"""How many functions within functions are looked at."""


def rebind_forwards_(module: Module, model: Module) -> None:
    """Let a copy of a model compute with its own tensors, where a ``forward`` of the model was replaced.

    A bound method that ``torch.compile`` has compiled is bound to the copy, uncompiled. Of other functions that compute
    with the model, such as a decorated method or a closure over it, nothing can be made: they are warned of.

    Args:
        module: the copy.
        model: the model.
    """
    originals = {id(part) for part in model.modules()}
    bound = []
    for name, part in module.named_modules():
        forward = vars(part).get("forward")
        if id(part) in originals or not _reaches(forward, originals):
            continue
        method = _uncompile(forward)
        if isinstance(method, MethodType) and method.__func__ is getattr(type(part), "forward", None):
            del part.forward  # that of its class is bound to itself
        else:
            bound.append(f"{name}.forward" if name else "forward")
    if bound:
        warnings.warn(
            f"{some(bound)} of the model was replaced by a function that computes with the model, and does so in the "
            "average. Replace it after the average is made, or evaluate inside swapped(model, averaged)",
            stacklevel=3,
        )


def _uncompile(function: Any) -> Any:
    """Return what ``torch.compile`` has compiled."""
    inner = getattr(function, "_torchdynamo_orig_callable", None)
    if isinstance(inner, FunctionType) and str(inner.__globals__.get("__name__")).startswith("torch._dynamo."):
        return getattr(inner, "__wrapped__", None)  # methods of torch's own modules are wrapped once more
    return inner


def _reaches(value: Any, modules: set[int], depth: int = _DEPTH) -> bool:
    """Tell whether a function computes with one of these modules, as far as closures and decorators show it."""
    if isinstance(value, Module):
        return id(value) in modules
    if depth == 0:
        return False
    found: list[Any] = []
    if isinstance(value, MethodType):
        found = [value.__self__]
    elif isinstance(value, functools.partial):
        found = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        found = [*vars(value).values(), *(value.__defaults__ or ()), *map(_open, value.__closure__ or ())]
    return any(_reaches(it, modules, depth - 1) for it in found)


def _open(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
