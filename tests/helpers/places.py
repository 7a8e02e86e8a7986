"""Where the checkout's folders lie, for tests at any depth of the tree."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
