"""MFU and HFU: an estimate, a step time and a peak in; a share of the hardware out, never clamped."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from flopcalc.core.estimate.estimate import Estimate, check_estimate
from flopcalc.errors import DeviceError, FlopcalcError, format_value
from flopcalc.hardware.devices import detect_device, find_device, parse_dtype, peak_flops_per_s
from flopcalc.units import check_positive as check_positive
from flopcalc.units import check_size, format_rate


class Utilization(NamedTuple):
    """A share of a peak; `value` is None where the peak is not known, and `note` says why."""

    value: float | None
    peak_flops_per_s: float | None  # of one device
    device: str | None
    dtype: str
    note: str | None = None

    def __float__(self) -> float:
        return math.nan if self.value is None else self.value

    def to_dict(self) -> dict[str, Any] | None:
        if self.value is None:
            return None
        return {
            "value": self.value,
            "peak_flops_per_s": self.peak_flops_per_s,
            "device": self.device,
            "dtype": self.dtype,
        }


def mfu(
    estimate: Estimate,
    step_time_s: float | None = None,
    *,
    tokens_per_second: float | None = None,
    device: str | None = None,
    dtype: Any = "bf16",
    peak: float | None = None,
    num_devices: int = 1,
    gpus: int | None = None,
) -> Utilization:
    """Model FLOPs utilization: convention `full` if the estimate is of it, else `model`; never `hardware`.

    The time is that of a step, or follows from the tokens per second of all GPUs; `gpus` is `num_devices` in short.
    """
    check_estimate(estimate)
    convention = "full" if estimate.convention == "full" else "model"
    flops = estimate.total_under(convention)
    seconds = find_step_time(estimate, step_time_s, tokens_per_second)
    share = _share(flops, "MFU", seconds, device, dtype, peak, _count_devices(num_devices, gpus))
    executed = estimate.totals["hardware"] if convention == "full" else None
    if share.value is None or executed is None or executed >= flops:
        return share
    why = (
        f"this MFU is above the HFU: convention full counts every query-key pair, and kernel "
        f"{estimate.attention_kernel} skips most masked ones; --convention model gives an MFU that is below the HFU"
    )
    return share._replace(note=why if share.note is None else f"{share.note}; {why}")


def hfu(
    estimate: Estimate,
    step_time_s: float | None = None,
    *,
    tokens_per_second: float | None = None,
    device: str | None = None,
    dtype: Any = "bf16",
    peak: float | None = None,
    num_devices: int = 1,
    gpus: int | None = None,
) -> Utilization:
    """Hardware FLOPs utilization: convention `hardware`, recomputation included; arguments as of `mfu`."""
    check_estimate(estimate)
    seconds = find_step_time(estimate, step_time_s, tokens_per_second)
    devices = _count_devices(num_devices, gpus)
    return _share(estimate.total_under("hardware"), "HFU", seconds, device, dtype, peak, devices)


def find_step_time(estimate: Estimate, step_time_s: float | None, tokens_per_second: float | None) -> float:
    """Seconds of a step, as given or from the tokens that pass in a second."""
    if (step_time_s is None) == (tokens_per_second is None):
        problem = "are both given" if step_time_s is not None else "are both missing"
        raise FlopcalcError(f"step time and tokens per second {problem}: give one of them")
    if tokens_per_second is not None:
        return estimate.tokens / check_positive(tokens_per_second, "tokens per second")
    return check_positive(step_time_s, "step time")


def _count_devices(num_devices: int, gpus: int | None) -> int:
    if gpus is None:
        return check_size(num_devices, "num_devices")
    gpus, num_devices = check_size(gpus, "gpus"), check_size(num_devices, "num_devices")
    if num_devices not in (1, gpus):
        raise FlopcalcError(f"gpus {gpus} contradicts num_devices {num_devices}: give one of them")
    return gpus


def _share(
    flops: int, what: str, step_time_s: float, device: str | None, dtype: Any, peak: float | None, devices: int
) -> Utilization:
    name, rate, note = find_peak(device, dtype, peak)
    kind = parse_dtype(dtype)
    if rate is None:
        return Utilization(None, None, name, kind, note)
    try:
        value = flops / (step_time_s * rate * devices)
    except (ZeroDivisionError, OverflowError):
        value = math.inf
    if math.isinf(value):
        raise FlopcalcError(f"{what} of {flops} FLOPs in {step_time_s} s at {rate} FLOP/s is beyond any number")
    if value > 1:
        note = f"{what} is {value:.3f}, above 1: the peak, the step time, the device count or the workload is wrong"
    return Utilization(value, rate, name, kind, note)


def describe_least_time(
    estimate: Estimate, *, device: str | None, dtype: str, peak: float | None, gpus: int
) -> list[str]:  # fmt: skip
    """Without a measured time: the least that the peak allows, and what measured steps reached on the device."""
    try:
        name, rate, note = find_peak(device, dtype, peak)
    except DeviceError as error:  # a dtype without a peak: no reason to refuse the count
        return [str(error)]
    if rate is None:
        return [note] if note else []
    convention = "full" if estimate.convention == "full" else "model"
    least = estimate.total_under(convention) / (rate * gpus)
    where = f" of {gpus} × {name}" if name else ""
    bound = f"at the {dtype} peak{where} ({format_rate(rate)} each) this takes at least {least:.4g} s"
    measured = describe_measured_mfu(name, estimate) if name is not None and dtype == "bf16" else None
    return [f"{bound}; --step-time gives the MFU", *([measured] if measured else [])]


def find_peak(device: str | None, dtype: Any, peak: float | None) -> tuple[str | None, float | None, str | None]:
    """Device name, its peak in FLOP/s and a note where there is none: a given peak wins over the table."""
    if peak is not None:
        peak = check_positive(peak, "peak")
    if device is not None and not isinstance(device, str):
        raise DeviceError(f"a device is named by a string, not {format_value(device)}")
    if device == "auto":
        found = detect_device()
        if found is None:
            return None, peak, None if peak else "no GPU found on this machine: name one with --device, or give --peak"
        try:
            device = find_device(found).id
        except DeviceError:
            missing = f"the GPU found here, {found!r}, is not in the table: give its dense peak with --peak FLOPS_PER_S"
            return found, peak, None if peak else missing
    if peak is not None:
        try:
            return find_device(device).name if device else None, peak, None
        except DeviceError:
            return device, peak, None  # not in the table, and need not be
    if device is None:
        raise DeviceError("MFU needs a peak: name a --device, or give --peak FLOPS_PER_S")
    return find_device(device).name, peak_flops_per_s(device, dtype), None


def describe_measured_mfu(device: str, estimate: Estimate) -> str | None:
    """What training steps measured on a device reached, as a sentence; None without a steps table for it.

    Rows of like size (within a factor of 4 in FLOPs) if there are any, else all of the kind (text or images).
    """
    from flopcalc.hardware.tables import find_table, load_table

    try:
        path = find_table(find_device(device).id, "steps")
    except DeviceError:  # a device of the user's own, whose peak was given by hand
        return None
    load = estimate.terms[0][1]
    if path is None or load.phase != "train":
        return None
    table = load_table(path)
    flops = estimate.total_under("model")
    has_images = bool(load.all_grids)
    rows = [row for row in table.records() if row["mfu"] and bool(row["images"]) == has_images]
    near = [row for row in rows if 0.25 <= row["model_flops"] / flops <= 4]
    chosen = near or rows
    if not chosen:
        return None
    low, high = min(row["mfu"] for row in chosen), max(row["mfu"] for row in chosen)
    sizes = sorted(row["model_flops"] / flops for row in chosen)
    about = table.provenance
    return (
        f"{len(chosen)} training steps of other models measured on {about.get('device')} "
        f"({str(about.get('date'))[:10]}), of {sizes[0]:.2g} to {sizes[-1]:.2g} times these FLOPs, reached an MFU of "
        f"{100 * low:.0f} to {100 * high:.0f} %: measured elsewhere, not a prediction"
    )
