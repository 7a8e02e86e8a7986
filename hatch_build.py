"""The README as a package index shows it: a link to a file of this repository leads to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def make_readme(text: str, repository: str) -> str:
    """Every relative link made absolute; pictures are served as they are, not as a page about them."""
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)", rf"![\1]({repository}/raw/main/\2)", text)
    return _LINK.sub(rf"]({repository}/blob/main/\1)", text)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        readme = make_readme(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
