"""Which processes may run on this machine at once: one per free GPU, or some that share the cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from flopcalc.measure.calibrate.provenance import count_gpus
from flopcalc.measure.jobs.job import RunnerError


class LauncherError(RunnerError):
    """A launcher that cannot do what was asked: unknown, without its library, without a machine."""


def make_environments(slots: int | None, device: str = "auto") -> list[dict[str, str]]:
    """The variables of each process that may run at the same time: its GPU, and its share of the cores."""
    gpus = {} if device == "cpu" else find_gpus()
    if not gpus and device == "cuda":
        raise LauncherError("device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it; use device 'cpu'")
    if gpus:
        environments = [{"CUDA_VISIBLE_DEVICES": name} for name in _choose(gpus, slots)]
    else:
        environments = [{} for _ in range(slots or 1)]
    if len(environments) > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for variables in environments:
            variables["OMP_NUM_THREADS"] = str(max(1, cores // len(environments)))
    return environments


def _choose(gpus: Mapping[str, bool | None], slots: int | None) -> list[str]:
    if slots is not None:
        if slots > len(gpus):
            raise LauncherError(f"slots = {slots} is more than the GPUs found here ({len(gpus)}): one process each")
        return sorted(gpus, key=lambda name: gpus[name] is True)[:slots]
    if len(gpus) > 1 and None in gpus.values():
        raise LauncherError(
            f"cannot find out which of the {len(gpus)} GPUs are free without NVML: pip install nvidia-ml-py, or say "
            "how many to use anyway (slots)"
        )
    free = [name for name, is_busy in gpus.items() if not is_busy]
    if not free:
        raise LauncherError(
            f"all {len(gpus)} GPUs are in use by other processes: wait, or say how many to use anyway (slots)"
        )
    return free


def find_gpus() -> dict[str, bool | None]:
    """The GPUs that CUDA shows to this process, by names for CUDA_VISIBLE_DEVICES: whether some process uses each.

    None: not known. Nothing is allocated on any of them.
    """
    count = count_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        uuids = [
            nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())
        ]
    except Exception:  # no library or no driver: CUDA knows how many there are, not who uses them
        nvml, uuids = None, list(map(str, range(count)))
    # By default UUIDs: a number may mean different GPUs to NVML and to CUDA.
    names = uuids if visible is None else [name.strip() for name in visible.split(",")]
    return {name: None if nvml is None else _is_busy(nvml, name, uuids) for name in names[:count]}


def _is_busy(nvml: Any, name: str, uuids: Sequence[str]) -> bool:
    uuid = next((uuid for uuid in uuids if uuid.startswith(name)), name)  # CUDA takes the start of one
    try:
        is_number = name.isdigit()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if is_number else nvml.nvmlDeviceGetHandleByUUID(uuid)
        return bool(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # not available in some containers
        return False
