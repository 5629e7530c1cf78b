"""``functavg average``."""

from __future__ import annotations

__all__: list[str] = []

from pathlib import Path
from typing import Annotated

import typer

from functavg import checkpoints
from functavg.commands.choosing import gather, oldest_first, steps_of, take_best, take_last
from functavg.commands.options import Dtype, Files, Glob, Json, Key, Lower, Output, Quiet, shows_progress
from functavg.commands.showing import show_averaged
from functavg.commands.spreading import is_numbers


def average(
    output: Output,
    files: Files = None,
    pattern: Glob = None,
    weights: Annotated[
        list[str] | None, typer.Option("--weights", "-w", help="One number for each file: 0.5 0.3 0.2.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="Take the newest so many, by the steps in their names.")
    ] = None,
    best: Annotated[int | None, typer.Option("--best", min=1, help="Take the best so many, by --scores.")] = None,
    scores: Annotated[Path | None, typer.Option("--scores", help="A JSON file of {file: score}.")] = None,
    lower: Lower = False,
    profile: Annotated[
        str | None, typer.Option("--profile", "-p", help="Weigh files by their steps as a rule does: ema:0.999.")
    ] = None,
    plain_sum: Annotated[bool, typer.Option("--sum", help="Do not divide by the sum of the weights.")] = False,
    dtype: Dtype = None,
    key: Key = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the weighted mean of checkpoint files.

    Files with steps in their names are taken in the order of their steps, others as they are named, the oldest first:
    integers, bools and metadata come from the newest. The output appears as a whole or not at all.

    Examples:
    functavg average a.safetensors b.safetensors -o mean.safetensors

    functavg average --last 5 --glob 'step-*.safetensors' -o mean.safetensors

    functavg average a.pt b.pt c.pt --weights 0.5 0.3 0.2 -o mean.pt

    functavg average --best 3 --scores scores.json --glob 'step-*.pt' -o mean.pt

    functavg average --profile power:sigma_rel=0.1 --glob 'step-*.pt' -o ema.pt
    """
    if last is not None and best is not None:
        raise typer.BadParameter("goes with --best no more than --best with it", param_hint="--last")
    if weights is not None and profile is not None:
        raise typer.BadParameter("gives the weights itself, leave --weights out", param_hint="--profile")
    chosen = gather(files, pattern)
    if best is not None:
        chosen = take_best(chosen, best, scores, lower)
    if last is not None:
        chosen = take_last(chosen, last)
    numbers = [1.0] * len(chosen)
    if weights is not None:
        if not all(map(is_numbers, weights)):
            raise typer.BadParameter(f"expected numbers, got {' '.join(weights)}", param_hint="--weights")
        numbers = [float(part) for each in weights for part in each.split(",")]
        if len(numbers) != len(chosen):
            raise typer.BadParameter(
                f"expected one number for each of {len(chosen)} files, got {len(numbers)}", param_hint="--weights"
            )
    chosen, numbers = oldest_first(chosen, numbers)
    if profile is not None:
        numbers = checkpoints.profile_weights(checkpoints.parse_rule(profile), steps_of(chosen, "--profile"))
    done = checkpoints.average(
        chosen,
        output,
        weights=numbers,
        normalize=not plain_sum,
        dtype=dtype,
        key=key,
        progress=shows_progress(quiet, as_json),
    )
    show_averaged(done, as_json, quiet)
