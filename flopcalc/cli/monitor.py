"""`flopcalc monitor show | plot`: a training monitor's log, summed up or drawn."""

from __future__ import annotations

import json
from typing import Any

import click

from flopcalc.cli.command import Group
from flopcalc.cli.pages import format_options, write_page
from flopcalc.grids import find_width, format_grid, wrap
from flopcalc.monitor.log import METRICS, find_series, load_log, sparkline, summarize
from flopcalc.monitor.log import plot as plot_log
from flopcalc.report.labels import METRICS as LABELS
from flopcalc.report.labels import SHARES
from flopcalc.units import format_parameters, format_rate

_MOST_EVENTS = 20
_AROUND_CURVE = 28  # characters before and behind a curve, as "100.00 % to 100.00 %"
_ALWAYS = ("mfu", "tokens_per_second", "step_time_s")


@click.group(cls=Group)
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
        click.echo(json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False))
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
    click.echo("\n".join(_format(summary, find_series(chosen, METRICS["mfu"]))))


@monitor.command()
@click.argument("log")
@click.option("-o", "--output", required=True, help="The image to write: .png, .svg or .pdf.")
def plot(log: str, output: str) -> None:
    """Draw MFU, step time and loss over the steps of LOG."""
    plot_log(load_log(log), output)
    click.echo(f"written: {output}")


def _format(summary: dict[str, Any], shares: list[float | None]) -> list[str]:
    state = "ended" if summary["is_ended"] else "no end yet: still running, or killed"
    lines = [*wrap(f"{summary['file']}: run {summary['run']} of {summary['runs']}, {state}", rest="  "), ""]
    parameters, peak = summary["parameters"], summary["peak_flops_per_s"]
    facts = {
        "model": [("", summary["model"]), ("parameters ", format_parameters(parameters) if parameters else None)],
        "device": [
            ("", summary["device"]),
            ("", summary["dtype"]),
            ("peak ", format_rate(peak) if peak else "not known"),
        ],
        "mode": [("", summary["mode"]), ("source ", summary["source"]), ("convention ", summary["convention"])],
        "ranks": [("", summary["world"]), ("figures of ", summary["scope"])],
        "steps": [("", _format_steps(summary))],
    }
    for name, values in facts.items():
        known = [f"{word}{value}" for word, value in values if value is not None]
        lines += wrap(", ".join(known) or "not known", f"{name:<8}", " " * 8)
    rows = []
    for name, label in LABELS.items():
        values = summary["metrics"][name]
        if values is not None or name in _ALWAYS:
            shown = [_format_value(name, values[key]) if values else "-" for key in ("mean", "median", "last")]
            rows.append([label, *shown])
    lines += ["", format_grid(["", "mean", "median", "last"], rows, keys=1)]
    levels = [share for share in shares if share is not None]
    if levels:
        width = min(60, (find_width() or 80) - _AROUND_CURVE)
        curve = sparkline(shares, width)
        lines += ["", f"MFU  {curve}  {_format_share(min(levels))} to {_format_share(max(levels))}"]
    if summary["datasets"]:
        names = sorted({name for values in summary["datasets"].values() for name in values})
        rows = [
            [dataset, *(f"{values[name]:,.4g}" if name in values else "-" for name in names)]
            for dataset, values in summary["datasets"].items()
        ]
        lines += ["", format_grid(["dataset", *names], rows, keys=1)]
    lines += ["", *_format_goodput(summary["goodput"])]
    if summary["stragglers"]:
        lines += wrap(f"slow ranks: {', '.join(map(str, summary['stragglers']))}", rest="  ")
    if summary["unreadable_lines"]:
        count = summary["unreadable_lines"]
        lines += wrap(f"unreadable lines left out: {count} (a process was killed while it wrote)", rest="  ")
    events = summary["events"]
    if events:
        lines += ["", f"warnings ({len(events)})"]
        for event in events[:_MOST_EVENTS]:
            where = "" if event["step"] is None else f"step {event['step']}: "
            lines += wrap(f"{where}{' '.join(event['message'].split())}", "  ", " " * 4)
        if len(events) > _MOST_EVENTS:
            lines.append(f"  … and {len(events) - _MOST_EVENTS} more: --json lists all")
    return lines


def _format_steps(summary: dict[str, object]) -> str:
    if summary["last_step"] is None:
        return f"none, {summary['records']} records"
    return f"{summary['first_step']:,} to {summary['last_step']:,}, {summary['records']:,} records"


def _format_goodput(goodput: dict[str, Any] | None) -> list[str]:
    if goodput is None or goodput["share"] is None:
        return ["goodput not known yet"]
    elapsed_s = goodput["elapsed_s"]
    lost = [(cause, seconds) for cause, seconds in goodput["lost_s"].items() if seconds]
    lost.sort(key=lambda entry: -entry[1])
    causes = ", ".join(f"{cause} {_format_time(seconds)}" for cause, seconds in lost) or "nothing"
    of = "" if elapsed_s is None else f" of {_format_time(elapsed_s)}"
    return wrap(f"goodput {_format_share(goodput['share'])}{of}; lost: {causes}", rest="  ")


def _format_value(name: str, value: float) -> str:
    if name in SHARES:
        return _format_share(value)
    if name.endswith("_s"):
        return _format_time(value)
    if name == "loss":
        return f"{value:.4f}"
    return f"{value:,.1f}"


def _format_share(value: float) -> str:
    return f"{100 * value:.2f} %"


def _format_time(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms" if abs(seconds) < 1 else f"{seconds:,.2f} s"
