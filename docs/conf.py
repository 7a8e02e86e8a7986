"""Sphinx's settings for the documentation site; `scripts/docs` builds it.

The source folder is the repository's root, so that a link works on the site as it does on GitHub.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.search import languages
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flopcalc import __version__  # noqa: E402

project = "flopcalc"
author = "The flopcalc authors"
copyright = author
release = version = __version__

root_doc = "docs/index"
include_patterns = ["docs/**/*.md", "docs/*.md", "lab/*.md", "lab/**/*.md"]
include_patterns += ["README*.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
exclude_patterns = [".*", "build", "dist", "tests", "wheels"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 100  # longer ones: one parameter per line
smartquotes = False  # they would turn the two hyphens of an option into a dash
default_role = "code"  # docstrings mark code with single backticks

html_theme = "furo"
html_title = f"flopcalc {__version__}"
html_copy_source = False
html_favicon = "../flopcalc/web/static/icon.svg"  # as the page in the browser
templates_path = ["site"]
html_additional_pages = {"index": "start.html"}  # the site's root leads to docs/index.html


class SearchBoth(SearchEnglish):
    """English words, and every two characters of Chinese that follow one another: Chinese writes no spaces."""

    js_splitter_code = """
function splitQuery(query) {
  return (query.match(/[\\u4e00-\\u9fff]+|[\\p{Letter}\\p{Number}_]+/gu) ?? []).flatMap((word) =>
    /^[\\u4e00-\\u9fff]{3,}$/.test(word) ? [...word].slice(1).map((each, at) => word[at] + each) : [word]);
}
"""

    def split(self, input: str) -> list[str]:
        words = []
        for word in re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", input):
            is_long = len(word) > 2 and "\u4e00" <= word[0] <= "\u9fff"
            words += [word[at : at + 2] for at in range(len(word) - 1)] if is_long else [word]
        return words


languages["en"] = SearchBoth


def escape_keywords(*event: Any) -> None:
    """A docstring lists its keywords as plain text, in which `from_` would be a link to a place called from."""
    lines = event[-1]
    lines[:] = [re.sub(r"(?<=[ ,])(\w+)_(?=,|$)", r"\1\\_", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", escape_keywords)
