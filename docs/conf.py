"""How Sphinx builds the documentation."""

from importlib.metadata import version as installed_version

project = "functavg"
author = "The functavg authors"
project_copyright = "The functavg authors"
release = version = installed_version("functavg")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"functavg {release}"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

napoleon_google_docstring = True
napoleon_numpy_docstring = False
# An "Attributes" section beside documented members would describe the same names twice.
napoleon_use_ivar = True

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
# What AveragedModel overrides has torch's documentation; the reference lists what functavg documents itself.
autodoc_inherit_docstrings = False
# The callbacks are documented without their frameworks.
autodoc_mock_imports = ["lightning", "transformers"]
