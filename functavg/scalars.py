"""Maths on counts and weights, the same for host numbers, 0-d arrays and traced values: a formula is written once.

Host numbers are float64; a 0-d array is computed with on its device, in the widest enabled float.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functavg.state import Count, Weight


def is_host(value: Any) -> bool:
    """Tell whether a scalar is a plain number, on which Python may branch without reading a device."""
    return isinstance(value, (int, float))


def is_compiling() -> bool:
    """Tell whether ``torch.compile`` traces."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


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


def sin(x: Weight) -> Weight:
    """Return the sine."""
    return math.sin(x) if is_host(x) else _library(x).sin(x)


def minimum(x: Weight, y: Weight) -> Weight:
    """Return the smaller of two."""
    if is_host(x) and is_host(y):
        return min(x, y)
    return _library(x, y).minimum(*_pair(x, y))


def maximum(x: Weight, y: Weight) -> Weight:
    """Return the larger of two."""
    if is_host(x) and is_host(y):
        return max(x, y)
    return _library(x, y).maximum(*_pair(x, y))


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return ``x`` where the condition holds, else ``y``."""
    if is_host(condition):
        return x if condition else y
    library = _library(condition)
    if is_host(x) and is_host(y):
        kind = _integer(condition) if isinstance(x, int) and isinstance(y, int) else _widest(condition)
        return library.where(condition, full(condition, x, kind), full(condition, y, kind))
    return library.where(condition, *_pair(x, y))


def one_minus_power(base: Weight, exponent: Weight) -> Weight:
    """Return 1 - base^exponent for a base in [0, 1], exact at the exponent 1 on the host, elsewhere as expm1."""
    if is_host(base) and is_host(exponent):
        return 1.0 - base**exponent
    if not is_host(base) and is_host(exponent) and exponent == 1:
        return 1.0 - base
    return -expm1(exponent * log(base))


def compound(rate: Weight, exponent: Weight) -> Weight:
    """Return 1 - (1 - rate)^exponent for a rate in [0, 1], without forming 1 - rate; exact at the exponent 1."""
    if is_host(exponent) and exponent == 1:
        return rate
    return -expm1(exponent * log1p(-rate))


def full(like: Any, value: Any, dtype: Any) -> Any:
    """Return a 0-d array of a number, in the library and on the device of another array."""
    library = _library(like)
    if _is_torch(library):
        return library.full((), value, dtype=dtype, device=like.device)
    return library.asarray(value, dtype=dtype)


def _library(*values: Any) -> Any:
    array = next(value for value in values if not is_host(value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    return array.__array_namespace__()


def _is_torch(library: Any) -> bool:
    return library is sys.modules.get("torch")


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Return two numbers, of which one may be on the host, as the arguments of a function of two arrays.

    Torch takes no host numbers there. JAX does, and is given them as they are: an array would end the weak type that
    the other has if it was a host number before, and so trace anew.
    """
    if _is_torch(_library(x, y)):
        return (full(y, x, y.dtype) if is_host(x) else x), (full(x, y, x.dtype) if is_host(y) else y)
    return x, y


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
