"""to_state_dict and from_state_dict: any state goes through files that hold named numbers and arrays only."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functavg
from functavg import AverageState
from tests.composition import nests
from tests.composition.nests import Update
from tests.tables import LIBRARIES, RULES, made


def through_torch(saved: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_numpy(saved: dict[str, Any]) -> Any:
    file = io.BytesIO()
    np.savez(file, **saved)
    file.seek(0)
    return np.load(file)


def to_torch(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: torch.tensor(np.asarray(leaf)), tree)


def same(tree: Any) -> Any:
    return tree


FILES = [(to_torch, through_torch), (same, through_numpy)]


@pytest.mark.parametrize("number", [int, torch.tensor], ids=["host count", "device count"])
@pytest.mark.parametrize(("convert", "through"), FILES, ids=["torch", "numpy"])
@settings(max_examples=40, deadline=None)
@given(nest=nests.nests(list(RULES)), updates=nests.streams(min_size=2), data=st.data())
def test_any_nest_goes_on_bit_for_bit_from_a_file(
    convert: Callable[[Any], Any],
    through: Callable[[Any], Any],
    number: Callable[[int], Any],
    nest: Any,
    updates: list[Update],
    data: st.DataObject,
) -> None:
    """T3, with numbers and arrays alone in the file; what loads need not be where the count lives."""
    updates = nests.finite(updates)
    half = data.draw(st.integers(0, len(updates)))
    rule = nests.rule_of(nest)
    state = rule.init(convert(nests.iterate(0)))
    for index, (steps, params) in enumerate(updates):
        if index == half:
            saved = functavg.to_state_dict(state._replace(count=number(state.count)) if convert is to_torch else state)
            resumed = functavg.from_state_dict(rule.init(convert(nests.iterate(99))), through(saved))
            assert optree.tree_structure(resumed) == optree.tree_structure(state)
            assert type(resumed.count) is int
        if index >= half:
            resumed = rule.update(convert(params), resumed, steps=steps, inplace=True)
        state = rule.update(convert(params), state, steps=steps)
    if half == len(updates):
        return
    for one, other in zip(optree.tree_leaves(resumed), optree.tree_leaves(state), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_names_are_the_keys_joined_by_dots() -> None:
    inner = functavg.Partition({"a": functavg.LAWA(2), 7: functavg.SWA()}, {"encoder": {"weight": "a"}, "head": 7})
    rule = functavg.Every(functavg.Several({"fast": inner, "slow": functavg.EMA(0.9)}), 2)
    params = {"encoder": {"weight": np.zeros(1)}, "head": [np.zeros(1)]}
    assert sorted(functavg.to_state_dict(rule.init(params))) == [
        "average.fast.encoder.weight",
        "average.fast.head.0",
        "average.slow.encoder.weight",
        "average.slow.head.0",
        "count",
        "memory.0",
        "memory.1.fast.count",
        "memory.1.fast.memory.7.count",
        "memory.1.fast.memory.a.count",
        "memory.1.fast.memory.a.memory.0",
        "memory.1.fast.memory.a.memory.1.0.encoder.weight",
        "memory.1.fast.memory.a.memory.1.1.encoder.weight",
        "memory.1.slow.count",
    ]
    assert list(functavg.to_state_dict(functavg.SWA().init(np.zeros(1)))) == ["count", "average"]


def test_what_is_saved_is_no_copy_and_what_is_loaded_shares_no_memory() -> None:
    rule = functavg.EMA(0.5)
    for params in ({"w": torch.ones(2)}, {"w": np.ones(2)}):
        state = rule.init(params)
        saved = functavg.to_state_dict(state)
        assert saved["average.w"] is state.average["w"]
        loaded = functavg.from_state_dict(state, saved)
        rule.update(params, loaded, inplace=True)
        loaded.average["w"][:] = 7.0
        assert state.average["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_containers_and_key_types_are_those_of_like(library: str) -> None:
    params = made(LIBRARIES[library], collections.OrderedDict([(3, (np.ones(2), None)), (1, [np.zeros(())])]))
    rule = functavg.LAWA(2)
    state = rule.update(params, rule.init(params))
    saved = {name: np.asarray(value) if library.startswith("jax") else value for name, value in saved_of(state).items()}
    loaded = functavg.from_state_dict(rule.init(params), saved)
    assert optree.tree_structure(loaded) == optree.tree_structure(state)
    for one, other in zip(optree.tree_leaves(loaded), optree.tree_leaves(state), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def saved_of(state: AverageState[Any]) -> dict[str, Any]:
    return functavg.to_state_dict(state)


def test_leaves_take_the_dtypes_of_like() -> None:
    params = {"w": torch.full((2,), 0.1), "n": torch.tensor(3, dtype=torch.int32), "on": torch.tensor(True)}
    saved = functavg.to_state_dict(functavg.SWA().init(params))
    like = functavg.SWA().init(params | {"n": torch.tensor(0), "on": torch.tensor(0)}, dtype=torch.bfloat16)
    average = functavg.from_state_dict(like, saved).average
    assert [average[name].dtype for name in ("w", "n", "on")] == [torch.bfloat16, torch.int64, torch.int64]
    assert average["w"].tolist() == params["w"].bfloat16().tolist()
    assert (average["n"].item(), average["on"].item()) == (3, 1)


def test_a_count_is_what_it_is_in_like() -> None:
    rule, params = functavg.Every(functavg.EMA(0.9), 1), {"w": torch.ones(1)}
    host = rule.update(params, rule.init(params))
    device = optree.tree_map(torch.as_tensor, host)
    for saved in map(functavg.to_state_dict, (host, device)):
        loaded = functavg.from_state_dict(host, saved)
        assert (type(loaded.count), loaded.count, type(loaded.memory[0])) == (int, 1, int)
        loaded = functavg.from_state_dict(device, saved)
        assert (loaded.count.dtype, loaded.count.item(), loaded.memory[0].dtype) == (torch.int64, 1, torch.int64)


def test_a_count_of_jax_is_what_it_is_in_like() -> None:
    jnp = pytest.importorskip("jax.numpy")
    rule, params = functavg.SWA(), {"w": jnp.ones(1)}
    host = rule.update(params, rule.init(params))
    device = host._replace(count=jnp.asarray(1))
    for saved in map(functavg.to_state_dict, (host, device)):
        assert type(functavg.from_state_dict(host, saved).count) is int
        loaded = functavg.from_state_dict(device, saved)
        assert (loaded.count.dtype, int(loaded.count)) == (device.count.dtype, 1)


def test_onto_the_meta_device_values_stay_where_they_are() -> None:
    """A template without memory: only its structure, shapes and dtypes count."""
    params = {"w": torch.ones(2)}
    saved = functavg.to_state_dict(functavg.SWA().init(params))
    like = functavg.SWA().init({"w": torch.ones(2, device="meta")}, dtype=torch.float64)
    loaded = functavg.from_state_dict(like, saved).average["w"]
    assert (loaded.device.type, loaded.dtype, loaded.tolist()) == ("cpu", torch.float64, [1.0, 1.0])


def test_leaves_that_are_shared_stay_shared() -> None:
    shared = torch.zeros(1)
    params = {"embedding": shared, "head": shared, "scale": torch.zeros(1)}
    rule = functavg.EMA(0.9)
    state = rule.update(params, rule.init(params))
    loaded = functavg.from_state_dict(rule.init(params), through_torch(functavg.to_state_dict(state)))
    shared.fill_(1.0)
    for inplace in (False, True):
        average = rule.update(params, loaded, inplace=inplace).average
        assert average["embedding"] is average["head"]
        assert average["embedding"].item() == pytest.approx(0.1)


def test_one_immutable_array_at_two_places_is_two_leaves() -> None:
    jnp = pytest.importorskip("jax.numpy")
    zero = jnp.zeros(1)
    like = functavg.AverageState(0, {"a": zero, "b": zero})
    loaded = functavg.from_state_dict(like, {"count": 1, "average.a": jnp.ones(1), "average.b": jnp.full(1, 2.0)})
    assert (loaded.average["a"].item(), loaded.average["b"].item()) == (1.0, 2.0)


def test_loading_under_inference_mode_gives_tensors_for_everywhere() -> None:
    saved = functavg.to_state_dict(functavg.SWA().init({"w": torch.ones(2, requires_grad=True)}))
    with torch.inference_mode():
        like = functavg.SWA().init({"w": torch.ones(2, device="meta")})
        loaded = functavg.from_state_dict(like, saved).average["w"]
    assert not loaded.is_inference()
    assert not loaded.requires_grad


# ---- errors


def test_two_leaves_of_one_name_are_refused_by_path() -> None:
    state = functavg.SWA().init({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}})
    message = r"state.average\['a'\]\['b'\] and state.average\['a.b'\] would both be saved as 'average.a.b'; rename"
    with pytest.raises(ValueError, match=message):
        functavg.to_state_dict(state)
    with pytest.raises(ValueError, match=message):
        functavg.from_state_dict(state, {})
    mixed = {0: np.zeros(1), "0": np.zeros(1)}
    with pytest.raises(ValueError, match=r"would both be saved as 'average.0'"):
        functavg.to_state_dict(functavg.SWA().init(mixed))


def test_arguments_that_are_no_state_are_refused() -> None:
    state = functavg.SWA().init({"w": np.zeros(1)})
    with pytest.raises(TypeError, match=r"to_state_dict\(state\): state must be an AverageState, got dict"):
        functavg.to_state_dict({"w": np.zeros(1)})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"from_state_dict\(like, saved\): like must be an AverageState, got dict"):
        functavg.from_state_dict(functavg.to_state_dict(state), state)  # type: ignore[arg-type, type-var]
    with pytest.raises(TypeError, match=r"from_state_dict\(like, saved\): saved must be a dict, got AverageState"):
        functavg.from_state_dict(state, state)  # type: ignore[arg-type]


def test_leaves_that_are_no_arrays_are_refused_by_path() -> None:
    state = functavg.SWA().init({"w": np.zeros(1)})._replace(memory={"note": "text"})
    with pytest.raises(TypeError, match=r"state.memory\['note'\]: expected a number or an array, got str"):
        functavg.to_state_dict(state)
    with pytest.raises(TypeError, match=r"memory.note: the leaf of `like` is neither a number nor an array"):
        functavg.from_state_dict(state, {"count": 0, "average.w": np.zeros(1), "memory.note": "text"})


RULE = functavg.Every(functavg.SWA(), 2)


@pytest.mark.parametrize("convert", [to_torch, same], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.pop("average.layer.w"), ValueError, r"missing average.layer.w; unexpected nothing.*`init`"),
        (lambda d: d.update({"average.more": 1}), ValueError, r"missing nothing; unexpected average.more\."),
        (lambda d: d.update({3: 1}), ValueError, r"missing nothing; unexpected 3\."),
        (lambda d: d.pop("memory.0"), ValueError, r"missing memory.0; unexpected nothing"),
        (
            lambda d: d.update({"average.layer.w": d["average.layer.w"][:1]}),
            ValueError,
            r"^average.layer.w: expected shape \(2,\), got \(1,\); nothing is broadcast",
        ),
        (
            lambda d: d.update({"average.layer.w": d["average.layer.w"] * 1j}),
            TypeError,
            r"^average.layer.w: expected .*float64 or what it can hold, got .*complex128",
        ),
        (lambda d: d.update({"average.layer.w": "text"}), TypeError, r"^average.layer.w: expected a .*, got str"),
        (lambda d: d.update(count=1.5), TypeError, r"^count: expected a number like 0, got 1.5 of float"),
        (lambda d: d.update(count=True), TypeError, r"^count: expected a number like 0, got True of bool"),
        (lambda d: d.update(count=np.zeros(1)), TypeError, r"^count: expected a number like 0, got .* of ndarray"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(convert: Any, change: Any, error: type[Exception], message: str) -> None:
    state = RULE.init(convert({"layer": {"w": np.zeros(2)}}))
    saved = functavg.to_state_dict(state)
    change(saved)
    with pytest.raises(error, match=message):
        functavg.from_state_dict(state, saved)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_no_tensor_is_refused_by_name(device: str) -> None:
    state = functavg.SWA().init({"w": torch.zeros(2, device=device)})
    for value in (np.zeros(2, np.float32), [0.0, 0.0]):
        with pytest.raises(TypeError, match=f"^average.w: expected a torch tensor, got {type(value).__name__}"):
            functavg.from_state_dict(state, {"count": 0, "average.w": value})
