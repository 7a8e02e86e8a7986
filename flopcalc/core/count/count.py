"""Stages and a recipe in; rows of products out: what each module multiplies, and in which passes.

Backward work follows gradients through the dataflow: `flows` says whether a gradient is owed to the tensor an op reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from flopcalc.base.frozen import Value, frozen
from flopcalc.base.vocabulary import Clipping, Recompute
from flopcalc.core.count.formulas import (
    KernelShape,
    adapter_flops,
    adapter_parameters,
    clip_flops,
    fold_flops,
    fused_backward_flops,
    fused_forward_flops,
    gram_flops,
    product_flops,
    sample_flops,
    score_flops,
    value_flops,
)
from flopcalc.core.count.products import Block, Passes, Product, Row
from flopcalc.core.formats.formats import Formats, OpFormats
from flopcalc.core.model.ops import (
    Attend,
    Chain,
    Dropout,
    Embed,
    Linear,
    Multiply,
    Norm,
    Op,
    Param,
    Pointwise,
    Stage,
    Weighted,
    iterate,
    join,
)
from flopcalc.core.recipe.recipe import Adapter
from flopcalc.core.recipe.resolver import ALL_TRAIN, Resolver, State
from flopcalc.core.spec.spec import HEAD_PARTS
from flopcalc.core.workload.sums import (
    Calls,
    ExecutedSum,
    Folds,
    InDecoder,
    Minus,
    NeededSum,
    Pairs,
    PerSample,
    Samples,
    Sum,
)


@frozen()
class Mode(Value):
    """What the counting depends on beyond model and recipe."""

    has_images: bool = False
    has_audio: bool = False
    is_fused: bool = False  # attention in one kernel: its backward recomputes the scores
    recompute: Recompute = "none"  # effective: 'none' outside convention hardware
    shapes: tuple[tuple[tuple[int, int], KernelShape], ...] = ()  # (qk, v) -> what was measured of the kernel
    is_hardware: bool = False  # counts what is recomputed
    clipping: Clipping = "none"  # effective likewise
    is_functorch: bool = False  # its linear layers but the head are no torch.nn.Linear, which Opacus knows


class _Step(NamedTuple):
    """Something that runs, in order of execution: the products it is, and whether autograd saves a tensor for it."""

    products: tuple[tuple[int, int], ...]  # (row, product)
    saves: bool
    saves_output: bool = False  # then it has run by the time it saves
    twice: bool = False  # of a block that is checkpointed inside its layer


class _Parameters:
    """What a row holds: all, those that one token does not reach, those that train."""

    def __init__(self, total: int = 0, inactive: int = 0, trainable: int = 0) -> None:
        self.total = total
        self.inactive = inactive
        self.trainable = trainable


class _Layer:
    """Counts one chain: forward, backward by flowing gradients, and what checkpointing runs again."""

    def __init__(self, states: Iterator[State] | None, mode: Mode, streams: dict[str, bool] | None = None) -> None:
        self.states = states  # in order of execution; None: everything trains
        self.streams = {} if streams is None else streams  # does a gradient flow into the output of each stream so far
        self.mode = mode
        self.rows: list[Row] = []
        self.steps: list[_Step] = []

    def run(self, chain: Chain, flows: tuple[bool, ...]) -> tuple[bool, ...]:
        for item in chain:
            if isinstance(item, Op):
                start = len(self.steps)
                flows = (self._op(item, flows),)
                if item.twice:
                    self.steps[start:] = [step._replace(twice=True) for step in self.steps[start:]]
            else:
                branches = [self.run(branch, flows) for branch in item]
                flows = tuple(any(branch) for branch in branches)
        return flows

    def _op(self, op: Op, flows: tuple[bool, ...]) -> bool:
        if op.joined or op.to:
            return self._streamed(op, flows)
        if op.beside and not _runs(op.beside, self.mode):
            return self._absent(op.replace(beside=""), flows)
        if op.source:
            flows = (self.streams.get(op.source, False),)
        if op.unused:
            return self._unused(op.replace(unused=False), flows)
        if op.detached and not isinstance(op, Param):
            return self._detached(op)
        if isinstance(op, Multiply):
            return self._multiply(op, flows)
        if isinstance(op, Attend):
            return self._attend(op, flows)
        if isinstance(op, Pointwise):
            self._pass(any(flows))
            return any(flows)
        if isinstance(op, Dropout):
            self._pass(any(flows) and op.saves)
            return any(flows)
        assert isinstance(op, Weighted)
        return self._weighted(op, any(flows))

    def _streamed(self, op: Op, flows: tuple[bool, ...]) -> bool:
        """An op that other streams enter, or whose output enters one."""
        if op.source:
            flows = (self.streams.get(op.source, False),)
        if any(self.streams.get(name, False) for name in op.joined):
            flows = (True,)
        flow = self._op(op.replace(source="", joined=(), to=""), flows)
        if op.to:
            self.streams[op.to] = self.streams.get(op.to, False) or flow
        return flow

    # --- rows and steps -----------------------------------------------------------------------------------------------
    def _pass(self, saves: bool) -> None:
        """Something without products, for which autograd may save a tensor."""
        self.steps.append(_Step((), saves))

    def _step(self, product: int, saves: bool) -> None:
        """A product of the row that is about to be added."""
        self.steps.append(_Step(((len(self.rows), product),), saves))

    def _add(
        self, op: Op, products: list[Product], parameters: _Parameters | None = None, trains_weight: bool = False
    ) -> None:
        held = parameters or _Parameters()
        self.rows.append(Row(op, tuple(products), held.total, held.inactive, held.trainable, trains_weight))

    # --- kinds of op --------------------------------------------------------------------------------------------------
    def _weighted(self, op: Weighted, flow: bool) -> bool:
        state = ALL_TRAIN if self.states is None else next(self.states)
        if op.frozen or op.detached:  # detached: a bare parameter that never trains
            state = state._replace(weight=False, bias=False)
        trains = state.weight or (state.bias and op.bias)
        held = _count_parameters(op, state)
        if isinstance(op, (Linear, Embed)):
            _add_adapters(held, op, state)
        if state.active and op.targets:
            assert isinstance(op, Linear)
            return self._folded(op, state, flow, held)
        products: list[Product] = []
        into = flow
        if isinstance(op, Linear):
            passes = Passes(1, int(flow), int(state.weight))
            products.append(Product("base", op.rows, product_flops(op), passes, op.n_in, op.n_out))
            self._step(0, flow or state.weight)
        elif isinstance(op, Norm):
            self._pass(flow or trains)
        flow = flow or trains
        if isinstance(op, (Linear, Embed)) and not op.at:  # else another module reads the weight: no adapter runs
            for adapter in state.active:
                products += _make_adapters(op, adapter, into)
                self._step(len(products) - 2, products[-2].passes.backward > 0)
                self._step(len(products) - 1, products[-1].passes.backward > 0)
                flow = flow or adapter.a or adapter.b
        if op.again:
            held = _Parameters()
        if op.at:  # its work belongs there, its parameters to its own module
            self._add(op.replace(name=op.at.removeprefix(".")), products, trains_weight=state.weight)
            own = Param(name=op.name, part=op.part, rows=op.rows, size=op.weight_size, tied=op.tied)
            self._add(own, [], held, state.weight)
        else:
            self._add(op, products, held, state.weight)
        if self.mode.clipping != "none" and (trains or held.trainable):
            self._clip(op, state, held.trainable)
        return flow or (op.input_embedding and self.mode.recompute != "none")

    def _multiply(self, op: Multiply, flows: tuple[bool, ...]) -> bool:
        flow = any(flows)
        self._step(0, flow)
        products = [Product("activations", op.rows, op.flops * op.times)]
        backward = op.flops * (flows[0] + flows[-1]) if op.pair else op.backward
        if flow and backward:
            products.append(Product("activations_gradient", op.rows, backward * op.times, Passes(0, 1)))
        self._add(op, products)
        return flow

    def _attend(self, op: Attend, flows: tuple[bool, ...]) -> bool:
        # One branch feeds all three (a fused qkv), two are queries and the rest, three are q, k, v.
        query, key, value = (flows[0], flows[-1 if len(flows) < 3 else 1], flows[-1])
        flow = query or key or value
        if self.mode.is_fused:
            self._attend_fused(op, flow)
            return flow
        # d(scores) needs a gradient of the probabilities, dV one of the values, dQ and dK one of the scores.
        scores, values = _make_attention(op)
        self._step(0, query or key)
        self._step(1, flow)
        self._add(op, [scores.change(input_gradient=query + key), values.change(input_gradient=(query or key) + value)])
        return flow

    def _attend_fused(self, op: Attend, flow: bool) -> None:
        """One kernel: its backward forms the scores again, then dV, dP, dQ and dK."""
        shape = dict(self.mode.shapes).get((op.qk, op.v), KernelShape())
        products = [Product("fused", _in_blocks(op.rows, shape.block_forward), fused_forward_flops(op, shape))]
        if flow:
            rows = _in_blocks(op.rows, shape.block_backward)
            products.append(Product("fused_backward", rows, fused_backward_flops(op, shape), Passes(0, 1)))
        self.steps.append(_Step(((len(self.rows), 0),), flow, saves_output=True))
        self._add(op, products)

    def _folded(self, op: Linear, state: State, flow: bool, held: _Parameters) -> bool:
        """LoRA on a bare parameter: two small products are needed; PEFT folds it into the weight of every copy."""
        (adapter,) = state.active  # a live model with several is refused
        held.inactive += sum(adapter_parameters(op, adapter.rank)) // op.copies * (op.copies - op.active)
        trains = adapter.a or adapter.b
        needed = [
            Product(each.role, NeededSum(op.rows), each.flops, each.passes, each.n_in, each.n_out)
            for each in _make_adapters(op, adapter, flow)
        ]
        # A stack of experts is folded inside a parametrization, which torch evaluates once more; a router is not.
        flops, sizes = fold_flops(op, adapter.rank), (op.n_in, op.n_out, op.copies)
        fold = Product("fold", ExecutedSum(Folds() if op.copies > 1 else Calls()), flops, Passes(), *sizes)
        gradients = Passes(0, 0, adapter.a + adapter.b)
        gradient = Product("fold_gradient", ExecutedSum(Calls()), flops, gradients, *sizes)
        products = [*needed, fold, gradient]
        if trains and not state.weight:
            # The gradient of the whole folded weight, which the adapters' gradients are then taken from.
            products.append(
                Product("folded_weight", ExecutedSum(op.rows), product_flops(op), Passes(0, 0, 1), op.n_in, op.n_out)
            )
        self._step(2, trains)
        flow_weight = state.weight or trains
        self._step(len(products), flow or flow_weight)
        passes = Passes(1, int(flow), int(state.weight))
        products.append(Product("base", op.rows, product_flops(op), passes, op.n_in, op.n_out))
        self._add(op, products, held)
        return flow or flow_weight

    def _clip(self, op: Weighted, state: State, trainable: int) -> None:
        """What Opacus computes per sample for one module, as a row of its own."""
        is_ghost = self.mode.clipping == "ghost"
        rows = op.rows
        once = Passes(0, clipping=1)
        products: list[Product] = []
        if self.mode.clipping == "hooks":
            products.append(Product("clip_factors", Samples(), clip_flops(trainable), once))
        bias = state.bias and op.bias
        linears: list[tuple[int, int, bool, bool]] = []  # others have no products
        if isinstance(op, Linear):
            if op.kind == "linear":
                linears.append((op.n_in, op.n_out, state.weight, bias))
            if linears and self.mode.is_functorch and op.part not in HEAD_PARTS and (state.weight or bias):
                # No torch.nn.Linear: functorch runs the module once more, then takes its gradients.
                products.append(Product("clip_modules", rows, 2 * product_flops(op), once))
                linears = []
            for adapter in state.active:
                linears.append((op.n_in, adapter.rank, adapter.a, False))
                linears.append((adapter.rank, op.n_out, adapter.b, False))
        for n_in, n_out, has_weight, has_bias in linears:
            if has_weight and not is_ghost:
                products.append(
                    Product("clip_gradients", PerSample("rows", rows), sample_flops(n_in, n_out), once, n_in, n_out)
                )
            elif is_ghost:
                # Both Gram matrices of a weight, then the sum of their elementwise product; a bias needs the one.
                grams = gram_flops(n_in) * has_weight + gram_flops(n_out) * (has_weight + has_bias)
                products.append(Product("clip_grams", PerSample("squares", rows), grams, once, n_in, n_out))
                products.append(Product("clip_sums", PerSample("products", rows), 2 * has_weight, once, n_in, n_out))
        products = [product for product in products if product.flops]
        if products:
            self._add(op, products)

    # --- ops that take part otherwise ---------------------------------------------------------------------------------
    def _absent(self, op: Op, flows: tuple[bool, ...]) -> bool:
        """Held, but not run: its parameters count, no tensor is saved, and the gradient passes by."""
        rows, steps = len(self.rows), len(self.steps)
        self._op(op, flows)
        self.rows[rows:] = [row.replace(products=()) for row in self.rows[rows:]]
        del self.steps[steps:]
        return any(flows)

    def _unused(self, op: Op, flows: tuple[bool, ...]) -> bool:
        """Autograd saves its tensors, but no gradient comes; reentrant checkpointing hands a gradient of zeros in."""
        start = len(self.rows)
        flow = self._op(op, flows)
        if self.mode.recompute != "full-reentrant":
            self.rows[start:] = [_without_gradients(row) for row in self.rows[start:]]
        return flow

    def _detached(self, op: Op) -> bool:
        """Computed without autograd: no gradient for its input, nor for its weight."""
        products: list[Product] = []
        held = _Parameters()
        if isinstance(op, Attend):
            products = list(_make_attention(op))
        elif isinstance(op, Multiply):
            products = [Product("activations", op.rows, op.flops * op.times)]
        elif isinstance(op, Weighted):
            state = ALL_TRAIN if self.states is None else next(self.states)
            held = _count_parameters(op, state._replace(saved_copy=False))
            held.inactive = 0
            if isinstance(op, Linear):
                products = [Product("base", op.rows, product_flops(op), Passes(), op.n_in, op.n_out)]
                for adapter in state.active:
                    products += [replace(each, passes=Passes()) for each in _make_adapters(op, adapter, False)]
                _add_adapters(held, op, state)
        row = len(self.rows)
        self.steps.append(_Step(tuple((row, index) for index in range(len(products))), False))
        self._add(op, products, held)
        return False

    def count_recompute(self, reentrant: bool) -> None:
        """Add what a checkpointed layer computes again: up to its last saved tensor, or all of it if reentrant."""
        self._run_again(self.steps, reentrant)
        if not reentrant:
            self._run_again([step for step in self.steps if step.twice], reentrant)

    def _run_again(self, steps: list[_Step], reentrant: bool) -> None:
        last = max((i for i, step in enumerate(steps) if step.saves), default=-1)
        for i, step in enumerate(steps):
            if not (reentrant or i < last or (i == last and step.saves_output)):
                continue
            for at, index in step.products:
                row = self.rows[at]
                runs = 2 if reentrant and row.op.nested else 1
                products = list(row.products)
                products[index] = products[index].change(recompute=products[index].passes.recompute + runs)
                self.rows[at] = row.replace(products=tuple(products))


def _count_parameters(op: Weighted, state: State) -> _Parameters:
    weight = 0 if op.tied else op.weight_size
    bias = op.bias_size
    total = weight + bias
    if state.saved_copy:
        # PEFT trains this copy and keeps the frozen original; the copy is not tied to anything.
        weight = op.weight_size
        total += weight + bias
    inactive = (weight + bias) // op.copies * (op.copies - op.active) if op.copies > 1 else 0
    trainable = (weight if state.weight else 0) + (bias if state.bias else 0)
    return _Parameters(total, inactive, trainable)


def _add_adapters(held: _Parameters, op: Linear | Embed, state: State) -> None:
    for adapter in state.adapters:
        size_a, size_b = adapter_parameters(op, adapter.rank)
        held.total += size_a + size_b
        held.trainable += size_a * adapter.a + size_b * adapter.b


def _make_adapters(op: Linear | Embed, adapter: Adapter, into: bool) -> list[Product]:
    """LoRA's two products; `into` says whether a gradient is owed to what the first reads."""
    first, second = adapter_flops(op, adapter.rank)
    is_embed = isinstance(op, Embed)
    n_in, n_out = (op.count, op.dim) if isinstance(op, Embed) else (op.n_in, op.n_out)
    into = into and not is_embed
    return [
        Product("adapter_a", op.rows, first, Passes(1, int(into), int(adapter.a)), n_in, adapter.rank),
        Product("adapter_b", op.rows, second, Passes(1, int(into or adapter.a), int(adapter.b)), adapter.rank, n_out),
    ]


