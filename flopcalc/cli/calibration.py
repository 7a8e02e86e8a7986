"""`flopcalc calibration list | show | diff`: the measured tables, read and compared."""

from __future__ import annotations

from typing import Any

import click

from flopcalc.base.errors import CalibrationError, format_nearest
from flopcalc.cli.command import CommandGroup
from flopcalc.cli.streams import show_json
from flopcalc.hardware.tables import SHAPES, MeasuredTable, find_folder_tables, list_tables, load_table
from flopcalc.report import calibration as report


@click.group(cls=CommandGroup)
def calibration() -> None:
    """Show, list and compare measured tables."""


@calibration.command("list")
@click.option("--json", "as_json", is_flag=True)
def list_(as_json: bool) -> None:
    """List all tables, shipped and your own."""
    shown = []
    for device, tables in list_tables().items():
        for name, path in tables.items():
            table = load_table(path)
            shown.append(
                {
                    "device": device,
                    "table": name,
                    "rows": len(table.rows),
                    "failures": len(table.failures),
                    "suite": table.provenance.get("suite"),
                    "date": table.provenance.get("date"),
                    "file": path,
                }
            )
    if as_json:
        show_json(shown)
    elif not shown:
        click.echo("no calibration tables yet: `flopcalc calibrate` on a machine with a GPU makes them")
    else:
        click.echo(report.format_tables(shown))


@calibration.command()
@click.argument("device")
@click.argument("table")
@click.option("--json", "as_json", is_flag=True, help="Provenance, rows by column name, failures.")
def show(device: str, table: str, as_json: bool) -> None:
    """One table of a DEVICE (an id, or a folder of tables)."""
    found = _load(device, table)
    if as_json:
        content = {
            "table": found.name,
            "file": found.path,
            "provenance": found.provenance,
            "rows": found.records(),
            "failures": list(found.failures),
        }
        show_json(content)
        return
    click.echo(report.format_table(found))


@calibration.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True)
def diff(a: str, b: str, as_json: bool) -> None:
    """Compare two sets of tables; A and B are device ids or folders."""
    first, second = find_folder_tables(a), find_folder_tables(b)
    summary: list[dict[str, Any]] = []
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            summary.append({"table": name, "only_in": a if name in first else b})
            continue
        summary.append({"table": name, **_compare(load_table(first[name]), load_table(second[name]))})
    if as_json:
        show_json(summary)
        return
    click.echo(report.format_differences(summary))


def _load(device: str, name: str) -> MeasuredTable:
    tables = find_folder_tables(device)
    if name not in tables:
        raise CalibrationError(
            f"{device} has no table {name!r}.{format_nearest(name, tables)} It has: {', '.join(tables)}"
        )
    return load_table(tables[name])


def _compare(first: MeasuredTable, second: MeasuredTable) -> dict[str, Any]:
    """Rows matched by what they measure: ratios of times, and counts that are not the same."""
    from statistics import median

    keys = first.keys
    shape = SHAPES.get(first.name)
    ours, theirs = (
        {tuple(record.get(key) for key in keys): record for record in table.records()} for table in (first, second)
    )
    both = [key for key in ours if key in theirs]
    ratios, differ = [], []
    for key in both:
        for column in shape.timed if shape else ():
            if ours[key][column] and theirs[key][column]:
                ratios.append(theirs[key][column] / ours[key][column])
        for column in shape.exact if shape else ():
            a, b = ours[key][column], theirs[key][column]
            if a != b and a is not None and b is not None:
                differ.append({"row": " ".join(map(str, key)), "column": column, "a": a, "b": b})
    spread = {"median": median(ratios), "min": min(ratios), "max": max(ratios)} if ratios else None
    return {
        "both": len(both),
        "only_a": len(ours) - len(both),
        "only_b": len(theirs) - len(both),
        "time_ratio": spread,
        "differ": differ,
    }
