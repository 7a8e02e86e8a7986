"""The adapter between the count and the engine: an estimator's rows in, the Work of one step out."""

from __future__ import annotations

import math

from flopcalc.base.vocabulary import (
    CallKernel,
    CallMask,
    Execution,
    Mask,
    Optimizer,
    PassDirection,
    ProductDirection,
    RecordedAttention,
)
from flopcalc.core.count.products import Block, CountedRow, Product, Row
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Attend, Embed, Linear, Multiply, Op, iterate
from flopcalc.core.workload.sums import Either, Expression, Frames, InDecoder, Minus, Pairs, Sum, Windows
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.attention_blocks import block_pairs, pad_head
from flopcalc.hardware.routing import EVEN
from flopcalc.hardware.tiles import ProductSize
from flopcalc.prediction.fused_kernels import list_fused
from flopcalc.prediction.kernels.attention import DROPPING
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.memory_bound import FLOAT
from flopcalc.prediction.moe_versions import USUAL
from flopcalc.prediction.operators import Operator, Operators, list_operators
from flopcalc.prediction.rows import count_queries, find_owed, name_module
from flopcalc.prediction.tensor_parallel import find_sides, list_wide
from flopcalc.prediction.timeline import Stack
from flopcalc.prediction.work import Attention, HostCall, MemoryCall, ProductCall, TensorSplit, Width, Work

# Kinds of operators that cost the host alone: no kernel, or one that is timed as a product or an attention call.
HOST_ONLY = (
    "view",
    "make",
    "product",
    "product_grouped",
    "attention",
    "attention_masked",
    "attention_plain",
    "attention_biased",
    "module",
    "node",
    "read",
    "wrapper",
)
# What an optimizer's step reads and writes per trained parameter: numbers as wide as the parameter, then other bytes.
# AdamW reads weight, gradient and two states, and writes all but the gradient. With master weights it reads the fp32
# gradient, weight and states, and writes the fp32 weight, states and the 16-bit weight. An offloaded one is the host's.
_STEPS: dict[Optimizer, tuple[int, int, int, int]] = {
    "adamw": (4, 0, 3, 0), "adamw-foreach": (4, 0, 3, 0), "adamw-master": (0, 16, 0, 14), "adamw-32bit": (2, 8, 1, 8),
    "adamw-8bit": (2, 2, 1, 2), "adamw-fp8": (2, 2, 1, 2), "lion": (3, 0, 2, 0), "sgd": (2, 0, 1, 0),
    "sgd-momentum": (3, 0, 2, 0), "adamw-offload": (0, 0, 0, 0), "none": (0, 0, 0, 0),
}  # fmt: skip
UNTIMED = "the time of {} was not measured: it is that of AdamW for as many bytes"
SCANS = "what the layers' scans or selections of keys take was never measured: they may take far longer"
# Weights that are made whole before a product: kind of that call, and bytes that it reads of each number. bitsandbytes'
# nf4 and torch's own int8 were measured.
WHOLE = {"nf4": ("dequantize", 0.5), "fp4": ("dequantize", 0.5), "int8": ("dequantize_int8", 1.0)}
_BIASED: dict[str, CallKernel] = {"attention_plain": "math", "attention_biased": "efficient"}  # with a trained bias
_ALIGNED = 8  # head dims that SDPA's fused kernels take are multiples
_JOINED = ("attention_projections", "mlp")  # parts whose products of one input frameworks multiply at once


