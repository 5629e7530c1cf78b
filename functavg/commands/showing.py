"""How results are shown: tables for people, JSON for scripts."""

from __future__ import annotations

__all__: list[str] = []

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from functavg.checkpoints import Averaged


def show_json(value: Any) -> None:
    """Print a value as JSON, paths as strings."""
    print(json.dumps(value, default=str))


def show_table(header: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
    """Print a table; the first column is text, the others numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)


def show_pairs(pairs: Mapping[str, Any]) -> None:
    """Print names with their values."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, escape(str(value)))
    Console().print(table)


def show_averaged(done: Averaged, as_json: bool, quiet: bool, **more: Any) -> None:
    """Print what was averaged."""
    if as_json:
        facts = {"output": done.output, "files": list(map(str, done.files)), "weights": list(done.weights)}
        show_json({**facts, "tensors": done.tensors, "bytes": done.nbytes, **more})
    elif not quiet:
        show_table(
            ("file", "weight"), [(path, f"{weight:.6g}") for path, weight in zip(done.files, done.weights, strict=True)]
        )
        facts = {"tensors": done.tensors, "size": size(done.nbytes), **more, "written": done.output}
        show_pairs({name.replace("_", " "): value for name, value in facts.items()})


def size(nbytes: int) -> str:
    """Return a number of bytes for people."""
    return str(decimal(nbytes))
