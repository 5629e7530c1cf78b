"""What runs on two devices of JAX, which must be asked for before it starts: averages of sharded params."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import functavg

MESH = Mesh(np.array(jax.devices()), ("data",))
SPLIT, WHOLE = NamedSharding(MESH, PartitionSpec("data")), NamedSharding(MESH, PartitionSpec())
SHARDINGS = {"split": SPLIT, "low": SPLIT, "whole": WHOLE}

RULES = [
    functavg.EMA(0.5),
    functavg.LAWA(2),
    functavg.Several({"ema": functavg.EMA(0.5), "every": functavg.Every(functavg.SWA(), 2)}),
    functavg.Partition({"x": functavg.SWA(), "y": functavg.EMA(0.5)}, {"split": "x", "low": "y", "whole": "x"}),
    functavg.SkipNonFinite(functavg.PowerEMA(3.0)),
]


def params(value: float, shardings: Any = SHARDINGS) -> dict[str, jax.Array]:
    ramp = np.arange(8.0).reshape(4, 2) + value
    arrays = {"split": jnp.asarray(ramp), "low": jnp.asarray(ramp, jnp.bfloat16), "whole": jnp.asarray(ramp[0])}
    return {name: jax.device_put(array, shardings[name]) for name, array in arrays.items()}


def assert_placed(state: Any) -> None:
    """Assert that each array of an average or a memory lies as its parameter does, and that each is in float32."""
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.average, state.memory)):
        name = getattr(path[-1], "key", None)
        if name in SHARDINGS:
            assert leaf.sharding.is_equivalent_to(SHARDINGS[name], leaf.ndim), (path, leaf.sharding)
            assert leaf.dtype == jnp.float32


def compare(rule: functavg.AveragingRule) -> None:
    """Compare eager, jitted and scanned updates of sharded params with those of the same params on one device."""
    here = {name: jax.devices()[0] for name in SHARDINGS}
    alone = rule.init(params(0.0, here))
    eager, jitted = rule.init(params(0.0)), jax.jit(rule.init)(params(0.0))
    update = jax.jit(rule.update, donate_argnums=(1,))
    for value in (1.0, 4.0, 2.0):
        assert_placed(eager)
        assert_placed(jitted)
        alone = rule.update(params(value, here), alone)
        eager = rule.update(params(value), eager)
        jitted = update(params(value), jitted)
    step = jax.jit(lambda new, state: jax.lax.scan(lambda state, _: (rule.update(new, state), None), state, length=3))
    scanned, _ = step(params(1.0), jitted)
    for state in (eager, jitted, scanned):
        assert_placed(state)
    for _ in range(3):
        alone, eager = rule.update(params(1.0, here), alone), rule.update(params(1.0), eager)
    for state in (eager, scanned):
        assert int(state.count) == alone.count
        jax.tree_util.tree_map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-6), state.average, alone.average)


def compare_moved() -> None:
    """Params on one device come to the average, which stays where ``init`` put it."""
    rule = functavg.EMA(0.5)
    state = rule.update(params(0.0), rule.init(params(0.0)))
    state = rule.update(params(2.0, dict.fromkeys(SHARDINGS, jax.devices()[1])), state)
    assert_placed(state)
    np.testing.assert_allclose(state.average["split"], np.arange(8.0).reshape(4, 2) + 1.0)


def compare_mixed() -> None:
    """One tree, and averages of one stream, on several devices and shardings at once."""
    homes = [*jax.devices(), SPLIT, WHOLE]
    at = [jax.device_put(jnp.zeros(4), home) for home in homes]
    stepped = functavg.lerp(at, [jnp.ones(4)] * 4, 0.5)
    stepped = functavg.lerp(stepped, at[::-1], jnp.asarray(0.5))
    assert [leaf.device for leaf in stepped] == homes
    for leaf in stepped:
        np.testing.assert_array_equal(leaf, 0.25)
    rule = functavg.Several({"one": functavg.EMA(0.5), "other": functavg.EMA(0.5)})
    state = rule.update([jnp.zeros(4)], rule.init([jnp.zeros(4)]))
    state.average["other"] = [jax.device_put(state.average["other"][0], jax.devices()[1])]
    state = rule.update([jnp.ones(4)], state)
    assert [leaf.device for (leaf,) in state.average.values()] == jax.devices()
    for (leaf,) in state.average.values():
        np.testing.assert_array_equal(leaf, 0.5)


def main() -> None:
    assert jax.device_count() == 2
    for rule in RULES:
        compare(rule)
    compare_moved()
    compare_mixed()


if __name__ == "__main__":
    main()