def make_work(
    estimator: Estimator,
    load: Workload,
    *,
    optimizer: Optimizer = "adamw",
    dtype_bytes: int = 2,
    kernel: CallKernel = "",
    execution: Execution = "eager",
    transformers: str = USUAL,
    in_trainer: bool = False,
    clips: bool = False,
) -> Work:
    """The work of one step, per micro-batch `load`.

    Products and attention come from the op list; everything else from the operators recorded of the model's family or,
    where `execution` is fused, from what fused kernels move. `kernel` is eager (attention as plain products and a
    softmax) or a fused kernel; without, the device picks. `transformers` is the version whose code runs;
    `in_trainer`: with what HF's Trainer does around a step; `clips`: with what `torch.nn.utils.clip_grad_norm_` does
    before an optimizer's step.
    """
    rows = estimator.rows(load, "hardware")
    is_fused = execution == "fused"
    found = (
        Operators((), (), (), True) if is_fused else _list_operators(estimator, load, kernel, dtype_bytes, transformers)
    )
    masked = {each.module for each in found.rows if each.kind == "attention_masked" or each.kind in _BIASED}
    masked -= {each.module for each in found.rows if each.kind == "attention" and each.direction == "forward"}
    own = estimator.formats.attention
    biased = {each.module: _BIASED[each.kind] for each in found.rows if each.kind in _BIASED}
    maker = _Maker(load, kernel, masked, biased, found.has_dropout, is_fused, own, estimator)
    sides = {block: find_sides([row.op for row in block.rows]) for block, _, _ in rows}
    for counted in rows:
        block, row, values = counted
        if row.find("padding") is not None or not any(values):
            continue
        if isinstance(row.op, Linear):
            maker.add_linear(counted, row.op, sides[block].get(row.op, TensorSplit()))
        elif isinstance(row.op, Attend):
            maker.add_attention(block, row, row.op)
        elif isinstance(row.op, Multiply):
            maker.add_flops(counted, row.op)
    notes = list(found.notes)
    if is_fused:
        hosted: list[HostCall] = []
        moved = [*list_fused(estimator, load, rows, sides, maker.attention, dtype_bytes), *maker.scanned]
        notes += [SCANS] if maker.multiplied else []
    else:
        hosted, moved = _read_operators(found, load, list_wide(estimator))
        moved += maker.padded
        _add_dequantized(rows, maker.products, moved, hosted)
    if load.phase != "decode" and any(call.calls > 1000 for call in maker.attention):
        notes.append(
            "attention goes over windows one by one here, as HF's SDPA code does, in many small calls of the host: "
            "expect 30 % either way; flash_attention_2, one call for all windows, is not modelled"
        )
    stored = 4 if estimator.formats.narrows_weights else dtype_bytes  # bytes of a weight
    if in_trainer and load.phase == "train":
        _add_trainer(rows, moved, hosted, is_cast=estimator.formats.narrows_weights)
    _add_optimizer(rows, load, optimizer, stored, moved, hosted, is_fused, in_trainer, clips)
    return Work(
        tuple(maker.products),
        tuple(maker.attention),
        tuple(moved),
        tuple(hosted),
        list_stacks(estimator),
        tuple(notes),
        not maker.multiplied if is_fused else found.is_recorded,
        str(estimator.source.config["model_type"]),
        execution,
        any(op.part == "ssm" for op in maker.multiplied),
    )


def list_stacks(estimator: Estimator) -> tuple[Stack, ...]:
    """The model's stages in order of dataflow."""
    return tuple(
        Stack(
            stage.path,
            len(stage.layers) if stage.repeated else 0,
            tuple(dict.fromkeys(op.name for chain in stage.layers[:1] for op in iterate(chain))),
            stage.repeated and stage.group == "language",
        )
        for stage in estimator.stages
    )


# --- everything beside products and attention -------------------------------------------------------------------------
def _read_operators(found: Operators, load: Workload, wide: set[str]) -> tuple[list[HostCall], list[MemoryCall]]:
    """Recorded operators as what the host dispatches and what the device moves."""
    hosted, moved = [], []
    for each in found.rows:
        way = "again" if each.is_again else each.direction
        hosted.append(HostCall(each.module, each.group, way, each.kind, each.count))
        if each.kind not in HOST_ONLY:
            kind = each.kind
            if kind == "cast":
                kind = "cast_up" if each.writes > each.reads else "cast_down"
            elif kind == "cat" and load.phase == "decode":  # one row after many: far slower than two halves
                kind = "cat_cache"
            width: Width = "wide" if each.module in wide else "narrow"
            moved.append(
                MemoryCall(each.module, each.group, each.direction, kind, each.reads, each.writes, each.count,
                      each.is_again, 0, width)
            )  # fmt: skip
    return hosted, moved


def _add_dequantized(
    rows: list[CountedRow], products: list[ProductCall], moved: list[MemoryCall], hosted: list[HostCall]
) -> None:
    """Before each product of a weight of few bits the whole weight is made in bf16; int8's scales come after it."""
    stored = {name_module(block, row.op): row for block, row, _ in rows if row.numbers.weight.name in WHOLE}
    for product in products:
        row = stored.get(product.module)
        direction, m, n, k, copies, _ = product.size
        if row is None or direction == "wgrad" or product.weight_bytes or (n, k) != (row.op.n_out, row.op.n_in):
            continue
        way: PassDirection = "forward" if direction == "forward" else "backward"
        kind, read = WHOLE[row.numbers.weight.name]
        scaled = {"pointwise": (2.0 * m * n * copies, 2.0 * m * n * copies)} if read == 1 else {}
        moved += [
            MemoryCall(product.module, product.group, way, name, *size, product.calls, product.is_again)
            for name, size in {kind: (read * n * k * copies, 2.0 * n * k * copies), **scaled}.items()
        ]
        hosted.append(
            HostCall(product.module, product.group, "again" if product.is_again else way, "cast", 2 * product.calls)
        )


