"""Links inside the documentation lead somewhere, also where it is read as files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

CODE = re.compile(r"^(```+|~~~+).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
MADE = {"_generated": "_figures"}
"""Folders that the build fills, and the folder of the scripts by which it does."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MyST make them."""
    text = re.sub(r"^(```+).*?^\1", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def goal(page: Path, path: str) -> Path:
    """Return the file that a link on a page is to; for a figure that the build makes, its script."""
    file = (page.parent / path).resolve()
    made = MADE.get(file.parent.name)
    return file.parent.with_name(made) / f"{file.stem}.py" if made else file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page):
    for link in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        file = goal(page, path) if path else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in PAGES:
        for tree in TOCTREE.findall(page.read_text("utf-8")):
            names = (line.rpartition("<")[2].rstrip(">") for line in tree.splitlines() if line and line[0] != ":")
            listed |= {file for name in names for file in page.parent.glob(f"{name}.md")}
    pages = set((ROOT / "docs").rglob("*.md"))
    assert pages - listed == {ROOT / "docs" / "index.md"}


def test_every_figure_is_shown_and_described():
    shown = [
        match.groups()
        for page in PAGES
        for match in re.finditer(r"!\[(.*)\]\([./]*_generated/(\w+)\.svg\)", page.read_text("utf-8"))
    ]
    assert {name for _, name in shown} == {script.stem for script in (ROOT / "docs" / "_figures").glob("*.py")}
    assert all(description for description, _ in shown)
