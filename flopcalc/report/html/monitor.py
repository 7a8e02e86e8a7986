"""The page of a training monitor's log: MFU, step time and loss over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcalc.base.units import format_parameters, format_rate, format_seconds
from flopcalc.report.html.page import Html, bullets, join, make_page, number, paragraph, section, swatch, table, tiles
from flopcalc.report.html.pictures import Bar, draw_bars, draw_curves
from flopcalc.report.monitor import METRICS, SHARES

Json = Mapping[str, Any]
Series = Sequence[tuple[float, float | None]]
_CURVES = {"MFU and HFU": ("mfu", "device_mfu", "hfu"), "Step time": ("step_time_s",), "Loss": ("loss",)}
_UNITS = {"MFU and HFU": "%", "Step time": "s", "Loss": "loss"}


def make_monitor_page(summary: Json, series: Mapping[str, Series]) -> str:
    """`summary` is what --json prints, `series` metric -> step and value of every record."""
    state = "ended" if summary["is_ended"] else "no end yet: still running, or killed"
    where = f"run {summary['run']} of {summary['runs']}, {state}; {summary['file']}"
    parts = [
        tiles(_list_figures(summary)),
        *(drawn for title, names in _CURVES.items() for drawn in _draw(title, names, series)),
        section("All metrics", _list_metrics(summary["metrics"])),
        *_list_goodput(summary["goodput"]),
        *_list_datasets(summary["datasets"]),
        section("The run", _list_facts(summary)),
        *_list_events(summary),
    ]
    name = f": {summary['model']}" if summary["model"] else ""
    return make_page(f"Training run{name}", where, parts)


def show_metric(name: str, value: float) -> Html:
    if name in SHARES:
        return number(value, f"{100 * value:.2f} %")
    if name.endswith("_s"):
        return number(value, format_seconds(value))
    return number(value, f"{value:.4f}" if name == "loss" else f"{value:,.1f}")


def _list_figures(summary: Json) -> list[tuple[str, object, object]]:
    names = ("mfu", "tokens_per_second", "step_time_s", "loss")
    figures: list[tuple[str, object, object]] = []
    for name in names:
        values = summary["metrics"][name]
        if values is not None:
            key = "last" if name == "loss" else "mean"
            figures.append((METRICS[name], show_metric(name, values[key]), key))
    figures.append(("records", number(summary["records"], f"{summary['records']:,}"), _describe_steps(summary)))
    return figures


def _describe_steps(summary: Json) -> str:
    first, last = summary["first_step"], summary["last_step"]
    return "no steps" if last is None else f"steps {first:,} to {last:,}"


def _draw(title: str, names: Sequence[str], series: Mapping[str, Series]) -> list[Html]:
    scale = 100 if _UNITS[title] == "%" else 1
    curves: dict[str, list[tuple[float, float | None]]] = {}
    for name in names:
        points = series.get(name, ())
        if any(value is not None for _, value in points):
            curves[name] = [(step, None if value is None else scale * value) for step, value in points]
    if not curves:
        return []
    legend = join([join([swatch(at), METRICS[name], " "]) for at, name in enumerate(curves)])
    drawn = draw_curves(f"{title} over steps", curves, x_label="step", y_label=_UNITS[title], caption=legend)
    return [section(title, drawn)]


def _list_metrics(metrics: Mapping[str, Json | None]) -> Html:
    rows = [
        (METRICS[name], *(show_metric(name, values[key]) for key in ("mean", "median", "last")), str(values["records"]))
        for name, values in metrics.items()
        if values is not None
    ]
    return table(["metric", "mean", "median", "last", "records"], rows, caption="Of the records that are summed up")


def _list_goodput(goodput: Json | None) -> list[Html]:
    if goodput is None or goodput["share"] is None:
        return []
    elapsed = goodput["elapsed_s"]
    of = "" if elapsed is None else f" of {format_seconds(elapsed)}"
    lost = sorted(((cause, s) for cause, s in goodput["lost_s"].items() if s), key=lambda entry: -entry[1])
    bars = [Bar(cause, seconds, format_seconds(seconds)) for cause, seconds in lost]
    drawn = [draw_bars("Lost time by cause", bars, "Time that did not go into training steps.")] if bars else []
    share = number(goodput["share"], f"{100 * goodput['share']:.2f} %")
    return [section("Goodput", paragraph(share, f"{of} went into training steps."), *drawn)]


def _list_datasets(datasets: Mapping[str, Mapping[str, float]]) -> list[Html]:
    if not datasets:
        return []
    names = sorted({name for values in datasets.values() for name in values})
    rows = [
        (dataset, *(number(values.get(name), f"{values.get(name, 0):,.4g}") for name in names))
        for dataset, values in datasets.items()
    ]
    return [section("Datasets", table(["dataset", *names], rows, caption="The newest values"))]


def _list_facts(summary: Json) -> Html:
    parameters, peak = summary["parameters"], summary["peak_flops_per_s"]
    facts = {
        "model": summary["model"],
        "parameters": format_parameters(parameters) if isinstance(parameters, int) else None,
        "device": summary["device"],
        "dtype": summary["dtype"],
        "peak": format_rate(peak) if peak else None,
        "mode": summary["mode"],
        "source of the FLOPs": summary["source"],
        "convention": summary["convention"],
        "ranks": summary["world"],
        "figures of": summary["scope"],
        "slow ranks": summary["stragglers"] or "none",
        "version that wrote it": summary["version"],
    }
    rows = [(name, "not known" if value is None else value) for name, value in facts.items()]
    return table(["fact", "value"], rows, text_columns=2)


def _list_events(summary: Json) -> list[Html]:
    lines = []
    for event in summary["events"]:
        where = "" if event["step"] is None else f"step {event['step']}: "
        lines.append(f"{where}{' '.join(event['message'].split())}")
    if summary["unreadable_lines"]:
        count = summary["unreadable_lines"]
        lines.append(f"{count} unreadable lines left out: a process was killed while it wrote")
    return [section("Warnings", bullets(lines))] if lines else []