def _make_attention(op: Attend) -> tuple[Product, Product]:
    """The two products of eager attention, forward alone."""
    scores = Product("scores", op.rows, score_flops(op), n_in=op.qk, copies=op.heads)
    return scores, Product("values", op.rows, value_flops(op), n_out=op.v, copies=op.heads)


def _without_gradients(row: Row) -> Row:
    kept = [product.change(input_gradient=0, weight_gradient=0) for product in row.products]
    return row.replace(products=tuple(kept))


def _in_blocks(rows: Sum, block: int) -> Sum:
    """Pairs as a kernel computes them, in whole blocks; any other sum as it is."""
    if isinstance(rows, Minus):
        return Minus(_in_blocks(rows.rows, block), rows.less)
    if isinstance(rows, InDecoder):
        return InDecoder(_in_blocks(rows.inner, block))
    if isinstance(rows, Pairs):
        return Pairs(rows.mask, rows.window, block, rows.shows)
    return rows


def count(stages: tuple[Stage, ...], resolver: Resolver, mode: Mode, formats: Formats) -> tuple[Block, ...]:
    """Rows of every stage, layers that count alike folded together."""
    is_plain = formats.is_default
    blocks: list[Block] = []
    stream: dict[str, bool] = {}
    after: dict[str, list[bool]] = {}  # per stage: does a gradient flow into layer j's output
    cache: dict[object, tuple[tuple[Row, ...], bool, dict[str, bool]]] = {}
    for stage in stages:
        runs = _runs(stage.stream, mode)
        streams = (
            dict(stream)
            if any(op.source or op.joined or op.to for chain in stage.kinds for op in iterate(chain))
            else {}
        )
        flow = stage.input_gradient or stream.get(stage.stream, False)
        flow = flow or any(stream.get(name, False) for name in stage.joins)
        outputs: list[bool] = []
        folded: dict[tuple[Row, ...], list[int]] = {}
        numbers_of: dict[int, tuple[OpFormats, ...]] = {}  # by chain, of every op in order of execution
        for layer, chain in enumerate(stage.layers):
            path = f"{stage.path}.{stage.first + layer}" if stage.repeated else stage.path
            if stage.reads is not None:
                flow = after.get(stage.reads[0], [])[stage.reads[1][layer]]
            states = _layer_states(chain, path, stage, resolver)
            if not is_plain and (formats.names_layers or id(chain) not in numbers_of):
                numbers_of[id(chain)] = tuple(
                    formats.resolve(op, join(path, op.name), stage.group) for op in iterate(chain)
                )
            numbers = numbers_of.get(id(chain))
            key = (id(chain), states, flow, stage.checkpoint, stage.dead[layer], runs, numbers, *streams.items())
            counted = cache.get(key)
            if counted is None:
                changed = dict(streams)
                rows, out = _count_layer(chain, states, flow, stage, stage.dead[layer], mode, runs, changed)
                if numbers is not None:
                    rows = _add_formats(rows, chain, numbers)
                counted = cache[key] = (rows, out, changed)
            rows, flow, streams = counted
            if stage.adds is not None:
                added = after.get(stage.adds, [])
                flow = flow or (layer < len(added) and added[layer])
            outputs.append(flow)
            folded.setdefault(rows, []).append(stage.first + layer)
        after[stage.path] = after.get(stage.path, [])[: stage.first] + outputs
        stream.update(streams)
        stream[stage.stream] = flow and runs
        blocks += [
            Block(stage.path, tuple(layers) if stage.repeated else None, stage.group, rows)
            for rows, layers in folded.items()
        ]
    return tuple(blocks)


