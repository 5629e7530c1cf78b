"""Train a net on handwritten digits in pure JAX and average it in the same jitted step, by EMA and by SWA.

An epoch is one call: a scan over its batches, with the weights, their momentum and both averages donated to it. The
state of the averages goes through it like any other tree, and is traced once. The learning rate is kept high, so the
trained net gets better and worse from one epoch to the next, and the averages hardly do.

Needs jax beside what the other examples need (pip install jax).

    python examples/jax_loop.py [--epochs 30] [--seed 0] [--output jax_loop.png]
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import functavg

BATCH, LEARNING_RATE, MOMENTUM = 16, 0.1, 0.9
COLOURS = {"raw": "0.6", "SWA": "#0072b2", "EMA": "#d55e00"}

Params = dict[str, jax.Array]
History = dict[str, list[tuple[int, float, float]]]
"""Epoch, test accuracy in percent and test loss, for each set of weights."""


def digits() -> list[jax.Array]:
    """Return 592 images of 64 pixels to train on, the other 1205 to test on, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, train_size=592, stratify=labels, random_state=0)
    return [
        jnp.asarray(part, dtype) for part, dtype in zip(split, ("float32", "float32", "int32", "int32"), strict=True)
    ]


def net(key: jax.Array, width: int = 128) -> Params:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (64, width)) * (2 / 64) ** 0.5,
        "b1": jnp.zeros(width),
        "w2": jax.random.normal(second, (width, 10)) * (1 / width) ** 0.5,
        "b2": jnp.zeros(10),
    }


def logits(params: Params, images: jax.Array) -> jax.Array:
    return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, images)), labels[:, None], 1).mean()


@jax.jit
def evaluate(params: Params, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the accuracy in percent and the loss."""
    return 100 * (logits(params, images).argmax(1) == labels).mean(), loss(params, images, labels)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def epoch(rule: functavg.AveragingRule, carry: Any, key: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
    """Return weights, momentum and averages after one pass over noisy images in random order."""
    order_key, noise_key = jax.random.split(key)
    order = jax.random.permutation(order_key, len(images)).reshape(-1, BATCH)
    noise = 0.3 * jax.random.normal(noise_key, (*order.shape, images.shape[1]))

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, momentum, state = carry
        chosen, noise = batch
        gradients = jax.grad(loss)(params, images[chosen] + noise, labels[chosen])
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
        params = jax.tree.map(lambda p, m: p - LEARNING_RATE * m, params, momentum)
        return (params, momentum, rule.update(params, state)), None

    return jax.lax.scan(step, carry, (order, noise))[0]


def train(epochs: int, swa_start: int, seed: int) -> History:
    """Train, and return how the raw, the SWA and the EMA weights did after each epoch."""
    train_x, test_x, train_y, test_y = digits()
    steps = len(train_x) // BATCH
    # SWA is the mean of one snapshot per epoch, from the end of the epoch swa_start on.
    swa = functavg.Every(functavg.SWA(), steps, start=steps * (swa_start - 1))
    rule = functavg.Several({"SWA": swa, "EMA": functavg.EMA(0.995)})

    key, net_key = jax.random.split(jax.random.key(seed))
    params = net(net_key)
    carry = params, jax.tree.map(jnp.zeros_like, params), rule.init(params)
    history: History = {name: [] for name in COLOURS}
    for number in range(1, epochs + 1):
        key, epoch_key = jax.random.split(key)
        carry = epoch(rule, carry, epoch_key, train_x, train_y)
        params, _, state = carry
        for name, weights in {"raw": params, **state.average}.items():
            if name == "raw" or state.memory[name].count > 0:
                accuracy, test_loss = evaluate(weights, test_x, test_y)
                history[name].append((number, float(accuracy), float(test_loss)))
    return history


def table(history: History) -> Table:
    view = Table(title="Test set after the last epoch")
    view.add_column("weights")
    for column in ("accuracy", "loss", "accuracy in the last 10 epochs"):
        view.add_column(column, justify="right")
    for name, rows in history.items():
        _, accuracy, test_loss = rows[-1]
        recent = [accuracy for _, accuracy, _ in rows[-10:]]
        view.add_row(name, f"{accuracy:.2f} %", f"{test_loss:.4f}", f"{min(recent):.2f} to {max(recent):.2f} %")
    return view


def plot(history: History, path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    accuracy_axes, loss_axes = figure.subplots(1, 2)
    for name, rows in history.items():
        epochs, accuracies, losses = zip(*rows, strict=True)
        width = 1.2 if name == "raw" else 2
        for axes, values in ((accuracy_axes, accuracies), (loss_axes, losses)):
            axes.plot(epochs, values, color=COLOURS[name], linewidth=width, marker=".", label=name)
    for axes, title in ((accuracy_axes, "test accuracy (%)"), (loss_axes, "test loss")):
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    (swa_start, *_), *_ = history["SWA"]
    settled = [accuracy for rows in history.values() for epoch, accuracy, _ in rows if epoch >= swa_start]
    accuracy_axes.set_ylim(min(settled) - 1, 100)
    loss_axes.set_yscale("log")
    loss_axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss_axes.yaxis.set_major_formatter("{x:g}")
    loss_axes.yaxis.set_minor_locator(NullLocator())
    accuracy_axes.legend(frameon=False, loc="lower right")
    figure.suptitle("One training run on handwritten digits in JAX, three sets of weights")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("jax_loop.png"))
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")
    history = train(options.epochs, 1 + options.epochs // 3, options.seed)
    plot(history, options.output)
    console = Console()
    console.print(table(history))
    console.print(f"curves: {options.output.resolve()}", soft_wrap=True)


if __name__ == "__main__":
    main()
