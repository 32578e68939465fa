"""The documentation site: `make docs` builds it into build/docs, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from undertow import __version__  # noqa: E402 - the path above has to come first

project = "undertow"
author = "the undertow authors"
copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_commands",
    "sphinx_docstrings",
    "sphinx_mathml",
    "sphinx_repository_links",
]
exclude_patterns = ["examples"]

myst_enable_extensions = ["amsmath", "dollarmath", "fieldlist"]
myst_heading_anchors = 3  # links between pages go to headings as GitHub names them

nitpicky = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say shapes and dtypes, which types do not
add_module_names = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "undertow"
html_static_path = ["_static"]
html_css_files = ["undertow.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
