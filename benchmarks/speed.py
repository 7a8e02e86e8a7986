"""Speed as ratios measured in one run: start-up of the command, a bound estimator's call, binding a config.

    python benchmarks/speed.py            prints each ratio beside its goal; exit code 1 if one is missed

Commands are run in turn, so that a slow moment of the machine hits all of them, and the median of the
paired ratios is taken.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence

import flopcalc
from flopcalc.core.spec.spec import load_spec

ROUNDS = 40
BASE = [sys.executable, "-c", "import click, json, tomllib, dataclasses"]
MODELS = [sys.executable, "-m", "flopcalc", "models"]
ESTIMATE = [sys.executable, "-m", "flopcalc", "estimate", "--model", "qwen2-vl", "--seq", "2048"]


def measure_cpu_s(command: Sequence[str]) -> float:
    """User and system time of one process; byte code is cached, as in an installed package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


def compare_commands(commands: dict[str, list[str]]) -> dict[str, float]:
    """Median over rounds of each command's CPU time over the base command's in the same round."""
    for command in commands.values():
        measure_cpu_s(command)
    ratios: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        base = measure_cpu_s(BASE)
        for name, command in commands.items():
            ratios[name].append(measure_cpu_s(command) / base)
    return {name: statistics.median(values) for name, values in ratios.items()}


def compare_calls(call: Callable[[], object]) -> float:
    """Median over rounds of the call's time over that of sum(range(1000))."""
    ratios = []
    for _ in range(ROUNDS):
        base = timeit.timeit("sum(range(1000))", number=500)
        ratios.append(timeit.timeit(call, number=500) / base)
    return statistics.median(ratios)


def measure_bind_ms(model: str) -> float:
    """From the preset's name to the first count, spec files read anew each time."""
    times = []
    for _ in range(ROUNDS):
        load_spec.cache_clear()
        start = time.process_time()
        flopcalc.bind(model)(1, 2048)
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def main() -> None:
    text = flopcalc.bind("llama-3.1-8b")
    vision = flopcalc.bind("qwen2.5-vl-7b")
    grids = [[1, 36, 52]] * 8
    starts = compare_commands({"json": [*ESTIMATE, "--json"], "table": ESTIMATE, "models": MODELS})
    rows = [
        ("estimate --json, CPU time / importing click, json, tomllib, dataclasses", starts["json"], 1.7),
        ("estimate (table), likewise; tabulate is loaded", starts["table"], 3.0),
        ("models, likewise", starts["models"], 3.0),
        ("bound call, text batch / sum(range(1000))", compare_calls(lambda: text(4, 2048)), 1.0),
        ("bound call, 8 images / sum(range(1000))", compare_calls(lambda: vision(4, 8192, image_grid_thw=grids)), 3.0),
        ("binding llama-3.1-8b, CPU ms", measure_bind_ms("llama-3.1-8b"), 20.0),
        ("binding deepseek-v3, CPU ms", measure_bind_ms("deepseek-v3"), 20.0),
        ("binding qwen2.5-vl-7b, CPU ms", measure_bind_ms("qwen2.5-vl-7b"), 20.0),
    ]
    for name, value, goal in rows:
        print(f"{value:8.2f}  goal {goal:5.1f}  {'ok' if value <= goal else 'MISSED'}  {name}")
    sys.exit(any(value > goal for _, value, goal in rows))


if __name__ == "__main__":
    main()
