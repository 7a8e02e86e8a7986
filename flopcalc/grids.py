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
    """A table for a notebook."""
    from html import escape

    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in headers)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:right'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
