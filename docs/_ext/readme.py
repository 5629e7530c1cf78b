"""Put the text of README.md into a page, its links pointing into the site.

``<!-- README -->`` stands for all of it, ``<!-- README until "## A" -->`` for what comes before a line that begins so,
``<!-- README from "## A" -->`` for that line and the rest.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

MARK = re.compile(r'^<!-- README(?: until "(?P<until>.+)")?(?: from "(?P<start>.+)")? -->$', re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)(?P<path>[^)#]*)(?P<anchor>#[^)]*)?\)")


def localise(text: str) -> str:
    """Return the text with its links, which start at the root of the repository, starting at the root of the site."""

    def local(match: re.Match[str]) -> str:
        path = match["path"]
        if path == "examples":
            path = "examples/index.md"
        elif path.startswith("examples/"):
            path = str(Path(path).with_suffix(".md"))
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        else:
            path = path.lower()  # CHANGELOG.md and its like, each of which has a page
        return f"]({path}{match['anchor'] or ''})"

    return LINK.sub(local, text)


def include(app: Sphinx, page: str, source: list[str]) -> None:
    readme = Path(app.srcdir).parent / "README.md"

    def part(match: re.Match[str]) -> str:
        app.env.note_dependency(str(readme))
        text = readme.read_text("utf-8")
        start = text.index(f"\n{match['start']}") + 1 if match["start"] else 0
        stop = text.index(f"\n{match['until']}") if match["until"] else len(text)
        return localise(text[start:stop])

    source[0] = MARK.sub(part, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", include)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
