"""How a model is cut over devices: the core's op list in, places of work out; layouts, their rules and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flopcalc.core.count.count import Block, Row, product_flops
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Op, iterate, join
from flopcalc.core.workload.sums import attention_calls
from flopcalc.core.workload.workload import Workload
from flopcalc.errors import RecipeError, WorkloadError, format_value
from flopcalc.units import format_bytes

RECOMPUTE = ("none", "selective", "half", "full")
DEGREES = ("dp", "tp", "pp", "virtual", "cp", "ep", "zero", "micro_batch", "recompute")
# Bytes of one trained parameter: bf16 weight, fp32 gradient, fp32 master weight and Adam's two fp32 moments.
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
# Communication buffers and workspaces. What the driver and the allocator take is not in a device's capacity.
FIXED_BYTES = 2 << 30


class Layout(NamedTuple):
    """How a step is spread over tp · pp · cp · dp devices; experts are spread over ep of the tp · cp · dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1  # chunks of layers per device of a pipeline (interleaved schedule)
    cp: int = 1
    ep: int = 1
    zero: int = 0  # 1: optimizer states spread over dp, 2: gradients too, 3: weights too (FSDP)
    micro_batch: int = 1  # sequences
    # selective: the attention core again; half: every second layer; full: every layer
    recompute: str = "none"
    is_sequence_parallel: bool = True  # with tp: norms and residuals are spread too

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """Devices that hold the same experts."""
        return self.dp * self.tp * self.cp // self.ep

    def __str__(self) -> str:
        shown = (("tp", self.tp), ("pp", self.pp), ("v", self.virtual), ("cp", self.cp), ("ep", self.ep))
        words = [f"{name}{value}" for name, value in shown if value > 1]
        words += [f"dp{self.dp}", f"zero{self.zero}", f"mb{self.micro_batch}"]
        return " ".join([*words, *([f"recompute {self.recompute}"] if self.recompute != "none" else [])])


class Linear(NamedTuple):
    """A linear layer, or siblings multiplied at once: rows per sample, and the side it is cut along."""

    module: str
    part: str
    share: float  # how often it occurs in its place
    rows: float
    n: int
    k: int
    copies: int
    way: str  # column, row, whole, expert
    kv: int  # of the n outputs those of keys and values, which are cut no finer than their heads
    kv_heads: int
    has_dgrad: bool
    has_wgrad: bool


class Core(NamedTuple):
    """An attention core: calls per sample and their sizes."""

    module: str
    share: float
    mask: str
    calls: float
    heads: int
    kv_heads: int
    qk: int
    v: int
    length: int
    window: int
    has_backward: bool


class Place(NamedTuple):
    """A part of the model that is not cut further by a pipeline; numbers are of one sample."""

    linears: tuple[Linear, ...] = ()
    cores: tuple[Core, ...] = ()
    wide: tuple[float, float] = (0.0, 0.0)  # bytes moved forward, backward beside the products: cut by sp alone
    narrow: tuple[float, float] = (0.0, 0.0)  # and those that tp cuts
    exits: float = 0.0  # tensors of hidden width that tp has to sum up
    routed: float = 0.0  # bytes handed to experts, one way
    ring: float = 0.0  # bytes of keys and values
    other_flops: float = 0.0  # products of activations, scans
    saved_wide: float = 0.0  # bytes kept for backward
    saved_narrow: float = 0.0
    inputs_wide: float = 0.0  # of these the inputs of products, which fp8 keeps in half the bytes
    inputs_narrow: float = 0.0
    saved_scores: float = 0.0  # by unfused attention
    dense: float = 0.0  # parameters
    experts: float = 0.0
    dense_trained: float = 0.0
    experts_trained: float = 0.0


class Cut(NamedTuple):
    """A model of `layers` layers, all taken as the mean layer, with what comes before and after them."""

    layers: int
    layer: Place
    first: Place
    last: Place
    hidden: int
    tokens: int  # of one sample
    heads: int
    experts: int  # 1 without
    active: int  # experts that a token reaches
    logits: float  # elements of one sample's logits
    # Parameters, and trained ones, of a head that is the table of embeddings: a pipeline's last stage has its own copy.
    tied: tuple[int, int]


