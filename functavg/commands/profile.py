"""``functavg profile``."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from functavg.checkpoints import CheckpointError, parse_rule
from functavg.commands.options import Json
from functavg.commands.showing import show_json, show_table
from functavg.profiles import Profile
from functavg.profiles import profile as profile_of

FIGURES = ("mean_age", "std", "sigma_rel", "half_life", "effective_iterates", "initial")


def profile(
    rules: Annotated[
        list[str], typer.Argument(help="Rules, such as ema:0.999 or power:sigma_rel=0.1.", show_default=False)
    ],
    steps: Annotated[int, typer.Option("--steps", "-n", min=1, help="The number of updates.")] = 10_000,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="A picture of the weights to draw, such as out.png.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what averages remember: how old they are, how wide, how many iterates they are worth.

    Examples:
    functavg profile ema:0.999 power:sigma_rel=0.1 --steps 50000 --plot profiles.png

    functavg profile 'every(swa(), 100)'
    """
    found = [each for text in rules for each in _flat(profile_of(parse_rule(text), steps), text)]
    if plot is not None:
        _draw([it for _, it in found], plot)
    if as_json:
        show_json(
            [{"rule": name, "steps": it.steps, **{key: getattr(it, key) for key in FIGURES}} for name, it in found]
        )
        return
    rows = [(name, *(f"{getattr(it, key):.4g}" for key in FIGURES)) for name, it in found]
    show_table(("rule", *(key.replace("_", " ") for key in FIGURES)), rows, f"after {steps} steps, ages in steps")


def _flat(found: Any, name: str) -> list[tuple[str, Profile]]:
    """Return the profiles of all averages of a rule, by name."""
    if isinstance(found, Mapping):
        return [each for key, inner in found.items() for each in _flat(inner, f"{name} {key}")]
    return [(name, found)]


def _draw(profiles: list[Profile], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install 'functavg[plot]'") from error
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for each in profiles:
        each.plot(axes)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: the picture cannot be written: {error}") from error
