"""A device as the predictor sees it: seconds of a product, an attention call, moved bytes; measured or roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from flopcalc.base.errors import DeviceError, SpecError
from flopcalc.base.vocabulary import CAST_BYTES, CAST_FORMATS, FusedKernel, ProductDirection
from flopcalc.hardware.devices import Device, find_device, find_format_peak, parse_dtype, peak_flops_per_s
from flopcalc.hardware.systems import System, load_system
from flopcalc.hardware.tiles import ALIGNED, ProductSize
from flopcalc.prediction.kernels.attention import PLAIN, add_features, find_attention, find_dropping, find_nearest
from flopcalc.prediction.kernels.constants import Constants, find_fitted, load_predictor
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.memory_bound import (
    FLOAT,
    MOST_ROWS,
    count_rows,
    find_size,
    name_shape,
    read_curve,
    weigh_zeros,
)
from flopcalc.prediction.kernels.products import (
    GroupShape,
    ProductShape,
    measure_narrow,
    time_experts,
    time_grouped,
    time_matrix,
    time_shape,
    turn_narrow,
)
from flopcalc.prediction.work import Attention, MemoryCall, ProductCall


class KernelTime(NamedTuple):
    """Seconds of one call, the relative error to expect, and whether a measurement stands behind it."""

    seconds: float
    error: float
    is_measured: bool


def slow_down(power: Sequence[float], rate: float) -> float:
    """How many times longer work takes whose products keep up such a share of the peak: at the limit of its power a
    device lowers its clock, the more the harder it works."""
    start, steepness = power
    return float(1 + steepness * max(0.0, rate - start) ** 2)


MEASURED_ON = "h200-sxm"  # where the shapes of curves come from for devices that were not measured
_STEPS = {4: (4, 2, 1), 2: (2, 4, 1), 1: (1,)}  # step of unaligned widths -> measured steps to use, nearest first
_LEAST_HEAD = 32  # narrower heads take as long (benchmarks/results/kinds_profiles_05.json.gz)
_NARROW = 64  # rank of an adapter: up to here its products in another format are bound by their bytes
_UNCAST = ("lm_head", "head", "router")  # parts whose products stay in bf16
_FOREACH = 21 / 7  # bytes that foreach AdamW's eight passes move, over those of the fused one's single pass


class Machine:
    """One device and dtype. Every time is of ONE call; multiply by its calls."""

    def __init__(self, device: str, dtype: str = "bf16", constants: Constants | None = None) -> None:
        self.device: Device = find_device(device)
        self.dtype = parse_dtype(dtype)
        self._given, self._others = constants, dict[str, Machine]()
        self.find_product = lru_cache(maxsize=65536)(self._find_product)
        # What is no product of a narrow format stays in bf16.
        self.plain = self if self.dtype not in CAST_FORMATS else Machine(device, "bf16")
        self.peak = peak_flops_per_s(device, dtype)
        constants = constants or load_predictor(self.device.id)
        self.is_measured = constants is not None and self.dtype in ("bf16", "fp16")
        if constants is None:
            constants = load_predictor(MEASURED_ON)
        if constants is None:
            raise SpecError(
                f"model_specs/predictors/{MEASURED_ON}.json is missing: the installation is incomplete; "
                "`flopcalc calibrate --predictor` measures a device"
            )
        self.constants = constants
        self.fitted = find_fitted(constants)
        self.is_own = bool(constants.get("is_own"))  # this very machine was measured, not another of its kind
        origin = find_device(constants["provenance"]["device_id"])
        bandwidth = self.device.bandwidth_gb_per_s
        if bandwidth is None:
            raise DeviceError(
                f"{self.device.name} has no known memory bandwidth: add bandwidth_gb_per_s in your own devices.toml"
            )
        self.bandwidth = bandwidth * 1e9  # bytes per s
        self.system = None if self.is_measured else load_system(self.device.id)
        self.has_kernels = self.system is not None and self.dtype in self.system["products"]
        self.compute = self.peak / (origin.peak_tflops["bf16"] * 1e12)  # how much faster than what was measured
        if self.device.id != origin.id or self.dtype in CAST_FORMATS:
            shares = self.fitted.large_product_share
            share = next(
                (value for start, value in shares.items() if self.device.id.startswith(start)), shares["other"]
            )
            self.compute *= share * origin.peak_tflops["bf16"] * 1e12 / constants["products"]["shape"][0]
        self.memory = bandwidth / origin.bandwidth_gb_per_s if origin.bandwidth_gb_per_s else 1.0
        self.width = 4 if self.dtype in ("fp32", "tf32") else 2  # bytes of a number; curves are of two
        shape = ProductShape(*constants["products"]["shape"])
        rows = shape.bandwidth * self.memory * 2 / self.width
        self.shape = shape._replace(rate=shape.rate * self.compute, bandwidth=rows)
        # The table of tiles that the constants were fitted with; kernels that others measured come without one.
        self.tiles = "" if self.has_kernels else constants["products"].get("tiles", "")
        self.sustained = self.sustained_attention = 1.0  # share of bursts' rate that training keeps up
        # Whether products, activation function and casts of experts are one kernel; whether a CUDA graph replays them.
        self.joins_experts = self.system is not None and self.dtype in self.system.get("joined_experts", ())
        self.replays_experts = self.system is not None and self.dtype in self.system.get("replayed_experts", ())
        self.processors = 1.0  # how many times as many as the device that was measured has
        self.decode_speed = self.memory * 2 / self.width
        self._attention_speeds: dict[int, float] = {}  # head dim -> how much faster than what was measured
        self._residuals: dict[str, list[tuple[float, float, float, float]]] = {}
        if self.system is not None and self.has_kernels:
            self._take_kernels(self.system)
            return
        for direction, m, n, k, ratio in constants["products"]["residuals"]:
            entry = (math.log2(m), math.log2(n), math.log2(k), math.log(ratio))
            self._residuals.setdefault(direction, []).append(entry)

    def _take_kernels(self, system: System) -> None:
        """Constants of kernels that engines measured on this device, over the same engines' on the origin's where the
        origin's own curves are scaled."""
        base = load_system(self.constants["provenance"]["device_id"])
        self.sustained = system["sustained"].get(self.dtype, 1.0)
        self.sustained_attention = system["sustained"].get("attention", self.sustained)
        self.shape = ProductShape(*system["products"][self.dtype]["shape"])
        if base is None:
            return
        self.compute = self.shape.rate / base["products"]["bf16"]["shape"][0]
        self.processors = self.shape.units / base["products"]["bf16"]["shape"][-1]
        self.decode_speed = system["decode_bytes_per_s"] / base["decode_bytes_per_s"]
        rates, others = system["attention_flops_per_s"], base["attention_flops_per_s"]
        self._attention_speeds = {int(dim): rates[dim] / others[dim] for dim in rates if dim in others}

    def is_cast(self, product: ProductCall) -> bool:
        """Whether operands are brought to a narrow format first: those of heads, routers and scans never are."""
        return self.dtype in CAST_FORMATS and product.part not in _UNCAST and product.format != "bf16"

    def _find_error(self, kind: str) -> float:
        return self.fitted.kernel_error[
            kind if self.is_measured else "published_kernels" if self.has_kernels else "scaled"
        ]

    def _find_other(self, kind: str) -> Machine:
        """The same device computing in another format, or in what it falls back to."""
        if kind not in self._others:
            own = find_format_peak(self.device.id, kind)[1]
            self._others[kind] = self if own == self.dtype else Machine(self.device.id, own, self._given)
        return self._others[kind]

    def is_narrow(self, product: ProductCall) -> bool:
        """Whether a product is an adapter's in another format than the rest."""
        is_plain = self.is_measured and self.dtype not in CAST_FORMATS
        return bool(product.format) and is_plain and min(product.size[1:4]) <= _NARROW

    def time_product(self, product: ProductCall) -> KernelTime:
        if self.is_narrow(product) and (narrow := self._time_narrow(product)):
            return narrow
        if product.format and self.dtype not in CAST_FORMATS:
            return self._find_other(product.format).time_product(product._replace(format=""))
        if self.plain is not self and not self.is_cast(product):
            return self.plain.time_product(product)
        line = self.constants["products"].get("patches", {}).get(product.direction)
        if product.is_patches and line:
            start, per_flop = line
            error = self._find_error("product") * (2 if self.is_measured else 1)
            # Far below what the device computes or moves: as slow on every device.
            return KernelTime(start + per_flop * product.flops / product.calls, error, self.is_measured)
        found = self.find_product(product.size)
        if not product.weight_bytes or product.direction == "wgrad":
            return found
        # No kernel for quantized weights was measured: as much faster as the roofline says.
        computed_s, plain = product.flops / product.calls / self.peak, product._replace(weight_bytes=0.0)
        whole_s, read_s = (each.count_bytes(self.width) / self.bandwidth for each in (plain, product))
        faster = max(computed_s, read_s) / max(computed_s, whole_s)
        return KernelTime(found.seconds * faster, self.fitted.kernel_error["scaled"], False)

    def _time_narrow(self, product: ProductCall) -> KernelTime | None:
        """An adapter's product in another format, by its form; None where no such was measured."""
        form, sizes = turn_narrow(product.size)
        if line := self.constants["products"].get("adapters", {}).get(f"{product.format} {form}"):
            start, per_byte, per_flop = line
            moved, flops = measure_narrow(form, *sizes)
            error = 2 * self.fitted.kernel_error["product"]
            return KernelTime(start + per_byte * moved + per_flop * flops, error, True)
        return None

    def time_experts(self, product: ProductCall, kept: float) -> KernelTime:
        """Products of experts in a training framework's step, which keeps up a share of the rate of bursts."""
        if self.plain is not self and not self.is_cast(product):
            return self.plain.time_experts(product, kept)
        width = CAST_BYTES.get(self.dtype, self.width)
        computed, moved = time_experts(self.shape, self.fitted.expert_streamed * self.bandwidth, width, product.size)
        seconds = max(computed / kept + moved, self.fitted.expert_call_s * product.size.copies)
        return KernelTime(seconds, 2 * self._find_error("product"), self.is_measured)

    def _find_product(self, size: ProductSize) -> KernelTime:
        direction, m, n, k, copies, _ = size
        error = self._find_error("product")
        if not min(m, n, k):
            return KernelTime(0.0, error, self.is_measured)
        if copies > 1:
            group = GroupShape(*self.constants["products"]["grouped"][direction])
            group = group.scale(self.compute, self.memory * 2 / self.width)
            return KernelTime(time_grouped(group, self.shape.units, size), 2 * error, self.is_measured)
        seconds = time_shape(self.shape, size, self.tiles)
        step = size.find_step()
        if step < ALIGNED:
            slower = self._find_slower(step, direction) if m * n * k > 2**27 else 1.0
            return KernelTime(seconds * slower, 2 * error, self.is_measured)
        ratio, nearness = self._correct(direction, math.log2(m), math.log2(n), math.log2(k))
        return KernelTime(seconds * ratio, error * (2 - nearness), self.is_measured)

    def _find_slower(self, step: int, direction: ProductDirection) -> float:
        """What widths that are no multiple of 8 cost.

        Steps of 2 that were not measured are as those of 4: kernels for both copy 4 bytes at once, those for 1 do not.
        """
        table = self.constants["products"]["unaligned"]
        for known in _STEPS[step]:
            if direction in table.get(str(known), ()):
                return table[str(known)][direction]
        return 1.0

    def _correct(self, direction: ProductDirection, m: float, n: float, k: float) -> tuple[float, float]:
        """What shapes nearby took over what the formula gives them, drawn towards 1; how near they are, 0 to 1."""
        total, weights = 0.0, 0.0
        for a, b, c, ratio in self._residuals.get(direction, ()):
            far = (m - a) ** 2 + (n - b) ** 2 + (k - c) ** 2
            if far < 4:
                weight = math.exp(-far / self.fitted.nearby_width)
                weights += weight
                total += weight * ratio
        whole = weights + self.fitted.nearby_pull
        return math.exp(total / whole), weights / whole

    def time_cast(self, product: ProductCall) -> KernelTime:
        """Bringing a product's operands to a narrow format: inputs ahead, output gradients behind.

        Weights are kept in the format: the optimizer's step writes them (Megatron-Bridge: fp8_param_gather). Operands
        are written twice, along either dimension, since gradients sum over the other; fp8 has one scale for a tensor,
        whose largest number is looked for first.
        """
        direction, m, n, k, _, _ = product.size
        own = {"forward": m * k, "dgrad": m * n, "wgrad": 0}[direction]  # for a weight's gradient both are there
        width = CAST_BYTES[self.dtype]
        reads = 4 if self.dtype == "fp8" else 2
        moved = MemoryCall(product.module, product.group, direction, "pointwise", reads * own, 2 * width * own)
        return self.time_moved(moved) if own else KernelTime(0.0, 0.0, self.is_measured)

    def time_attention(self, call: Attention) -> KernelTime:
        if self.plain is not self:
            return self.plain.time_attention(call)
        error = self._find_error("attention")
        if call.kernel == "eager" or call.kernel == "math":
            machine = self._find_other("fp32") if call.kernel == "math" else self
            return KernelTime(machine._time_eager(call), error, self.is_measured)
        tables = self.constants["attention"]
        kernel: FusedKernel = call.kernel or self.device.sdpa or "flash"
        older = load_defaults().work.flash_as_cudnn
        if kernel == "flash" and not self.is_measured and self.device.id.startswith(older):
            kernel = "cudnn"  # a Hopper runs FlashAttention-2 at a third of its peak, GPUs before it at half of theirs
        asked = tables.get(kernel) or next(iter(tables.values()))
        mean = (call.qk + call.v) / 2
        constants, dim = find_attention((asked, *tables.values()), call, mean)
        # Decoding reads all keys once, with any kernel, and computes next to nothing.
        speed = self._find_speed(mean) if call.mask != "decode" else self.decode_speed
        units, longer = round(self.shape.units), max(mean, _LEAST_HEAD) / dim
        seconds = constants[0] + add_features(constants, call, kernel, mean, units) * longer / speed
        if call.mask in PLAIN:
            seconds *= find_dropping((asked, *tables.values()), call, kernel, units, mean)
        return KernelTime(seconds, error if dim == mean else 2 * error, self.is_measured)

    def _find_speed(self, dim: float) -> float:
        """How much faster attention runs than on the device that was measured, at the nearest known head dim."""
        speeds = self._attention_speeds
        return speeds[find_nearest(speeds, dim)] if speeds else self.compute

    def _time_eager(self, call: Attention) -> float:
        """Scores, then values, as batched products; the gradients of both."""
        many = call.batch * call.heads
        once = time_matrix(self.shape, call.length, call.keys, call.qk, many)
        if call.has_float_scores:  # on no tensor cores, whose tiles have a lead
            rate = self._find_other("fp32").shape.rate * load_defaults().work.float_scores
            once = self.shape.start + 2.0 * many * call.length * call.keys * call.qk / rate
        once += time_matrix(self.shape, call.length, call.v, call.keys, many)
        return once * (2 if call.direction == "backward" else 1)

    def time_moved(self, moved: MemoryCall) -> KernelTime:
        if self.plain is not self:
            return self.plain.time_moved(moved)
        error = self._find_error("moved")
        kind = moved.kind.removesuffix(FLOAT)
        share = load_defaults().work.float_share[kind] if kind != moved.kind else 1.0
        size = (moved.reads + moved.writes) * share
        name = name_shape(kind, moved.reads, moved.writes).removesuffix("_frozen")
        curves, lines = self.constants["moved"], self.constants["linear"]
        if moved.direction == "backward" and f"{name}_backward" in curves:
            name += "_backward"
        if moved.direction == "optimizer":
            found = self.constants["optimizer"].get(name)
            start, per_tensor, per_byte = found or self.constants["optimizer"]["adamw"]
            if found is None and name == "adamw-foreach":
                per_byte, error = per_byte * _FOREACH, 2 * error
            if name == "adamw":
                size *= weigh_zeros(moved.unseen, self.fitted.zero_states_slower)
            return KernelTime(
                start + moved.tensors * per_tensor + size * per_byte / self.memory, error, self.is_measured
            )
        if name == "scan":
            seconds = read_curve(curves["pointwise"], size / self.memory)
            return KernelTime(seconds * math.sqrt(self.memory / self.processors), 2 * error, self.is_measured)
        while name not in curves and name not in lines:  # of a kind that was not measured, the next wider one's
            name, error = name.rpartition("_")[0] or "pointwise_strided", 2 * error
        if name in curves:
            seconds = read_curve(curves[name], find_size(name, moved.reads, moved.writes) * share / self.memory)
        else:
            start, per_byte = lines[name]
            seconds = start + size * per_byte / self.memory
        return KernelTime(max(seconds, self._time_rows(moved)), error, self.is_measured)

    def _time_rows(self, moved: MemoryCall) -> float:
        """What the rows of a norm, or of a bias's gradient, take at least; 0 of other calls."""
        kind = moved.kind.removesuffix(FLOAT)
        if kind != moved.kind:  # as many rows as of 16 bits in half the bytes
            moved = moved._replace(kind=kind, reads=moved.reads / 2, writes=moved.writes / 2)
        rows = count_rows(kind, moved.reads, moved.writes)
        if not 0 < rows <= MOST_ROWS or (kind == "reduce" and moved.direction == "forward"):
            return 0.0
        known = load_defaults().work
        start, per_row, per_byte = known.row_s[kind]
        if kind == "reduce" and 96 < (width := moved.writes / 2) < 512 and width % 128:
            per_row *= known.odd_sum  # its rows start between two lines of memory
        return start + rows * per_row + (moved.reads + moved.writes) * per_byte / self.memory
