"""A device as the predictor sees it: seconds of a product, an attention call, moved bytes; measured or roofline."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from flopcalc.base.errors import DeviceError, SpecError
from flopcalc.base.vocabulary import CAST_BYTES, CAST_FORMATS
from flopcalc.hardware.devices import Device, find_device, find_format_peak, parse_dtype, peak_flops_per_s
from flopcalc.hardware.systems import System, load_system
from flopcalc.hardware.tiles import count_steps, pad
from flopcalc.prediction.kernels.constants import Constants, load_predictor
from flopcalc.prediction.operator_kinds import find_size, name_shape
from flopcalc.prediction.work import Attention, MemoryCall, Product

# What time_matrix chooses from: rows and columns of a tile, into how many parts k is split, and the least k of a part.
TILES = ((128, 256), (256, 128), (128, 192), (192, 128), (128, 160), (128, 128), (64, 256), (64, 128), (64, 64),
         (256, 64))  # fmt: skip
SPLITS = (1, 2, 4, 8, 16)
MIN_PART_K = 512


# Experts' products as training frameworks run them, one cuBLAS call for each on several streams. From what Transformer
# Engine's GroupedLinear takes on a B200 (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json: 108 products with
# 128 to 9,832 rows an expert, median error 8 %): the tiles of all experts at the rate of plain products, then the bytes
# of their weights. On an H200 both rates agree too (docs/planning.md).
EXPERT_STREAMED = 0.85  # share of the memory's bandwidth at which weights are read
EXPERT_CALL_S = 9e-6  # the least that the call of one expert takes
GRADIENT_BYTES = 8  # a weight's gradient is added to a buffer of float32: read and written


class KernelTime(NamedTuple):
    """Seconds of one call, the relative error to expect, and whether a measurement stands behind it."""

    seconds: float
    error: float
    is_measured: bool


class ProductShape(NamedTuple):
    """How a matrix product's time depends on its sizes: output tiles in waves over the processors."""

    rate: float = 850e12  # FLOP/s of full tiles
    lead: float = 140.0  # what a tile costs beyond its k, in units of k
    start: float = 2.7e-6  # seconds before the first and after the last tile
    half: float = 0.98  # rate of tiles of half the largest size, over that of the largest
    quarter: float = 0.85
    eighth: float = 0.8
    bandwidth: float = 3.7e12  # bytes/s where operands and result rule
    split: float = 2e-6  # seconds more where k is split over several tiles
    units: float = 132.0  # processors

    def find_share(self, area: int) -> float:
        """Rate of tiles of so many elements, over that of the largest."""
        return 1.0 if area >= 32768 else self.half if area >= 16384 else self.quarter if area >= 8192 else self.eighth


def time_shape(shape: ProductShape, direction: str, m: int, n: int, k: int) -> float:
    """Seconds of one product of a layer with n outputs and k inputs over m rows."""
    if direction == "dgrad":
        n, k = k, n
    elif direction == "wgrad":
        m, n, k = n, k, m
    return time_matrix(shape, m, n, k, 1)


