"""`flopcalc compare`: several models or workloads side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from flopcalc.api import count
from flopcalc.base.errors import WorkloadError, format_nearest
from flopcalc.cli.command import Command
from flopcalc.cli.estimate import EXACT
from flopcalc.cli.options import LISTED, complete_model, takes_setup
from flopcalc.cli.pages import FORMATS, format_options, write_page
from flopcalc.cli.streams import show_json
from flopcalc.report.comparison import Column, format_comparison
from flopcalc.setup.counting import find_shares
from flopcalc.setup.fields import list_fields
from flopcalc.setup.setup import make_setup

_LENGTHS = ("seq", "text", "lengths")
_TIMES = ("step_time", "tokens_per_second")


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
    for name in (*LISTED, "recompute"):
        if "," in given.get(name, ""):
            settings = [f"{name}={value.strip()}" for value in given[name].split(",")]
            each = " ".join(
                f"'{model};{one}'" if "@" in model else f"{model}@{one}" for model in models for one in settings
            )
            raise WorkloadError(
                f"compare takes one --{name} for all columns; for several write {each}"
                + (f". `flopcalc estimate MODEL --{name} {given[name]}` lists them" if name in LISTED else "")
                + (", `--plot FILE` draws a curve" if name in ("batch", "seq") else "")
            )
    columns = [_count(text, given) for text in models]
    if style == "json":
        show_json([column.to_dict() for column in columns])
    elif style == "html":
        from flopcalc.report.html.comparison import make_comparison_page

        write_page(make_comparison_page([column.to_dict() for column in columns]), output)
    elif style == "csv":
        from flopcalc.report.estimate import format_lines

        click.echo(format_lines([*_EXACT], ([read(column) for read in _EXACT.values()] for column in columns)))
    else:
        click.echo(format_comparison(columns, is_markdown=style == "markdown"))


def _count(text: str, given: dict[str, Any]) -> Column:
    name, own = _read_column(text, given)
    try:
        setup = make_setup("compare", name, own)
    except WorkloadError as error:
        raise WorkloadError(f"{text!r}: {error}") from None if "@" in text else error
    asked = count(setup)
    model_share, hardware_share, notes = find_shares(asked, setup)
    return Column(text, asked.estimate, model_share, hardware_share, asked.notes + notes)


_EXACT: dict[str, Callable[[Column], Any]] = {
    "label": lambda each: each.label,
    "model_type": lambda each: each.estimate.terms[0][0].source.config["model_type"],
    "parameters": lambda each: each.estimate.parameters["total"],
    **EXACT,
}


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
