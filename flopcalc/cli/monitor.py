"""`flopcalc monitor show | plot`: a training monitor's log, summed up or drawn."""

from __future__ import annotations

import click

from flopcalc.cli.command import CommandGroup
from flopcalc.cli.pages import format_options, write_page
from flopcalc.cli.streams import show_json
from flopcalc.monitor.log import METRICS, find_series, load_log, summarize
from flopcalc.monitor.log import plot as plot_log


@click.group(cls=CommandGroup)
def monitor() -> None:
    """Summarize or plot the log of a training monitor."""


@monitor.command()
@click.argument("log")
@click.option(
    "--run", type=click.IntRange(min=1), help="Number of the run in the file; 1 is the first (default: the last)."
)
@click.option("--last", type=click.IntRange(min=1), help="Only the last N records of the run.")
@format_options("table", "json", "html")
def show(log: str, run: int | None, last: int | None, style: str, output: str | None) -> None:
    """Summarize LOG: a JSONL file, or the folder with a monitor's flopcalc.jsonl."""
    found = load_log(log)
    summary = summarize(found, run, last)
    if style == "json":
        show_json(summary)
        return
    chosen = found.runs[summary["run"] - 1]
    if last is not None:
        chosen = chosen._replace(steps=chosen.steps[-last:])
    if style == "html":
        from flopcalc.report.html.monitor import make_monitor_page

        steps = find_series(chosen, "global_step")
        series = {
            name: [
                (step, value) for step, value in zip(steps, find_series(chosen, key), strict=True) if step is not None
            ]
            for name, key in METRICS.items()
        }
        write_page(make_monitor_page(summary, series), output)
        return
    from flopcalc.report.monitor import format_summary

    click.echo(format_summary(summary, find_series(chosen, METRICS["mfu"])))


@monitor.command()
@click.argument("log")
@click.option("-o", "--output", required=True, help="The image to write: .png, .svg or .pdf.")
def plot(log: str, output: str) -> None:
    """Draw MFU, step time and loss over the steps of LOG."""
    plot_log(load_log(log), output)
    click.echo(f"written: {output}")
