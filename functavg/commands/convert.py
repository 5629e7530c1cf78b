"""``functavg convert``."""

from __future__ import annotations

__all__: list[str] = []

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from functavg import checkpoints
from functavg.commands.options import Json, Output, Quiet
from functavg.commands.showing import show_json, show_pairs


class To(str, Enum):
    """What to write."""

    weights = "weights"
    averaged_model = "averaged_model"
    state = "state"


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint with an average.", show_default=False)],
    output: Output,
    kind: Annotated[str | None, typer.Option("--kind", help="The library that wrote it. Default: found out.")] = None,
    to: Annotated[
        To, typer.Option("--to", help="Plain weights, the state_dict of an AveragedModel, or a state of functavg.")
    ] = To.weights,
    names: Annotated[
        Path | None, typer.Option("--names", help="A file of the parameters' names in their order, one a line.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=0, help="The steps that were averaged, where the checkpoint does not say."),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", "-r", help="The rule to go on with, for a state: ema:0.999.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the average in a checkpoint of torch, ema-pytorch, torch_ema, timm, diffusers, Lightning, Composer or NeMo.

    Examples:
    functavg convert last.ckpt -o average.safetensors

    functavg convert ema.pt --names names.txt --to state --rule ema:0.9999 -o state.safetensors
    """
    if (to is To.state) != (rule is not None):
        raise typer.BadParameter("goes with --to state, which needs it", param_hint="--rule")
    listed = None if names is None else names.read_text().split()
    converted = checkpoints.convert(source, kind, to=to.value, names=listed, count=count)
    if rule is None:
        checkpoints.save_weights(output, converted)
    else:
        checkpoints.save_state(output, converted, checkpoints.parse_rule(rule))
    tensors = len(converted.average if rule is not None else converted)
    facts = {
        "from": kind or checkpoints.inspect(source).kind or "named",
        "to": to.value,
        "tensors": tensors,
        "written": output,
    }
    if as_json:
        show_json(facts)
    elif not quiet:
        show_pairs(facts)
