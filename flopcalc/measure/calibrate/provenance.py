"""Where and with what something is measured: the machine, its versions, and NVML's clock, power and energy."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flopcalc._version import __version__
from flopcalc.base.data import find_commit, find_version
from flopcalc.prediction.kernels.constants import Provenance

Json = dict[str, Any]
_SM_CLOCK = 1  # NVML_CLOCK_SM


def has_gpu() -> bool:
    return count_gpus() > 0


def count_gpus() -> int:
    """How many CUDA devices this process may use, asked of the driver itself: torch would take seconds to say so."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        is_told = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return 0
    return count.value if is_told else 0


def start_probe(args: Json) -> Callable[[object], Provenance]:
    """Job function: the provenance of this machine, read in a process that may import torch."""
    return lambda _: describe_machine(args["device"])


def describe_machine(device: str) -> Provenance:
    """Device, driver and versions; what cannot be read is null, never guessed."""
    import torch

    found: Provenance = {
        "device": platform.processor() or platform.machine(),
        "device_id": "cpu",
        "memory_bytes": None,
        "power_limit_w": None,
        "sm_clock_max_mhz": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "transformers": find_version("transformers"),
        "python": platform.python_version(),
        "flopcalc": __version__,
        "commit": find_commit(),
    }
    if device == "cpu":
        with suppress(ValueError, OSError):
            found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return found
    found["device"] = torch.cuda.get_device_name()
    found["device_id"] = find_device_id(found["device"])
    found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    gauge = DeviceGauge()
    found["power_limit_w"] = gauge.read_power_limit_w()
    found["sm_clock_max_mhz"] = gauge.read_max_clock_mhz()
    found["driver"] = gauge.read_driver()
    return found


def find_device_id(name: str) -> str:
    """The id of devices.toml, else the name in small letters and dashes."""
    import re

    from flopcalc.hardware.devices import find_detected

    found = find_detected(name)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown" if found is None else found.id


class DeviceGauge:
    """NVML through ctypes; every reading is None where NVML is not there.

    It reads the GPU with this uuid, as torch writes it; without one, torch's current device.
    """

    def __init__(self, uuid: str | None = None) -> None:
        self._uuid = uuid
        self._lib: Any = None
        self._handle = ctypes.c_void_p()
        try:
            lib = ctypes.CDLL("libnvidia-ml.so.1")
            if lib.nvmlInit_v2() == 0 and self._find_handle(lib):
                self._lib = lib
        except (OSError, AttributeError):
            pass

    def _find_handle(self, lib: Any) -> bool:
        # By UUID: NVML's order of devices is not CUDA's, and knows nothing of CUDA_VISIBLE_DEVICES.
        if self._uuid is not None:
            name = f"GPU-{self._uuid}".encode()
            return bool(lib.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) == 0)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
            name = f"GPU-{uuid}".encode()
            if uuid is not None and lib.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) == 0:
                return True
        return bool(lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle)) == 0)

    def _read(self, function: str, *arguments: int) -> int | None:
        if self._lib is None:
            return None
        value = ctypes.c_ulonglong()
        code = getattr(self._lib, function)(self._handle, *arguments, ctypes.byref(value))
        return value.value if code == 0 else None

    def read_clock_mhz(self) -> int | None:
        return self._read("nvmlDeviceGetClockInfo", _SM_CLOCK)

    def read_max_clock_mhz(self) -> int | None:
        return self._read("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)

    def read_power_w(self) -> float | None:
        """Mean of about the last second on Hopper: of use for sustained work alone."""
        milliwatts = self._read("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else round(milliwatts / 1000, 1)

    def read_power_limit_w(self) -> float | None:
        milliwatts = self._read("nvmlDeviceGetPowerManagementLimit")
        return None if milliwatts is None else round(milliwatts / 1000, 1)

    def read_energy_j(self) -> float | None:
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def read_driver(self) -> str | None:
        if self._lib is None:
            return None
        buffer = ctypes.create_string_buffer(96)
        return buffer.value.decode() if self._lib.nvmlSystemGetDriverVersion(buffer, 96) == 0 else None
