"""Weight rules go through jax.jit, lax.scan, vmap and donation, and give what they give eagerly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import functavg
from functavg import AverageState
from tests.tables import ALIKE, RULES, WEIGHT_RULES, read

jax = pytest.importorskip("jax")
jnp = jax.numpy

VALUES = [1.0, 4.0, 2.0, 0.5]


def params(value: float) -> dict[str, Any]:
    return {
        "w": jnp.full((2, 3), value),
        "h": jnp.full((3,), value, jnp.bfloat16),
        "n": jnp.asarray(int(value)),
    }


def assert_equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        np.testing.assert_allclose(read(left[name]), read(right[name]), rtol=3e-6, atol=1e-7)


def eager_run(rule: functavg.AveragingRule) -> AverageState[Any]:
    state = rule.init(params(0.0))
    for value in VALUES:
        state = rule.update(params(value), state)
    return state


@pytest.mark.parametrize("name", [name for name in RULES if name not in ALIKE])
def test_jit_with_a_traced_count_traces_once(name: str) -> None:
    """The state goes in as it is, its count a host int: the next one comes out as an array."""
    rule = RULES[name].rule
    traces = []

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        traces.append(1)
        return rule.update(params, state)

    state = rule.init(params(0.0))
    for value in VALUES:
        state = step(params(value), state)
    wanted = eager_run(rule)
    assert_equal(state.average, wanted.average)
    assert int(state.count) == wanted.count
    assert len(traces) == 1


@pytest.mark.parametrize("name", [name for name in WEIGHT_RULES if name not in ALIKE])
def test_scan_carries_the_state(name: str) -> None:
    rule = WEIGHT_RULES[name].rule
    stream = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *(params(value) for value in VALUES))
    state = rule.init(params(0.0))._replace(count=jnp.asarray(0))
    state, counts = jax.lax.scan(lambda state, params: ((new := rule.update(params, state)), new.count), state, stream)
    assert counts.tolist() == [1, 2, 3, 4]
    assert_equal(state.average, eager_run(rule).average)


@pytest.mark.parametrize("name", ["EMA", "PowerEMA", "WeightFn-fading"])
def test_vmap_over_models_and_their_counts(name: str) -> None:
    rule = WEIGHT_RULES[name].rule
    singles = [AverageState(count, rule.init(params(float(count))).average) for count in (0, 3)]
    stack = jax.tree_util.tree_map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *singles)
    new = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), params(5.0), params(7.0))
    stack = jax.vmap(rule.update)(new, stack)
    for index, (single, value) in enumerate(zip(singles, (5.0, 7.0), strict=True)):
        wanted = rule.update(params(value), single)
        assert_equal({name: leaf[index] for name, leaf in stack.average.items()}, wanted.average)


@pytest.mark.parametrize("name", ["EMA", "Copy", "SWA"])
def test_a_donated_state_and_donated_params_average_on(name: str) -> None:
    """A first update that handed out the params' own buffers would die with them."""
    rule = RULES[name].rule
    train = jax.jit(lambda params: jax.tree_util.tree_map(lambda leaf: leaf * 2, params), donate_argnums=0)
    update = jax.jit(rule.update, donate_argnums=1)
    weights = {"w": jnp.ones((2, 3))}
    state, wanted = rule.init(weights), []
    for _ in range(3):
        weights = train(weights)
        state = update(weights, state)
        wanted.append(np.asarray(weights["w"]))
    profile = RULES[name].profile([1, 1, 1])[1:]
    np.testing.assert_allclose(state.average["w"], sum(p * x for p, x in zip(profile, wanted, strict=True)), rtol=1e-6)


def test_a_rule_is_a_static_argument() -> None:
    """Rules hash by value: an equal rule does not trace again."""
    traces = []

    def step(rule: functavg.AveragingRule, params: Any, state: Any) -> Any:
        traces.append(rule)
        return rule.update(params, state)

    jitted = jax.jit(step, static_argnums=0)
    state = functavg.EMA(0.9).init(params(0.0))
    for rule in (functavg.EMA(0.9), functavg.EMA(0.9), functavg.SWA()):
        jitted(rule, params(1.0), state)
    assert traces == [functavg.EMA(0.9), functavg.SWA()]


def test_gradients_may_flow_through_an_average() -> None:
    rule = functavg.EMA(0.75)
    state = AverageState(1, {"w": jnp.zeros(2)})
    grads = jax.grad(lambda weights: rule.update(weights, state).average["w"].sum())({"w": jnp.ones(2)})
    assert grads["w"].tolist() == [0.25, 0.25]


def test_traced_steps_and_traced_weights() -> None:
    rule = functavg.SWA()
    step = jax.jit(lambda params, state, steps: rule.update(params, state, steps=steps))
    state = rule.init(jnp.zeros(2))
    for value, steps in ((1.0, 1), (5.0, 3)):
        state = step(jnp.full(2, value), state, steps)
    assert state.average.tolist() == [4.0, 4.0]
    lerp = jax.jit(functavg.lerp)
    for weight, wanted in ((0.0, 0.0), (0.25, 0.25), (1.0, 1.0)):
        assert lerp(jnp.zeros(2), jnp.ones(2), weight).tolist() == [wanted] * 2
    assert lerp(jnp.zeros(2), jnp.full(2, jnp.nan), 0.0).tolist() == [0.0, 0.0]
    assert lerp(jnp.full(2, jnp.nan), jnp.ones(2), 1.0).tolist() == [1.0, 1.0]


def test_errors_are_raised_while_tracing() -> None:
    rule = functavg.EMA()
    with pytest.raises(ValueError, match=r"tree\['w'\]: expected shape \(2, 3\), got \(3, 2\)"):
        jax.jit(rule.update)(params(0.0) | {"w": jnp.zeros((3, 2))}, rule.init(params(0.0)))
    with pytest.raises(TypeError, match=r"weight must be a real number or a 0-d array"):
        jax.jit(functavg.lerp)(jnp.zeros(2), jnp.ones(2), jnp.asarray(0.5j))


def test_init_inside_jit_casts_and_copies() -> None:
    state = jax.jit(functavg.EMA().init)(params(2.0))
    assert state.average["h"].dtype == jnp.float32
    assert state.count == 0