def make_cut(estimator: Estimator, load: Workload) -> Cut:
    """The places of a bound model for one sample of a workload."""
    blocks: dict[Block, list[tuple[Row, int]]] = {}
    for block, row, value in estimator.rows(load, "model"):
        if value or row.parameters:
            blocks.setdefault(block, []).append((row, value))
    layers = sum(block.copies for block in blocks if _is_layer(block))
    if not layers:
        raise WorkloadError(f"{estimator.source.name} has no repeated language layers to spread over devices")
    hidden = _find_hidden([row for rows in blocks.values() for row, _ in rows])
    makers = {name: _Maker(hidden, load) for name in ("layer", "first", "last")}
    is_past = False
    for block, rows in blocks.items():
        is_past = is_past or _is_layer(block)
        if _is_layer(block):
            makers["layer"].add(block, rows, block.copies / layers)
        else:
            makers["last" if is_past and block.group == "language" else "first"].add(block, rows, block.copies)
    layer, first, last = (makers[name].finish() for name in ("layer", "first", "last"))
    layer = layer._replace(exits=max(1.0, layer.exits - _count_parallel(estimator, hidden)))
    return Cut(
        layers, layer, first, last, hidden, load.tokens,
        heads=max((core.heads for core in layer.cores), default=1),
        experts=max((linear.copies for linear in layer.linears), default=1),
        active=max(
            (row.op.active for rows in blocks.values() for row, _ in rows if row.op.copies > 1), default=1
        ),
        logits=sum(linear.rows * linear.n for linear in last.linears if linear.part == "lm_head"),
        tied=_count_tied([row for rows in blocks.values() for row, _ in rows]),
    )  # fmt: skip


def _count_parallel(estimator: Estimator, hidden: int) -> float:
    """Tensors a layer that are summed up with another before they leave: of attention and MLP side by side."""
    found: list[int] = []
    for stage in estimator.stages:
        if stage.repeated and stage.group == "language":
            for chain in stage.layers:
                branches = [item for item in chain if not isinstance(item, Op)]
                leaving = [
                    sum(any(_leaves(op, hidden) for op in iterate(branch)) for branch in item) for item in branches
                ]
                found.append(sum(max(0, many - 1) for many in leaving))
    return sum(found) / len(found) if found else 0.0


def _leaves(op: Op, hidden: int) -> bool:
    """Whether a branch with this op ends in a sum over tp: attention, or a product back to the residual's width."""
    return op.kind == "attend" or (op.kind == "linear" and op.copies == 1 and op.n_out == hidden != op.n_in)


def _is_layer(block: Block) -> bool:
    return block.layers is not None and block.group == "language"


def _find_hidden(rows: Sequence[Row]) -> int:
    """The width of the residual stream: what the head reads, else the first table or norm."""
    sizes = [row.op.n_in for row in rows if row.op.part == "lm_head" and row.op.kind == "linear"]
    sizes += [row.op.size for row in rows if row.op.kind in ("embed", "norm")]
    return sizes[0] if sizes else 1


def _count_tied(rows: Sequence[Row]) -> tuple[int, int]:
    """Parameters that the head shares with the table of embeddings, and those of them that train."""
    heads = [row for row in rows if row.op.part == "lm_head" and row.op.kind == "linear" and row.op.tied]
    sizes = [(row.op.n_in * row.op.n_out, row.owes_weight) for row in heads]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


