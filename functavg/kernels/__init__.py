"""The only arithmetic, dispatched by the kind of the leaves. No array library is imported that the user did not import.

A kernel is a module with these functions, all over lists of leaves of its kind:

* ``refusal(leaf)``: why a leaf cannot be averaged, or None;
* ``copied(leaf, dtype, device)``: a new array to start an average from;
* ``prepared(averages, news, where, inplace)``: checks that each of the lists ``averages`` can take ``news``, and groups
  them;
* ``identities(leaves)``: what is equal for leaves in one place of memory;
* ``lerp(groups, weights, inplace)``: the step ``a + w (x - a)`` of each of the averages;
* ``apply(groups, count, fn, grouped, inplace, where)``: a step by a user's function;
* ``cast(leaf, like)``: a leaf with the dtype and device of another;
* ``finite(leaves)``: whether they hold no NaN and no infinity, as a bool or a 0-d array.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

_names: dict[type, str | None] = {}
_loaded: dict[str | None, ModuleType] = {}


def kernel_name(leaf: Any) -> str | None:
    """Return the name of the kernel for a leaf, None where it is no array."""
    return kernel_name_of(type(leaf))


def kernel_name_of(kind: type) -> str | None:
    """Return the name of the kernel for leaves of this class, None where it is no array."""
    if kind not in _names:
        _names[kind] = _find(kind)
    return _names[kind]


def load(name: str | None) -> Any:
    """Return the kernel of this name."""
    if name not in _loaded:
        _loaded[name] = importlib.import_module(f"functavg.kernels.{name}")
    return _loaded[name]


def _find(kind: type) -> str | None:
    if issubclass(kind, (np.ndarray, np.generic, bool, int, float, complex)):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return "torch"
    return "array_api" if hasattr(kind, "__array_namespace__") else None
