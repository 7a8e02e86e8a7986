"""MFU and HFU: an estimate, a step time and a peak in; a share of the hardware out, never clamped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from flopcalc.base.errors import DeviceError, FlopcalcError, format_value
from flopcalc.base.number_formats import find_computed
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_size, format_bytes, format_rate, format_seconds, read_number
from flopcalc.base.vocabulary import Convention
from flopcalc.core.estimate.estimate import Estimate, check_estimate
from flopcalc.hardware.devices import (
    Device,
    detect_device,
    find_detected,
    find_device,
    find_format_peak,
    parse_dtype,
    peak_flops_per_s,
)

Peak: TypeAlias = float | str | Mapping[str, float | str]  # of all formats, or of each


class FormatPeak(NamedTuple):
    """FLOPs of one number format and the dense peak that they count at, of one device."""

    format: str
    flops: float
    peak_flops_per_s: float


class Ideal(NamedTuple):
    """The least time of some FLOPs on one device: each at the peak of its format."""

    seconds: float | None  # None: no peak is known, and `note` says why
    peaks: tuple[FormatPeak, ...]
    device: str | None
    dtype: str  # the formats, most FLOPs first
    bf16: float | None = None  # the device's bf16 peak, where it is known
    note: str | None = None

    @property
    def peak_flops_per_s(self) -> float | None:
        """One peak in place of all: the rate at which the FLOPs take the least time."""
        if len(self.peaks) == 1 or not self.seconds:
            return self.peaks[0].peak_flops_per_s if self.peaks and self.seconds is not None else None
        return sum(peak.flops for peak in self.peaks) / self.seconds


class Utilization(NamedTuple):
    """A share of a peak. If the peak is not known, `value` is None and `note` says why.

    With several formats the value is ideal time ÷ measured time, and the peak is the one rate that gives this value.
    """

    value: float | None
    peak_flops_per_s: float | None  # of one device
    device: str | None
    dtype: str
    note: str | None = None
    peaks: tuple[FormatPeak, ...] = ()  # what each format's FLOPs count at
    of_bf16_peak: float | None = None  # the same FLOPs over the bf16 peak alone

    def __float__(self) -> float:
        return math.nan if self.value is None else self.value

    def __str__(self) -> str:
        if self.value is None or self.peak_flops_per_s is None:
            return self.note or "not known"
        where = f" ({self.device})" if self.device else ""
        return f"{self.value:.1%} of {self.peak_flops_per_s / 1e12:,.4g} TFLOP/s {self.dtype}{where}"

    def __format__(self, style: str) -> str:
        """f"{mfu(…):.1%}" -> '41.2%'; nan where no peak is known."""
        return format(float(self), style) if style else str(self)

    def to_dict(self) -> dict[str, Any] | None:
        if self.value is None:
            return None
        return {
            "value": self.value,
            "peak_flops_per_s": self.peak_flops_per_s,
            "device": self.device,
            "dtype": self.dtype,
            "peaks": [peak._asdict() for peak in self.peaks],
            "of_bf16_peak": self.of_bf16_peak,
        }


def mfu(
    estimate: Estimate,
    step_time_s: float | str | None = None,
    *,
    tokens_per_second: float | str | None = None,
    device: str | None = None,
    dtype: object = None,
    peak: Peak | None = None,
    num_devices: int | None = None,
    gpus: int | None = None,
) -> Utilization:
    """Model FLOPs utilization, under convention `full` if the estimate is, else `model`; never `hardware`.

        mfu(estimate, step_time_s=0.8, device="h200").value

    Give the time of a step, or the tokens per second of all GPUs. The GPUs are those of the estimate. Each product
    counts at the peak of its number format. `dtype` sets one format for all products, `peak` one peak for all, or one
    per format.
    """
    convention = _choose_convention(check_estimate(estimate))
    seconds = find_step_time(estimate, step_time_s, tokens_per_second)
    devices = _count_devices(estimate, num_devices, gpus)
    ideal = find_ideal_time(sum_dtypes(estimate, convention), device=device, dtype=dtype, peak=peak)
    share = share_peak(ideal, "MFU", seconds, devices)
    executed = estimate.totals["hardware"] if convention == "full" else None
    if share.value is None or executed is None or executed >= estimate.total_under(convention):
        return share
    why = (
        f"this MFU is above the HFU: convention full counts every query-key pair, and kernel "
        f"{estimate.attention_kernel} skips most masked ones; {spell('convention', 'model')} gives an MFU that "
        "is below the HFU"
    )
    return share._replace(note=why if share.note is None else f"{share.note}; {why}")


def hfu(
    estimate: Estimate,
    step_time_s: float | str | None = None,
    *,
    tokens_per_second: float | str | None = None,
    device: str | None = None,
    dtype: object = None,
    peak: Peak | None = None,
    num_devices: int | None = None,
    gpus: int | None = None,
) -> Utilization:
    """Hardware FLOPs utilization: convention `hardware`, recomputation included. Arguments are those of `mfu`.

        f"{hfu(estimate, tokens_per_second='12k', device='h200'):.1%}"

    What is executed is counted for `device`, also where the estimate was made without it.
    """
    check_estimate(estimate)
    seconds = find_step_time(estimate, step_time_s, tokens_per_second)
    devices = _count_devices(estimate, num_devices, gpus)
    _, known = _find_device(device, peak)
    executed = sum_dtypes(estimate if known is None else estimate.move(known), "hardware")
    ideal = find_ideal_time(executed, device=device, dtype=dtype, peak=peak)
    return share_peak(ideal, "HFU", seconds, devices)


def sum_dtypes(estimate: Estimate, convention: Convention) -> dict[str, int]:
    """Number format -> all FLOPs of a step that are computed in it, under a convention."""
    return {name: flops.total for name, flops in estimate.by_dtype(convention).items()}


def _choose_convention(estimate: Estimate) -> Convention:
    return "full" if estimate.convention == "full" else "model"


def find_ideal_time(
    flops: Mapping[str, float],
    *,
    device: str | None,
    dtype: object = None,
    peak: Peak | None = None,
) -> Ideal:
    """The least time of FLOPs by format on one device: the sum of each format's FLOPs ÷ its peak.

    A format that the device has no peak for counts at that of the format it falls back to, and a note says so.
    """
    if dtype is not None:
        flops = {parse_dtype(dtype): sum(flops.values())}
    name, known = _find_device(device, peak)
    if isinstance(peak, Mapping):
        given: dict[str, float] = {parse_dtype(key): read_number(peak[key], "peak") for key in peak}
    else:
        given = {} if peak is None else dict.fromkeys(flops, read_number(peak, "peak"))
    if known is None and not given:
        if device == "auto":
            return Ideal(None, (), name, "+".join(flops), note=_describe_auto(name))
        raise DeviceError(f"MFU needs a peak: name a {spell('device')}, or give {spell('peak', 'FLOPS_PER_S')}")
    peaks, notes = [], [known.note] if known is not None and known.note else []
    for kind, total in flops.items():
        rate, own = _find_rate(kind, given, known, is_explicit=dtype is not None)
        if own != kind:
            notes.append(f"{name or spell('peak')} has no {kind} peak: {kind} products count at its {own} peak")
        peaks.append(FormatPeak(kind, total, rate))
    seconds = sum(each.flops / each.peak_flops_per_s for each in peaks)
    notes[:0] = [
        f"{each.format} products are {100 * each.flops / each.peak_flops_per_s / seconds:.0f} % of the least time; "
        f"most papers take one peak for all ({spell('compute', 'bf16')}), so their MFU is lower"
        for each in peaks
        if each.format == "fp32" and "bf16" in flops and 0.01 * seconds < each.flops / each.peak_flops_per_s
    ]
    bf16 = given.get("bf16") if isinstance(peak, Mapping) else None
    if bf16 is None and known is not None:
        bf16 = known.peak_tflops.get("bf16", 0.0) * 1e12 or None
    return Ideal(seconds, tuple(peaks), name, "+".join(flops), bf16, "; ".join(notes) or None)


def _find_rate(kind: str, given: Mapping[str, float], known: Device | None, *, is_explicit: bool) -> tuple[float, str]:
    """The peak that a format counts at, and the format that the peak is of."""
    name: str | None = kind
    while name is not None and given:
        if name in given:
            return given[name], name
        if known is not None and name in known.peak_tflops:
            break
        name = find_computed(name).fallback
    if known is None:
        raise DeviceError(f"{spell('peak')} has no {kind}: give {kind}=FLOPS_PER_S too, or name a {spell('device')}")
    return (peak_flops_per_s(known.id, kind), kind) if is_explicit else find_format_peak(known.id, kind)


def _find_device(device: str | None, peak: Peak | None) -> tuple[str | None, Device | None]:
    """A device's name and what is known of it; one that is not in the table needs a peak."""
    if device is None:
        return None, None
    if not isinstance(device, str):
        raise DeviceError(f"a device is named by a string, not {format_value(device)}")
    found = detect_device() if device == "auto" else device
    if found is None:
        return None, None
    try:
        known = find_detected(found) if device == "auto" else find_device(found)
    except DeviceError:
        if peak is None:
            raise
        known = None
    return (found, None) if known is None else (known.name, known)


