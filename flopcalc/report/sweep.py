"""The summary of a sweep as tables, Markdown or an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flopcalc.base.text_table import format_grid, format_text, wrap
from flopcalc.base.units import format_bytes, format_flops, format_seconds
from flopcalc.base.vocabulary import BASELINE
from flopcalc.report.html.sweep import make_sweep_page

# What names a row, in every table that a wide one becomes.
_NAMES = ("trainer", "model", "batch", "seq")


def get_value(row: Mapping[str, object], *keys: str) -> Any:
    """A value inside a row's objects; None where it, or what holds it, is missing."""
    value: object = row
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def format_summary(summary: Mapping[str, Any], style: str = "simple") -> str:
    """Both tables and the failures; style `github` is Markdown."""
    is_markdown = style != "simple"
    rows = summary["configurations"]
    rate = "" if summary["success_rate"] is None else f" ({100 * summary['success_rate']:.1f} %)"
    many = "" if summary["total"] == 1 else "s"
    blocks = [f"{summary['total']} configuration{many}: {summary['ok']} ok, {summary['failed']} failed{rate}"]
    if rows:
        blocks += [_wrap(describe_setting(rows), is_markdown)] if summary["ok"] else []
        blocks.append(_format_table(*_list_trainers(summary), style))
        blocks.append(_format_table(*_list_configurations(rows), style))
        blocks.append(_wrap(_explain_columns(rows), is_markdown))
    if notes := _list_notes(rows):
        blocks.append(_format_list("notes", notes, is_markdown))
    if summary["failures"]:
        lines = [f"{failure['id']}: {failure['reason']}: {failure['detail']}" for failure in summary["failures"]]
        blocks.append(_format_list("failures", lines, is_markdown))
    return "\n\n".join(blocks)


def _format_list(title: str, entries: Sequence[str], is_markdown: bool) -> str:
    if is_markdown:
        return "\n".join([f"{title}:\n", *(f"- {entry}".replace("\n", "\n    ") for entry in entries)])
    lines = []
    for entry in entries:
        first, *others = entry.split("\n")
        lines += wrap(first, "  ", " " * 4)
        for line in others:
            lines += wrap(line, " " * 4, " " * 4)
    return "\n".join([title, *lines])


