"""The tables of a calibration: a file for each kind, and the bench that times and counts one operation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flopcalc.base.vocabulary import Direction

Json = dict[str, Any]
SUITES = ("quick", "full", "test")  # test: tiny sizes on the CPU, the real code path
STATISTIC = (
    "median of repeats in CUDA events (CPU: perf_counter), each repeat alone; spread = (p90 - p10) / median; random "
    "data; two warm-up calls; the device kept waiting until the host has queued all repeats"
)
REPEATS = "5 to 40, about 20 ms of work; sustained: 0.8 s, the second half; steps: 8"


def get_device(suite: str) -> str:
    return "cpu" if suite == "test" else "cuda"


def round_digits(value: float | None, digits: int = 5) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


class Timing(NamedTuple):
    """Seconds of one call: median, spread, how often it was run, and the clock and power seen meanwhile."""

    seconds: float
    spread: float
    repeats: int
    clock_mhz: int | None = None
    power_w: float | None = None


def summarize(seconds: Sequence[float]) -> tuple[float, float]:
    """Median, and (p90 - p10) / median."""
    ordered = sorted(seconds)
    middle = statistics.median(ordered)
    last = len(ordered) - 1
    return middle, (ordered[round(0.9 * last)] - ordered[round(0.1 * last)]) / middle if middle else 0.0


class Bench:
    """Times an operation and counts what it executes, on one device."""

    def __init__(self, device: str) -> None:
        import torch

        from flopcalc.measure.calibrate.provenance import DeviceGauge

        self.torch = torch
        self.device = device
        self.is_gpu = device == "cuda"
        if self.is_gpu and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        self.gauge = DeviceGauge() if self.is_gpu else None
        self._counter: Any = None
        self._counter_failed: str | None = None
        self._cycles_per_s = 1.9e9
        torch.manual_seed(0)
        if not self.is_gpu:
            torch.set_num_threads(1)

    def random(self, *shape: int, dtype: object = None, needs_grad: bool = False) -> Any:
        """Normal numbers: zeros would draw less power and run 13 to 20 % faster than real data."""
        torch = self.torch
        made = torch.randn(*shape, device=self.device, dtype=dtype or torch.bfloat16)
        return made.requires_grad_(needs_grad)

    def make_call(self, forward: Callable[[], object], direction: Direction, wanted: object) -> Callable[[], Any]:
        """A function that runs the forward alone, or alone the backward that gives the gradient of `wanted`."""
        torch = self.torch
        if direction == "forward":

            def without_graph() -> Any:
                with torch.no_grad():
                    return forward()

            return without_graph
        out = forward()
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)

    def synchronize(self) -> None:
        if self.is_gpu:
            self.torch.cuda.synchronize()

    def free(self) -> None:
        """Give memory back between rows, so that fragments of one do not fail the next."""
        if self.is_gpu and self.torch.cuda.memory_reserved() > 60e9:
            self.torch.cuda.empty_cache()

    def time(self, call: Callable[[], object], work_s: float = 0.02, idle_s: float = 0.0) -> Timing:
        """Time of one call in a short burst."""
        call()
        self.synchronize()
        start = time.perf_counter()
        call()
        queued_s = time.perf_counter() - start
        self.synchronize()
        once_s = time.perf_counter() - start
        repeats = max(5, min(40, round(work_s / max(once_s, 1e-6))))
        if not self.is_gpu:
            return self._time_on_host(call, repeats)
        if idle_s:
            time.sleep(idle_s)
        events = self._queue(call, repeats, queued_s)
        clock = self.gauge.read_clock_mhz() if self.gauge else None
        self.synchronize()
        seconds, spread = summarize([begin.elapsed_time(end) / 1000 for begin, end in events])
        return Timing(seconds, spread, repeats, clock)

    def _queue(self, call: Callable[[], object], repeats: int, queued_s: float) -> list[tuple[Any, Any]]:
        """All repeats between events, queued behind a wait: what is timed is the device, not the host."""
        torch = self.torch
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        wait_s = min(0.1, 1.3 * repeats * (queued_s + 2e-5))
        torch.cuda._sleep(int(wait_s * self._cycles_per_s))
        for begin, end in events:
            begin.record()
            call()
            end.record()
        return events

    def _time_on_host(self, call: Callable[[], object], repeats: int) -> Timing:
        taken = []
        for _ in range(min(repeats, 5)):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        seconds, spread = summarize(taken)
        return Timing(seconds, spread, len(taken))

    def sustain(self, call: Callable[[], object], work_s: float = 0.8) -> Timing:
        """Time of one call when the device has been busy without pause; the clock has settled by the second half."""
        if not self.is_gpu:
            return self.time(call)
        torch = self.torch
        once_s = max(self.time(call, work_s=0.005).seconds, 1e-5)
        chunk = max(1, round(0.02 / once_s))
        chunks = max(4, round(work_s / (once_s * chunk)))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(chunks + 1)]
        marks[0].record()
        clocks = []
        for i, mark in enumerate(marks[1:]):
            for _ in range(chunk):
                call()
            mark.record()
            if i >= 2:
                marks[i - 1].synchronize()  # two chunks ahead: never idle, never a long queue
            if i > chunks // 2 and self.gauge:
                clocks.append(self.gauge.read_clock_mhz())
        power = self.gauge.read_power_w() if self.gauge else None
        self.synchronize()
        half = chunks // 2
        taken = [marks[i].elapsed_time(marks[i + 1]) / 1000 / chunk for i in range(half, chunks)]
        seconds, spread = summarize(taken)
        known = [clock for clock in clocks if clock]
        clock = round(statistics.median(known)) if known else None
        return Timing(seconds, spread, len(taken) * chunk, clock, power)

    def count_executed(self, call: Callable[[], object]) -> int | None:
        """Tensor-core FLOPs that the device's own counter saw in one call; None where it cannot be read."""
        if not self.is_gpu or self._counter_failed:
            return None
        from flopcalc.measure.counters.cupti import CountersUnavailable, HardwareCounter

        for _ in range(2):  # once more with a new counter: another profiler in this process may have taken it away
            try:
                if self._counter is None:
                    self._counter = HardwareCounter()
                with self._counter.measure() as sample:
                    call()
                return int(sample.total_flops)
            except CountersUnavailable as error:
                self._counter = None
                reason = str(error)
        self._counter_failed = reason
        print(f"hardware counter not used: {reason}", flush=True)
        return None
