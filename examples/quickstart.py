"""Train a small convolutional net on handwritten digits and average it twice in the same run, by SWA and by EMA.

The learning rate is kept high, so the weights never come to rest: the trained net gets better and worse from one epoch
to the next. Both averages come from the same run, and neither changes the training.

    python examples/quickstart.py [--epochs 30] [--seed 0] [--output quickstart.png]
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import functavg
from functavg.swa_utils import SWALR

COLOURS = {"raw": "0.6", "SWA": "#0072b2", "EMA": "#d55e00"}

History = dict[str, list[tuple[int, float, float]]]
"""Epoch, test accuracy in percent and test loss, for each set of weights."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 600 images of 8 x 8 pixels to train on and the other 1197 to test on, the same at every call."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8),
        torch.tensor(labels),
        train_size=600,
        stratify=labels,
        random_state=0,
    )
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def net() -> nn.Module:
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    body = [*block(1, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Return the accuracy in percent and the loss."""
    images, labels = data.tensors
    model.eval()
    logits = model(images)
    return 100 * (logits.argmax(1) == labels).double().mean().item(), cross_entropy(logits, labels).item()


def train(epochs: int, swa_start: int) -> History:
    """Train, and return how the raw, the SWA and the EMA weights did after each epoch."""
    train_data, test_data = digits()
    loader = DataLoader(train_data, batch_size=16, shuffle=True)
    large_batches = DataLoader(train_data, batch_size=200)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = SWALR(optimizer, swa_lr=0.2, anneal_epochs=5)

    swa = functavg.AveragedModel(model)  # the mean of one snapshot per epoch
    ema = functavg.AveragedModel(model, rule=functavg.EMA(0.995))
    ema.attach(optimizer, model)  # updates after every optimizer step
    raw = functavg.AveragedModel(model, rule=functavg.Latest())  # the trained weights, evaluated just like the averages

    history: History = {name: [] for name in COLOURS}
    columns = [TextColumn("epoch"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.description}")) as progress:
        task = progress.add_task("", total=epochs)
        for epoch in range(1, epochs + 1):
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                cross_entropy(model(images), labels).backward()
                optimizer.step()
            scheduler.step()
            raw.update_parameters(model)
            if epoch >= swa_start:
                swa.update_parameters(model)

            for name, averaged in (("raw", raw), ("SWA", swa), ("EMA", ema)):
                if averaged.n_averaged > 0:
                    functavg.update_bn(large_batches, averaged)  # the statistics of BatchNorm that fit these weights
                    history[name].append((epoch, *evaluate(averaged, test_data)))
            latest = "  ".join(f"{name} {rows[-1][1]:.2f}" for name, rows in history.items() if rows)
            progress.update(task, advance=1, description=f"test accuracy: {latest}")
    return history


def table(history: History) -> Table:
    view = Table(title="Test set after the last epoch")
    view.add_column("weights")
    for column in ("accuracy", "loss", "accuracy in the last 10 epochs"):
        view.add_column(column, justify="right")
    for name, rows in history.items():
        _, accuracy, loss = rows[-1]
        recent = [accuracy for _, accuracy, _ in rows[-10:]]
        view.add_row(name, f"{accuracy:.2f} %", f"{loss:.4f}", f"{min(recent):.2f} to {max(recent):.2f} %")
    return view


def plot(history: History, swa_start: int, path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    accuracy_axes, loss_axes = figure.subplots(1, 2)
    for name, rows in history.items():
        epochs, accuracies, losses = zip(*rows, strict=True)
        width = 1.2 if name == "raw" else 2
        for axes, values in ((accuracy_axes, accuracies), (loss_axes, losses)):
            axes.plot(epochs, values, color=COLOURS[name], linewidth=width, marker=".", label=name)
    for axes, title in ((accuracy_axes, "test accuracy (%)"), (loss_axes, "test loss")):
        axes.axvline(swa_start, color="0.8", linestyle=":", zorder=0)
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    settled = [accuracy for rows in history.values() for epoch, accuracy, _ in rows if epoch >= swa_start]
    accuracy_axes.set_ylim(min(settled) - 1, 100)
    loss_axes.set_yscale("log")
    loss_axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss_axes.yaxis.set_major_formatter("{x:g}")
    loss_axes.yaxis.set_minor_locator(NullLocator())
    loss_axes.text(swa_start, 0.97, " SWA starts", color="0.4", va="top", transform=loss_axes.get_xaxis_transform())
    accuracy_axes.legend(frameon=False, loc="lower right")
    figure.suptitle("One training run on handwritten digits, three sets of weights")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("quickstart.png"))
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")
    torch.set_num_threads(1)  # the net is so small that more threads would mostly wait for each other
    torch.manual_seed(options.seed)
    swa_start = 1 + options.epochs // 3
    history = train(options.epochs, swa_start)
    plot(history, swa_start, options.output)
    console = Console()
    console.print(table(history))
    console.print(f"curves: {options.output.resolve()}", soft_wrap=True)


if __name__ == "__main__":
    main()
