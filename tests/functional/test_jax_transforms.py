"""Rules go through jax.jit, lax.scan, vmap and donation, and give what they give eagerly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import functavg
from functavg import AverageState
from functavg.kernels import array_api, eager_jax
from tests import oracle
from tests.composition import nests
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


# ---- combinators, against the oracle of nests

COMBINED = [name for name in nests.ON_DEVICE if name not in RULES or name == "LAWA"]
STEPS = [1, 2, 1, 3, 1, 4]


def iterates() -> list[Any]:
    """Return what ``init`` sees and the iterates of a run, as numpy arrays of float32; the third one has a NaN."""
    stream = [jax.tree_util.tree_map(np.float32, nests.iterate(seed)) for seed in range(len(STEPS) + 1)]
    stream[3]["b"] = np.float32(np.nan)
    return stream


def assert_of_nest(state: Any, nest: Any, steps: list[int]) -> None:
    """Assert that a state is what the oracle says of the stream."""
    first, *stream = iterates()
    told = list(zip(steps, stream, strict=True))
    assert int(state.count) == nests.count(nest, list(first), told)
    jax.tree_util.tree_map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=2e-6),
        state.average,
        nests.average(nest, first, told),
    )


@pytest.mark.parametrize("name", COMBINED)
def test_a_jitted_combinator_traces_once(name: str) -> None:
    """From host counts on: no type of a count changes from the first update to the second."""
    rule = nests.rule_of(nests.ON_DEVICE[name])
    traces = []

    @jax.jit
    def step(params: Any, state: Any, steps: Any) -> Any:
        traces.append(1)
        return rule.update(params, state, steps=steps)

    first, *stream = jax.tree_util.tree_map(jnp.asarray, iterates())
    state = rule.init(first)
    for steps, params in zip(STEPS, stream, strict=True):
        state = step(params, state, steps)
    assert_of_nest(state, nests.ON_DEVICE[name], STEPS)
    assert len(traces) == 1


@pytest.mark.parametrize("name", COMBINED)
def test_scan_carries_the_state_of_a_combinator(name: str) -> None:
    """Also one whose counts are host numbers still."""
    rule = nests.rule_of(nests.ON_DEVICE[name])
    first, *stream = jax.tree_util.tree_map(jnp.asarray, iterates())
    stacked = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *stream)
    state, _ = jax.lax.scan(lambda state, params: (rule.update(params, state), None), rule.init(first), stacked)
    assert_of_nest(state, nests.ON_DEVICE[name], [1] * len(STEPS))


@pytest.mark.parametrize("name", COMBINED)
def test_vmap_over_members_that_count_for_themselves(name: str) -> None:
    rule = nests.rule_of(nests.ON_DEVICE[name])
    first, *stream = jax.tree_util.tree_map(jnp.asarray, iterates())
    members = [rule.init(first), rule.update(stream[0], rule.init(first), steps=3)]
    news = stream[1:3]
    stack = jax.tree_util.tree_map(lambda *leaves: jnp.stack(jax.tree_util.tree_map(jnp.asarray, leaves)), *members)
    after = jax.jit(jax.vmap(rule.update))(jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *news), stack)
    for index, (new, member) in enumerate(zip(news, members, strict=True)):
        wanted = rule.update(new, jax.tree_util.tree_map(jnp.asarray, member))
        got = jax.tree_util.tree_map(lambda leaf, index=index: leaf[index], after)
        jax.tree_util.tree_map(lambda *pair: np.testing.assert_allclose(*pair, rtol=2e-6), got, wanted)


@pytest.mark.parametrize("name", [*COMBINED, "EMA"])
def test_a_donated_state_is_written_over(name: str) -> None:
    """The new average lives where the old one did, of which nothing is left to read."""
    rule = nests.rule_of(nests.ON_DEVICE[name])
    update = jax.jit(rule.update, donate_argnums=(1,))
    first, *stream = jax.tree_util.tree_map(jnp.asarray, iterates())
    state = rule.init(first)
    for params in stream:
        before, places = state.average, None
        if state.count:
            places = {leaf.unsafe_buffer_pointer() for leaf in jax.tree_util.tree_leaves(before)}
        state = update(params, state)
        assert all(leaf.is_deleted() for leaf in jax.tree_util.tree_leaves(before))
        if places is not None:
            assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree_util.tree_leaves(state.average)} <= places
    assert_of_nest(state, nests.ON_DEVICE[name], [1] * len(STEPS))


# ---- many steps, against optax and a sum


@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_a_debiased_ema_is_that_of_optax(decay: float) -> None:
    """Over 2000 steps of float32, to 3e-5: optax divides by ``1 - d^n``, formed in float32. Ours is the sum to 2e-6."""
    optax = pytest.importorskip("optax")
    stream = np.random.default_rng(0).normal(1.0, 0.5, (2000, 8)).astype(np.float32)
    rule, theirs = functavg.EMA(decay, debias=True), optax.ema(decay, debias=True)

    def step(carry: Any, new: Any) -> Any:
        state, other = carry
        average, other = theirs.update(new, other)
        state = rule.update(new, state)
        return (state, other), (state.average, average)

    start = rule.init(jnp.zeros(8)), theirs.init(jnp.zeros(8))
    _, (ours, others) = jax.lax.scan(step, start, jnp.asarray(stream))
    np.testing.assert_allclose(ours, others, rtol=3e-5)
    for length in (1, 2, 10, 500, 2000):
        weights = oracle.debiased_ema(decay)([1] * length)[1:]
        np.testing.assert_allclose(ours[length - 1], weights @ stream[:length].astype(np.float64), rtol=2e-6)


def test_a_step_without_a_count_is_that_of_optax() -> None:
    """``lerp`` and a constant decay that is trusted from the first call, over 2000 steps."""
    optax = pytest.importorskip("optax")
    stream = jnp.asarray(np.random.default_rng(0).normal(1.0, 0.5, (2000, 8)), jnp.float32)
    rule = functavg.EMA(functavg.schedules.Constant(0.995))

    def step(carry: Any, new: Any) -> Any:
        ours, state, theirs = carry
        return (
            functavg.lerp(ours, new, 0.005),
            rule.update(new, state),
            optax.incremental_update(new, theirs, 0.005),
        ), ()

    start = jnp.zeros(8)
    (ours, state, theirs), _ = jax.lax.scan(step, (start, rule.init(start), start), stream)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(state.average, theirs, rtol=1e-5)
    left = 0.995 ** np.arange(1999, -1, -1.0)
    np.testing.assert_allclose(ours, (0.005 * left) @ np.asarray(stream, np.float64), rtol=2e-6)


def test_an_average_of_bfloat16_moves_in_float32() -> None:
    """1000 steps of 1/1000 each, all of which bfloat16 would round away."""
    rule = functavg.EMA(0.999)
    state = rule.update(jnp.ones(4, jnp.bfloat16), rule.init(jnp.ones(4, jnp.bfloat16)))
    new = jnp.full(4, 1.5, jnp.bfloat16)
    state, _ = jax.lax.scan(lambda state, _: (rule.update(new, state), None), state, length=1000)
    assert state.average.dtype == jnp.float32
    np.testing.assert_allclose(state.average, 1.5 - 0.5 * 0.999**1000, rtol=2e-6)
    assert functavg.cast_like(state.average, new).dtype == jnp.bfloat16


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


@pytest.mark.parametrize("name", ["EMA", "Latest", "SWA"])
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


def test_an_ensemble_trains_and_averages_in_one_vmapped_step() -> None:
    """value_and_grad and the update inside vmap, inside scan, inside jit, donated."""
    rule = functavg.Several({"ema": functavg.Every(functavg.EMA(0.5), 2), "swa": functavg.SWA()})

    def step(carry: Any, _: Any) -> Any:
        weights, state = carry
        weights = weights - 0.1 * jax.grad(lambda weights: (weights**2).sum())(weights)
        return (weights, rule.update(weights, state)), weights

    def epoch(weights: Any, state: Any) -> Any:
        return jax.lax.scan(step, (weights, state), length=4)

    weights = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    state = jax.vmap(rule.init)(weights)
    (_, state), seen = jax.jit(jax.vmap(epoch), donate_argnums=(0, 1))(weights, state)
    history = np.asarray([[1.0, 2.0], [3.0, 4.0]])[:, None] * 0.8 ** np.arange(1, 5)[:, None]
    np.testing.assert_allclose(seen, history, rtol=1e-6)
    np.testing.assert_allclose(state.average["swa"], history.mean(1), rtol=1e-6)
    np.testing.assert_allclose(state.average["ema"], 0.25 * history[:, 1] + 0.75 * history[:, 3], rtol=1e-6)
    assert state.count.tolist() == [4, 4]


def test_init_inside_jit_casts_and_copies() -> None:
    state = jax.jit(functavg.EMA().init)(params(2.0))
    assert state.average["h"].dtype == jnp.float32
    assert state.count == 0


# ---- outside any trace: one jitted call

KINDS_OF_PAIRS = {
    "float32": ("float32", "float32"),
    "wider": ("float32", "bfloat16"),
    "float8": ("float32", "float8_e4m3fn"),
    "narrow": ("bfloat16", "float32"),
    "half": ("float16", "float16"),
    "complex": ("complex64", "complex64"),
    "real into complex": ("complex64", "float32"),
    "whole": ("float32", "int32"),
    "int32": ("int32", "int32"),
    "bool": ("bool", "bool"),
}


def enabled_x64() -> Any:
    """Return the context in which JAX has 64 bits, by its name before JAX 0.8 or since."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def compiled() -> int:
    """Return how many times a step of uncommitted arrays was compiled."""
    return eager_jax._jitted(None)._cache_size()


