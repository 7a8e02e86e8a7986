"""A stretch of work goes in; how busy tensor cores, SMs and DRAM were comes out: NVML's GPM, a gauge and no counter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

MIN_WINDOW_S = 0.1  # shorter windows are unreliable (measured)
_METRICS = {
    "tensor": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "sm": "NVML_GPM_METRIC_SM_UTIL",
    "dram": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class GaugeUnavailable(RuntimeError):
    """GPM cannot be read here; the message says why and what would help."""


@dataclass
class Activity:
    """Shares of time, 0 to 1, over one window; filled in when the window ends."""

    tensor: float | None = None
    sm: float | None = None
    dram: float | None = None
    seconds: float = 0.0
    reason: str | None = None  # why there is no figure


class Gauge:
    """Samples one GPU. `with Gauge() as gauge: with gauge.measure() as activity: …`, or read() now and then."""

    def __init__(self, index: int = 0, uuid: str | None = None) -> None:
        try:
            pynvml = import_module("pynvml")
        except ImportError:
            raise GaugeUnavailable("pynvml is not installed: pip install nvidia-ml-py") from None
        self._nvml: Any = pynvml
        self._last: Any = None  # read()'s last sample, and when it was taken
        self._last_s = 0.0
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise GaugeUnavailable(f"NVML does not start, so no NVIDIA driver or GPU here: {error}") from None
        try:
            # CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's: a uuid names one for sure.
            if uuid is not None:
                self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            else:
                self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
            if not pynvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                raise GaugeUnavailable("this GPU has no GPM: Hopper or newer is needed")
        except pynvml.NVMLError as error:
            self.close()
            raise GaugeUnavailable(f"GPM cannot be read: {error}") from None
        except AttributeError:
            self.close()
            raise GaugeUnavailable("this pynvml is too old for GPM: pip install -U nvidia-ml-py") from None
        except BaseException:
            self.close()
            raise

    @contextmanager
    def measure(self) -> Iterator[Activity]:
        """Activity between entry and exit; a window too short, or a failed reading, has a reason instead of figures."""
        nvml = self._nvml
        activity = Activity()
        samples: list[object] = []
        try:
            problem = self._sample(samples)
            start = time.perf_counter()
            yield activity
            activity.seconds = time.perf_counter() - start
            problem = problem or self._sample(samples)
            if problem is None and activity.seconds < MIN_WINDOW_S:
                problem = (
                    f"window of {1000 * activity.seconds:.0f} ms: under {1000 * MIN_WINDOW_S:.0f} ms is unreliable"
                )
            activity.reason = problem or self._read(samples, activity)
        finally:
            for sample in samples:
                nvml.nvmlGpmSampleFree(sample)

    def read(self) -> Activity | None:
        """Activity since the last read; None at the first one, and while the window is too short: it goes on then."""
        now_s = time.perf_counter()
        if self._last is not None and now_s - self._last_s < MIN_WINDOW_S:
            return None
        samples: list[object] = [] if self._last is None else [self._last]
        problem = self._sample(samples)
        activity = None
        if problem is not None:
            activity = Activity(reason=problem)
        elif len(samples) == 2:
            activity = Activity(seconds=now_s - self._last_s)
            activity.reason = self._read(samples, activity)
        self._last = samples.pop() if problem is None else None
        self._last_s = now_s
        for sample in samples:
            self._nvml.nvmlGpmSampleFree(sample)
        return activity

    def _sample(self, samples: list[object]) -> str | None:
        nvml = self._nvml
        try:
            samples.append(nvml.nvmlGpmSampleAlloc())
            nvml.nvmlGpmSampleGet(self._device, samples[-1])
        except nvml.NVMLError as error:
            return f"GPM sample failed: {error}"
        return None

    def _read(self, samples: list[object], activity: Activity) -> str | None:
        nvml = self._nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = samples
        for slot, name in enumerate(_METRICS.values()):
            request.metrics[slot].metricId = getattr(nvml, name)
        try:
            nvml.nvmlGpmMetricsGet(request)
        except nvml.NVMLError as error:
            return f"GPM reading failed: {error}"
        missing = []
        for slot, name in enumerate(_METRICS):
            metric = request.metrics[slot]
            if metric.nvmlReturn == nvml.NVML_SUCCESS:
                setattr(activity, name, metric.value / 100)  # given in percent
            else:
                missing.append(name)
        return f"GPM gave no figure for {', '.join(missing)}" if missing else None

    def close(self) -> None:
        """Give NVML back; the gauge cannot be used after it."""
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            if self._last is not None:
                nvml.nvmlGpmSampleFree(self._last)
                self._last = None
            nvml.nvmlShutdown()

    def __enter__(self) -> Gauge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
