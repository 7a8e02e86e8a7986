"""A predicted step, or the pipeline of a planned one, as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.files import format_json, write_whole
from flopcalc.planning.schedule import list_events

if TYPE_CHECKING:
    from flopcalc.planning.results import Plan
    from flopcalc.prediction.step import Prediction

TRACKS = {"host": "host (CPU)", "device": "device (GPU)", "waits": "host waits for the device"}


def make_trace(prediction: Prediction) -> dict[str, Any]:
    """What host and device do in a step, and where the host waits."""
    if not prediction.events:
        raise FlopcalcError("this prediction has no timeline: predict with timeline=True")
    numbers = {track: number for number, track in enumerate(TRACKS)}
    about = {
        "model": prediction.model,
        "workload": prediction.workload,
        "device": prediction.device,
        "dtype": prediction.dtype,
        "execution": prediction.execution,
        "bound": prediction.bound,
        "step_time_s": prediction.step_time_s._asdict(),
        "note": "predicted, not measured; time 0 is where the host begins the step, while the device may still "
        "work on the step before",
    }
    events = [
        (numbers[each.track], each.track, each.name, each.start_s, each.end_s - each.start_s)
        for each in prediction.events
    ]
    return _format(f"predicted step of {prediction.model}", list(TRACKS.values()), events, about)


def make_schedule(plan: Plan) -> dict[str, Any]:
    """The pipeline of the best layout: compute, communication and bubbles."""
    best = plan.best[0]
    about = {
        "model": plan.model,
        "device": plan.device.id,
        "gpus": plan.gpus,
        "layout": str(best.layout),
        "step_time_s": {"low": best.step.low, "mid": best.step.seconds, "high": best.step.high},
        "note": "planned, not measured; every stage as long as the fullest; communication is what nothing hides",
    }
    events = list_events(best, plan.global_batch // (best.layout.dp * best.layout.micro_batch))
    return _format(f"{plan.model}, {best.layout}", [f"stage {rank}" for rank in range(best.layout.pp)], events, about)


def _format(
    title: str, tracks: Sequence[str], events: Iterable[tuple[int, str, str, float, float]], about: dict[str, Any]
) -> dict[str, Any]:
    """The JSON object of the Trace Event Format, in microseconds.

    An event is the number of its track, its kind and name, and the seconds at which it starts and that it takes.
    """
    found: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for number, track in enumerate(tracks):
        meta = {"ph": "M", "pid": 1, "tid": number + 1}
        found.append({**meta, "name": "thread_name", "args": {"name": track}})
        found.append({**meta, "name": "thread_sort_index", "args": {"sort_index": number}})
    for number, kind, name, start_s, seconds in events:
        times = {"ts": round(1e6 * start_s, 3), "dur": round(1e6 * seconds, 3)}
        found.append({"ph": "X", "pid": 1, "tid": number + 1, "cat": kind, "name": name, **times})
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": found}


def save_trace(prediction: Prediction, path: str) -> None:
    """Write a predicted step's trace whole or not at all."""
    _write(make_trace(prediction), path)


def save_schedule(plan: Plan, path: str) -> None:
    """Write a planned pipeline's trace whole or not at all."""
    _write(make_schedule(plan), path)


def _write(trace: dict[str, object], path: str) -> None:
    if not path:
        raise FlopcalcError("the trace needs a file name, not ''")
    try:
        write_whole(path, format_json(trace, None) + "\n")
    except OSError as error:
        raise FlopcalcError(f"{path}: cannot be written: {error.strerror}") from None
