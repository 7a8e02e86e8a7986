"""A predicted step as a trace that Perfetto and chrome://tracing open: host, device, and where the host waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.files import format_json, write_whole

if TYPE_CHECKING:
    from flopcalc.prediction.step import Prediction

TRACKS = {"host": "host (CPU)", "device": "device (GPU)", "waits": "host waits for the device"}


def make_trace(prediction: Prediction) -> dict[str, Any]:
    """The trace as the JSON object of the Trace Event Format; times in microseconds."""
    if not prediction.events:
        raise FlopcalcError("this prediction has no timeline: predict with timeline=True")
    process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"predicted step of {prediction.model}"}}
    events: list[dict[str, object]] = [process]
    numbers = {track: number for number, track in enumerate(TRACKS, 1)}
    for track, name in TRACKS.items():
        about = {"ph": "M", "pid": 1, "tid": numbers[track]}
        events.append({**about, "name": "thread_name", "args": {"name": name}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": numbers[track]}})
    for event in prediction.events:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": numbers[event.track],
                "cat": event.track,
                "name": event.name,
                "ts": round(1e6 * event.start_s, 3),
                "dur": round(1e6 * (event.end_s - event.start_s), 3),
            }
        )
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": prediction.model,
            "workload": prediction.workload,
            "device": prediction.device,
            "dtype": prediction.dtype,
            "execution": prediction.execution,
            "bound": prediction.bound,
            "step_time_s": prediction.step_time_s._asdict(),
            "note": "predicted, not measured; time 0 is where the host begins the step, while the device may still "
            "work on the step before",
        },
        "traceEvents": events,
    }


def save_trace(prediction: Prediction, path: str) -> None:
    """Write a predicted step's trace whole or not at all."""
    write_trace(make_trace(prediction), path)


def write_trace(trace: dict[str, object], path: str) -> None:
    """Write a trace whole or not at all."""
    if not path:
        raise FlopcalcError("the trace needs a file name, not ''")
    try:
        write_whole(path, format_json(trace, None) + "\n")
    except OSError as error:
        raise FlopcalcError(f"{path}: cannot be written: {error.strerror}") from None
