"""One forward pass of an engine, prompt tokens and decodes together: what it computes and moves, by class of work."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from flopcalc.base.errors import DeviceError
from flopcalc.hardware.devices import Device, find_format_peak
from flopcalc.hardware.systems import System, load_system
from flopcalc.planning.network import Interconnect, find_interconnect
from flopcalc.server.served import CachedLayers, ServedModel, ServedWeight

# Classes of work, which a fit weighs by engine. Seconds at the rates of the device's kernels: dense, experts, packed
# (experts whose weights are unpacked first), kv, attention, sums (bytes of collectives), tokens (norms, activation
# functions). Numbers: all others.
CLASSES = (
    "step", "kernels", "casts", "eager", "expert_layers", "sequences", "sum_calls", "dense", "experts",
    "packed", "kv", "attention", "sums", "tokens", "prompts",
)  # fmt: skip
_SHARE = 0.72  # of its peak that a product keeps up on devices without measured kernels
_ATTENTION_SHARE = 0.5
_READ_SHARE = 0.8  # of the bandwidth that reading keys keeps up there
_POWER = 3  # how compute and memory join: (a³ + b³)^(1/3), a third more than the larger where both are equal
_TOKEN_BYTES = 24.0  # that norms, residuals and activation functions move for each number of the residual stream
_ROUTED_BYTES = 8.0  # that handing a token to one expert and back moves for each number
_TILE = 16  # rows of an expert's smallest tile
GRID_STEPS = 3  # points of the grid per doubling of the tokens


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
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.tp * self.dp // self.ep

    @property
    def replicas(self) -> int:
        """Batches that run at once: one for each attention rank, and one in each stage of a pipeline."""
        return self.dp * self.pp


def cut_weight(weight: ServedWeight, layout: Deployment) -> tuple[int, int]:
    """Outputs and inputs of a rank's part of a product."""
    if weight.experts > 1:
        return -(-weight.n // layout.expert_tp), weight.k
    if weight.side == "column":
        kv = -(-weight.kv // min(layout.tp, weight.kv_heads)) if weight.kv else 0
        return -(-(weight.n - weight.kv) // layout.tp) + kv, weight.k
    return weight.n, -(-weight.k // layout.tp) if weight.side == "row" else weight.k


def cut_cache(layers: CachedLayers, tp: int) -> float:
    """Numbers of a token that a rank keeps in one layer: no less than one head; latents are kept whole."""
    if layers.kind == "latent" or not layers.kv_heads:
        return float(layers.width)
    return layers.width * max(1, layers.kv_heads // tp) / layers.kv_heads


_find_peak = cache(find_format_peak)  # asked for at every point of a grid


class Rates(NamedTuple):
    """What a device's kernels keep up."""

    device: Device
    bandwidth: float
    read: float  # bytes per second of cached keys
    system: System | None
    net: Interconnect | None

    def find_flops(self, compute: str) -> float:
        """FLOP/s of large products in a format; what the device lacks runs in bf16."""
        peak, own = _find_peak(self.device.id, compute or "bf16")
        if self.system is not None and own in self.system["products"]:
            return self.system["products"][own]["shape"][0]
        return _SHARE * peak

    def find_attention(self, dim: float) -> float:
        if self.system is not None and self.system["attention_flops_per_s"]:
            rates = self.system["attention_flops_per_s"]
            return rates[min(rates, key=lambda known: abs(int(known) - dim))]
        return _ATTENTION_SHARE * _find_peak(self.device.id, "bf16")[0]


def find_rates(device: Device, gpus: int) -> Rates:
    """The rates of a device among so many."""
    if device.bandwidth_gb_per_s is None:
        raise DeviceError(f"{device.name} has no known memory bandwidth: add bandwidth_gb_per_s in your devices.toml")
    system = load_system(device.id)
    bandwidth = device.bandwidth_gb_per_s * 1e9
    read = system["decode_bytes_per_s"] if system is not None else _READ_SHARE * bandwidth
    return Rates(device, bandwidth, read, system, find_interconnect(None, device.id) if gpus > 1 else None)


def _join(compute: float, memory: float) -> float:
    return float((compute**_POWER + memory**_POWER) ** (1 / _POWER))


def count_distinct(experts: int, active: int, tokens: float) -> float:
    """Experts that at least one of the tokens reaches, where a router prefers none."""
    return float(experts * (1 - (1 - active / experts) ** tokens))


class StepModel:
    """The work of one rank in a step, as amounts by class."""

    def __init__(self, model: ServedModel, layout: Deployment, rates: Rates) -> None:
        self.model, self.layout, self.rates = model, layout, rates
        self.calls = model.sums if layout.tp > 1 else 0.0
        if layout.dp > 1:
            self.calls += 2.0 * model.expert_layers

    def count_tokens(self, tokens: float) -> list[float]:
        """What grows with the tokens of a rank's step, and what every step has."""
        model, layout, rates = self.model, self.layout, self.rates
        found = dict.fromkeys(CLASSES, 0.0)
        found.update(step=1.0, kernels=model.kernels, casts=model.casts, sum_calls=self.calls)
        found["expert_layers"] = model.expert_layers
        for weight in model.weights:
            if weight.experts > 1:
                is_packed = weight.bytes < 2 and not self._find_compute(weight)
                found["packed" if is_packed else "experts"] += weight.layers * self._time_experts(weight, tokens)
            else:
                found["dense"] += weight.layers * self._time_dense(weight, tokens)
        size = 2.0 * tokens * model.hidden
        if rates.net is not None:
            rate = rates.net.inside[-1][1]
            if layout.tp > 1:
                found["sums"] += model.sums * size * 2 * (layout.tp - 1) / layout.tp / rate
            if layout.dp > 1:  # gathered before the experts, summed up and dealt out behind them
                ranks = layout.tp * layout.dp
                found["sums"] += model.expert_layers * 2 * size * layout.dp * (ranks - 1) / ranks / rate
        moved = model.hidden * (model.layers * _TOKEN_BYTES + model.routed * _ROUTED_BYTES)
        found["tokens"] = tokens * moved / rates.bandwidth
        return [found[name] for name in CLASSES]

    def _find_compute(self, weight: ServedWeight) -> str:
        """What a product is computed in; a device with fp4 multiplies mxfp4 weights by fp8."""
        if weight.compute or weight.bytes >= 1 or weight.name != "mxfp4":
            return weight.compute
        return "fp8" if _find_peak(self.rates.device.id, "mxfp4")[1] == "mxfp4" else ""

    def _time_dense(self, weight: ServedWeight, tokens: float) -> float:
        n, k = cut_weight(weight, self.layout)
        moved = n * k * weight.bytes + 2.0 * tokens * (n + k)
        return _join(2.0 * tokens * n * k / self.rates.find_flops(weight.compute), moved / self.rates.bandwidth)

    def _time_experts(self, weight: ServedWeight, tokens: float) -> float:
        n, k = cut_weight(weight, self.layout)
        total = tokens * self.layout.dp
        ep, own = self.layout.ep, weight.experts / self.layout.ep
        reached = count_distinct(weight.experts, weight.active, total) / ep
        rows = total * weight.active / ep
        # All wait for the busiest rank: the largest of `ep` draws lies about √(2 ln ep) deviations above the mean.
        above = math.sqrt(2 * math.log(ep))
        reached = min(own, reached + above * math.sqrt(reached * max(0.0, 1 - reached / own)))
        rows = min(rows * ep, rows + above * math.sqrt(rows))
        padded = max(rows, reached * min(_TILE, rows))
        moved = reached * n * k * weight.bytes + 2.0 * rows * (n + k)
        return _join(
            2.0 * padded * n * k / self.rates.find_flops(self._find_compute(weight)), moved / self.rates.bandwidth
        )

    def count_sequences(self, sequences: float) -> list[float]:
        """What grows with the sequences that get a token: the head, and the host's work."""
        found = dict.fromkeys(CLASSES, 0.0)
        found["sequences"] = sequences
        if self.model.head is not None:
            found["dense"] = self._time_dense(self.model.head, sequences)
        return [found[name] for name in CLASSES]

    def time_keys(self) -> tuple[float, float, tuple[tuple[float, int], ...]]:
        """Seconds of reading one cached token, one sequence's states, and a token of each window, with its length."""
        token = state = 0.0
        windows = []
        for layers in self.model.cached:
            if layers.kind == "state":  # read and written
                state += 2.0 * layers.layers * layers.state_bytes / self.layout.tp / self.rates.bandwidth
                continue
            size = layers.layers * cut_cache(layers, self.layout.tp) * self.model.cache_bytes
            seconds = size / self.rates.read
            if layers.kind == "latent":  # every head multiplies the same latents
                heads = layers.layers * layers.heads / self.layout.tp
                flops = 2.0 * heads * (2 * layers.width)
                seconds = _join(seconds, flops / self.rates.find_attention(256))
            if layers.kind == "window":
                windows.append((seconds, layers.window))
            else:
                token += seconds
        return token, state, tuple(windows)

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

    def __init__(self, step: StepModel, weigh: Callable[[Sequence[float]], Any], most_tokens: int) -> None:
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
        self.prompt = weigh(_place("prompts", float(step.model.kernels)))  # passes by while others decode
        self.zero = self.prompt * 0

    def run(self, prompt: Sequence[tuple[int, int]], decodes: int, keys: float) -> Any:
        """A step: chunks of prompts (tokens, tokens before them) and decodes that read `keys` tokens in all."""
        tokens = sum(chunk for chunk, _ in prompt)
        seconds = self.read(self.table, tokens + decodes) + self.read(self.heads, decodes + len(prompt))
        seconds = seconds + self.eager
        for chunk, before in prompt:
            seconds = seconds + self.pair * (chunk * (before + chunk / 2))
            for each, window in self.bounded:
                seconds = seconds + each * (chunk * min(window, before + chunk / 2))
        return seconds + self._read_keys(decodes, keys) if decodes else seconds

    def decode(self, decodes: int, keys: float, steps: int) -> Any:
        """So many steps of decodes alone; `keys` are those of the first."""
        middle = keys + decodes * (steps - 1) / 2
        once = self.read(self.table, decodes) + self.read(self.heads, decodes) + self._read_keys(decodes, middle)
        return once * steps

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
