"""What one step asks of a device: products, attention calls, moved bytes; and what the host dispatches for them."""

from __future__ import annotations

import math
from typing import NamedTuple

from flopcalc.core.count.count import Block, Row, product_flops
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Op, iterate
from flopcalc.core.workload.sums import Feature, attention_calls, evaluate_feature
from flopcalc.core.workload.workload import Workload
from flopcalc.prediction.operators import Operator, Operators, list_operators
from flopcalc.prediction.timeline import Stack

# Kinds of operators that cost the host alone: no kernel, or one that is timed as a product or an attention call.
HOST_ONLY = (
    "view", "make", "product", "product_grouped", "attention", "attention_masked", "module", "node", "read", "wrapper",
)  # fmt: skip


class Product(NamedTuple):
    """A matrix product of a linear layer with n outputs and k inputs over m rows, in one of its three directions."""

    module: str  # its path, layers folded: model.layers.*.mlp.up_proj
    group: str  # vision, projector, language, …: as in an Estimate
    part: str  # mlp, attention_projections, lm_head, …
    direction: str  # forward, dgrad, wgrad; m, n, k are the layer's in all three, as in table gemm
    m: int
    n: int
    k: int
    calls: float = 1  # in one step
    copies: int = 1  # experts: one grouped call over m rows in all, with this many weights
    is_again: bool = False  # recomputed
    is_patches: bool = False  # a tower's convolution: images to patches

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.calls


class Attention(NamedTuple):
    """One call of an attention kernel."""

    module: str
    group: str
    direction: str  # forward, backward
    mask: str  # causal, full, window, decode
    batch: int  # sequences in one call
    heads: int
    kv_heads: int
    qk: int
    v: int
    length: int  # queries
    keys: int
    window: int = 0
    calls: float = 1
    is_again: bool = False
    kernel: str = ""  # eager: plain products; flash, efficient, cudnn; without: the one that the device picks
    has_dropout: bool = False  # weights are dropped: another kernel

    @property
    def flops(self) -> float:
        """Of all calls, as a fused kernel computes them: scores once more on the way back."""
        pairs = self.batch * self.heads * self.length * self.keys / (2 if self.mask == "causal" else 1)
        return 2.0 * pairs * (self.qk + self.v) * self.calls * (2.5 if self.direction == "backward" else 1)


class Moved(NamedTuple):
    """Calls of an operator that is bound by the bytes it moves."""

    module: str
    group: str
    direction: str  # forward, backward, optimizer
    kind: str  # class of operator: pointwise, reduce, norm, softmax, copy, gather, …
    reads: float  # bytes of one call
    writes: float
    calls: float = 1
    is_again: bool = False
    tensors: int = 0  # an optimizer: how many it goes over


class Dispatched(NamedTuple):
    """What the host dispatches for a module."""

    module: str
    group: str
    way: str  # forward, backward, again (forward, while the backward pass runs), optimizer
    kind: str
    many: float

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is the call of a whole layer that is run again."""
        return self.way == "again" and self.kind == "module" and self.module.endswith(".*")


class Work(NamedTuple):
    """A step's work, and the operators that the host dispatches."""

    products: tuple[Product, ...]
    attention: tuple[Attention, ...]
    moved: tuple[Moved, ...]
    hosted: tuple[Dispatched, ...]
    stacks: tuple[Stack, ...]  # the model's stages in order of dataflow
    notes: tuple[str, ...] = ()
    is_recorded: bool = True  # the family's operators are known
    model_type: str = ""

    @property
    def dispatched(self) -> dict[str, float]:
        """Way and kind -> how many."""
        found: dict[str, float] = {}
        for each in self.hosted:
            name = f"{each.way} {each.kind}"
            found[name] = found.get(name, 0) + each.many
        return found


# --- From the core's op list ------------------------------------------------------------------------------------------
OPTIMIZERS = ("adamw", "adamw-foreach", "none")


