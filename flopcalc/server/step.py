"""One forward pass of an engine, prompt tokens and decodes together: what it computes and moves, by class of work."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import DeviceError, SpecError
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.hardware.devices import Device, find_device, find_format_peak
from flopcalc.hardware.systems import load_system
from flopcalc.planning.network import find_interconnect, time_collective
from flopcalc.server.served import NO_MEDIA, CachedLayers, ServedMedia, ServedModel, ServedWeight

# Classes of work, which a fit weighs by engine. Seconds at the rates of the device's kernels: floors (the shortest time
# of each product and attention call), expert_floors, dense and experts (their bytes), math (what computing adds),
# kv, attention, sums (collectives), tokens (norms, activation functions). Numbers: all others.
CLASSES = (
    "step", "kernels", "casts", "eager", "sequences", "prompts", "arrivals", "floors", "expert_floors", "dense",
    "experts", "math", "kv", "attention", "sums", "tokens",
)  # fmt: skip
_ATTENTION_SHARE = 0.5  # of its peak that attention keeps up on devices without measured kernels
_POWER = 3  # how compute and memory join: (a³ + b³)^(1/3), a quarter more than the larger where both are equal
_TOKEN_BYTES = 24.0  # that norms, residuals and activation functions move for each number of the residual stream
ROUTED_MOVES = 8  # times that a row of the residual stream is read or written on its way to an expert and back
TILE = 16  # rows that an expert's last tile wastes in the mean
_TOWER_DIM = 64  # of a head in most towers of images and sound
GRID_STEPS = 3  # points of the grid per doubling of the tokens
_KIN = ("b200-sxm", "h100-sxm", "a100-sxm-80gb")  # whose kernels a device without tables has: with fp4, fp8, neither


class Deployment(NamedTuple):
    """How a model is spread: tp and dp are the attention's; experts go over `ep` ranks."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def replicas(self) -> int:
        """Batches that run at once: one for each attention rank, and one in each stage of a pipeline."""
        return self.dp * self.pp


