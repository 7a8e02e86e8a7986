"""Rooflines: the least time that a device allows a step, and every product and attention call under its roof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flopcalc.base.units import format_seconds
from flopcalc.base.vocabulary import Direction, Execution, Kernel, Optimizer, Phase
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.estimate.utilization import find_ideal_time, sum_dtypes
from flopcalc.core.formats.formats import count_cache_bytes
from flopcalc.core.model.ops import Attend
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.devices import Device, find_device, parse_dtype
from flopcalc.prediction.build_work import count_calls, count_step_bytes, find_decoding_call, make_work
from flopcalc.prediction.execution_options import check_execution, find_kernel, match_dtype, settle
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.work import Attention, ProductCall


class Call(NamedTuple):
    """One product or attention call; FLOPs, bytes and seconds are of one call."""

    module: str
    kind: str  # product, attention
    direction: Direction  # forward, dgrad, wgrad; attention: forward, backward
    shape: str
    calls: float  # in the whole step
    flops: float
    bytes: float  # operands read once, the result written once
    seconds: float
    is_again: bool  # recomputed

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


class Roofline(NamedTuple):
    """What a device can do, and where the calls of a step lie under it."""

    device: str
    dtype: str
    peak_flops_per_s: float
    bytes_per_s: float
    calls: tuple[Call, ...]

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which the peak bounds, not the memory."""
        return self.peak_flops_per_s / self.bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "dtype": self.dtype,
            "peak_flops_per_s": self.peak_flops_per_s,
            "bytes_per_s": self.bytes_per_s,
            "ridge_flops_per_byte": self.ridge,
            "calls": [{**call._asdict(), "flops_per_byte": call.intensity} for call in self.calls],
        }


def make_roofline(
    estimate: Estimate,
    *,
    device: str,
    dtype: str | None = None,
    execution: Execution = "eager",
    attention_kernel: Kernel = "auto",
) -> Roofline:
    """Every product and attention call of the step that was counted, on a device."""
    check_execution(execution)
    found = find_device(device)
    if dtype is not None:
        find_kernel(found, parse_dtype(dtype), attention_kernel)  # a narrow format is refused
        estimate = match_dtype(estimate, dtype)
    kind = estimate.terms[0].estimator.formats.attention
    machine = Machine(found.id, kind)
    picked = find_kernel(found, kind, attention_kernel)
    calls: list[Call] = []
    for estimator, load, times in estimate.terms:
        settled, kernel, _ = settle(estimator, picked, execution, is_asked=attention_kernel != "auto")
        work = make_work(settled, load, dtype_bytes=machine.width, kernel=kernel, execution=execution)
        calls += [_read_product(each, times, machine) for each in work.products if each.flops]
        calls += [_read_attention(each, times, machine) for each in work.attention if each.flops]
    bandwidth = machine.device.bandwidth_gb_per_s
    assert bandwidth is not None  # a Machine needs one
    return Roofline(found.id, kind, machine.peak, bandwidth * 1e9, tuple(calls))


def _read_product(product: ProductCall, times: int, machine: Machine) -> Call:
    direction, m, n, k, copies, _ = product.size
    shape = f"{m} × {k} · {k} × {n}"
    if copies > 1:
        shape = f"{copies} weights: {shape}"
    return Call(
        product.module,
        "product",
        direction,
        shape,
        product.calls * times,
        product.flops / product.calls,
        product.count_bytes(machine.width),
        machine.time_product(product).seconds,
        product.is_again,
    )


def _read_attention(call: Attention, times: int, machine: Machine) -> Call:
    shape = f"{call.batch} × {call.heads} heads ({call.kv_heads} of keys), {call.length} × {call.keys}, {call.mask}"
    return Call(
        call.module,
        "attention",
        call.direction,
        shape,
        call.calls * times,
        call.flops / call.calls,
        call.count_bytes(machine.width),
        machine.time_attention(call).seconds,
        call.is_again,
    )


