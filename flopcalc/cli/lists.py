"""Lists of values, as in --seq 1k,2k,4k: one result each, shown as a table, as JSON rows or as a curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

import click

from flopcalc.base.errors import WorkloadError
from flopcalc.base.units import parse_number, parse_size
from flopcalc.cli.options import LISTED
from flopcalc.cli.pages import write_page
from flopcalc.cli.streams import show_json

MOST_ROWS = 64
Result = TypeVar("Result")


class ListedRow(NamedTuple):
    """One combination of listed values: what was varied, and the options of the single result."""

    varied: dict[str, float | str]
    options: dict[str, Any]

    @property
    def label(self) -> str:
        return " ".join(f"--{name} {value}" for name, value in self.varied.items())


def expand(options: Mapping[str, object]) -> list[ListedRow]:
    """Every combination of the values that the options list."""
    lists: dict[str, list[float | str]] = {}
    for name in LISTED:
        text = options.get(name)
        if isinstance(text, str) and "," in text:
            pieces = [piece.strip() for piece in text.split(",")]
            if "" in pieces:
                raise WorkloadError(f"--{name}: {text!r} has an empty value")
            lists[name] = [_read_value(piece, name) for piece in pieces]
            if len(set(lists[name])) < len(pieces):
                raise WorkloadError(f"--{name}: {text!r} lists a value twice")
    count = math.prod(len(values) for values in lists.values())
    if count > MOST_ROWS:
        raise WorkloadError(f"{count} combinations of the listed values: at most {MOST_ROWS} are shown")
    found = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    return [ListedRow(varied, {**options, **{name: str(value) for name, value in varied.items()}}) for varied in found]


def _read_value(text: str, name: str) -> float | str:
    if name == "rate":
        rate = parse_number(text, name)
        return int(rate) if rate.is_integer() else rate
    return text if name == "device" else parse_size(text, name)


def show(
    rows: Sequence[ListedRow],
    results: Iterable[Mapping[str, object]],
    cells: Sequence[Mapping[str, str | None]],
    notes: Sequence[Sequence[str]],
    *,
    title: str,
    style: str,
    output: str | None,
    label: str,
    bars: Sequence[tuple[float, str]],
    plot_file: str | None = None,
) -> None:
    """A row for each result: in JSON the single result and what makes it differ, else a table, and notes each once.

    A page also has a bar for each row, of the value that `label` names.
    """
    if style == "json":
        shown = [{"varied": row.varied, **result} for row, result in zip(rows, results, strict=True)]
        show_json({"schema": 1, "rows": shown})
        return
    named = _name_notes(rows, notes)
    if style == "html":
        from flopcalc.report.html.lists import make_list_page
        from flopcalc.report.html.pictures import Bar
        from flopcalc.report.lists import join_cells

        headers, table = join_cells([row.varied for row in rows], cells)
        write_page(
            make_list_page(
                title,
                headers,
                table,
                named,
                label=label,
                bars=[Bar(row.label, *bar) for row, bar in zip(rows, bars, strict=True)],
            ),
            output,
        )
        return
    from flopcalc.report.lists import format_list

    click.echo(
        format_list(
            [row.varied for row in rows], cells, named, title=title, style="github" if style == "markdown" else "simple"
        )
    )
    if plot_file is not None:
        click.echo(f"written: {plot_file}")


def _name_notes(rows: Sequence[ListedRow], notes: Sequence[Sequence[str]]) -> list[str]:
    """Every note once, with the rows that it is of."""
    every = dict.fromkeys(note for found in notes for note in found)
    return [f"{_name_rows(rows, [note in found for found in notes])}{note}" for note in every]


def show_csv(
    rows: Sequence[ListedRow], columns: Mapping[str, Callable[[Result], object]], results: Sequence[Result]
) -> None:
    """Exact values, a line each."""
    from flopcalc.report.estimate import format_lines

    lines = (
        [*row.varied.values(), *(read(result) for read in columns.values())]
        for row, result in zip(rows, results, strict=True)
    )
    click.echo(format_lines([*rows[0].varied, *columns], lines))


def draw(path: str, rows: Sequence[ListedRow], points: Sequence[tuple[float, bool]], label: str, title: str) -> None:
    """A curve over the list that changes fastest, one line per combination of the others; points say if they fit."""
    from flopcalc.base.figures import CurvePoint, draw_curves

    *others, axis = rows[0].varied
    lines: dict[str, list[CurvePoint]] = {}
    for row, point in zip(rows, points, strict=True):
        name = ", ".join(f"{other} {row.varied[other]}" for other in others)
        lines.setdefault(name, []).append(CurvePoint(row.varied[axis], *point))
    draw_curves(path, lines, axis, label, title)


def _name_rows(rows: Sequence[ListedRow], chosen: Sequence[bool]) -> str:
    """Which rows a note is of, as shortly as can be: nothing for all, the values of one option, or every row."""
    if all(chosen):
        return ""
    for name in rows[0].varied:
        values = {row.varied[name]: is_chosen for row, is_chosen in zip(rows, chosen, strict=True)}
        if all(values[row.varied[name]] == is_chosen for row, is_chosen in zip(rows, chosen, strict=True)):
            return f"--{name} {', '.join(str(value) for value, is_chosen in values.items() if is_chosen)}: "
    labels = (row.label for row, is_chosen in zip(rows, chosen, strict=True) if is_chosen)
    return f"{'; '.join(labels)}: "
