"""Scalar functions with one meaning for host numbers, 0-d arrays and traced values, so that a formula is written once.

Host numbers are float64; a 0-d array is computed with on its device, in the widest enabled float.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from functavg.state import Count, Weight


def is_host(value: Any) -> bool:
    """Tell whether a scalar is a plain number, on which Python may branch without reading a device."""
    return isinstance(value, (int, float))


def is_compiling() -> bool:
    """Tell whether ``torch.compile`` traces."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def objects(arrays: Sequence[Any]) -> Sequence[Hashable]:
    """Return what is equal for the same objects only; a compiler would take an ``id`` for a constant."""
    return arrays if is_compiling() else list(map(id, arrays))


def are_shared(arrays: Sequence[Any]) -> bool:
    """Tell whether one array stands at several places."""
    return len(set(objects(arrays))) != len(arrays)


def lift(count: Count) -> Weight:
    """Return a count as a number that formulas can compute with.

    While ``torch.compile`` traces, a host count becomes a 0-d tensor: a formula over a symbolic ``int`` would be
    compiled anew for every count.
    """
    if not is_host(count):
        return _float(count)
    if is_compiling():
        return sys.modules["torch"].full((), count, dtype=sys.modules["torch"].float64)
    return count


def check_count(value: Any, name: str, least: int) -> Count:
    """Return ``value`` if it is a count of at least ``least``; a numpy integer becomes a host ``int``.

    Raises:
        TypeError: it is neither an integer nor a 0-d integer array.
        ValueError: it is too small.
    """
    if isinstance(value, (np.integer, np.ndarray)) and np.ndim(value) == 0 and value.dtype.kind in "iu":
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        return value
    if _is_integer_array(value):
        return value
    raise TypeError(f"{name} must be an integer or a 0-d integer array, got {value!r} of {type(value).__name__}")


def check_integer(value: Any, name: str, least: int) -> int:
    """Return ``value`` as a host ``int`` if it is one of at least ``least``; arguments of rules are never arrays.

    Raises:
        TypeError: it is no integer.
        ValueError: it is too small.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r} of {type(value).__name__}")
    return int(check_count(value, name, least))


def check_weight(value: Any, name: str = "weight") -> Weight:
    """Return ``value`` if it is a finite number, or a 0-d array (whose value stays where it is).

    Raises:
        TypeError: it is neither, or complex.
        ValueError: it is a host number that is NaN or infinite.
    """
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biufV":  # V: bfloat16
        value = float(value)
    if is_host(value):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}")
        return value
    on_device = getattr(value, "ndim", None) == 0 and not isinstance(value, (np.ndarray, np.generic))
    if on_device and "complex" not in str(value.dtype):
        return value
    raise TypeError(f"{name} must be a real number or a 0-d array, got {value!r} of {type(value).__name__}")


def beside(count: Count, other: Count) -> Count:
    """Return a count as what another one is: a host ``int`` becomes a 0-d array on the device of a 0-d array."""
    return count if is_host(other) or not is_host(count) else _full(other, count, other.dtype)


def written(old: Any, new: Any) -> Any:
    """Return ``new``, written into ``old`` where both are counts in 0-d torch tensors of one device.

    A CUDA graph that was captured goes on from there when it is replayed. To another device it would be a copy that
    the host waits for.
    """
    torch = sys.modules.get("torch")
    if new is old or torch is None or not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return new
    if old.device != new.device or not _is_integer_array(old):
        return new
    with torch.inference_mode(not is_compiling()):  # a count made in inference mode can be written to nowhere else
        old.copy_(new)
    return old


def exp(x: Weight) -> Weight:
    """Return e^x."""
    return math.exp(x) if is_host(x) else _library(x).exp(x)


def expm1(x: Weight) -> Weight:
    """Return e^x - 1 without cancellation."""
    return math.expm1(x) if is_host(x) else _library(x).expm1(x)


def log(x: Weight) -> Weight:
    """Return the natural logarithm; -inf at 0."""
    return (math.log(x) if x else -math.inf) if is_host(x) else _library(x).log(x)


def log1p(x: Weight) -> Weight:
    """Return log(1 + x) without cancellation; -inf at -1."""
    return (math.log1p(x) if x != -1 else -math.inf) if is_host(x) else _library(x).log1p(x)


def cos(x: Weight) -> Weight:
    """Return the cosine."""
    return math.cos(x) if is_host(x) else _library(x).cos(x)


def sin(x: Weight) -> Weight:
    """Return the sine."""
    return math.sin(x) if is_host(x) else _library(x).sin(x)


def minimum(x: Weight, y: Weight) -> Weight:
    """Return the smaller of two."""
    if is_host(x) and is_host(y):
        return min(x, y)
    return _library(x, y).minimum(*_together(x, y))


def maximum(x: Weight, y: Weight) -> Weight:
    """Return the larger of two."""
    if is_host(x) and is_host(y):
        return max(x, y)
    return _library(x, y).maximum(*_together(x, y))


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return ``x`` where the condition holds, else ``y``."""
    if is_host(condition):
        return x if condition else y
    library = _library(condition)
    if is_host(x) and is_host(y):
        kind = _integer(condition) if isinstance(x, int) and isinstance(y, int) else _widest(condition)
        return library.where(condition, _full(condition, x, kind), _full(condition, y, kind))
    return library.where(condition, *_together(x, y))


