"""`flopcalc estimate`: FLOPs of one step, as a table, JSON, CSV or Markdown."""

from __future__ import annotations

import json
from typing import Any

import click

from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import make_estimate
from flopcalc.cli.options.time import make_run, make_shares, run_options, time_options
from flopcalc.cli.options.workload import trace_option, workload_options
from flopcalc.errors import WorkloadError
from flopcalc.units import parse_size

BY = ("component", "module", "kind")
FORMATS = ("table", "json", "csv", "markdown")


@click.command(cls=Command)
@model_argument
@workload_options
@trace_option
@time_options
@run_options
@click.option("--depth", metavar="N", help="Module paths cut to N names.")
@click.option("--by", type=click.Choice(BY), help="Rows of the breakdown (default component).")
@click.option("--format", "style", type=click.Choice(FORMATS), help="Default table.")
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
def estimate(model: str, depth: str | None, by: str | None, style: str | None, as_json: bool, **options: Any) -> None:
    """FLOPs of one step of a model, by component.

    Example: flopcalc estimate qwen2-vl --seq 2048 --image 1024x768
    """
    if as_json and style not in (None, "json"):
        raise WorkloadError(f"--json contradicts --format {style}")
    style = "json" if as_json else style or "table"
    levels = parse_size(depth, "--depth") if depth is not None else None
    if levels is not None and style != "json":
        if by not in (None, "module"):
            raise WorkloadError(f"--depth cuts module paths: it contradicts --by {by}")
        by = "module"
    asked = make_estimate(model, options)
    model_share, hardware_share, found = make_shares(asked.estimate, options)
    run = make_run(asked.estimate, options)
    notes = asked.notes + found
    if style == "json":
        shown = asked.estimate.to_dict(levels)
        shown["mfu"] = model_share.to_dict() if model_share else None
        shown["hfu"] = hardware_share.to_dict() if hardware_share else None
        shown["run"] = run.to_dict() if run else None
        shown["notes"] += notes
        if by == "kind":
            shown["kinds"] = [
                {"name": name, "forward": forward, "backward": sum(rest)}
                for name, (forward, *rest) in asked.estimate.by_kind().items()
            ]
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    from flopcalc.report import estimate as report

    if style == "csv":
        click.echo(report.format_csv(asked.estimate, by or "component", levels))
        return
    shares = [(name, share) for name, share in (("MFU", model_share), ("HFU", hardware_share)) if share]
    click.echo(
        report.format_estimate(
            asked.estimate,
            by=by or "component",
            depth=levels,
            style="github" if style == "markdown" else "simple",
            shares=shares,
            run=run.describe() if run else (),
            notes=notes,
        )
    )
