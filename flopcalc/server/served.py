"""What a serving engine holds and computes of a model: its weights, and what each kind of layer caches."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from flopcalc.base.errors import WorkloadError
from flopcalc.base.spelling import spell
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.estimate.inputs import Inputs, make_load
from flopcalc.core.formats.formats import count_cache_bytes, find_sizes
from flopcalc.core.formats.stored import StoredFormat, make_plain
from flopcalc.core.model.ops import Attend, Chain, Op, Stage, Weighted, iterate, join
from flopcalc.prediction.memory.tensors import find_reach
from flopcalc.prediction.tensor_parallel import count_chains, find_sides
from flopcalc.prediction.work import Side

CacheKind = Literal["full", "window", "latent", "state"]
# Which products a format of four bits holds for in a model with experts, as the publishers' checkpoints have it:
# openai/gpt-oss (mxfp4) and moonshotai/Kimi-K2.5 (int4) quantize the experts alone, nvidia/DeepSeek-R1-FP4 all MLPs.
_EXPERTS_ONLY = ("mxfp4", "int4")
_MLP_ONLY = ("nvfp4",)
_STATE_BYTES = 4  # recurrent states are kept in float32
_CONV_BYTES = 2
_SCAN_KERNELS = 4  # gates, decays, the scan and its norm beside what the spec lists


class ServedWeight(NamedTuple):
    """One linear layer, or one set of experts, in all layers that have it."""

    part: str
    side: Side
    n: int
    k: int
    layers: int
    bytes: float  # of one number, scales included
    name: str  # how it is stored
    compute: str  # format of its products; empty: bf16
    kv: int = 0  # of the n outputs those of keys and values
    kv_heads: int = 0
    experts: int = 1
    active: int = 1

    @property
    def total_bytes(self) -> float:
        return self.layers * self.experts * self.n * self.k * self.bytes


class CachedLayers(NamedTuple):
    """Layers that keep the same for every sequence."""

    kind: CacheKind
    layers: int
    heads: int = 0  # of queries
    kv_heads: int = 0
    qk: int = 0
    v: int = 0
    width: int = 0  # numbers of a token in one layer
    window: int = 0
    state_bytes: int = 0  # of a sequence in one layer, however long


class ServedMedia(NamedTuple):
    """What the towers of images, videos and sound take, for each token of a prompt."""

    products: float = 0.0  # FLOPs
    attention: float = 0.0
    kernels: float = 0.0  # calls


NO_MEDIA = ServedMedia()


class ServedModel(NamedTuple):
    """A model as an engine sees it."""

    name: str
    layers: int
    hidden: int
    weights: tuple[ServedWeight, ...]  # of the language model's products
    head: ServedWeight | None  # computed for one position of a sequence
    cached: tuple[CachedLayers, ...]
    embedding_bytes: float  # tables and the head's weight: cut over tp
    other_bytes: float  # norms, towers: on every rank
    cache_bytes: float  # of one cached number
    expert_layers: int
    kernels: int  # calls of a forward pass, with products of one input joined as engines do
    casts: int  # products whose inputs are brought to a narrow format first
    sums: float  # all-reduces of a forward pass under tensor parallelism
    longest: int  # positions that the config allows; 0: not said

    @property
    def experts(self) -> int:
        return max((weight.experts for weight in self.weights), default=1)


def read_model(estimator: Estimator) -> ServedModel:
    """What an engine serves of a bound model: text in, text out; towers are held and not computed."""
    stages = [stage for stage in estimator.stages if stage.group == "language"]
    layers = sum(len(stage.layers) for stage in stages if stage.repeated)
    name = estimator.source.name
    if not layers or estimator.is_diffusion:
        raise WorkloadError(f"{name} has no repeated language layers: no engine serves it")
    if estimator.has_decoder:
        raise WorkloadError(f"{name} is an encoder-decoder: serving takes decoders alone")
    has_experts = any(op.copies > 1 for stage in stages for chain in stage.kinds for op in iterate(chain))
    weights: list[ServedWeight] = []
    cached: list[CachedLayers] = []
    embedding = other = sums = 0.0
    expert_layers = kernels = casts = 0
    for stage in estimator.stages:
        is_language = stage.group == "language"
        for chain, count in count_chains(stage).items():
            ops = list(iterate(chain))
            sides = find_sides(ops)
            kernels += count * _count_kernels(ops) * is_language
            expert_layers += count * (is_language and any(op.copies > 1 for op in ops))
            joined: dict[tuple[str, int, int], str] = {}
            for op in ops:
                if isinstance(op, Attend) and is_language and op.cache:
                    cached.append(_read_cache(op, count))
                if op.state and is_language:
                    size = op.state * (_CONV_BYTES if op.kind == "conv" else _STATE_BYTES)
                    cached.append(CachedLayers("state", count, state_bytes=size))
                if not isinstance(op, Weighted):
                    continue
                for stored, many in _count_stored(estimator, op, stage, chain, has_experts).items():
                    size = sum(stored.count_bytes(*find_sizes(op), op.copies)) if op.kind != "param" else 0
                    own = many * (size if op.tied is None else 0)
                    if op.kind == "embed" or op.part == "lm_head":
                        embedding += own
                    if op.kind == "linear" and is_language and op in sides:
                        sided, each = sides[op], size / max(1, op.copies * op.n_in * op.n_out)
                        weight = ServedWeight(
                            op.part, sided.side, op.n_out, op.n_in, many, each, stored.name, stored.compute, sided.kv,
                            sided.kv_heads, op.copies, op.active,
                        )  # fmt: skip
                        weights.append(weight)
                        sums += many * (weight.side == "row")
                        joined.setdefault((op.name.rpartition(".")[0], op.n_in, op.copies), stored.compute)
                    elif op.kind != "embed":
                        other += own
            casts += count * sum(bool(compute) for compute in joined.values())
    if not cached:
        raise WorkloadError(f"{name} caches nothing, so it does not generate: serving takes decoders alone")
    # Shared experts are added before the sum over ranks.
    shared = sum(weight.layers for weight in weights if weight.side == "row" and weight.part == "mlp")
    sums += expert_layers - min(expert_layers, shared)
    head = next((weight for weight in weights if weight.part == "lm_head"), None)
    longest = estimator.source.config.get("max_position_embeddings", 0)
    return ServedModel(
        name, layers, stages[-1].width if stages else 0,
        tuple(weight for weight in weights if weight.part != "lm_head"), head, _merge(cached), embedding, other,
        count_cache_bytes(estimator.formats, 1 << 20) / (1 << 20), expert_layers,
        kernels, casts, sums, longest if isinstance(longest, int) else 0,
    )  # fmt: skip


def read_media(
    estimator: Estimator, inputs: Inputs, shortest: int, computed: float, notes: list[str]
) -> ServedMedia:  # fmt: skip
    """The exact products and attention of a request's media. Of its prompt so many tokens are computed."""
    if not any((inputs.image, inputs.image_grid, inputs.video, inputs.video_grid, inputs.audio, inputs.max_pixels)):
        return NO_MEDIA
    load, found = make_load(estimator, inputs.replace(text=1, phase="prefill"))
    tokens, length = load.seq - 1, spell("input_len")
    if tokens >= shortest:
        raise WorkloadError(
            f"images, videos and sound take {tokens:,} of the {shortest:,} tokens of a prompt, whose length includes "
            f"them: give a larger {length}"
        )
    notes += [*found, f"{tokens:,} tokens of each prompt are images, videos or sound: {length} includes them"]
    rows = [
        (each.block.copies, each.block.copies * each.flops.forward, each.row.op.kind == "attend")
        for each in estimator.rows(load, "model")
        if each.block.group != "language"
    ]
    # What a cache holds of a prompt needs no tower.
    attention, every, kernels = (
        sum(column) / max(tokens, computed)
        for column in zip(*((flops * is_pair, flops, many) for many, flops, is_pair in rows), strict=True)
    )
    return ServedMedia(every - attention, attention, kernels)


