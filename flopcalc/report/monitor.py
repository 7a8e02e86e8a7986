"""The summary of a training monitor's log in, text out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from flopcalc.base.spelling import spell
from flopcalc.base.text_table import find_width, format_grid, wrap
from flopcalc.base.units import format_parameters, format_rate

# Metrics in the summary of a monitor's log.
METRICS = {
    "mfu": "MFU (wall)", "device_mfu": "MFU (device)", "hfu": "HFU", "tflops_per_gpu": "TFLOP/s per GPU",
    "tokens_per_second": "tokens/s", "padded_tokens_per_second": "padded tokens/s", "samples_per_second": "samples/s",
    "images_per_second": "images/s", "step_time_s": "step time", "device_step_time_s": "device step time",
    "data_time_s": "data time", "tensor_active": "tensor cores active", "loss": "loss",
}  # fmt: skip
SHARES = ("mfu", "device_mfu", "hfu", "tensor_active")  # metrics that are shares


_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_EVENTS = 20
_AROUND_CURVE = 28  # characters before and after a curve, as "100.00 % to 100.00 %"
_ALWAYS = ("mfu", "tokens_per_second", "step_time_s")


def format_summary(summary: dict[str, Any], shares: Sequence[float | None]) -> str:
    """The readable report, with a curve of the MFU of every step."""
    state = "ended" if summary["is_ended"] else "no end yet: still running, or killed"
    lines = [*wrap(f"{summary['file']}: run {summary['run']} of {summary['runs']}, {state}", rest="  "), ""]
    parameters, peak = summary["parameters"], summary["peak_flops_per_s"]
    facts = {
        "model": [("", summary["model"]), ("parameters ", format_parameters(parameters) if parameters else None)],
        "device": [
            ("", summary["device"]),
            ("", summary["dtype"]),
            ("peak ", format_rate(peak) if peak else "not known"),
        ],
        "mode": [("", summary["mode"]), ("source ", summary["source"]), ("convention ", summary["convention"])],
        "ranks": [("", summary["world"]), ("figures of ", summary["scope"])],
        "steps": [("", _format_steps(summary))],
    }
    for name, values in facts.items():
        known = [f"{word}{value}" for word, value in values if value is not None]
        lines += wrap(", ".join(known) or "not known", f"{name:<8}", " " * 8)
    rows = []
    for name, label in METRICS.items():
        values = summary["metrics"][name]
        if values is not None or name in _ALWAYS:
            shown = [_format_value(name, values[key]) if values else "-" for key in ("mean", "median", "last")]
            rows.append([label, *shown])
    lines += ["", format_grid(["", "mean", "median", "last"], rows, keys=1)]
    levels = [share for share in shares if share is not None]
    if levels:
        width = min(60, (find_width() or 80) - _AROUND_CURVE)
        curve = sparkline(shares, width)
        lines += ["", f"MFU  {curve}  {_format_share(min(levels))} to {_format_share(max(levels))}"]
    if summary["datasets"]:
        names = sorted({name for values in summary["datasets"].values() for name in values})
        rows = [
            [dataset, *(f"{values[name]:,.4g}" if name in values else "-" for name in names)]
            for dataset, values in summary["datasets"].items()
        ]
        lines += ["", format_grid(["dataset", *names], rows, keys=1)]
    lines += ["", *_format_goodput(summary["goodput"])]
    if summary["stragglers"]:
        lines += wrap(f"slow ranks: {', '.join(map(str, summary['stragglers']))}", rest="  ")
    if summary["unreadable_lines"]:
        count = summary["unreadable_lines"]
        lines += wrap(f"unreadable lines left out: {count} (a process was killed while it wrote)", rest="  ")
    events = summary["events"]
    if events:
        lines += ["", f"warnings ({len(events)})"]
        for event in events[:_MOST_EVENTS]:
            where = "" if event["step"] is None else f"step {event['step']}: "
            lines += wrap(f"{where}{' '.join(event['message'].split())}", "  ", " " * 4)
        if len(events) > _MOST_EVENTS:
            lines.append(f"  … and {len(events) - _MOST_EVENTS} more: {spell('json')} lists all")
    return "\n".join(lines)


def _format_steps(summary: dict[str, object]) -> str:
    if summary["last_step"] is None:
        return f"none, {summary['records']} records"
    return f"{summary['first_step']:,} to {summary['last_step']:,}, {summary['records']:,} records"


def _format_goodput(goodput: dict[str, Any] | None) -> list[str]:
    if goodput is None or goodput["share"] is None:
        return ["goodput not known yet"]
    elapsed_s = goodput["elapsed_s"]
    lost = [(cause, seconds) for cause, seconds in goodput["lost_s"].items() if seconds]
    lost.sort(key=lambda entry: -entry[1])
    causes = ", ".join(f"{cause} {_format_time(seconds)}" for cause, seconds in lost) or "nothing"
    of = "" if elapsed_s is None else f" of {_format_time(elapsed_s)}"
    return wrap(f"goodput {_format_share(goodput['share'])}{of}; lost: {causes}", rest="  ")


def _format_value(name: str, value: float) -> str:
    if name in SHARES:
        return _format_share(value)
    if name.endswith("_s"):
        return _format_time(value)
    if name == "loss":
        return f"{value:.4f}"
    return f"{value:,.1f}" if value >= 1 else f"{value:.3g}"


def _format_share(value: float) -> str:
    return f"{100 * value:.2f} %"


def _format_time(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms" if abs(seconds) < 1 else f"{seconds:,.2f} s"


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """Values as blocks from their least to their greatest; neighbours are averaged to fit, a gap is a space."""
    count = min(width, len(values))
    cells: list[float | None] = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        known = [value for value in part if value is not None and math.isfinite(value)]
        cells.append(fmean(known) if known else None)
    levels = [cell for cell in cells if cell is not None]
    if not levels:
        return " " * count
    low, high = min(levels), max(levels)
    if low == high:
        return "".join(" " if cell is None else _BLOCKS[3] for cell in cells)
    top = len(_BLOCKS) - 1
    return "".join(" " if cell is None else _BLOCKS[round((cell - low) / (high - low) * top)] for cell in cells)
