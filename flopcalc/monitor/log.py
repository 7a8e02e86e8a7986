"""A JSONL log in; its runs, a summary or a plot out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError, format_value
from flopcalc.base.figures import open_figure
from flopcalc.base.files import MAX_LOG_BYTES, parse_object, read_bytes, read_path
from flopcalc.monitor.keys import DATASET_PREFIX, LOG_NAME, LOST_PREFIX, LOST_SUFFIX, SCHEMA

Record = dict[str, Any]
# Name in a summary -> key of a record.
METRICS = {
    "mfu": "perf/mfu",
    "device_mfu": "perf/device_mfu",
    "hfu": "perf/hfu",
    "tflops_per_gpu": "perf/tflops_per_gpu",
    "tokens_per_second": "perf/tokens_per_second",
    "padded_tokens_per_second": "perf/padded_tokens_per_second",
    "samples_per_second": "perf/samples_per_second",
    "images_per_second": "perf/images_per_second",
    "step_time_s": "perf/step_time",
    "device_step_time_s": "perf/device_step_time",
    "data_time_s": "perf/data_time",
    "tensor_active": "perf/tensor_active",
    "loss": "training/loss",
}


class LoggedRun(NamedTuple):
    """What one monitor wrote."""

    start: Record  # empty where the head of the file is gone
    steps: list[Record]
    events: list[Record]
    end: Record | None  # None: still running, or killed


class Log(NamedTuple):
    path: str
    runs: list[LoggedRun]  # at least one, oldest first
    unreadable_lines: int  # torn when a process was killed; left out


def load_log(path: str | os.PathLike[str]) -> Log:
    """The log at a path, or in a folder under its usual name."""
    name = read_path(path, "a log", FlopcalcError)
    if os.path.isdir(name):
        name = os.path.join(name, LOG_NAME)
    try:
        lines = read_bytes(name, MAX_LOG_BYTES, FlopcalcError).split(b"\n")
    except FlopcalcError as error:
        raise FlopcalcError(f"{error}. Give a log, or the output_dir of a monitor") from None
    runs: list[LoggedRun] = []
    unreadable = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = parse_object(line)
        kind = record.get("type")
        if kind == "start":
            if record.get("schema") != SCHEMA:
                raise FlopcalcError(
                    f"{name}: line {number}: schema {format_value(record.get('schema'))} is not known, this flopcalc "
                    f"reads {SCHEMA}: use the version that wrote it ({format_value(record.get('version'))})"
                )
            early = runs.pop().events if runs and not (runs[-1].start or runs[-1].steps or runs[-1].end) else []
            runs.append(LoggedRun(record, [], early, None))
            continue
        if kind not in ("step", "event", "end"):
            unreadable += 1
            continue
        if not runs:
            runs.append(LoggedRun({}, [], [], None))
        if kind == "step":
            runs[-1].steps.append(record)
        elif kind == "event":
            runs[-1].events.append(record)
        else:
            runs[-1] = runs[-1]._replace(end=record)
    if not runs:
        what = "no line of it is a record" if unreadable else "it is empty"
        raise FlopcalcError(f"{name}: not a monitor's log: {what}")
    return Log(name, runs, unreadable)


def summarize(log: Log, run: int | None = None, last: int | None = None) -> dict[str, Any]:
    """One run (1 is the first, None the last one) as plain values, None where not known; `last` records of it."""
    number = len(log.runs) if run is None else run
    if not 1 <= number <= len(log.runs):
        raise FlopcalcError(f"{log.path}: has no run {number}: it holds {len(log.runs)}, and 1 is the first")
    found = log.runs[number - 1]
    start, steps = found.start, found.steps if last is None else found.steps[-last:]
    newest = steps[-1] if steps else {}
    numbers = [step for step in (_number(record, "global_step") for record in steps) if step is not None]
    return {
        "file": log.path,
        "run": number,
        "runs": len(log.runs),
        "is_ended": found.end is not None,
        "version": start.get("version"),
        "model": start.get("model"),
        "parameters": start.get("parameters"),
        "mode": start.get("mode"),
        "world": start.get("world"),
        # A record knows more than the start: the model may have come later.
        "device": newest.get("perf/device") or start.get("device"),
        "dtype": newest.get("perf/dtype") or start.get("dtype"),
        "peak_flops_per_s": _number(newest, "perf/peak_flops_per_s") or _number(start, "peak_flops_per_s"),
        "source": newest.get("perf/source"),
        "convention": newest.get("perf/convention"),
        "scope": newest.get("perf/scope"),
        "records": len(steps),
        "first_step": int(numbers[0]) if numbers else None,
        "last_step": int(numbers[-1]) if numbers else None,
        "metrics": {name: _describe(steps, key) for name, key in METRICS.items()},
        "stragglers": next((r["perf/stragglers"] for r in reversed(steps) if "perf/stragglers" in r), None),
        "goodput": _find_goodput(found),
        "datasets": _find_datasets(steps),
        "events": [{"step": _number(e, "global_step"), "message": str(e.get("message"))} for e in found.events],
        "unreadable_lines": log.unreadable_lines,
    }


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _describe(steps: Sequence[Record], key: str) -> dict[str, float] | None:
    """Mean, median and last value of the records that have one."""
    known = [(record, value) for record in steps if (value := _number(record, key)) is not None]
    if not known:
        return None
    values = [value for _, value in known]
    weights = [_weigh(record, key) for record, _ in known]
    mean = fmean(values, weights) if sum(weights) > 0 else fmean(values)
    return {"mean": mean, "median": median(values), "last": values[-1], "records": len(values)}


def _weigh(record: Record, key: str) -> float:
    """A record speaks for its steps, and a rate for their time: so the mean MFU is all FLOPs over all time."""
    steps = _number(record, "perf/steps")
    weight = 1.0 if steps is None else steps
    if key in ("perf/step_time", "training/loss"):
        return weight
    if key in ("perf/mfu", "perf/tokens_per_second", "perf/samples_per_second"):
        return weight * (_number(record, "perf/step_time") or 0.0)
    return 1.0  # details are taken at even distances


def _find_goodput(run: LoggedRun) -> dict[str, Any] | None:
    """From the end of the run, else from the last record that holds it."""
    if run.end is not None and isinstance(run.end.get("goodput"), dict):
        content = run.end["goodput"]
        share, prefix = _number(content, "share"), "lost_"
    else:
        content = next((record for record in reversed(run.steps) if "goodput/share" in record), {})
        share, prefix = _number(content, "goodput/share"), LOST_PREFIX
    lost = {
        key.removeprefix(prefix).removesuffix(LOST_SUFFIX): _number(content, key)
        for key in content
        if key.startswith(prefix)
    }
    if not content:
        return None
    return {"share": share, "elapsed_s": _number(content, "elapsed_s"), "lost_s": lost}


def _find_datasets(steps: Iterable[Record]) -> dict[str, dict[str, float]]:
    """The newest values of each dataset."""
    found: dict[str, dict[str, float]] = {}
    for record in steps:
        for key in record:
            if key.startswith(DATASET_PREFIX) and (value := _number(record, key)) is not None:
                name, _, metric = key.removeprefix(DATASET_PREFIX).rpartition("/")
                found.setdefault(name, {})[metric] = value
    total = sum(values.get("tokens", 0) for values in found.values())
    for values in found.values():
        if "share" in values and "tokens" in values and total > 0:
            values["share"] = values["tokens"] / total  # a record of many datasets holds those that changed alone
    return found


def find_series(run: LoggedRun, key: str) -> list[float | None]:
    """One value a record, None where it has none."""
    return [_number(record, key) for record in run.steps]


def plot(log: Log, path: str | os.PathLike[str]) -> None:
    """MFU, step time and loss over steps, one line a run, into an image of the kind that the name ends in."""
    with open_figure(path, 9, 9) as figure:
        shares, times, losses = figure.subplots(3, 1, sharex=True)
        panels = (
            (shares, "perf/mfu", 100, "MFU (wall)", "C0", "-"),
            (shares, "perf/device_mfu", 100, "MFU (device)", "C1", "."),
            (shares, "perf/hfu", 100, "HFU", "C2", "."),
            (times, "perf/step_time", 1, "step time (wall)", "C0", "-"),
            (times, "perf/device_step_time", 1, "step time (device)", "C1", "."),
            (losses, "training/loss", 1, "loss", "C0", "-"),
        )
        for axes, key, scale, label, colour, style in panels:
            for run in log.runs:
                points = [
                    (step, scale * value)
                    for record in run.steps
                    if (step := _number(record, "global_step")) is not None
                    and (value := _number(record, key)) is not None
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
                    label = "_" + label.lstrip("_")  # one entry in the legend for all runs
        for axes, unit in ((shares, "MFU, HFU (%)"), (times, "step time (s)"), (losses, "loss")):
            axes.set_ylabel(unit)
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
            else:
                axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", va="center", color="grey")
        losses.set_xlabel("step")
        start = log.runs[-1].start
        shares.set_title(", ".join(str(start[key]) for key in ("model", "device", "dtype", "mode") if start.get(key)))
