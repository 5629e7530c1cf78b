"""Conversions: round trips, what each number means, and the errors."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from functavg import units

STEPS = st.floats(1e-2, 1e7)
DECAYS = st.floats(1e-3, 1.0, exclude_max=True)


def conditioning(decay: float) -> float:
    """How far a rounding of the decay moves a time computed from it, relatively."""
    return 16 * np.finfo(float).eps / min(1.0 - decay, decay)


@given(STEPS)
def test_half_life_comes_back_from_its_decay(half_life: float) -> None:
    decay = units.decay_from_half_life(half_life)
    assert units.half_life_from_decay(decay) == pytest.approx(half_life, rel=conditioning(decay))


@given(STEPS)
def test_time_constant_comes_back_from_its_decay(time_constant: float) -> None:
    decay = units.decay_from_time_constant(time_constant)
    assert units.time_constant_from_decay(decay) == pytest.approx(time_constant, rel=conditioning(decay))


@given(st.floats(1.0, 1e7))
def test_span_comes_back_from_its_decay(span: float) -> None:
    assert units.span_from_decay(units.decay_from_span(span)) == pytest.approx(span, rel=1e-15 * (span + 8))


@given(DECAYS)
def test_a_decay_comes_back_from_each_of_its_times(decay: float) -> None:
    assert units.decay_from_half_life(units.half_life_from_decay(decay)) == pytest.approx(decay, rel=1e-14)
    assert units.decay_from_time_constant(units.time_constant_from_decay(decay)) == pytest.approx(decay, rel=1e-14)
    assert units.decay_from_span(units.span_from_decay(decay)) == pytest.approx(decay, rel=1e-12)


@given(st.floats(0.0, 1e12))
@example(2.0**-52)  # whose width rounds to more than the widest
def test_gamma_comes_back_from_its_relative_width(gamma: float) -> None:
    assert units.gamma_from_sigma_rel(units.sigma_rel_from_gamma(gamma)) == pytest.approx(gamma, rel=1e-12, abs=1e-13)


@given(st.floats(1e-100, 12**-0.5))
def test_relative_width_comes_back_from_its_gamma(sigma_rel: float) -> None:
    assert units.sigma_rel_from_gamma(units.gamma_from_sigma_rel(sigma_rel)) == pytest.approx(sigma_rel, rel=1e-13)


@pytest.mark.parametrize("half_life", [1, 10, 693.0, 1e5])
def test_a_weight_halves_in_a_half_life(half_life: float) -> None:
    assert units.decay_from_half_life(half_life) ** half_life == pytest.approx(0.5, rel=1e-10)


@pytest.mark.parametrize("time_constant", [1, 10, 1000.0])
def test_a_weight_falls_to_one_over_e_in_a_time_constant(time_constant: float) -> None:
    assert units.decay_from_time_constant(time_constant) ** time_constant == pytest.approx(1 / math.e, rel=1e-12)


@pytest.mark.parametrize("span", [1, 3, 20, 101])
def test_an_ema_is_as_old_as_the_mean_of_its_span(span: int) -> None:
    decay = units.decay_from_span(span)
    ages = np.arange(100 * span)
    weights = (1.0 - decay) * decay**ages
    assert weights @ ages == pytest.approx(np.arange(span).mean(), abs=1e-9)


@pytest.mark.parametrize("span", [1, 3, 20, 101])
def test_an_ema_averages_noise_as_the_mean_of_its_span(span: int) -> None:
    decay = units.decay_from_span(span)
    weights = (1.0 - decay) * decay ** np.arange(100 * span)
    assert 1.0 / (weights @ weights) == pytest.approx(span, rel=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 6.94, 16.97])
def test_relative_width_is_the_standard_deviation_of_the_profile(gamma: float) -> None:
    time = (np.arange(200_000) + 0.5) / 200_000
    weights = time**gamma / np.sum(time**gamma)
    spread = math.sqrt(weights @ time**2 - (weights @ time) ** 2)
    assert units.sigma_rel_from_gamma(gamma) == pytest.approx(spread, rel=1e-8)


@given(DECAYS, st.integers(1, 512))
def test_one_step_of_a_scaled_decay_is_as_many_steps_of_the_decay(decay: float, factor: int) -> None:
    weight = 1.0
    for _ in range(factor):
        weight *= decay
    assert units.scale_decay(decay, factor) == pytest.approx(weight, rel=1e-12, abs=1e-300)
    assert units.scale_decay(units.scale_decay(decay, 1 / factor), factor) == pytest.approx(decay, rel=1e-12)


def test_the_ends_of_the_ranges() -> None:
    assert units.decay_from_half_life(math.inf) == units.decay_from_span(math.inf) == 1.0
    assert units.decay_from_time_constant(math.inf) == 1.0
    assert units.half_life_from_decay(1) == units.time_constant_from_decay(1) == units.span_from_decay(1) == math.inf
    assert units.decay_from_span(1) == 0.0
    assert units.span_from_decay(0) == 1.0
    assert units.decay_from_half_life(1e-310) == units.decay_from_time_constant(1e-310) == 0.0
    assert units.gamma_from_sigma_rel(12**-0.5) == pytest.approx(0.0, abs=1e-14)
    assert units.sigma_rel_from_gamma(0) <= 12**-0.5
    assert units.gamma_from_sigma_rel(1e-200) == pytest.approx(1e200)
    assert units.scale_decay(0, 2) == 0.0
    assert units.scale_decay(1, 2) == 1.0


@pytest.mark.parametrize(
    ("sigma_rel", "gamma"),
    [(0.01, 96.9949), (0.05, 16.9722), (0.10, 6.9372), (0.15, 3.5579), (0.20, 1.8262), (0.25, 0.7198), (0.28, 0.1693)],
)
def test_the_gammas_of_edm2(sigma_rel: float, gamma: float) -> None:
    assert units.gamma_from_sigma_rel(sigma_rel) == pytest.approx(gamma, abs=5e-5)
    assert units.sigma_rel_from_gamma(gamma) == pytest.approx(sigma_rel, rel=1e-5)


def test_the_smoothing_of_composer() -> None:
    assert units.decay_from_half_life(1000) == pytest.approx(0.9993070930, abs=5e-11)


CONVERSIONS = {
    units.decay_from_half_life: ("half_life", "must be positive", [0, -1, math.nan]),
    units.half_life_from_decay: ("decay", "must be in (0, 1]", [0, -0.1, 1.1, math.nan]),
    units.decay_from_span: ("span", "must be at least 1", [0, 0.99, -3, math.nan]),
    units.span_from_decay: ("decay", "must be in [0, 1]", [-0.1, 1.1, math.nan]),
    units.decay_from_time_constant: ("time_constant", "must be positive", [0, -1, math.nan]),
    units.time_constant_from_decay: ("decay", "must be in (0, 1]", [0, -0.1, 1.1, math.nan]),
    units.sigma_rel_from_gamma: ("gamma", "must be finite and at least 0", [-0.1, math.inf, math.nan]),
    units.gamma_from_sigma_rel: ("sigma_rel", "must be in (0, 0.288675]", [0, -0.1, 0.3, math.nan]),
}


@pytest.mark.parametrize(
    ("conversion", "value"), [(conversion, value) for conversion, row in CONVERSIONS.items() for value in row[2]]
)
def test_a_conversion_names_what_is_out_of_range(conversion, value) -> None:
    name, allowed, _ = CONVERSIONS[conversion]
    with pytest.raises(ValueError, match=re.escape(f"{name} {allowed}, got {value!r}")):
        conversion(value)


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("value", ["0.9", None, True, [0.9], 1j])
def test_a_conversion_names_what_is_no_number(conversion, value) -> None:
    name = CONVERSIONS[conversion][0]
    message = f"{name} must be a number, got {value!r} of {type(value).__name__}"
    with pytest.raises(TypeError, match=re.escape(message)):
        conversion(value)


def test_scale_decay_names_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got 1.5"):
        units.scale_decay(1.5, 2)
    with pytest.raises(ValueError, match="factor must be positive, got 0"):
        units.scale_decay(0.9, 0)
    with pytest.raises(ValueError, match="factor must be positive, got nan"):
        units.scale_decay(0.9, math.nan)
    with pytest.raises(ValueError, match="factor must be finite, got inf"):
        units.scale_decay(0.9, math.inf)
    with pytest.raises(TypeError, match="factor must be a number, got '2' of str"):
        units.scale_decay(0.9, "2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decay must be a number, got None of NoneType"):
        units.scale_decay(None, 2)  # type: ignore[arg-type]


def test_conversions_take_numpy_and_torch_numbers_and_return_host_floats() -> None:
    torch = pytest.importorskip("torch")
    for value in (np.float32(0.5), np.float64(0.5), np.asarray(0.5), torch.tensor(0.5)):
        result = units.half_life_from_decay(value)
        assert type(result) is float
        assert result == 1.0
