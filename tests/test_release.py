"""What a release says of itself is true, and said in one place or compared."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import functavg

ROOT = Path(__file__).parents[1]
PACKAGE = Path(functavg.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def calls() -> list[tuple[str, ast.Call]]:
    return [
        (path, node)
        for path, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
    ]


def test_no_pickle_is_loaded_unsafely_and_no_text_is_run() -> None:
    """As SECURITY.md says."""
    loads = []
    for path, call in calls():
        name = name_of(call)
        assert name not in ("eval", "exec", "compile", "__import__"), f"{path}:{call.lineno}"
        assert not re.match(r"(c?pickle|dill|marshal|shelve|joblib|yaml)\.", name), f"{path}:{call.lineno}"
        assert name not in ("np.load", "numpy.load"), f"{path}:{call.lineno}"
        if name == "torch.load":
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert keywords["weights_only"] == "True", f"{path}:{call.lineno}"
            loads.append(path)
    assert loads, "the test looks for calls that are written in another way now"


def test_the_version_of_the_citation_is_that_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == functavg.__version__
    assert importlib.metadata.version("functavg") == functavg.__version__


def test_the_least_versions_are_the_ones_that_are_tested() -> None:
    """pyproject.toml, constraints-oldest.txt and the page of supported versions name the same."""
    oldest = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    page = (ROOT / "docs/reference/supported-versions.md").read_text()
    least = dict(re.findall(r'"(numpy|optree|torch)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    assert least.keys() == {"numpy", "optree", "torch"}
    for name, version in least.items():
        assert oldest[name] == version
        assert re.search(rf"^\| {name} \| {re.escape(version)} \|", page, re.MULTILINE), name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11")
def test_every_python_that_is_named_is_in_tox() -> None:
    import tomllib

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.rpartition(".")[2] for line in project["classifiers"] if "Python :: 3." in line}
    assert set(re.search(r"py3\{([\d,]+)\}, core", (ROOT / "tox.ini").read_text())[1].split(",")) == named
    assert project["requires-python"] == f">=3.{min(named, key=int)}"
