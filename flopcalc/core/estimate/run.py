"""A whole training run: tokens and the estimate of one step in; steps, FLOPs and GPU-hours out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_positive, parse_tokens
from flopcalc.base.vocabulary import Convention
from flopcalc.core.estimate.estimate import Estimate, check_tokens
from flopcalc.core.estimate.utilization import find_ideal_time, find_step_time, sum_dtypes
from flopcalc.core.estimate.utilization import mfu as find_mfu
from flopcalc.hardware.devices import parse_dtype


class Run(NamedTuple):
    """All steps of a run; GPU-hours and MFU are None where no peak is known."""

    tokens: int
    steps: int
    flops: int  # under the estimate's convention
    gpu_hours: float | None
    mfu: float | None
    is_lower_bound: bool = False  # at 100 % of the peak, because no MFU was given
    gpus: int = 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "flops": self.flops,
            "gpu_hours": self.gpu_hours,
            "mfu": self.mfu,
            "is_lower_bound": self.is_lower_bound,
        }


def count_run(
    estimate: Estimate,
    tokens: float | str,
    *,
    mfu: float | None = None,
    step_time_s: float | None = None,
    tokens_per_second: float | None = None,
    device: str | None = None,
    dtype: object = None,
    peak: float | Mapping[str, float] | None = None,
) -> Run:
    """Whole steps that process this many tokens; their GPU-hours at an MFU, or at the measured speed."""
    check_tokens(estimate, "a run")
    dtype = None if dtype is None else parse_dtype(dtype)
    total = parse_tokens(tokens)
    steps = -(-total // estimate.tokens)
    flops = steps * estimate.total
    is_timed = step_time_s is not None or tokens_per_second is not None
    if mfu is not None and is_timed:
        raise FlopcalcError(f"{spell('mfu')} contradicts a measured time, which gives it: leave one of them out")
    mfu = None if mfu is None else check_positive(mfu, "mfu")
    if mfu is not None and mfu > 1:
        raise FlopcalcError(f"mfu must be a share of the peak, at most 1, not {format_value(mfu)}")
    if device is None and peak is None:
        if mfu is not None:
            raise FlopcalcError(f"{spell('mfu')} needs a {spell('device')} or a {spell('peak')}")
        return Run(total, steps, flops, None, None)
    gpus = estimate.gpus
    if is_timed:
        seconds = find_step_time(estimate, step_time_s, tokens_per_second)
        share = find_mfu(estimate, seconds, device=device, dtype=dtype, peak=peak).value
        return Run(total, steps, flops, steps * seconds * gpus / 3600, share, gpus=gpus)
    convention: Convention = "full" if estimate.convention == "full" else "model"
    ideal = find_ideal_time(sum_dtypes(estimate, convention), device=device, dtype=dtype, peak=peak)
    rate = ideal.peak_flops_per_s
    if rate is None:
        return Run(total, steps, flops, None, mfu)
    needed = steps * estimate.total_under(convention)
    hours = needed / (rate * (mfu or 1.0)) / 3600
    return Run(total, steps, flops, hours, mfu or 1.0, mfu is None, gpus)
