"""The page of a plan: the best layouts, what every layout takes, and why the others lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.base.units import (
    format_amount,
    format_bytes,
    format_duration,
    format_money,
    format_parameters,
    format_seconds,
    format_tokens,
)
from flopcalc.base.vocabulary import name_part
from flopcalc.report.html.page import (
    Html,
    list_notes,
    make_page,
    number,
    paragraph,
    section,
    show_bytes,
    show_exact,
    show_percent,
    show_seconds,
    table,
    tiles,
)
from flopcalc.report.html.pictures import Bar, Spot, draw_bars, draw_points
from flopcalc.report.html.prediction import draw_bytes, list_energy

Json = Mapping[str, Any]
_GIB = 1 << 30


def make_plan_page(result: Json, points: Sequence[tuple[float, int]]) -> str:
    """`result` is what --json prints, `points` are seconds and bytes of every layout that fits."""
    best = result["best"][0]
    title = f"{result['model']} on {result['gpus']:,} × {result['device']}: layouts of a training run"
    subtitle = (
        f"{format_parameters(result['parameters'])} parameters, {format_tokens(result['tokens'])}, "
        f"{result['global_batch']:,} × {result['seq']:,} tokens a step; {result['dtype']}, execution "
        f"{result['execution']}, optimizer {result['optimizer']}, interconnect {result['interconnect']['id']}"
    )
    parts = [
        section(f"Best layout: {best['name']}", tiles(_list_figures(best))),
        section("Best layouts", _list_best(result["best"])),
        section("All layouts that fit", _draw_layouts(result, points), paragraph(*_count_layouts(result["layouts"]))),
        section("Where the time goes, in the best layout", *_draw_time(best)),
        section("Memory of one GPU, in the best layout", *_draw_memory(result)),
        *([section("Why others lose", _list_losers(result["losers"]))] if result["losers"] else []),
        *list_notes([*result["notes"], *_list_sources(result)]),
    ]
    return make_page(title, subtitle, parts)


def _show_amount(value: float | None) -> Html:
    return number(value, "" if value is None else format_amount(value))


def _list_figures(best: Json) -> list[tuple[str, object, object]]:
    def join_range(values: Json, show: Any) -> str:
        return f"{show(values['low'])} to {show(values['high'])}"

    step = best["step_time_s"]
    figures: list[tuple[str, object, object]] = [
        ("step", show_seconds(step["mid"]), join_range(step, format_seconds)),
        ("MFU", show_percent(best["mfu"]), "model FLOPs"),
        ("HFU", show_percent(best["hfu"]), "executed FLOPs"),
        ("time", format_duration(best["days"]["mid"]), join_range(best["days"], format_duration)),
        ("GPU-hours", _show_amount(best["gpu_hours"]["mid"]), join_range(best["gpu_hours"], format_amount)),
    ]
    if best["usd"] is not None:
        figures.append(("cost", format_money(best["usd"]["mid"]), join_range(best["usd"], format_money)))
    figures += list_energy(best["energy"], "for the run")
    figures.append(("tokens per second", number(best["tokens_per_s"], f"{best['tokens_per_s']:,.0f}"), "of all GPUs"))
    return figures


def _list_best(best: Sequence[Json]) -> Html:
    headers = ["layout", "step", "from", "to", "MFU", "HFU", "memory a GPU", "days", "GPU-hours", "kWh", "USD"]
    rows = [
        (
            each["name"],
            *(show_seconds(each["step_time_s"][key]) for key in ("mid", "low", "high")),
            show_percent(each["mfu"]),
            show_percent(each["hfu"]),
            show_bytes(each["memory_bytes"]["total"]),
            _show_amount(each["days"]["mid"]),
            _show_amount(each["gpu_hours"]["mid"]),
            _show_amount(each["energy_kwh"]),
            _show_amount(each["usd"]["mid"] if each["usd"] else None),
        )
        for each in best
    ]
    return table(headers, rows, caption="Fastest first")


def _draw_layouts(result: Json, points: Sequence[tuple[float, int]]) -> Html:
    front = [
        Spot(
            each["memory_bytes"] / _GIB,
            each["step_time_s"],
            f"{each['layout']}: {format_seconds(each['step_time_s'])}, {format_bytes(each['memory_bytes'])}",
        )
        for each in result["front"]
    ]
    capacity = result["memory_capacity_bytes"]
    return draw_points(
        "Step time over memory of every layout that fits",
        [(size / _GIB, seconds) for seconds, size in points],
        front,
        x_label="memory a GPU, GiB",
        y_label="step time, s",
        limit=Bar("capacity", capacity / _GIB, format_bytes(capacity)),
        caption="Every dot is a layout. The line joins those that no other beats in both time and memory.",
    )


def _count_layouts(layouts: Json) -> list[object]:
    skipped = ", ".join(f"{rule} {count:,}" for rule, count in sorted(layouts["skipped"].items()))
    return [
        show_exact(layouts["divide"]),
        " layouts are valid, ",
        show_exact(layouts["fit"]),
        " of them fit in memory.",
        f" Left out by rule: {skipped}." if skipped else "",
    ]


def _draw_time(best: Json) -> list[Html]:
    step = best["step_time_s"]
    parts = sorted(best["breakdown"].items(), key=lambda part: -part[1])
    text = f"{format_seconds(step['mid'])} ({format_seconds(step['low'])} to {format_seconds(step['high'])})"
    bars = [Bar("step", step["mid"], text, step["low"], step["high"])]
    for name, seconds in parts:
        share = f"{100 * seconds / step['mid']:.1f} %"
        bars.append(Bar(name_part(name), seconds, f"{format_seconds(seconds)}, {share}"))
    rows = [(name_part(name), show_seconds(seconds), show_percent(seconds / step["mid"])) for name, seconds in parts]
    return [draw_bars("Seconds of a step by part", bars), table(["part", "time", "share"], rows)]


def _draw_memory(result: Json) -> list[Html]:
    parts = {name: size for name, size in result["best"][0]["memory_bytes"].items() if name != "total"}
    return draw_bytes(parts, result["memory_capacity_bytes"])


def _list_losers(losers: Sequence[Json]) -> Html:
    rows = [
        (
            each["reason"],
            each["nearest"]["name"],
            each["why"],
            show_exact(each["layouts"]),
            show_seconds(each["nearest"]["step_time_s"]["mid"]),
        )
        for each in losers
    ]
    headers = ["reason", "nearest layout", "why", "layouts", "its step"]
    return table(headers, rows, caption="Why layouts are slower than the best one, or do not fit", text_columns=3)


def _list_sources(result: Json) -> list[str]:
    price = result["price"]
    cost = [] if price is None else [f"price: {price['usd_per_gpu_hour']:g} USD per GPU-hour ({price['source']})"]
    return [*cost, *(f"{name}: {text}" for name, text in result["evidence"].items())]
