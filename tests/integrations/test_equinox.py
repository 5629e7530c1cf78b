"""Recipes for Equinox: a model is a tree, of which the arrays are averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import functavg
from functavg.integrations.optax import average_params, get_average
from tests import oracle

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")
jnp = jax.numpy

DECAY = 0.9


def make() -> Any:
    return eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))


def loss(model: Any, x: Any) -> Any:
    return (jax.vmap(model)(x) ** 2).mean()


def arrays(model: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree_util.tree_leaves(eqx.filter(model, eqx.is_inexact_array))]


def expected(seen: list[Any]) -> list[np.ndarray]:
    weights = oracle.ema(DECAY)([1] * (len(seen) - 1))
    return [oracle.average(weights, leaves) for leaves in zip(*seen, strict=True)]


@pytest.mark.slow
def test_a_filtered_model_is_averaged_and_its_average_is_a_model():
    """By a rule alone and in the optimizer's state, in one jitted step."""
    rule = functavg.EMA(DECAY)
    optimizer = optax.chain(optax.adam(0.1), average_params(rule))
    model = make()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state, opt_state = rule.init(params), optimizer.init(params)

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, state: Any, x: Any) -> Any:
        gradients = eqx.filter_grad(loss)(model, x)
        updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        return model, opt_state, rule.update(eqx.filter(model, eqx.is_inexact_array), state)

    seen = [arrays(model)]
    for seed in range(5):
        model, opt_state, state = step(model, opt_state, state, jax.random.normal(jax.random.key(seed), (8, 3)))
        seen.append(arrays(model))
    for average in (state.average, get_average(opt_state)):
        averaged = eqx.combine(average, static)
        assert averaged.activation is model.activation
        assert averaged(jnp.ones(3)).shape == (1,)
        for got, wanted in zip(arrays(averaged), expected(seen), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=8e-6)


def test_a_whole_model_is_refused_at_its_first_leaf_that_is_no_array():
    with pytest.raises(TypeError, match=r"tree\.activation: cannot average"):
        functavg.EMA(DECAY).init(make())


def test_a_state_goes_through_a_file_of_equinox(tmp_path):
    """Counts and arrays come back to the same bits, into a state as ``init`` makes it."""
    rule = functavg.Every(functavg.LAWA(2), 2)
    params = eqx.filter(make(), eqx.is_inexact_array)
    state = rule.init(params)
    for scale in (1.0, 2.0, 3.0):
        state = rule.update(jax.tree_util.tree_map(lambda leaf, scale=scale: leaf * scale, params), state)
    eqx.tree_serialise_leaves(tmp_path / "average.eqx", state)
    resumed = eqx.tree_deserialise_leaves(tmp_path / "average.eqx", rule.init(params))
    after, wanted = rule.update(params, resumed), rule.update(params, state)
    assert (after.count, after.memory[0]) == (wanted.count, wanted.memory[0])
    jax.tree_util.tree_map(np.testing.assert_array_equal, after, wanted)
