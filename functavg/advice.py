"""Says how to make a tree of arrays out of what is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

_PARAMETERS = "dict(model.named_parameters())"


def advise(value: Any) -> str:
    """Return the end of a message that refuses a value as a tree or leaf; "" where there is nothing to say of it.

    Known are what is often passed in place of a tree: modules, TensorDicts, iterators such as ``model.parameters()``,
    methods that were not called, and mappings and dataclasses that are no containers to optree. Arrays are none of it.
    """
    kind = type(value)
    if hasattr(kind, "__dlpack__") or isinstance(value, (str, bytes, type)):
        return ""
    if is_tensordict(value):
        return "; pass its .to_dict()"
    if hasattr(kind, "named_parameters"):
        return "; pass dict(module.named_parameters()), or use functavg.AveragedModel"
    if isinstance(value, (FunctionType, MethodType, BuiltinMethodType)):
        return f"; pass a tree of arrays, such as {_PARAMETERS}, not the function that returns one"
    if isinstance(value, Mapping):
        return "; pass it as dict(...)"
    if isinstance(value, Iterable):
        return f"; pass a container whose entries have names or an order, such as {_PARAMETERS}, a dict or a list"
    if hasattr(value, "param_groups"):
        return f"; pass the parameters, such as {_PARAMETERS}"
    if is_dataclass(value) and not hasattr(kind, "update"):  # that would be a rule
        return "; pass its vars(...), or register the class with optree or jax.tree_util"
    return ""


def is_tensordict(value: object) -> bool:
    """Tell whether a value is a TensorDict or the like: a mapping that says so and does not iterate as one."""
    return hasattr(type(value), "to_dict") and hasattr(type(value), "batch_size")