class _Maker:
    """Sums up blocks into one place; bytes are those of fused kernels: each tensor read and written once per use."""

    def __init__(self, hidden: int, load: Workload) -> None:
        self.hidden = hidden
        self.load = load
        self.linears: list[Linear] = []
        self.cores: list[Core] = []
        self.sums: dict[str, float] = {}
        self.opened = 0.0  # outputs that the next activation reads
        self.kept: tuple[int, int] | None = None  # the input that the last linear layer keeps, and how often it runs
        self.flows = True  # a gradient passes

    def add(self, block: Block, rows: Sequence[tuple[Row, int]], share: float) -> None:
        """One block, which occurs `share` times in the place; a value is what one sample runs it over."""
        ops = [row.op for row, _ in rows]
        ways = _find_ways(ops, self.hidden)
        self.opened, self.kept = 0.0, None
        self.flows = any(row.backward or row.trainable for row, _ in rows)
        for place, (row, value) in enumerate(rows):
            op, module = row.op, join(block.path, row.op.name)
            is_expert = op.copies > 1 and op.kind in ("linear", "conv")
            self._sum("experts" if is_expert else "dense", share * row.parameters)
            self._sum("experts_trained" if is_expert else "dense_trained", share * row.trainable)
            if op.kind in ("linear", "conv"):
                self._add_linear(module, share, row, value, *ways[place])
                continue
            self.kept = None
            amount = share * value * op.times
            if op.kind == "attend":
                self._add_core(module, share, row, value, _find_kv(ops[:place], op, ways))
            elif op.kind == "norm":
                # A norm of heads runs over all that the layer before it put out.
                is_inner = op.size < self.hidden // 2 and place > 0 and ops[place - 1].kind == "linear"
                width = ops[place - 1].n_out if is_inner else op.size
                kind = "wide" if width == self.hidden else "narrow"
                self._move(kind, amount * 4 * width, amount * 6 * width)
                self._save(kind, amount * 2 * width)
            elif op.kind == "embed":
                self._move("wide", amount * 4 * op.size, amount * 6 * op.size)
            elif row.forward:
                self._sum("other_flops", share * (row.forward + row.backward) * value)

    def _add_linear(self, module: str, share: float, row: Row, value: int, way: str, heads: int) -> None:
        op = row.op
        amount = share * value * op.times  # rows
        owes = row.owes_weight and row.backward > 0
        has_dgrad = row.backward > ((op.flops or product_flops(op)) if owes else 0)
        kv = op.n_out if way == "kv" else 0
        way = "column" if way == "kv" else way
        if value:
            self._append(
                Linear(
                    module, op.part, share, value * op.times, op.n_out, op.n_in, op.copies, way, kv, heads, has_dgrad,
                    owes,
                )
            )  # fmt: skip
        if way == "row" or (way == "expert" and op.n_out == self.hidden):
            # The activation before it reads what was opened and writes this one's input; then comes the residual sum.
            self._move("narrow", amount * 2 * (self.opened + op.n_in), amount * 2 * (2 * self.opened + op.n_in))
            self._move("wide", share * value * 6 * self.hidden, share * value * 6 * self.hidden)
            self._save("narrow", amount * 2 * self.opened)
            self._save("narrow", amount * 2 * op.n_in, is_input=True)
            self.opened, self.kept = 0.0, None
            if way == "row":
                self._sum("exits", share)
            else:
                # Rows are put in the experts' order and back.
                self._move("narrow", amount * 8 * self.hidden, amount * 8 * self.hidden)
                self._sum("routed", amount * 2 * self.hidden)
            return
        if op.part not in ("attention_projections", "router", "lm_head"):
            self.opened += op.n_out
        if self.kept != (op.n_in, op.times):  # siblings keep one input
            is_wide = op.n_in == self.hidden and way != "expert"
            self._save("wide" if is_wide else "narrow", amount * 2 * op.n_in, is_input=True)
            self.kept = (op.n_in, op.times)
        if op.part == "lm_head":
            # bf16 logits to fp32, the loss over them, and back.
            self._move("narrow", amount * 10 * op.n_out, amount * 8 * op.n_out)

    def _append(self, made: Linear) -> None:
        """Column-cut siblings become one product, as frameworks for many devices do it."""
        last = self.linears[-1] if self.linears else None
        keys = ("part", "share", "rows", "k", "copies", "way", "has_dgrad", "has_wgrad")
        is_sibling = last is not None and made.way == "column" and made.part in ("attention_projections", "mlp")
        if last is not None and is_sibling and all(getattr(last, key) == getattr(made, key) for key in keys):
            heads = max(last.kv_heads, made.kv_heads)
            self.linears[-1] = last._replace(n=last.n + made.n, kv=last.kv + made.kv, kv_heads=heads)
        else:
            self.linears.append(made)

    def _add_core(self, module: str, share: float, row: Row, value: int, kv: tuple[int, int]) -> None:
        op = row.op
        heads, width = kv
        window = int(op.feature[2]) if op.feature[0] == "pairs" else 0
        calls = attention_calls(op.feature, self.load, op.times)
        if not calls and value:
            side = max(1, round(value**0.5))
            calls = {("full", side): 1}
        for (mask, length), many in calls.items():
            has_backward = row.backward > 0
            self.cores.append(
                Core(module, share, mask, many, op.heads, heads, op.qk, op.v, length, window, has_backward)
            )
            tokens = share * many * length
            queries = op.heads * op.qk
            # Rotary embeddings and the like: queries and keys once more.
            self._move("narrow", tokens * 4 * (queries + width / 2), tokens * 4 * (queries + width / 2))
            self._save("narrow", tokens * 2 * (queries + width))
            if self.flows:
                self._sum("saved_scores", share * many * 5 * op.heads * length * length)
            self._sum("ring", tokens * 2 * width)

    def _sum(self, name: str, amount: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + amount

    def _save(self, kind: str, size: float, is_input: bool = False) -> None:
        if self.flows:
            self._sum(f"saved_{kind}", size)
            self._sum(f"inputs_{kind}", size if is_input else 0.0)

    def _move(self, kind: str, forward: float, backward: float) -> None:
        self._sum(f"{kind} forward", forward)
        self._sum(f"{kind} backward", backward if self.flows else 0.0)

    def finish(self) -> Place:
        moved = {kind: tuple(self.sums.pop(f"{kind} {way}", 0.0) for way in ("forward", "backward")) for kind in
                 ("wide", "narrow")}  # fmt: skip
        return Place(
            tuple(self.linears), tuple(self.cores),
            wide=(moved["wide"][0], moved["wide"][1]), narrow=(moved["narrow"][0], moved["narrow"][1]), **self.sums,
        )  # fmt: skip


def _find_ways(ops: Sequence[Op], hidden: int) -> list[tuple[str, int]]:
    """Per op the side that tensor parallelism cuts a linear layer along, and the heads that limit it."""
    ways: list[tuple[str, int]] = []
    attends = [place for place, op in enumerate(ops) if op.kind == "attend"]
    for place, op in enumerate(ops):
        core = next((ops[at] for at in attends if at > place), None)
        before = ops[place - 1] if place else None
        if op.kind not in ("linear", "conv"):
            ways.append(("", 0))
        elif op.copies > 1:
            ways.append(("expert", 0))
        elif op.part == "router":
            ways.append(("whole", 0))
        elif op.n_out == hidden and (op.n_in != hidden or (before is not None and before.kind == "attend")):
            ways.append(("row", 0))
        elif op.part == "attention_projections" and core is not None and op.n_out < core.heads * core.qk:
            beside = [each for each in ops[: ops.index(core)] if each.part == op.part and each.kind == "linear"]
            is_low_rank = op.n_in == hidden and any(each.n_in not in (hidden, 0) for each in beside)
            heads = op.n_out // core.qk if core.qk and op.n_out % core.qk == 0 else 0
            ways.append(("whole", 0) if is_low_rank or not heads else ("kv", heads))
        else:
            ways.append(("column", 0))
    return ways


def _find_kv(before: Sequence[Op], core: Op, ways: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Heads of keys, and the width of keys and values together."""
    own = [way for op, way in zip(before, ways, strict=False) if way[0] == "kv"]
    if own:
        return own[-1][1], own[-1][1] * (core.qk + core.v)
    last = before[-1] if before else None
    extra = last.n_out - core.heads * core.qk if last is not None and last.kind == "linear" else 0
    if extra > 0 and extra % (core.qk + core.v or 1) == 0 and last is not None and last.n_out > core.heads * core.qk:
        return extra // (core.qk + core.v), extra  # one product makes queries, keys and values
    return core.heads, core.heads * (core.qk + core.v)


# --- which layouts there are ------------------------------------------------------------------------------------------
def find_problem(layout: Layout, cut: Cut, gpus: int, global_batch: int) -> tuple[str, str] | None:
    """The rule that a layout breaks for this model, device count and batch, and how; None if it keeps all."""
    dp, tp, pp, cp, ep = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep
    if layout.devices != gpus:
        return "devices", f"dp {dp} · tp {tp} · pp {pp} · cp {cp} are {layout.devices} devices, not {gpus}"
    if cut.heads % tp:
        return "heads", f"tp {tp} does not divide the model's {cut.heads} attention heads"
    if pp * layout.virtual > cut.layers + 2:  # the table and the head may take a layer's place
        return "layers", f"pp {pp} · {layout.virtual} virtual stages are more than the model's {cut.layers} layers"
    if cut.tokens % (2 * cp if cp > 1 else 1):
        return "sequence", f"cp {cp} needs sequences of a multiple of {2 * cp} tokens, not {cut.tokens}"
    if ep > 1 and cut.experts == 1:
        return "experts", f"ep {ep}: the model has no experts"
    if cut.experts % ep:
        return "experts", f"ep {ep} does not divide the model's {cut.experts} experts"
    if (dp * tp * cp) % ep:
        return "experts", f"ep {ep} does not divide dp · tp · cp = {dp * tp * cp}, over which experts are spread"
    if global_batch % (dp * layout.micro_batch):
        text = f"dp {dp} · micro-batch {layout.micro_batch} does not divide a global batch of {global_batch} sequences"
        return "batch", text
    batches = global_batch // (dp * layout.micro_batch)
    if layout.virtual > 1 and pp == 1:
        return "virtual", f"{layout.virtual} virtual stages need a pipeline: pp of 2 or more, not 1"
    if layout.virtual > 1 and batches % pp:
        return "virtual", f"{layout.virtual} virtual stages need micro-batches in multiples of pp {pp}, not {batches}"
    if layout.zero and dp * cp == 1:
        return "zero", f"zero {layout.zero} needs more than one data-parallel device"
    return None


def list_layouts(
    cut: Cut, gpus: int, global_batch: int, per_node: int, fixed: Mapping[str, Sequence[int | str]]
) -> Iterator[Layout]:
    """Every layout of the search, those that do not divide too; `fixed` holds the values that a degree may take."""
    tps = _choose(fixed, "tp", [tp for tp in _list_powers(per_node) if gpus % tp == 0])
    cps = _choose(fixed, "cp", [cp for cp in _list_powers(16) if cp == 1 or cut.tokens // cp >= 4096])
    eps = _choose(fixed, "ep", [ep for ep in _list_powers(cut.experts) if cut.experts % ep == 0])
    zeros = _choose(fixed, "zero", [0, 1, 2, 3])
    repeats = [str(word) for word in fixed.get("recompute", ("none", "full"))]
    for tp in tps:
        for cp in cps:
            left = gpus // (tp * cp)
            if left * tp * cp != gpus or not left:
                continue
            pps = _choose(fixed, "pp", [pp for pp in _list_divisors(left) if pp <= cut.layers])
            for pp in pps:
                dp = left // pp
                if dp * pp != left or dp not in fixed.get("dp", (dp,)):
                    continue
                virtuals = _choose(fixed, "virtual", _list_virtual(cut.layers, pp))
                batches = _choose(
                    fixed, "micro_batch", [b for b in _list_powers(32) if b == 1 or b * dp <= global_batch]
                )
                for ep in eps:
                    for virtual in virtuals:
                        for zero in zeros:
                            for batch in batches:
                                for repeat in repeats:
                                    yield Layout(dp, tp, pp, virtual, cp, ep, zero, batch, repeat)


def _choose(fixed: Mapping[str, Sequence[int | str]], name: str, usual: list[int]) -> list[int]:
    return [int(value) for value in fixed[name]] if name in fixed else usual


def _list_powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _list_divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0] if number <= 4096 else [
        each for each in range(1, 513) if number % each == 0
    ]  # fmt: skip


def _list_virtual(layers: int, pp: int) -> list[int]:
    """Numbers of chunks worth a try: those that split a device's layers evenly."""
    own = -(-layers // pp)
    return [1] if pp == 1 else [virtual for virtual in range(1, min(own, 12) + 1) if own % virtual == 0]


def split_layers(cut: Cut, layout: Layout) -> tuple[int, int, int]:
    """Layers on a device in the middle of the pipeline, the first and the last; the ends get fewer."""
    if layout.pp == 1:
        return cut.layers, cut.layers, cut.layers
    most = -(-cut.layers // (layout.pp * layout.virtual)) * layout.virtual
    missing = most * layout.pp - cut.layers
    last = max(0, most - (missing + 1) // 2)
    return most, max(0, most - missing // 2), last


# --- memory -----------------------------------------------------------------------------------------------------------
class Occupied(NamedTuple):
    """Bytes on the fullest device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    other: float

    @property
    def total(self) -> float:
        return sum(self)


def count_memory(cut: Cut, layout: Layout, global_batch: int, is_fused: bool = True, dtype: str = "bf16") -> Occupied:
    """Bytes of the fuller of a pipeline's first and last device (Korthikanti et al. 2022, by the model's own ops)."""
    middle, first, last = split_layers(cut, layout)
    ends = [(first, cut.first, layout.pp)]
    if layout.pp > 1:
        ends = [(first, cut.first, layout.pp), (last, cut.last, 1), (middle, Place(), layout.pp - 1)]
    else:
        ends.append((last, cut.last, 1))
    found = [_count_device(cut, layout, global_batch, is_fused, dtype, *end) for end in ends]
    if layout.pp == 1:
        # One device holds both ends; its layers are counted once.
        without = _count_device(cut, layout, global_batch, is_fused, dtype, last, Place(), 1)
        return Occupied(*(a + b - c for a, b, c in zip(found[0], found[1], without, strict=True)))
    return max(found, key=lambda memory: memory.total)


def _count_device(
    cut: Cut, layout: Layout, global_batch: int, is_fused: bool, dtype: str, layers: int, end: Place, in_flight: int
) -> Occupied:
    tp, cp, zero = layout.tp, layout.cp, layout.zero
    spread, expert_spread = layout.dp * cp, layout.expert_dp
    dense = (layers * cut.layer.dense + end.dense) / tp
    dense_trained = (layers * cut.layer.dense_trained + end.dense_trained) / tp
    if end is cut.last and layout.pp > 1:
        dense, dense_trained = dense + cut.tied[0] / tp, dense_trained + cut.tied[1] / tp
    experts = layers * cut.layer.experts / layout.ep
    experts_trained = layers * cut.layer.experts_trained / layout.ep

    def divide(stage: int) -> tuple[int, int]:
        return (spread, expert_spread) if zero >= stage else (1, 1)

    (by, ex), (grad_by, grad_ex), (opt_by, opt_ex) = divide(3), divide(2), divide(1)
    weights = WEIGHT_BYTES * (dense / by + experts / ex)
    if zero == 3:  # two layers are gathered at a time
        weights += 2 * WEIGHT_BYTES * (cut.layer.dense / tp + cut.layer.experts / layout.ep)
    gradients = GRADIENT_BYTES * (dense_trained / grad_by + experts_trained / grad_ex)
    optimizer = OPTIMIZER_BYTES * (dense_trained / opt_by + experts_trained / opt_ex)
    batches = global_batch // (layout.dp * layout.micro_batch)
    kept = min(in_flight, batches)
    if layout.virtual > 1:
        kept_layers = layers * kept * (1 + (layout.pp - 1) / (layout.pp * layout.virtual))
    else:
        kept_layers = layers * kept
    samples = layout.micro_batch / cp
    inputs = 2 * cut.tokens * cut.hidden * samples / (tp if layout.is_sequence_parallel else 1)
    whole = _count_saved(cut.layer, layout, is_fused, dtype) * samples
    if layout.recompute == "full":
        saved = kept_layers * inputs + whole
    elif layout.recompute == "half":
        saved = kept_layers * (inputs + whole) / 2
    else:
        saved = kept_layers * whole
    saved += _count_saved(end, layout, is_fused, dtype) * samples * kept
    # Logits in bf16 and fp32, and their gradient in bf16.
    logits = 8 * cut.logits * samples / tp if end is cut.last else 0.0
    return Occupied(weights, gradients, optimizer, saved, logits, FIXED_BYTES)


def _count_saved(place: Place, layout: Layout, is_fused: bool, dtype: str) -> float:
    scores = 0.0 if is_fused or layout.recompute == "selective" else place.saved_scores
    less = 0.5 if dtype == "fp8" else 0.0
    wide = (place.saved_wide - less * place.inputs_wide) / (layout.tp if layout.is_sequence_parallel else 1)
    return wide + (place.saved_narrow - less * place.inputs_narrow + scores) / layout.tp


def describe_missing(memory: Occupied, capacity: float) -> str:
    """How much does not fit, and what takes the most."""
    parts = sorted(zip(memory._fields, memory, strict=True), key=lambda part: -part[1])
    most = ", ".join(f"{name} {format_bytes(int(value))}" for name, value in parts[:2])
    return f"{format_bytes(int(memory.total - capacity))} more than {format_bytes(int(capacity))} ({most})"


def check_fixed(name: str, values: Sequence[int | str]) -> tuple[int | str, ...]:
    """The values that a degree may take, checked one by one."""
    if not values:
        raise RecipeError(f"{name}: no value given")
    for value in values:
        if name == "recompute":
            if value not in RECOMPUTE:
                raise RecipeError(f"recompute {format_value(value)} unknown; known: {', '.join(RECOMPUTE)}")
        elif isinstance(value, bool) or not isinstance(value, int) or not (0 if name == "zero" else 1) <= value < 10**7:
            raise WorkloadError(
                f"{name} must be a whole number of at least {0 if name == 'zero' else 1}, not {value!r}"
            )
        elif name == "zero" and value > 3:
            raise WorkloadError(f"zero must be 0, 1, 2 or 3, not {value}")
    return tuple(dict.fromkeys(values))
