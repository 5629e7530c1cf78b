"""Three half-lives and a window in one training run: what each remembers, and how well it does.

python examples/several_averages.py [--steps 2250] [--output several_averages.png]
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functavg
from functavg import EMA, LAWA, Every, Several

INTERVAL = 75  # steps between snapshots, and between evaluations

RULE = Several(
    {
        "half-life 20": EMA.from_half_life(20, debias=True),
        "half-life 100": EMA.from_half_life(100, debias=True),
        "half-life 500": EMA.from_half_life(500, debias=True),
        "last 5 snapshots": Every(LAWA(5), INTERVAL),
    }
)

COLOURS = dict(zip(["raw", *RULE.rules], ["0.6", "#56b4e9", "#0072b2", "#332288", "#d55e00"], strict=True))


def digits() -> list[Tensor]:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, train_size=600, stratify=labels, random_state=0)
    return [torch.tensor(part, dtype=torch.float32 if part.ndim == 2 else torch.int64) for part in split]


def train(steps: int) -> dict[str, list[float]]:
    """Return the test losses of the trained weights and of each average at the end of each interval."""
    train_x, test_x, train_y, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    averaged = functavg.AveragedModel(model, rule=RULE)
    averaged.attach(optimizer, model)

    def test_loss() -> float:
        with torch.no_grad():
            return cross_entropy(model(test_x), test_y).item()

    losses: dict[str, list[float]] = {name: [] for name in COLOURS}
    for step in track(range(1, steps + 1), "step"):
        batch = torch.randint(len(train_x), (4,))
        noisy = train_x[batch] + 0.3 * torch.randn(4, 64)
        optimizer.zero_grad()
        cross_entropy(model(noisy), train_y[batch]).backward()
        optimizer.step()
        if step % INTERVAL == 0:
            losses["raw"].append(test_loss())
            for name, weights in averaged.state.average.items():
                with functavg.swapped(model, weights):
                    losses[name].append(test_loss())
    return losses


def plot(losses: dict[str, list[float]], profiles: dict[str, functavg.Profile], path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    profile_axes, loss_axes = figure.subplots(1, 2)
    for name, profile in profiles.items():
        present = profile.weights > 0
        style = {"marker": "o", "linestyle": ""} if present.sum() < 20 else {"linewidth": 2}
        profile_axes.plot(profile.times[present], profile.weights[present], color=COLOURS[name], **style)
    profile_axes.set(title="weight of each iterate in the average", xlabel="step", yscale="log", ylim=(1e-5, 1))
    for name, values in losses.items():
        steps = range(INTERVAL, INTERVAL * len(values) + 1, INTERVAL)
        loss_axes.plot(steps, values, color=COLOURS[name], linewidth=1.2 if name == "raw" else 2, label=name)
    loss_axes.set(title="test loss", xlabel="step", yscale="log")
    loss_axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss_axes.yaxis.set_major_formatter("{x:g}")
    loss_axes.yaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)
    for axes in (profile_axes, loss_axes):
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2250)
    parser.add_argument("--output", type=Path, default=Path("several_averages.png"))
    options = parser.parse_args()
    if options.steps < INTERVAL:
        parser.error(f"--steps must be at least {INTERVAL}, got {options.steps}")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the net is so small that more threads would mostly wait for each other
    losses = train(options.steps)
    profiles = functavg.profile(RULE, options.steps)
    plot(losses, profiles, options.output)

    table = Table(title=f"One run of {options.steps} steps")
    table.add_column("weights")
    for column in ("mean age in steps", "effective iterates", "test loss"):
        table.add_column(column, justify="right")
    table.add_row("raw", "0", "1", f"{losses['raw'][-1]:.4f}")
    for name, profile in profiles.items():
        table.add_row(name, f"{profile.mean_age:.0f}", f"{profile.effective_iterates:.0f}", f"{losses[name][-1]:.4f}")
    console = Console()
    console.print(table)
    console.print(f"curves: {options.output.resolve()}", soft_wrap=True)


if __name__ == "__main__":
    main()
