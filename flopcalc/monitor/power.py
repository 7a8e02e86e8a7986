"""NVML's counter of energy in; watts since the last reading and watt-hours since the first out, for a worker thread."""

from __future__ import annotations

import time
from typing import Any

_EVERY_S = 2.0  # between two readings: NVML counts in steps of up to 0.1 s


class PowerMeter:
    """Reads one GPU. Nothing here raises, asks CUDA or waits for the GPU; without NVML it stays silent."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._gauge: Any = None
        self._is_off = False
        self._first_j = self._last_j = 0.0
        self._last_s: float | None = None
        self.values: dict[str, float] = {}  # by metric, as last read

    def refresh(self) -> None:
        """Read the counter if it is time to. On the worker's thread: the first call opens NVML."""
        now_s = time.monotonic()
        if self._is_off or (self._last_s is not None and now_s - self._last_s < _EVERY_S):
            return
        try:
            if self._gauge is None:
                from flopcalc.measure.calibrate.provenance import DeviceGauge

                self._gauge = DeviceGauge(self._uuid)
            joules = self._gauge.read_energy_j()
        except Exception:  # whatever a driver does: the metrics end, and training does not
            joules = None
        if joules is None:
            self._is_off, self.values = True, {}
            return
        if self._last_s is None or joules < self._last_j:  # a counter that was reset starts over
            self._first_j = joules
        else:
            self.values = {
                "perf/power_w": (joules - self._last_j) / (now_s - self._last_s),
                "perf/energy_wh": (joules - self._first_j) / 3600,
            }
        self._last_s, self._last_j = now_s, joules
