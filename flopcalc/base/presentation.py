"""How results show themselves: the rooms that compute ask here; `report`, which is above them, answers."""

from __future__ import annotations

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
