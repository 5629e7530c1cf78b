"""The only arithmetic, dispatched by the kind of the leaves. No array library is loaded that the user did not load.

A kernel is a module with these functions over lists of leaves of its kind. ``name_of(index)`` is the path of a leaf,
for errors.

* ``refusal(leaf)``: why a leaf cannot be averaged, or None;
* ``copy(leaf, dtype, device)``: a new array to start an average from;
* ``cast(leaf, like)``: a leaf with the dtype and device of another;
* ``identities(leaves)``: a key for each leaf, equal for leaves that are one array in memory;
* ``prepare(averages, news, name_of, roundings=None, weights=None, inplace=False, apart=True)``: checks that each of the
  lists ``averages`` can take a step of its weight towards ``news``, and returns them in groups. ``roundings`` are
  tensors that take the first average in their own dtype, after a step in place. Averages that are ``apart`` are
  distinct arrays, and are checked to be writable where the step is ``inplace``; of others it returns None if it
  cannot tell at one look that they, and what is read while they are written to, lie apart in memory;
* ``lerp(groups, weights, inplace)``: the step ``a + w (x - a)`` of each of the averages;
* ``apply(groups, count, fn, grouped, inplace, name_of)``: a step by a user's function;
* ``is_finite(leaves)``: whether they hold no NaN and no infinity, as a bool or a 0-d array.
"""

from __future__ import annotations

__all__: list[str] = []

import importlib
import sys
from typing import Any

import numpy as np

# Plain dicts, since torch.compile warns of functools.cache.
_names: dict[type, str | None] = {}
_loaded: dict[str | None, Any] = {}


def kernel_name(leaf: Any) -> str | None:
    """Return the name of the kernel for a leaf, None if it is not an array."""
    return kernel_name_of(type(leaf))


def kernel_name_of(kind: type) -> str | None:
    """Return the name of the kernel for leaves of this class, None if they are not arrays."""
    if kind not in _names:
        _names[kind] = _find_kernel(kind)
    return _names[kind]


def load(name: str | None) -> Any:
    """Return the kernel of this name."""
    if name not in _loaded:
        _loaded[name] = importlib.import_module(f"functavg.kernels.{name}")
    return _loaded[name]


def takes_scalar(leaf: Any, value: Any) -> bool:
    """Tell whether a leaf can be computed with a 0-d array: of its own library, with numpy of any."""
    own = kernel_name(leaf)
    if own == "array_api":
        return kernel_name(value) == own and leaf.__array_namespace__() is value.__array_namespace__()
    if getattr(value, "is_meta", False) and not getattr(leaf, "is_meta", False):
        return False
    return own != "torch" or kernel_name(value) == own


def _find_kernel(kind: type) -> str | None:
    if issubclass(kind, (np.ndarray, np.generic, bool, int, float, complex)):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return "torch"
    return "array_api" if hasattr(kind, "__array_namespace__") else None