def make_work(
    estimator: Estimator,
    load: Workload,
    *,
    optimizer: str = "adamw",
    dtype_bytes: int = 2,
    kernel: str = "",
) -> Work:
    """The work of one step of HF's own code, per micro-batch `load`.

    Products and attention come from the op list, everything else from the operators recorded of the model's family.
    `kernel` is eager (attention as plain products and a softmax) or a fused kernel; without, the device picks.
    """
    found = _list_operators(estimator, load, "eager" if kernel == "eager" else "sdpa", dtype_bytes)
    masked = {each.module for each in found.rows if each.kind == "attention_masked"}
    masked -= {each.module for each in found.rows if each.kind == "attention" and each.direction == "forward"}
    maker = _Maker(load, kernel, masked, found.has_dropout)
    rows = estimator.rows(load, "hardware")
    keys = _find_key_heads(estimator)
    for block, row, value in rows:
        if row.op.feature[0] == "padding" or not value:
            continue
        if row.op.kind in ("linear", "conv"):
            maker.add_linear(block, row, value)
        elif row.op.kind == "attend":
            maker.add_attention(block, row, keys)
        elif row.op.kind == "product" and row.forward:
            maker.add_flops(block, row, value)
    hosted, moved = [], []
    for each in found.rows:
        way = "again" if each.is_again else each.direction
        hosted.append(Dispatched(each.module, each.group, way, each.kind, each.count))
        if each.kind not in HOST_ONLY:
            kind = each.kind
            if kind == "cast":
                kind = "cast_up" if each.writes > each.reads else "cast_down"
            elif kind == "cat" and load.phase == "decode":  # a row behind many: far slower than halves side by side
                kind = "cat_cache"
            moved.append(
                Moved(each.module, each.group, each.direction, kind, each.reads, each.writes, each.count, each.is_again)
            )
    notes = list(found.notes)
    if load.phase != "decode" and any(call.calls > 1000 for call in maker.attention):
        notes.append(
            "attention goes over windows one by one here, in many small calls of the host: expect 30 % either way"
        )
    # Weights of a tower that has nothing to see get no gradient, and an optimizer passes over them.
    silent = (() if load.all_grids else ("vision", "projector")) + (() if load.clips else ("audio",))
    stepped = [(block, row) for block, row, _ in rows if row.trainable and block.group not in silent]
    tensors = count_tensors(stepped) if load.phase == "train" else 0
    if tensors and optimizer != "none":
        size = sum(row.trainable * block.copies for block, row in stepped) * dtype_bytes
        states = 2  # AdamW reads weight, gradient and two states, and writes all but the gradient
        moved.append(
            Moved("optimizer", "optimizer", "optimizer", optimizer, (2 + states) * size, (1 + states) * size,
                  tensors=tensors)
        )  # fmt: skip
        hosted.append(Dispatched("optimizer", "optimizer", "optimizer", optimizer, tensors))
    stacks = tuple(
        Stack(
            stage.path, len(stage.layers) if stage.repeated else 0,
            tuple(dict.fromkeys(op.name for chain in stage.layers[:1] for op in iterate(chain))),
        )
        for stage in estimator.stages
    )  # fmt: skip
    return Work(
        tuple(maker.products), tuple(maker.attention), tuple(moved), tuple(hosted), stacks, tuple(notes),
        found.is_recorded, str(estimator.source.config["model_type"]),
    )  # fmt: skip


def _find_key_heads(estimator: Estimator) -> dict[str, int]:
    """Stage path -> heads of keys, where a product named after keys tells."""
    found: dict[str, int] = {}
    for stage in estimator.stages:
        for chain in dict.fromkeys(stage.layers):
            ops = list(iterate(chain))
            width = next((op.qk for op in ops if op.kind == "attend"), 0)
            made = next((op.n_out for op in ops if op.kind == "linear" and op.name.endswith("k_proj")), 0)
            if width and made and not made % width:
                found[stage.path] = made // width
    return found


