"""The page of several estimates side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.report.html.page import Html, bullets, make_page, number, section, table
from flopcalc.report.html.pictures import Bar, draw_bars
from flopcalc.report.html.values import show_exact, show_flops
from flopcalc.units import format_flops, format_parameters

Json = Mapping[str, Any]


def make_comparison_page(columns: Sequence[Json]) -> str:
    """`columns` is what --json prints."""
    labels = [column["label"] for column in columns]
    bars = [Bar(column["label"], total, format_flops(total)) for column in columns if (total := _find_total(column))]
    rows: list[list[object]] = [["model type", *(column["model"]["model_type"] for column in columns)]]
    for key in ("total", "active", "trainable"):
        rows.append([f"{key} parameters", *(_show_parameters(column["parameters"].get(key)) for column in columns)])
    rows.append(["tokens", *(show_exact(column["workload"]["tokens"]) for column in columns)])
    rows.append(["convention", *(column["convention"] for column in columns)])
    for key in ("forward", "backward", "recompute", "clipping", "total"):
        if any(column["flops"][key] for column in columns):
            rows.append(["step" if key == "total" else key, *(show_flops(column["flops"][key]) for column in columns)])
    per_token = [_find_total(column) // max(column["workload"]["tokens"], 1) for column in columns]
    rows.append(["per token", *map(show_flops, per_token)])
    sums = [{part["name"]: part["forward"] + part["backward"] for part in column["components"]} for column in columns]
    names = dict.fromkeys(name for parts in sums for name in parts)
    components = [[name.replace("_", " "), *(show_flops(parts.get(name)) for parts in sums)] for name in names]
    notes = [f"{column['label']}: {note}" for column in columns for note in column["notes"]]
    if len({column["convention"] for column in columns}) > 1:
        notes.insert(0, "Different conventions stand side by side: do not compare them.")
    parts = [
        section("FLOPs of a step", draw_bars("FLOPs of a step", bars), table(["", *labels], rows, caption="Models")),
        section("Components", table(["component", *labels], components, caption="FLOPs by component")),
        *([section("Notes", bullets(notes))] if notes else []),
    ]
    return make_page(f"{len(columns)} models or workloads side by side", ", ".join(labels), parts)


def _find_total(column: Json) -> int:
    return int(column["flops"]["total"])


def _show_parameters(value: int | None) -> Html:
    return number(value, "" if value is None else format_parameters(value))
