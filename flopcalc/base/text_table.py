"""Headers and rows become a table: plain text, Markdown or HTML; tables and text keep to the terminal's width."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

Cells: TypeAlias = Sequence[Sequence[Any]]
_USUAL = 80  # columns of text where there is no terminal
_WIDEST_TEXT = 100  # longer lines are hard to read
_NARROWEST = 40  # a narrower terminal is not laid out for
_GAP = "  "
_PADDING = 2  # of a header, where there is room
_LEAST = 14  # a column of words is made no narrower than this while columns can go to a table of their own
_BREAKS = "./_-,;:@=+|"  # a word that is too long is cut after one of these


def find_width() -> int | None:
    """Columns of the terminal, or $COLUMNS; None if the output goes to a file, which has no width."""
    text = os.environ.get("COLUMNS", "")
    columns = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not columns and sys.stdout.isatty():
        try:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL
        except (OSError, ValueError):  # a terminal that does not say
            columns = _USUAL
    return max(columns, _NARROWEST) if columns else None


class _Column(NamedTuple):
    header: str
    cells: tuple[str, ...]
    is_right: bool  # numbers are

    @property
    def width(self) -> int:
        return max(_measure(self.header), self.cells_width)

    @property
    def cells_width(self) -> int:
        return max(map(_measure, self.cells), default=0)

    def narrow(self, width: int) -> _Column:
        """The same with every line cut to a width."""
        header, *cells = ("\n".join(_cut(text, width)) for text in (self.header, *self.cells))
        return _Column(header, tuple(cells), self.is_right)


def format_grid(headers: Sequence[str], rows: Cells, style: str = "simple", keys: int = 0) -> str:
    """A table; style `github` is Markdown, which has no width.

    A table that is wider than the terminal is narrowed: words go to a second line. If that is not enough, its columns
    go to several tables below each other, each with the first `keys` columns; with 0, each with the rows' numbers.
    """
    columns = [
        _Column(str(header), tuple("" if row[at] is None else str(row[at]).strip() for row in rows), is_right)
        for at, (header, is_right) in enumerate(zip(headers, _find_numeric(headers, rows), strict=True))
    ]
    if style != "simple":
        return _format_markdown(columns)
    width = find_width()
    if width is None:
        return _format_table(columns, _PADDING)
    return "\n\n".join(_format_table(part, padding) for part, padding in _fit(columns, keys, width))


def _find_numeric(headers: Sequence[str], rows: Cells) -> list[bool]:
    return [
        bool(rows) and all(str(row[at])[:1].isdigit() or row[at] in ("-", "") for row in rows)
        for at in range(len(headers))
    ]


def _fit(columns: list[_Column], keys: int, width: int) -> list[tuple[list[_Column], int]]:
    """The tables that a table becomes, and how far their headers are padded."""
    for padding in (_PADDING, 0):
        if _add(_pad(columns, padding)) <= width:
            return [(columns, padding)]
    squeezed = _squeeze(columns, width, _LEAST)
    if squeezed is not None:
        return [(squeezed, 0)]
    if not keys:
        count = len(columns[0].cells)
        columns, keys = [_Column("row", tuple(map(str, range(1, count + 1))), True), *columns], 1
    names = columns[:keys]
    taken = min(_add(_pad(names, 0)), width - len(_GAP) - _LEAST)  # long names are cut, to leave room for a value
    parts: list[list[_Column]] = [[]]
    for column in columns[keys:]:
        sizes = [max(each.cells_width, min(_measure(each.header), _LEAST)) for each in (*parts[-1], column)]
        if parts[-1] and taken + len(_GAP) + _add(sizes) > width:
            parts.append([])
        parts[-1].append(column)
    return [(_squeeze([*names, *part], width, 1) or [*names, *part], 0) for part in parts]


def _pad(columns: Sequence[_Column], padding: int) -> list[int]:
    return [max(_measure(column.header) + padding, column.cells_width) for column in columns]


def _add(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _squeeze(columns: Sequence[_Column], width: int, least: int) -> list[_Column] | None:
    """The columns with the widest cut until they fit; numbers are cut only if `least` is 1. None if they cannot fit."""
    widths = [column.width for column in columns]
    floors = []
    for column in columns:
        word = min(_LEAST, max((len(word) for word in column.header.split()), default=0))
        cells = column.cells_width if column.is_right else min(column.cells_width, least)
        floors.append(max(word, cells) if least > 1 else 1)
    while _add(widths) > width:
        spare = [(value, at) for at, value in enumerate(widths) if value > floors[at]]
        if not spare:
            return None
        widths[max(spare)[1]] -= 1
    return [column.narrow(size) for column, size in zip(columns, widths, strict=True)]


def _cut(text: str, width: int) -> list[str]:
    """Lines of at most a width."""
    lines: list[str] = []
    for line in text.split("\n"):
        rest = line
        while len(rest) > width:
            taken, rest = _take_line(rest, width)
            lines.append(taken)
        lines.append(rest)
    return lines


def _take_line(text: str, width: int) -> tuple[str, str]:
    """The first line of at most a width and the rest: cut at a space, else after a mark, else anywhere."""
    if len(text) <= width:
        return text, ""
    at = text.rfind(" ", 0, width + 1)
    if not text[: max(at, 0)].strip():
        at = max(text.rfind(mark, 0, width) for mark in _BREAKS) + 1 or width
    return text[:at].rstrip(), text[at:].lstrip()


def _measure(text: str) -> int:
    return max(map(len, text.split("\n")))


def _format_table(columns: Sequence[_Column], padding: int) -> str:
    from tabulate import SEPARATING_LINE, tabulate  # imported lazily: JSON and CSV need no table

    # The headers are a row, since tabulate would always pad them.
    space = " " * padding
    headers = [space + column.header if column.is_right else column.header + space for column in columns]
    rows = [headers, SEPARATING_LINE, *zip(*(column.cells for column in columns), strict=True)]
    lines = tabulate(
        rows, tablefmt="simple", disable_numparse=True, colalign=_list_sides(columns), preserve_whitespace=True
    )
    return "\n".join(lines.split("\n")[1:-1])  # without the rules above and below


def _format_markdown(columns: Sequence[_Column]) -> str:
    from tabulate import tabulate

    rows = zip(*([cell.replace("\n", "<br>") for cell in column.cells] for column in columns), strict=True)
    headers = [column.header for column in columns]
    return tabulate(rows, headers, "github", disable_numparse=True, colalign=_list_sides(columns))


def _list_sides(columns: Sequence[_Column]) -> list[str]:
    return ["right" if column.is_right else "left" for column in columns]


def wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines of a text, no wider than the terminal; `first` stands before the first line, `rest` before the others."""
    width = min(find_width() or _USUAL, _WIDEST_TEXT)
    lines: list[str] = []
    left = text.replace("\n", " ").rstrip()
    while left:
        start = rest if lines else first
        taken, left = _take_line(left, max(width - len(start), 1))
        lines.append(start + taken)
    return lines


def format_text(text: str, first: str = "", rest: str = "") -> str:
    """The same as one string."""
    return "\n".join(wrap(text, first, rest))


def format_html(headers: Sequence[str], rows: Cells, caption: str = "") -> str:
    """A table for a notebook: the first cell of a row names it, numbers are aligned right."""
    from html import escape

    sides = ["right" if is_number else "left" for is_number in _find_numeric(headers, rows)]

    def format_row(cells: Sequence[object], names: int, scope: str) -> str:
        """The first `names` cells are headers."""
        tags = [("th", f' scope="{scope}"') if at < names else ("td", "") for at in range(len(cells))]
        shown = (
            f'<{tag}{extra} style="text-align:{side}">{escape(str(cell))}</{tag}>'
            for (tag, extra), side, cell in zip(tags, sides, cells, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(format_row(row, 1, "row") for row in rows)
    return f"<table>{title}<thead>{format_row(headers, len(headers), 'col')}</thead><tbody>{body}</tbody></table>"
