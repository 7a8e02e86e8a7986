"""`flopcalc compare`: several models or workloads side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from flopcalc.api import count
from flopcalc.cli.command import Command
from flopcalc.cli.estimate import EXACT
from flopcalc.cli.options import complete_model, takes_setup
from flopcalc.cli.pages import FORMATS, format_options, write_page
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.estimate.utilization import Utilization
from flopcalc.errors import WorkloadError, format_nearest
from flopcalc.grids import format_grid, wrap
from flopcalc.setup.counting import find_shares
from flopcalc.setup.fields import list_fields
from flopcalc.setup.setup import make_setup
from flopcalc.units import format_bytes, format_flops, format_parameters

_LENGTHS = ("seq", "text", "lengths")
_TIMES = ("step_time", "tokens_per_second")
_MIXED = "Different conventions stand side by side: do not compare them."


class Column(NamedTuple):
    """One of the models or workloads."""

    label: str
    estimate: Estimate
    mfu: Utilization | None
    hfu: Utilization | None
    notes: list[str]  # beside the estimate's own

    def to_dict(self) -> dict[str, Any]:
        shown = {"label": self.label, **self.estimate.to_dict(1)}
        shown["notes"] += self.notes
        shown["mfu"] = self.mfu.to_dict() if self.mfu else None
        shown["hfu"] = self.hfu.to_dict() if self.hfu else None
        return shown


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True, shell_complete=complete_model, metavar="MODEL[@key=value;…] …")
@takes_setup("compare", has_model=False)
@format_options(*FORMATS)
def compare(models: tuple[str, ...], style: str, output: str | None, given: dict[str, Any]) -> None:
    """Several models or workloads side by side.

    Options apply to all columns. MODEL@key=value;key=value changes them for one. Examples:

      flopcalc compare llama-3.1-8b qwen3-8b --seq 2048

      flopcalc compare qwen2-vl@seq=2048 'qwen2-vl@seq=4096;image=1024x768'

      flopcalc compare gpt2@step_time=30ms gpt2-xl@step_time=350ms --seq 1024 --device h200
    """
    columns = [_count(text, given) for text in models]
    if style == "json":
        click.echo(json.dumps([column.to_dict() for column in columns], indent=2, ensure_ascii=False))
    elif style == "html":
        from flopcalc.report.html.comparison import make_comparison_page

        write_page(make_comparison_page([column.to_dict() for column in columns]), output)
    elif style == "csv":
        from flopcalc.report.estimate import format_lines

        click.echo(format_lines([*_EXACT], ([read(column) for read in _EXACT.values()] for column in columns)))
    else:
        click.echo(_format(columns, is_markdown=style == "markdown"))


def _count(text: str, given: dict[str, Any]) -> Column:
    name, own = _read_column(text, given)
    try:
        setup = make_setup("compare", name, own)
    except WorkloadError as error:
        raise WorkloadError(f"{text!r}: {error}") from None if "@" in text else error
    asked = count(setup)
    model_share, hardware_share, notes = find_shares(asked.estimate, setup)
    return Column(text, asked.estimate, model_share, hardware_share, asked.notes + notes)


def _format(columns: list[Column], is_markdown: bool) -> str:
    rows = [[name, *(read(column) for column in columns)] for name, read in _ROWS.items()]
    rows = [row for row in rows if row[0] not in _RARE or set(row[1:]) != {"-"}]
    parts = [column.estimate.by_component() for column in columns]
    for part in parts[0]:
        if any(sum(part_sums[part]) for part_sums in parts):
            rows.append([part, *(_format_some(sum(part_sums[part])) for part_sums in parts)])
    headers = ["", *(column.label for column in columns)]
    lines = [format_grid(headers, rows, "github" if is_markdown else "simple", keys=1)]
    notes = [f"{column.label}: {note}" for column in columns for note in (*column.estimate.notes, *column.notes)]
    notes += [_MIXED] if len({column.estimate.convention for column in columns}) > 1 else []
    if is_markdown:
        return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip("\n")
    return "\n".join([*lines, *(line for note in notes for line in wrap(note, rest="  "))])


def _format_some(flops: int) -> str:
    return format_flops(flops) if flops else "-"


def _percent(share: Utilization | None) -> str:
    return "-" if share is None or share.value is None else f"{100 * share.value:.2f} %"


_ROWS: dict[str, Callable[[Column], str]] = {
    "model type": lambda each: each.estimate.terms[0][0].source.config["model_type"],
    "head": lambda each: head if (head := each.estimate.terms[0][0].head) != "lm" else "-",
    "parameters": lambda each: format_parameters(each.estimate.parameters["total"]),
    "active": lambda each: (
        format_parameters(each.estimate.parameters["active"]) if "active" in each.estimate.parameters else "not known"
    ),
    "weights": lambda each: _format_formats(
        each.estimate, format_bytes(sum(held.total_bytes for held in each.estimate.weights))
    ),
    "computed in": lambda each: _format_formats(each.estimate, ", ".join(each.estimate.by_dtype())),
    "tokens": lambda each: f"{each.estimate.tokens:,}",
    "convention": lambda each: each.estimate.convention,
    "forward": lambda each: format_flops(each.estimate.forward),
    "backward": lambda each: _format_some(each.estimate.backward),
    "recompute": lambda each: _format_some(each.estimate.recompute),
    "clipping": lambda each: _format_some(each.estimate.clipping),
    "step": lambda each: format_flops(each.estimate.total),
    "per token": lambda each: _format_some(each.estimate.per_token),
    "MFU": lambda each: _percent(each.mfu),
    "HFU": lambda each: _percent(each.hfu),
}
_RARE = (
    "head",
    "weights",
    "computed in",
    "recompute",
    "clipping",
    "MFU",
    "HFU",
)  # rows where some column has them
_EXACT: dict[str, Callable[[Column], Any]] = {
    "label": lambda each: each.label,
    "model_type": lambda each: each.estimate.terms[0][0].source.config["model_type"],
    "parameters": lambda each: each.estimate.parameters["total"],
    **EXACT,
}


def _format_formats(estimate: Estimate, text: str) -> str:
    """Nothing where all is bf16, as most models are."""
    return "-" if estimate.terms[0].estimator.formats.is_default else text


def _read_column(text: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """'name@seq=2048;batch=2' -> the name, and the fields with those changed."""
    name, at, settings = text.partition("@")
    fields = {each: field for each, field in list_fields("compare").items() if field.in_doors}
    own = dict(given)
    chosen: set[str] = set()
    for piece in settings.split(";") if at else []:
        key, equals, value = piece.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in fields:
            near = format_nearest(key, fields)
            raise WorkloadError(f"{text!r}: {piece!r} is not key=value of a workload option.{near}")
        if key in chosen:
            raise WorkloadError(f"{text!r}: {key} is given twice: give it once")
        for group in (_LENGTHS, _TIMES):  # a column's own length or time replaces the one given for all
            if key in group and not chosen & set(group):
                own = {each: kept for each, kept in own.items() if each not in group}
        if key == "lengths" and "batch" not in chosen:
            own.pop("batch", None)
        chosen.add(key)
        own[key] = tuple(value.split("+")) if fields[key].repeats else value
    return name, own
