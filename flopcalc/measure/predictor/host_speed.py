"""`flopcalc calibrate --host`: how fast this machine's CPU dispatches, relative to the CPU of a predictor.

A fixed piece of host work, the probe, runs in rounds over about half a minute. Its seconds over those of the calibrated
machine say how many times longer this host takes; how much rounds differ says how much its speed changes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from flopcalc.base.data import find_user_dir
from flopcalc.base.errors import CalibrationError, DeviceError
from flopcalc.base.files import write_whole
from flopcalc.base.spelling import spell
from flopcalc.measure.calibrate.provenance import describe_machine, has_gpu
from flopcalc.measure.calibrate.tables import Bench, round_digits
from flopcalc.measure.predictor.host_calls import make_probe
from flopcalc.prediction.kernels.constants import FOLDER, HOST_SCHEMA, load_measured, name_host_file

Json = dict[str, Any]
MODES = {"train": True, "forward": False}
ROUNDS, REPEATS, PAUSE_S = 24, 12, 0.6


def measure_host(
    bench: Bench, rounds: int = ROUNDS, repeats: int = REPEATS, pause: Callable[[], None] | None = None
) -> Json:
    """Mode -> the middle of all rounds, and the rounds at a twentieth from both ends, in seconds of the probe."""
    probes = {mode: make_probe(bench, is_train) for mode, is_train in MODES.items()}
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for probe in probes.values():
        for _ in range(3):
            probe()
    for _ in range(rounds):
        for mode, probe in probes.items():
            found[mode].append(statistics.median(probe() for _ in range(repeats)))
            bench.synchronize()
        (pause or (lambda: time.sleep(PAUSE_S)))()
    return {mode: _describe(seconds) for mode, seconds in found.items()}


def _describe(seconds: list[float]) -> Json:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    edges = {
        "low_s": ordered[round(0.05 * last)],
        "mid_s": statistics.median(ordered),
        "high_s": ordered[round(0.95 * last)],
    }
    return {name: round_digits(value) for name, value in edges.items()}


def calibrate_host(out: str | None = None, *, command: str = "flopcalc calibrate --host", device: str = "cuda") -> str:
    """Measure this host and write <out>/<device-id>.host.json, which `flopcalc predict` reads; its path."""
    if device == "cuda" and not has_gpu():
        raise DeviceError(
            "`flopcalc calibrate --host` needs an NVIDIA GPU to dispatch to, and found none on this machine"
        )
    about = describe_machine(device)
    if load_measured(about["device_id"]) is None:
        raise CalibrationError(
            f"{about['device']} has no predictor whose host this one could be compared with: `flopcalc calibrate "
            "--predictor` measures both"
        )
    found = measure_host(Bench(device))
    provenance = {**about, "command": command, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    folder = out or os.path.join(find_user_dir(), FOLDER)
    path = os.path.join(folder, name_host_file(about["device_id"]))
    text = json.dumps({"schema": HOST_SCHEMA, "provenance": provenance, "probe_s": found}, indent=1)
    try:
        os.makedirs(folder, exist_ok=True)
        write_whole(path, f"{text}\n")
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be written: {error.strerror}; give another folder with {spell('out')}"
        ) from None
    return path
