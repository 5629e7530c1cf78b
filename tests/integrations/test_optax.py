"""``average_params``: the average of the updated params in an optimizer's state, through whatever is around it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import functavg
from functavg.integrations.optax import average_params, get_average
from tests import oracle
from tests.composition import nests

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

LENGTH = 6
FLOAT32 = 2e-6

GRADIENTS = [jax.tree_util.tree_map(np.float32, nests.iterate(seed)) for seed in range(1, LENGTH + 1)]
"""One for each leaf of ``nests.SHAPES``, at each step."""


def start() -> dict[str, Any]:
    return {name: jnp.ones(shape) for name, shape in nests.SHAPES.items()}


def train(optimizer: Any, gradients: Any = None) -> tuple[list[Any], Any]:
    """Train in a jitted step; return the params that ``init`` saw and those after each step, and the last state."""
    traces = []

    @jax.jit
    def step(gradients: Any, state: Any, params: Any) -> Any:
        traces.append(1)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = start()
    state = optimizer.init(params)
    seen = [params]
    for gradient in GRADIENTS if gradients is None else gradients:
        params, state = step(gradient, state, params)
        seen.append(params)
    assert len(traces) == 1
    return seen, state


def numbers(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}


def assert_average(average: Any, wanted: Any, tolerance: float = FLOAT32) -> None:
    assert jax.tree_util.tree_structure(average) == jax.tree_util.tree_structure(wanted)
    jax.tree_util.tree_map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=tolerance, atol=4 * tolerance), average, wanted
    )


def expected(nest: Any, seen: list[Any]) -> Any:
    """Return the weighted sum of these params, each after one step; the first is what ``init`` saw."""
    first, *iterates = map(numbers, seen)
    return nests.average(nest, first, [(1, params) for params in iterates])


# ---- values


@pytest.mark.parametrize("name", ["EMA", "EMA-callable", "AvgFn", "LAWA", "Partition", "deep"])
def test_it_averages_the_params_after_each_step_and_is_traced_once(name):
    """Those that the optimizer leaves, not those that it was given."""
    nest = nests.ON_DEVICE[name]
    seen, state = train(optax.chain(optax.adam(0.1), average_params(nests.rule_of(nest))))
    assert_average(get_average(state), expected(nest, seen))
    assert int(state[-1].count) == nests.count(nest, list(seen[0]), [(1, params) for params in map(numbers, seen[1:])])


def test_the_updates_pass_as_they_are():
    plain, _ = train(optax.adam(0.1))
    averaged, _ = train(optax.chain(optax.adam(0.1), average_params(functavg.EMA(0.9))))
    for one, other in zip(plain, averaged, strict=True):
        jax.tree_util.tree_map(np.testing.assert_array_equal, one, other)


def test_outside_jit_the_values_are_the_same():
    optimizer = optax.chain(optax.sgd(0.1), average_params(functavg.EMA(0.9)))
    params = start()
    state = optimizer.init(params)
    for gradients in GRADIENTS:
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    seen, _ = train(optimizer)
    assert_average(get_average(state), expected("EMA", seen))


def test_low_precision_params_are_averaged_in_float32():
    """What is averaged is their rounding after each step, as the model has it."""
    optimizer = optax.chain(optax.sgd(0.01), average_params(functavg.EMA(0.9)))
    params = {"w": jnp.asarray([1.0, 3.0], jnp.bfloat16)}
    state = optimizer.init(params)
    seen = [params]
    for _ in range(5):
        updates, state = optimizer.update({"w": jnp.ones(2, jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    average = get_average(state)["w"]
    assert average.dtype == jnp.float32
    wanted = oracle.average(oracle.ema(0.9)([1] * 5), [numbers(it)["w"] for it in seen])
    np.testing.assert_allclose(average, wanted, rtol=FLOAT32)
    low = average_params(functavg.EMA(0.9), dtype="bfloat16").init(params)
    assert low.average["w"].dtype == jnp.bfloat16


def test_a_state_of_64_bits_keeps_its_types():
    context = jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()
    with context:
        optimizer = optax.MultiSteps(average_params(nests.rule_of(nests.ON_DEVICE["deep"])), 2)
        params = jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.float64), start())
        state = optimizer.init(params)
        step = jax.jit(lambda state: optimizer.update(params, state, params)[1])
        after = jax.lax.scan(lambda state, _: (step(state), None), state, length=3)[0]
    types = [[leaf.dtype for leaf in jax.tree_util.tree_leaves(tree)] for tree in (state, after)]
    assert types[0] == types[1]
    assert get_average(after)["p"]["a"].dtype == np.float64


# ---- around it


def test_accumulated_gradients_make_one_update():
    """Every third of these steps is one of the optimizer."""
    optimizer = optax.MultiSteps(optax.chain(optax.sgd(0.1), average_params(functavg.SWA())), 3)
    seen, state = train(optimizer)
    assert_average(get_average(state), expected("SWA", [seen[0], seen[3], seen[6]]))
    assert int(optax.tree_utils.tree_get(state, "AverageState").count) == 2


def test_steps_that_are_skipped_make_none():
    gradients = [dict(gradient) for gradient in GRADIENTS]
    gradients[2]["b"] = np.float32(np.nan)
    optimizer = optax.apply_if_finite(optax.chain(optax.sgd(0.1), average_params(functavg.SWA())), 3)
    seen, state = train(optimizer, gradients)
    assert_average(get_average(state), expected("SWA", [params for index, params in enumerate(seen) if index != 3]))
    assert int(optax.tree_utils.tree_get(state, "AverageState").count) == LENGTH - 1


def test_masked_it_averages_some_params_only():
    mask = {"a": True, "b": False, "c": True}
    seen, state = train(optax.chain(optax.sgd(0.1), optax.masked(average_params(functavg.EMA(0.9)), mask)))
    average, wanted = get_average(state), expected("EMA", seen)
    assert isinstance(average["b"], optax.MaskedNode)
    for name in "ac":
        np.testing.assert_allclose(average[name], wanted[name], rtol=FLOAT32, atol=4 * FLOAT32)


def test_it_is_found_in_nested_chains_with_extra_arguments():
    inner = optax.chain(optax.identity(), optax.scale_by_backtracking_linesearch(3), average_params(functavg.SWA()))
    state = optax.inject_hyperparams(lambda rate: optax.chain(optax.sgd(rate), inner))(0.1).init(start())
    assert_average(get_average({"optimizer": [state]}), start())


def test_scan_carries_the_state():
    optimizer = optax.chain(optax.sgd(0.1), average_params(functavg.Every(functavg.EMA(0.9), 2)))

    def step(carry: Any, gradients: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *GRADIENTS)
    (_, state), _ = jax.lax.scan(step, (start(), optimizer.init(start())), stacked)
    seen, _ = train(optimizer)
    assert_average(get_average(state), expected(nests.ON_DEVICE["Every"], seen))


def test_vmap_over_members_with_counts_of_their_own():
    optimizer = optax.chain(optax.sgd(0.5), average_params(functavg.SWA()))
    members = {"w": jnp.asarray([[1.0, 2.0], [3.0, 4.0]])}
    state = jax.vmap(optimizer.init)(members)
    for _ in range(2):
        updates, state = jax.vmap(optimizer.update)(members, state, members)
        members = optax.apply_updates(members, updates)
    assert state[-1].count.tolist() == [2, 2]
    assert get_average(state)["w"].tolist() == [[0.375, 0.75], [1.125, 1.5]]


def test_gradients_flow_through_the_average():
    """As of hyperparameters: with ``p_i = 1 - i r``, the mean of two steps has the slope -1.5."""

    def mean(rate: Any) -> Any:
        optimizer = optax.chain(optax.scale(-1.0), optax.scale(rate), average_params(functavg.SWA()))
        params = jnp.ones(())
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(jnp.ones(()), state, params)
            params = optax.apply_updates(params, updates)
        return get_average(state)

    assert float(jax.grad(mean)(0.1)) == pytest.approx(-1.5)


def test_params_and_state_may_be_donated():
    optimizer = optax.chain(optax.sgd(0.5), average_params(functavg.SWA()))

    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    train = jax.jit(step, donate_argnums=(0, 1))
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for _ in range(2):
        before = params, get_average(state)
        params, state = train(params, state)
        assert all(leaf.is_deleted() for leaf in jax.tree_util.tree_leaves(before))
    assert get_average(state)["w"].tolist() == [0.375, 0.375]


def test_a_state_that_was_pickled_goes_on_to_the_same_bits():
    optimizer = optax.chain(optax.adam(0.1), average_params(functavg.LAWA(2)))
    step = jax.jit(optimizer.update)
    params = start()
    state = optimizer.init(params)
    for gradients in GRADIENTS[:3]:
        _, state = step(gradients, state, params)
    resumed = pickle.loads(pickle.dumps(jax.device_get(state)))
    for gradients in GRADIENTS[3:]:
        (_, state), (_, resumed) = step(gradients, state, params), step(gradients, resumed, params)
    jax.tree_util.tree_map(np.testing.assert_array_equal, state, resumed)


def test_numpy_params_become_arrays_of_jax():
    """As in the states of optax itself."""
    state = average_params(functavg.EMA(0.9)).init({"w": np.ones(2, np.float32), "s": 1.0})
    assert all(isinstance(leaf, jax.Array) and not leaf.weak_type for leaf in jax.tree_util.tree_leaves(state))


# ---- errors


def test_without_params_it_says_what_to_call():
    optimizer = average_params(functavg.EMA(0.9))
    with pytest.raises(ValueError, match=r"needs the params: call optimizer\.update\(updates, state, params\)"):
        optimizer.update(start(), optimizer.init(start()))


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match=r"rule must be an AveragingRule such as EMA\(0\.999\), got 0\.9 of float"):
        average_params(0.9)


def test_a_state_without_an_average_or_with_two_is_refused():
    message = r"expected one average in the optimizer's state, got {}\. Put average_params\(rule\) once, last"
    with pytest.raises(ValueError, match=message.format("none")):
        get_average(optax.adam(0.1).init(start()))
    twice = optax.chain(average_params(functavg.SWA()), average_params(functavg.EMA(0.9)))
    with pytest.raises(ValueError, match=message.format("2")):
        get_average(twice.init(start()))


def test_several_averages_count_as_one():
    rule = functavg.Several({"a": functavg.SWA(), "b": functavg.EMA(0.9)})
    assert get_average(average_params(rule).init(start())).keys() == {"a", "b"}


def test_params_that_do_not_fit_are_named():
    optimizer = average_params(functavg.EMA(0.9))
    state = optimizer.init(start())
    params = start() | {"a": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"tree\['a'\]: expected shape \(2,\), got \(3,\)"):
        optimizer.update(params, state, params)


def test_without_optax_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    message = r"functavg\.integrations\.optax needs optax, which is not installed: pip install 'functavg\[optax\]'"
    for call in (lambda: average_params(functavg.EMA(0.9)), lambda: get_average(())):
        with pytest.raises(ImportError, match=message):
            call()


def test_the_module_imports_optax_only_when_it_is_used():
    script = "import sys, functavg.integrations.optax; print({'jax', 'optax', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
