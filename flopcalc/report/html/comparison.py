"""The page of several estimates side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.base.units import format_flops, format_parameters
from flopcalc.report.html.page import bullets, join, make_page, number, section, show_exact, show_flops, swatch, table
from flopcalc.report.html.pictures import Bar, draw_bars

Json = Mapping[str, Any]


def make_comparison_page(columns: Sequence[Json]) -> str:
    """`columns` is what --json prints."""
    labels = [column["label"] for column in columns]
    rows: list[list[object]] = [["model type", *(column["model"]["model_type"] for column in columns)]]
    for key in ("total", "active", "trainable"):
        rows.append(
            [
                f"{key} parameters",
                *(
                    number(value, "" if value is None else format_parameters(value))
                    for column in columns
                    for value in [column["parameters"].get(key)]
                ),
            ]
        )
    rows.append(["tokens", *(show_exact(column["workload"]["tokens"]) for column in columns)])
    rows.append(["convention", *(column["convention"] for column in columns)])
    for key in ("forward", "backward", "recompute", "clipping", "total"):
        if any(column["flops"][key] for column in columns):
            rows.append(["step" if key == "total" else key, *(show_flops(column["flops"][key]) for column in columns)])
    per_token = [_find_total(column) // max(column["workload"]["tokens"], 1) for column in columns]
    rows.append(["per token", *map(show_flops, per_token)])
    for key in ("mfu", "hfu"):
        if any(column[key] for column in columns):
            rows.append(
                [
                    key.upper(),
                    *(
                        number(None, "") if share is None else number(share["value"], f"{100 * share['value']:.2f} %")
                        for column in columns
                        for share in [column[key]]
                    ),
                ]
            )
    sums = [{part["name"]: part["forward"] + part["backward"] for part in column["components"]} for column in columns]
    names = dict.fromkeys(name for parts in sums for name in parts)
    components = [
        [join([swatch(at), name.replace("_", " ")]), *(show_flops(parts.get(name)) for parts in sums)]
        for at, name in enumerate(names)
    ]
    bars = [
        Bar(column["label"], total, format_flops(total), parts=tuple(parts.get(name, 0) for name in names))
        for column, parts in zip(columns, sums, strict=True)
        if (total := _find_total(column))
    ]
    notes = [f"{column['label']}: {note}" for column in columns for note in column["notes"]]
    if len({column["convention"] for column in columns}) > 1:
        notes.insert(0, "Different conventions stand side by side: do not compare them.")
    parts = [
        section(
            "FLOPs of a step",
            draw_bars("FLOPs of a step", bars, "Colours are components, as below."),
            table(["figure", *labels], rows, caption="Models and totals"),
        ),
        section("Components", table(["component", *labels], components, caption="FLOPs by component")),
        *([section("Notes", bullets(notes))] if notes else []),
    ]
    return make_page(f"{len(columns)} models or workloads side by side", ", ".join(labels), parts)


def _find_total(column: Json) -> int:
    return int(column["flops"]["total"])
