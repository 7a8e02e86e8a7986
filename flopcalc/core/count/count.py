"""The only file with FLOP formulas: stages and a recipe in, rows of coefficients per feature out.

Every count is linear in the workload's features, so a row holds one coefficient per direction; the FLOPs of a
workload are coefficient x feature, summed. Backward work follows gradients through the dataflow: `flows` says
whether a gradient is owed to the tensor an op reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flopcalc.core.count.flops import NO_FLOPS, Flops
from flopcalc.core.model.ops import Chain, Op, Stage, iterate, join
from flopcalc.core.recipe.resolver import ALL_TRAIN, STATELESS, Resolver, State
from flopcalc.core.workload.sums import BLOCK, Feature, block_pairs


class Row(NamedTuple):
    """One op of one layer: FLOPs per unit of its feature, and its parameters."""

    op: Op
    forward: int = 0
    backward: int = 0
    recompute: int = 0
    parameters: int = 0
    inactive: int = 0  # parameters of experts that one token does not reach
    trainable: int = 0
    owes_weight: bool = False  # backward holds the gradient of its weight, not only of its input
    clipping: int = 0  # of per-sample clipping, beyond what plain training needs

    @property
    def flops(self) -> Flops:
        return Flops(self.forward, self.backward, self.recompute, self.clipping)


class Block(NamedTuple):
    """Layers of a stage that count alike, and the rows of one of them."""

    path: str
    layers: tuple[int, ...] | None  # None: not a repeated stage
    group: str
    rows: tuple[Row, ...]

    @property
    def copies(self) -> int:
        return 1 if self.layers is None else len(self.layers)


class KernelShape(NamedTuple):
    """How a fused attention kernel executes one head dim: measured, else blocks of 128 and no padding."""

    block_forward: int = BLOCK
    block_backward: int = BLOCK
    # Executed over needed where every pair is wanted: a head dim padded to the kernel's own width.
    pad_forward: tuple[int, int] = (1, 1)
    pad_backward: tuple[int, int] = (1, 1)


class Mode(NamedTuple):
    """What the counting depends on beyond model and recipe."""

    has_images: bool = False
    has_audio: bool = False
    is_fused: bool = False  # attention in one kernel: its backward recomputes the scores
    recompute: str = "none"  # effective: 'none' outside convention hardware
    shapes: tuple[tuple[tuple[int, int], KernelShape], ...] = ()  # (qk, v) -> what was measured of the kernel
    is_hardware: bool = False  # counts what is recomputed
    clipping: str = "none"  # effective likewise
    is_functorch: bool = False  # its linear layers but the head are no torch.nn.Linear, which Opacus knows


# --- FLOPs of one op, per unit of its feature ---------------------------------------------------------------------
def product_flops(op: Op) -> int:
    """A (rows, in) by (in, out) product: 2 · in · out per row. A convolution's `in` is channels x kernel.

    A weight that is looked up by position before it is multiplied says its FLOPs itself.
    """
    return (op.flops or 2 * op.n_in * op.n_out) * op.times


def score_flops(op: Op) -> int:
    """Queries by keys: (q, qk) · (qk, k), 2 · heads · qk per pair."""
    return 2 * op.heads * op.qk * op.times


def value_flops(op: Op) -> int:
    """Probabilities by values: (q, k) · (k, v), 2 · heads · v per pair."""
    return 2 * op.heads * op.v * op.times


def fold_flops(op: Op, rank: int) -> int:
    """LoRA on a bare parameter is folded into it: (out, r) · (r, in) for every copy, whatever the rows."""
    return 2 * op.copies * rank * op.n_in * op.n_out


def fused_flops(op: Op, shape: KernelShape, mask: str, length: int) -> tuple[int, int]:
    """Forward and backward of one fused call by the kernel's constants: pairs in blocks, head dims padded."""
    scores, values = score_flops(op), value_flops(op)
    full = length * length
    ahead = block_pairs(length, 0, shape.block_forward) if mask == "causal" else full
    behind = block_pairs(length, 0, shape.block_backward) if mask == "causal" else full
    forward = (scores + values) * shape.pad_forward[0] // shape.pad_forward[1] * ahead
    return forward, (3 * scores + 2 * values) * shape.pad_backward[0] // shape.pad_backward[1] * behind


def adapter_flops(op: Op, rank: int) -> tuple[int, int]:
    """LoRA's two products: (rows, in) · (in, r) and (rows, r) · (r, out); an embedding's first is a look-up."""
    if op.kind == "embed":
        return 0, 2 * rank * op.size * op.times
    return 2 * op.n_in * rank * op.times, 2 * rank * op.n_out * op.times


