"""Older names that training code still imports, as thin aliases of our own."""

from __future__ import annotations

from typing import Any

from flopcalc.api import estimate_flops
from flopcalc.base.errors import DeviceError
from flopcalc.base.units import check_positive
from flopcalc.core.estimate.utilization import find_peak


def profile_model_flops(model: Any, batch: Any) -> int:
    """FLOPs of one training step of a HF model on a batch (convention `model`)."""
    return estimate_flops(model, batch=batch).total


def calculate_mfu(flops: float, step_time_s: float, peak_flops: float) -> float:
    """FLOPs over time over peak; not clamped."""
    count = check_positive(flops, "flops", or_zero=True)
    return count / check_positive(step_time_s, "step time") / check_positive(peak_flops, "peak")


def get_gpu_peak_flops(device: str = "auto", dtype: Any = "bf16") -> float:
    """The dense peak of a device, by default this machine's own GPU; an error where it is not known."""
    _, rate, note = find_peak(device, dtype, None)
    if rate is None:
        raise DeviceError(note or "no peak known")
    return rate
