"""`flopcalc plan`: the layouts of a training run on many devices, their time and money, and why others lose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flopcalc.base.errors import WorkloadError
from flopcalc.base.progress import show_progress
from flopcalc.base.units import format_duration, format_tokens
from flopcalc.cli.command import Command
from flopcalc.cli.options import has_list, takes_setup
from flopcalc.cli.pages import format_options, write_page
from flopcalc.cli.streams import show_json
from flopcalc.setup.setup import make_setup

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
        from flopcalc.report.perfetto import save_schedule

        save_schedule(found, timeline)
    if plot_file is not None:
        found.plot(plot_file)
    if style == "json":
        shown = {**found.to_dict(), **({"launch": report} if report is not None else {})}
        show_json(shown)
        return
    if style == "html":
        from flopcalc.report.html.plan import make_plan_page

        points = [(point.step_time_s, point.memory_bytes) for point in found.points]
        write_page(make_plan_page(found.to_dict(), points), output)
        return
    from flopcalc.report.plan import format_plan

    click.echo(format_plan(found))
    for path in (plot_file, timeline):
        if path is not None:
            click.echo(f"written: {path}")


def _plan(model: str, given: dict[str, Any]) -> tuple[Plan, dict[str, Any] | None]:
    from flopcalc.planning.plan import plan_setup  # only where used: estimate starts without it

    def tell(done: int, whole: int) -> None:
        show_progress(f"searching layouts: {done:,} of {whole:,}")

    setup = make_setup("plan", model, {**given, "progress": tell})
    try:
        return plan_setup(setup), setup.launch
    finally:
        show_progress("")


def _show_list(model: str, given: dict[str, Any], style: str, output: str | None) -> None:
    from flopcalc.cli import lists
    from flopcalc.report.plan import make_cells

    rows = lists.expand(given)
    results = [_plan(model, row.options)[0] for row in rows]
    if style == "json":
        lists.show_rows(rows, [each.to_dict() for each in results])
        return
    title = f"{results[0].model}: {format_tokens(results[0].tokens)}, {results[0].dtype}"
    notes = [each.notes for each in results]
    cells = [make_cells(each) for each in results]
    if style == "html":
        days = [each.best[0].days for each in results]
        bars = [(value, format_duration(value)) for value in days]
        page = lists.make_page(rows, cells, notes, title=title, label="Days, in the best layout", bars=bars)
        write_page(page, output)
        return
    lists.show_table(rows, cells, notes, title=title)
