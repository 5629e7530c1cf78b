"""Make links of names: of ``EMA(0.999)`` in a text, and of the types of other libraries in a signature."""

from __future__ import annotations

import importlib
import re
from types import FunctionType, ModuleType

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

NAME = re.compile(r"(?:functavg\.)?([A-Za-z_][\w.]*)(?:\(.*\))?")

METHODS = {name: f"AveragedModel.{name}" for name in ("attach", "copy_to", "update_parameters")}
"""Methods that texts call by their names alone; others go with the name of their class, or of a variable."""

VARIABLES = {"averaged": "AveragedModel", "profile": "Profile", "rule": "AveragingRule"}
"""Variables that hold, in every text, an instance of one class."""

PUBLIC = {  # where a class is made -> where its library documents it
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "Axes": "matplotlib.axes.Axes",
}


def linked_names() -> dict[str, str]:
    """Return the full name behind each name that a text may use; a name of two things is none."""
    package = importlib.import_module("functavg")
    found = dict(METHODS)
    for name in package.__all__:
        found[name] = name
        value = getattr(package, name)
        if isinstance(value, type):
            found |= {f"{name}.{method}": f"{name}.{method}" for method in own_methods(value)}
        elif isinstance(value, ModuleType) and name != "swa_utils":
            for member in public_names(value):
                found[f"{name}.{member}"] = f"{name}.{member}"
                if member[0].isupper():
                    found.setdefault(member, f"{name}.{member}")
    for variable, name in VARIABLES.items():
        found |= {f"{variable}.{method}": f"{name}.{method}" for method in own_methods(getattr(package, name))}
    return {short: f"functavg.{full}" for short, full in found.items()}


def own_methods(cls: type) -> list[str]:
    """Return the names of methods that the class documents itself."""
    own = ((name, value) for name, value in vars(cls).items() if not name.startswith("_"))
    return [name for name, value in own if isinstance(value, FunctionType | classmethod) and value.__doc__]


def public_names(module: ModuleType) -> list[str]:
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith(module.__name__))
    return list(getattr(module, "__all__", None) or (name for name in own if not name.startswith("_")))


def link_literals(app: Sphinx, document: nodes.document) -> None:
    names = linked_names()
    for literal in list(document.findall(nodes.literal)):
        match = NAME.fullmatch(literal.astext())
        target = match and names.get(match[1])
        parent = literal.parent
        if not target or isinstance(parent, nodes.title | nodes.reference | addnodes.pending_xref | nodes.term):
            continue
        link = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True, refdoc=app.env.docname
        )
        parent.replace(literal, link)
        link += literal


def find_public(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contents: nodes.TextElement
) -> nodes.reference | None:
    """Look again for a name that is made elsewhere than it is documented."""
    if node.get("reftarget") in PUBLIC:
        node["reftarget"] = PUBLIC[node["reftarget"]]
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link_literals)
    app.connect("missing-reference", find_public, priority=400)  # before intersphinx
    return {"parallel_read_safe": True, "parallel_write_safe": True}
