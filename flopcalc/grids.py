"""Headers and rows become a table: plain text, Markdown or HTML; and text is wrapped to the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Cells: TypeAlias = Sequence[Sequence[Any]]


def format_grid(headers: Sequence[str], rows: Cells, style: str = "simple") -> str:
    from tabulate import tabulate

    numeric = ["right" if _looks_numeric(rows, column) else "left" for column in range(len(headers))]
    return tabulate(rows, headers=headers, tablefmt=style, colalign=numeric if rows else None, disable_numparse=True)


def _looks_numeric(rows: Cells, column: int) -> bool:
    return bool(rows) and all(str(row[column])[:1].isdigit() or row[column] in ("-", "") for row in rows)


def wrap(text: str, first: str, rest: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def format_html(headers: Sequence[str], rows: Cells, caption: str = "") -> str:
    """A table for a notebook: the first cell of a row names it, numbers are aligned right."""
    from html import escape

    sides = ["right" if _looks_numeric(rows, column) else "left" for column in range(len(headers))]

    def format_row(cells: Sequence[Any], names: int, scope: str) -> str:
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
