"""`flopcalc explain`: the formula of an operation, with its numbers filled in."""

from __future__ import annotations

import json

import click

from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import make_estimate
from flopcalc.cli.options.workload import workload_options
from flopcalc.grids import format_text, wrap
from flopcalc.report.explanation import explain_rows


@click.command(cls=Command)
@model_argument
@click.option(
    "--op", "pattern", required=True, metavar="PATTERN", help="Glob of module paths, such as *.q_proj or *self_attn*."
)
@workload_options
@click.option("--json", "as_json", is_flag=True)
def explain(model: str, pattern: str, as_json: bool, **options: object) -> None:
    """The formula of an operation with its numbers filled in.

    Example: flopcalc explain llama-3.1-8b --seq 2048 --op '*self_attn*'
    """
    asked = make_estimate(model, options)
    shown = explain_rows(asked.estimate, pattern)
    if as_json:
        click.echo(
            json.dumps({"convention": asked.estimate.convention, "operations": shown}, indent=2, ensure_ascii=False)
        )
        return
    click.echo(f"convention {asked.estimate.convention}")
    for entry in shown:
        parameter = f".{entry['parameter']}" if entry["parameter"] not in (None, "weight") else ""
        click.echo("")
        click.echo(format_text(f"{entry['path']}{parameter}  ({entry['kind']} × {entry['count']})", "", "  "))
        for line in entry["lines"]:
            click.echo("\n".join(_wrap_line(line)))


def _wrap_line(line: str) -> list[str]:
    """A formula that is too long has its result on a line of its own."""
    lines = wrap(line, "  ", " " * 13)
    formula, _, result = line.rpartition(" = ")
    if len(lines) == 1 or "=" not in formula:
        return lines
    return [*wrap(formula, "  ", " " * 13), *wrap(f"= {result}", " " * 11, " " * 13)]
