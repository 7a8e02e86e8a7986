"""Rows of a sweep in; totals, success, cost by trainer and failures out: values, tables, Markdown, HTML, a plot."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flopcalc.base.figures import open_figure
from flopcalc.base.text_table import format_grid, format_text, wrap
from flopcalc.base.units import format_bytes, format_flops, format_seconds
from flopcalc.measure.sweep.matrix import BASELINE, TRAINERS, SweepError
from flopcalc.measure.sweep.run import get_value

Json = dict[str, Any]
SCHEMA = 1
# What must agree for two rows to differ by their trainer alone.
_SAME = ("model", "batch_size", "seq_len", "dtype", "device", "attention", "steps", "warmup")


def summarize(rows: Sequence[Mapping[str, Any]]) -> Json:
    """Plain values, None where not known; ratios are against the standard trainer at the same sizes and settings."""
    standard = {_find_cell(row): row for row in rows if row["trainer"] == BASELINE and row["status"] == "ok"}
    configurations = [{**row, **_compare(row, standard.get(_find_cell(row)))} for row in rows]
    names = [*TRAINERS, *sorted({row["trainer"] for row in rows} - TRAINERS.keys())]
    by_trainer = {name: [row for row in configurations if row["trainer"] == name] for name in names}
    return {
        "schema": SCHEMA,
        **_count(rows),
        "memory": _describe_memory(rows),
        "trainers": {name: _describe_trainer(found) for name, found in by_trainer.items() if found},
        "configurations": configurations,
        "failures": [
            {key: row.get(key) for key in ("id", "reason", "detail")} for row in rows if row["status"] != "ok"
        ],
    }


def _find_cell(row: Mapping[str, object]) -> tuple[Any, ...]:
    # A cluster may have GPUs of several kinds, and launchers and slots give a process more or fewer cores.
    threads = get_value(row, "environment", "threads") if row.get("device") == "cpu" else None
    return (get_value(row, "environment", "device"), threads, *(row.get(key) for key in _SAME))


_STEP = ("step_time_s", "median")
_MEMORY = ("peak_memory_bytes",)
_FLOPS = ("flops", "total")


def _compare(row: Mapping[str, object], standard: Mapping[str, object] | None) -> Json:
    pairs = {"slowdown": _STEP, "memory_over_standard": _MEMORY, "flops_over_standard": _FLOPS}
    values = {}
    for name, keys in pairs.items():
        own, base = get_value(row, *keys), get_value(standard or {}, *keys)
        values[name] = own / base if own is not None and base else None
    return values


def _count(rows: Sequence[Mapping[str, object]]) -> Json:
    ok = sum(row["status"] == "ok" for row in rows)
    return {"total": len(rows), "ok": ok, "failed": len(rows) - ok, "success_rate": ok / len(rows) if rows else None}


def _describe_memory(rows: Sequence[Mapping[str, object]]) -> Json:
    known = [value for row in rows if (value := get_value(row, *_MEMORY)) is not None]
    return {"mean_bytes": round(sum(known) / len(known)) if known else None, "peak_bytes": max(known, default=None)}


def _describe_trainer(rows: Sequence[Mapping[str, Any]]) -> Json:
    ratios = (
        "slowdown",
        "memory_over_standard",
        "flops_over_standard",
        "counted_over_analytic",
        "measured_over_analytic",
    )
    return {
        **_count(rows),
        "memory": _describe_memory(rows),
        **{name: _describe_ratio(row.get(name) for row in rows) for name in ratios},
    }


def _describe_ratio(values: Iterable[float | None]) -> Json | None:
    """The geometric mean, so that a ratio and its inverse agree; with the least and the greatest."""
    known = [value for value in values if value]
    if not known:
        return None
    mean = math.exp(sum(map(math.log, known)) / len(known))
    return {"mean": mean, "min": min(known), "max": max(known)}


# What names a row: repeated in every table that a wide one is split into.
_NAMES = ("trainer", "model", "batch", "seq")


# --- text -------------------------------------------------------------------------------------------------------------
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
        "counted ÷: operators over analytic FLOPs",
    ]
    if any(row.get("measured_over_analytic") is not None for row in rows):
        lines[1] += "; measured ÷: the GPU's own counters over analytic FLOPs"
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
        ("step", lambda row: get_value(row, *_STEP), format_seconds),
        ("spread", _find_spread, _format_share),
        ("time ×", lambda row: row["slowdown"], _format_ratio),
        ("tokens/s", lambda row: row.get("tokens_per_s"), lambda value: f"{value:,.0f}"),
        ("memory", lambda row: get_value(row, *_MEMORY), format_bytes),
        ("FLOPs", lambda row: get_value(row, *_FLOPS), format_flops),
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
    from flopcalc.report.html.sweep import make_sweep_page

    rows = summary["configurations"]
    notes = [*_list_notes(rows), *([" ".join(_explain_columns(rows))] if rows else [])]
    return make_sweep_page(
        summary, _list_trainers(summary), _list_configurations(rows), setting=describe_setting(rows), notes=notes
    )


# --- plot -------------------------------------------------------------------------------------------------------------
def plot(summary: Mapping[str, object], path: str | os.PathLike[str]) -> None:
    """Step time, memory and FLOPs of every trainer, side by side at each size, into an image."""
    with open_figure(path, 10, 10, SweepError) as figure:
        draw(figure, summary)


def _name_size(row: Mapping[str, object]) -> tuple[Any, ...]:
    return row["model"], row.get("batch_size"), row.get("seq_len")


def draw(figure: Any, summary: Mapping[str, Any]) -> None:
    """Three panels of bars on a matplotlib figure of constrained layout; a configuration that failed has no bar."""
    rows = summary["configurations"]
    has_models = len({row["model"] for row in rows}) > 1
    cells = list(dict.fromkeys(_name_size(row) for row in rows))
    trainers = list(summary["trainers"])
    width = 0.8 / max(len(trainers), 1)
    panels: tuple[tuple[str, tuple[str, ...], float], ...] = (
        ("step time, s", _STEP, 1.0),
        ("peak memory, GiB", _MEMORY, float(1 << 30)),
        ("TFLOPs of a step", _FLOPS, 1e12),
    )
    for axes, (label, keys, unit) in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
        for at, trainer in enumerate(trainers):
            known = {
                _name_size(row): value / unit
                for row in rows
                if row["trainer"] == trainer and (value := get_value(row, *keys)) is not None
            }
            places = [cells.index(cell) + (at - (len(trainers) - 1) / 2) * width for cell in known]
            axes.bar(places, list(known.values()), width, label=trainer)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3, axis="y")
        axes.set_xticks(
            range(len(cells)),
            [f"{f'{model}: ' if has_models else ''}{batch} × {length}" for model, batch, length in cells],
        )
    figure.axes[-1].set_xlabel("batch × length")
    if trainers:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