def count_step_bytes(optimizer: Optimizer, width: int) -> tuple[int, int]:
    """Bytes that a step reads and writes per trained parameter of so many bytes."""
    reads, read, writes, written = _STEPS[optimizer]
    return reads * width + read, writes * width + written


def _add_optimizer(
    rows: list[CountedRow],
    load: Workload,
    optimizer: Optimizer,
    dtype_bytes: int,
    moved: list[MemoryCall],
    hosted: list[HostCall],
    is_fused: bool,
    in_trainer: bool,
    clips: bool,
) -> None:
    # Weights of a tower that has nothing to see get no gradient, and an optimizer passes over them.
    silent = (() if load.all_grids else ("vision", "projector")) + (() if load.clips else ("audio",))
    stepped = [(block, row) for block, row, _ in rows if row.trainable and block.group not in silent]
    tensors = sum(block.copies * (1 + row.op.bias) for block, row in stepped if row.find("padding") is None)
    read, written = count_step_bytes(optimizer, dtype_bytes)
    if load.phase != "train" or not tensors or not read:
        return
    trained = sum(row.trainable * block.copies for block, row in stepped)
    if optimizer == "adamw-master":
        tensors = 1  # one flat buffer
    tied = {row.op.tied for _, row, _ in rows}
    unseen = _count_unseen(stepped, tied, load) / trained
    sizes = (read * trained, written * trained)
    suffix = FLOAT if dtype_bytes == 4 and optimizer == "adamw" else ""
    moved.append(
        MemoryCall("optimizer", "optimizer", "optimizer", optimizer + suffix, *sizes, tensors=tensors, unseen=unseen)
    )
    if clips:  # reads every gradient for its norm, then scales it
        sizes = (2 * dtype_bytes * trained, dtype_bytes * trained)
        moved.append(
            MemoryCall("optimizer", "optimizer", "optimizer", "clipping of gradients", *sizes, tensors=tensors)
        )
    if not is_fused:
        plain = {"cleared": 0.0, "optimizer": float(clips), "fetched": 0.0}
        own = load_defaults().work.trainer if in_trainer else plain
        cleared = tensors * (1 + own["cleared"]) + own["fetched"]
        ways = (("cleared", cleared), ("optimizer", tensors * (1 + own["optimizer"])))
        hosted += [HostCall("optimizer", "optimizer", way, optimizer, many) for way, many in ways]


def _add_trainer(rows: list[CountedRow], moved: list[MemoryCall], hosted: list[HostCall], *, is_cast: bool) -> None:
    """What HF's Trainer does in each micro-batch: it reads the loss, walks the modules and widens the logits."""
    walked = sum(each.many for each in hosted if each.kind == "module" and each.way == "forward")
    walked *= load_defaults().work.trainer["modules"]
    hosted += [HostCall("", "language", "loss", kind, many) for kind, many in (("read", 1), ("module", walked))]
    for block, row, values in rows:
        if is_cast and row.op.part == "head":
            size = values[0] * row.op.n_out
            moved.append(MemoryCall(name_module(block, row.op), block.group, "forward", "cast_up", 2 * size, 4 * size))


def _count_unseen(stepped: list[tuple[Block, Row]], tied: set[str | None], load: Workload) -> float:
    """Weights of input embeddings, not tied to a head, whose tokens a batch of random ones does not have."""
    tables = [
        row.op
        for block, row in stepped
        if isinstance(row.op, Embed) and row.op.input_embedding and f"{name_module(block, row.op)}.weight" not in tied
    ]
    return sum(op.count * op.dim * math.exp(-load.tokens / op.count) for op in tables)