def pair(old: str, new: str) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return tuple(jnp.asarray(generator.normal(0, 3, 257)).astype(dtype) for dtype in (old, new))


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.1, 0.001, 1 / 3, 1.5, -0.5])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS_OF_PAIRS)
def test_one_call_is_the_readable_step_to_the_last_place(kind: str, on_device: bool, weight: float) -> None:
    """Of the largest of what goes in and what comes out: the compiler may round product and sum in one."""
    old, new = pair(*KINDS_OF_PAIRS[kind])
    scalar = jnp.asarray(weight, jnp.float32) if on_device else weight
    stepped = functavg.lerp({"w": old, "n": jnp.asarray(3)}, {"w": new, "n": jnp.asarray(5)}, scalar)["w"]
    wanted = array_api.lerp_leaf(old, new, scalar)
    assert stepped.dtype == wanted.dtype == old.dtype
    if weight in (0, 1) or old.dtype.kind in "ib":
        np.testing.assert_array_equal(read(stepped), read(wanted))
        return
    largest = np.maximum(np.maximum(abs(read(old)), abs(read(new))), abs(read(wanted)))
    unit = largest * 2.0 * float(jnp.finfo(old.dtype).eps)
    assert (abs(read(stepped) - read(wanted)) <= unit).all()
    assert (stepped != old).any()


