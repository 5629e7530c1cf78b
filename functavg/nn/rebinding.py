"""Binds functions in the place of methods to the copy of a module: a deep copy keeps functions as they are."""

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


def rebind_methods_(module: Module, model: Module) -> None:
    """Let a copy of a model compute with its own tensors, where methods of the model, as ``forward``, were replaced.

    A bound method that ``torch.compile`` has compiled is bound to the copy, uncompiled. Of other functions over the
    model, such as a decorated method or a closure, nothing can be made: they are warned of.

    Args:
        module: the copy.
        model: the model.
    """
    originals = {id(part) for part in model.modules()}
    bound = []
    for path, part in module.named_modules():
        for name, function in list(vars(part).items()) if id(part) not in originals else ():
            is_own = name == "forward" or not hasattr(Module, name)  # launchers replace `to` and the like
            if not (is_own and isinstance(function, FunctionType) and _reaches(function, originals)):
                continue
            method = _uncompile(function)
            if isinstance(method, MethodType) and method.__func__ is getattr(type(part), name, None):
                delattr(part, name)  # that of its class is bound to itself
            else:
                bound.append(f"{path}.{name}" if path else name)
    if bound:
        warnings.warn(
            f"{some(bound)} of the model stands for a function that computes with the model, and does so in the "
            "average. Set it after the average is made, or evaluate inside swapped(model, averaged)",
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
