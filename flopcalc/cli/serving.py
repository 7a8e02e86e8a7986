"""`flopcalc serving`: a model behind a serving engine: what fits, latency, tokens per second, cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from flopcalc.base.errors import WorkloadError
from flopcalc.base.progress import show_progress
from flopcalc.cli.command import Command
from flopcalc.cli.options import FieldOption, takes_setup
from flopcalc.cli.pages import format_options
from flopcalc.cli.streams import show_json
from flopcalc.setup.setup import make_setup


def _reads_lines(function: Callable[..., Any]) -> Callable[..., Any]:
    """--launch gives what its line says where no option does; --check needs no question at all."""

    @wraps(function)
    def run(*, launch: str | None, check: str | None, **options: Any) -> Any:
        if check is not None:
            from flopcalc.report.serving import format_audit
            from flopcalc.server.audit import check_rows

            rows, as_json = check_rows(check), options["as_json"]
            return show_json({"schema": 1, "rows": rows}) if as_json else click.echo(format_audit(check, rows))
        if launch is not None:
            from flopcalc.server.launch import read_launch

            found = read_launch(launch)
            line, own = found.pop("engine_args", ""), options.get("engine_args") or ""
            options["engine_args"] = f"{line} {own}".strip() or None
            if options.get("model") is None and options.get("first") is None:
                options["first"] = found.get("model")
            options["engine"] = options.get("engine") or found["engine"]
        return function(**options)

    return run


@click.command(cls=Command)
@_reads_lines
@takes_setup("serving")
@click.option("--launch", cls=FieldOption, group="model", metavar="LINE",
              help="A line of vllm serve, sglang.launch_server or trtllm-serve; options win over it.")  # fmt: skip
@click.option("--check", metavar="FILE",
              help="CSV file of measured rows: name those that are faster than physics allows.")  # fmt: skip
@format_options("table", "json", "html")
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE",
    help="Plot tokens per second over a list of values: .png, .svg or .pdf.",
)
def serving(model: str, style: str, output: str | None, plot_file: str | None, given: dict[str, Any]) -> None:
    """A model behind a serving engine: what fits, latency, tokens per second and cost.

    Lists in --device, --gpus, --concurrency, --rate and --users give a row for each combination. Examples:

      flopcalc serving llama-3.1-8b --device h100 --tp 1 --input-len 1k --output-len 256 --concurrency 32

      flopcalc serving llama-3.1-8b --device l4,l40s,h100 --input-len 1k --output-len 256 --rate 2,8

      flopcalc serving gpt-oss-120b --weights mxfp4 --device b200 --tp 2 --input-len 8k --output-len 1k --rate 4

      flopcalc serving llama-3.1-8b --device h100 --input-len 1k..4k --output-len 256 --users 200 --think 20s --ttft 2s
    """
    from flopcalc.cli import lists
    from flopcalc.report.serving import describe_list, format_answer, list_rows
    from flopcalc.server.serve import serve_setup

    rows = lists.expand(given)
    if len(rows) == 1 and (plot_file is not None or style == "html"):
        raise WorkloadError("a curve needs a list, such as --concurrency 1,8,64")
    answers = []
    try:
        for number, row in enumerate(rows, 1):
            if len(rows) > 1:
                show_progress(f"{row.label} ({number} of {len(rows)})")
            answers.append(serve_setup(make_setup("serving", model, row.options)))
    finally:
        show_progress("")
    if len(rows) == 1:
        show_json(answers[0].to_dict()) if style == "json" else click.echo(format_answer(answers[0]))
        return
    speeds = [each.times["tokens_per_s"].mid if each.times else 0.0 for each in answers]
    if plot_file is not None:
        points = [(speed, each.fits) for speed, each in zip(speeds, answers, strict=True)]
        lists.draw(plot_file, rows, points, "tokens/s", describe_list(answers))
    lists.show(
        rows,
        [each.to_dict() for each in answers],
        *list_rows(answers),
        title=describe_list(answers),
        style=style,
        output=output,
        label="Tokens per second",
        bars=[(speed, f"{speed:,.0f}") for speed in speeds],
        plot_file=plot_file,
    )
