"""A roofline: every product and attention call of a step, by its FLOPs, its bytes and its predicted seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

from flopcalc.base.vocabulary import Direction, Execution, Kernel
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.hardware.devices import find_device, parse_dtype
from flopcalc.prediction.choices import check_execution, find_kernel, match_dtype, settle
from flopcalc.prediction.machine import Machine
from flopcalc.prediction.maker import make_work
from flopcalc.prediction.work import Attention, Product


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


def _read_product(product: Product, times: int, machine: Machine) -> Call:
    numbers = product.m * product.k + product.n * product.k * product.copies + product.m * product.n
    shape = f"{product.m} × {product.k} · {product.k} × {product.n}"
    if product.copies > 1:
        shape = f"{product.copies} weights: {shape}"
    return Call(
        product.module, "product", product.direction, shape, product.calls * times, product.flops / product.calls,
        float(numbers * machine.width), machine.time_product(product).seconds, product.is_again,
    )  # fmt: skip


def _read_attention(call: Attention, times: int, machine: Machine) -> Call:
    queries = call.batch * call.heads * call.length * (call.qk + call.v)
    keys = call.batch * call.kv_heads * call.keys * (call.qk + call.v)
    passes = 2 if call.direction == "backward" else 1  # the way back writes a gradient for all that it reads
    shape = f"{call.batch} × {call.heads} heads ({call.kv_heads} of keys), {call.length} × {call.keys}, {call.mask}"
    return Call(
        call.module, "attention", call.direction, shape, call.calls * times, call.flops / call.calls,
        float(passes * (queries + keys) * machine.width), machine.time_attention(call).seconds, call.is_again,
    )  # fmt: skip