def one_minus_power(base: Weight, exponent: Weight) -> Weight:
    """Return 1 - base^exponent for a base in [0, 1], exact at the exponent 1 on the host, elsewhere as expm1."""
    if is_host(base) and is_host(exponent):
        return 1.0 - base**exponent
    if not is_host(base) and is_host(exponent) and exponent == 1:
        return 1.0 - base
    return -expm1(exponent * log(base))


def compounded(rate: Weight, exponent: Weight) -> Weight:
    """Return 1 - (1 - rate)^exponent for a rate in [0, 1], without forming 1 - rate; exact at the exponent 1."""
    if is_host(exponent) and exponent == 1:
        return rate
    return -expm1(exponent * log1p(-rate))


def _library(*values: Any) -> Any:
    array = next(value for value in values if not is_host(value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    return array.__array_namespace__()


def _is_torch(library: Any) -> bool:
    return library is sys.modules.get("torch")


def _together(x: Any, y: Any) -> tuple[Any, Any]:
    """Return two, of which one may be a host number, as what a function of two arrays takes.

    Only torch takes no numbers. To JAX a number says nothing of its dtype, and so it ends no weak type of the other,
    such as a count that was a host number has: that would trace anew.
    """
    if _is_torch(_library(x, y)):
        return (_full(y, x, y.dtype) if is_host(x) else x), (_full(x, y, x.dtype) if is_host(y) else y)
    return x, y


def _full(like: Any, value: Any, dtype: Any) -> Any:
    library = _library(like)
    if _is_torch(library):
        return library.full((), value, dtype=dtype, device=like.device)
    return library.asarray(value, dtype=dtype)


def _float(array: Any) -> Any:
    if _is_torch(_library(array)):
        return array.to(_widest(array))
    return _library(array).astype(array, _widest(array))


def _widest(like: Any) -> Any:
    library = _library(like)
    if _is_torch(library):
        return library.float32 if like.device.type == "mps" else library.float64
    return library.__array_namespace_info__().default_dtypes()["real floating"]


def _integer(like: Any) -> Any:
    library = _library(like)
    if _is_torch(library):
        return library.int64
    return library.__array_namespace_info__().default_dtypes()["integral"]


def _is_integer_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = value.dtype
        return value.ndim == 0 and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if isinstance(value, np.ndarray) or not hasattr(value, "__array_namespace__"):
        return False
    return value.ndim == 0 and bool(value.__array_namespace__().isdtype(value.dtype, "integral"))
