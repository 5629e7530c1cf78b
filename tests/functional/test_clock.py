"""Counts and steps: what a gap means, large counts, and counts that live on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import functavg
from functavg import AverageState
from functavg.scalars import lift
from tests import oracle
from tests.tables import KINDS, RULES, WEIGHT_RULES, jnp, read

LARGE = [10**5, 10**7, 10**9]


@pytest.mark.parametrize("gap", [1, 10, 100])
def test_a_power_ema_updated_every_so_often_has_the_width_it_was_asked_for(gap: int) -> None:
    """C2: the average of t / N over N = 20000 steps is (g + 1) / (g + 2) whatever the gap."""
    rule = functavg.PowerEMA(6.94)
    state = rule.init(np.zeros(()))
    for time in range(gap, 20001, gap):
        state = rule.update(np.asarray(time / 20000), state, steps=gap, inplace=True)
    assert state.count == 20000
    assert float(state.average) == pytest.approx(0.888, abs=3e-3)


@pytest.mark.parametrize("gap", [1, 5, 20])
def test_a_decay_is_per_step_whatever_the_gap(gap: int) -> None:
    rule = functavg.EMA(0.99)
    state = rule.update(np.zeros(()), rule.init(np.ones(())))
    for _ in range(0, 100, gap):
        state = rule.update(np.ones(()), state, steps=gap)
    assert float(state.average) == pytest.approx(1 - 0.99**100, rel=1e-12)


@pytest.mark.parametrize("count", LARGE)
@pytest.mark.parametrize("gamma", [0.0, 6.94, 16.97])
def test_the_weight_of_a_power_ema_keeps_its_digits_on_the_host(gamma: float, count: int) -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(50):
        wanted = float(1 - (mpmath.mpf(count) / (count + 1)) ** (mpmath.mpf(gamma) + 1))
    assert functavg.PowerEMA(gamma).weight(count, 1) == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("gamma", [0.0, 6.94, 16.97])
def test_the_weight_of_a_power_ema_keeps_its_digits_in_float32_under_jit(gamma: float) -> None:
    """C1c: the naive form is off by 20 %."""
    jax = pytest.importorskip("jax")
    wanted = functavg.PowerEMA(gamma).weight(10**7, 1)

    @jax.jit
    def step(count: Any, average: Any) -> Any:
        return functavg.PowerEMA(gamma).update(average + 1, AverageState(count, average))

    state = step(jax.numpy.asarray(10**7), jax.numpy.zeros(3))
    assert state.count == 10**7 + 1
    np.testing.assert_allclose(np.asarray(state.average, np.float64), wanted, rtol=1e-6)


# ---- counts on a device


def device_counts(count: int) -> list[tuple[str, Any]]:
    """Return a count as 0-d arrays, each with the name of the kind of leaves it goes with."""
    counts = [("torch-float32", torch.tensor(count, dtype=dtype)) for dtype in (torch.int64, torch.int32, torch.uint8)]
    return counts if jnp is None else [*counts, ("jax-float32", jnp.asarray(count))]


@pytest.mark.parametrize("name", RULES)
def test_a_count_on_the_device_gives_the_averages_of_a_host_count(name: str) -> None:
    """From 0 on, with a gap on the host or on the device, pure and in place."""
    rule = RULES[name].rule
    for kind, zero in device_counts(0):
        make = KINDS[kind].make
        for inplace in (False, True):
            host = rule.init({"w": make(np.zeros(3)), "n": make(np.zeros(()))})
            device = rule.init(host.average)._replace(count=zero + 0)  # which updates in place write to
            for gap, value in ((2, 1.0), (1, 4.0), (3, 2.0)):
                params = {"w": make(np.full(3, value)), "n": make(np.asarray(value))}
                host = rule.update(params, host, steps=gap)
                device = rule.update(params, device, steps=zero + gap if inplace else gap, inplace=inplace)
                assert int(device.count) == host.count
                assert device.count.dtype == zero.dtype
                for key in params:
                    np.testing.assert_allclose(read(device.average[key]), read(host.average[key]), rtol=3e-6)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64", "int64", "bool"])
@pytest.mark.parametrize("name", RULES)
def test_a_count_on_the_device_suits_every_dtype(name: str, dtype: str) -> None:
    rule, kind = RULES[name].rule, KINDS[f"torch-{dtype}"]
    for held in (None, "bfloat16"):
        host = rule.init(kind.make(np.zeros(3)), dtype=held)
        device = rule.init(kind.make(np.zeros(3)), dtype=held)._replace(count=torch.tensor(0))
        for value in (1.0, 0.0, 1.0):
            host = rule.update(kind.make(np.full(3, value)), host)
            device = rule.update(kind.make(np.full(3, value)), device)
            assert device.average.dtype == host.average.dtype
            tolerance = 1e-2 if held == "bfloat16" else 3e-6
            np.testing.assert_allclose(read(device.average), read(host.average), rtol=tolerance)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", RULES)
def test_nothing_is_read_from_the_device(name: str, on_device: bool) -> None:
    """Meta tensors have no values to read: their updates run, twice, with a count on the host or on meta."""
    rule = RULES[name].rule
    params = {
        "w": torch.ones(3, device="meta"),
        "h": torch.ones(3, device="meta", dtype=torch.bfloat16),
        "c": torch.ones(3, device="meta", dtype=torch.complex64),
        "n": torch.ones((), device="meta", dtype=torch.int64),
    }
    for inplace in (False, True):
        state = rule.init(params)
        if on_device:
            state = state._replace(count=torch.zeros((), dtype=torch.int64, device="meta"))
        for _ in range(2):
            state = rule.update(params, state, inplace=inplace)
        assert {name: leaf.device.type for name, leaf in state.average.items()} == dict.fromkeys(params, "meta")
        assert state.average["h"].dtype == torch.float32
        assert type(state.count) is int if not on_device else state.count.is_meta


def test_a_count_on_the_device_is_beside_numpy_leaves_too() -> None:
    state = AverageState(torch.tensor(0), {"w": np.zeros(2), "t": torch.zeros(2)})
    for rule in (functavg.SWA(), functavg.AvgFn(lambda average, new, count: average + (new - average) / (count + 1))):
        current = state
        for value in (1.0, 3.0):
            current = rule.update({"w": np.full(2, value), "t": torch.full((2,), value)}, current)
        assert current.average["w"].tolist() == [2.0, 2.0]
        assert current.average["t"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("count", [0, 3])
def test_a_grouped_function_copies_first_by_a_count_on_the_device_too(count: int, inplace: bool) -> None:
    def fn(averages: list[torch.Tensor], news: list[torch.Tensor], count: torch.Tensor) -> None:
        torch._foreach_lerp_(averages, news, 0.25)

    state = AverageState(torch.tensor(count), {"w": torch.zeros(2), "h": torch.zeros(2), "n": torch.tensor(0)})
    params = {"w": torch.ones(2), "h": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(5)}
    after = functavg.AvgFn(fn, grouped=True).update(params, state, inplace=inplace)
    wanted = [1.0 if count == 0 else 0.25] * 2
    assert after.average["w"].tolist() == after.average["h"].tolist() == wanted
    assert after.average["n"].item() == 5


@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_the_first_weight_of_a_device_count_is_that_of_the_host(name: str) -> None:
    rule = WEIGHT_RULES[name].rule
    for _, zero in device_counts(0):
        assert float(rule.weight(lift(zero), lift(zero + 2))) == pytest.approx(rule.weight(0, 2), rel=1e-6)


def test_the_profile_of_a_long_run_is_that_of_the_oracle() -> None:
    """The weights of 300 updates with mixed gaps, by averaging unit vectors."""
    steps = list(np.random.default_rng(0).integers(1, 20, 300))
    for rule, profile in ((functavg.PowerEMA(6.94), oracle.power(6.94)), (functavg.SWA(), oracle.swa)):
        state = rule.init(np.zeros(301))
        for index, span in enumerate(steps, 1):
            state = rule.update(np.eye(1, 301, index)[0], state, steps=span, inplace=True)
        np.testing.assert_allclose(state.average, profile(steps), rtol=1e-9, atol=1e-15)
