"""A cross-check as text: every witness beside the analytic count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import format_flops, format_parameters

_PRODUCT = re.compile(r"attention|grouped|conv|mm\b|matmul|dot\b|einsum|mv\b")


def format_crosscheck(shown: Mapping[str, Any]) -> str:
    """The table of all witnesses; `shown` is the object that JSON holds."""
    work = shown["workload"]
    depths = ", ".join(f"{key} {value}" for key, value in shown["layers"].items())
    size = format_parameters(shown["parameters"])
    sizes = f"{work['phase']}, {work['batch']} × {work['seq']} tokens"
    where = f"{shown['dtype']}, {shown['attention']} attention, on {shown['device']}"
    lines = [
        *wrap(f"{shown['model']['name']} ({size} parameters; {depths})", rest="  "),
        *wrap(f"{sizes}; {where}", rest="  "),
        "",
    ]
    cells: list[list[str]] = []
    for row in shown["witnesses"]:
        total, expected, beside = row["total"], row["expected"], row["expected_as"]
        cost, note = f"{row['seconds']:.2f} s", row["reason"] or ""
        if total is None:
            beside = "-" if row["witness"] == "gpm" else beside  # a gauge is compared with nothing
            cells.append([row["witness"], "-", "-", beside, "-", cost, note])
            continue
        skipped = _format_skipped(row["not_counted"])
        cells.append([row["witness"], format_flops(total), _format_ratio(total, expected), beside, skipped, cost, note])
        if row["corrected"] is not None:
            ratio = _format_ratio(row["corrected"], expected)
            what = "without elementwise work, with what it skips"
            cells.append(["profiler, corrected", format_flops(row["corrected"]), ratio, beside, "", "", what])
    headers = ["witness", "FLOPs", "ratio", "to analytic", "not counted", "cost", "note"]
    lines.append(format_grid(headers, cells, keys=1))
    totals = {row["expected_as"]: row["expected"] for row in shown["witnesses"]}
    texts = [f"analytic, {name}: {format_flops(value)} = {value:,} FLOPs" for name, value in totals.items()]
    lines += [
        "",
        *(line for text in (*texts, *(f"note: {note}" for note in shown["notes"])) for line in wrap(text, rest="  ")),
    ]
    return "\n".join(lines)


def _format_ratio(counted: int, expected: int) -> str:
    if counted == expected:
        return "1 (exact)"
    return f"{counted / expected:.6f}" if expected else "-"


def _format_skipped(skipped: Mapping[str, int]) -> str:
    """Products by name; what is elementwise in a ledger as a number of kinds."""
    products = [f"{name.removeprefix('aten::')} × {calls}" for name, calls in skipped.items() if _PRODUCT.search(name)]
    others = len(skipped) - len(products)
    if others:
        products.append(f"{others} kinds without products")
    return "; ".join(products) or "none"
