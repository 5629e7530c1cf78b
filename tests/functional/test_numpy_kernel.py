"""Steps in blocks give what one step over the whole array gives, for any layout and dtype."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import functavg
from functavg.kernels import numpy as kernel
from tests.tables import KINDS

FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda array: array.copy("C"),
    "Fortran": lambda array: array.copy("F"),
    "strided": lambda array: np.repeat(array, 2, -1)[..., ::2] if array.ndim else array,
    "reversed": lambda array: array[::-1] if array.ndim else array,
    "other byte order": lambda array: array.astype(array.dtype.newbyteorder("S")),
}
SHAPES = [(), (3, 0), (20,), (9, 7), (1, 30), (2, 3, 4, 5)]
DTYPES = ["float32", "float16", "complex128", "int16", "bool", "longdouble"]


def noise(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    array = generator.normal(size=shape) * 4
    if np.dtype(dtype).kind == "c":
        array = array + 1j * generator.normal(size=shape)
    return np.asarray(array > 0 if np.dtype(dtype).kind == "b" else array).astype(dtype)


def whole(old: np.ndarray, new: np.ndarray, weight: float) -> np.ndarray:
    """The step over the whole array at once, in the form that is exact at the nearer end."""
    if weight == 0:
        return old.copy()
    if weight == 1 or old.dtype.kind in "iub":
        return new.astype(old.dtype)
    new = new.astype(old.dtype)
    return (old + (new - old) * weight if weight < 0.5 else new - (new - old) * (1 - weight)).astype(old.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_the_bits_of_the_whole(dtype: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (7, kernel.BLOCK):
        monkeypatch.setattr(kernel, "BLOCK", block)
        for shape in SHAPES:
            for mine, theirs in ((form, "C"), ("C", form), (form, form)):
                for weight in (0, 1e-3, 0.9, 1):
                    old, new = FORMS[mine](noise(shape, dtype, 0)), FORMS[theirs](noise(shape, dtype, 1))
                    wanted = whole(old, new, weight)
                    before = old.copy()
                    pure = functavg.lerp(old, new, weight)
                    np.testing.assert_array_equal(pure, wanted)
                    np.testing.assert_array_equal(old, before)
                    assert pure.dtype == old.dtype
                    inplace = functavg.lerp(old, new, weight, inplace=True)
                    assert inplace is old
                    np.testing.assert_array_equal(old, wanted)


@pytest.mark.parametrize("new", ["float16", "float64", "int32", "bool"])
def test_new_values_are_converted_block_by_block(new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 7)
    for weight in (0.25, 0.75):
        old, values = noise((20, 7), "float32", 0), noise((20, 7), new, 1)
        np.testing.assert_array_equal(functavg.lerp(old, values, weight), whole(old, values, weight))


@pytest.mark.parametrize("weight", [0.25, 0.75, 1.0])
def test_bfloat16_of_ml_dtypes_is_a_float(weight: float) -> None:
    """Its kind is 'V', as that of a record."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    old, new = (np.array(values, ml_dtypes.bfloat16) for values in ([0.0, 4.0], [4.0, 8.0]))
    average = functavg.EMA().init(old).average
    assert average.dtype == np.float32
    for dtype in (np.float32, ml_dtypes.bfloat16):
        result = functavg.lerp(old.astype(dtype), new, weight)
        assert result.dtype == dtype
        assert result.astype(float).tolist() == [4 * weight, 4 + 4 * weight]
    assert functavg.EMA().init(old, dtype=ml_dtypes.bfloat16).average.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("numpy")])
def test_numpy_scalars_as_averages_become_arrays(kind: str) -> None:
    scalar = KINDS[kind].make(np.asarray(1))[()]
    result = functavg.lerp({"w": scalar}, {"w": scalar}, 0.5, inplace=True)["w"]
    assert isinstance(result, np.ndarray)
    assert result == scalar


def test_a_step_in_place_needs_the_memory_of_two_blocks() -> None:
    old, new = np.zeros(2**21), np.ones(2**21, np.float32)
    functavg.lerp(np.zeros(2), np.ones(2), 0.5, inplace=True)
    tracemalloc.start()
    functavg.lerp(old, new, 0.5, inplace=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * kernel.BLOCK * 8  # one of new values, converted, and one to compute in


def test_array_subclasses_are_averaged_as_arrays() -> None:
    state = functavg.EMA(0.5).init(np.ones((1, 2)).view(np.recarray))
    assert type(state.average) is np.ndarray
