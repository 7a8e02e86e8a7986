"""Where a training runs: rank, device and its peak, the dtype of its products, and which ranks share a batch."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from flopcalc.core.estimate import utilization
from flopcalc.core.model.live import strip
from flopcalc.errors import FlopcalcError
from flopcalc.hardware.devices import detect_device, find_device, parse_dtype
from flopcalc.monitor.messages import Say
from flopcalc.monitor.meter import Peak
from flopcalc.monitor.settings import Settings

# What the command line calls so is a key here.
_OPTIONS = {
    "--device": "monitoring.device", "--peak FLOPS_PER_S": "monitoring.peak_flops_per_s",
    "--peak": "monitoring.peak_flops_per_s",
}  # fmt: skip
# Axes of a device mesh whose ranks have batches of their own.
_DATA_AXES = ("dp", "data", "ddp", "fsdp", "replicate", "shard", "hsdp", "efsdp", "ep", "expert")


def find_rank() -> tuple[int, int]:
    """Rank and world size: of torch.distributed where it runs, else as its launcher says."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def find_known_device(settings: Settings) -> str | None:
    """The device's id, where the table has it: its measured kernels count under hardware."""
    name = settings.device or _detect()
    try:
        return find_device(name).id if name else None
    except FlopcalcError:
        return None


def _detect() -> str | None:
    torch = sys.modules.get("torch")
    return detect_device() if torch is not None and torch.cuda.is_available() else None


def find_peak(settings: Settings, model: Any, dtype: str | None, say: Say) -> Peak:
    """The dense peak of this process's device; where there is none, it is said why and what to set."""
    kind = _plain_dtype(dtype or "bf16")
    name, rate, note = settings.device, settings.peak_flops_per_s, None
    if settings.dtype is None and rate is None and model is not None and _has_fp8(model):
        note = f"layers in fp8 beside others in {kind}: one peak does not fit. Choose one by monitoring.dtype"
    else:
        try:
            name, rate, note = utilization.find_peak(settings.device or "auto", kind, rate)
        except FlopcalcError as error:
            note = str(error)
    if rate is None:
        for option, key in _OPTIONS.items():
            note = (note or "no peak known").replace(option, key)
        say(f"MFU is not known: {note}", f"peak {kind}")
    return Peak(math.nan if rate is None else rate, name, kind)


def _plain_dtype(dtype: str) -> str:
    try:
        return parse_dtype(dtype)
    except FlopcalcError:
        return dtype  # has no peak, and the message will name it


def _has_fp8(model: Any) -> bool:
    """torchao and its like name their layers so."""
    return any("float8" in name or "fp8" in name for name in {type(each).__name__.lower() for each in model.modules()})


def find_dtype(module: Any) -> str:
    """What a module's products are computed in: autocast's dtype, else its weight's; asked inside a forward pass."""
    import torch

    weight = next(module.parameters(recurse=False))
    place = weight.device.type
    if torch.is_autocast_enabled(place):
        return str(torch.get_autocast_dtype(place)).removeprefix("torch.")
    if weight.dtype == torch.float32 and place == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return str(weight.dtype).removeprefix("torch.")


def guess_dtype(settings: Settings, model: Any, say: Say) -> str | None:
    """Where nobody saw inside the model: its weights' dtype, unless autocast may hide behind it."""
    if model is None or settings.peak_flops_per_s is not None:
        return "bf16"
    found = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point()}
    if found and "float32" not in found:
        return sorted(found)[0]
    say(
        "MFU is not known: the dtype of the products cannot be seen from outside (a compiled model, or one without "
        "linear layers); name it by monitoring.dtype",
        "dtype",
    )
    return None


def find_layout(settings: Settings, model: Any, say: Say) -> tuple[int, int, int]:
    """Tensor, context and pipeline parallel sizes: given, or read from the meshes that the parameters lie on."""
    found = {"tp": 1, "cp": 1}
    if model is not None:
        inner = strip(model)
        meshes = {id(mesh): mesh for mesh in (getattr(p, "device_mesh", None) for p in inner.parameters())}
        for mesh in meshes.values():
            names = getattr(mesh, "mesh_dim_names", None) or ()
            for name, size in zip(names, getattr(mesh, "shape", ()), strict=False):
                axis = _name_axis(str(name).lower())
                if axis is None:
                    say(f"mesh axis {name!r} is taken to hold batches of its own; else set distributed.tensor_parallel")
                elif axis in found:
                    found[axis] = max(found[axis], int(size))
        size = getattr(inner, "tp_size", None)
        if isinstance(size, int):
            found["tp"] = max(found["tp"], size)
    return (
        settings.tensor_parallel or found["tp"],
        settings.context_parallel or found["cp"],
        settings.pipeline_parallel or 1,
    )


def _name_axis(name: str) -> str | None:
    if name.startswith(("tp", "tensor")):
        return "tp"
    if name.startswith(("cp", "context")):
        return "cp"
    return "data" if name.startswith(_DATA_AXES) else None


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    import torch

    return torch.cuda.is_current_stream_capturing()