@pytest.mark.parametrize("weight", [0.3, jnp.float32(0.3)], ids=["host", "device"])
def test_one_call_keeps_what_is_equal(weight: Any) -> None:
    old, _ = pair("float32", "float32")
    np.testing.assert_array_equal(functavg.lerp(old, old + 0, weight), old)


def test_changing_weights_compile_once() -> None:
    """Those of 100 updates, whatever kinds of numbers they are, the first of which copies."""
    rule, before = functavg.PowerEMA(6.0), compiled()
    state = rule.init({"compile once": jnp.zeros(5), "n": jnp.asarray(1)})
    for step in range(100):
        params = {"compile once": jnp.full(5, float(step), jnp.float32), "n": jnp.asarray(step)}
        state = rule.update(params, state, steps=1 + step % 3)
    assert compiled() - before == 1
    average = state.average
    for weight in (0.25, np.float32(0.5), np.float64(0.75), 2):
        average = functavg.lerp(average, params, weight)
    assert compiled() - before == 1


def test_weak_types_do_not_compile_anew() -> None:
    """Neither those of weights on a device, nor those of arrays."""
    strong, weak = jnp.asarray(0.5, jnp.float32), jnp.asarray(0.5)
    assert (strong.weak_type, weak.weak_type) == (False, True)
    before = compiled()
    for weight in (strong, weak, strong + 0.1):
        for old in (jnp.full(11, 2.0), jnp.full(11, 2.0, jnp.float32)):
            for new in (jnp.full(11, 4.0), jnp.full(11, 4.0, jnp.float32)):
                stepped = functavg.lerp([old], [new], weight)
                assert not stepped[0].weak_type
                np.testing.assert_allclose(stepped[0], 2 + 2 * float(weight), rtol=1e-6)
    assert compiled() - before == 1


