"""A state goes through Orbax as any tree does, and averages on to the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import functavg
from tests.composition import nests

jax = pytest.importorskip("jax")
checkpoint = pytest.importorskip("orbax.checkpoint")
jnp = jax.numpy


def params(seed: int) -> Any:
    tree = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in nests.iterate(seed).items()}
    return tree | {"h": jnp.full(3, seed, jnp.bfloat16)}


RULES = {
    "EMA": functavg.EMA(0.9),
    "Every-LAWA": functavg.Every(functavg.LAWA(2), 2),
    "Several": functavg.Several({"fast": functavg.EMA(0.5), "slow": functavg.Every(functavg.SWA(), 2)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("like", ["state", "abstract"])
@pytest.mark.parametrize("name", RULES)
def test_a_state_is_restored_and_goes_on_to_the_same_bits(name, like, jitted, tmp_path):
    """With counts on the host and on the device, into a state or into the shapes of one."""
    rule = RULES[name]
    update = jax.jit(rule.update) if jitted else rule.update
    state = rule.init(params(0))
    for seed in (1, 2, 3):
        state = update(params(seed), state)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "average", state)
    new = rule.init(params(0)) if like == "state" else jax.eval_shape(rule.init, params(0))
    with checkpoint.StandardCheckpointer() as checkpointer:
        resumed = checkpointer.restore(tmp_path / "average", new)
    assert jax.tree_util.tree_structure(resumed) == jax.tree_util.tree_structure(state)
    for seed in (4, 5):
        state, resumed = update(params(seed), state), update(params(seed), resumed)
    for got, wanted in zip(*map(jax.tree_util.tree_leaves, (resumed, state)), strict=True):
        assert np.asarray(got).dtype.kind == np.asarray(wanted).dtype.kind
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
def test_a_flat_state_needs_nothing_to_be_restored_into(tmp_path):
    """Orbax alone returns dicts for named tuples; ``from_state_dict`` makes the state again."""
    rule = RULES["Several"]
    state = rule.update(params(1), rule.init(params(0)))
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "average", functavg.to_state_dict(state))
    with checkpoint.StandardCheckpointer() as checkpointer:
        resumed = functavg.from_state_dict(rule.init(params(0)), checkpointer.restore(tmp_path / "average"))
    assert resumed.memory["fast"].count == 1
    jax.tree_util.tree_map(np.testing.assert_array_equal, resumed, state)