def sample_flops(n_in: int, n_out: int) -> int:
    """Every sample's own weight gradient: (out, rows) · (rows, in) per sample, 2 · in · out per row."""
    return 2 * n_in * n_out


def gram_flops(size: int) -> int:
    """The rows of one sample by each other: (rows, size) · (size, rows), 2 · size per pair of rows.

    torch.einsum multiplies elements instead where it sums over one entry alone: no product then.
    """
    return 2 * size if size > 1 else 0


def clip_flops(parameters: int) -> int:
    """Factors by per-sample gradients: (1, samples) · (samples, parameters), 2 per parameter and sample."""
    return 2 * parameters


# --- parameters -----------------------------------------------------------------------------------------------------
def weight_parameters(op: Op) -> int:
    if op.tied:
        return 0
    if op.kind in ("linear", "conv"):
        return op.n_in * op.n_out * op.copies
    if op.kind == "embed":
        return op.n_in * op.size
    return op.size * op.copies


def bias_parameters(op: Op) -> int:
    return (op.size if op.kind == "norm" else op.n_out) * op.copies if op.bias else 0


def adapter_parameters(op: Op, rank: int) -> tuple[int, int]:
    if op.kind == "embed":
        return op.n_in * rank, rank * op.size
    return op.copies * op.n_in * rank, op.copies * rank * op.n_out


# --- the pass -------------------------------------------------------------------------------------------------------
class _Step(NamedTuple):
    """A product in order of execution: FLOPs, whether autograd saves a tensor for it, and when."""

    row: int
    flops: int
    saves: bool
    saves_output: bool = False  # then it has run by the time it saves


