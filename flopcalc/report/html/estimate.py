"""The page of an estimate: where the FLOPs are, under every convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.base.units import format_amount, format_flops, format_parameters, format_rate, format_share
from flopcalc.report.estimate import CONVENTION_WORDS, NOT_COUNTED
from flopcalc.report.html.page import (
    Html,
    beside,
    join,
    list_notes,
    make_page,
    number,
    section,
    show_code,
    show_exact,
    show_flops,
    swatch,
    table,
    tiles,
)
from flopcalc.report.html.pictures import draw_treemap
from flopcalc.report.html.treemap import Leaf, build_tree, find_groups

Json = Mapping[str, Any]


def make_estimate_page(result: Json, work: str) -> str:
    """`result` is what --json prints, with its kinds; `work` describes the workload."""
    model, flops = result["model"], result["flops"]
    phase = result["workload"]["phase"]
    title = f"{model['name']}: FLOPs of one {phase} step"
    kind = f"{model['model_type']}, {format_parameters(result['parameters']['total'])} parameters"
    parts = [
        tiles(_list_figures(result)),
        section(
            "Where the FLOPs are",
            *_draw_modules(result),
            beside(
                _list_parts("component", result["components"], flops["total"]),
                _list_parts("kind", result["kinds"], flops["total"]),
            ),
        ),
        section("Modules", _list_modules(result)),
        section("Conventions", _list_conventions(result)),
        *_list_run(result["run"]),
        *list_notes([*result["notes"], f"not counted: {NOT_COUNTED}"]),
    ]
    return make_page(title, f"{kind}; {work}; convention {result['convention']}", parts)


def _list_figures(result: Json) -> list[tuple[str, object, object]]:
    flops = result["flops"]
    figures: list[tuple[str, object, object]] = []
    for label, key in (
        ("step", "total"),
        ("forward", "forward"),
        ("backward", "backward"),
        ("recomputed", "recompute"),
        ("clipping", "clipping"),
    ):
        if flops[key]:
            figures.append((label, number(flops[key], format_flops(flops[key])), f"{flops[key]:,} FLOPs"))
    tokens, visual = result["workload"]["tokens"], result["workload"]["visual_tokens"]
    figures.append(("tokens", show_exact(tokens), f"{visual:,} of them visual" if visual else "in a step"))
    for label, share in (("MFU", result["mfu"]), ("HFU", result["hfu"])):
        if share is not None:
            where = f" on {share['device']}" if share["device"] else ""
            remark = f"of {format_rate(share['peak_flops_per_s'])} {share['dtype']}{where}"
            figures.append((label, number(share["value"], f"{100 * share['value']:.2f} %"), remark))
    parameters = result["parameters"]
    for key, value in parameters.items():
        if key == "total" or value != parameters["total"]:
            label = "parameters" if key == "total" else f"{key} parameters"
            figures.append((label, number(value, format_parameters(value)), f"{value:,}"))
    return figures


def _draw_modules(result: Json) -> list[Html]:
    """The treemap, and the sums of its colours in a table."""
    whole = result["flops"]["total"]
    leaves = [Leaf(row["path"], row["kind"], row["forward"] + row["backward"]) for row in result["modules"]]
    if not any(leaf.value for leaf in leaves):
        return []

    def describe(leaf: Leaf) -> str:
        return f"{leaf.path} ({leaf.kind}): {leaf.value:,} FLOPs, {format_share(leaf.value, whole)}"

    rows = [
        (join([swatch(at), show_code(group.path)]), show_flops(group.value), format_share(group.value, whole))
        for at, group in enumerate(find_groups(build_tree(leaves)))
    ]
    return [
        draw_treemap(
            "FLOPs of the modules", leaves, describe, "Every box is a module, as large as its FLOPs; * is every layer."
        ),
        table(["part of the model", "FLOPs", "share"], rows, caption="Colours of the picture"),
    ]


def _list_parts(what: str, rows: Sequence[Json], whole: int) -> Html:
    cells = [
        (
            row["name"].replace("_", " "),
            show_flops(row["forward"]),
            show_flops(row["backward"]),
            show_flops(row["forward"] + row["backward"]),
            format_share(row["forward"] + row["backward"], whole),
        )
        for row in rows
        if row["forward"] or row["backward"]
    ]
    return table([what, "forward", "backward", "sum", "share"], cells, caption=f"FLOPs by {what}")


def _list_modules(result: Json) -> Html:
    whole = result["flops"]["total"]
    rows = [
        (
            show_code(row["path"]),
            row["kind"],
            show_exact(row["count"]),
            show_flops(row["forward"]),
            show_flops(row["backward"]),
            format_share(row["forward"] + row["backward"], whole),
            number(row["parameters"], format_parameters(row["parameters"])),
        )
        for row in result["modules"]
    ]
    headers = ["module", "kind", "×", "forward", "backward", "share", "parameters"]
    return table(headers, rows, caption="FLOPs and parameters by module", text_columns=2)


def _list_conventions(result: Json) -> Html:
    rows = []
    for name, value in result["totals"].items():
        words = CONVENTION_WORDS[name] + (f"; {result['attention_kernel']} attention" if name == "hardware" else "")
        rows.append((name, words, number(value, "" if value is None else format_flops(value))))
    return table(["convention", "counts", "step"], rows, caption="The same step as others count it", text_columns=2)


def _list_run(run: Json | None) -> list[Html]:
    if run is None:
        return []
    figures: list[tuple[str, object, object]] = [
        ("tokens", number(run["tokens"], format_parameters(run["tokens"])), f"{run['tokens']:,}"),
        ("steps", show_exact(run["steps"]), ""),
        ("FLOPs", number(run["flops"], f"{run['flops']:.3e}"), f"{run['flops']:,}"),
    ]
    if run["gpu_hours"] is not None:
        bound = "a lower bound: 100 % of the peak"
        remark = bound if run["is_lower_bound"] else f"at an MFU of {100 * run['mfu']:.1f} %"
        figures.append(("GPU-hours", number(run["gpu_hours"], format_amount(run["gpu_hours"])), remark))
    return [section("The whole run", tiles(figures))]