def _count_kernels(ops: list[Op]) -> int:
    """Calls of a layer: engines join products of one input (queries, keys and values; gate and up)."""
    joined = {(op.name.rpartition(".")[0], op.n_in) for op in ops if op.kind == "linear"}
    return (
        len(joined)
        + sum(op.kind in ("norm", "conv", "attend") for op in ops)
        + (any(op.kind == "product" for op in ops))
        + _SCAN_KERNELS * any(op.state for op in ops)
    )


def _count_stored(
    estimator: Estimator, op: Weighted, stage: Stage, chain: Chain, has_experts: bool
) -> Counter[StoredFormat]:
    """How a weight is stored, and in how many layers of a kind."""
    numbers = [number for number, each in enumerate(stage.layers) if each == chain]
    if not estimator.formats.names_layers:
        return Counter({_find_stored(estimator, op, stage, numbers[0], has_experts): len(numbers)})
    return Counter(_find_stored(estimator, op, stage, number, has_experts) for number in numbers)


def _find_stored(estimator: Estimator, op: Weighted, stage: Stage, number: int, has_experts: bool) -> StoredFormat:
    """How a layer's weight is stored; a format of four bits leaves out what published checkpoints leave out."""
    path = join(f"{stage.path}.{stage.first + number}" if stage.repeated else stage.path, op.name)
    asked = estimator.formats.weights
    if asked is not None and has_experts:
        is_left = asked.name.startswith(_EXPERTS_ONLY) and op.copies == 1
        if is_left or (asked.name.startswith(_MLP_ONLY) and op.part != "mlp"):
            return make_plain(estimator.formats.model)
    return estimator.formats.resolve(op, path, stage.group).weight


def _read_cache(op: Attend, count: int) -> CachedLayers:
    if op.latent:
        return CachedLayers("latent", count, op.heads, 1, op.qk, op.v, op.latent)
    window = find_reach(op)
    kind: CacheKind = "window" if window else "full"
    return CachedLayers(kind, count, op.heads, op.kv_heads, op.qk, op.v, op.cache, window)


def _merge(cached: list[CachedLayers]) -> tuple[CachedLayers, ...]:
    """Layers that keep the same, together."""
    found = Counter[CachedLayers]()
    for each in cached:
        found[each._replace(layers=0)] += each.layers
    return tuple(key._replace(layers=count) for key, count in found.items())
