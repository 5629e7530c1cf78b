"""Arguments and options that several commands have."""

from __future__ import annotations

__all__: list[str] = []

import sys
from pathlib import Path
from typing import Annotated

import typer

Files = Annotated[
    list[Path] | None,
    typer.Argument(help="Files of weights: safetensors or torch, the index of shards, or folders.", show_default=False),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="The file to write: .safetensors, .pt, .pth, .bin or .ckpt.")
]
Key = Annotated[str | None, typer.Option("--key", "-k", help="Where in each file the weights are, such as state_dict.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="The dtype to store, such as bfloat16. Default: that of the files.")
]
Glob = Annotated[
    str | None, typer.Option("--glob", "-g", help="Take the files that match a pattern, such as 'step-*.pt'.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no summary.")]
Lower = Annotated[bool, typer.Option("--lower-is-better", help="Scores are losses.")]


def shows_progress(quiet: bool, as_json: bool) -> bool:
    """Tell whether a bar is wanted, and can be seen."""
    return not (quiet or as_json) and sys.stderr.isatty()
