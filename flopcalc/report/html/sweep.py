"""The page of a sweep: time, memory and FLOPs of every configuration, by trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flopcalc.base.units import format_bytes, format_flops, format_seconds
from flopcalc.report.html.page import (
    Html,
    bullets,
    list_notes,
    make_page,
    number,
    section,
    show_bytes,
    show_exact,
    table,
    tiles,
)
from flopcalc.report.html.pictures import Bar, draw_bars

Json = Mapping[str, Any]
Grid = tuple[Sequence[str], Sequence[Sequence[str]]]  # headers and cells


def make_sweep_page(
    summary: Json, trainers: Grid, configurations: Grid, *, setting: Sequence[str], notes: Sequence[str]
) -> str:
    """`summary` is what --json prints; both grids, `setting` and `notes` are those of the text summary."""
    rate = summary["success_rate"]
    figures: list[tuple[str, object, object]] = [
        ("configurations", show_exact(summary["total"]), ""),
        ("ok", show_exact(summary["ok"]), "" if rate is None else number(rate, f"{100 * rate:.1f} %")),
        ("failed", show_exact(summary["failed"]), ""),
        ("mean memory", show_bytes(summary["memory"]["mean_bytes"]), ""),
        ("peak memory", show_bytes(summary["memory"]["peak_bytes"]), ""),
    ]
    measured = [row for row in summary["configurations"] if row["status"] == "ok"]
    failures = [f"{each['id']}: {each['reason']}: {each['detail']}" for each in summary["failures"]]
    parts = [
        tiles(figures),
        *_draw("Step time", measured, ("step_time_s", "median"), format_seconds),
        *_draw("Peak memory", measured, ("peak_memory_bytes",), format_bytes),
        *_draw("FLOPs of a step", measured, ("flops", "total"), format_flops),
        *(
            [section("Trainers", table(*trainers, caption="Ratios are against the standard trainer"))]
            if trainers[1]
            else []
        ),
        *([section("Configurations", table(*configurations, caption="One process each"))] if configurations[1] else []),
        *list_notes(notes),
        *([section("Failures", bullets(failures))] if failures else []),
    ]
    return make_page("Sweep of training configurations", "; ".join(setting) or "nothing measured", parts)


def _draw(title: str, rows: Sequence[Json], keys: Sequence[str], show: Callable[[Any], str]) -> list[Html]:
    """A bar for each configuration of which the value is known."""
    bars = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            bars.append(Bar(row["id"], value, show(value)))
    return [section(title, draw_bars(title, bars))] if bars else []
