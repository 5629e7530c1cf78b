"""The page on the design speaks of the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "design.md").read_text("utf-8")


def test_the_layers_name_files_and_folders_of_the_library():
    table = PAGE[PAGE.index("## Layers") :]
    rows = re.findall(r"^\| (`.+?) \|", table[: table.index("\n## ", 1)], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    library = ROOT / "functavg"
    folders = {f"{path.parent.name}/" for path in library.glob("*/__init__.py")}
    assert named <= folders | {path.stem for path in library.glob("*.py")}
    assert len(named) > 10


def test_its_names_are_those_of_the_code():
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "functavg").rglob("*.py"))
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    names = set(re.findall(r"`([A-Za-z_]\w+)(?:\([^`]*\))?`", prose))
    unknown = {name for name in names if not re.search(rf"\b{name}\b", code)}
    assert not unknown
