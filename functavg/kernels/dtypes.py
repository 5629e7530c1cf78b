"""Dtypes by name, one set of rules for every array library."""

from __future__ import annotations

__all__: list[str] = []

import re
from types import ModuleType
from typing import Any

import numpy as np

BOOL, INTEGER, REAL, COMPLEX = range(4)

_KINDS = (
    (re.compile(r"bool"), BOOL),
    (re.compile(r"u?int\d+"), INTEGER),
    (re.compile(r"b?float\d+\w*"), REAL),
    (re.compile(r"complex\d+"), COMPLEX),
)
# No library computes with complex32.
_COMPLEX_OF = {
    "float16": "complex64",
    "bfloat16": "complex64",
    "float32": "complex64",
    "float64": "complex128",
    "float128": "complex256",
}
_REAL_OF = {"complex32": "float16", "complex64": "float32", "complex128": "float64", "complex256": "float128"}


def name_of(dtype: Any) -> str:
    """Return the name of a dtype of any array library: ``float32``."""
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    return str(np.dtype(dtype).name)


def named(library: ModuleType, name: str) -> Any:
    """Return the dtype of this name in an array library.

    Raises:
        ValueError: the library has none.
    """
    try:
        return np.dtype(name) if library is np else getattr(library, name)  # numpy's may come from ml_dtypes
    except (TypeError, AttributeError):
        raise ValueError(f"dtype must be one that {library.__name__} has, got {name}") from None


def kind_of(name: str) -> int | None:
    """Return BOOL, INTEGER, REAL or COMPLEX, which are ordered, and None for what cannot be averaged."""
    if name.endswith("_x2"):  # several values packed into one element
        return None
    return next((kind for pattern, kind in _KINDS if pattern.fullmatch(name)), None)


def bits_of(name: str) -> int:
    """Return the number of bits of one real or complex element."""
    return int(re.sub(r"^\D+(\d+).*$", r"\1", name))


def check_dtype(dtype: Any) -> str | None:
    """Return the name of the dtype asked for an average, None if none was asked for.

    Raises:
        TypeError: it is not a dtype.
        ValueError: an average cannot be held in it.
    """
    if dtype is None:
        return None
    try:
        name = dtype if isinstance(dtype, str) and kind_of(dtype) is not None else name_of(dtype)
    except TypeError:
        raise TypeError(
            f"dtype must be a dtype of the params' library or its name, got {dtype!r} of {type(dtype).__name__}"
        ) from None
    if kind_of(name) not in (REAL, COMPLEX) or bits_of(name) < 16:
        raise ValueError(f"dtype must be real or complex floating of at least 16 bits, got {name}")
    return name


def held_in(name: str, wanted: str | None) -> str:
    """Return the dtype that an average of leaves of dtype ``name`` is held in.

    Low precision is widened unless ``wanted`` says otherwise: an average in bfloat16 stops moving once its steps
    are smaller than half a unit in the last place. Integers and bools keep their dtype.
    """
    kind = kind_of(name)
    if kind == REAL:
        if wanted is not None:
            return _REAL_OF.get(wanted, wanted)
        return "float32" if bits_of(name) < 32 else name
    if kind == COMPLEX:
        if wanted is not None:
            return _COMPLEX_OF.get(wanted, wanted)
        return "complex64" if bits_of(name) < 64 else name
    return name
