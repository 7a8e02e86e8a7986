"""Rows with named columns: an HTML table in a notebook, a short line in a terminal, a pandas DataFrame on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from flopcalc.base.data import describe_install
from flopcalc.base.errors import FlopcalcError

MOST_SHOWN = 100  # rows of a table in a notebook

Row = TypeVar("Row", bound=tuple[Any, ...])


def make_frame(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Any:
    """A pandas DataFrame; an error with the install command where pandas is missing."""
    try:
        import pandas  # lazily: nothing else needs it
    except ImportError:
        raise FlopcalcError(f"to_pandas() needs pandas: {describe_install('pandas')}") from None
    # Column by column, so that exact ints stay ints; a value of several parts (a layout) is given as its text.
    cells = [[str(cell) if isinstance(cell, tuple) else cell for cell in row] for row in rows]
    return pandas.DataFrame({name: [row[at] for row in cells] for at, name in enumerate(columns)})


def show_rows(
    columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "", notes: Sequence[str] = ()
) -> str:
    """The first rows as an HTML table; how many follow is said below it, then the notes."""
    from html import escape

    from flopcalc.base.text_table import format_html  # only notebooks need both

    left = len(rows) - MOST_SHOWN
    more = f"<p>… and {left:,} more rows: to_pandas() has all</p>" if left > 0 else ""
    told = f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""
    return format_html(columns, [[_format(cell) for cell in row] for row in rows[:MOST_SHOWN]], caption) + more + told


def _format(cell: object) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return f"{cell:,.6g}" if isinstance(cell, float) else str(cell)


def shorten(text: str, limit: int = 60) -> str:
    """For a short repr: the text, cut where it is longer."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class Table(NamedTuple):
    """Headers and rows."""

    headers: list[str]
    rows: Sequence[Sequence[Any]]

    def __repr__(self) -> str:
        return _describe("Table", len(self.rows), self.headers)

    def _repr_html_(self) -> str:
        return show_rows(self.headers, self.rows)

    def to_pandas(self) -> Any:
        """A pandas DataFrame of the same rows."""
        return make_frame(self.headers, self.rows)


class _Shown:
    """What named tuples of one kind show of themselves together."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        return _describe(type(self).__name__, len(self), _find_fields(self))

    def _repr_html_(self: Any) -> str:
        return show_rows(_find_fields(self), self)

    def to_pandas(self: Any) -> Any:
        """A pandas DataFrame with a column for each field."""
        return make_frame(_find_fields(self), self)


class Rows(_Shown, list[Row]):
    """A list of named tuples of one kind."""


class FrozenRows(_Shown, tuple[Row, ...]):
    """A tuple of named tuples of one kind."""

    __slots__ = ()


def _find_fields(rows: Iterable[object]) -> tuple[str, ...]:
    """Names of the columns; none where there is no row."""
    first: Iterator[object] = iter(rows)
    return getattr(next(first, ()), "_fields", ())


def _describe(kind: str, count: int, columns: Sequence[str]) -> str:
    return f"{kind}({count:,} row{'s' * (count != 1)}: {shorten(', '.join(columns), 200)})"
