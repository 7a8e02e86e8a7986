"""Results of several combinations of values in, one table out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flopcalc.base.text_table import format_grid, format_text

Varied = Mapping[str, float | str]  # option -> its value in one combination


def format_list(
    varied: Sequence[Varied],
    cells: Sequence[Mapping[str, str | None]],
    notes: Sequence[str],
    *,
    title: str,
    style: str = "simple",
) -> str:
    """A row for each combination, then the notes."""
    lines = [format_text(title), "", format_grid(*join_cells(varied, cells), style, keys=len(varied[0]))]
    lines += ["", *(format_text(note, "note  ", " " * 6) for note in notes)] if notes else []
    return "\n".join(lines)


def join_cells(
    varied: Sequence[Varied], cells: Sequence[Mapping[str, str | None]]
) -> tuple[list[str], list[list[str]]]:
    """Headers and rows; columns without any value are left out."""
    names = [name for name in cells[0] if any(row[name] is not None for row in cells)]
    table = [
        [
            *(f"{value:,}" if isinstance(value, (int, float)) else value for value in values.values()),
            *(row[name] or "-" for name in names),
        ]
        for values, row in zip(varied, cells, strict=True)
    ]
    return [*varied[0], *names], table
