"""The page of listed values, as in --seq 1k,2k: a row for each combination."""

from __future__ import annotations

from collections.abc import Sequence

from flopcalc.report.html.page import list_notes, make_page, section, table
from flopcalc.report.html.pictures import Bar, draw_bars


def make_list_page(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: Sequence[str],
    *,
    label: str,
    bars: Sequence[Bar],
) -> str:
    """A bar for each combination, of the value that `label` names, and a table of all values."""
    parts = [
        section(label, draw_bars(label, bars)),
        section("All values", table(headers, rows, caption="A row for each combination")),
        *list_notes(notes),
    ]
    return make_page(title, f"{len(rows)} combinations of the listed values", parts)
