"""Which processes may run on this machine at once: one per free GPU, or some that share the cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from flopcalc.measure.calibrate.provenance import count_gpus
from flopcalc.measure.jobs.job import RunnerError


class LauncherError(RunnerError):
    """A launcher that cannot do what was asked: unknown, without its library, without a machine."""


class Gpu(NamedTuple):
    """A GPU that CUDA shows to this process."""

    name: str  # as CUDA_VISIBLE_DEVICES takes it
    is_busy: bool | None  # some process computes on it; None: not known


def make_environments(slots: int | None, device: str = "auto") -> list[dict[str, str]]:
    """The variables of each process that may run at the same time: its GPU, and its share of the cores."""
    gpus = [] if device == "cpu" else find_gpus()
    if not gpus and device == "cuda":
        raise LauncherError("device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it; use device 'cpu'")
    if gpus:
        environments = [{"CUDA_VISIBLE_DEVICES": gpu.name} for gpu in _choose(gpus, slots)]
    else:
        environments = [{} for _ in range(slots or 1)]
    if len(environments) > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for variables in environments:
            variables["OMP_NUM_THREADS"] = str(max(1, cores // len(environments)))
    return environments


def _choose(gpus: Sequence[Gpu], slots: int | None) -> Sequence[Gpu]:
    if slots is not None:
        if slots > len(gpus):
            raise LauncherError(f"slots = {slots} is more than the GPUs found here ({len(gpus)}): one process each")
        return sorted(gpus, key=lambda gpu: gpu.is_busy is True)[:slots]
    if len(gpus) == 1 and gpus[0].is_busy is None:
        return gpus
    if any(gpu.is_busy is None for gpu in gpus):
        raise LauncherError(
            f"cannot find out which of the {len(gpus)} GPUs are free without NVML: pip install nvidia-ml-py, or say "
            "how many to use anyway (slots)"
        )
    free = [gpu for gpu in gpus if not gpu.is_busy]
    if not free:
        raise LauncherError(
            f"all {len(gpus)} GPUs are in use by other processes: wait, or say how many to use anyway (slots)"
        )
    return free


def find_gpus() -> list[Gpu]:
    """The GPUs that CUDA would show to this process; nothing is allocated on any of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except Exception:  # no library or no driver: CUDA knows how many there are, not who uses them
        count = count_gpus()
        return [Gpu(name, None) for name in (names or list(map(str, range(count))))[:count]]
    found: dict[str, Gpu] = {}
    for name in uuids if names is None else names:  # a number may mean different GPUs to NVML and CUDA, a UUID not
        whole = [uuid for uuid in uuids if name.startswith("GPU-") and uuid.startswith(name)]
        try:
            if name.isdigit():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(whole[0] if len(whole) == 1 else name)
        except nvml.NVMLError:
            break  # CUDA shows the GPUs before it
        if name in found:
            break
        found[name] = Gpu(name, _is_busy(nvml, handle))
    return list(found.values())


def _is_busy(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # not available in some containers
        return False
