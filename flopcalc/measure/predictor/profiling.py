"""Profile a step: the device's time by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flopcalc.measure.calibrate.tables import Bench, Json, round_digits


def profile_step(bench: Bench, step: Callable[[], object]) -> Json:
    """Device time of one step, summed by operator, shapes and dtypes; its busy time and its span."""
    torch = bench.torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if bench.is_gpu else [])
    step()
    bench.synchronize()
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        bench.synchronize()
    return tally(profiler.profiler.kineto_results.events(), torch)


def tally(events: Any, torch: Any) -> Json:
    """Join kernels to the operators that launched them: one row per operator, thread, shapes and dtypes."""
    cpu = torch._C._autograd.DeviceType.CPU
    kernels: dict[int, list[tuple[float, str]]] = {}
    hosts = []
    starts, ends, busy_us, launches = [], [], 0.0, 0
    for event in events:
        if event.device_type() == cpu:
            hosts.append(event)
        elif event.linked_correlation_id() > 0:
            taken = event.duration_ns() / 1000
            kernels.setdefault(event.linked_correlation_id(), []).append((taken, event.name()))
            starts.append(event.start_ns())
            ends.append(event.start_ns() + event.duration_ns())
            busy_us += taken
            launches += 1
    main = hosts[0].start_thread_id() if hosts else 0
    found: dict[tuple[Any, ...], list[Any]] = {}
    for event in hosts:
        launched = kernels.pop(event.correlation_id(), []) if event.correlation_id() else []
        name = event.name()
        if not launched and not name.startswith("aten::"):
            continue
        shapes = str([list(shape) for shape in event.shapes()]).replace(" ", "")
        dtypes = ",".join(event.dtypes())
        row = found.setdefault((name, event.start_thread_id() != main, shapes, dtypes), [0, 0, 0.0, ""])
        row[0] += 1
        row[1] += len(launched)
        row[2] += sum(microseconds for microseconds, _ in launched)
        if launched and not row[3]:
            row[3] = launched[0][1][:60]
    rest = [entry for launched in kernels.values() for entry in launched]
    rows = [
        [name, is_backward, shapes, dtypes, calls, launched, round_digits(us, 6), kernel]
        for (name, is_backward, shapes, dtypes), (calls, launched, us, kernel) in found.items()
    ]
    if rest:  # launched outside of any recorded operator
        rows.append(["", False, "", "", 0, len(rest), round_digits(sum(us for us, _ in rest), 6), rest[0][1][:60]])
    return {
        "operators": rows,
        "kernels": launches,
        "busy_us": round_digits(busy_us, 6),
        "span_us": round_digits((max(ends) - min(starts)) / 1000, 7) if ends else None,
    }