def _describe_auto(name: str | None) -> str:
    """Why device auto gives no peak on this machine."""
    if name is None:
        return f"no GPU found on this machine: name one with {spell('device')}, or give {spell('peak')}"
    return f"the GPU found here, {name!r}, is not in the table: give its dense peak with {spell('peak', 'FLOPS_PER_S')}"


def share_peak(ideal: Ideal, what: str, step_time_s: float, devices: int = 1) -> Utilization:
    """Ideal time ÷ measured time of all devices: FLOPs ÷ (time × peak × devices) where there is one format."""
    if ideal.seconds is None:
        return Utilization(None, None, ideal.device, ideal.dtype, ideal.note)
    rate, note = ideal.peak_flops_per_s, ideal.note
    flops = sum(peak.flops for peak in ideal.peaks)
    if len(ideal.peaks) == 1 and rate:
        value = flops / (step_time_s * rate * devices)
    else:
        value = ideal.seconds / (step_time_s * devices)
    plain = flops / (step_time_s * ideal.bf16 * devices) if ideal.bf16 else None
    if value > 1:
        wrong = (
            f"{what} is {value:.3f}, above 1: the peak, the step time, the device count or the workload is wrong"
            + (", or other kernels ran than convention hardware counts" if what == "HFU" else "")
        )
        note = wrong if note is None else f"{wrong}; {note}"
    return Utilization(value, rate, ideal.device, ideal.dtype, note, ideal.peaks, plain)


