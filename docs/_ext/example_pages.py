"""Write a page for each script in ``examples/``: what its docstring says, and its source.

``<!-- EXAMPLES -->`` in ``examples/index.md`` stands for a table of them.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

from sphinx.application import Sphinx

PAGE = """# {name}

{text}

```{{literalinclude}} {source}
:language: python
:start-at: {first}
```
"""


def scripts(app: Sphinx) -> list[Path]:
    return sorted((Path(app.srcdir).parent / "examples").rglob("*.py"))


def write_pages(app: Sphinx) -> None:
    pages = Path(app.srcdir, "examples")
    for script in scripts(app):
        module = ast.parse(script.read_text("utf-8"))
        first = script.read_text("utf-8").splitlines()[module.body[1].lineno - 1]
        source = os.path.relpath(script, pages)
        text = PAGE.format(name=script.stem, text=as_markdown(ast.get_docstring(module)), source=source, first=first)
        page = pages / f"{script.stem}.md"
        if not page.exists() or page.read_text("utf-8") != text:  # what has not changed is not read anew
            page.write_text(text, "utf-8")


def as_markdown(docstring: str) -> str:
    """Return the docstring with its command line, the paragraph that begins with a program, as a block."""
    paragraphs = []
    for paragraph in docstring.split("\n\n"):
        line = paragraph.strip()
        command = line.startswith(("python ", "torchrun "))
        paragraphs.append(f"```sh\n{line}\n```" if command else paragraph)
    return "\n\n".join(paragraphs)


def list_pages(app: Sphinx, page: str, source: list[str]) -> None:
    if page == "examples/index":
        rows = ["| example | what it does |", "|---|---|"]
        for script in scripts(app):
            app.env.note_dependency(str(script))
            first = ast.get_docstring(ast.parse(script.read_text("utf-8"))).partition("\n\n")[0].replace("\n", " ")
            rows.append(f"| [{script.stem}]({script.stem}.md) | {first} |")
        source[0] = source[0].replace("<!-- EXAMPLES -->", "\n".join(rows))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
