"""Every public name has an entry in the reference, and an example in its docstring that doctest runs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import functavg

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
DIRECTIVE = re.compile(r"^\.\. auto(class|function|module|data|exception):: ([\w.]+)(?:\(.*\))?$", re.MULTILINE)


def public_modules() -> list[ModuleType]:
    """Return the package and the modules among its public names."""
    return [functavg, *(getattr(functavg, name) for name in functavg.__all__ if is_module(name))]


def is_module(name: str) -> bool:
    return isinstance(getattr(functavg, name), ModuleType)


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module: ``__all__``, or what it has of its own without an underscore."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    own = (
        name for name, value in vars(module).items() if str(getattr(value, "__module__", "")).startswith("functavg.")
    )
    return [name for name in own if not name.startswith("_")]


def entries() -> tuple[set[str], set[str]]:
    """Return the names that the reference documents one by one, and the modules of which it documents all names."""
    found = [match.groups() for page in REFERENCE.glob("*.md") for match in DIRECTIVE.finditer(page.read_text("utf-8"))]
    return {name for kind, name in found if kind != "module"}, {name for kind, name in found if kind == "module"}


NAMES = sorted(
    # swa_utils has the names of the package once more, and one of torch's
    (module.__name__, name)
    for module in public_modules()
    if module.__name__ != "functavg.swa_utils"
    for name in names_of(module)
)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_has_an_entry_in_the_reference(module, name):
    objects, modules = entries()
    assert f"{module}.{name}" in objects or module in modules


@pytest.mark.parametrize("module", [module.__name__ for module in public_modules()[1:]])
def test_a_public_module_has_an_entry_in_the_reference(module):
    assert module in entries()[1]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_has_an_example(module, name):
    documentation = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    assert ">>> " in documentation


def test_every_entry_is_a_name_that_is_there():
    for name in entries()[0]:
        module, _, attribute = name.rpartition(".")
        with contextlib.suppress(ImportError):  # there are no frameworks for the oldest Python
            assert hasattr(importlib.import_module(module), attribute), name