def _list_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the processes noted; of a note that not all of them made, whose it is."""
    measured = [row for row in rows if row["status"] == "ok"]
    owners: dict[str, list[str]] = {}
    for row in measured:
        for note in row.get("notes") or ():
            owners.setdefault(str(note), []).append(row["id"])
    return [note if len(names) == len(measured) else f"{', '.join(names)}: {note}" for note, names in owners.items()]


def _format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> str:
    return format_grid(headers, rows, style, keys=sum(header in _NAMES for header in headers))


def _explain_columns(rows: Sequence[Mapping[str, object]]) -> list[str]:
    lines = [
        f"time ×, memory ×, FLOPs ×: over {BASELINE} at the same sizes, by geometric mean; "
        "spread: (p90 - p10) / median;",
        "FLOPs: convention hardware; MFU: convention model",
        "counted ÷: operators over the analytic count of the same products, which has every query-key pair",
    ]
    if any(row.get("measured_over_analytic") is not None for row in rows):
        lines.append("measured ÷: the GPU's own counters over FLOPs")
    return lines


def _wrap(lines: Sequence[str], is_markdown: bool) -> str:
    return "\n".join(line if is_markdown else format_text(line) for line in lines)


def describe_setting(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """One line for each model and machine that was measured."""
    lines = []
    for row in rows:
        if row["status"] != "ok":
            continue
        size = f", {row['parameters']:,} parameters" if row.get("parameters") is not None else ""
        machine = get_value(row, "environment", "device") or row.get("device")
        torch = get_value(row, "environment", "torch")
        with_torch = f", torch {torch}" if torch else ""
        line = f"{row['model']}{size}; {row.get('dtype')} on {machine}, attention {row.get('attention')}{with_torch}"
        if line not in lines:
            lines.append(line)
    return lines


Column = tuple[str, Callable[[Mapping[str, Any]], Any], Callable[[Any], str]]


def _list_trainers(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns: list[Column] = [
        ("ok", lambda row: f"{row['ok']} of {row['total']}", str),
        ("success", lambda row: row["success_rate"], lambda value: f"{100 * value:.0f} %"),
        ("mean memory", lambda row: row["memory"]["mean_bytes"], format_bytes),
        ("peak memory", lambda row: row["memory"]["peak_bytes"], format_bytes),
        ("time ×", lambda row: get_value(row, "slowdown", "mean"), _format_ratio),
        ("memory ×", lambda row: get_value(row, "memory_over_standard", "mean"), _format_ratio),
        ("FLOPs ×", lambda row: get_value(row, "flops_over_standard", "mean"), _format_ratio),
        ("counted ÷", lambda row: get_value(row, "counted_over_analytic", "mean"), _format_exact),
        ("measured ÷", lambda row: get_value(row, "measured_over_analytic", "mean"), _format_exact),
    ]
    return _make_grid("trainer", list(summary["trainers"].items()), columns)


def _list_configurations(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns: list[Column] = [
        ("model", lambda row: row["model"] if len({each["model"] for each in rows}) > 1 else None, str),
        ("batch", lambda row: row.get("batch_size"), str),
        ("seq", lambda row: row.get("seq_len"), str),
        ("step", lambda row: get_value(row, "step_time_s", "median"), format_seconds),
        ("spread", _find_spread, _format_share),
        ("time ×", lambda row: row["slowdown"], _format_ratio),
        ("tokens/s", lambda row: row.get("tokens_per_s"), lambda value: f"{value:,.0f}"),
        ("memory", lambda row: get_value(row, "peak_memory_bytes"), format_bytes),
        ("FLOPs", lambda row: get_value(row, "flops", "total"), format_flops),
        ("FLOPs ×", lambda row: row["flops_over_standard"], _format_ratio),
        ("counted ÷", lambda row: row.get("counted_over_analytic"), _format_exact),
        ("measured ÷", lambda row: row.get("measured_over_analytic"), _format_exact),
        ("MFU", lambda row: row.get("mfu"), _format_share),
        ("HFU", lambda row: row.get("hfu"), _format_share),
        ("failed", lambda row: row.get("reason"), str),
    ]
    return _make_grid("trainer", [(row["trainer"], row) for row in rows], columns)


def _make_grid(
    first: str, rows: Sequence[tuple[str, Mapping[str, object]]], columns: Sequence[Column]
) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; a column of which nothing is known is left out."""
    cells = [[(read(row), show) for _, read, show in columns] for _, row in rows]
    kept = [at for at in range(len(columns)) if any(line[at][0] is not None for line in cells)]
    return [first, *(columns[at][0] for at in kept)], [
        [name, *("-" if line[at][0] is None else line[at][1](line[at][0]) for at in kept)]
        for (name, _), line in zip(rows, cells, strict=True)
    ]


def _find_spread(row: Mapping[str, object]) -> float | None:
    """(p90 - p10) / median of the step times."""
    low, middle, high = (get_value(row, "step_time_s", name) for name in ("p10", "median", "p90"))
    return (high - low) / middle if low is not None and high is not None and middle else None


def _format_ratio(value: float) -> str:
    return f"{value:.2f}"


def _format_exact(value: float) -> str:
    return "1" if value == 1 else f"{value:.4f}"


def _format_share(value: float) -> str:
    return f"{100 * value:.1f} %"


def make_page(summary: Mapping[str, Any]) -> str:
    """The same tables and lists as an HTML page, with pictures."""
    rows = summary["configurations"]
    notes = [*_list_notes(rows), *([" ".join(_explain_columns(rows))] if rows else [])]
    return make_sweep_page(
        summary, _list_trainers(summary), _list_configurations(rows), setting=describe_setting(rows), notes=notes
    )
