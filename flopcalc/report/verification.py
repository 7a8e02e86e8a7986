"""What `flopcalc verify` found, as text: each case with the rows that differ, and all cases in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.base.spelling import spell
from flopcalc.base.text_table import format_grid, format_text

_SHOWN = 12  # rows that differ, per case


def format_case(label: str, case: Mapping[str, Any]) -> str:
    """One case; `case` is the object that JSON holds."""
    verdict = "equal   " if case["equal"] else "FAILED  " if "error" in case else "DIFFERS "
    lines = [format_text(label, verdict, " " * 8)]
    if case.get("error"):
        lines.append(format_text(case["error"], "  ", "  "))
    if case["equal"] or "error" in case:
        return "\n".join(lines)
    ours, theirs = case["parameters"]["analytic"], case["parameters"]["traced"]
    if ours != theirs:
        lines.append(format_text(f"parameters: analytic {ours}, model {theirs}", "  ", " " * 4))
    for name, calls in case["not_counted"].items():
        lines.append(format_text(f"operator not counted: {name}, {calls} calls", "  ", " " * 4))
    rows = [[path, _join(row["analytic"]), _join(row["traced"])] for path, row in case["different"].items()]
    if rows:
        lines.append(format_grid(["module", "analytic fwd bwd again", "traced"], rows[:_SHOWN], keys=1))
    if len(rows) > _SHOWN:
        lines.append(f"  … and {len(rows) - _SHOWN} more ({spell('json')} shows all)")
    return "\n".join(lines)


def _join(row: Sequence[int] | None) -> str:
    return "-" if row is None else " ".join(map(str, row))


def format_totals(summary: Mapping[str, Any]) -> str:
    """All cases in one sentence."""
    cases, different, unknown = (summary[key] for key in ("cases", "different", "unknown"))
    counts = f"{summary['equal']} equal, {different} differ{'s' * (different == 1)}, {unknown} not known"
    text = f"{cases} case{'s' * (cases != 1)}: {counts}{' (could not be run)' if unknown else ''}"
    largest = summary["largest_difference"]
    if largest is None:
        return format_text(f"{text}; largest difference: {'none' if not different else 'not in FLOPs'}", rest="  ")
    flops = f"{largest['flops']:,} FLOPs, {100 * largest['share']:.2g} % of the step"
    where = f"in {largest['module']} of {largest['case']}"
    return format_text(f"{text}; largest difference: {flops}, {where}", rest="  ")