class _Maker:
    """Turns rows of the core into calls."""

    def __init__(self, load: Workload, kernel: str, masked: set[str], has_dropout: bool) -> None:
        self.load, self.kernel, self.masked, self.has_dropout = load, kernel, masked, has_dropout
        self.is_train = load.phase == "train"
        self.steps = count_calls(load)
        self.products: list[Product] = []
        self.attention: list[Attention] = []

    def add_linear(self, block: Block, row: Row, value: int) -> None:
        op = row.op
        base = product_flops(op)
        m = value * op.times // self.steps
        self._add(block, op, m, op.n_out, op.n_in, op.copies, self._owed(row, base), row)
        rank = (
            (row.forward - base) // (2 * (op.n_in + op.n_out) * op.times) if row.forward > base and not op.flops else 0
        )
        if rank:
            owed = ("dgrad", "wgrad") if self.is_train and row.backward else ()
            for n, k in ((rank, op.n_in), (op.n_out, rank)):
                self._add(block, op, m, n, k, 1, owed, row)

    def _owed(self, row: Row, flops: int) -> tuple[str, ...]:
        if not self.is_train or not row.backward:
            return ()
        if row.owes_weight:
            return ("dgrad", "wgrad") if row.backward >= 2 * flops else ("wgrad",)
        return ("dgrad",) if row.backward >= flops else ()

    def _add(
        self, block: Block, op: Op, m: int, n: int, k: int, copies: int, owed: tuple[str, ...], row: Row
    ) -> None:  # fmt: skip
        calls = block.copies * self.steps
        module, is_conv = name_module(block, op), op.kind == "conv" and block.group == "vision"
        ways = [("forward", False)] if row.forward else []
        ways += [(direction, False) for direction in owed]
        ways += [("forward", True)] if self.is_train and row.recompute else []
        for direction, is_again in ways:
            self.products.append(
                Product(module, block.group, op.part, direction, m, n, k, calls, copies, is_again, is_conv)
            )

    def add_flops(self, block: Block, row: Row, value: int) -> None:
        """Products of activations (scans, fixed mixes): as one square product of as many FLOPs."""
        calls = block.copies * self.steps
        for direction, flops in (("forward", row.forward), ("dgrad", row.backward if self.is_train else 0)):
            if flops:
                side = max(1, round((flops * value / self.steps / 2) ** (1 / 3)))
                self.products.append(
                    Product(name_module(block, row.op), block.group, row.op.part, direction, side, side, side, calls)
                )

    def add_attention(self, block: Block, row: Row, keys: dict[str, int]) -> None:
        op, load = row.op, self.load
        if not row.forward and not row.backward:
            return
        ways = [("forward", False)] if row.forward else []
        if self.is_train:
            ways += [("backward", False)] if row.backward else []
            ways += [("forward", True)] if row.recompute else []
        feature = op.feature if op.feature[0] != "minus" else op.feature[1]
        if feature[0] == "either":  # what HF executes
            feature = feature[2]
        if feature[0] == "decoder" and load.decoder is not None:
            feature, load = feature[1:], load.decoder
        module, kv = name_module(block, op), keys.get(block.path, op.heads)
        window = int(feature[2]) if feature[0] == "pairs" and len(feature) > 2 else 0
        shapes = []
        if load.phase == "decode" and feature[0] == "pairs":
            past = load.context + (load.seq + 1) // 2
            shapes = [("decode", load.rows, 1, min(past, window) if window else past, self.steps)]
        elif feature[0] == "sum":
            shapes = self._find_summed(feature, op.times)
        else:
            for (mask, length), many in attention_calls(feature, load, op.times).items():
                # HF's grid towers call attention once per image or window; all others once per batch.
                one_by_one = feature[0] in ("frames", "windows")
                # Where HF hands a mask over, the kernel goes through all pairs.
                if 0 < window <= length or (mask == "causal" and module in self.masked):
                    mask = "window"
                shapes.append((mask, 1 if one_by_one else many, length, length, many if one_by_one else 1))
        for mask, batch, length, known, calls in shapes:
            for direction, is_again in ways:
                self.attention.append(
                    Attention(module, block.group, direction, mask, batch, op.heads, kv, op.qk, op.v, length, known,
                              window, calls * block.copies,
                        is_again,
                        self.kernel,
                        self.has_dropout and block.group == "language",
                    )
                )  # fmt: skip

    def _find_summed(self, feature: Feature, times: int) -> list[tuple[str, int, int, int, int]]:
        """Calls of an attention op that tells its pairs as a sum over images, clips or rows: all of them alike."""
        load, unit = self.load, feature[1]
        pairs = evaluate_feature(feature, load, "full") * times
        if unit in ("image", "clip"):
            many = len(load.all_grids if unit == "image" else load.clips)
            side = math.isqrt(pairs // many) if many else 0
            return [("full", many, side, side, 1)] if side else []
        own = load.decoder if unit == "decoder" and load.decoder is not None else load
        length = 1 if load.phase == "decode" else own.seq
        keys = -(-pairs // (own.rows * length * self.steps))
        return [("decode" if load.phase == "decode" else "full", own.rows, length, keys, self.steps)] if keys else []


def count_calls(load: Workload) -> int:
    """How many times a step calls the model: decoding once per token, an encoder-decoder's of its decoder."""
    side = load.decoder if load.decoder is not None else load
    return side.seq if load.phase == "decode" else 1


def _list_operators(estimator: Estimator, load: Workload, attention: str, dtype_bytes: int) -> Operators:
    """Operators of the whole model; an encoder's, a decoder's and an audio tower's each over their own rows."""
    sides = _find_sides(estimator, load)
    main = list_operators(estimator, sides.get("language") or load, attention, dtype_bytes)
    if not sides:
        return main
    listed = {"language": main}
    for stream, side in sides.items():
        if side is not None and stream != "language":
            listed[stream] = list_operators(estimator, side, attention, dtype_bytes)
    streams = {f"{stage.path}.": stage.stream for stage in estimator.stages}

    def find_stream(row: Operator) -> str:
        inside = [path for path in streams if f"{row.module}.".startswith(path)]
        stream = streams[max(inside, key=len)] if inside else "language"
        return stream if stream in sides else "language"

    rows = tuple(row for stream, found in listed.items() for row in found.rows if find_stream(row) == stream)
    return main._replace(rows=rows)


def _find_sides(estimator: Estimator, load: Workload) -> dict[str, Workload | None]:
    """Stream -> the workload that its stages see, where that is not the step's own; None: it does not run."""
    sides: dict[str, Workload | None] = {}
    is_decode = load.phase == "decode"
    if load.decoder is not None:
        own = load.decoder
        one = own.replace(seq=1, context=own.context + (own.seq - 1) // 2) if is_decode else own
        sides["language"] = load.replace(seq=own.seq, context=own.context, logits=own.logits, decoder=one)
        sides["encoder"] = None if is_decode else load
    towers = [stage for stage in estimator.stages if stage.stream == "audio"]
    if towers:
        ops = [op for stage in towers if stage.repeated for op in iterate(stage.layers[0]) if op.kind == "linear"]
        rows = evaluate_feature(ops[0].feature, load, "full") * ops[0].times if ops and not is_decode else 0
        sides["audio"] = load.replace(seq=max(1, rows // load.rows)) if rows else None
    return sides


def count_tensors(rows: list[tuple[Block, Row]]) -> int:
    """How many tensors an optimizer's step goes over."""
    return sum(
        block.copies * (1 + (row.op.bias and row.op.kind != "param"))
        for block, row in rows
        if row.op.feature[0] != "padding"
    )


def name_module(block: Block, op: Op) -> str:
    """A module's path with its layer's number folded to *."""
    path = f"{block.path}.*" if block.layers is not None else block.path
    return f"{path}.{op.name}".rstrip(".")
