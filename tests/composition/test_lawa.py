"""LAWA: the mean of a window, without drift and without allocating."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import optree
import pytest
import torch

from functavg import EMA, LAWA, AverageState
from tests.tables import KINDS, read


def run(rule: LAWA, params: list[Any], steps: int = 1, inplace: bool = False) -> AverageState[Any]:
    state = rule.init(params[0])
    for new in params[1:]:
        state = rule.update(new, state, steps=steps, inplace=inplace)
    return state


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_window_of_one_value_is_that_value_for_ever(window: int, inplace: bool) -> None:
    """Bit for bit, after other values have left the window: a turn of the ring gives the state that it began with."""
    rule = LAWA(window)
    value = np.array([0.1, 1 / 3, 1e-30, -7e20])
    state = run(rule, [value * 0, *(value * factor for factor in (3, 1e9, -2)), *[value] * window])
    for seen in (3 + window, 10**5, 10**9 + 1):
        state = state._replace(memory=(seen, state.memory[1]))
        for _ in range(window):
            state = rule.update(value, state, inplace=inplace)
            assert all(np.array_equal(array, value) for array in (state.average, *state.memory[1]))


@pytest.mark.parametrize("on_device", [False, True])
def test_until_the_window_is_full_it_is_the_mean_of_all_there_are(on_device: bool) -> None:
    """What ``init`` saw is none of them."""
    state = LAWA(3).init(torch.full((1,), 100.0))
    if on_device:
        state = state._replace(count=torch.tensor(0))
    means = []
    for value in (1.0, 3.0, 5.0, 7.0, 9.0):
        state = LAWA(3).update(torch.full((1,), value), state)
        means.append(state.average.item())
    assert means == [1.0, 2.0, 3.0, 5.0, 7.0]


def test_the_mean_does_not_know_what_left_the_window() -> None:
    """Where a subtraction would leave a rest of 1e30, or a NaN for ever."""
    for bad in (1e30, np.nan, np.inf):
        state = run(LAWA(3), [torch.full((2,), value) for value in (0.0, bad, 1.0, 2.0, 6.0)])
        assert state.average.tolist() == [3.0, 3.0]


def test_integers_are_the_newest_ones() -> None:
    """Through any number of turns of the ring."""
    rule = LAWA(3)
    for count in (None, torch.tensor(0)):
        state = rule.init({"n": torch.tensor(0), "m": torch.tensor(False)})
        state = state if count is None else state._replace(count=count)
        for value in range(1, 9):
            state = rule.update({"n": torch.tensor(value), "m": torch.tensor(value % 2 == 0)}, state)
            assert state.average["n"].item() == value
            assert state.average["m"].item() == (value % 2 == 0)


@pytest.mark.parametrize("name", ["torch-bfloat16", "torch-float16", "numpy-float16", "torch-complex64"])
def test_the_ring_is_held_as_the_average_is(name: str) -> None:
    """In float32 for low precision: 500 iterates of 1 and 500 of 2 in bfloat16 have the mean 1.5."""
    make = KINDS[name].make
    state = run(LAWA(4), [make(np.zeros(2)), *(make(np.full(2, 1 + index % 2)) for index in range(1000))], inplace=True)
    np.testing.assert_array_equal(read(state.average), 1.5)
    assert {str(leaf.dtype).removeprefix("torch.") for leaf in [state.average, *state.memory[1]]} == {KINDS[name].held}
    wide = LAWA(2).init(make(np.zeros(2)), dtype="float64")
    assert {str(leaf.dtype)[-3:] for leaf in [wide.average, *wide.memory[1]]} <= {"t64", "128"}


def test_the_count_is_of_steps_and_the_window_of_iterates() -> None:
    """Uneven gaps change neither the mean nor the window."""
    rule = LAWA(2)
    state = rule.init(np.zeros(()))
    for value, steps in ((1.0, 5), (2.0, 1), (4.0, 9)):
        state = rule.update(np.asarray(value), state, steps=steps)
    assert float(state.average) == 3.0
    assert (state.count, state.memory[0]) == (15, 3)


def test_no_array_of_the_state_is_shared() -> None:
    """Neither with the params nor within the ring, at ``init`` and after updates."""
    params = [{"w": torch.full((2,), float(index))} for index in range(6)]
    state = run(LAWA(3), params)
    for some in (LAWA(3).init(params[0]), state, run(LAWA(3), params, inplace=True)):
        leaves = optree.tree_leaves((some.average, some.memory[1], params))
        assert len({leaf.data_ptr() for leaf in leaves}) == len(leaves)


def test_an_update_in_place_allocates_nothing() -> None:
    """The average, the ring and the state's arrays stay where they are, and no array as large as a leaf is made."""
    rule, size = LAWA(3), 2**20
    state = rule.init(np.zeros(size))
    before = [leaf.ctypes.data for leaf in (state.average, *state.memory[1])]
    news = [np.full(size, float(value)) for value in range(5)]
    tracemalloc.start()
    for new in news:
        state = rule.update(new, state, inplace=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size  # an eighth of a leaf
    assert [leaf.ctypes.data for leaf in (state.average, *state.memory[1])] == before
    assert state.average[0] == 3.0


def test_a_pure_update_shares_what_stays_in_the_ring() -> None:
    """Only the oldest iterate's place is new."""
    state = run(LAWA(3), [np.full(1, float(value)) for value in range(5)])
    new = LAWA(3).update(np.ones(1), state)
    assert [one is other for one, other in zip(new.memory[1], state.memory[1], strict=True)] == [True, False, True]


def test_tied_leaves_stay_tied() -> None:
    """In the average and in the ring."""
    rule = LAWA(2)
    for inplace in (False, True):
        leaf = torch.zeros(1)
        state = rule.init({"a": leaf, "b": leaf})
        for value in (1.0, 3.0, 5.0):
            leaf = torch.full((1,), value)
            state = rule.update({"a": leaf, "b": leaf}, state, inplace=inplace)
        assert state.average["a"] is state.average["b"]
        assert state.average["a"].item() == 4.0
        assert all(tree["a"] is tree["b"] for tree in state.memory[1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LAWA(0), ValueError, "window must be an integer of at least 1, got 0"),
        (lambda: LAWA(-1), ValueError, "window must be an integer of at least 1, got -1"),
        (lambda: LAWA(2.0), TypeError, r"window must be an integer of at least 1, got 2\.0 of float"),
        (lambda: LAWA(True), TypeError, "window must be an integer of at least 1, got True of bool"),
        (lambda: LAWA(None), TypeError, "window must be an integer of at least 1, got None of NoneType"),
    ],
)
def test_a_bad_window_is_refused(make: Any, error: type[Exception], message: str) -> None:
    """T6: by name and value."""
    with pytest.raises(error, match="^" + message):
        make()


def test_the_state_of_another_rule_is_refused() -> None:
    """Also that of another window, which would be a mean of the wrong length."""
    with pytest.raises(
        ValueError, match=r"^the state was not made by LAWA: expected a memory of two parts, got tuple\. Pass what"
    ):
        LAWA(2).update(np.ones(1), EMA().init(np.ones(1)))
    with pytest.raises(
        ValueError, match=r"^the state was not made by LAWA: expected a window of 2 iterates, got 3\. Pass what"
    ):
        LAWA(2).update(np.ones(1), LAWA(3).init(np.ones(1)))
