"""The page on the design speaks of the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

from tests.functional.test_imports import LAYERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "design.md").read_text("utf-8")


def test_the_layers_are_those_that_imports_follow_and_name_every_module():
    table = PAGE[PAGE.index("## Layers") :]
    rows = re.findall(r"^\| (`.+?) \|", table[: table.index("\n## ", 1)], re.MULTILINE)
    named = [re.findall(r"`([\w/]+)`", row) for row in rows]
    *upper, lowest = [[_entry(module) for module in layer] for layer in LAYERS]
    assert [sorted(row) for row in named[: len(upper)]] == [sorted(layer) for layer in upper]
    assert sorted(name for row in named[len(upper) :] for name in row) == sorted(lowest)
    library = ROOT / "functavg"
    folders = {f"{path.parent.name}/" for path in library.glob("*/__init__.py")}
    assert {name for row in named for name in row} == folders | {path.stem for path in library.glob("*.py")}


def _entry(module: str) -> str:
    """Return how the table names a module: a package with a slash, the library itself by its file."""
    name = module.removeprefix("functavg").removeprefix(".")
    if not name:
        return "__init__"
    return f"{name}/" if (ROOT / "functavg" / name).is_dir() else name


def test_its_names_are_those_of_the_code():
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "functavg").rglob("*.py"))
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    names = set(re.findall(r"`([A-Za-z_]\w+)(?:\([^`]*\))?`", prose))
    unknown = {name for name in names if not re.search(rf"\b{name}\b", code)}
    assert not unknown