# Products of an adapter; all others of an op are its own.
_ADAPTERS = ("adapter_a", "adapter_b", "fold", "fold_gradient")


def _add_formats(rows: tuple[Row, ...], chain: Chain, numbers: tuple[OpFormats, ...]) -> tuple[Row, ...]:
    """The rows of a layer with the formats of their products and weights."""
    known: dict[tuple[str, str, str], OpFormats] = {}
    for op, formats in zip(iterate(chain), numbers, strict=True):
        for key in _name_op(op):
            known.setdefault(key, formats)
    return tuple(_add_format(row, known[_name_op(row.op)[0]]) for row in rows)


def _name_op(op: Op) -> list[tuple[str, str, str]]:
    """What identifies an op in its layer, and the rows that it is split into if another module runs it."""
    if not isinstance(op, Weighted):
        return [(op.name, op.kind, "")]
    names = [(op.name, op.kind, op.param)]
    if op.at:
        names += [(op.at.removeprefix("."), op.kind, op.param), (op.name, Param.kind, "weight")]
    return names


def _add_format(row: Row, numbers: OpFormats) -> Row:
    products = []
    for product in row.products:
        formats = (numbers.compute, numbers.gradient)
        if product.role in _ADAPTERS:
            formats = (numbers.adapter_compute, numbers.adapter_compute)
        products.append(replace(product, format=formats[0], gradient_format=formats[1]))
    return row.replace(products=tuple(products), numbers=numbers)


def _runs(stream: str, mode: Mode) -> bool:
    """Whether a stream has work: audio needs clips, every other that is not text needs images."""
    if stream == "language" or stream.startswith("encoder"):
        return True
    return mode.has_audio if stream.startswith("audio") else mode.has_images


def _layer_states(chain: Chain, path: str, stage: Stage, resolver: Resolver) -> tuple[State, ...] | None:
    if resolver.is_trivial:
        return None
    return tuple(
        resolver.resolve(op, join(path, op.name), stage.group) for op in iterate(chain) if isinstance(op, Weighted)
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
        return tuple(_without_gradients(row) for row in layer.rows), flow if dead else False
    if checkpointed and (not reentrant or enters):
        layer.count_recompute(reentrant)
    if mode.clipping in ("ghost", "fast"):
        # Norms first, clipped gradients then: two passes back through one graph, both with every weight gradient.
        layer.rows = [
            row.replace(
                products=tuple(
                    product.change(clipping=product.passes.clipping + product.passes.backward)
                    for product in row.products
                )
            )
            for row in layer.rows
        ]
    return tuple(layer.rows), out
