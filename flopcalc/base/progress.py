"""One line on a terminal that says how far long work is."""

from __future__ import annotations

import sys


def show_progress(text: str) -> None:
    """Show a line on stderr in place of the one before; an empty one takes it away. Nothing without a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[:79]}")
        sys.stderr.flush()
