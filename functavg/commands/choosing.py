"""Which files to take, in which order."""

from __future__ import annotations

__all__: list[str] = []

import glob
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import typer

from functavg.checkpoints import CheckpointError, sort_by_step, step_of

V = TypeVar("V")


def gather(files: Sequence[Path] | None, pattern: str | None) -> list[Path]:
    """Return the files that are named and those that match a pattern.

    Raises:
        BadParameter: there are none.
    """
    found = list(files or [])
    if pattern is not None:
        matches = [Path(name) for name in glob.glob(pattern, recursive=True)]
        if not matches:
            raise typer.BadParameter(f"no file matches {pattern!r}", param_hint="--glob")
        found += [path for path in sort_by_step(matches) if path not in found]
    if not found:
        raise typer.BadParameter("name files, or a pattern with --glob", param_hint="FILES")
    return found


def oldest_first(files: Sequence[Path], values: Sequence[V]) -> tuple[list[Path], list[V]]:
    """Return files and what belongs to each in the order of their steps, where all names have one, or as they are.

    A shell lists step-1000 before step-200; the newest is where integers and metadata come from.
    """
    steps = [step_of(path) for path in files]
    if None in steps or len(set(steps)) < len(steps):
        return list(files), list(values)
    order = sorted(range(len(files)), key=lambda index: steps[index] or 0)
    return [files[index] for index in order], [values[index] for index in order]


def steps_of(files: Sequence[Path], option: str) -> list[int]:
    """Return the step in the name of each file.

    Raises:
        BadParameter: a name has none.
    """
    steps = {path: step_of(path) for path in files}
    if without := [str(path) for path, step in steps.items() if step is None]:
        raise typer.BadParameter(f"needs a step in the name of each file, {without[0]} has none", param_hint=option)
    return [step for step in steps.values() if step is not None]


def take_last(files: Sequence[Path], most: int) -> list[Path]:
    """Return the newest files by the steps in their names, oldest first."""
    steps_of(files, "--last")
    return sort_by_step(files)[-most:]


def take_best(files: Sequence[Path], most: int, scores: Path | None, lower: bool) -> list[Path]:
    """Return the files with the best scores, in the order that they had.

    Raises:
        BadParameter: there is no file of scores.
        CheckpointError: it cannot be read, or lacks a file.
    """
    if scores is None:
        raise typer.BadParameter("needs --scores, a JSON file of {file: score}", param_hint="--best")
    try:
        table = json.loads(scores.read_text())
        numbers = {str(name): float(value) for name, value in table.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{scores}: expected JSON of {{file: score}}: {error}") from error
    found = {}
    for path in files:
        names = [name for name in (str(path), path.name, str(path.resolve())) if name in numbers]
        if not names:
            raise CheckpointError(f"{scores}: has no score of {path}")
        number = numbers[names[0]]
        found[path] = -math.inf if math.isnan(number) else -number if lower else number
    best = sorted(found, key=lambda path: -found[path])[:most]
    return [path for path in files if path in best]
