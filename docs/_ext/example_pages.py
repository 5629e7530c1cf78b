"""Write a page for each script in ``examples/``: what it says of itself at its top, and its source.

``<!-- EXAMPLES -->`` in ``examples/index.md`` stands for a table of them.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import NamedTuple

from sphinx.application import Sphinx

PAGE = """# {name}

{text}

```{{literalinclude}} {source}
:language: {language}
:lines: {first}-
```
"""
PROGRAMS = ("bash ", "python ", "torchrun ")


class Example(NamedTuple):
    script: Path
    language: str
    text: str
    """What it says of itself: the docstring of a Python script, the first comment of a shell script."""
    first: int
    """The line at which the source begins that a page shows."""

    @property
    def name(self) -> str:
        return self.script.stem


def examples(app: Sphinx) -> list[Example]:
    scripts = (Path(app.srcdir).parent / "examples").rglob("*")
    readers = {".py": read_python, ".sh": read_shell}
    return [readers[script.suffix](script) for script in sorted(scripts) if script.suffix in readers]


def read_python(script: Path) -> Example:
    module = ast.parse(script.read_text("utf-8"))
    return Example(script, "python", ast.get_docstring(module), module.body[1].lineno)


def read_shell(script: Path) -> Example:
    lines = script.read_text("utf-8").splitlines()
    first = next(number for number, line in enumerate(lines, start=1) if not line.startswith("#"))
    comment = (line.removeprefix("#").removeprefix(" ") for line in lines[: first - 1] if not line.startswith("#!"))
    return Example(script, "bash", "\n".join(comment), first)


def write_pages(app: Sphinx) -> None:
    folder = Path(app.srcdir, "examples")
    pages = {}
    for example in examples(app):
        source = os.path.relpath(example.script, folder)
        text = as_markdown(example.text)
        pages[folder / f"{example.name}.md"] = PAGE.format(
            name=example.name, text=text, source=source, language=example.language, first=example.first
        )
    for page in folder.glob("*.md"):
        if page not in pages and page.stem != "index":
            page.unlink()  # of an example that is gone
    for page, text in pages.items():
        if not page.exists() or page.read_text("utf-8") != text:  # what has not changed is not read anew
            page.write_text(text, "utf-8")


def as_markdown(text: str) -> str:
    """Return the text with its command line, a paragraph that begins with a program, as a block."""
    paragraphs = (paragraph.strip() for paragraph in text.split("\n\n"))
    return "\n\n".join(f"```sh\n{line}\n```" if line.startswith(PROGRAMS) else line for line in paragraphs)


def list_pages(app: Sphinx, page: str, source: list[str]) -> None:
    if page == "examples/index":
        rows = ["| example | what it does |", "|---|---|"]
        for example in examples(app):
            app.env.note_dependency(str(example.script))
            first = example.text.partition("\n\n")[0].replace("\n", " ")
            rows.append(f"| [{example.name}]({example.name}.md) | {first} |")
        source[0] = source[0].replace("<!-- EXAMPLES -->", "\n".join(rows))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