class Floors(NamedTuple):
    """What a step computes and moves at least, and the seconds that each takes at the device's published limits."""

    flops: int  # under convention model
    bytes: int  # weights, gradients, optimizer states and cached keys; activations may stay on the chip
    compute_s: float
    bandwidth_s: float | None  # None: the device's bandwidth is not known
    tokens_per_s: float | None  # at the higher floor: no code can be faster; None: the step has images alone

    def to_dict(self) -> dict[str, Any]:
        intensity = self.flops / self.bytes
        ridge = None if self.bandwidth_s is None else intensity * self.bandwidth_s / self.compute_s
        return {
            **self._asdict(),
            "flops_per_byte": intensity,
            "ridge_flops_per_byte": ridge,  # where the device's peak and bandwidth take equally long
            "bound": None if ridge is None else "compute" if intensity >= ridge else "bandwidth",
        }

    def __str__(self) -> str:
        shown = self.to_dict()
        compute = format_seconds(self.compute_s)
        rate = [] if self.tokens_per_s is None else [f"at most {format_rate(self.tokens_per_s)} tokens/s"]
        if self.bandwidth_s is None:
            return f"{', '.join([f'compute {compute}', *rate])}; the device's bandwidth is not known"
        times = f"compute {compute}, bandwidth {format_seconds(self.bandwidth_s)}"
        return (
            f"{': '.join([times, *rate])}; "
            f"{format_intensity(shown['flops_per_byte'])} FLOPs per byte, "
            f"compute-bound above {shown['ridge_flops_per_byte']:,.0f}"
        )


def find_floors(estimate: Estimate, device: Device, dtype: str | None, width: int, optimizer: Optimizer) -> Floors:
    """The floors of a step whose plain numbers take `width` bytes each; `dtype` takes one format for all products."""
    moved = sum(_count_reads(estimator, load, width) * times for estimator, load, times in estimate.terms)
    if estimate.terms[0].load.phase == "train":
        moved += (width + sum(count_step_bytes(optimizer, width))) * estimate.parameters["trainable"]  # gradients too
    flops = estimate.total_under("model")
    bandwidth = device.bandwidth_gb_per_s
    compute_s = find_ideal_time(sum_dtypes(estimate, "model"), device=device.id, dtype=dtype).seconds or 0.0
    bandwidth_s = None if bandwidth is None else moved / (bandwidth * 1e9)
    rate = estimate.tokens / max(compute_s, bandwidth_s or 0.0) if estimate.tokens else None
    return Floors(flops, moved, compute_s, bandwidth_s, rate)


def format_intensity(flops_per_byte: float) -> str:
    return f"{flops_per_byte:,.0f}" if flops_per_byte >= 1000 else f"{flops_per_byte:.4g}"


def format_rate(tokens_per_s: float) -> str:
    """10411.2 -> '10,411'; below 10 two digits that count."""
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2g}"


_CODE: dict[Execution, str] = {
    "eager": "HF's eager code, one kernel per operator",
    "compiled": "HF's code under torch.compile",
    "graphs": "HF's compiled code, replayed as a CUDA graph",
    "fused": "the fused kernels of a training framework",
}


def describe_execution(execution: Execution, phase: Phase) -> str:
    """What code the predicted time is of."""
    code = _CODE[execution]
    if execution == "fused":
        return f"this times {code}"
    other = "fused kernels" if phase == "train" else "a serving engine with fused kernels and CUDA graphs"
    return f"this times {code}; {other} can come closer to the floors"


def _count_reads(estimator: Estimator, load: Workload, width: int) -> int:
    """Bytes that one micro-batch reads: weights once per pass that needs them, and cached keys and values."""
    total = 0
    is_train = load.phase == "train"
    for counted in estimator.rows(load, "model"):
        block, row, _ = counted
        if not counted.flops.forward:
            continue  # a table is looked up, and a tower without input does not run
        weights = (row.parameters - row.inactive if row.op.tied is None else row.op.n_in * row.op.n_out) * width
        if row.numbers.weight.is_quantized and row.parameters:
            whole = sum(held.total_bytes for held in row.list_weights(has_adapters=False))
            weights = whole * (row.parameters - row.inactive) // row.parameters
        owes_input = is_train and any(product.passes.input_gradient for product in row.products)
        total += weights * (1 + owes_input) * block.copies * count_calls(load)
    if load.phase == "decode":  # the cache grows by one position a call: the mean of the first and the last
        calls = count_calls(load)
        ends = [find_decoding_call(load, 0), find_decoding_call(load, calls - 1)]
        total += count_cache_bytes(estimator.formats, _count_cached(estimator, load, ends) * calls // 2)
    return total


def count_kept(estimator: Estimator, load: Workload) -> int:
    """Bytes of keys and values that a serving engine holds after a prompt, or after the last new token."""
    last = find_decoding_call(load, count_calls(load) - 1) if load.phase == "decode" else load
    return count_cache_bytes(estimator.formats, _count_cached(estimator, load, [last]))


def _count_cached(estimator: Estimator, load: Workload, calls: Sequence[Workload]) -> int:
    """Numbers of keys and values that the cache holds at these calls, added up; of latent attention the latents."""
    total = 0
    for block, row, _ in estimator.rows(load, "model"):
        op = row.op
        if isinstance(op, Attend) and op.cache_rows is not None:
            held = sum(op.cache_rows.count(call, "full") for call in calls)
            total += (op.latent or op.cache) * block.copies * held
    return total
