"""`flopcalc estimate`: FLOPs of one step, as a table, JSON, CSV or Markdown; of several, where values are listed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flopcalc.api import count
from flopcalc.base.errors import WorkloadError
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.units import format_flops, parse_size
from flopcalc.base.vocabulary import BY, By
from flopcalc.cli.command import Command
from flopcalc.cli.options import has_list, takes_setup
from flopcalc.cli.pages import FORMATS, format_options, write_page
from flopcalc.cli.streams import show_json
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.setup.counting import find_run, find_shares
from flopcalc.setup.setup import make_setup

if TYPE_CHECKING:
    from flopcalc.core.estimate.run import Run
    from flopcalc.core.estimate.utilization import Utilization


@frozen()
class EstimateResult(Value):
    """One result."""

    estimate: Estimate
    mfu: Utilization | None
    hfu: Utilization | None
    run: Run | None
    notes: list[str]  # besides the estimate's own
    launch: dict[str, Any] | None = None  # what launch files said

    def to_dict(self, by: By | None, depth: int | None) -> dict[str, Any]:
        shown = self.estimate.to_dict(depth)
        shown["mfu"] = self.mfu.to_dict() if self.mfu else None
        shown["hfu"] = self.hfu.to_dict() if self.hfu else None
        shown["run"] = self.run.to_dict() if self.run else None
        shown["notes"] += self.notes
        if self.launch is not None:
            shown["launch"] = self.launch
        if by == "kind":
            shown["kinds"] = [
                {"name": name, "forward": forward, "backward": sum(rest)}
                for name, (forward, *rest) in self.estimate.by_kind().items()
            ]
        return shown


@click.command(cls=Command)
@takes_setup("estimate")
@click.option("--depth", metavar="N", help="Cut module paths to N names.")
@click.option("--by", type=click.Choice(BY), help="Rows of the breakdown (default component).")
@format_options(*FORMATS)
@click.option("--plot", "plot_file", metavar="FILE", help="Plot the FLOPs over a list of values: .png, .svg or .pdf.")
def estimate(
    model: str,
    depth: str | None,
    by: By | None,
    style: str,
    output: str | None,
    plot_file: str | None,
    given: dict[str, Any],
) -> None:
    """FLOPs of one step of a model, by component.

    Lists in --seq, --batch, --device and --gpus give a row for each combination. Examples:

      flopcalc estimate qwen2-vl --seq 2048 --image 1024x768

      flopcalc estimate llama-3.1-8b --seq 1k,2k,4k --batch 1,8
    """
    if by is not None and style == "html":
        raise WorkloadError("the page of --format html holds every breakdown: leave --by out")
    levels = parse_size(depth, "depth") if depth is not None else None
    if levels is not None and style not in ("json", "html"):
        if by not in (None, "module"):
            raise WorkloadError(f"--depth cuts module paths: it contradicts --by {by}")
        by = "module"
    if has_list(given, plot_file):
        _show_list(model, given, style, output, by, levels, plot_file)
        return
    counted = _count(model, given)
    if style == "json":
        show_json(counted.to_dict(by, levels))
        return
    if style == "html":
        from flopcalc.report.html.estimate import make_estimate_page

        write_page(make_estimate_page(counted.to_dict("kind", levels), counted.estimate.describe()), output)
        return
    from flopcalc.report import estimate as report

    if style == "csv":
        click.echo(report.format_csv(counted.estimate, by or "component", levels, mfu=counted.mfu, hfu=counted.hfu))
        return
    click.echo(
        report.format_estimate(
            counted.estimate,
            by=by or "component",
            depth=levels,
            style="github" if style == "markdown" else "simple",
            shares=[(name, share) for name, share in (("MFU", counted.mfu), ("HFU", counted.hfu)) if share],
            run=counted.run,
            notes=counted.notes,
        )
    )


def _count(model: str, given: dict[str, Any]) -> EstimateResult:
    setup = make_setup("estimate", model, given)
    counted = count(setup)
    model_share, hardware_share, notes = find_shares(counted, setup)
    run = find_run(counted.estimate, setup)
    return EstimateResult(counted.estimate, model_share, hardware_share, run, [*counted.notes, *notes], setup.launch)


def _show_list(
    model: str,
    given: dict[str, Any],
    style: str,
    output: str | None,
    by: By | None,
    depth: int | None,
    plot_file: str | None,
) -> None:
    from flopcalc.cli import lists  # only where used: a single estimate starts without it

    if (by is not None or depth is not None) and style != "json":
        raise WorkloadError("--by and --depth break one result down: give no lists with them, or --json")
    rows = lists.expand(given)
    varied = rows[0].varied.keys()
    if "step_time" in given and varied & {"batch", "seq"}:
        raise WorkloadError("one --step-time cannot hold for several sizes: give --tokens-per-second, or single values")
    results = [_count(model, row.options) for row in rows]
    first = results[0].estimate
    estimator, load, _ = first.terms[0]
    title = f"{estimator.source.name}: FLOPs of one {load.phase} step, convention {first.convention}"
    if plot_file is not None:
        lists.draw(plot_file, rows, [(each.estimate.total / 1e12, True) for each in results], "TFLOPs per step", title)
    if style == "csv":
        lists.show_csv(rows, EXACT, results)
        return
    from flopcalc.report.estimate import make_cells

    has_rate = any(each.mfu or each.run for each in results)
    is_narrow = has_rate and style != "html"  # the width of a terminal holds the passes or the rates
    lists.show(
        rows,
        (each.to_dict(by, depth) for each in results),
        [make_cells(each.estimate, each.mfu, each.hfu, each.run, is_narrow=is_narrow) for each in results],
        [[*each.estimate.notes, *each.notes] for each in results],
        title=title,
        style=style,
        output=output,
        label="FLOPs of a step",
        bars=[(each.estimate.total, format_flops(each.estimate.total)) for each in results],
        plot_file=plot_file,
    )


EXACT = {
    "convention": lambda each: each.estimate.convention,
    "tokens": lambda each: each.estimate.tokens,
    "forward": lambda each: each.estimate.forward,
    "backward": lambda each: each.estimate.backward,
    "recompute": lambda each: each.estimate.recompute,
    "clipping": lambda each: each.estimate.clipping,
    "total": lambda each: each.estimate.total,
    "mfu": lambda each: None if each.mfu is None else each.mfu.value,
    "hfu": lambda each: None if each.hfu is None else each.hfu.value,
}
