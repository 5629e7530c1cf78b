"""Run the Python blocks of pages with ``executed: true`` in their front matter, and show what they print and draw.

One namespace a page, its blocks in their order, in an empty folder. A block that makes a new ``figure`` shows it.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
from figures import STYLE, save
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

MARK = re.compile(r"\A---\n(?:.*\n)*?executed: true\n(?:.*\n)*?---\n")
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def execute(app: Sphinx, page: str, source: list[str]) -> None:
    if not MARK.match(source[0]):
        return
    namespace: dict[str, Any] = {"__name__": "__main__"}
    folder = Path(app.srcdir, "_generated")

    def run(match: re.Match[str]) -> str:
        before = namespace.get("figure")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                exec(compile(match[1], f"{page}.md", "exec"), namespace)
            except Exception as error:
                raise ExtensionError(f"{page}.md: a block raised {error!r}:\n{match[1]}") from error
        shown = match[0]
        if printed.getvalue():
            shown += f"\n```{{code-block}} text\n:class: output\n\n{printed.getvalue().rstrip()}\n```\n"
        figure = namespace.get("figure")
        if figure is not before:
            name = f"{page.replace('/', '-')}-{match.start()}.svg"
            save(figure, folder / name)
            shown += f"\n![{figure.get_suptitle()}](/_generated/{name})\n"
        return shown

    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty), mpl.rc_context(STYLE):
        source[0] = BLOCK.sub(run, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", execute)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
