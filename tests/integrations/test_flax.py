"""Recipes for Flax NNX and Orbax: real training on handwritten digits, an average beside it, a run that is resumed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import functavg
from functavg.integrations.optax import average_params, get_average
from tests import oracle

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
jnp = jax.numpy

DECAY, BATCH = 0.95, 50


class Net(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(jax.nn.relu(self.norm(self.hidden(x))))


@nnx.jit
def step(model: Any, optimizer: Any, images: Any, labels: Any) -> None:
    def loss(model: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def batches(count: int) -> Any:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    images = (images / 16).astype(np.float32)
    for _ in range(count):
        chosen = generator.integers(0, 1000, BATCH)
        yield jnp.asarray(images[chosen]), jnp.asarray(labels[chosen])


def accuracy(model: Any) -> float:
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    model.eval()
    correct = model(jnp.asarray(images[1000:] / 16)).argmax(1) == labels[1000:]
    model.train()
    return float(correct.mean())


def make() -> tuple[Any, Any]:
    model = Net(nnx.Rngs(0))
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), average_params(functavg.EMA(DECAY)))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def params_of(model: Any) -> dict[Any, np.ndarray]:
    return {path: np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.slow
def test_an_average_in_the_optimizer_is_the_weighted_sum_and_evaluates_in_a_copy_of_the_model():
    model, optimizer = make()
    seen = [params_of(model)]
    for images, labels in batches(120):
        step(model, optimizer, images, labels)
        seen.append(params_of(model))
    averaged = nnx.clone(model)
    nnx.update(averaged, get_average(optimizer.opt_state))

    weights, found = oracle.ema(DECAY)([1] * 120), params_of(averaged)
    for path, value in found.items():
        wanted = oracle.average(weights, [params[path] for params in seen])
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    assert accuracy(averaged) > 0.9
    assert accuracy(averaged) >= accuracy(model) - 0.02
    step(model, optimizer, images, labels)  # training goes on beside the copy
    for path, value in params_of(averaged).items():
        np.testing.assert_array_equal(value, found[path])


@pytest.mark.slow
def test_a_state_of_params_and_statistics_merges_into_a_model():
    """By a rule alone, in the jitted step, with the statistics of BatchNorm averaged, too."""
    model, optimizer = make()
    rule = functavg.EMA(DECAY)
    kinds = nnx.Any(nnx.Param, nnx.BatchStat)
    state = rule.init(nnx.state(model, kinds))
    update = nnx.jit(lambda model, state: rule.update(nnx.state(model, kinds), state))
    means = [np.asarray(model.norm.mean[...], np.float64)]
    for images, labels in batches(120):
        step(model, optimizer, images, labels)
        state = update(model, state)
        means.append(np.asarray(model.norm.mean[...], np.float64))
    assert int(state.count) == 120

    definition, _, rest = nnx.split(model, kinds, ...)
    averaged = nnx.merge(definition, state.average, rest)
    wanted = oracle.average(oracle.ema(DECAY)([1] * 120), means)
    np.testing.assert_allclose(averaged.norm.mean[...], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        averaged.out.kernel[...], get_average(optimizer.opt_state)["out"]["kernel"][...], rtol=1e-5, atol=1e-6
    )
    assert type(averaged.out.kernel) is nnx.Param
    assert accuracy(averaged) > 0.9


@pytest.mark.slow
def test_a_run_resumed_from_orbax_ends_in_the_same_bits(tmp_path):
    """Model, momentum and average are one tree."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    data = list(batches(8))
    model, optimizer = make()
    for images, labels in data[:4]:
        step(model, optimizer, images, labels)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step4", nnx.state((model, optimizer)))
    for images, labels in data[4:]:
        step(model, optimizer, images, labels)

    resumed = make()
    with checkpoint.StandardCheckpointer() as checkpointer:
        nnx.update(resumed, checkpointer.restore(tmp_path / "step4", nnx.state(resumed)))
    for images, labels in data[4:]:
        step(*resumed, images, labels)
    jax.tree_util.tree_map(np.testing.assert_array_equal, nnx.state((model, optimizer)), nnx.state(resumed))
    assert int(nnx.as_pure(optimizer.opt_state)[-1].count) == 8
