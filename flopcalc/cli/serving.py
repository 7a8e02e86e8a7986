"""`flopcalc serving`: a model behind a serving engine: what fits, latency, tokens per second, cost."""

from __future__ import annotations

from typing import Any

import click

from flopcalc.cli.command import Command
from flopcalc.cli.options import takes_setup
from flopcalc.cli.pages import format_options
from flopcalc.cli.streams import show_json
from flopcalc.setup.setup import make_setup


@click.command(cls=Command)
@takes_setup("serving")
@format_options("table", "json")
def serving(model: str, style: str, output: str | None, given: dict[str, Any]) -> None:
    """A model behind a serving engine: what fits, latency, tokens per second and cost.

    A list in --concurrency gives a row for each. Examples:

      flopcalc serving llama-3.1-8b --device h100 --tp 1 --input-len 1k --output-len 256 --concurrency 32

      flopcalc serving gpt-oss-120b --weights mxfp4 --device b200 --tp 2 --input-len 8k --output-len 1k --rate 4
    """
    from flopcalc.report.serving import format_answer, format_curve
    from flopcalc.server.serve import serve_setup

    loads = [load.strip() for load in str(given.get("concurrency", "")).split(",")]
    answers = [
        serve_setup(make_setup("serving", model, {**given, "concurrency": load} if load else given)) for load in loads
    ]
    if style == "json":
        shown = [answer.to_dict() for answer in answers]
        whole = shown[0] if len(shown) == 1 else {"schema": 1, "rows": shown}
        show_json(whole)
    else:
        click.echo(format_answer(answers[0]) if len(answers) == 1 else format_curve(answers))
