"""Sphinx's settings for the documentation site; `scripts/docs` builds it.

The source folder is the repository's root, so that a link works on the site as it does on GitHub.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flopcalc import __version__  # noqa: E402

project = "flopcalc"
author = "The flopcalc authors"
copyright = author
release = version = __version__

root_doc = "docs/index"
include_patterns = ["docs/**/*.md", "docs/*.md", "lab/**/*.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "dist", "tests", "wheels"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 100  # longer ones: one parameter per line
default_role = "code"  # docstrings mark code with single backticks

html_theme = "furo"
html_title = f"flopcalc {__version__}"
html_copy_source = False
html_favicon = "../flopcalc/web/static/icon.svg"  # as the page in the browser
templates_path = ["site"]
html_additional_pages = {"index": "start.html"}  # the site's root leads to docs/index.html
