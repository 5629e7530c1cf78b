"""How Sphinx builds the documentation. Nothing here needs a network, neither the build nor the pages."""

import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
# The figures and the tutorial are computed by the build: without a screen, and the same whatever the machine has.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it tells of each class that lacks a library of its own

project = "functavg"
author = "The functavg authors"
project_copyright = "The functavg authors"
release = version = installed_version("functavg")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_codeautolink",
    "sphinx_copybutton",
    # in _ext/
    "example_pages",
    "executed",
    "figures",
    "mathml",
    "names",
    "readme",
]
exclude_patterns = ["_build", "_generated"]

html_theme = "furo"
html_title = f"functavg {release}"
html_static_path = ["_static"]
html_css_files = ["functavg.css"]
html_js_files = ["functavg.js"]
html_math_renderer = "mathml"
html_copy_source = False  # the pages of examples and the tutorial are not what their sources are
html_theme_options = {"navigation_with_keys": True}

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

copybutton_exclude = ".linenos, .gp, .go"  # prompts and output are not copied
copybutton_selector = "div:not(.output) > div.highlight > pre"

# Names of other libraries are links by inventories in the plain format, which hold what this documentation refers to.
# "reference target not found" for another name: add its line there.
intersphinx_mapping = {
    name: (address, str(HERE / "_inventories" / f"{name}.txt"))
    for name, address in {
        "python": "https://docs.python.org/3/",
        "numpy": "https://numpy.org/doc/stable/",
        "torch": "https://docs.pytorch.org/docs/stable/",
        "matplotlib": "https://matplotlib.org/stable/",
    }.items()
}
nitpick_ignore_regex = [
    ("py:.*", r"typing\.Any"),
    ("py:.*", r"(functavg\.[\w.]+\.)?[A-Z]"),  # type variables
    ("py:.*", r"(functavg\.state\.)?(Count|PyTree|Progress|Weight)"),  # names for what a type cannot say
    ("py:.*", r"functavg\.rules\.saved\.Saved"),  # passed between functavg's own functions
    ("py:class", "Trainer"),  # of frameworks that the build does not load
    ("py:.*", r"(accelerate|equinox|flax|jax|lightning|optax|orbax|peft|pytorch_lightning|transformers)\..*"),
]

napoleon_google_docstring = True
napoleon_numpy_docstring = False
# An "Attributes" section beside documented members would describe the same names twice.
napoleon_use_ivar = True

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
# What AveragedModel overrides has torch's documentation; the reference lists what functavg documents itself.
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True

codeautolink_concat_default = True
codeautolink_custom_blocks = {"python": None}
# The callbacks are documented without their frameworks.
autodoc_mock_imports = ["lightning", "transformers"]
