"""`flopcalc explain`: the formula of an operation, with its numbers filled in."""

from __future__ import annotations

import json

import click

from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import make_estimate
from flopcalc.cli.options.workload import workload_options
from flopcalc.report.explanation import explain_rows, format_explanation


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
    click.echo(format_explanation(asked.estimate.convention, shown))