def find_step_time(estimate: Estimate, step_time_s: float | str | None, tokens_per_second: float | str | None) -> float:
    """Seconds of a step, as given or from the tokens that pass in a second."""
    if (step_time_s is None) == (tokens_per_second is None):
        problem = "are both given" if step_time_s is not None else "are both missing"
        raise FlopcalcError(f"step time and tokens per second {problem}: give one of them")
    if tokens_per_second is not None and not estimate.tokens:
        raise FlopcalcError("tokens per second: this step has images alone; give its step time")
    if tokens_per_second is not None:
        return estimate.tokens / read_number(tokens_per_second, "tokens_per_second")
    return read_number(step_time_s, "step_time")


def _count_devices(estimate: Estimate, num_devices: int | None, gpus: int | None) -> int:
    """The estimate's own GPUs; another number is the older way to say them."""
    given = num_devices if gpus is None else gpus
    if given is None:
        return estimate.gpus
    if num_devices is not None and check_size(num_devices, "num_devices") != given:
        raise FlopcalcError(f"gpus {gpus} contradicts num_devices {num_devices}: give one of them")
    if check_size(given, "gpus") != estimate.gpus:
        import warnings

        warnings.warn(
            f"this estimate is of {estimate.gpus} GPU{'s' * (estimate.gpus > 1)}, not {given}: give gpus={given} to "
            "estimate_flops instead, with batch_size as each GPU has it; the next release refuses another number here",
            FutureWarning,
            stacklevel=3,
        )
    return given


