"""Rows of a sweep in; totals, success, cost by trainer and failures out, as values and as a plot."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flopcalc.base.figures import open_figure
from flopcalc.base.vocabulary import BASELINE
from flopcalc.measure.sweep.matrix import TRAINERS, SweepError
from flopcalc.report.sweep import format_summary as format_summary  # older code imports it from here
from flopcalc.report.sweep import get_value

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
    figure.axes[-1].set_xlabel(f"batch × length{'' if has_models or not rows else f' of {cells[0][0]}'}")
    if trainers:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
