"""``lerp``, ``cast_like`` and a rule's ``extend``: one step, a cast, growth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import functavg
from functavg import cast_like, lerp
from tests.tables import KINDS, LIBRARIES, RULES, WEIGHT_RULES, dtype_name, read

# ---- lerp


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 0.9, 1.0, 1.5, -0.5])
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.kind in "fc" and kind.held in name])
def test_lerp_is_one_step_towards_the_params(kind: str, weight: float) -> None:
    """Also beyond them, and away from them."""
    make = KINDS[kind].make
    for inplace in (False, True):
        result = lerp({"w": make(np.full(3, 2.0))}, {"w": make(np.full(3, 4.0))}, weight, inplace=inplace)
        np.testing.assert_allclose(read(result["w"]), 2 + 2 * weight, rtol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_lerp_in_place_writes_to_mutable_averages_only(library: str) -> None:
    kind = LIBRARIES[library]
    average = {"w": kind.make(np.zeros(3))}
    result = lerp(average, {"w": kind.make(np.ones(3))}, 0.5, inplace=True)
    assert read(result["w"]).tolist() == [0.5] * 3
    assert read(average["w"]).tolist() == [0.5 if kind.mutable else 0.0] * 3


def test_lerp_needs_a_weight_and_takes_trees_by_position() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        lerp(np.ones(1), np.ones(1))
    with pytest.raises(TypeError, match="positional-only"):
        lerp(np.ones(1), np.ones(1), weight=0.5)


def test_lerp_writes_an_average_back_into_a_model() -> None:
    model = torch.nn.Linear(2, 2).bfloat16()
    average = functavg.EMA().init(dict(model.named_parameters())).average
    average = {name: torch.full_like(leaf, 3.0) for name, leaf in average.items()}
    lerp(dict(model.named_parameters()), average, 1.0, inplace=True)
    assert {value for parameter in model.parameters() for value in parameter.flatten().tolist()} == {3.0}
    assert model.weight.dtype == torch.bfloat16


# ---- cast_like


@pytest.mark.parametrize("kind", KINDS)
def test_cast_like_brings_an_average_to_the_dtypes_of_the_params(kind: str) -> None:
    params = {"w": KINDS[kind].make(np.ones((2, 2))), "b": [KINDS[kind].make(np.ones(()))]}
    state = functavg.SWA().init(params)
    cast = cast_like(functavg.SWA().update(params, state).average, params)
    assert dtype_name(cast["w"]) == dtype_name(params["w"])
    assert dtype_name(cast["b"][0]) == dtype_name(params["w"])
    np.testing.assert_array_equal(read(cast["w"]), np.ones((2, 2)))


@pytest.mark.parametrize("library", LIBRARIES)
def test_cast_like_gives_back_leaves_that_need_no_cast(library: str) -> None:
    tree = {"w": LIBRARIES[library].make(np.ones(2))}
    assert cast_like(tree, {"w": LIBRARIES[library].make(np.zeros(2))})["w"] is tree["w"]


def test_cast_like_moves_to_the_device_of_the_params() -> None:
    assert cast_like(torch.ones(2), torch.ones(2, device="meta", dtype=torch.bfloat16)).is_meta


def test_cast_like_keeps_shared_leaves_shared() -> None:
    leaf = torch.ones(2)
    cast = cast_like({"a": leaf, "b": leaf}, {"a": leaf.bfloat16(), "b": leaf.bfloat16()})
    assert cast["a"] is cast["b"]
    parted = cast_like({"a": leaf, "b": leaf}, {"a": leaf.bfloat16(), "b": leaf.double()})
    assert (parted["a"].dtype, parted["b"].dtype) == (torch.bfloat16, torch.float64)


def test_cast_like_keeps_no_graph() -> None:
    cast = cast_like({"w": torch.ones(2, requires_grad=True)}, {"w": torch.ones(2, dtype=torch.float64)})
    assert not cast["w"].requires_grad
    with torch.inference_mode():
        assert not cast_like(torch.ones(2), torch.ones(2, dtype=torch.float64)).is_inference()


def test_cast_like_takes_numpy_averages_to_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    cast = cast_like({"w": np.ones(2), "b": 1.0}, {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(())})
    assert cast["w"].dtype == jnp.bfloat16
    assert isinstance(cast["b"], jnp.ndarray)


def test_cast_like_pairs_by_path() -> None:
    with pytest.raises(ValueError, match=r"missing tree\['a'\]; unexpected tree\['b'\]"):
        cast_like({"a": np.ones(1)}, {"b": np.ones(1)})
    for tree, like in (
        (torch.ones(1), np.ones(1)),
        (np.ones(1), torch.ones(1)),
        ("text", np.ones(1)),
        (np.ones(1), "text"),
    ):
        message = rf"tree\['a'\]: expected arrays of one library, got {type(tree).__name__} to cast like "
        with pytest.raises(TypeError, match=message + type(like).__name__):
            cast_like({"a": tree}, {"a": like})


# ---- extend


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", RULES)
def test_extend_keeps_what_is_known_and_starts_the_rest_from_the_params(name: str, library: str) -> None:
    rule, make = RULES[name].rule, LIBRARIES[library].make
    state = rule.init({"a": make(np.zeros(2))})
    for value in (1.0, 2.0):
        state = rule.update({"a": make(np.full(2, value))}, state, steps=2)
    grown = rule.extend({"a": make(np.zeros(2)), "b": {"c": make(np.ones(3))}}, state)
    assert grown.count == state.count
    assert grown.average["a"] is state.average["a"]
    assert read(grown.average["b"]["c"]).tolist() == [1.0] * 3
    together = rule.update({"a": make(np.full(2, 4.0)), "b": {"c": make(np.ones(3))}}, grown)
    alone = rule.update({"a": make(np.full(2, 4.0))}, state)
    np.testing.assert_array_equal(read(together.average["a"]), read(alone.average["a"]))
    np.testing.assert_allclose(read(together.average["b"]["c"]), [1.0] * 3, rtol=1e-6)


def test_new_leaves_are_held_as_init_holds_them_and_share_no_memory() -> None:
    rule = functavg.EMA()
    new = torch.ones(2, dtype=torch.bfloat16)
    grown = rule.extend({"a": torch.ones(1), "b": new}, rule.init({"a": torch.ones(1)}))
    new.zero_()
    assert grown.average["b"].tolist() == [1.0, 1.0]
    assert grown.average["b"].dtype == torch.float32


def test_extend_with_the_same_leaves_changes_nothing() -> None:
    rule = functavg.EMA()
    params = {"a": np.ones(2), "b": [np.ones(1)]}
    state = rule.update(params, rule.init(params))
    grown = rule.extend(params, state)
    assert grown.count == state.count
    assert grown.average["b"][0] is state.average["b"][0]


def test_extend_refuses_to_lose_or_resize_a_leaf() -> None:
    rule = functavg.EMA()
    state = rule.init({"a": np.ones(2), "b": np.ones(2)})
    message = r"state\.average\['b'\] would vanish: the params have no such leaf\. Pass params with every leaf that the"
    with pytest.raises(ValueError, match=message):
        rule.extend({"a": np.ones(2), "c": np.ones(2)}, state)
    with pytest.raises(ValueError, match=r"\['b'\] has shape \(2,\), the params have \(3,\); extend adds leaves"):
        rule.extend({"a": np.ones(2), "b": np.ones(3)}, state)


def test_extend_refuses_what_is_no_state_or_cannot_be_averaged() -> None:
    rule = functavg.EMA()
    state = rule.init({"a": np.ones(1)})
    with pytest.raises(TypeError, match=r"^extend\(params, state\): state must be an AverageState, got dict$"):
        rule.extend({"a": np.ones(1)}, {"a": np.ones(1)})
    with pytest.raises(TypeError, match=r"^extend\(params, state\): .*; `params` and `state` are swapped$"):
        rule.extend(state, {"a": np.ones(1)})
    with pytest.raises(TypeError, match=r"^extend\(params, state\): params must be .*, got an AverageState$"):
        rule.extend(state, state)
    with pytest.raises(TypeError, match=r"tree\['b'\]: cannot average str"):
        rule.extend({"a": np.ones(1), "b": "text"}, state)


@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_extend_keeps_a_count_on_the_device(name: str) -> None:
    rule = WEIGHT_RULES[name].rule
    state = rule.init({"a": torch.ones(1)})._replace(count=torch.tensor(5))
    assert rule.extend({"a": torch.ones(1), "b": torch.ones(2)}, state).count is state.count
