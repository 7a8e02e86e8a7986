"""Where a training runs: rank, device and its peak, the dtype of its products, and which ranks share a batch."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

from flopcalc.base.errors import ConfigError, FlopcalcError
from flopcalc.base.spelling import spell_keyword, use_spelling
from flopcalc.core.estimate import utilization
from flopcalc.core.model.live import strip
from flopcalc.hardware.devices import detect_device, find_detected, find_device, parse_dtype
from flopcalc.monitor.messages import Say
from flopcalc.monitor.meter import DevicePeak
from flopcalc.monitor.settings import Settings

# Fields that are keys of the monitor's config.
_KEYS = {"device": "monitoring.device", "peak": "monitoring.peak_flops_per_s"}
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
    detected = None if settings.device else _detect()
    try:
        found = find_device(settings.device) if settings.device else find_detected(detected or "")
    except FlopcalcError:
        return None
    return None if found is None else found.id


def _detect() -> str | None:
    torch = sys.modules.get("torch")
    return detect_device() if torch is not None and torch.cuda.is_available() else None


class Seen(NamedTuple):
    """What was seen inside a model while it ran."""

    autocast: str | None  # the number format that autocast computes in; None: it is off
    has_tf32: bool = False  # products of float32 may be computed in TF32


def find_peak(settings: Settings, name: str, say: Say) -> DevicePeak:
    """The dense peak of this process's device for a number format; without one it is said why and what to set."""
    kind = _plain_dtype(settings.dtype or name)
    given = settings.peak_flops_per_s
    device, rate, bf16, note = settings.device, None if isinstance(given, dict) else given, None, None
    try:
        with use_spelling(lambda field, value: _KEYS.get(field) or spell_keyword(field, value)):
            ideal = utilization.find_ideal_time(
                {kind: 0}, device=settings.device or "auto", dtype=settings.dtype, peak=given
            )
        device, bf16, note = ideal.device, ideal.bf16, ideal.note
        rate = ideal.peaks[0].peak_flops_per_s if ideal.peaks else None
    except FlopcalcError as error:
        note = str(error)
    if rate is None:
        say(f"MFU is not known: {note or 'no peak known'}", f"peak {kind}")
    elif note:
        say(note, f"peak {kind}")
    return DevicePeak(math.nan if rate is None else rate, device, kind, math.nan if bf16 is None else bf16)


def _plain_dtype(dtype: str) -> str:
    try:
        return parse_dtype(dtype)
    except FlopcalcError:
        return dtype  # has no peak, and the message will name it


def look_inside(module: Any) -> Seen:
    """Whether autocast is on, and to what; asked inside a forward pass."""
    import torch

    weight = next(iter(module.parameters()), None)
    place = weight.device.type if weight is not None else "cpu"
    cast = None
    if torch.is_autocast_enabled(place):
        cast = _plain_dtype(str(torch.get_autocast_dtype(place)).removeprefix("torch."))
    return Seen(cast if cast in ("bf16", "fp16") else None, place == "cuda" and allows_tf32())


def allows_tf32() -> bool:
    """Whether torch computes products of float32 in TF32 on a GPU."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(torch.backends.cuda.matmul.allow_tf32)
        except RuntimeError:  # set through torch's newer switch
            return str(getattr(torch.backends.cuda.matmul, "fp32_precision", "")) == "tf32"


def guess_format(model: object, seen: Seen | None) -> str:
    """The number format of most products, from a live model's weights and what was seen inside it."""
    if seen is not None and seen.autocast is not None:
        return seen.autocast
    sizes: Counter[str] = Counter()
    for each in model.parameters() if hasattr(model, "parameters") else ():
        if each.is_floating_point():
            sizes[str(each.dtype).removeprefix("torch.")] += each.numel()
    found = _plain_dtype(sizes.most_common(1)[0][0]) if sizes else "bf16"
    return "tf32" if found == "fp32" and seen is not None and seen.has_tf32 else found


def find_layout(settings: Settings, model: object, say: Say) -> tuple[int, int, int]:
    """Tensor, context and pipeline parallel sizes: given, or read from the parameters and their meshes."""
    tensor, context = 1, 1
    if model is not None and not (settings.tensor_parallel and settings.context_parallel):
        tensor, context = _read_meshes(strip(model), bool(settings.tensor_parallel), say)
    return (
        settings.tensor_parallel or tensor,
        settings.context_parallel or context,
        settings.pipeline_parallel or 1,
    )


def _read_meshes(inner: Any, is_told: bool, say: Say) -> tuple[int, int]:
    """Axes over which a layer's weights are cut, but not by FSDP, are tensor parallel, whatever they are called."""
    sizes = {"tp": 1, "cp": 1}
    size = getattr(inner, "tp_size", None)
    if isinstance(size, int):
        sizes["tp"] = size
    managed = {  # by FSDP2, which makes a module's class one of its own
        id(each) for part in inner.modules() if hasattr(part, "unshard") and hasattr(part, "reshard")
        for each in part.parameters()
    }  # fmt: skip
    cut: dict[str, tuple[int, bool]] = {}  # axis without a known name -> its size, whether it cuts a matrix
    for parameter in inner.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names = getattr(mesh, "mesh_dim_names", None) or [f"number {i}" for i in range(mesh.ndim)]
        root = getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)()  # FSDP's axis may hide a context axis in it
        axes = zip(getattr(root, "mesh_dim_names", None) or (), root.shape, strict=False)
        sizes["cp"] = max([sizes["cp"], *(int(size) for name, size in axes if _name_axis(str(name).lower()) == "cp")])
        is_sharded = [not (each.is_replicate() or each.is_partial()) for each in parameter.placements]
        own = is_sharded.index(True) + 1 if id(parameter) in managed and True in is_sharded else 0
        for i, (name, axis_size) in enumerate(zip(names, mesh.shape, strict=True)):
            axis = _name_axis(str(name).lower())
            if axis in sizes:
                sizes[axis] = max(sizes[axis], int(axis_size))
            elif i >= own and axis is None and axis_size > 1:
                is_matrix = is_sharded[i] and parameter.ndim == 2
                known = cut.get(str(name), (0, False))[1]
                if is_sharded[i] or str(name) in cut:
                    cut[str(name)] = (int(axis_size), known or is_matrix)
                else:
                    say(
                        f"mesh axis {name!r} is taken to hold batches of its own; else set distributed.tensor_parallel",
                        f"axis {name}",
                    )
    for name, (axis_size, is_matrix) in cut.items():
        if not is_matrix and not is_told:
            raise ConfigError(
                f"mesh axis {name!r} cuts experts alone, so it is not known whether its ranks share a batch: set "
                f"distributed.tensor_parallel to {axis_size} if they do, to 1 if each has its own"
            )
        sizes["tp"] = max(sizes["tp"], axis_size)
    return sizes["tp"], sizes["cp"]


def _name_axis(name: str) -> str | None:
    if name.startswith(("tp", "tensor")):
        return "tp"
    if name.startswith(("cp", "context")):
        return "cp"
    return "data" if name.startswith(_DATA_AXES) else None