def cut_weight(weight: ServedWeight, layout: Deployment) -> tuple[int, int]:
    """Outputs and inputs of a rank's part of a product."""
    if weight.experts > 1:
        return -(-weight.n * layout.ep // (layout.tp * layout.dp)), weight.k
    if weight.side == "column":
        kv = -(-weight.kv // min(layout.tp, weight.kv_heads)) if weight.kv else 0
        return -(-(weight.n - weight.kv) // layout.tp) + kv, weight.k
    return weight.n, -(-weight.k // layout.tp) if weight.side == "row" else weight.k


def cut_cache(layers: CachedLayers, tp: int) -> float:
    """Numbers of a token that a rank keeps in one layer: no less than one head; latents are kept whole."""
    if layers.kind == "latent" or not layers.kv_heads:
        return float(layers.width)
    return layers.width * max(1, layers.kv_heads // tp) / layers.kv_heads


@cache
def find_peak(device_id: str, compute: str = "") -> float:
    """FLOP/s of products in a format, else in the model's own: fp16 on a GPU that has no bf16."""
    plain = "bf16" if "bf16" in find_device(device_id).peak_tflops else "fp16"
    return find_format_peak(device_id, compute or plain)[0]


class Kernel(NamedTuple):
    """What a kind of kernel keeps up: FLOP/s, bytes/s, and its shortest time."""

    flops: float
    bandwidth: float
    floor: float

    def time(self, flops: float, moved: float) -> tuple[float, float]:
        """Seconds beyond the floor: of moving bytes, and what computing adds to it."""
        memory = moved / self.bandwidth
        return memory, float(((flops / self.flops) ** _POWER + memory**_POWER) ** (1 / _POWER)) - memory


@cache
def load_fitted(name: str = "serving") -> dict[str, Any]:
    """What benchmarks/serving_fit.py made; under the name of serving_kernels, what kernels reach by device."""
    path = os.path.join(find_data_dir(), f"{name}.json")
    data = read_json(path, MAX_JSON_BYTES, SpecError)
    if not isinstance(data, dict) or data.get("schema") != 1 or tuple(data.get("classes", CLASSES)) != CLASSES:
        raise SpecError(f"{path}: is not of this version: the scripts of its name in benchmarks make it")
    return data


class Rates:
    """What a device's kernels keep up under an engine."""

    def __init__(self, device: Device, gpus: int, engine: str = "vllm") -> None:
        if device.bandwidth_gb_per_s is None:
            raise DeviceError(
                f"{device.name} has no known memory bandwidth: add bandwidth_gb_per_s in your devices.toml"
            )
        self.device, self.bandwidth = device, device.bandwidth_gb_per_s * 1e9
        self.system = load_system(device.id)
        kin = _KIN[0 if "nvfp4" in device.peak_tflops else 1 if "fp8" in device.peak_tflops else 2]
        tables = load_fitted("serving_kernels")["devices"]
        twin = self.system.get("same_die_as", kin) if self.system is not None else kin
        self.tables = tables.get(device.id) or tables.get(twin) or tables[kin]
        experts = self.tables["experts"]
        others: dict[str, Any] = next(iter(experts.values()), {})
        own = "trtllm" if engine == "trtllm" else "vllm"
        self.experts = {**others, **experts.get("vllm", {}), **experts.get(own, {})}
        self.net = find_interconnect(None, device.id) if gpus > 1 else None

    def make_kernel(self, shares: Sequence[float], compute: str = "") -> Kernel:
        compute_share, memory_share, floor = shares
        return Kernel(find_peak(self.device.id, compute) * compute_share, self.bandwidth * memory_share, floor)

    def find_product(self, weight: ServedWeight) -> Kernel:
        """The kernel of a linear layer; a format without a table has the nearest one that is computed alike."""
        name = _name_format(weight)
        table = self.tables["products"]
        found = table.get(name) or table.get("fp8" if weight.compute else "bf16") or table["bf16"]
        return self.make_kernel(found, weight.compute)

    def find_experts(self, weight: ServedWeight) -> Kernel:
        """The kernel of a set of experts; Blackwell multiplies mxfp4 weights by fp8."""
        name, compute = _name_format(weight), weight.compute
        if name == "mxfp4" and "mxfp4-fp8" in self.experts:
            name, compute = "mxfp4-fp8", "fp8"
        found = self.experts.get(name) or self.experts.get("fp8-block" if weight.compute else "bf16")
        return self.make_kernel(found or self.tables["products"]["bf16"], compute)

    def find_keys(self, kind: str, cache_bytes: float) -> Kernel:
        """The kernel of attention over cached tokens, one new token a sequence."""
        table = self.tables["latent" if kind == "latent" else "keys"] or self.tables["keys"]
        return self.make_kernel(table.get("fp8" if cache_bytes < 2 else "bf16") or table["bf16"])

    def find_attention(self, dim: float) -> float:
        if self.system is not None and self.system["attention_flops_per_s"]:
            rates = self.system["attention_flops_per_s"]
            return rates[min(rates, key=lambda known: abs(int(known) - dim))]
        return _ATTENTION_SHARE * find_peak(self.device.id)

    def time_sum(self, size: float, ranks: int) -> float:
        """Seconds of an all-reduce of so many bytes: the engines' own kernels inside a node, the network beyond."""
        points = self.tables["sums"].get(str(ranks))
        if points is None or size > points[-1][0]:
            return max(time_collective(self.net, "all_reduce", size, ranks), 5e-6) if self.net is not None else 0.0
        at = min(max(1, bisect_left(points, [size])), len(points) - 1)
        (low, one), (high, other) = points[at - 1], points[at]
        return float(one + (other - one) * max(0.0, (size - low) / (high - low)))


def _name_format(weight: ServedWeight) -> str:
    name = weight.name.partition("-g")[0]
    return {"mxfp8": "fp8", "awq": "int4", "gptq": "int4"}.get(name, name)


def count_distinct(experts: int, active: int, tokens: float) -> float:
    """Experts that at least one of the tokens reaches, where a router prefers none."""
    return float(experts * (1 - (1 - active / experts) ** tokens))


class StepModel:
    """The work of one rank in a step, as amounts by class."""

    def __init__(
        self, model: ServedModel, layout: Deployment, rates: Rates, media: ServedMedia = NO_MEDIA
    ) -> None:  # fmt: skip
        self.model, self.layout, self.rates, self.media = model, layout, rates, media
        # Engines join products of one input, and measured kernels of experts hold both of their products.
        dense = {(each.part, each.k, each.name): each for each in model.weights if each.experts == 1}
        # Narrow formats were timed with their casts: bf16 shows the product alone.
        self.floors = rates.tables["products"]["bf16"][2] * sum(each.layers for each in dense.values())
        self.floors += math.fsum(
            each.layers * rates.find_keys(each.kind, model.cache_bytes).floor for each in model.cached
        )
        self.expert_floors = math.fsum(
            each.layers * rates.find_experts(each).floor
            for each in model.weights
            if each.experts > 1 and each.n == model.hidden
        )

    def count_tokens(self, tokens: float) -> list[float]:
        """What grows with the tokens of a rank's step, and what every step has."""
        model, layout, rates = self.model, self.layout, self.rates
        found = dict.fromkeys(CLASSES, 0.0) | {
            "step": 1.0, "kernels": model.kernels, "casts": model.casts, "floors": self.floors,
            "expert_floors": self.expert_floors,
        }  # fmt: skip
        for weight in model.weights:
            is_expert = weight.experts > 1
            reads, math_s = self._time_experts(weight, tokens) if is_expert else self._time_dense(weight, tokens)
            found["experts" if is_expert else "dense"] += weight.layers * reads
            found["math"] += weight.layers * math_s
        size = 2.0 * tokens * model.hidden
        if layout.tp > 1:
            found["sums"] += model.sums * rates.time_sum(size, layout.tp)
        if layout.dp > 1:  # gathered before the experts, summed up and dealt out behind them
            found["sums"] += model.expert_layers * rates.time_sum(size * layout.dp, layout.tp * layout.dp)
        found["tokens"] = tokens * model.hidden * model.layers * _TOKEN_BYTES / rates.bandwidth
        return [found[name] for name in CLASSES]

    def _time_dense(self, weight: ServedWeight, tokens: float) -> tuple[float, float]:
        n, k = cut_weight(weight, self.layout)
        return self.rates.find_product(weight).time(2.0 * tokens * n * k, n * k * weight.bytes + 2.0 * tokens * (n + k))

    def _time_experts(self, weight: ServedWeight, tokens: float) -> tuple[float, float]:
        n, k = cut_weight(weight, self.layout)
        total = tokens * self.layout.dp
        ep, own = self.layout.ep, weight.experts / self.layout.ep
        reached = count_distinct(weight.experts, weight.active, total) / ep
        rows = total * weight.active / ep
        # All wait for the busiest rank: the largest of `ep` draws lies about √(2 ln ep) deviations above the mean.
        above = math.sqrt(2 * math.log(ep))
        reached = min(own, reached + above * math.sqrt(reached * max(0.0, 1 - reached / own)))
        rows = min(rows * ep, rows + above * math.sqrt(rows))
        moved = reached * n * k * weight.bytes + 2.0 * rows * (n + k + (ROUTED_MOVES - 2) / 2 * self.model.hidden)
        return self.rates.find_experts(weight).time(2.0 * (rows + TILE * reached) * n * k, moved)

    def count_sequences(self, sequences: float) -> list[float]:
        """What grows with the sequences that get a token: the head, and the host's work."""
        found = dict.fromkeys(CLASSES, 0.0)
        found["sequences"] = sequences
        if self.model.head is not None:
            found["dense"], found["math"] = self._time_dense(self.model.head, sequences)
        return [found[name] for name in CLASSES]

    def count_media(self) -> list[float]:
        """What towers take for a token of a prompt: in bf16, cut over tp, launched call by call."""
        media, tp, kernel = self.media, self.layout.tp, self.rates.make_kernel(self.rates.tables["products"]["bf16"])
        found = {"math": media.products / tp / kernel.flops, "kernels": media.kernels, "eager": media.kernels,
                 "attention": media.attention / tp / self.rates.find_attention(_TOWER_DIM)}  # fmt: skip
        return [found.get(name, 0.0) for name in CLASSES]

    def time_keys(self) -> tuple[float, float, tuple[tuple[float, int], ...]]:
        """Seconds of reading one cached token, one sequence's states, and a token of each window, with its length."""
        token = state = 0.0
        windows = []
        for layers in self.model.cached:
            if layers.kind == "state":  # read and written
                state += 2.0 * layers.layers * layers.state_bytes / self.layout.tp / self.rates.bandwidth
                continue
            moved = layers.layers * cut_cache(layers, self.layout.tp) * self.model.cache_bytes
            kernel, flops = self.rates.find_keys(layers.kind, self.model.cache_bytes), 0.0
            if layers.kind == "latent":  # every head multiplies the same latents
                flops = 2.0 * layers.layers * layers.heads / self.layout.tp * (2 * layers.width)
            seconds = sum(kernel.time(flops, moved))
            if layers.kind == "window":
                windows.append((seconds, layers.window))
            else:
                token += seconds
        return token, state, tuple(windows)

    def count_bytes(self, tokens: float, keys: float) -> float:
        """Bytes that a rank must read in a step: weights that tokens reach, and cached keys."""
        total = keys * math.fsum(
            each.layers * cut_cache(each, self.layout.tp) * self.model.cache_bytes
            for each in self.model.cached
            if each.kind in ("full", "latent")
        )
        for weight in self.model.weights:
            n, k = cut_weight(weight, self.layout)
            reached = 1.0
            if weight.experts > 1:
                reached = count_distinct(weight.experts, weight.active, tokens * self.layout.dp) / self.layout.ep
            total += weight.layers * reached * n * k * weight.bytes
        return total

    def count_flops(self) -> float:
        """FLOPs of a token in all products of the whole model, without attention's."""
        weights = [*self.model.weights, *([self.model.head] if self.model.head is not None else [])]
        return math.fsum(2.0 * each.layers * each.active * each.n * each.k for each in weights)

    def time_pairs(self) -> tuple[float, tuple[tuple[float, int], ...]]:
        """Seconds of one query-key pair of a prompt, and the same of layers with each window."""
        pair = 0.0
        windows = []
        for layers in self.model.cached:
            if layers.kind == "state":
                continue
            flops = 2.0 * layers.layers * max(1.0, layers.heads / self.layout.tp) * (layers.qk + layers.v)
            seconds = flops / self.rates.find_attention((layers.qk + layers.v) / 2)
            if layers.kind == "window":
                windows.append((seconds, layers.window))
            else:
                pair += seconds
        return pair, tuple(windows)


class StepCosts:
    """Seconds of steps, quickly: amounts on a grid of tokens, weighed once.

    `weigh` turns amounts by class into seconds; any value that can be added and multiplied will do.
    """

    def __init__(
        self, step: StepModel, weigh: Callable[[Sequence[float]], Any], most_tokens: int, drafts: int = 0,
        graph_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.media = weigh(step.count_media())  # of a token of a prompt
        self.graph_tokens = graph_tokens  # steps with prompts up to this size are graphs, as decodes are
        self.drafts, self.draft_share = drafts, drafts / step.model.layers
        self.grid = _make_grid(most_tokens)
        self.table = [weigh(step.count_tokens(tokens)) for tokens in self.grid]
        self.heads = [weigh(step.count_sequences(tokens)) for tokens in self.grid]
        key, state, windows = step.time_keys()
        self.key, self.state = weigh(_place("kv", key)), weigh(_place("kv", state))
        self.windows = [(weigh(_place("kv", seconds)), length) for seconds, length in windows]
        pair, bounded = step.time_pairs()
        self.pair = weigh(_place("attention", pair))
        self.bounded = [(weigh(_place("attention", seconds)), length) for seconds, length in bounded]
        self.eager = weigh(_place("eager", float(step.model.kernels)))  # steps with prompts are launched call by call
        self.arrival = weigh(_place("arrivals", 1.0))  # the server around the engine
        self.zero = self.arrival * 0
        self.prompt = weigh(_place("prompts", float(step.model.kernels)))  # passes by while others decode

    def run(self, prompt: Sequence[tuple[int, int]], decodes: int, keys: float) -> Any:
        """A step: chunks of prompts (tokens, tokens before them) and decodes that read `keys` tokens in all."""
        tokens = sum(chunk for chunk, _ in prompt)
        checked = decodes * (1 + self.drafts)
        seconds = self.read(self.table, tokens + checked) + self.read(self.heads, checked + len(prompt))
        launched = self.zero if tokens + decodes <= self.graph_tokens else self.eager
        seconds = seconds + self.media * tokens + self._draft(decodes) + launched
        for chunk, before in prompt:
            seconds = seconds + self.pair * (chunk * (before + chunk / 2))
            for each, window in self.bounded:
                seconds = seconds + each * (chunk * min(window, before + chunk / 2))
        return seconds + self._read_keys(decodes, keys) if decodes else seconds

    def find_shift(self, tokens: int) -> Any:
        """What a request waits for beside steps, by the prompt tokens of the step that made its first token."""
        return self.arrival if tokens <= self.graph_tokens else self.arrival + self.prompt

    def decode(self, decodes: int, keys: float, steps: int) -> Any:
        """So many steps of decodes alone; `keys` are those of the first."""
        middle = keys + decodes * (steps - 1) / 2
        checked = decodes * (1 + self.drafts)
        once = self.read(self.table, checked) + self.read(self.heads, checked) + self._read_keys(decodes, middle)
        return (once + self._draft(decodes)) * steps

    def _draft(self, decodes: int) -> Any:
        """The drafts of a step, one after another: each is one layer and the head, as in multi-token prediction."""
        if not self.drafts or not decodes:
            return self.zero
        return self.read(self.table, decodes) * self.draft_share + self.read(self.heads, decodes) * self.drafts

    def _read_keys(self, decodes: int, keys: float) -> Any:
        seconds = self.key * keys + self.state * decodes
        for each, window in self.windows:
            seconds = seconds + each * min(keys, float(decodes * window))
        return seconds

    def read(self, table: Sequence[Any], tokens: float) -> Any:
        """A value between two points of the grid; beyond the last in proportion."""
        at = bisect_left(self.grid, tokens)
        if at >= len(self.grid):
            return table[-1] * (tokens / self.grid[-1])
        if self.grid[at] == tokens or at == 0:
            return table[at]
        low, high = self.grid[at - 1], self.grid[at]
        share = (tokens - low) / (high - low)
        return table[at - 1] * (1 - share) + table[at] * share


def _place(name: str, value: float) -> list[float]:
    return [value if each == name else 0.0 for each in CLASSES]


def _make_grid(most: int) -> list[int]:
    found, at = [1], 1.0
    while found[-1] < most:
        at *= 2 ** (1 / GRID_STEPS)
        if round(at) > found[-1]:
            found.append(round(at))
    return found
