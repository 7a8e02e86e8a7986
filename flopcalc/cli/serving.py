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

_MOST_POINTS = 50


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
    help="Plot tokens per second over a list of concurrencies: .png, .svg or .pdf.",
)
def serving(model: str, style: str, output: str | None, plot_file: str | None, given: dict[str, Any]) -> None:
    """A model behind a serving engine: what fits, latency, tokens per second and cost.

    A list in --concurrency gives a row for each. Examples:

      flopcalc serving llama-3.1-8b --device h100 --tp 1 --input-len 1k --output-len 256 --concurrency 32

      flopcalc serving gpt-oss-120b --weights mxfp4 --device b200 --tp 2 --input-len 8k --output-len 1k --rate 4

      flopcalc serving llama-3.1-8b --device h100 --input-len 1k..4k --output-len 256 --users 200 --think 20s --ttft 2s
    """
    from flopcalc.report.serving import format_answer, format_curve, make_cells
    from flopcalc.server.serve import serve_setup

    loads = [load.strip() for load in str(given.get("concurrency", "")).split(",")]
    if len(loads) == 1 and (plot_file is not None or style == "html"):
        raise WorkloadError("a curve needs a list, such as --concurrency 1,8,64")
    if len(loads) > _MOST_POINTS:
        raise WorkloadError(f"--concurrency: {len(loads):,} loads, more than the {_MOST_POINTS} of one curve")
    questions = [{**given, "concurrency": load} if load else given for load in loads]
    answers = []
    try:
        for number, question in enumerate(questions, 1):
            if len(questions) > 1:
                show_progress(f"load {number} of {len(questions)}")
            answers.append(serve_setup(make_setup("serving", model, question)))
    finally:
        show_progress("")
    title = f"{answers[0].model}, {answers[0].engine.name}, {answers[0].gpus} × {answers[0].device.name}"
    if plot_file is not None:
        from flopcalc.base.figures import CurvePoint, draw_curves

        points = [CurvePoint(int(answer.traffic.concurrency or 0), answer.times["tokens_per_s"].mid)
                  for answer in answers if answer.times]  # fmt: skip
        draw_curves(plot_file, {"": points}, "concurrency", "tokens/s", title)
    if style == "json":
        shown = [answer.to_dict() for answer in answers]
        show_json(shown[0] if len(shown) == 1 else {"schema": 1, "rows": shown})
    elif style == "html":
        from flopcalc.cli.lists import ListedRow, show

        rows = [ListedRow({"concurrency": load}, question) for load, question in zip(loads, questions, strict=True)]
        bars = [(answer.times["tokens_per_s"].mid, f"{answer.times['tokens_per_s'].mid:,.0f}") if answer.times
                else (0.0, "-") for answer in answers]  # fmt: skip
        show(
            rows,
            (),
            [make_cells(answer) for answer in answers],
            [answer.notes for answer in answers],
            title=title,
            style=style,
            output=output,
            label="Tokens per second",
            bars=bars,
        )
    else:
        click.echo(format_answer(answers[0]) if len(answers) == 1 else format_curve(answers))
    if plot_file is not None and style == "table":
        click.echo(f"written: {plot_file}")
