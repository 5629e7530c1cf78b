"""``functavg posthoc``."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from functavg import checkpoints
from functavg.commands.choosing import gather, steps_of
from functavg.commands.options import Dtype, Files, Glob, Json, Key, Output, Quiet, shows_progress
from functavg.commands.showing import show_averaged
from functavg.rules.base import AveragingRule


def posthoc(
    output: Output,
    target: Annotated[str, typer.Option("--target", "-t", help="The rule that is wanted: power:sigma_rel=0.1.")],
    files: Files = None,
    pattern: Glob = None,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rule", "-r", help="The rule of files that do not say it, or of those that match: 'wide-*::ema:0.999'."
        ),
    ] = None,
    at: Annotated[
        int | None, typer.Option("--at", min=1, help="The steps of the target. Default: those of the latest file.")
    ] = None,
    dtype: Dtype = None,
    key: Key = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write an average that was not tracked, from snapshots of others.

    Files of functavg.checkpoints.save_state say their rule and steps. For others, --rule says the rule, and the steps
    are read from the names.

    Examples:
    functavg posthoc state-*.safetensors --target power:sigma_rel=0.15 -o ema.safetensors

    functavg posthoc *-*.pt -r 'a-*::power:gamma=17' -r 'b-*::power:gamma=7' --target power:gamma=10 -o ema.pt
    """
    chosen = gather(files, pattern)
    known = [_pattern_and_rule(text) for text in rules or []]
    snapshots = [_snapshot(path, known) for path in chosen]
    wanted = checkpoints.parse_rule(target)
    done = checkpoints.posthoc(
        snapshots,
        output,
        wanted if at is None else (wanted, at),
        dtype=dtype,
        key=key,
        progress=shows_progress(quiet, as_json),
    )
    more = {name: getattr(done.synthesis, name) for name in ("residual", "amplification")}
    show_averaged(done, as_json, quiet, **more)


def _pattern_and_rule(text: str) -> tuple[str, AveragingRule]:
    pattern, _, rule = text.rpartition("::")
    return pattern or "*", checkpoints.parse_rule(rule)


def _snapshot(path: Path, known: list[tuple[str, AveragingRule]]) -> checkpoints.Snapshot:
    """Return a file with the first rule whose pattern it matches, and its steps; alone where it says them itself."""
    for pattern, rule in known:
        if fnmatch(path.name, pattern) or fnmatch(str(path), pattern):
            (steps,) = steps_of([path], "--rule")
            return path, rule, steps
    return path
