"""What is averaged, what is copied, and what is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import functavg
from tests.tables import KINDS, RULES, read

# Rules that copy first take the newest value of integers; of the others only Freeze does not.
NEWEST = [name for name in RULES if name not in ("Freeze", "EMA-1")]


@pytest.mark.parametrize("name", NEWEST)
def test_integers_and_bools_take_the_newest_value(name: str) -> None:
    """L2."""

    def params(byte: int, small: int, mask: list[bool]) -> dict[str, torch.Tensor]:
        return {
            "byte": torch.tensor(byte, dtype=torch.uint8),
            "small": torch.tensor(small, dtype=torch.int8),
            "mask": torch.tensor(mask),
            "w": torch.ones(2),
        }

    rule = RULES[name].rule
    for inplace in (False, True):
        state = rule.init(params(0, 0, [False, True]))
        state = rule.update(params(5, 100, [True, False]), state, inplace=inplace)
        state = rule.update(params(3, -100, [False, False]), state, inplace=inplace)
        assert state.average["byte"].item() == 3
        assert state.average["small"].item() == -100
        assert state.average["mask"].tolist() == [False, False]
        assert state.average["byte"].dtype == torch.uint8


def test_a_user_function_sees_real_and_complex_leaves_only() -> None:
    seen = set()

    def fn(average: Any, new: Any, count: Any) -> Any:
        seen.add((average.dtype, new.dtype))
        return (average + new) / 2

    rule = functavg.AvgFn(fn)
    params = {
        "n": torch.tensor(1),
        "m": torch.tensor(True),
        "h": torch.ones(2, dtype=torch.bfloat16),
        "c": torch.ones(2, dtype=torch.complex64),
        "d": torch.ones(2, dtype=torch.float64),
    }
    state = rule.init(params)
    for _ in range(2):
        state = rule.update(params, state)
    assert seen == {(dtype, dtype) for dtype in (torch.float32, torch.complex64, torch.float64)}


def compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in beta
        return torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1))


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def packed() -> torch.Tensor:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("older torch has no such dtype")
    return torch.zeros(2, dtype=torch.float4_e2m1fn_x2)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def jax_key() -> Any:
    return pytest.importorskip("jax").random.key(0)


REFUSED = {
    "sparse": (lambda: torch.eye(2).to_sparse(), r"tensor of layout torch\.sparse_coo; only dense tensors"),
    "sparse csr": (compressed, r"layout torch\.sparse_csr"),
    "quantised": (quantised, r"tensor of dtype torch\.qint8; dequantise or unpack it first"),
    "packed": (packed, "dtype torch.float4_e2m1fn_x2; dequantise"),
    "nested": (nested, "a nested tensor; average its components"),
    "lazy": (lambda: torch.nn.LazyLinear(1).weight, r"uninitialised \(lazy\) parameter; run one forward"),
    "object array": (lambda: np.array([None]), "numpy array of dtype object; only numbers can be averaged"),
    "masked array": (lambda: np.ma.masked_array([1.0, 2.0], [True, False]), "a masked array; fill it"),
    "text array": (lambda: np.array(["a"]), "numpy array of dtype <U1; only numbers can be averaged"),
    "records": (lambda: np.zeros(1, [("a", float)]), "numpy array of dtype .*; only numbers can be averaged"),
    "times": (lambda: np.zeros(1, "datetime64[s]"), "numpy array of dtype datetime64.*; only numbers can be averaged"),
    "text": (lambda: "weights", "it is no array. Expected a dense array of numbers; leave it out of the params"),
    "function": (lambda: print, "it is no array"),
    "module": (
        lambda: torch.nn.Linear(1, 1),
        r"pass dict\(module.named_parameters\(\)\), or use functavg.AveragedModel",
    ),
    "jax key": (jax_key, "only numbers can be averaged|it is no array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_averaged_is_refused_by_init_with_its_path(case: str) -> None:
    """L5."""
    make, message = REFUSED[case]
    leaf = make()
    for rule in (functavg.EMA(), functavg.AvgFn(max)):
        with pytest.raises(TypeError, match=r"^tree\['block'\]\[1\]: cannot average .*(" + message + ")"):
            rule.init({"a": torch.ones(1), "block": [torch.ones(1), leaf]})


@pytest.mark.parametrize(
    "case", ["sparse", "quantised", "nested", "lazy", "object array", "masked array", "text", "jax key"]
)
def test_what_cannot_be_averaged_is_refused_by_update_with_its_path(case: str) -> None:
    leaf = REFUSED[case][0]()
    for kind in ("torch-float32", "numpy-float32", "jax-float32"):
        if kind in KINDS:
            state = functavg.EMA().init({"w": KINDS[kind].make(np.ones((2, 2)))})
            with pytest.raises(TypeError, match=r"^tree\['w'\]: expected "):
                functavg.EMA().update({"w": leaf}, state)


def test_an_average_that_holds_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a dense tensor, got a tensor of layout torch\.sparse_coo"):
        functavg.lerp(torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), 0.5)
    with pytest.raises(TypeError, match="the average holds a numpy array of dtype object"):
        functavg.lerp(np.array([None]), np.ones(1), 0.5)
    with pytest.raises(TypeError, match=r"tree\['b'\]: the average holds str, which is no array"):
        functavg.lerp({"a": np.ones(1), "b": "text"}, {"a": np.ones(1), "b": np.ones(1)}, 0.5)


def test_none_is_structure() -> None:
    state = functavg.SWA().init({"w": np.ones(2), "b": None})
    state = functavg.SWA().update({"w": np.ones(2), "b": None}, state)
    assert state.average["b"] is None


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_0d_and_empty_leaves_are_leaves(kind: str, shape: tuple[int, ...]) -> None:
    rule = functavg.SWA()
    for inplace in (False, True):
        state = rule.init({"w": KINDS[kind].make(np.zeros(shape)), "other": KINDS[kind].make(np.zeros(2))})
        for value in (0, 1, 1):
            params = {"w": KINDS[kind].make(np.full(shape, value)), "other": KINDS[kind].make(np.full(2, value))}
            state = rule.update(params, state, inplace=inplace)
        assert read(state.average["w"]).shape == shape
        wanted = 1 if KINDS[kind].kind in "iub" else 2 / 3
        np.testing.assert_allclose(read(state.average["w"]), np.full(shape, wanted), rtol=1e-6)


def test_gradients_stay_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    average = functavg.EMA().init(parameter).average
    assert type(average) is torch.Tensor
    assert average.grad is None
    assert not average.requires_grad
