"""Scalar functions mean the same for host numbers, 0-d tensors and JAX arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from functavg import scalars
from tests.tables import jnp

ARRAYS: dict[str, Any] = {"torch": lambda value: torch.tensor(value, dtype=torch.float64), "numpy": np.asarray}
if jnp is not None:
    ARRAYS["jax"] = jnp.asarray

VALUES = [0.0, 1e-9, 0.3, 0.999]


@pytest.mark.parametrize("library", ARRAYS)
@pytest.mark.parametrize("name", ["exp", "expm1", "log1p", "sin"])
def test_functions_of_one_number(name: str, library: str) -> None:
    fn = getattr(scalars, name)
    for value in (*VALUES, -0.5):
        assert fn(value) == getattr(math, name)(value)
        assert float(fn(ARRAYS[library](value))) == pytest.approx(fn(value), rel=1e-6)


@pytest.mark.parametrize("library", ARRAYS)
def test_logarithms_reach_their_pole(library: str) -> None:
    assert scalars.log(0) == scalars.log1p(-1) == -math.inf
    assert scalars.log(math.e) == 1.0
    if library != "numpy":  # which warns
        assert float(scalars.log(ARRAYS[library](0.0))) == float(scalars.log1p(ARRAYS[library](-1.0))) == -math.inf


@pytest.mark.parametrize("library", ARRAYS)
def test_the_smaller_and_the_larger_of_two(library: str) -> None:
    make = ARRAYS[library]
    for x, y in ((1.0, 2.0), (2.0, 1.0), (3, 3.0)):
        for left, right in ((x, y), (make(x), y), (x, make(y)), (make(x), make(y))):
            assert float(scalars.minimum(left, right)) == min(x, y)
            assert float(scalars.maximum(left, right)) == max(x, y)


@pytest.mark.parametrize("library", ARRAYS)
@pytest.mark.parametrize("holds", [True, False])
def test_where_selects_numbers_and_arrays(library: str, holds: bool) -> None:
    make = ARRAYS[library]
    condition = {"torch": torch.tensor, "numpy": np.asarray}.get(library, jnp and jnp.asarray)(holds)
    assert scalars.where(holds, 1, 2) == (1 if holds else 2)
    for x, y in ((1.0, 2.0), (make(1.0), 2.0), (1.0, make(2.0)), (make(1.0), make(2.0))):
        assert float(scalars.where(condition, x, y)) == (1.0 if holds else 2.0)
    assert "int" in str(scalars.where(condition, 1, 2).dtype)
    assert "float" in str(scalars.where(condition, 1, 2.0).dtype)


@pytest.mark.parametrize("library", [name for name in ARRAYS if name != "numpy"])
@pytest.mark.parametrize("base", [0.0, 0.5, 0.984375, 1.0])
def test_one_minus_a_power(base: float, library: str) -> None:
    make = ARRAYS[library]
    for power in (1, 3, 1000):
        wanted = 1 - base**power
        for left, right in ((base, power), (make(base), power), (base, make(power)), (make(base), make(power))):
            assert float(scalars.one_minus_power(left, right)) == pytest.approx(wanted, rel=1e-5)


def test_a_small_weight_is_exact_on_the_device() -> None:
    """1 - (1 - 1e-12) in float64 keeps its digits only where it is never formed."""
    assert scalars.one_minus_power(1 - 1e-12, 1) == 1 - (1 - 1e-12)
    tensor = scalars.one_minus_power(1 - 2.0**-40, torch.tensor(2**20, dtype=torch.float64))
    assert float(tensor) == pytest.approx(-math.expm1(2**20 * math.log1p(-(2.0**-40))), rel=1e-12)


@pytest.mark.parametrize("library", [name for name in ARRAYS if name != "numpy"])
@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.5, 1.0])
def test_a_rate_is_compounded(library: str, rate: float) -> None:
    """Rates of 0 and 1 stay what they are."""
    make = ARRAYS[library]
    for power in (1, 3, 1000):
        wanted = -math.expm1(power * math.log1p(-rate)) if rate < 1 else 1.0
        for left, right in ((rate, power), (make(rate), power), (rate, make(power)), (make(rate), make(power))):
            assert float(scalars.compound(left, right)) == pytest.approx(wanted, rel=1e-6, abs=0)


def test_counts_are_lifted_to_the_widest_float() -> None:
    assert scalars.lift(3) == 3
    assert scalars.lift(torch.tensor(3, dtype=torch.int32)).dtype == torch.float64
    if jnp is not None:
        assert scalars.lift(jnp.asarray(3)).dtype == jnp.float32


def test_a_host_number_is_plain() -> None:
    for value in (1, 1.0, True, np.float64(1)):
        assert scalars.is_host(value)
    for value in (torch.tensor(1), np.asarray(1), np.int64(1), "1", None):
        assert not scalars.is_host(value)
