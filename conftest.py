"""The code of README.md and docs/ are tests: one namespace a document, its blocks in their order.

``pytest -m "not slow"`` leaves out the code of documents, what starts processes, and most rows of tables.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sybil import Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.myst import PythonCodeBlockParser

# Plots are drawn without a screen, also by what a test starts as a process of its own.
os.environ.setdefault("MPLBACKEND", "Agg")
# The tests run in one process for each core; threads of their own would only be in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What cannot run where a framework is not installed; there is none of some for the oldest Python.
_NEED = {
    "functavg/integrations/lightning.py": "lightning",
    "functavg/integrations/transformers.py": "transformers",
    "tests/integrations/lightning_digits.py": "lightning",
    "docs/howto/accelerate.md": "accelerate",
    "docs/howto/flax.md": "flax",
    "docs/howto/lightning.md": "lightning",
    "docs/howto/peft.md": "peft",
    "docs/howto/transformers.md": "transformers",
}
collect_ignore_glob = ["docs/*.py"]  # those of the build, in folders too
collect_ignore = ["tests/typing/api.py"]  # is checked, not run
collect_ignore += [path for path, name in _NEED.items() if importlib.util.find_spec(name) is None]

# Where torch is not installed, these are collected, and nothing else.
WITHOUT_TORCH = (
    "functavg/combinators/",
    "functavg/posthoc/",
    "functavg/schedules/",
    "functavg/units.py",
    "tests/analysis/test_synthesis.py",
    "tests/functional/test_formulas.py",
    "tests/functional/test_imports.py",
    "tests/functional/test_jax_transforms.py",
    "tests/functional/test_numpy_kernel.py",
    "tests/functional/test_progress.py",
    "tests/schedules/test_schedules.py",
    "tests/schedules/test_units.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what imports torch, where there is none."""
    if collection_path.is_dir() or importlib.util.find_spec("torch"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return None if path.startswith(WITHOUT_TORCH) else True


def _enter_empty_folder(namespace: dict[str, Any]) -> None:
    """What a document writes goes into a folder of its own."""
    stack = namespace["_folder"] = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.callback(os.chdir, os.getcwd())
    os.chdir(folder)


def _leave_folder(namespace: dict[str, Any]) -> None:
    namespace.pop("_folder").close()


# No parser for "skip" comments: every block runs.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=_enter_empty_folder,
    teardown=_leave_folder,
).pytest()


# Where most tests start processes, frameworks or a compiler.
_SLOW = ("tests/distributed/", "tests/examples/", "tests/functional/test_torch_transforms.py", "tests/integrations/")


def _is_slow(item: pytest.Item) -> bool:
    """Tell whether the fast subset can do without a test: of a table it takes each seventh diagonal."""
    if item.nodeid.startswith(_SLOW):
        return True
    rows = item.callspec.indices.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return isinstance(item, SybilItem) or sum(rows) % 7 > 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow; put documents first and their blocks in order, which pytest-randomly has shuffled.

    Processes that run out of tests take some from the end of another's: what comes first is not torn apart.
    """
    for item in filter(_is_slow, items):
        item.add_marker("slow")
    blocks = sorted(
        (item for item in items if isinstance(item, SybilItem)), key=lambda item: (item.path, item.example.line)
    )
    items[:] = [*blocks, *(item for item in items if not isinstance(item, SybilItem))]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Run the blocks before one of a document first, if another process, or none, has run them."""
    if isinstance(item, SybilItem):
        done = item.example.namespace.setdefault("_done", set())
        for example in item.example.document:
            if example.line < item.example.line and example.line not in done:
                example.evaluate()
                done.add(example.line)
        done.add(item.example.line)
