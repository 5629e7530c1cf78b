"""SkipNonFinite: what it skips, what it reads, and what the inner clock hears."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import functavg
from functavg import EMA, SWA, AvgFn, Every, SkipNonFinite, kernels
from tests.tables import KINDS, made, mean_step

BAD = [np.nan, np.inf, -np.inf]
FLOATS = {name: kind for name, kind in KINDS.items() if kind.kind in "fc" and "float8" not in name}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("library", [name for name in ("torch-float32", "jax-float32") if name in KINDS])
def test_one_bad_step_leaves_no_trace(library: str, where: str) -> None:
    """C6: a NaN, then 1000 steps at 1.0 (100 in JAX, which is slow outside of jit)."""
    kind = KINDS[library]
    rule = SkipNonFinite(EMA(0.9))
    state = rule.init(kind.make(np.zeros(2)))
    if where == "device":
        state = state._replace(count=torch.tensor(0) if "torch" in library else made(KINDS["jax-int32"], np.asarray(0)))
    state = rule.update(kind.make(np.zeros(2)), state)
    state = rule.update(kind.make(np.array([0.0, np.nan])), state)
    for _ in range(1000 if library == "torch-float32" else 100):
        state = rule.update(kind.make(np.ones(2)), state, inplace=True)
    np.testing.assert_allclose(np.asarray(state.average), 1.0, rtol=3e-5)
    assert int(state.memory[0]) == 1


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", FLOATS)
def test_nan_and_infinity_are_seen_wherever_they_stand(name: str, bad: float) -> None:
    """In every kind of leaf, at its ends and in its middle, in the last of several leaves."""
    make = FLOATS[name].make
    rule = SkipNonFinite(SWA())
    good = {"a": make(np.ones(3)), "b": make(np.ones((2, 5)))}
    state = rule.init(good)
    for place in (0, 4, 9):
        values = np.ones(10, complex if FLOATS[name].kind == "c" else float)
        values[place] = bad
        new = rule.update({"a": make(np.ones(3)), "b": make(values.reshape(2, 5))}, state)
        assert (new.count, new.memory[0]) == (0, 1)
    assert rule.update(good, state).count == 1


@pytest.mark.parametrize("size", [1, 1000, 2**20 + 7])
@pytest.mark.parametrize(
    "name", ["torch-float32", "torch-bfloat16", "torch-complex64", "torch-float8", "numpy-float32"]
)
def test_a_leaf_is_seen_whole_whatever_its_size(name: str, size: int) -> None:
    """Large leaves are read in pieces, small ones together."""
    make, finite = KINDS[name].make, kernels.load(name.partition("-")[0]).is_finite
    good, bad = np.ones(size), np.ones(size)
    bad[-1] = np.nan
    small = [make(np.ones(())), make(np.ones((0, 2))), make(np.ones(7))]
    assert finite([*small, make(good), *small])
    assert not finite([*small, make(bad), *small])
    assert not finite([make(bad)])


def test_what_is_finite_is_not_taken_for_infinite() -> None:
    """The largest numbers of a dtype, both parts of a complex one, strided and conjugated views."""
    finite = kernels.load("torch").is_finite
    largest = torch.finfo(torch.float32).max
    assert finite([torch.tensor([largest, -largest]), torch.tensor([complex(largest, largest)])])
    assert finite([torch.tensor([6e4], dtype=torch.float16), torch.tensor([3e38], dtype=torch.bfloat16)])
    views = [torch.ones(4, 6).t()[::2], torch.ones(3, dtype=torch.complex64).conj()]
    views.append(views[1].imag)
    assert finite(views)
    assert finite([torch.zeros(2, device="meta")])


def test_integers_are_not_read() -> None:
    """They are always finite, and so are params without leaves."""
    rule = SkipNonFinite(SWA())
    for params in ({"n": torch.tensor(3), "m": torch.tensor([True])}, {"n": np.arange(3), "k": 2}, {}):
        assert rule.update(params, rule.init(params)).count == 1


def test_a_mixed_tree_is_skipped_as_a_whole() -> None:
    """One bad leaf of any library, and none of the others is averaged."""
    rule = SkipNonFinite(SWA())
    state = rule.init({"a": torch.zeros(1), "b": np.zeros(1)})
    for bad in ({"a": torch.tensor([torch.nan]), "b": np.ones(1)}, {"a": torch.ones(1), "b": np.array([np.inf])}):
        state = rule.update(bad, state)
    assert (state.count, state.memory) == (0, (2, ()))
    assert (state.average["a"].item(), state.average["b"].item()) == (0.0, 0.0)


def test_the_steps_of_a_skipped_update_are_not_told() -> None:
    """It did not take place: the next one has its own gap only, and the count is of what was averaged."""
    rule = SkipNonFinite(EMA(0.5))
    state = rule.init(np.zeros(()))
    for value, steps in ((0.0, 1), (np.nan, 7), (1.0, 2)):
        state = rule.update(np.asarray(value), state, steps=steps)
    assert float(state.average) == 0.75
    assert (state.count, state.memory) == (3, (1, ()))


def test_the_cheap_order_tests_only_what_would_be_averaged() -> None:
    """``Every`` outside: a NaN between two updates is never looked at."""
    rule = Every(SkipNonFinite(SWA()), 2)
    state = rule.init(np.zeros(()))
    for value in (np.nan, 1.0, np.nan, np.nan, np.nan, 3.0):
        state = rule.update(np.asarray(value), state)
    assert float(state.average) == 2.0
    assert (state.count, state.memory) == (4, (0, (1, ())))


def test_a_function_of_averages_may_stand_behind_it() -> None:
    """With a host count a skip is a branch."""
    rule = SkipNonFinite(AvgFn(mean_step))
    state = rule.init(np.zeros(()))
    for value in (1.0, np.nan, 3.0):
        state = rule.update(np.asarray(value), state)
    assert float(state.average) == 2.0
    assert state.count == 2


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("on_device", "reads"), [(False, 1), (True, 0)])
def test_the_host_reads_one_flag_or_none(on_device: bool, reads: int) -> None:
    """One an update with a host count, none with a count on the device, however many leaves and dtypes there are."""
    rule = SkipNonFinite(SWA())
    params = {str(index): torch.ones(2, dtype=dtype) for index, dtype in enumerate((torch.float32, torch.float64) * 3)}
    state = rule.init(params)
    if on_device:
        state = state._replace(count=torch.tensor(0))
    with Reads() as mode:
        state = rule.update(params, state, inplace=True)
    assert mode.count == reads
    assert int(state.count) == 1


def test_what_is_no_array_is_refused_by_the_update() -> None:
    """The test leaves it alone, so the error names its path."""
    rule = SkipNonFinite(SWA())
    with pytest.raises(TypeError, match=r"tree\['w'\]: expected a numpy array or a number, got str"):
        rule.update({"w": "x"}, rule.init({"w": np.zeros(1)}))


def test_a_bad_argument_is_refused() -> None:
    """T6: by name and value."""
    with pytest.raises(TypeError, match=r"^rule must be an AveragingRule such as EMA\(0\.999\), got None of NoneType"):
        SkipNonFinite(None)
    with pytest.raises(
        ValueError, match=r"^the state was not made by SkipNonFinite: expected a memory of two parts, got tuple"
    ):
        SkipNonFinite(EMA()).update(np.ones(1), functavg.EMA().init(np.ones(1)))
