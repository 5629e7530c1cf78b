"""The first update copies; a weight of exactly 1 copies and one of exactly 0 does nothing, without arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import functavg
from tests.tables import KINDS, LIBRARIES, RULES, made, read

FIRST = [name for name, row in RULES.items() if row.copies_first]
NOT_FIRST = [name for name, row in RULES.items() if not row.copies_first]
FLOATING = [name for name, kind in KINDS.items() if kind.kind in "fc" and "float8" not in name]

WILD = np.array([np.nan, np.inf, -np.inf, 1.0])
TAME = np.array([1.0, 2.0, 3.0, 4.0])


def device_weight(name: str, weight: float) -> Any:
    """Return a weight as a 0-d array of the leaf's own library."""
    if name.startswith("torch"):
        return torch.tensor(weight)
    if name.startswith("jax"):
        import jax.numpy as jnp

        return jnp.asarray(weight)
    return np.asarray(weight)


@pytest.mark.parametrize("kind", FLOATING)
@pytest.mark.parametrize("name", FIRST)
def test_the_first_update_copies_whatever_init_saw(name: str, kind: str) -> None:
    """NaN in what ``init`` saw does not survive the first update, nor does anything but the exact first iterate."""
    make = KINDS[kind].make
    for inplace in (False, True):
        rule = RULES[name].rule
        average = rule.update(make(TAME / 3), rule.init(make(WILD)), steps=3, inplace=inplace).average
        np.testing.assert_array_equal(read(average), read(make(TAME / 3)))


@pytest.mark.parametrize("name", NOT_FIRST)
def test_a_function_is_trusted_from_the_first_call(name: str) -> None:
    rule = RULES[name].rule
    average = rule.update(np.ones(2), rule.init(np.zeros(2))).average
    assert (average < 1).all()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", FLOATING)
def test_weight_1_copies_nan_and_inf_and_what_was_before_does_not_leak(kind: str, on_device: bool) -> None:
    make = KINDS[kind].make
    weight = device_weight(kind, 1.0) if on_device else 1
    for inplace in (False, True):
        for old, new in ((WILD, TAME), (TAME, WILD)):
            average = functavg.EMA().init(make(old)).average
            np.testing.assert_array_equal(read(functavg.lerp(average, make(new), weight, inplace=inplace)), new)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", FLOATING)
def test_weight_0_does_nothing_whatever_is_new(kind: str, on_device: bool) -> None:
    make = KINDS[kind].make
    weight = device_weight(kind, 0.0) if on_device else 0
    for inplace in (False, True):
        for old, new in ((WILD, TAME), (TAME, WILD)):
            average = functavg.EMA().init(make(old)).average
            np.testing.assert_array_equal(read(functavg.lerp(average, make(new), weight, inplace=inplace)), old)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.kind in "iub"])
def test_integers_and_bools_take_the_newest_value_unless_the_weight_is_0(kind: str, on_device: bool) -> None:
    make, dtype = KINDS[kind].make, KINDS[kind].held
    old, new = np.array([1, 0, 1]).astype(dtype), np.array([0, 0, 1]).astype(dtype)
    if KINDS[kind].kind != "b":
        old, new = (old + 5).astype(dtype), (new + 100).astype(dtype)
    for inplace in (False, True):
        for weight, wanted in ((0.0, old), (1e-9, new), (0.5, new), (1.0, new)):
            given = device_weight(kind, weight) if on_device else weight
            average = functavg.lerp(functavg.EMA().init(make(old)).average, make(new), given, inplace=inplace)
            np.testing.assert_array_equal(read(average), wanted)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_host_weight_of_0_returns_the_very_average(library: str) -> None:
    """A pure update that changes nothing makes no arrays, and none of a frozen average is ever copied."""
    rule = functavg.Freeze()
    state = rule.init(made(LIBRARIES[library], {"w": TAME}))
    assert rule.update(made(LIBRARIES[library], {"w": WILD}), state).average is state.average


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_ema_of_decay_1_ignores_inf_after_the_copy(library: str) -> None:
    """C5."""
    make = LIBRARIES[library].make
    rule = functavg.EMA(1.0)
    for inplace in (False, True):
        state = rule.update(make(TAME), rule.init(make(WILD)), inplace=inplace)
        for value in (WILD, np.full(4, np.inf)):
            state = rule.update(make(value), state, inplace=inplace)
        np.testing.assert_array_equal(read(state.average), TAME)
        assert state.count == 3


def test_weight_0_with_nan_in_the_new_value_leaves_the_average() -> None:
    """C5."""
    new = {"w": torch.full((2,), torch.nan), "n": torch.tensor(2)}
    average = functavg.lerp({"w": torch.ones(2), "n": torch.tensor(1)}, new, 0.0)
    assert average["w"].tolist() == [1.0, 1.0]
    assert average["n"].item() == 1
