"""Every argument that is out of range or of another type is refused by name and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import functavg
from functavg import EMA, SWA, AvgFn, PowerEMA, WeightFn
from tests.tables import LIBRARIES

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: EMA(NAN), ValueError, r"decay must be in \[0, 1\], got nan"),
        (lambda: EMA(-0.1), ValueError, r"decay must be in \[0, 1\], got -0\.1"),
        (lambda: EMA(1.1), ValueError, r"decay must be in \[0, 1\], got 1\.1"),
        (lambda: EMA(INF), ValueError, r"decay must be in \[0, 1\], got inf"),
        (lambda: EMA(torch.tensor(2.0)), ValueError, r"decay must be in \[0, 1\], got tensor\(2\.\)"),
        (lambda: EMA("0.9"), TypeError, "decay must be a number, got '0.9' of str"),
        (lambda: EMA(b"1"), TypeError, "decay must be a number, got b'1' of bytes"),
        (lambda: EMA(None), TypeError, "decay must be a number, got None of NoneType"),
        (lambda: EMA(True), TypeError, "decay must be a number, got True of bool"),
        (lambda: EMA([0.9]), TypeError, r"decay must be a number, got \[0\.9\] of list"),
        (lambda: EMA(np.array([0.9])), TypeError, r"decay must be a number, got array\(\[0\.9\]\) of ndarray"),
        (lambda: EMA(0.9j), TypeError, "decay must be a number, got 0.9j of complex"),
        (lambda: EMA(lambda u: 0.9, debias=True), TypeError, "debias=True needs a constant decay, got <function"),
        (lambda: EMA(0.9, start="zero"), ValueError, "start must be 'copy' or 'init', got 'zero'"),
        (lambda: EMA(0.9, start=0), ValueError, "start must be 'copy' or 'init', got 0"),
        (lambda: EMA(0.9, debias=True, start="init"), ValueError, "debias=True leaves no weight on what `init` saw"),
        (lambda: EMA.from_half_life(0), ValueError, "half_life must be positive, got 0"),
        (lambda: EMA.from_half_life(-2.0), ValueError, r"half_life must be positive, got -2\.0"),
        (lambda: EMA.from_half_life(NAN), ValueError, "half_life must be positive, got nan"),
        (lambda: EMA.from_half_life("1"), TypeError, "half_life must be a number, got '1' of str"),
        (lambda: PowerEMA(-0.5), ValueError, r"gamma must be finite and at least 0, got -0\.5"),
        (lambda: PowerEMA(NAN), ValueError, "gamma must be finite and at least 0, got nan"),
        (lambda: PowerEMA(INF), ValueError, "gamma must be finite and at least 0, got inf"),
        (lambda: PowerEMA("6.94"), TypeError, "gamma must be a number, got '6.94' of str"),
        (lambda: PowerEMA(None), TypeError, "gamma must be a number, got None of NoneType"),
        (lambda: PowerEMA.from_sigma_rel(0), ValueError, r"sigma_rel must be in \(0, 0\.288675\], got 0"),
        (lambda: PowerEMA.from_sigma_rel(0.3), ValueError, r"sigma_rel must be in \(0, 0\.288675\], got 0\.3"),
        (lambda: PowerEMA.from_sigma_rel(NAN), ValueError, r"sigma_rel must be in \(0, 0\.288675\], got nan"),
        (lambda: PowerEMA.from_sigma_rel("x"), TypeError, "sigma_rel must be a number, got 'x' of str"),
        (lambda: WeightFn(0.5), TypeError, "fn must be callable, got 0.5 of float"),
        (lambda: WeightFn(None), TypeError, "fn must be callable, got None of NoneType"),
        (lambda: AvgFn("mean"), TypeError, "fn must be callable, got 'mean' of str"),
    ],
)
def test_a_rule_refuses_a_bad_argument(make: Any, error: type[Exception], message: str) -> None:
    """T6."""
    with pytest.raises(error, match="^" + message):
        make()


@pytest.mark.parametrize("decay", [0, 1, 0.5, np.float32(0.5), np.int64(1), torch.tensor(0.25)], ids=repr)
def test_a_decay_of_any_number_type_in_range_is_a_host_float(decay: Any) -> None:
    rule = EMA(decay)
    assert type(rule.decay) is float
    assert rule.decay == float(decay)


@pytest.mark.parametrize("sigma_rel", [0.01, 0.05, 0.10, 0.15, 0.20, 0.25, 0.28, 12**-0.5])
def test_sigma_rel_is_the_relative_width_of_the_profile(sigma_rel: float) -> None:
    gamma = PowerEMA.from_sigma_rel(sigma_rel).gamma
    width = ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5
    assert width == pytest.approx(sigma_rel, rel=1e-12)


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (0, ValueError, "steps must be an integer of at least 1, got 0"),
        (-1, ValueError, "steps must be an integer of at least 1, got -1"),
        (np.int64(0), ValueError, "steps must be an integer of at least 1, got 0"),
        (1.5, TypeError, "steps must be an integer or a 0-d integer array, got 1.5 of float"),
        (1.0, TypeError, "steps must be an integer or a 0-d integer array, got 1.0 of float"),
        (True, TypeError, "steps must be an integer or a 0-d integer array, got True of bool"),
        (np.True_, TypeError, "steps must be an integer or a 0-d integer array, got np.True_ of bool"),
        (None, TypeError, "steps must be an integer or a 0-d integer array, got None of NoneType"),
        ("1", TypeError, "steps must be an integer or a 0-d integer array, got '1' of str"),
        (np.array([1]), TypeError, r"steps must be an integer or a 0-d integer array, got array\(\[1\]\) of ndarray"),
        (np.array(1.0), TypeError, r"steps must be an integer or a 0-d integer array, got array\(1\.\) of ndarray"),
        (torch.tensor(1.0), TypeError, r"steps must be an integer or a 0-d integer array, got tensor\(1\.\)"),
        (torch.tensor(True), TypeError, r"steps must be an integer or a 0-d integer array, got tensor\(True\)"),
        (torch.tensor([1]), TypeError, r"steps must be an integer or a 0-d integer array, got tensor\(\[1\]\)"),
    ],
    ids=repr,
)
def test_steps_are_a_positive_integer(steps: Any, error: type[Exception], message: str) -> None:
    """T6."""
    for rule in (SWA(), AvgFn(max)):
        with pytest.raises(error, match="^" + message):
            rule.update(np.ones(2), rule.init(np.ones(2)), steps=steps)


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (-1, ValueError, r"state\.count must be an integer of at least 0, got -1"),
        (0.0, TypeError, r"state\.count must be an integer or a 0-d integer array, got 0\.0 of float"),
        (None, TypeError, r"state\.count must be an integer or a 0-d integer array, got None"),
        (False, TypeError, r"state\.count must be an integer or a 0-d integer array, got False"),
        (torch.tensor(0.0), TypeError, r"state\.count must be an integer or a 0-d integer array, got tensor\(0\.\)"),
    ],
    ids=repr,
)
def test_the_count_is_an_integer(count: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="^" + message):
        SWA().update(np.ones(2), functavg.AverageState(count, np.ones(2)))


@pytest.mark.parametrize("count", [np.int64(3), np.int32(3), np.array(3), np.uint8(3)], ids=repr)
def test_a_numpy_integer_becomes_a_host_int(count: Any) -> None:
    """A count comes back as one from many a file."""
    for average in (np.zeros(2), torch.zeros(2)):
        state = SWA().update(average + 4, functavg.AverageState(count, average), steps=np.int64(1))
        assert type(state.count) is int
        assert state.count == 4
        assert state.average.tolist() == [1.0, 1.0]


def test_device_must_be_the_host_for_numpy_arrays() -> None:
    assert SWA().init(np.ones(2), device="cpu").average.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="device must be None or 'cpu' for numpy arrays, got 'cuda'"):
        SWA().init(np.ones(2), device="cuda")


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (NAN, ValueError, "weight must be finite, got nan"),
        (INF, ValueError, "weight must be finite, got inf"),
        (-INF, ValueError, "weight must be finite, got -inf"),
        (np.float32("nan"), ValueError, "weight must be finite, got nan"),
        ("0.5", TypeError, r"weight must be a real number or a 0-d array, got '0\.5' of str"),
        (None, TypeError, "weight must be a real number or a 0-d array, got None of NoneType"),
        (0.5j, TypeError, r"weight must be a real number or a 0-d array, got 0\.5j of complex"),
        (np.complex128(0.5), TypeError, "weight must be a real number or a 0-d array, got .* of complex128"),
        (np.str_("0.5"), TypeError, "weight must be a real number or a 0-d array, got .* of str_"),
        (torch.tensor(0.5j), TypeError, r"weight must be a real number or a 0-d array, got tensor\(.*\) of Tensor"),
        (np.array([0.5]), TypeError, r"weight must be a real number or a 0-d array, got array\(\[0\.5\]\) of ndarray"),
        (torch.tensor([0.5]), TypeError, r"weight must be a real number or a 0-d array, got tensor\(\[0\.5"),
    ],
    ids=repr,
)
def test_a_weight_is_a_finite_number_or_a_0d_array(weight: Any, error: type[Exception], message: str) -> None:
    """T6."""
    for inplace in (False, True):
        average = torch.zeros(2)
        with pytest.raises(error, match="^" + message):
            functavg.lerp(average, torch.ones(2), weight, inplace=inplace)
        rule = WeightFn(lambda count, steps: weight)
        with pytest.raises(error, match="^" + message):
            rule.update(torch.ones(2), functavg.AverageState(0, average), inplace=inplace)
        assert average.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("weight", [0.5, np.float64(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_a_weight_of_any_number_type_is_the_same_step(weight: Any) -> None:
    for params in (np.ones(2), torch.ones(2), torch.ones(2, dtype=torch.bfloat16)):
        for inplace in (False, True):
            assert functavg.lerp(params * 0, params, weight, inplace=inplace).tolist() == [0.5, 0.5]


def test_a_bfloat16_number_is_a_weight() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert functavg.lerp(torch.zeros(2), torch.ones(2), ml_dtypes.bfloat16(0.5)).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.5, ValueError, r"decay\(u\) must be in \[0, 1\], got 1\.5"),
        (-0.1, ValueError, r"decay\(u\) must be in \[0, 1\], got -0\.1"),
        (NAN, ValueError, r"decay\(u\) must be finite, got nan"),
        ("0.9", TypeError, r"decay\(u\) must be a real number or a 0-d array, got '0\.9' of str"),
    ],
    ids=repr,
)
def test_a_callable_decay_must_return_a_number_in_range(value: Any, error: type[Exception], message: str) -> None:
    rule = EMA(lambda u: value)
    with pytest.raises(error, match="^" + message):
        rule.update(np.ones(2), rule.init(np.ones(2)))


def test_a_grouped_function_works_on_torch_tensors_only() -> None:
    for array in [LIBRARIES[name].make(np.ones(2)) for name in LIBRARIES if "torch" not in name]:
        rule = AvgFn(max, grouped=True)
        with pytest.raises(
            TypeError, match=r"^a grouped function \(multi_avg_fn\) works on torch tensors only; use AvgFn"
        ):
            rule.update(array, functavg.AverageState(1, array))
