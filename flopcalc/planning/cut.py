"""A step's work and tensors cut by a layout: what one device does for a micro-batch, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from flopcalc.base.errors import WorkloadError
from flopcalc.base.vocabulary import LayoutRecompute
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Attend, Chain, Linear, Op, iterate
from flopcalc.core.workload.workload import Workload
from flopcalc.planning.layout import Layout, Outline, split_layers
from flopcalc.prediction.memory.peak import Shards, Tensors
from flopcalc.prediction.memory.tensors import Part, SplitBytes, number_layers
from flopcalc.prediction.tensor_parallel import count_chains
from flopcalc.prediction.timeline import Stack, find_place
from flopcalc.prediction.work import Attention, HostCall, MemoryCall, ProductCall, Work


def make_outline(estimator: Estimator, load: Workload) -> Outline:
    """What a layout asks of a bound model, for one sample of a workload."""
    stages = [stage for stage in estimator.stages if stage.repeated and stage.group == "language"]
    layers = [chain for stage in stages for chain in stage.layers]
    if not layers:
        raise WorkloadError(f"{estimator.source.name} has no repeated language layers to spread over devices")
    ops = [op for chain in dict.fromkeys(layers) for op in iterate(chain)]
    cores = [op for op in ops if isinstance(op, Attend)]
    keys = [op.kv_heads * (op.qk + op.v) for chain in layers for op in iterate(chain) if isinstance(op, Attend)]
    exits = [many * _count_exits(chain) for stage in stages for chain, many in count_chains(stage).items()]
    kinds = tuple(number_layers(estimator).values())
    routed = {kinds[place] for place, chain in enumerate(layers) if any(op.copies > 1 for op in iterate(chain))}
    return Outline(
        layers=len(layers),
        hidden=stages[-1].width,
        tokens=load.tokens,
        heads=max((op.heads for op in cores), default=1),
        experts=max((op.copies for op in ops if op.kind in ("linear", "conv")), default=1),
        active=max((op.active for op in ops if op.copies > 1), default=1),
        exits=max(1.0, sum(exits) / len(layers)),
        keys=sum(keys) / len(layers),
        key_heads=max((op.kv_heads for op in cores), default=1),
        head_dim=max((op.qk for op in cores), default=0),
        kinds=kinds,
        routed=tuple(sorted(routed)),
        groups=max((op.groups for op in ops if isinstance(op, Linear)), default=(1, 1)),
        losses=max(
            1,
            sum(
                any(
                    op.part == "lm_head" and op.kind == "linear"
                    for chain in count_chains(stage)
                    for op in iterate(chain)
                )
                for stage in estimator.stages
            ),
        ),
    )


def _count_exits(chain: Chain) -> float:
    """Tensors of a layer that tensor parallelism sums up: one for attention and MLP that stand side by side."""
    rows = sum(_is_row(op) for op in iterate(chain))
    branches = [item for item in chain if not isinstance(item, Op)]
    leaving = [
        sum(any(op.kind == "attend" or _is_row(op) for op in iterate(branch)) for branch in item) for item in branches
    ]
    return rows - sum(max(0, many - 1) for many in leaving)


def _is_row(op: Op) -> bool:
    return isinstance(op, Linear) and op.split == "row" and op.copies == 1


# --- what a device does -----------------------------------------------------------------------------------------------
def cut_work(work: Work, layout: Layout, imbalance: float = 1.0) -> Work:
    """The busiest device's share of a micro-batch, for all layers: by tensor, context and expert parallelism.

    `imbalance` is the rows of the busiest device's experts over the mean; no device has more than all rows.
    """
    if layout.tp == layout.cp == layout.ep == 1:
        return work
    most = min(imbalance, layout.ep)
    routed = {product.module for product in work.products if product.is_expert}
    return work._replace(
        products=tuple(cut_product(product, layout, most) for product in work.products),
        attention=tuple(part for call in work.attention for part in _cut_attention(call, layout)),
        moved=(
            *(_cut_moved(moved, layout, most if moved.module in routed else 1.0) for moved in work.moved),
            *(merged for call in work.attention for merged in _merge_ring(call, layout)),
        ),
    )


def cut_product(product: ProductCall, layout: Layout, imbalance: float = 1.0) -> ProductCall:
    """The product of one device."""
    _, m, n, k, copies, _ = product.size
    (side, keys, key_heads), tp, rows = product.split, layout.tp, m / layout.cp
    if side == "column":
        n = -(-(n - keys) // tp) + (-(-keys // min(tp, key_heads)) if keys else 0)
    elif side == "row":
        k = -(-k // tp)
    elif side == "expert":
        # Experts are not cut: each device of a tp group hands on its own part of the tokens.
        rows, copies = imbalance * rows / tp, max(1, copies // layout.ep)
    elif layout.is_sequence_parallel:
        rows = rows / tp
    return product._replace(size=product.size._replace(m=max(1, round(rows)), n=n, k=k, copies=copies))


def _is_ring(call: Attention, layout: Layout) -> bool:
    """Whether context parallelism cuts a call: each device holds two pieces of its sequence."""
    return layout.cp > 1 and call.length >= 2 * layout.cp


def _cut_attention(call: Attention, layout: Layout) -> Iterator[Attention]:
    """One device's part of an attention call: its queries against its own keys, then those of each other device."""
    tp, cp = layout.tp, layout.cp
    call = call._replace(heads=max(1, call.heads // tp), kv_heads=max(1, call.kv_heads // tp))
    if not _is_ring(call, layout):
        yield call
        return
    # Each device holds an early and a late piece of the sequence, so that under a causal mask all have half to do: with
    # the keys of another device as many pairs as with its own.
    yield call._replace(length=call.length // cp, keys=call.keys // cp, calls=call.calls * cp)


def _merge_ring(call: Attention, layout: Layout) -> Iterator[MemoryCall]:
    """What each further device's keys make a device add up: outputs in fp32, or gradients of queries, keys and values.

    As Transformer Engine does it (context_parallel.py): an output is corrected by what the softmax of all keys is.
    """
    if not _is_ring(call, layout):
        return
    rows = call.batch * call.length // layout.cp
    queries, keys = (rows * max(1, heads // layout.tp) for heads in (call.heads, call.kv_heads))
    if call.direction == "forward":
        reads, writes = (2.0 + 4.0) * queries * call.v, 4.0 * queries * call.v
    else:
        added = queries * call.qk + keys * (call.qk + call.v)
        reads, writes = 2 * 2.0 * added, 2.0 * added
    calls = call.calls * (layout.cp - 1)
    yield MemoryCall(call.module, call.group, call.direction, "pointwise", reads, writes, calls, call.is_again)


def _cut_moved(moved: MemoryCall, layout: Layout, imbalance: float) -> MemoryCall:
    if moved.direction == "optimizer":
        return moved
    share = layout.cp * (1 if moved.width == "wide" and not layout.is_sequence_parallel else layout.tp) / imbalance
    return moved._replace(reads=moved.reads / share, writes=moved.writes / share)


def repeat_work(work: Work, recompute: LayoutRecompute) -> Work:
    """The work with what a kind of recomputation runs again; `work` recomputes all for half, else nothing."""
    if recompute == "half":  # every second layer
        halves = [each._replace(calls=each.calls / 2) if each.is_again else each for each in work.products]
        cores = [each._replace(calls=each.calls / 2) if each.is_again else each for each in work.attention]
        moved = [each._replace(calls=each.calls / 2) if each.is_again else each for each in work.moved]
        hosted = [each._replace(many=each.many / 2) if each.way == "again" else each for each in work.hosted]
        return work._replace(products=tuple(halves), attention=tuple(cores), moved=tuple(moved), hosted=tuple(hosted))
    if recompute in ("light", "offload"):
        inside = tuple(f"{stack.path}." for stack in work.stacks if stack.is_language)
        lifted = [each._replace(is_again=True) for each in work.products if each.is_lifting]
        cheap = [each for each in work.moved if each.is_cheap and each.direction == "forward"]
        renewed = [each._replace(is_again=True) for each in cheap if each.module.startswith(inside)]
        return work._replace(products=(*work.products, *lifted), moved=(*work.moved, *renewed))
    if recompute == "selective":
        ahead = [each for each in work.attention if each.direction == "forward" and each.group == "language"]
        again = [each._replace(is_again=True) for each in ahead]
        sent = [HostCall(each.module, each.group, "again", "attention", each.calls) for each in again]
        softmax = {each.module for each in again}
        scores = [
            each._replace(is_again=True)
            for each in work.moved
            if each.kind == "softmax" and each.direction == "forward" and each.module in softmax
        ]
        return work._replace(
            attention=(*work.attention, *again),
            moved=(*work.moved, *scores),
            hosted=(*work.hosted, *sent) if work.hosted else (),
        )
    return work


class Section(NamedTuple):
    """The part of a pipeline that one device has."""

    layers: int
    has_first: bool = True  # what comes before the layers
    has_last: bool = True  # and after
    in_flight: float = 1.0  # micro-batches that are on their way when the first comes back
    kinds: tuple[int, ...] = ()  # layers of each kind; without, a share of every kind
    devices: int = 1  # of the pipeline that have such a part

    def strip(self) -> Section:
        """What its computation depends on."""
        return self._replace(in_flight=1.0, devices=1)


@lru_cache(maxsize=65536)
def list_sections(model: Outline, pp: int = 1, virtual: int = 1) -> tuple[Section, ...]:
    """The devices of a pipeline that differ: of those with the same layers the one with the most in flight."""
    kinds = model.kinds or (0,) * model.layers
    found: dict[tuple[object, ...], Section] = {}
    for rank, own in enumerate(split_layers(kinds, pp, virtual, model.losses)):
        ends = (rank == 0, rank == pp - 1)
        # Forward passes before the first backward one, each of a chunk of layers (1F1B, interleaved or not).
        ahead = pp - rank if virtual == 1 else 2 * (pp - rank - 1) + (virtual - 1) * pp + 1
        first = found.setdefault((*ends, own), Section(sum(own), *ends, ahead / virtual, own, 0))
        found[(*ends, own)] = first._replace(devices=first.devices + 1)
    return tuple(found.values())


def take_section(work: Work, section: Section, layers: int, stepped: float) -> Work:
    """The work of a section's layers and ends; `stepped` is its share of what the optimizer goes over."""
    if section.layers == layers and section.has_first and section.has_last and stepped == 1:
        return work
    share = section.layers / layers
    shares = {"layers": share, "first": float(section.has_first), "last": float(section.has_last), "optimizer": 1.0}

    def find(module: str, group: str) -> float:
        return shares[locate(module, group, work.stacks)]

    moved = []
    for each in work.moved:
        if each.direction == "optimizer":
            reads, writes, tensors = (value * stepped for value in (each.reads, each.writes, each.tensors))
            moved.append(each._replace(reads=reads, writes=writes, tensors=tensors))
        else:
            moved.append(each._replace(calls=each.calls * find(each.module, each.group)))
    hosted = [
        each._replace(many=each.many * (stepped if each.way == "optimizer" else find(each.module, each.group)))
        for each in work.hosted
    ]
    return work._replace(
        products=tuple(each._replace(calls=each.calls * find(each.module, each.group)) for each in work.products),
        attention=tuple(each._replace(calls=each.calls * find(each.module, each.group)) for each in work.attention),
        moved=tuple(moved),
        hosted=tuple(hosted),
        stacks=tuple(
            stack._replace(layers=max(1, round(stack.layers * share))) if stack.is_language else stack
            for stack in work.stacks
        ),
    )


@lru_cache(maxsize=4096)
def locate(module: str, group: str, stacks: tuple[Stack, ...]) -> str:
    """Where a module is: in the language model's layers, before them (first), after them (last), or optimizer."""
    if group == "optimizer":
        return group
    language = [i for i, stack in enumerate(stacks) if stack.is_language]
    stage, _ = find_place(module, group, stacks)
    if stage in language:
        return "layers"
    return "last" if stage > language[0] and group == "language" else "first"


# --- what a device holds ----------------------------------------------------------------------------------------------
def make_shards(layout: Layout, section: Section, model: Outline, batches: int) -> Shards:
    """What of a step's tensors a device of a section holds."""
    kinds: tuple[tuple[int, int], ...] = ()
    if section.kinds and section.layers < model.layers:
        kinds = tuple((own, model.kinds.count(kind)) for kind, own in enumerate(section.kinds) if model.kinds)
    return Shards(
        zero=layout.zero, ranks=layout.dp * layout.cp, expert_ranks=layout.expert_dp, tensor=layout.tp,
        experts=layout.ep, sequence=layout.cp, is_spread=layout.is_sequence_parallel,
        layers=(section.layers, model.layers), has_first=section.has_first, has_last=section.has_last,
        in_flight=min(section.in_flight, float(batches)), kinds=kinds,
    )  # fmt: skip


def mix_tensors(kept: Tensors, again: Tensors) -> Tensors:
    """Of a step that recomputes every second layer, from one that keeps everything and one that recomputes all."""
    return kept._replace(parts=tuple(_mix(*pair) for pair in zip(kept.parts, again.parts, strict=True)))


def offload_tensors(kept: Tensors) -> Tensors:
    """Of a step that keeps every second layer's activations in the host's memory; the layer that is copied stays."""
    found = []
    for part in kept.parts:
        if not part.is_language:
            found.append(part)
            continue
        kinds = tuple(kind._replace(kept=_halve(kind.kept, SplitBytes())) for kind in part.kinds)
        each = part.kept.total // part.layers
        found.append(
            part._replace(
                kept=_halve(part.kept, SplitBytes()), extra=part.extra + each, kinds=kinds, outputs=part.outputs // 2
            )
        )
    return kept._replace(parts=tuple(found))


def _mix(one: Part, other: Part) -> Part:
    kinds = tuple(
        own._replace(kept=_halve(own.kept, same.kept)) for own, same in zip(one.kinds, other.kinds, strict=True)
    )
    return one._replace(
        kept=_halve(one.kept, other.kept),
        extra=max(one.extra, other.extra),
        kinds=kinds,
        outputs=(one.outputs + other.outputs) // 2,
    )


def _halve(one: SplitBytes, other: SplitBytes) -> SplitBytes:
    return SplitBytes((one.dense + other.dense) // 2, (one.other + other.other) // 2)


class PlaceWeights(NamedTuple):
    """Weights of a place in bytes and its trained parameters, dense and of experts."""

    held: SplitBytes = SplitBytes()
    trained: SplitBytes = SplitBytes()


def sum_weights(parts: Sequence[Part]) -> dict[str, PlaceWeights]:
    """first, layers (all of them) and last -> their weights."""
    found = {"first": PlaceWeights(), "layers": PlaceWeights(), "last": PlaceWeights()}
    for part in parts:
        name = "layers" if part.is_language else "last" if part.is_last else "first"
        at = found[name]
        found[name] = PlaceWeights(_add(at.held, part.weights), _add(at.trained, part.trained))
    return found


def _add(one: SplitBytes, other: SplitBytes) -> SplitBytes:
    return SplitBytes(one.dense + other.dense, one.other + other.other)