def describe_least_time(
    estimate: Estimate, way: str = "", *, device: str | None, dtype: str | None, peak: Peak | None
) -> list[str]:
    """Without a measured time: the least that the peak allows, and what measured steps reached on the device."""
    try:
        ideal = find_ideal_time(
            sum_dtypes(estimate, _choose_convention(estimate)), device=device, dtype=dtype, peak=peak
        )
    except DeviceError as error:  # a dtype without a peak: no reason to refuse the count
        return [str(error)]
    if ideal.seconds is None:
        return [ideal.note] if ideal.note else []
    name = ideal.device
    least = ideal.seconds / estimate.gpus
    where = f" of {estimate.gpus} × {name}" if name else ""
    rates = ", ".join(
        f"{format_rate(each.peak_flops_per_s)}{f' in {each.format}' if len(ideal.peaks) > 1 else ''}"
        for each in ideal.peaks
    )
    bound = f"at the {ideal.dtype} peak{where} ({rates} each) this takes at least {format_seconds(least)}"
    known = _find_device(device, peak)[1]
    reads, room = _describe_weights(estimate, known, least) if known is not None else ("", [])
    bound += reads
    measured = describe_measured_mfu(name, estimate) if name is not None and ideal.dtype == "bf16" else None
    notes = [f"{bound}; {way or spell('step_time')} gives the MFU", *([measured] if measured else [])]
    return [*notes, *room, *([ideal.note] if ideal.note else [])]


def _count_idle(estimate: Estimate) -> int:
    """Parameters of experts that the tokens of a replica leave out, where each token goes to other experts."""
    estimator, load, _ = estimate.trained.terms[0]
    rows = estimator.rows(load, "full") if estimator.origin == "spec" else ()
    return sum(
        max(0, row.parameters - (row.parameters - row.inactive) * load.tokens) * block.copies for block, row, _ in rows
    )


def _describe_weights(estimate: Estimate, device: Device, least_s: float) -> tuple[str, list[str]]:
    """How long reading the weights once takes, where that is longer, and that they do not fit, where they do not.

    Each replica reads all weights but those of experts that its tokens cannot reach; training may divide what it stores
    among all GPUs, as ZeRO-3 does.
    """
    stored, counts = sum(each.total_bytes for each in estimate.weights), estimate.parameters
    group = estimate.gpus // estimate.replicas
    holders = estimate.gpus if estimate.trained.terms[0].load.phase == "train" else group
    used = stored * (counts["total"] - _count_idle(estimate)) // max(1, counts["total"])
    reads, room = "", []
    if device.bandwidth_gb_per_s is not None:
        seconds = used / (device.bandwidth_gb_per_s * 1e9 * group)
        if seconds > least_s:
            who = f" for each {f'group of {group} GPUs' if group > 1 else 'GPU'}" if estimate.replicas > 1 else ""
            reads = f", and{who} to read {format_bytes(used)} of weights at least {format_seconds(seconds)}"
    if device.memory_gb is not None and stored > device.memory_gb * 2**30 * holders:
        where = f"{holders} × {device.name} ({device.memory_gb:g} GB each)"
        room = [f"the weights alone, {format_bytes(stored)}, do not fit on {where}"]
    return reads, room


def find_peak(device: str | None, dtype: object, peak: Peak | None) -> tuple[str | None, float | None, str | None]:
    """Device name, its peak in FLOP/s for one format and a note where there is none: a given peak wins."""
    ideal = find_ideal_time({parse_dtype(dtype): 0}, device=device, dtype=dtype, peak=peak)
    return ideal.device, ideal.peaks[0].peak_flops_per_s if ideal.peaks else None, ideal.note


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
    one = len(chosen) == 1
    which = "1 training step of another model" if one else f"{len(chosen)} training steps of other models"
    sized = f"{sizes[0]:.2g}" + ("" if one else f" to {sizes[-1]:.2g}")
    reached = f"{100 * low:.0f}" + ("" if one else f" to {100 * high:.0f}")
    return (
        f"{which} measured on {about.get('device')} ({str(about.get('date'))[:10]}), of {sized} times these FLOPs, "
        f"reached an MFU of {reached} %: measured elsewhere, not a prediction"
    )