def test_several_averages_take_one_call() -> None:
    """With counts on the host and on the device, and an average that stays among them."""
    rules = {"ema": functavg.EMA(0.5), "swa": functavg.SWA(), "frozen": functavg.Freeze(), "newest": functavg.Latest()}
    rule = functavg.Several(rules)
    host, device = rule.init(params(0.0)), jax.tree_util.tree_map(jnp.asarray, rule.init(params(0.0)))
    frozen = host.average["frozen"]
    before = compiled()
    for value in VALUES:
        host, device = rule.update(params(value), host), rule.update(params(value), device)
    assert compiled() - before == 2  # numbers as weights, arrays as weights
    assert all(host.average["frozen"][name] is leaf for name, leaf in frozen.items())
    for name, single in rules.items():
        wanted = eager_run(single).average
        assert_equal(host.average[name], wanted)
        assert_equal(device.average[name], wanted)


@pytest.mark.parametrize("weight", [1.0, 0.5, jnp.float32(1.0), jnp.float32(0.0)], ids=str)
def test_no_result_shares_memory_with_what_went_in(weight: Any) -> None:
    """Arrays that are donated or deleted take nothing with them, integers among them."""
    old, new = params(1.0), params(3.0)
    stepped = functavg.lerp(old, new, weight)
    wanted = {name: np.asarray(leaf).copy() for name, leaf in stepped.items()}
    for leaf in (*old.values(), *new.values()):
        leaf.delete()
    for name, leaf in stepped.items():
        np.testing.assert_array_equal(leaf, wanted[name])


def test_what_is_not_committed_to_its_device_stays_so() -> None:
    """Also beside arrays that are: an average is as free to be moved as what it was made from."""
    device = jax.devices()[0]
    free, bound = jnp.zeros(2), jax.device_put(jnp.zeros(2), device)
    state = functavg.lerp({"a": free, "b": bound}, {"a": jnp.ones(2), "b": jnp.ones(2)}, 0.5)
    assert (state["a"].committed, state["b"].committed) == (False, True)
    assert functavg.lerp([free], [bound], 0.5)[0].committed


def test_averages_and_params_may_be_sharded_each_in_its_own_way() -> None:
    """Here over a mesh of one device, which is another sharding than that device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    plain, sharded = jnp.zeros(2), jax.device_put(jnp.zeros(2), sharding)
    rule = functavg.Several({"one": functavg.EMA(0.75, start="init"), "other": functavg.EMA(0.5, start="init")})
    state = rule.init({"w": plain})._replace(average={"one": {"w": plain}, "other": {"w": sharded}})
    for new in (jnp.ones(2), jax.device_put(jnp.ones(2), sharding)):
        average = rule.update({"w": new}, state).average
        assert average["one"]["w"].tolist() == [0.25, 0.25]
        assert average["other"]["w"].tolist() == [0.5, 0.5]
        assert average["one"]["w"].sharding == plain.sharding
        assert average["other"]["w"].sharding == sharding


def test_integers_are_finite_beside_what_need_not_be() -> None:
    rule = functavg.SkipNonFinite(functavg.SWA())
    state = rule.init({"steps": jnp.array([3]), "w": jnp.zeros(2)})
    for value, count in ((1.0, 1), (np.nan, 1), (3.0, 2)):
        state = rule.update({"steps": jnp.array([4]), "w": jnp.full(2, value)}, state)
        assert state.count == count
    assert state.average["w"].tolist() == [2.0, 2.0]


def test_steps_of_64_bits_are_those_of_numpy() -> None:
    with enabled_x64():
        old, new = jnp.asarray([0.1, 0.2]), jnp.asarray([0.7, 0.9])
        stepped = functavg.lerp(old, new, 1 / 3)
        assert stepped.dtype == jnp.float64
        np.testing.assert_allclose(stepped, np.asarray(old) * 2 / 3 + np.asarray(new) / 3, rtol=1e-15)


def test_one_call_is_made_of_arrays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While something is traced, leaves or weight, each leaf takes its own step."""
    calls: list[int] = []
    step = eager_jax.step
    monkeypatch.setattr(eager_jax, "step", lambda *args: (calls.append(1), step(*args))[1])
    one, other = jnp.zeros(2), jnp.ones(2)
    functavg.lerp(one, other, 0.5)
    assert len(calls) == 1
    jax.jit(functavg.lerp)(one, other, 0.5)
    jax.vmap(lambda weight: functavg.lerp(one, other, weight))(jnp.ones(3))
    jax.grad(lambda new: functavg.lerp(one, new, 0.5).sum())(other)
    jax.vmap(lambda new: functavg.lerp(one, new, 0.5))(jnp.ones((3, 2)))
    assert len(calls) == 1
    np.testing.assert_array_equal(jax.jit(lambda: functavg.lerp(one, other, 0.5))(), 0.5)