class _Layer:
    """Counts one chain: forward, backward by flowing gradients, and what checkpointing runs again."""

    def __init__(self, states: Iterator[State] | None, mode: Mode, streams: dict[str, bool] | None = None) -> None:
        self.states = states  # in order of execution; None: everything trains
        self.streams = streams or {}  # does a gradient flow into the output of each stream so far
        self.mode = mode
        self.rows: list[Row] = []
        self.steps: list[_Step] = []

    def run(self, chain: Chain, flows: tuple[bool, ...]) -> tuple[bool, ...]:
        for item in chain:
            if isinstance(item, Op):
                flows = (self._op(item, flows),)
            else:
                branches = [self.run(branch, flows) for branch in item]
                flows = tuple(any(branch) for branch in branches)
        return flows

    def _op(self, op: Op, flows: tuple[bool, ...]) -> bool:
        if op.beside and not _runs(op.beside, self.mode):
            return self._absent(op._replace(beside=""), flows)
        if op.source:
            flows = (self.streams.get(op.source, False),)
        if op.unused:
            return self._unused(op._replace(unused=False), flows)
        if op.detached and op.kind != "param":
            return self._detached(op)
        if op.kind == "product":
            self.steps.append(_Step(len(self.rows), op.flops * op.times, any(flows)))
            self.rows.append(Row(op, op.flops * op.times, op.backward * op.times if any(flows) else 0))
            return any(flows)
        if op.kind == "attend":
            return self._attend(op, flows)
        flow = any(flows)
        if op.kind in ("pointwise", "dropout"):
            self.steps.append(_Step(-1, 0, flow and op.saves))
            return flow
        state = ALL_TRAIN if self.states is None else next(self.states)
        if op.frozen or op.detached:  # detached: a bare parameter that never trains
            state = state._replace(weight=False, bias=False)
        weight, bias = weight_parameters(op), bias_parameters(op)
        trains = state.weight or (state.bias and op.bias)
        total = weight + bias
        if state.saved_copy:
            # The copy that PEFT trains beside the frozen original; it is not tied to anything.
            weight = weight_parameters(op._replace(tied=None))
            total += weight + bias
        trainable = (weight if state.weight else 0) + (bias if state.bias else 0)
        inactive = (weight + bias) // op.copies * (op.copies - op.active) if op.copies > 1 else 0
        forward = backward = 0
        index = len(self.rows)
        if state.rank and op.targets:
            self._fold(op, state, flow)
            index = len(self.rows)
            flow_weight = state.weight or state.adapter_a or state.adapter_b
            self.steps.append(_Step(index, product_flops(op), flow or flow_weight))
            backward = product_flops(op) * (flow + state.weight)
            self.rows.append(Row(op, product_flops(op), backward, 0, total, inactive, trainable))
            return flow or flow_weight
        if op.kind in ("linear", "conv"):
            forward = product_flops(op)
            backward = forward * (flow + state.weight)
            self.steps.append(_Step(index, forward, flow or state.weight))
        elif op.kind == "norm":
            self.steps.append(_Step(-1, 0, flow or trains))
        flow = flow or trains
        if state.rank and op.at:  # another module reads the weight: the adapter is there, and never runs
            size_a, size_b = adapter_parameters(op, state.rank)
            total += size_a + size_b
            trainable += size_a * state.adapter_a + size_b * state.adapter_b
        elif state.rank:
            first, second = adapter_flops(op, state.rank)
            into = any(flows) and op.kind != "embed"
            forward += first + second
            backward += first * (into + state.adapter_a) + second * ((into or state.adapter_a) + state.adapter_b)
            self.steps.append(_Step(index, first, into or state.adapter_a))
            self.steps.append(_Step(index, second, into or state.adapter_a or state.adapter_b))
            flow = flow or state.adapter_a or state.adapter_b
            size_a, size_b = adapter_parameters(op, state.rank)
            total += size_a + size_b
            trainable += size_a * state.adapter_a + size_b * state.adapter_b
        if op.at:  # its work belongs there, its parameters to its own module
            there = op._replace(name=op.at.removeprefix("."))
            self.rows.append(Row(there, forward, backward, owes_weight=state.weight))
            op, forward, backward = op._replace(kind="param"), 0, 0
        if op.again:
            total = inactive = trainable = 0
        self.rows.append(Row(op, forward, backward, 0, total, inactive, trainable, state.weight))
        if self.mode.clipping != "none" and (trains or trainable):
            self._clip(op, state, trainable)
        if op.input_embedding and self.mode.recompute != "none":
            flow = True
        return flow

    def _clip(self, op: Op, state: State, trainable: int) -> None:
        """What Opacus computes per sample for one module, as rows of their own."""
        is_ghost = self.mode.clipping == "ghost"
        found: dict[Feature, int] = {}
        if self.mode.clipping == "hooks":
            found["samples",] = clip_flops(trainable)
        each, squares, products = (("each", *op.feature), ("squares", *op.feature), ("products", *op.feature))
        bias = state.bias and op.bias
        linears = [(op.n_in, op.n_out, state.weight, bias)] if op.kind == "linear" else []  # others have no products
        if linears and self.mode.is_functorch and op.part != "lm_head" and (state.weight or bias):
            # No torch.nn.Linear: functorch runs the module once more, then takes its gradients.
            found[op.feature] = 2 * product_flops(op)
            linears = []
        if state.rank:
            linears += [(op.n_in, state.rank, state.adapter_a, False), (state.rank, op.n_out, state.adapter_b, False)]
        for n_in, n_out, has_weight, has_bias in linears:
            if has_weight and not is_ghost:
                found[each] = found.get(each, 0) + sample_flops(n_in, n_out)
            elif is_ghost:
                # Both Gram matrices of a weight, then the sum of their elementwise product; a bias needs the one.
                pairs = gram_flops(n_in) * has_weight + gram_flops(n_out) * (has_weight + has_bias)
                found[squares] = found.get(squares, 0) + pairs
                found[products] = found.get(products, 0) + 2 * has_weight
        self.rows += [Row(op._replace(feature=feature), clipping=flops) for feature, flops in found.items() if flops]

    def _absent(self, op: Op, flows: tuple[bool, ...]) -> bool:
        """Held, but not run: its parameters count, no tensor is saved, and the gradient passes by."""
        rows, steps = len(self.rows), len(self.steps)
        self._op(op, flows)
        self.rows[rows:] = [row._replace(forward=0, backward=0) for row in self.rows[rows:]]
        del self.steps[steps:]
        return any(flows)

    def _unused(self, op: Op, flows: tuple[bool, ...]) -> bool:
        """Autograd saves its tensors, but no gradient comes; reentrant checkpointing hands a gradient of zeros in."""
        start = len(self.rows)
        flow = self._op(op, flows)
        if self.mode.recompute != "full-reentrant":
            self.rows[start:] = [row._replace(backward=0) for row in self.rows[start:]]
        return flow

    def _detached(self, op: Op) -> bool:
        """Computed without autograd: no gradient for its input, nor for its weight."""
        forward = backward = total = inactive = trainable = 0
        if op.kind == "attend":
            forward = score_flops(op) + value_flops(op)
        elif op.kind == "product":
            forward = op.flops * op.times
        else:
            state = ALL_TRAIN if self.states is None else next(self.states)
            forward = product_flops(op)
            total = weight_parameters(op) + bias_parameters(op)
            trainable = (weight_parameters(op) if state.weight else 0) + (bias_parameters(op) if state.bias else 0)
            if state.rank:
                forward += sum(adapter_flops(op, state.rank))
                size_a, size_b = adapter_parameters(op, state.rank)
                total += size_a + size_b
                trainable += size_a * state.adapter_a + size_b * state.adapter_b
        self.steps.append(_Step(len(self.rows), forward, False))
        self.rows.append(Row(op, forward, backward, 0, total, inactive, trainable))
        return False

    def _fold(self, op: Op, state: State, flow: bool) -> None:
        """LoRA on a bare parameter: two small products are needed; PEFT folds it into the weight of every copy."""
        first, second = adapter_flops(op, state.rank)
        size_a, size_b = adapter_parameters(op, state.rank)
        trainable = size_a * state.adapter_a + size_b * state.adapter_b
        inactive = (size_a + size_b) // op.copies * (op.copies - op.active)
        backward = first * (flow + state.adapter_a) + second * ((flow or state.adapter_a) + state.adapter_b)
        needed = op._replace(feature=("needed", *op.feature))
        self.rows.append(Row(needed, first + second, backward, 0, size_a + size_b, inactive, trainable))
        trains = state.adapter_a or state.adapter_b
        flops = fold_flops(op, state.rank)
        # A stack of experts is folded inside a parametrization, which torch evaluates once more; a router is not.
        folded = op._replace(feature=("executed", "folds" if op.copies > 1 else "calls"))
        self.steps.append(_Step(len(self.rows), flops, trains))
        self.rows.append(Row(folded, flops))
        gradient = op._replace(feature=("executed", "calls"))
        self.rows.append(Row(gradient, 0, flops * (state.adapter_a + state.adapter_b)))
        if trains and not state.weight:
            # The gradient of the whole folded weight, which the adapters' gradients are then taken from.
            self.rows.append(Row(op._replace(feature=("executed", *op.feature)), 0, product_flops(op)))

    def _attend(self, op: Op, flows: tuple[bool, ...]) -> bool:
        # One branch feeds all three (a fused qkv), two are queries and the rest, three are q, k, v.
        query, key, value = (flows[0], flows[-1 if len(flows) < 3 else 1], flows[-1])
        scores, values = score_flops(op), value_flops(op)
        index = len(self.rows)
        flow = query or key or value
        if self.mode.is_fused:
            self._attend_fused(op, flow)
            return flow
        # d(scores) needs a gradient of the probabilities, dV one of the values, dQ and dK one of the scores.
        backward = scores * (query + key) + values * ((query or key) + value)
        self.steps.append(_Step(index, scores, query or key))
        self.steps.append(_Step(index, values, flow))
        self.rows.append(Row(op, scores + values, backward))
        return flow

    def _attend_fused(self, op: Op, flow: bool) -> None:
        """One kernel: its backward forms the scores again, then dV, dP, dQ and dK."""
        shape = dict(self.mode.shapes).get((op.qk, op.v), KernelShape())
        scores, values = score_flops(op), value_flops(op)
        forward = (scores + values) * shape.pad_forward[0] // shape.pad_forward[1]
        backward = (3 * scores + 2 * values) * shape.pad_backward[0] // shape.pad_backward[1] if flow else 0
        ahead = op._replace(feature=_in_blocks(op.feature, shape.block_forward))
        behind = op._replace(feature=_in_blocks(op.feature, shape.block_backward))
        self.steps.append(_Step(len(self.rows), forward, flow, saves_output=True))
        if ahead == behind:
            self.rows.append(Row(ahead, forward, backward))
        else:
            self.rows += [Row(ahead, forward), Row(behind, 0, backward)]

    def count_recompute(self, reentrant: bool) -> None:
        """Add what a checkpointed layer computes again: up to its last saved tensor, or all of it if reentrant."""
        last = max((i for i, step in enumerate(self.steps) if step.saves), default=-1)
        for i, step in enumerate(self.steps):
            if step.row >= 0 and (reentrant or i < last or (i == last and step.saves_output)):
                row = self.rows[step.row]
                runs = 2 if reentrant and row.op.nested else 1
                self.rows[step.row] = row._replace(recompute=row.recompute + step.flops * runs)


