"""How long single calls of the monitor take at the highest rate of steps, beside calls that do nothing.

    python benchmarks/monitor_pauses.py [--seconds 5]

A loop calls `log_step` as fast as it can, while the monitor's worker and its log's thread run. Then another loop,
without a monitor, calls a function that only lets as much time pass as `log_step` takes in the median: a longer call is
interrupted by the machine more often, with or without a monitor. Prints percentiles of both, and what became of the
records.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from array import array
from collections.abc import Callable, Sequence

from flopcalc.monitor import TrainingMonitor

BLOCK = 1000
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
SHARES = (0.5, 0.99, 0.999, 0.9999, 1.0)


def time_calls(call: Callable[..., None], deadline: float, first: int = 0) -> array[int]:
    """Nanoseconds of every call until then."""
    found = array("q")
    clock = time.perf_counter_ns
    while time.monotonic() < deadline:
        for number in range(first, first + BLOCK):
            before = clock()
            call(number, 0.0, 1.5, None, 1e-5)
            found.append(clock() - before)
        first += BLOCK
    return found


def make_empty(wait_ns: int) -> Callable[..., None]:
    clock = time.perf_counter_ns

    def let_pass(*_: object) -> None:
        end = clock() + wait_ns
        while clock() < end:
            pass

    return let_pass


def measure(folder: str, seconds: float) -> tuple[array[int], array[int]]:
    """Nanoseconds of every call of the monitor, and of calls that do nothing."""
    monitor = TrainingMonitor(folder, model=MODEL)
    monitor.log_step(1, 0.0, 1.5, None, 1e-5)  # the first step starts everything
    logged = time_calls(monitor.log_step, time.monotonic() + seconds, 2)
    begun = time.perf_counter()
    monitor.close()
    print(f"{len(logged):,} steps in {seconds:g} s; close took {time.perf_counter() - begun:.2f} s")
    wait_ns = sorted(logged)[len(logged) // 2]
    return logged, time_calls(make_empty(wait_ns), time.monotonic() + seconds)


def find_shares(times: array[int]) -> list[float]:
    """Microseconds at the percentiles of SHARES."""
    ordered = sorted(times)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e3 for share in SHARES]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True):
        logged, empty = measure(folder, options.seconds)
        with open(os.path.join(folder, "flopcalc.jsonl"), encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
    print("microseconds       p50      p99    p99.9   p99.99      max")
    for name, times in (("log_step", logged), ("empty call", empty)):
        print(f"{name:12}" + "".join(f"{value:9.1f}" for value in find_shares(times)))
    written = sum(record["type"] == "step" for record in records)
    print(f"{written:,} records written; {records[-1].get('dropped', 0):,} dropped and said so")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