def time_matrix(shape: ProductShape, m: int, n: int, k: int, copies: int) -> float:
    """(m, k) by (k, n), `copies` of them at once: the best of several tiles, or the bytes."""
    best = math.inf
    units, per_unit = round(shape.units), shape.rate / shape.units
    for rows, columns in TILES:
        area = rows * columns
        share = shape.find_share(area)
        tiles = -(-m // rows) * -(-n // columns) * copies
        for parts in SPLITS:
            if parts > 1 and k < MIN_PART_K * parts:
                break
            waves = -(-tiles * parts // units)
            taken = waves * area * 2 * (k / parts + shape.lead) / (per_unit * share) + (shape.split if parts > 1 else 0)
            best = min(best, taken)
    moved = 2 * (m * k + k * n + m * n) * copies
    return shape.start + max(best, moved / shape.bandwidth)


class GroupShape(NamedTuple):
    """How the time of experts' products in one call depends on their sizes: the tiles of all over the processors."""

    rate: float = 790e12  # FLOP/s of full tiles
    lead: float = 150.0  # what a tile costs beyond its k, in units of k
    bandwidth: float = 2.9e12  # bytes/s where operands and result rule
    small: float = 0.7  # rate of the tiles that experts with few rows get, over that of the others
    turn: float = 1.1e-6  # seconds of a processor that turns to another expert
    start: float = 3e-6

    def scale(self, compute: float, memory: float) -> GroupShape:
        """The same on a device that computes and reads faster by these factors."""
        return self._replace(rate=self.rate * compute, bandwidth=self.bandwidth * memory, turn=self.turn / compute)


def time_grouped(shape: GroupShape, units: float, direction: str, copies: int, m: int, n: int, k: int) -> float:
    """Products of `copies` experts in one call, m rows in all, dealt out as a router deals that prefers none.

    torch's kernel has two tiles, always in pairs: 128 x 256; with up to 128 rows an expert, 64 x 128.
    """
    mean = m / copies

    def compute(columns: float, side: int, share: float, depth: float, rows: float) -> float:
        pairs = rows * -(-columns // side)
        waves = max(1.0, copies * 2 * pairs / units)
        turns = copies * min(1.0, 2 * pairs / units)  # an expert with fewer tiles than processors reaches some of them
        return waves * side * side * (depth + shape.lead) * units / (shape.rate * share) + turns * shape.turn

    if direction == "wgrad":
        moved = 2.0 * (m * n + m * k + copies * n * k)
        computed = compute(k, 256, 1.0, mean + 32, -(-n // 256))  # rows in steps of 64, of which half of one is empty
    else:
        columns, depth = (k, n) if direction == "dgrad" else (n, k)
        moved = 2.0 * (m * n + m * k + copies * -math.expm1(-mean) * n * k)  # of experts that got a row
        computed = compute(columns, 256, 1.0, depth, count_steps(mean, 256))
        if mean <= 128:  # never longer than the larger tile would take
            computed = min(computed, compute(columns, 128, shape.small, depth, count_steps(mean, 128)))
    return shape.start + max(computed, moved / shape.bandwidth)


def time_experts(
    shape: ProductShape, bandwidth: float, weight_bytes: float, direction: str, copies: int, m: int, n: int, k: int
) -> tuple[float, float]:  # fmt: skip
    """Products of `copies` experts, m rows in all: seconds of their tiles, and of their weights' bytes."""
    rows = max(1, round(m / copies))
    sizes = {"forward": (rows, n, k), "dgrad": (rows, k, n), "wgrad": (n, k, rows)}[direction]
    computed = math.inf
    for high, wide in TILES:  # calls of several streams fill each other's waves
        tiles = copies * -(-sizes[0] // high) * -(-sizes[1] // wide)
        each = high * wide * 2 * (sizes[2] + shape.lead) / shape.find_share(high * wide)
        computed = min(computed, max(1.0, tiles / shape.units) * each * shape.units / shape.rate)
    moved = (GRADIENT_BYTES if direction == "wgrad" else weight_bytes) * copies * n * k
    return computed, moved / (EXPERT_STREAMED * bandwidth)


def slow_down(power: Sequence[float], rate: float) -> float:
    """How many times longer work takes whose products keep up such a share of the peak: at the limit of its power a
    device lowers its clock, the more the harder it works."""
    start, steepness = power
    return float(1 + steepness * max(0.0, rate - start) ** 2)


def turn_narrow(direction: str, m: int, n: int, k: int) -> tuple[str, tuple[int, int, int]]:
    """The form of an adapter's product, and its rows, depth and columns: its rank is the depth, or one of the sides."""
    sizes = {"forward": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}[direction]
    return ("grad", "up", "down")[sizes.index(min(sizes))], sizes


def measure_narrow(form: str, rows: int, depth: int, columns: int) -> tuple[int, int]:
    """Bytes of an adapter's product in fp32, and its FLOPs: a rank that is a side of what comes out fills a tile."""
    rank = min(rows, depth, columns)
    filled = rank if form == "up" else pad(rank, _NARROW_TILE)
    return 4 * (rows * depth + depth * columns + rows * columns), 2 * rows * depth * columns // rank * filled


def weigh_zeros(share: float) -> float:
    """How many times longer fused AdamW takes where a share of the weights has had no gradient but zeros."""
    return 1 + (_ZEROS - 1) * share


# Kinds of operators that the memory alone bounds: a lower clock of the processors does not slow them down.
STREAMED = frozenset(("pointwise", "copy", "cast_down", "fill", "softmax", "softmax_backward", "reduce"))


def find_step(n: int, k: int) -> int:
    """The largest of 8, 4, 2, 1 that divides both widths: rows that do not start on 16 bytes get slower kernels."""
    return math.gcd(n, k, 8)


IN_WAVES = ("full", "window", "apart")  # masks under which all blocks of attention take equally long


def attention_features(
    units: int, direction: str, mask: str, batch: int, heads: int, kv_heads: int, dim: float, length: int, keys: int
) -> tuple[float, float, float, float]:
    """What the time of an attention call is made of: the call, its queries, its pairs in blocks, its longest row.

    Decoding reads all keys once and computes next to nothing. Without a causal mask all blocks take equally long, so
    that they come in waves over the processors; under one, short blocks fill the gaps that long ones leave. On the way
    back such a call has all queries as its last part, not its longest row: their gradients are added up in memory.
    """
    each = batch * heads
    if mask == "decode":
        return 1.0, 0.0, float(batch * kv_heads * keys), float(keys)
    if mask in ("causal", "dropout"):
        blocks = -(-length // 128)
        return 1.0, float(each * length), each * 128 * 128 * blocks * (blocks + 1) / 2, float(keys)
    # Forward a processor holds queries and goes over keys, on the way back the other way round.
    held, passed = (length, keys) if direction == "forward" else (keys, length)
    tile, step = (128, 128) if direction == "forward" else (128 if dim <= 128 else 64, 64)
    rows = -(-each * -(-held // tile) // units) * units * tile
    last = keys if direction == "forward" else each * length
    return 1.0, float(rows), float(rows * step * -(-passed // step)), float(last)


def name_mask(mask: str, keys: int) -> str:
    """A mask that is handed over as a tensor has other kernels where its rows do not start on 16 bytes, or on 4."""
    if mask not in ("window", "apart") or not keys % 8:
        return mask
    return "window-odd" if keys % 2 else "window-even"


def read_curve(curve: Sequence[Sequence[float]], size: float) -> float:
    """Seconds at a size, between and beyond measured ones: in logarithms, constant below, in proportion above."""
    sizes = [point[0] for point in curve]
    at = bisect_left(sizes, size)
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1] * size / curve[-1][0]
    (low, first), (high, second) = curve[at - 1], curve[at]
    share = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(first) * (1 - share) + math.log(second) * share)


MEASURED_ON = "h200-sxm"  # where the shapes of curves come from for devices that were not measured
_ERRORS = {"product": 0.05, "attention": 0.06, "moved": 0.08}
_KERNELS_ERROR = 0.1  # relative error of a time that rests on kernels which others measured on the device
_UNMEASURED = 0.3  # relative error of a time that is scaled from another device by published figures
# Share of its peak that a large product keeps up on devices that were not measured, by the start of their id; of all
# others, Hopper's. Set before the first comparison with published runs (benchmarks/published_runs.py).
_SHARES = {"a100": 0.83, "a800": 0.83, "tpu": 0.82}
_SHARE = 0.72
_STEPS = {4: (4, 2, 1), 2: (2, 4, 1), 1: (1,)}  # step of unaligned widths -> measured steps that tell, nearest first
_NARROW_RATE = 0.6  # of its rate that a format keeps in products of an adapter's rank: one step of rank 64
_NARROW = 64  # rank of an adapter: up to here its products in another format are bound by their bytes
# What a rank is padded to: 48 takes as long as 64 (lora-qwen2-7b in benchmarks/results/blind_steps_5.json).
_NARROW_TILE = 32
# What the host takes for a product of experts: routing, permutations, small kernels, sizes read back. From published
# runs: those that benchmarks/published_training.py marks as fitted.
EXPERT_HOST_S = 1.5e-3
_UNCAST = ("lm_head", "head", "router")  # parts whose products stay in bf16
_FOREACH = 3.0  # bytes that foreach AdamW's eight passes move, over those of the fused one's single pass: 21 / 7
# How many times longer torch's fused AdamW takes for weights whose states are zero: their square roots and quotients
# take a processor's slow path. With it the profiled steps of untied models and of tied ones are fitted best
# (benchmarks/results/predict_profiles.json.gz).
_ZEROS = 1.69


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
            share = next((value for start, value in _SHARES.items() if self.device.id.startswith(start)), _SHARE)
            self.compute *= share * origin.peak_tflops["bf16"] * 1e12 / constants["products"]["shape"][0]
        self.memory = bandwidth / origin.bandwidth_gb_per_s if origin.bandwidth_gb_per_s else 1.0
        self.width = 4 if self.dtype in ("fp32", "tf32") else 2  # bytes of a number; curves are of two
        shape = ProductShape(*constants["products"]["shape"])
        rows = shape.bandwidth * self.memory * 2 / self.width
        self.shape = shape._replace(rate=shape.rate * self.compute, bandwidth=rows)
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

    def is_cast(self, product: Product) -> bool:
        """Whether operands are brought to a narrow format first: those of heads, routers and scans never are."""
        return self.dtype in CAST_FORMATS and product.part not in _UNCAST and product.format != "bf16"

    def _find_error(self, kind: str) -> float:
        return _ERRORS[kind] if self.is_measured else _KERNELS_ERROR if self.has_kernels else _UNMEASURED

    def _find_other(self, kind: str) -> Machine:
        """The same device computing in another format, or in what it falls back to."""
        if kind not in self._others:
            own = find_format_peak(self.device.id, kind)[1]
            self._others[kind] = self if own == self.dtype else Machine(self.device.id, own, self._given)
        return self._others[kind]

    def is_narrow(self, product: Product) -> bool:
        """Whether a product is an adapter's in another format than the rest."""
        is_plain = self.is_measured and self.dtype not in CAST_FORMATS
        return bool(product.format) and is_plain and min(product.m, product.n, product.k) <= _NARROW

    def time_product(self, product: Product) -> KernelTime:
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
        return self.find_product(product.direction, product.m, product.n, product.k, product.copies)

    def _time_narrow(self, product: Product) -> KernelTime | None:
        """An adapter's product in another format, by its form or by its bytes; None where no such was measured."""
        known, error = self.constants["products"], 2 * _ERRORS["product"]
        form, sizes = turn_narrow(product.direction, product.m, product.n, product.k)
        if line := known.get("adapters", {}).get(f"{product.format} {form}"):
            start, per_byte, per_flop = line
            moved, flops = measure_narrow(form, *sizes)
            return KernelTime(start + per_byte * moved + per_flop * flops, error, True)
        if line := known.get("narrow", {}).get(product.format):
            start, per_byte = line
            m, n, k = sizes
            other = self._find_other(product.format)
            padded = pad(min(sizes), _NARROW_TILE) / min(sizes)
            computed = 2.0 * m * n * k * padded / (_NARROW_RATE * other.shape.rate)
            streamed = per_byte * other.width * (m * n + m * k + n * k) / self.memory
            return KernelTime(start + max(computed, streamed), error, True)
        return None

    def time_experts(self, product: Product, kept: float) -> KernelTime:
        """Products of experts in a training framework's step, which keeps up a share of the rate of bursts."""
        if self.plain is not self and not self.is_cast(product):
            return self.plain.time_experts(product, kept)
        sizes = (product.direction, product.copies, product.m, product.n, product.k)
        width = CAST_BYTES.get(self.dtype, self.width)
        computed, moved = time_experts(self.shape, self.bandwidth, width, *sizes)
        seconds = max(computed / kept + moved, EXPERT_CALL_S * product.copies)
        return KernelTime(seconds, 2 * self._find_error("product"), self.is_measured)

    def _find_product(self, direction: str, m: int, n: int, k: int, copies: int) -> KernelTime:
        error = self._find_error("product")
        if not min(m, n, k):
            return KernelTime(0.0, error, self.is_measured)
        if copies > 1:
            group = GroupShape(*self.constants["products"]["grouped"][direction])
            group = group.scale(self.compute, self.memory * 2 / self.width)
            return KernelTime(
                time_grouped(group, self.shape.units, direction, copies, m, n, k), 2 * error, self.is_measured
            )
        seconds = time_shape(self.shape, direction, m, n, k)
        step = find_step(n, k)
        if step < 8:
            slower = self._find_slower(step, direction) if m * n * k > 2**27 else 1.0
            return KernelTime(seconds * slower, 2 * error, self.is_measured)
        ratio, nearness = self._correct(direction, math.log2(m), math.log2(n), math.log2(k))
        return KernelTime(seconds * ratio, error * (2 - nearness), self.is_measured)

    def _find_slower(self, step: int, direction: str) -> float:
        """What widths that are no multiple of 8 cost.

        Steps of 2 that were not measured are as those of 4: kernels for both copy 4 bytes at once, those for 1 do not.
        """
        table = self.constants["products"]["unaligned"]
        for known in _STEPS[step]:
            if direction in table.get(str(known), ()):
                return table[str(known)][direction]
        return 1.0

    def _correct(self, direction: str, m: float, n: float, k: float) -> tuple[float, float]:
        """What shapes nearby took over what the formula gives them, drawn towards 1; how near they are, 0 to 1."""
        total, weights = 0.0, 0.0
        for a, b, c, ratio in self._residuals.get(direction, ()):
            far = (m - a) ** 2 + (n - b) ** 2 + (k - c) ** 2
            if far < 4:
                weight = math.exp(-far / 0.18)
                weights += weight
                total += weight * ratio
        return math.exp(total / (weights + 0.35)), weights / (weights + 0.35)

    def time_cast(self, product: Product) -> KernelTime:
        """Bringing a product's operands to a narrow format: inputs ahead, output gradients behind.

        Weights are kept in the format: the optimizer's step writes them (Megatron-Bridge: fp8_param_gather). Operands
        are written twice, along either dimension, since gradients sum over the other; fp8 has one scale for a tensor,
        whose largest number is looked for first.
        """
        own = product.m * (product.k if product.direction == "forward" else product.n)
        if product.direction == "wgrad":  # both are there
            own = 0
        width = CAST_BYTES[self.dtype]
        reads = 4.0 if self.dtype == "fp8" else 2.0
        moved = MemoryCall(product.module, product.group, product.direction, "pointwise", reads * own, 2 * width * own)
        return self.time_moved(moved) if own else KernelTime(0.0, 0.0, self.is_measured)

    def time_attention(self, call: Attention) -> KernelTime:
        if self.plain is not self:
            return self.plain.time_attention(call)
        error = self._find_error("attention")
        if call.kernel == "eager":
            return KernelTime(self._time_eager(call), error, self.is_measured)
        tables = self.constants["attention"]
        table = tables.get(call.kernel or self.device.sdpa or "flash") or next(iter(tables.values()))
        if call.mask == "decode" and not any("/decode/" in name for name in table):
            # Decoding reads keys, whatever the kernel: any table that has it tells.
            table = next((other for other in tables.values() if any("/decode/" in name for name in other)), table)
        found = self._find_attention(table, call)
        if found is None:
            flops = 2.0 * call.batch * call.heads * call.length * call.keys * (call.qk + call.v)
            return KernelTime(flops / (0.4 * self.peak) + 5e-6, 2 * _UNMEASURED, False)
        (start, query, pair, row), scale = found
        _, queries, pairs, longest = attention_features(
            round(self.shape.units), call.direction, call.mask, call.batch, call.heads, call.kv_heads,
            (call.qk + call.v) / 2, call.length, call.keys,
        )  # fmt: skip
        speed = self._find_speed((call.qk + call.v) / 2) if call.mask != "decode" else self.decode_speed
        seconds = start + (queries * query + pairs * pair + longest * row) * scale / speed
        if call.has_dropout and call.mask == "causal":
            seconds *= self._find_dropping((table, *tables.values()), call)
        return KernelTime(seconds, error if scale == 1 else 2 * error, self.is_measured)

    def _find_speed(self, dim: float) -> float:
        """How much faster attention runs than on the device that was measured, at the nearest known head dim."""
        if not self._attention_speeds:
            return self.compute
        return self._attention_speeds[min(self._attention_speeds, key=lambda known: abs(math.log(known / dim)))]

    def _find_dropping(self, tables: Iterable[Mapping[str, list[float]]], call: Attention) -> float:
        """How many times longer a causal call takes that drops weights, at the nearest head dim with both."""
        mean = (call.qk + call.v) / 2
        for table in tables:
            names = {name.rpartition("/")[2]: name for name in table if name.startswith(f"{call.direction}/dropout/")}
            dims = [dim for dim in names if f"{call.direction}/causal/{dim}" in table]
            if dims:
                dim = min(dims, key=lambda dim: abs(math.log(int(dim) / mean)))
                features = attention_features(
                    round(self.shape.units), call.direction, "causal", call.batch, call.heads, call.kv_heads, int(dim),
                    call.length, call.keys,
                )  # fmt: skip
                dropping, plain = (
                    sum(value * feature for value, feature in zip(table[name], features, strict=True))
                    for name in (names[dim], f"{call.direction}/causal/{dim}")
                )
                return float(dropping / plain)
        return 1.0

    def _find_attention(self, table: Mapping[str, list[float]], call: Attention) -> tuple[list[float], float] | None:
        """Constants of a call's direction, mask and head dim; those of the nearest head dim, scaled, else."""
        mean = (call.qk + call.v) / 2
        wider = "window" if call.mask == "apart" else call.mask
        for mask in (name_mask(call.mask, call.keys), wider, "full"):
            dims = {
                int(name.rpartition("/")[2]): value
                for name, value in table.items()
                if name.startswith(f"{call.direction}/{mask}/")
            }
            if dims:
                nearest = min(dims, key=lambda dim: abs(math.log(dim / mean)))
                return dims[nearest], mean / nearest
        return None

    def _time_eager(self, call: Attention) -> float:
        """Scores, then values, as batched products; the gradients of both."""
        many = call.batch * call.heads
        once = time_matrix(self.shape, call.length, call.keys, call.qk, many)
        once += time_matrix(self.shape, call.length, call.v, call.keys, many)
        return once * (2 if call.direction == "backward" else 1)

    def time_moved(self, moved: MemoryCall) -> KernelTime:
        if self.plain is not self:
            return self.plain.time_moved(moved)
        error = self._find_error("moved")
        size = moved.reads + moved.writes
        name = name_shape(moved.kind, moved.reads, moved.writes)
        curves, lines = self.constants["moved"], self.constants["linear"]
        if moved.direction == "backward" and f"{name}_backward" in curves:
            name += "_backward"
        if moved.direction == "optimizer":
            found = self.constants["optimizer"].get(name)
            start, per_tensor, per_byte = found or self.constants["optimizer"]["adamw"]
            if found is None and name == "adamw-foreach":
                per_byte, error = per_byte * _FOREACH, 2 * error
            if name == "adamw":
                size *= weigh_zeros(moved.unseen)
            return KernelTime(
                start + moved.tensors * per_tensor + size * per_byte / self.memory, error, self.is_measured
            )
        if name == "scan":
            seconds = read_curve(curves["pointwise"], size / self.memory)
            return KernelTime(seconds * math.sqrt(self.memory / self.processors), 2 * error, self.is_measured)
        while name not in curves and name not in lines:  # of a kind that was not measured, the next wider one's
            name, error = name.rpartition("_")[0] or "pointwise_strided", 2 * error
        if name in curves:
            size = find_size(name, moved.reads, moved.writes)
            return KernelTime(read_curve(curves[name], size / self.memory), error, self.is_measured)
        start, per_byte = lines[name]
        return KernelTime(start + size * per_byte / self.memory, error, self.is_measured)