def _in_blocks(feature: Feature, block: int) -> Feature:
    """Pairs as a kernel computes them, in whole blocks; any other sum as it is."""
    if feature[0] == "minus":
        return ("minus", _in_blocks(feature[1], block), feature[2])
    if "pairs" in feature[:2]:  # a decoder's stand behind the word
        return (*feature[: feature.index("pairs") + 3], block)
    return feature


def count(stages: tuple[Stage, ...], resolver: Resolver, mode: Mode) -> tuple[Block, ...]:
    """Rows of every stage, layers that count alike folded together."""
    blocks: list[Block] = []
    stream: dict[str, bool] = {}
    after: dict[str, list[bool]] = {}  # per stage: does a gradient flow into layer j's output
    cache: dict[object, tuple[tuple[Row, ...], bool]] = {}
    for stage in stages:
        runs = _runs(stage.stream, mode)
        streams = dict(stream) if any(op.source for chain in stage.layers for op in iterate(chain)) else {}
        flow = stage.input_gradient or stream.get(stage.stream, False)
        flow = flow or any(stream.get(name, False) for name in stage.joins)
        outputs: list[bool] = []
        folded: dict[tuple[Row, ...], list[int]] = {}
        for layer, chain in enumerate(stage.layers):
            path = f"{stage.path}.{stage.first + layer}" if stage.repeated else stage.path
            if stage.reads is not None:
                flow = after.get(stage.reads[0], [])[stage.reads[1][layer]]
            states = _layer_states(chain, path, stage, resolver)
            key = (id(chain), states, flow, stage.checkpoint, stage.dead[layer], runs, *streams.items())
            found = cache.get(key)
            if found is None:
                found = cache[key] = _count_layer(chain, states, flow, stage, stage.dead[layer], mode, runs, streams)
            rows, flow = found
            if stage.adds is not None:
                added = after.get(stage.adds, [])
                flow = flow or (layer < len(added) and added[layer])
            outputs.append(flow)
            folded.setdefault(rows, []).append(stage.first + layer)
        after[stage.path] = after.get(stage.path, [])[: stage.first] + outputs
        stream[stage.stream] = flow and runs
        blocks += [
            Block(stage.path, tuple(layers) if stage.repeated else None, stage.group, rows)
            for rows, layers in folded.items()
        ]
    return tuple(blocks)


