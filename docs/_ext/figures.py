"""Draw the figures of the documentation: each script in ``_figures/`` has a function ``draw`` that returns one."""

from __future__ import annotations

import runpy
from pathlib import Path

import matplotlib as mpl
from sphinx.application import Sphinx
from sphinx.util.display import status_iterator

STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "functavg",  # the same bytes from the same figure
}


def save(figure: mpl.figure.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def draw_all(app: Sphinx) -> None:
    scripts = sorted(Path(app.srcdir, "_figures").glob("*.py"))
    folder = Path(app.srcdir, "_generated")
    with mpl.rc_context(STYLE):
        for script in status_iterator(
            scripts, "drawing figures... ", length=len(scripts), stringify_func=lambda s: s.stem
        ):
            save(runpy.run_path(str(script))["draw"](), folder / f"{script.stem}.svg")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", draw_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
