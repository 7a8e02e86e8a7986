"""`flopcalc explain`: the formula of an operation, with its numbers filled in."""

from __future__ import annotations

from typing import Any

import click

from flopcalc.api import count
from flopcalc.cli.command import Command
from flopcalc.cli.options import takes_setup
from flopcalc.cli.streams import show_json
from flopcalc.report.explanation import explain_rows, format_explanation, list_operations
from flopcalc.setup.setup import make_setup


@click.command(cls=Command)
@takes_setup("explain")
@click.option(
    "--op", "pattern", metavar="PATTERN", help="Glob of module paths, such as *.q_proj; without it they are listed."
)
@click.option("--json", "as_json", is_flag=True)
def explain(model: str, pattern: str | None, as_json: bool, given: dict[str, Any]) -> None:
    """The formula of an operation with its numbers filled in.

    Without --op, the operations that there are. Example:

      flopcalc explain llama-3.1-8b --seq 2048 --op '*self_attn*'
    """
    asked = count(make_setup("explain", model, given))
    if pattern is None:
        paths = list_operations(asked.estimate)
        hint = f"\n{len(paths)} operations; --op '*{paths[-1].rpartition('.')[2]}' shows the formula of one"
        show_json({"operations": paths}) if as_json else click.echo("\n".join(paths) + hint)
        return
    shown = explain_rows(asked.estimate, pattern)
    if as_json:
        show_json({"convention": asked.estimate.convention, "operations": shown})
        return
    click.echo(format_explanation(asked.estimate.convention, shown))
