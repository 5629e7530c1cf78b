"""Choose the width of an average after training: track two power-function EMAs, synthesise all others from snapshots.

python examples/posthoc.py [--steps 2250] [--output posthoc.png]
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from functavg import AverageState, PowerEMA, Several
from functavg.posthoc import combine, solve

INTERVAL = 75  # steps between snapshots
TRACKED = Several({"narrow": PowerEMA.from_sigma_rel(0.05), "wide": PowerEMA.from_sigma_rel(0.10)})
DIRECT = PowerEMA.from_sigma_rel(0.18)  # tracked as well, and only to be compared with what is synthesised
WIDTHS = np.round(np.arange(0.02, 0.285, 0.01), 2)


def digits() -> list[Tensor]:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, train_size=600, stratify=labels, random_state=0)
    return [torch.tensor(part, dtype=torch.float32 if part.ndim == 2 else torch.int64) for part in split]


def train(
    model: nn.Module, train_x: Tensor, train_y: Tensor, steps: int
) -> tuple[list[tuple[PowerEMA, int]], list[dict[str, Tensor]], AverageState[dict[str, Tensor]]]:
    """Train, and return what the snapshots are of, the snapshots, and the average that was tracked directly."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    params = dict(model.named_parameters())
    state, direct = TRACKED.init(params), DIRECT.init(params)
    kept: list[tuple[PowerEMA, int]] = []
    snapshots: list[dict[str, Tensor]] = []
    for step in track(range(1, steps + 1), "step"):
        batch = torch.randint(len(train_x), (4,))
        noisy = train_x[batch] + 0.3 * torch.randn(4, 64)
        optimizer.zero_grad()
        cross_entropy(model(noisy), train_y[batch]).backward()
        optimizer.step()
        state, direct = TRACKED.update(params, state), DIRECT.update(params, direct)
        if step % INTERVAL == 0:
            # Updates are pure, so an average is kept by keeping its state. That of a large model would go to disk.
            kept += [(rule, state.count) for rule in TRACKED.rules.values()]
            snapshots += state.average.values()
    return kept, snapshots, direct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2250)
    parser.add_argument("--output", type=Path, default=Path("posthoc.png"))
    options = parser.parse_args()
    if options.steps < INTERVAL:
        parser.error(f"--steps must be at least {INTERVAL}, got {options.steps}")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the net is so small that more threads would mostly wait for each other
    train_x, held_out_x, train_y, held_out_y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    kept, snapshots, direct = train(model, train_x, train_y, options.steps)

    def loss(weights: dict[str, Tensor]) -> float:
        with torch.no_grad():
            return cross_entropy(functional_call(model, weights, (held_out_x,)), held_out_y).item()

    losses, residuals = [], []
    for width in WIDTHS:
        found = solve(kept, (PowerEMA.from_sigma_rel(width), direct.count))
        losses.append(loss(combine(snapshots, found.coefficients)))
        residuals.append(found.residual)

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(WIDTHS, losses, color="#0072b2", linewidth=2, marker=".", label="synthesised after training")
    tracked = {0.05: snapshots[-2], 0.10: snapshots[-1], 0.18: direct.average}
    tracked_losses = [loss(weights) for weights in tracked.values()]
    axes.plot(
        list(tracked), tracked_losses, "o", color="#d55e00", markersize=9, fillstyle="none", label="tracked in training"
    )
    axes.axhline(loss(dict(model.named_parameters())), color="0.6", linestyle=":", label="last iterate")
    axes.set(title="Loss on held-out images by the width of the power-function EMA", xlabel="sigma_rel", ylabel="loss")
    axes.legend(frameon=False)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.output, dpi=150)

    table = Table(title=f"{len(snapshots)} snapshots of 2 averages, {direct.count} steps")
    for column in ("sigma_rel", "expected residual", "held-out loss", "tracked in training"):
        table.add_column(column, justify="right")
    of_width = dict(zip(tracked, tracked_losses, strict=True))
    best = int(np.argmin(losses))
    for index in sorted({0, 3, 8, 16, len(WIDTHS) - 1, best}):
        width = float(WIDTHS[index])
        compared = f"{of_width[width]:.4f}" if width in of_width else ""
        mark = " (best)" if index == best else ""
        table.add_row(f"{width:.2f}{mark}", f"{residuals[index]:.4f}", f"{losses[index]:.4f}", compared)
    console = Console()
    console.print(table)
    console.print(f"curve: {options.output.resolve()}", soft_wrap=True)


if __name__ == "__main__":
    main()
