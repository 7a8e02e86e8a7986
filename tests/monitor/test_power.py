"""Watts of a training's GPU: read by the worker alone, silent without NVML; no fault of NVML reaches the training."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import CONFIG, read_log

from flopcalc import bind
from flopcalc.measure.calibrate import provenance
from flopcalc.monitor import TrainingMonitor, power
from flopcalc.monitor.device import DeviceQueue
from flopcalc.monitor.power import PowerMeter

UUID = "0f0e0d0c-0000-1111-2222-333344445555"


class Nvml:
    """As libnvidia-ml, with a counter in mJ; `fault` is what a call does instead."""

    def __init__(self, millijoules: list[int]) -> None:
        self.millijoules = millijoules
        self.names: list[bytes] = []
        self.fault: Callable[[], int] | None = None

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, _handle: object) -> int:
        self.names.append(name)
        return 0 if name == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: object, found: Any) -> int:
        if self.fault is not None:
            return self.fault()
        ctypes.cast(found, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules.pop(0)
        return 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each refresh reads."""
    times = [10.0]
    monkeypatch.setattr(power.time, "monotonic", lambda: times[-1])
    return times


def use_nvml(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    def load(_name: str) -> object:
        if nvml is None:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return nvml

    monkeypatch.setattr(provenance.ctypes, "CDLL", load)


def read(meter: PowerMeter, clock: list[float], at_s: float) -> dict[str, float]:
    clock.append(at_s)
    meter.refresh()
    return meter.values


def test_watts_and_watt_hours(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    nvml = Nvml([5_000_000, 6_200_000, 9_200_000, 100, 600_100])
    use_nvml(monkeypatch, nvml)
    meter = PowerMeter(UUID)
    assert read(meter, clock, 10.0) == {}  # a start has no watts yet
    assert read(meter, clock, 11.9) == {}  # too early: not read
    first = {"perf/power_w": 600.0, "perf/energy_wh": pytest.approx(1200 / 3600)}
    assert read(meter, clock, 12.0) == first
    assert read(meter, clock, 13.0) == first
    assert read(meter, clock, 22.0) == {"perf/power_w": 300.0, "perf/energy_wh": pytest.approx(4200 / 3600)}
    read(meter, clock, 25.0)  # the driver was loaded again: its counter starts over
    assert read(meter, clock, 27.0) == {"perf/power_w": 300.0, "perf/energy_wh": pytest.approx(600 / 3600)}
    assert nvml.names == [f"GPU-{UUID}".encode()]
    assert nvml.millijoules == []


def _raise() -> int:
    raise RuntimeError("driver gone")


@pytest.mark.parametrize("fault", [lambda: 999, _raise])
def test_a_fault_ends_the_metrics_alone(
    fault: Callable[[], int], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    nvml = Nvml([0, 2_000_000])
    use_nvml(monkeypatch, nvml)
    meter = PowerMeter(UUID)
    read(meter, clock, 10.0)
    assert read(meter, clock, 20.0)["perf/power_w"] == 200
    nvml.fault = fault
    assert read(meter, clock, 30.0) == {}
    nvml.fault = None
    assert read(meter, clock, 40.0) == {}  # it is not asked again


@pytest.mark.parametrize("nvml", [None, SimpleNamespace(), SimpleNamespace(nvmlInit_v2=lambda: 9)])
def test_without_nvml_nothing_is_read(nvml: object, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    use_nvml(monkeypatch, nvml)
    meter = PowerMeter(UUID)
    assert read(meter, clock, 10.0) == read(meter, clock, 20.0) == {}


def test_another_gpu_is_never_read(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """A uuid that NVML does not know, as that of a MIG slice, gives nothing."""
    use_nvml(monkeypatch, Nvml([1, 2, 3]))
    meter = PowerMeter("another")
    assert read(meter, clock, 10.0) == read(meter, clock, 20.0) == {}


@pytest.mark.parametrize(
    ("properties", "uuid"),
    [(SimpleNamespace(uuid=UUID), UUID), (SimpleNamespace(uuid=f"GPU-{UUID}"), UUID), (SimpleNamespace(), None)],
)
def test_the_training_thread_says_which_gpu(properties: object, uuid: str | None) -> None:
    cuda = SimpleNamespace(
        is_current_stream_capturing=bool, current_device=lambda: 3,
        get_device_properties={3: properties}.__getitem__,
    )  # fmt: skip
    assert DeviceQueue(SimpleNamespace(Tensor=object, cuda=cuda)).find_uuid() == uuid


def test_records_have_what_the_worker_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread makes records of it, and reads nothing itself; a fault of the reader is not its concern."""
    monkeypatch.setattr(TrainingMonitor, "_start_worker", lambda _: None)
    changes = {**CONFIG["monitoring"], "detail_every": 2}
    monitor = TrainingMonitor(tmp_path, {"monitoring": changes}, model=bind("llama-3.2-1b"))
    monitor.log_step(1, 0, 0.5, None, 0.1, attention_mask=[[1] * 8])  # what the first step opens finds no GPU here
    values = {"perf/power_w": 612.5, "perf/energy_wh": 3.25}
    monitor._digester.power = SimpleNamespace(values=values, refresh=_raise)  # type: ignore[assignment]
    for number in (2, 3):
        monitor.log_step(number, 0, 0.5, None, 0.1, attention_mask=[[1] * 8])
        assert values.items() <= monitor.metrics().items()
    monitor.close()
    _, second, third = read_log(tmp_path / "flopcalc.jsonl")
    assert values.items() <= second.items()
    assert not values.keys() & third.keys()  # a detail, so not in every record
