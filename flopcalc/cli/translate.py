"""`flopcalc translate`: one quoted performance under every convention, or the convention that a printed rate is in."""

from __future__ import annotations

from typing import Any

import click

from flopcalc.api import count, translate_counted
from flopcalc.base.errors import WorkloadError
from flopcalc.cli.command import Command
from flopcalc.cli.options import takes_setup
from flopcalc.cli.streams import show_json
from flopcalc.setup.setup import make_setup

FORMATS = ("table", "json", "csv", "markdown")


@click.command(cls=Command)
@takes_setup("translate")
@click.option("--format", "style", type=click.Choice(FORMATS), help="Default table.")
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
def translate(model: str, style: str | None, as_json: bool, given: dict[str, Any]) -> None:
    """Convert a quoted MFU or rate into every convention that people quote.

    Without --from, give --tokens-per-second and the printed --tflops or --mfu: this finds the conventions that agree.
    Examples:

      flopcalc translate llama-3.1-8b --seq 4096 --mfu 45% --from 6nd --device h100-sxm

      flopcalc translate deepseek-v3 --seq 4096 --tokens-per-second 6288 --tflops 1635
    """
    if as_json and style not in (None, "json"):
        raise WorkloadError(f"--json contradicts --format {style}")
    style = "json" if as_json else style or "table"
    setup = make_setup("translate", model, given)
    found = translate_counted(count(setup), setup)
    if style == "json":
        show_json(found.to_dict())
        return
    from flopcalc.report.translation import format_translation, format_translation_csv

    if style == "csv":
        click.echo(format_translation_csv(found))
    else:
        click.echo(format_translation(found, "github" if style == "markdown" else "simple"))
