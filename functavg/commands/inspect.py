"""``functavg inspect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from functavg import checkpoints
from functavg.commands.options import Json
from functavg.commands.showing import show_json, show_pairs, show_table, size


def inspect(
    files: Annotated[list[Path], typer.Argument(help="Files of weights.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show what checkpoint files hold: averages, counts, dtypes, ties.

    Example:
    functavg inspect last.ckpt
    """
    found = [checkpoints.inspect(path) for path in files]
    if as_json:
        show_json([asdict(each) for each in found])
        return
    for each in found:
        facts = {"file": each.path, "format": each.format, "average of": each.kind, "count": each.count}
        facts |= {"rule": each.record.get("rule"), "made from": ", ".join(each.record.get("files", [])) or None}
        facts |= {f"metadata {name}": value for name, value in each.metadata.items()}
        show_pairs({name: value for name, value in facts.items() if value is not None})
        rows = []
        for holding in each.holds:
            dtypes = ", ".join(f"{count} {dtype}" for dtype, count in holding.dtypes.items())
            ties = "; ".join(" = ".join(names) for names in holding.ties)
            rows.append(
                (holding.key or ".", holding.tensors, f"{holding.elements:,}", size(holding.nbytes), dtypes, ties)
            )
        show_table(("key", "tensors", "elements", "size", "dtypes", "ties"), rows)
