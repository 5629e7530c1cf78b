"""Averages of low precision are held in float32 and move; the dtype is that of ``init``, whatever comes later."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import pytest
import torch

import functavg
from tests.tables import KINDS, RULES, dtype_name, read

LOW = [name for name, kind in KINDS.items() if kind.held == "float32" and "float32" not in name and "param" not in name]


def linear(value: float, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    module = torch.nn.Linear(3, 2, dtype=dtype)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return dict(module.named_parameters())


@pytest.mark.parametrize("inplace", [False, True])
def test_a_bfloat16_average_moves_by_steps_below_its_resolution(inplace: bool) -> None:
    """P1."""
    rule = functavg.EMA(0.9999)
    state = rule.update(linear(1.0), rule.init(linear(1.0)))
    two = linear(2.0)
    for _ in range(5000):
        state = rule.update(two, state, inplace=inplace)
    for leaf in state.average.values():
        torch.testing.assert_close(leaf, torch.full_like(leaf, 2 - 0.9999**5000), rtol=1e-5, atol=0)
        assert leaf.dtype == torch.float32
        assert leaf.to(torch.bfloat16)[0].tolist() == torch.full_like(leaf[0], 1.3935, dtype=torch.bfloat16).tolist()


@pytest.mark.parametrize("kind", [name for name in LOW if "float8" not in name and "jax" not in name])
def test_the_equal_mean_of_many_low_precision_snapshots_is_exact(kind: str) -> None:
    """P2."""
    rule = functavg.SWA()
    make = KINDS[kind].make
    one, two = make(np.ones(2)), make(np.full(2, 2.0))
    state = rule.init(one)
    for snapshot in [one] * 500 + [two] * 500:
        state = rule.update(snapshot, state, inplace=True)
    np.testing.assert_allclose(read(state.average), 1.5, rtol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_low_precision_params_go_into_a_float32_average_by_every_rule(name: str, dtype: str) -> None:
    """P3: a new value is converted to the dtype of the average, which may have been made from float32 params."""
    row = RULES[name]
    low = getattr(torch, dtype)
    for start in (torch.zeros(2), torch.zeros(2, dtype=low)):
        state = row.rule.init({"w": start})
        for value in (1.0, 2.0):
            state = row.rule.update({"w": torch.full((2,), value, dtype=low)}, state)
        assert state.average["w"].dtype == torch.float32
        np.testing.assert_allclose(read(state.average["w"]), row.profile([1, 1]) @ [0.0, 1.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_the_average_never_depends_on_the_type_of_the_decay(dtype: Any, inplace: bool) -> None:
    """P4."""
    averages = []
    for decay in (0.9, np.float64(0.9), np.asarray(0.9), torch.tensor(0.9, dtype=torch.float64)):
        rule = functavg.EMA(decay)
        state = rule.init(linear(1.0), dtype=dtype)
        for value in (1.0, 2.0, 3.0):
            state = rule.update(linear(value), state, inplace=inplace)
        averages.append(state.average)
    for average in averages:
        for name, leaf in average.items():
            assert leaf.dtype == (dtype or torch.float32)
            assert torch.equal(leaf, averages[0][name])


@pytest.mark.parametrize("kind", [name for name in KINDS if name.endswith("float16")])
def test_the_equal_mean_of_large_float16_values_does_not_overflow(kind: str) -> None:
    """P5."""
    rule = functavg.SWA()
    leaf = KINDS[kind].make(np.full(3, 4000.0))
    state = rule.init(leaf)
    for _ in range(20):
        state = rule.update(leaf, state)
        assert read(state.average).tolist() == [4000.0] * 3


DTYPES: list[tuple[Any, str, str]] = [  # asked for, of real leaves, of complex leaves
    (None, "float32", "complex64"),
    (torch.float64, "float64", "complex128"),
    ("float64", "float64", "complex128"),
    (np.float64, "float64", "complex128"),
    (float, "float64", "complex128"),
    (torch.float16, "float16", "complex64"),
    ("bfloat16", "bfloat16", "complex64"),
    (torch.bfloat16, "bfloat16", "complex64"),
    (torch.complex64, "float32", "complex64"),
    ("complex128", "float64", "complex128"),
]


@pytest.mark.parametrize(("asked", "real", "complex_"), DTYPES, ids=str)
def test_dtype_is_that_of_real_leaves_and_complex_ones_take_its_counterpart(
    asked: Any, real: str, complex_: str
) -> None:
    rule = functavg.SWA()
    params = {
        "w": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.ones(2, dtype=torch.complex64),
        "n": torch.ones(2, dtype=torch.int16),
        "m": torch.ones(2, dtype=torch.bool),
    }
    state = rule.init(params, dtype=asked)
    for inplace in (False, True):
        state = rule.update(params, state, inplace=inplace)
        assert optree.tree_map(dtype_name, state.average) == {"w": real, "c": complex_, "n": "int16", "m": "bool"}


@pytest.mark.parametrize(
    ("asked", "real", "complex_"), [row for row in DTYPES if "bfloat16" not in str(row[0])], ids=str
)
def test_dtype_means_the_same_for_numpy(asked: Any, real: str, complex_: str) -> None:
    params = {"w": np.ones(2, np.float16), "c": np.ones(2, np.complex64), "n": np.ones(2, np.int16)}
    average = functavg.SWA().init(params, dtype=asked).average
    assert optree.tree_map(dtype_name, average) == {"w": real, "c": complex_, "n": "int16"}


def test_dtype_means_the_same_for_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    params = {"w": jnp.ones(2, jnp.float16), "c": jnp.ones(2, jnp.complex64), "n": jnp.ones(2, jnp.int16)}
    for asked in (jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16"), torch.bfloat16):
        state = functavg.SWA().init(params, dtype=asked)
        state = functavg.SWA().update(params, state)
        assert optree.tree_map(dtype_name, state.average) == {"w": "bfloat16", "c": "complex64", "n": "int16"}


def test_widest_numpy_floats_keep_their_dtype_and_have_a_complex_counterpart() -> None:
    average = functavg.SWA().init({"w": np.ones(1), "c": np.ones(1, complex)}, dtype=np.longdouble).average
    assert average["w"].dtype == np.longdouble
    assert average["c"].dtype == np.clongdouble


def test_float64_params_do_not_widen_an_average() -> None:
    for new in (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)):
        for inplace in (False, True):
            assert functavg.lerp(torch.zeros(2), new, 0.5, inplace=inplace).tolist() == [0.5, 0.5]
            assert functavg.lerp(torch.zeros(2), new, 0.5, inplace=inplace).dtype == torch.float32
    for array in (np.ones(2), np.ones(2, int), np.ones(2, bool)):
        assert functavg.lerp(np.zeros(2, np.float32), array, 0.5).dtype == np.float32


def test_a_real_value_goes_into_a_complex_average() -> None:
    assert functavg.lerp(torch.zeros(1, dtype=torch.complex64), torch.ones(1), 0.5).tolist() == [0.5 + 0j]
    assert functavg.lerp(np.zeros(1, np.complex64), np.ones(1), 0.5).tolist() == [0.5 + 0j]


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (int, ValueError, "dtype must be real or complex floating of at least 16 bits, got int"),
        (torch.int64, ValueError, "dtype must be real or complex floating of at least 16 bits, got int64"),
        ("bool", ValueError, "dtype must be real or complex floating of at least 16 bits, got bool"),
        ("float8_e4m3fn", ValueError, "dtype must be real or complex floating of at least 16 bits, got float8_e4m3fn"),
        (torch.float8_e5m2, ValueError, "dtype must be real or complex floating of at least 16 bits, got float8_e5m2"),
        ("foo", TypeError, "dtype must be a dtype of the params' library or its name, got 'foo' of str"),
        (0.9, TypeError, "dtype must be a dtype of the params' library or its name, got 0.9 of float"),
        ("float128", ValueError, "dtype must be one that torch has, got float128"),
    ],
    ids=str,
)
def test_a_dtype_that_cannot_hold_an_average_is_refused(dtype: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        functavg.SWA().init(torch.ones(2), dtype=dtype)