# --- products and attention -------------------------------------------------------------------------------------------
class _Maker:
    """Turns rows of the core into calls."""

    def __init__(
        self, load: Workload, kernel: CallKernel, masked: set[str], biased: dict[str, CallKernel],
        has_dropout: bool, is_fused: bool, own: str, estimator: Estimator,
    ) -> None:  # fmt: skip
        self.casts = bool(estimator.formats.autocast)
        self.own = own  # the number format of attention, and of all that has no other
        self.load, self.kernel, self.masked, self.biased, self.has_dropout = load, kernel, masked, biased, has_dropout
        self.is_fused = is_fused
        self.find_routing = estimator.find_routing
        self.is_train = load.phase == "train"
        self.steps = count_calls(load)
        self.products: list[ProductCall] = []
        self.attention: list[Attention] = []
        self.multiplied: list[Op] = []
        self.scanned: list[MemoryCall] = []
        self.padded: list[MemoryCall] = []
        # The last linear layer that may get siblings.
        self.before: tuple[Block, int, tuple[ProductCall, ...]] | None = None

    def add_linear(self, counted: CountedRow, op: Linear, sided: TensorSplit) -> None:
        """A linear layer's own product and its adapter's two; a folded adapter is one product per copy."""
        block, row, values = counted
        for product, value in zip(row.products, values, strict=True):
            m = value * op.times // self.steps
            if not value or product.role not in ("base", "adapter_a", "adapter_b", "fold"):
                continue
            if product.role == "base":
                folded: tuple[ProductDirection, ...] = ("wgrad",) if row.find("folded_weight") is not None else ()
                made = self._add(
                    block, op, m, op.n_out, op.n_in, op.copies, product, sided, folded, self._find_bytes(row, m)
                )
                if self.is_fused:
                    self._join(block, op, made)
            elif product.role == "fold":
                self._add(block, op, op.n_out, op.n_in, row.rank, op.copies, product, TensorSplit())
            else:
                self._add(block, op, m, product.n_out, product.n_in, 1, product, TensorSplit())

    def _add(
        self, block: Block, op: Linear, m: int, n: int, k: int, copies: int, product: Product,
        split: TensorSplit, more: tuple[ProductDirection, ...] = (), weight_bytes: float = 0.0,
    ) -> tuple[ProductCall, ...]:  # fmt: skip
        routing = self.find_routing(block) if op.active < copies else EVEN
        calls = block.copies * self.steps
        module = name_module(block, op)
        ways: list[tuple[ProductDirection, bool]] = [("forward", False)]
        ways += [(direction, False) for direction in (*find_owed(product), *more)] if self.is_train else []
        ways += [("forward", True)] if self.is_train and product.passes.recompute else []
        made = tuple(
            ProductCall(
                module, block.group, op, ProductSize(direction, m, n, k, copies, routing), calls, is_again, split,
                self._find_format(product, direction, op.part), weight_bytes,
            )
            for direction, is_again in ways
        )  # fmt: skip
        self.products += made
        return made

    def _find_bytes(self, row: Row, m: int) -> float:
        """Bytes that a product reads of each number of a quantized weight; 0 of a plain one, or of one made whole."""
        held = row.list_weights(has_adapters=False)[:1] if row.numbers.weight.is_quantized else []
        is_whole = row.numbers.weight.name in WHOLE and (m > 1 or self.is_train or row.numbers.weight.name == "int8")
        return 0.0 if is_whole or not held else held[0].total_bytes / held[0].parameters

    def _find_format(self, product: Product, direction: ProductDirection, part: str) -> str:
        # Training frameworks multiply a router's 16-bit numbers on tensor cores, into float32 (Megatron-Core's
        # router_gating_linear); HF's code brings them to float32 first.
        if self.is_fused and part == "router":
            return ""
        found = product.format if direction == "forward" else product.gradient_format
        return "" if found == self.own else found

    def _join(self, block: Block, op: Op, made: tuple[ProductCall, ...]) -> None:
        """Column-cut siblings become one product, as frameworks for many devices do it."""
        before = self.before
        is_sibling = bool(made) and made[0].split.side == "column" and op.part in _JOINED
        self.before = None
        if before is not None and is_sibling and before[0] is block and _are_siblings(before[2], made):
            del self.products[-len(made) :]
            first = before[1]
            joined = tuple(_join_pair(a, b) for a, b in zip(before[2], made, strict=True))
            self.products[first : first + len(joined)] = joined
            self.before = (block, first, joined)
        elif is_sibling:
            self.before = (block, len(self.products) - len(made), made)

    def add_flops(self, counted: CountedRow, op: Multiply) -> None:
        """Products of activations (scans, fixed mixes), in small tiles: bound by the bytes that they move."""
        block = counted.block
        self.multiplied.append(op)
        calls = block.copies * self.steps
        flops = counted.flops
        passes: list[tuple[PassDirection, int, bool]] = [("forward", flops.forward, False)]
        if self.is_train:
            passes += [("backward", flops.backward, False), ("forward", flops.recompute, True)]
        for direction, count, is_again in passes:
            if count and not self.is_fused and not is_again:
                side = max(1, round((count / self.steps / 2) ** (1 / 3)))
                way: ProductDirection = "dgrad" if direction == "backward" else direction
                self.products.append(
                    ProductCall(name_module(block, op), block.group, op, ProductSize(way, side, side, side), calls,
                                split=TensorSplit("column"), format="bf16")
                )  # fmt: skip
            elif count and self.is_fused:
                known = load_defaults().work
                per_byte = known.scan_flops_per_byte[direction] if op.part == "ssm" else known.mix_flops_per_byte
                size = count / self.steps / per_byte
                self.scanned.append(
                    MemoryCall(
                        name_module(block, op),
                        block.group,
                        direction,
                        "scan",
                        size / 2,
                        size / 2,
                        calls,
                        is_again,
                        width="narrow",
                    )
                )

    def add_attention(self, block: Block, row: Row, op: Attend) -> None:
        load = self.load
        ways: list[tuple[PassDirection, bool]] = [("forward", False)]
        if self.is_train:
            ways += [("backward", False)] if row.has_backward else []
            ways += [("forward", True)] if any(product.passes.recompute for product in row.products) else []
        pairs = op.rows.rows if isinstance(op.rows, Minus) else op.rows
        is_needed = False
        if isinstance(pairs, Either):  # HF goes through all keys; kernels of training frameworks read those selected
            is_told = isinstance(pairs.needed, (Pairs, Expression))
            is_needed = self.is_fused and is_told and self.kernel != "eager"
            pairs = pairs.needed if is_needed else pairs.executed
        if isinstance(pairs, InDecoder) and load.decoder is not None:
            pairs, load = pairs.inner, load.decoder
        module = name_module(block, op)
        window = pairs.window if isinstance(pairs, Pairs) else 0
        shapes: list[tuple[CallMask, int, int, int, float]] = []
        if load.phase == "decode" and isinstance(pairs, Pairs):
            past = load.context + (load.seq + 1) // 2
            shapes = [("decode", load.rows, 1, min(past, window) if window else past, self.steps)]
        elif isinstance(pairs, Expression):
            shapes = self._find_summed(module, pairs, block, op, is_needed)
        else:
            for (kept, length), many in pairs.attention_calls(load, op.times).items():
                shapes.append(self._find_shape(module, pairs, kept, length, many, window))
        is_padded = not self.is_fused and self.kernel in ("", "cudnn", "flash") and op.qk % _ALIGNED > 0
        kernel, qk, v = self.kernel, op.qk, op.v
        if module in self.biased:  # what one of SDPA's kernels does, or none where the bias lies otherwise in memory
            kernel, is_padded = self.biased[module], False
        if is_padded:
            kernel, qk, v = "flash", pad_head("flash", qk), pad_head("flash", v)
        drops = self.has_dropout and block.group == "language"
        for mask, batch, length, known, calls in shapes:
            mask = DROPPING.get(mask, mask) if drops else mask
            for direction, is_again in ways:
                call = Attention(
                    module, block.group, direction, mask, batch, op.heads, op.kv_heads, qk, v, length, known, window,
                    calls * block.copies, is_again, kernel, op.float_scores and not self.casts,
                )  # fmt: skip
                self.attention.append(call)
                if is_padded:
                    self.padded += _pad_heads(call, op.qk)

    def _find_shape(
        self, module: str, pairs: Sum, mask: Mask, length: int, many: int, window: int
    ) -> tuple[CallMask, int, int, int, float]:
        """Mask, sequences, queries, keys and calls of attention over `many` sequences of a length."""
        if self.is_fused:
            # One call over all; kernels of training frameworks skip the blocks that no query of a window sees.
            if mask == "window" and self.kernel != "eager":
                return "causal", many, length, length, block_pairs(length, window) / block_pairs(length)
            return mask, many, length, length, 1
        # HF's grid towers call attention once per image or window; all others once per batch.
        one_by_one = isinstance(pairs, (Frames, Windows))
        # Where HF hands a mask over, the kernel goes through all pairs.
        if 0 < window <= length or (mask == "causal" and module in self.masked):
            mask = "window"
        return mask, 1 if one_by_one else many, length, length, many if one_by_one else 1

    def _find_summed(
        self, module: str, rows: Expression, block: Block, op: Attend, is_needed: bool
    ) -> list[tuple[CallMask, int, int, int, float]]:
        """Calls of an attention op whose pairs a spec sums up: all of them alike."""
        load, unit = self.load, rows.unit
        pairs = rows.count(load, "full") * op.times
        if load.phase == "decode":
            own = load.decoder if unit == "decoder" and load.decoder is not None else load
            keys = -(-pairs // (own.rows * self.steps))
            return [("decode", own.rows, 1, keys, self.steps)] if keys else []
        queries = count_queries(op, [row.op for row in block.rows], load, is_needed=is_needed)
        if not pairs or not queries:
            return []
        is_joined = module in self.masked and unit == "call"  # all images are one sequence, and a mask keeps them apart
        many = 1 if is_joined else len(load.clips) if unit == "clip" else load.rows
        if unit in ("image", "call") and not is_joined:
            many = len(load.all_grids) or load.rows
        return [("apart" if is_joined else "full", many, -(-queries // many), -(-pairs // queries), 1)]


def _pad_heads(call: Attention, dim: int) -> list[MemoryCall]:
    """What SDPA copies where no fused kernel takes a head dim: queries, keys and values with zeros behind each head.

    On the way back the gradient gets zeros, three gradients lose theirs, and two tensors are laid out anew.
    """
    queries = 2.0 * call.batch * call.length * call.heads * dim
    keys = 2.0 * call.batch * call.keys * call.kv_heads * dim
    copied = [queries, keys, keys] if call.direction == "forward" else [*[queries] * 4, keys, keys]
    filled = copied if call.direction == "forward" else [queries]
    made = [("copy_strided", size, size) for size in copied] + [("fill", 0.0, size) for size in filled]
    return [
        MemoryCall(call.module, call.group, call.direction, kind, reads, writes, call.calls, call.is_again)
        for kind, reads, writes in made
    ]


def _are_siblings(one: tuple[ProductCall, ...], other: tuple[ProductCall, ...]) -> bool:
    """Whether two linear layers read the same rows and run in the same passes."""

    def strip(made: tuple[ProductCall, ...]) -> list[object]:
        same = [(each.size._replace(n=0), each.split.side, each.is_last, each.is_shared) for each in made]
        return [*same, *((each.group, each.part, each.calls, each.is_again, each.format) for each in made)]

    return strip(one) == strip(other)


def _join_pair(one: ProductCall, other: ProductCall) -> ProductCall:
    parent = one.module.partition("+")[0].rpartition(".")[0]
    name = other.module.removeprefix(f"{parent}.")
    keys = TensorSplit(one.split.side, one.split.kv + other.split.kv, max(one.split.kv_heads, other.split.kv_heads))
    size = one.size._replace(n=one.size.n + other.size.n)
    return one._replace(module=f"{one.module}+{name}", size=size, split=keys)


def count_calls(load: Workload) -> int:
    """How many times a step calls the model: decoding once per token, an encoder-decoder's of its decoder."""
    side = load.decoder if load.decoder is not None else load
    return side.seq if load.phase == "decode" else 1


def find_decoding_call(load: Workload, call: int) -> Workload:
    """One new token, after those that earlier calls of the same step left in the cache."""
    if load.decoder is not None:
        return load.replace(decoder=find_decoding_call(load.decoder, call))
    return load.replace(seq=1, context=load.context + call)


# --- recorded operators of several streams ----------------------------------------------------------------------------
def _list_operators(
    estimator: Estimator, load: Workload, kernel: CallKernel, dtype_bytes: int, transformers: str
) -> Operators:
    """Operators of the whole model; an encoder's, a decoder's and an audio tower's each over their own rows."""
    attention: RecordedAttention = "eager" if kernel == "eager" else "sdpa"
    sides = _find_sides(estimator, load)
    main = list_operators(estimator, sides.get("language") or load, attention, dtype_bytes, transformers)
    if not sides:
        return main
    listed = {"language": main}
    for stream, side in sides.items():
        if side is not None and stream != "language":
            listed[stream] = list_operators(estimator, side, attention, dtype_bytes, transformers)
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
        rows = ops[0].rows.count(load, "full") * ops[0].times if ops and not is_decode else 0
        sides["audio"] = load.replace(seq=max(1, rows // load.rows)) if rows else None
    return sides
