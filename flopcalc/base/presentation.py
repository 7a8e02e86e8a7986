"""How results show themselves: rooms that compute ask here; `report`, which is above them, answers. And progress."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from flopcalc.base.rows import Table
    from flopcalc.base.vocabulary import By

    class Presenter(Protocol):
        """The functions of flopcalc/report/notebook.py."""

        def make_table(self, estimate: Any, by: By, depth: int | None) -> Table: ...

        def describe_work(self, estimate: Any) -> str: ...

        def show_estimate(self, estimate: Any) -> str: ...

        def show_prediction(self, prediction: Any) -> str: ...

        def show_plan(self, plan: Any) -> str: ...

        def show_translation(self, translation: Any) -> str: ...

        def show_answer(self, found: Any) -> str: ...


_load: Callable[[], Presenter]


def set_presenter(load: Callable[[], Presenter]) -> None:
    """What loads the presenter when a result is first shown."""
    global _load
    _load = load


def find_presenter() -> Presenter:
    return _load()


def show_progress(text: str) -> None:
    """One line on stderr in place of the one before; an empty one takes it away. Nothing where no terminal shows it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[:79]}")
        sys.stderr.flush()
