"""Settings of the documentation site: `make docs` builds it without a network, and warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import iobs

project = "iobs"
author = "iobs contributors"
copyright = "iobs contributors"
version = release = iobs.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "links",
    "mathml",
]
exclude_patterns = ["_ext", "images/README.md"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # the tables of benchmarks/ are put together from parts with levels of their own
nb_execution_mode = "off"  # notebooks are committed with their outputs; `make notebooks` makes them
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 10)]

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "literal"
smartquotes_action = "D"  # dashes only: quotation marks of code stay as they are typed
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"iobs {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
