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

# Numbers of GPUs that are tried for a deadline, until one keeps it.
_MANY = ",".join(str(1 << power) for power in range(15))


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
    search. Lists in --device, --gpus and --seq give the best layout of each combination. --days without --gpus finds
    a number of GPUs that keeps the deadline.
    """
    if has_list(given, None) or (given.get("days") and not given.get("gpus") and not given.get("launch")):
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
        show_json({**found.to_dict(), **({"launch": report} if report is not None else {})})
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

    is_open = not given.get("gpus")
    rows, results = lists.expand({**given, "gpus": _MANY} if is_open else given), list[Any]()
    for row in rows:
        try:
            results.append(_plan(model, row.options)[0])
        except WorkloadError as error:  # no layout divides, or none fits
            results.append(error)
            continue
        if is_open and results[-1].within["days"]["verdict"] == "yes":
            break
    fits = [not isinstance(each, WorkloadError) for each in results]
    if not any(fits):
        raise results[-1]
    first = results[fits.index(True)]
    start = max(0, fits.index(True) - 1) if is_open else 0  # of those that are too few, the most
    rows, results, fits = rows[start : len(results)], results[start:], fits[start:]
    lists.show(
        rows,
        (each.to_dict() if fit else {"error": str(each)} for each, fit in zip(results, fits, strict=True)),
        [
            make_cells(each) if fit else {**dict.fromkeys(make_cells(first)), "best layout": "none"}
            for each, fit in zip(results, fits, strict=True)
        ],
        [
            each.notes if fit else [str(each).partition(". What would")[0]]
            for each, fit in zip(results, fits, strict=True)
        ],
        title=f"{first.model}: {format_tokens(first.tokens)}, {first.dtype}",
        style=style,
        output=output,
        label="Days, in the best layout",
        bars=[
            (each.best[0].days, format_duration(each.best[0].days)) if fit else (0.0, "none")
            for each, fit in zip(results, fits, strict=True)
        ],
    )
