"""What one GPU of a deployment holds: weights, and the KV cache that an engine makes of the rest."""

from __future__ import annotations

from typing import NamedTuple

from flopcalc.base.errors import DeviceError
from flopcalc.hardware.devices import Device
from flopcalc.server.engines import Engine
from flopcalc.server.served import ServedModel
from flopcalc.server.step import Deployment, cut_cache, cut_weight

_GIB = 1 << 30
_SHOWN = 0.99  # of the memory on the label that a driver shows: 79.2 of 80 GiB (H100), 139.8 of 141 (H200)


class Room(NamedTuple):
    """The memory of one GPU, in bytes; the cache is that of one attention rank."""

    total: float
    weights: float
    activations: float
    cache: float  # negative: the weights alone do not fit
    bytes_per_token: float  # of all layers, as an engine allocates pages
    by_kind: dict[str, float]  # bytes of a token, or of a sequence's states, by kind of layer
    block_size: int
    request: float  # bytes that one request of the asked lengths fills

    @property
    def fits(self) -> bool:
        return self.cache >= self.request

    @property
    def blocks(self) -> int:
        return max(0, int(self.cache / (self.bytes_per_token * self.block_size))) if self.bytes_per_token else 0

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def max_concurrency(self) -> int:
        """Requests of the asked lengths that the cache of one rank holds."""
        return max(0, int(self.cache / self.request)) if self.request else 0


def count_weights(model: ServedModel, layout: Deployment) -> float:
    """Bytes of weights on the fullest GPU: tables lie on the first or last stage of a pipeline."""
    total = model.other_bytes + model.embedding_bytes / layout.tp / min(2, layout.pp)
    for weight in model.weights:
        n, k = cut_weight(weight, layout)
        copies = -(-weight.experts // layout.ep) if weight.experts > 1 else 1
        total += -(-weight.layers // layout.pp) * copies * n * k * weight.bytes
    return total


def count_request(model: ServedModel, layout: Deployment, tokens: int) -> float:
    """Bytes that a request of so many tokens fills on one rank: windows keep their length, states are of one size."""
    total = 0.0
    for layers in model.cached:
        count = -(-layers.layers // layout.pp)
        if layers.kind == "state":
            total += count * layers.state_bytes / layout.tp
        else:
            kept = min(tokens, layers.window) if layers.kind == "window" else tokens
            total += count * cut_cache(layers, layout.tp) * model.cache_bytes * kept
    return total


def find_room(model: ServedModel, layout: Deployment, device: Device, engine: Engine, tokens: int) -> Room:
    """What an engine's cache gets on a device, and what a request of so many tokens takes of it."""
    if device.memory_gb is None:
        raise DeviceError(f"{device.name} has no known memory; add memory_gb to it in your own devices.toml")
    total = device.memory_gb * _GIB * _SHOWN
    weights = count_weights(model, layout)
    widest = max(cut_weight(weight, layout)[0] for weight in model.weights if weight.experts == 1)
    routed = max((each.active * (cut_weight(each, layout)[0] + each.k) for each in model.weights if each.experts > 1),
                 default=0)  # fmt: skip
    # A trial step: streams of the residual's width, the widest product and its activation function, logits.
    activations = 2.0 * engine.max_batched_tokens * (4 * model.hidden + 1.5 * max(widest, routed))
    if model.head is not None:
        activations += engine.logit_bytes * min(engine.max_seqs, engine.max_batched_tokens) * model.head.n
    activations += _GIB * (engine.overhead_gib + engine.graph_gib + engine.rank_gib * (layout.gpus > 1))
    if engine.budget == "free":
        cache = engine.memory_fraction * (total - weights - activations)
    else:
        own = _GIB * (engine.overhead_gib + engine.rank_gib * (layout.gpus > 1))
        held = activations if engine.profiles else own
        cache = engine.memory_fraction * total - weights - held
    by_kind: dict[str, float] = {}
    per_token = 0.0
    for layers in model.cached:
        count = -(-layers.layers // layout.pp)
        if layers.kind == "state":
            by_kind["state"] = by_kind.get("state", 0.0) + count * layers.state_bytes / layout.tp
        else:
            size = count * cut_cache(layers, layout.tp) * model.cache_bytes
            by_kind[layers.kind] = by_kind.get(layers.kind, 0.0) + size
            per_token += size
    request = count_request(model, layout, tokens)
    return Room(total, weights, activations, cache, per_token, by_kind, engine.block_size, request)


def find_longest(model: ServedModel, layout: Deployment, room: Room) -> int:
    """Tokens of the longest request that the cache of one rank holds, within the model's own limit."""
    low, high = 0, model.longest or 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count_request(model, layout, middle) <= room.cache else (low, middle - 1)
    return low
