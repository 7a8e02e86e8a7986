"""The page of a prediction: where the time goes, what fills the memory, and the limits of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flopcalc.base.units import format_bytes, format_energy, format_flops, format_mass, format_seconds
from flopcalc.base.vocabulary import name_part
from flopcalc.report.html.page import (
    Html,
    beside,
    join,
    list_notes,
    make_page,
    number,
    paragraph,
    section,
    show_bytes,
    show_code,
    show_exact,
    show_percent,
    show_seconds,
    swatch,
    table,
    tiles,
)
from flopcalc.report.html.pictures import Bar, draw_bars, draw_stack

Json = Mapping[str, Any]


def make_prediction_page(result: Json) -> str:
    """`result` is what --json prints."""
    title = f"{result['model']} on {result['device']}: time and memory of a step"
    subtitle = f"{result['workload']}; {result['dtype']}, execution {result['execution']}"
    step = result["step_time_s"]
    interval = f"{format_seconds(step['low'])} to {format_seconds(step['high'])}"
    figures: list[tuple[str, object, object]] = [
        ("step", show_seconds(step["mid"]), interval),
        ("bound by", f"the {result['bound']}", "what it waits for"),
        ("MFU", show_percent(result["mfu"]), "model FLOPs"),
        ("HFU", show_percent(result["hfu"]), "executed FLOPs"),
        _show_rate(result),
    ]
    memory = result["memory_bytes"]
    if memory is not None:
        fits = {True: "fits", False: "does not fit", None: "whether it fits is not known"}[memory["fits"]]
        figures.append(("memory", show_bytes(memory["peak"]), fits))
    figures += list_energy(result["energy"], "per step")
    parts = [
        tiles(figures),
        *([paragraph("What helps most: ", result["advice"])] if result["advice"] else []),
        section("Where the time goes", *_draw_time(result)),
        *([section("Memory", *_draw_memory(memory))] if memory is not None else []),
        *([section("The device's limits", _list_floors(result["floors"], step))] if result["floors"] else []),
        section("Modules, on the device", _list_modules(result["breakdown"]["modules"])),
        *list_notes([*result["notes"], *(f"memory: {note}" for note in (memory or {}).get("notes", ()))]),
    ]
    return make_page(title, subtitle, parts)


def list_energy(energy: Json | None, span: str) -> list[tuple[str, object, object]]:
    """Tiles of watts, watt-hours and CO2; none where the GPU's power limit is not known."""
    if energy is None:
        return []

    def show(label: str, name: str, format_: Callable[[float], str], note: str) -> tuple[str, object, object]:
        values = energy[name]
        text = f"{note}, {format_(values['low'])} to {format_(values['high'])}"
        return label, number(values["mid"], format_(values["mid"])), text

    figures = [
        show("power", "power_w", lambda watts: f"{watts:,.0f} W", "of a GPU"),
        show("energy", "wh", format_energy, span),
    ]
    if energy["wh_per_million_tokens"] is not None:
        figures.append(show("energy", "wh_per_million_tokens", format_energy, "per million tokens"))
    if energy["co2_g"] is not None:
        figures.append(show("CO2", "co2_g", format_mass, span))
    return figures


def _draw_time(result: Json) -> list[Html]:
    step = result["step_time_s"]
    kinds = {name: seconds for name, seconds in result["breakdown"].items() if name != "modules"}
    whole = sum(kinds.values())
    text = f"{format_seconds(step['mid'])} ({format_seconds(step['low'])} to {format_seconds(step['high'])})"
    bars = [Bar("step", step["mid"], text, step["low"], step["high"])]
    bars += [
        Bar(name_part(name), seconds, f"{format_seconds(seconds)}, {100 * seconds / whole:.1f} %")
        for name, seconds in kinds.items()
        if seconds
    ]
    rows = [(name_part(name), show_seconds(value), show_percent(value / whole)) for name, value in kinds.items()]
    caption = "The line on the first bar is the interval that nine of ten measurements should lie in."
    return [draw_bars("Seconds of a step by kind of work", bars, caption), table(["kind", "time", "share"], rows)]


def draw_bytes(parts: Mapping[str, int], capacity: int | None) -> list[Html]:
    """Bytes at the peak in one bar, with what the device has; a table of the same."""
    shown = {name.replace("_", " "): size for name, size in parts.items() if size}
    limit = None if capacity is None else Bar("capacity", capacity, format_bytes(capacity))
    bars = [Bar(name, size, format_bytes(size)) for name, size in shown.items()]
    total = sum(shown.values())
    rows: list[tuple[object, ...]] = [
        (join([swatch(at), name]), show_bytes(size), f"{100 * size / total:.1f} %")
        for at, (name, size) in enumerate(shown.items())
    ]
    rows.append(("sum", show_bytes(total), "100.0 %"))
    return [
        draw_stack("Bytes at the peak of a step", bars, limit, "What is in memory at once at the peak of a step."),
        table(["at the peak", "bytes", "share"], rows),
    ]


def _draw_memory(memory: Json) -> list[Html]:
    kinds = memory["at_peak"]
    most = [(name.replace("_", " "), show_bytes(memory[name])) for name in kinds if memory[name]]
    picture, *tables = draw_bytes(kinds, memory["capacity"])
    tables.append(table(["kind", "most in a step"], most))
    if memory.get("activations_by_recompute") is not None:
        rows = [(word, show_bytes(size)) for word, size in memory["activations_by_recompute"].items()]
        tables.append(table(["recomputation", "activations kept"], rows))
    parts = [picture, beside(*tables)]
    if memory.get("largest_batch") is not None:
        parts.append(paragraph("Largest batch that fits: ", show_exact(memory["largest_batch"])))
    return parts


def _list_floors(floors: Json, step: Json) -> Html:
    rows = [
        (
            "compute: FLOPs at the peak",
            number(floors["flops"], format_flops(floors["flops"])),
            show_seconds(floors["compute_s"]),
        ),
        ("bandwidth: bytes at its bandwidth", show_bytes(floors["bytes"]), show_seconds(floors["bandwidth_s"])),
        ("predicted", "", show_seconds(step["mid"])),
    ]
    rate = floors["tokens_per_s"]
    most = [] if rate is None else [paragraph("At most ", number(rate, f"{rate:,.0f}"), " tokens per second.")]
    grid = table(["floor", "amount", "least time"], rows, caption="No code can be faster than the higher floor")
    return join([grid, *most])


def _show_rate(result: Json) -> tuple[str, object, object]:
    unit = "samples" if result["tokens_per_s"] is None else "tokens"
    rate = result[f"{unit}_per_s"]
    return f"{unit} per second", number(rate, f"{rate:,.0f}"), ""


def _list_modules(modules: Mapping[str, float]) -> Html:
    whole = sum(modules.values())
    rows = [(show_code(name), show_seconds(value), show_percent(value / whole)) for name, value in modules.items()]
    return table(["module", "time", "share"], rows, caption="Seconds on the device by module; * is every layer")