def _runs(stream: str, mode: Mode) -> bool:
    """Whether a stream has work: audio needs clips, every other that is not text needs images."""
    if stream == "language" or stream.startswith("encoder"):
        return True
    return mode.has_audio if stream.startswith("audio") else mode.has_images


def _layer_states(chain: Chain, path: str, stage: Stage, resolver: Resolver) -> tuple[State, ...] | None:
    if resolver.is_trivial:
        return None
    return tuple(
        resolver.resolve(op, join(path, op.name), stage.group) for op in iterate(chain) if op.kind not in STATELESS
    )


def _count_layer(
    chain: Chain,
    states: tuple[State, ...] | None,
    flow: bool,
    stage: Stage,
    dead: bool,
    mode: Mode,
    runs: bool,
    streams: dict[str, bool],
) -> tuple[tuple[Row, ...], bool]:
    layer = _Layer(None if states is None else iter(states), mode, streams)
    reversible = stage.reversible and mode.is_hardware
    checkpointed = reversible or (stage.checkpoint and mode.recompute != "none")
    reentrant = reversible or mode.recompute == "full-reentrant"
    out = any(layer.run(chain, (flow,)))
    # HF hands a layer the other streams that it reads as inputs too.
    enters = flow or (reentrant and any(streams.get(op.source, False) for op in iterate(chain) if op.source))
    if dead or not runs or (checkpointed and reentrant and not enters):
        # Nothing flows back: the output is unused, the stage does not run, or reentrant checkpointing saw no input
        # that needs a gradient and so built no graph.
        layer.rows = [row._replace(backward=0) for row in layer.rows]
        return tuple(layer.rows), flow if dead else False
    if checkpointed and (not reentrant or enters):
        layer.count_recompute(reentrant)
    if mode.clipping in ("ghost", "fast"):
        # Norms first, clipped gradients then: two passes back through one graph, both with every weight gradient.
        layer.rows = [row._replace(clipping=row.clipping + row.backward) for row in layer.rows]
    return tuple(layer.rows), out


def sum_coefficients(blocks: tuple[Block, ...]) -> dict[Feature, Flops]:
    """Coefficients per feature over the whole model."""
    totals: dict[Feature, Flops] = {}
    for block in blocks:
        for row in block.rows:
            if any(row.flops):
                totals[row.op.feature] = totals.get(row.op.feature, NO_FLOPS) + row.flops * block.copies
    return totals
