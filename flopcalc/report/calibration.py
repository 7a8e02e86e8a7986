"""Measured tables in, text out: a list of them, one in full, and what differs between two sets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.base.text_table import format_grid, wrap
from flopcalc.hardware.tables import MeasuredTable


def format_tables(shown: Sequence[Mapping[str, Any]]) -> str:
    """A line for each table, then the folders that hold them."""
    headers = [name for name in shown[0] if name != "file"]
    lines = [format_grid(headers, [[entry[name] for name in headers] for entry in shown], keys=2)]
    for folder in dict.fromkeys(os.path.dirname(str(entry["file"])) for entry in shown):
        lines += wrap(f"files: {folder}", rest="  ")
    return "\n".join(lines)


def format_table(measured: MeasuredTable) -> str:
    """One table, with where it was measured and which rows failed."""
    about = measured.provenance
    words = f"{about.get('device')}, torch {about.get('torch')}, suite {about.get('suite')}, {about.get('date')}"
    lines = wrap(f"{measured.path}: {words}", rest="  ")
    lines.append(format_grid(list(measured.columns), [["-" if v is None else v for v in row] for row in measured.rows]))
    for failure in measured.failures:
        lines += wrap(f"failed: {failure.get('row')}: {failure.get('reason')}: {failure.get('detail')}", rest="  ")
    return "\n".join(lines)


def format_differences(summary: Sequence[Mapping[str, Any]]) -> str:
    """How two sets of tables compare, table by table, then the counts that differ."""
    columns = ["table", "rows in both", "only in A", "only in B", "time B/A median", "min", "max", "counts that differ"]
    rows: list[list[Any]] = []
    for entry in summary:
        if "only_in" in entry:
            rows.append([entry["table"], f"only in {entry['only_in']}", *["-"] * 6])
            continue
        ratios = entry["time_ratio"] or {}
        times = [f"{ratios[key]:.3f}" if ratios else "-" for key in ("median", "min", "max")]
        rows.append([entry["table"], entry["both"], entry["only_a"], entry["only_b"], *times, len(entry["differ"])])
    lines = [format_grid(columns, rows, keys=1)]
    for entry in summary:
        for difference in entry.get("differ", [])[:20]:
            change = f"{difference['column']} {difference['a']} -> {difference['b']}"
            lines += wrap(f"{entry['table']}: {difference['row']}: {change}", rest="  ")
    return "\n".join(lines)
