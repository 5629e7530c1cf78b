"""``functavg soup``."""

from __future__ import annotations

__all__: list[str] = []

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from functavg import checkpoints
from functavg.checkpoints import CheckpointError
from functavg.commands.choosing import gather
from functavg.commands.options import Dtype, Files, Glob, Json, Key, Lower, Output, Quiet
from functavg.commands.showing import show_averaged


def soup(
    output: Output,
    evaluate: Annotated[
        str, typer.Option("--evaluate", "-e", help="A command that prints the score of the file {} as its last word.")
    ],
    files: Files = None,
    pattern: Glob = None,
    greedy: Annotated[
        bool,
        typer.Option("--greedy", help="Take each file that makes the mean better, the best first (so it is anyway)."),
    ] = True,
    lower: Lower = False,
    dtype: Dtype = None,
    key: Key = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the mean of those files that make it better, by a score that a command of yours prints.

    Example:
    functavg soup --greedy run*.pt --evaluate 'python evaluate.py {}' -o soup.pt
    """
    del greedy
    if "{}" not in evaluate:
        raise typer.BadParameter("expected a command with {} for the file", param_hint="--evaluate")

    def score(path: Path) -> float:
        number = _score(evaluate, path)
        return -number if lower else number

    done = checkpoints.greedy_soup(gather(files, pattern), output, score, dtype=dtype, key=key)
    show_averaged(done, as_json, quiet)


def _score(command: str, path: Path) -> float:
    """Return the number that a command prints last."""
    line = command.replace("{}", shlex.quote(str(path)))
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CheckpointError(f"{path}: the command {line!r} ended with code {done.returncode}")
    words = done.stdout.split()
    try:
        return float(words[-1])
    except (IndexError, ValueError):
        last = words[-1] if words else "nothing"
        raise CheckpointError(f"{path}: the command {line!r} must print a number last, got {last!r}") from None
