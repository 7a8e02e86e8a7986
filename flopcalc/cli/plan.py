"""`flopcalc plan`: the layouts of a training run on many devices, their time and money, and why others lose."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from flopcalc.cli.command import Command
from flopcalc.cli.options import has_list, takes_setup
from flopcalc.cli.pages import format_options, write_page
from flopcalc.errors import WorkloadError
from flopcalc.grids import format_grid, wrap
from flopcalc.setup.setup import make_setup
from flopcalc.units import format_bytes, format_parameters, format_seconds, format_tokens

if TYPE_CHECKING:
    from flopcalc.planning.plan import Plan


@click.command(cls=Command)
@takes_setup("plan")
@format_options("table", "json", "html")
@click.option("--plot", "plot_file", metavar="FILE", help="Plot time over memory of all layouts (needs matplotlib).")
@click.option("--timeline", metavar="FILE", help="Write the best layout's schedule as a trace for Perfetto.")
def plan(
    model: str, style: str, output: str | None, plot_file: str | None, timeline: str | None, given: dict[str, Any]
) -> None:
    """The best layouts of a training run on many GPUs.

    Searches data, tensor, pipeline, context and expert parallelism, ZeRO, micro-batch and gradient checkpointing. Shows
    the fastest layouts that fit in memory, and why the others lose. Layout options with several values narrow the
    search. Lists in --device, --gpus and --seq give the best layout of each combination.
    """
    if has_list(given, None):
        if plot_file is not None or timeline is not None:
            raise WorkloadError("--plot and --timeline are of one plan: give single values with them")
        _show_list(model, given, style, output)
        return
    found, report = _plan(model, given)
    if timeline is not None:
        from flopcalc.planning.schedule import save_trace

        save_trace(found, timeline)
    if plot_file is not None:
        found.plot(plot_file)
    if style == "json":
        shown = {**found.to_dict(), **({"launch": report} if report is not None else {})}
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False, allow_nan=False))
        return
    if style == "html":
        from flopcalc.report.html.plan import make_plan_page

        points = [(point.step_time_s, point.memory_bytes) for point in found.points]
        write_page(make_plan_page(found.to_dict(), points), output)
        return
    click.echo(_format(found))
    for path in (plot_file, timeline):
        if path is not None:
            click.echo(f"written: {path}")


def _plan(model: str, given: dict[str, Any]) -> tuple[Plan, dict[str, Any] | None]:
    from flopcalc.planning.plan import plan_setup  # only where used: estimate starts without it

    setup = make_setup("plan", model, given)
    return plan_setup(setup), setup.launch


def _show_list(model: str, given: dict[str, Any], style: str, output: str | None) -> None:
    from flopcalc.cli import lists

    rows = lists.expand(given)
    results = [_plan(model, row.options)[0] for row in rows]
    if style == "json":
        lists.show_json(rows, [each.to_dict() for each in results])
        return
    columns: dict[str, Callable[[Plan], str | None]] = {
        "best layout": lambda each: str(each.best[0].layout),
        "step": lambda each: format_seconds(each.best[0].step.seconds),
        "MFU": lambda each: f"{100 * each.best[0].mfu:.1f} %",
        "days": lambda each: _shorten(each.best[0].days),
        "GPU-hours": lambda each: _shorten(each.best[0].gpu_hours),
        "k USD": lambda each: None if each.best[0].usd is None else _shorten(each.best[0].usd / 1000),
    }
    title = f"{results[0].model}: {format_tokens(results[0].tokens)}, {results[0].dtype}"
    notes = [each.notes for each in results]
    if style == "html":
        days = [each.best[0].days for each in results]
        bars = [(value, f"{_shorten(value)} days") for value in days]
        page = lists.make_page(rows, columns, results, notes, title=title, label="Days, in the best layout", bars=bars)
        write_page(page, output)
        return
    lists.show_table(rows, columns, results, notes, title=title)


def _format(found: Any) -> str:
    """The readable report of a Plan."""
    step = f"{found.global_batch:,} × {found.seq:,} tokens a step"
    joined = f", {found.interconnect.id}" if found.gpus > 1 else ""
    lines = [
        *wrap(
            f"{found.model} ({format_parameters(found.parameters)} parameters) on {found.gpus:,} × "
            f"{found.device.name}{joined}",
            rest="  ",
        ),
        *wrap(f"{format_tokens(found.tokens)}, {step}, {found.dtype}, execution {found.execution}", rest="  "),
        "",
    ]
    headers = ["layout", "step", "from … to", "MFU", "HFU", "memory", "days", "GPU-hours", "MWh", "k USD"]
    rows = []
    for entry in found.best:
        times = entry.step
        rows.append(
            [
                str(entry.layout),
                format_seconds(times.seconds),
                f"{format_seconds(times.low)} … {format_seconds(times.high)}",
                f"{100 * entry.mfu:.1f} %",
                f"{100 * entry.hfu:.1f} %",
                format_bytes(entry.memory.peak),
                _shorten(entry.days),
                _shorten(entry.gpu_hours),
                "-" if entry.kwh is None else _shorten(entry.kwh / 1000),
                "-" if entry.usd is None else _shorten(entry.usd / 1000),
            ]
        )
    lines += [format_grid(headers, rows, keys=1), ""]
    best = found.best[0]
    parts = sorted(best.to_dict()["breakdown"].items(), key=lambda part: -part[1])
    shares = ", ".join(
        f"{name.replace('_', ' ')} {part / best.step.seconds:.0%}"
        for name, part in parts
        if part > 0.005 * best.step.seconds
    )
    lines += _wrap("time goes", f"(first layout) {shares}")
    lines += _wrap("searched", f"{found.layouts:,} layouts are valid, {found.fitting:,} fit in memory")
    for loser in found.losers:
        lines += _wrap(f"lost: {loser.reason}", f"{loser.layouts:,}; nearest {loser.nearest.layout}: {loser.text}")
    if found.helps:
        lines += _wrap("helps most", found.helps)
    for note in found.notes:
        lines += _wrap("note", note)
    return "\n".join(lines)


def _shorten(value: float) -> str:
    """A number with one digit behind the point while there are few before it; small ones with two that count."""
    if value >= 1:
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{Decimal(f'{value:.2g}'):f}"  # never 1.2e-05


def _wrap(label: str, text: str) -> list[str]:
    return wrap(text, f"{label:21}", " " * 21)
