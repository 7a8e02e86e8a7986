"""Tensors of a step of HF's eager model: what autograd saves, what a layer holds at once, what a cache keeps; in bytes.

Saved tensors are those recorded of the model's type; what a GPU keeps and a recording on a CPU cannot show is added
here: masks that SDPA makes, copies that cuDNN's layout asks for, a byte per dropped number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from flopcalc.base.number_formats import find_computed
from flopcalc.base.vocabulary import Execution, Kernel, RecordedAttention
from flopcalc.core.count.products import Block, Row
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Attend, Chain, Dropout, Linear, Norm, Op, Pointwise, Stage, iterate, join
from flopcalc.core.workload.sums import Either, InDecoder, Pairs, Sum
from flopcalc.core.workload.workload import Workload
from flopcalc.prediction.build_work import count_calls, find_decoding_call
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.operators import Operators, SavedTensor
from flopcalc.prediction.tensor_parallel import count_chains, list_wide_saved

FLOAT = 4  # bytes of what is always computed in float32: losses, norms, softmax
_INDEX = 8  # bytes of a token's id, and of its label


class SplitBytes(NamedTuple):
    """An amount in two parts that a layout cuts apart: dense and experts, or of the residual's width and narrower."""

    dense: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.other

    def add(self, size: int, is_other: bool) -> SplitBytes:
        return SplitBytes(self.dense, self.other + size) if is_other else SplitBytes(self.dense + size, self.other)


class Kind(NamedTuple):
    """All layers of a stage that are alike."""

    number: int  # of the kind, among all of the language model's
    weights: SplitBytes  # bytes
    trained: SplitBytes  # parameters
    kept: SplitBytes  # bytes


class Part(NamedTuple):
    """One stage in the backward pass: bytes of all its layers together, and of the widest moment of one."""

    layers: int
    weights: SplitBytes  # bytes, of dense weights and of experts
    trained: SplitBytes  # parameters that get a gradient, dense and of experts
    kept: SplitBytes  # bytes saved until its layer's backward, of the residual's width and narrower
    extra: int  # the most that one layer's backward has beside its share of kept; 0: no gradient passes
    table: int  # of a weight that another stage shares: bytes of its gradient
    name: str  # of that weight
    is_language: bool = False  # layers of the language model, which a pipeline cuts
    is_last: bool = False  # behind them
    copied: int = 0  # parameters of a table that another stage holds: a pipeline's last device has its own
    wide_share: float = 0.0  # of what a layer saves, recomputed or not: the share that has the residual's width
    kinds: tuple[Kind, ...] = ()  # the same sums for layers that differ
    outputs: int = 0  # bytes that its attention puts out and keeps, all layers together


class Placed(NamedTuple):
    """An op of a layer with what its backward frees and makes."""

    op: Op
    rows: int
    saved: int
    gradient: int


def number_layers(estimator: Estimator) -> dict[tuple[str, int], int]:
    """Path and number of every language layer -> its kind: layers of one stage and the same ops are alike."""
    found: dict[tuple[str, int], int] = {}
    many = 0
    for stage in estimator.stages:
        if not (stage.repeated and stage.group == "language"):
            continue
        kinds = {chain: many + number for number, chain in enumerate(count_chains(stage))}
        same = {id(chain): kinds[chain] for chain in stage.kinds}
        found |= {(stage.path, stage.first + place): same[id(chain)] for place, chain in enumerate(stage.layers)}
        many += len(kinds)
    return found


class Step:
    """One model under one workload: the sizes that the moments are added up from."""

    def __init__(
        self,
        estimator: Estimator,
        load: Workload,
        dtype_bytes: int,
        attention: Kernel | RecordedAttention,
        execution: Execution = "eager",
        input_bytes: int = 0,
        is_light: bool = False,
        expert_imbalance: float = 1.0,
    ) -> None:
        self.estimator = estimator
        self.load = load
        # In decoding the last call is the largest, and one call is there at a time.
        self.call = find_decoding_call(load, count_calls(load) - 1) if load.phase == "decode" else load
        self.bytes = dtype_bytes
        self.input_bytes = input_bytes or dtype_bytes  # of what products keep of their inputs
        self.is_fused = execution != "eager"
        # torch.compile keeps what fused kernels do, and a little more.
        self.kept_share = load_defaults().work.compiled_keeps if execution in ("compiled", "graphs") else 1.0
        self.expert_imbalance = expert_imbalance  # rows that experts get over the mean
        self.is_light = is_light and self.is_fused  # what norms and activation functions make is made again
        is_eager = attention == "eager" or (not self.is_fused and not estimator.spec.has_sdpa)
        self.attention: RecordedAttention = "eager" if is_eager else "sdpa"
        self.has_cudnn = attention in ("sdpa", "auto", "cudnn") and not self.is_fused
        self.values: dict[Sum, int] = {}
        # PEFT keeps adapters in float32 with a half-precision model.
        self.has_adapters = estimator.recipe.lora is not None or bool(estimator.recipe.adapters)
        adapter = estimator.formats.adapter
        self.trained_bytes = find_computed(adapter or estimator.formats.model).bits // 8
        code = "HF's model in eager mode" if execution == "eager" else f"what {execution} kernels keep"
        self.notes: list[str] = [f"{code}; the allocator's rounding is left out"]
        if adapter == "fp32" and dtype_bytes != FLOAT:
            self.notes.append("LoRA's adapters in float32, as PEFT keeps them with a half-precision model")

    # --- sizes --------------------------------------------------------------------------------------------------------
    def rows(self, op: Op) -> int:
        """Rows that pass an op in one call."""
        value = self.values.get(op.rows)
        if value is None:
            value = self.values[op.rows] = op.rows.count(self.call, "full")
        many = value * op.times
        return round(many * self.expert_imbalance) if op.copies > 1 and self.expert_imbalance != 1 else many

    def count_logits(self) -> int:
        """Numbers that the head makes."""
        heads = (op for stage in self.estimator.stages for chain in stage.layers for op in iterate(chain))
        return sum(self.rows(op) * op.n_out for op in heads if op.part == "lm_head" and op.kind == "linear")

    def count_inputs(self, with_labels: bool) -> int:
        """Token ids, labels, and pixels or frames: what the first convolution of a tower reads."""
        tokens = self.call.rows * self.call.seq
        if self.call.decoder is not None:
            tokens += self.call.decoder.rows * self.call.decoder.seq
        total = tokens * _INDEX * (2 if with_labels else 1)
        seen = set()
        for stage in self.estimator.stages:
            first = next((op for chain in stage.layers[:1] for op in iterate(chain) if op.kind != "embed"), None)
            if first is not None and stage.group in ("vision", "audio") and stage.stream not in seen:
                seen.add(stage.stream)
                total += self.rows(first) * first.n_in * self.bytes
        return total

    def find_largest_layer(self) -> SplitBytes:
        """Parameters of the largest layer, or of the largest stage that is none."""
        layers = {(stage.path, stage.first): max(1, len(stage.layers)) for stage in self.estimator.stages}
        held = self._sum_rows(lambda row: row.parameters)
        sizes = [SplitBytes(*(size // layers[place] for size in sizes)) for place, sizes in held.items()]
        return max(sizes, key=lambda size: size.total, default=SplitBytes())

    def count_weights(self) -> dict[tuple[str, int], SplitBytes]:
        """Path and first layer of a stage -> bytes of its weights; adapters are wider than a half-precision model."""
        return self._sum_rows(lambda row: sum(held.total_bytes for held in row.list_weights(self.has_adapters)))

    def count_dequantized(self) -> int:
        """Bytes of the largest weight that bitsandbytes or HQQ dequantizes before its product; other kernels do not."""
        rows = [row for _, row, _ in self.estimator.rows(self.load, "full") if row.numbers.weight.flat]
        return max((row.op.n_in * row.op.n_out * self.bytes for row in rows), default=0)

    def _sum_rows(self, count: Callable[[Row], int]) -> dict[tuple[str, int], SplitBytes]:
        found: dict[tuple[str, int], SplitBytes] = {}
        for block, row, _ in self.estimator.rows(self.load, "full"):
            place = self._find_stage(block)
            size, at = count(row) * block.copies, found.get(place, SplitBytes())
            is_expert = row.op.kind in ("linear", "conv") and row.op.copies > 1
            found[place] = at.add(size, is_expert)
        return found

    def _find_stage(self, block: Block) -> tuple[str, int]:
        """Path and first layer of the stage that a block's layers belong to: two may have one path."""
        number = block.layers[0] if block.layers else 0
        firsts = [stage.first for stage in self.estimator.stages if stage.path == block.path and stage.first <= number]
        return block.path, max(firsts, default=0)

    # --- training -----------------------------------------------------------------------------------------------------
    def list_parts(self, found: Operators, gradient_bytes: int) -> tuple[list[Part], int]:
        """The stages in order of execution, and bytes that are saved outside of all of them."""
        saved = found.saved if found.is_recorded and not self.is_fused else self.list_usual()
        if self.kept_share != 1:
            saved = tuple(entry._replace(bytes=round(entry.bytes * self.kept_share)) for entry in saved)
        # HF embeds the text before it looks at images: autograd comes to the embedding last of all.
        stages = sorted(self.estimator.stages, key=lambda stage: not any(op.input_embedding for op in first_ops(stage)))
        places = [f"{stage.path}.*" if stage.repeated else stage.path for stage in stages]
        inside: list[list[SavedTensor]] = [[] for _ in stages]
        outside = 0
        for entry in saved:
            fitting = [
                i for i, place in enumerate(places) if entry.module == place or entry.module.startswith(f"{place}.")
            ]
            if fitting:
                inside[max(fitting, key=lambda i: len(places[i]))].append(entry)
            else:
                outside += entry.bytes * entry.count
        trained, owing, shared = self.read_blocks()
        weights, wide = self.count_weights(), list_wide_saved(self.estimator)
        numbers, sums = number_layers(self.estimator), self._sum_kinds()
        parts = []
        is_past = False
        for stage, entries in zip(stages, inside, strict=True):
            is_past = is_past or (stage.repeated and stage.group == "language")
            place = (stage.path, stage.first)
            part = self._make_part(
                stage,
                entries,
                stage.path in owing,
                trained.pop(place, SplitBytes()),
                gradient_bytes,
                self._find_shared(stage) if stage.path in shared else "",
                wide,
            )
            is_language = stage.repeated and stage.group == "language"
            own = {numbers[stage.path, stage.first + at]: chain for at, chain in enumerate(stage.layers) if is_language}
            kept = {kind: self._sum_kept(chain, entries, stage, wide) for kind, chain in own.items()}
            parts.append(
                part._replace(
                    kinds=tuple(Kind(kind, *sums.get(kind, (SplitBytes(), SplitBytes())), kept[kind]) for kind in own),
                    weights=weights.pop(place, SplitBytes()),
                    is_language=is_language,
                    is_last=is_past and stage.group == "language" and not stage.repeated,
                )
            )
        return parts, outside

    def _sum_kinds(self) -> dict[int, tuple[SplitBytes, SplitBytes]]:
        """Kind of layers -> bytes of their weights, and parameters that get a gradient."""
        numbers, (trained, _, _) = number_layers(self.estimator), self.read_blocks()
        found: dict[int, tuple[SplitBytes, SplitBytes]] = {}
        for block, row, _ in self.estimator.rows(self.load, "full"):
            gets = self._find_stage(block) in trained
            size = sum(held.total_bytes for held in row.list_weights(self.has_adapters))
            is_expert = row.op.kind in ("linear", "conv") and row.op.copies > 1
            for kind, many in Counter(numbers.get((block.path, number)) for number in block.layers or ()).items():
                if kind is not None:
                    weights, own = found.get(kind, (SplitBytes(), SplitBytes()))
                    trained_here = many * row.trainable if gets else 0
                    found[kind] = weights.add(many * size, is_expert), own.add(trained_here, is_expert)
        return found

    def read_blocks(self) -> tuple[dict[tuple[str, int], SplitBytes], set[str], set[str]]:
        """Parameters that get a gradient per stage, the stages that one passes, and those with weights that train.

        What does not run gets none, nor what runs and is never used: a tower without images, its last layers.
        """
        trained: dict[tuple[str, int], SplitBytes] = {}
        owing, training = set(), set()
        for block in dict.fromkeys(block for block, _, _ in self.estimator.rows(self.load, "full")):
            products = [row for row in block.rows if row.op.kind in ("linear", "conv")]
            has_gradient = any(row.has_backward for row in products)
            if not (has_gradient if products else any(self.runs(row.op) for row in block.rows)):
                continue
            experts = block.copies * sum(row.trainable for row in products if row.op.copies > 1)
            whole = block.copies * sum(row.trainable for row in block.rows)
            place = self._find_stage(block)
            at = trained.get(place, SplitBytes())
            trained[place] = SplitBytes(at.dense + whole - experts, at.other + experts)
            if any(row.has_backward or row.trainable for row in block.rows):
                owing.add(block.path)
            if any(row.trains_weight for row in block.rows):
                training.add(block.path)
        return trained, owing, training

    def _find_shared(self, stage: Stage) -> str:
        """The name of the weight that a stage shares with another; none where it shares none."""
        names = {op.tied for each in self.estimator.stages for op in first_ops(each) if op.tied}
        own = [op.tied or f"{join(stage.path, op.name)}.weight" for op in first_ops(stage)]
        return next((name for name in own if name in names), "")

    def _make_part(
        self,
        stage: Stage,
        saved: list[SavedTensor],
        owes: bool,
        trained: SplitBytes,
        gradient_bytes: int,
        shared: str,
        wide: set[str],
    ) -> Part:
        layers, gradients = len(stage.layers), trained.total * gradient_bytes
        prefix = f"{stage.path}.*." if stage.repeated else f"{stage.path}."
        saved = self._cut_dropout(stage, saved, prefix) + (self._list_masks(stage, prefix) if owes else [])
        if owes and self.attention == "sdpa" and self.has_cudnn:
            saved += self._list_outputs(stage, prefix)
        kept = sum(entry.bytes * entry.count for entry in saved if not entry.is_again)
        kept_wide = sum(entry.bytes * entry.count for entry in saved if not entry.is_again and entry.module in wide)
        whole_wide = sum(entry.bytes * entry.count for entry in saved if entry.module in wide)
        wide_share = whole_wide / max(1, sum(entry.bytes * entry.count for entry in saved))
        chains = count_chains(stage) if owes and stage.layers else Counter()
        ops_of = {chain: [op for op in iterate(chain) if self.runs(op)] for chain in chains}
        # Layers may differ: what a module saved belongs to those that have it.
        held = {chain: [0] * len(ops) for chain, ops in ops_of.items()}
        for entry in saved:
            name = entry.module[len(prefix) :]
            having = [chain for chain, ops in ops_of.items() if _has_module(ops, name)] or list(ops_of)
            many = sum(chains[chain] for chain in having)
            for chain in having:
                if ops_of[chain]:
                    place = self._find_op(ops_of[chain], name, entry.bytes)
                    held[chain][place] += entry.bytes * entry.count // many
        whole = max(1, sum(many * sum(map(_count_parameters, ops_of[chain])) for chain, many in chains.items()))
        extra = table = copied = 0
        for chain, ops in ops_of.items():
            placed = [
                Placed(op, self.rows(op), bytes_, gradients * _count_parameters(op) // whole)
                for op, bytes_ in zip(ops, held[chain], strict=True)
            ]
            if placed:
                extra = max(extra, 1, self._walk_back(placed) - kept // layers)
            if shared:
                table = sum(op.n_in * (op.n_out or op.size) for op in ops if op.kind in ("linear", "embed"))
                copied = sum(op.n_in * op.n_out for op in ops if op.kind == "linear" and op.tied)
        is_kept = self.is_fused and not (stage.checkpoint and self.estimator.recipe.recompute != "none")
        outputs = sum(many * self._count_outputs(ops_of[chain]) for chain, many in chains.items()) if is_kept else 0
        return Part(
            max(1, layers),
            SplitBytes(),
            trained,
            SplitBytes(kept_wide, kept - kept_wide),
            extra,
            table * self.bytes,
            shared,
            copied=copied,
            wide_share=wide_share,
            outputs=outputs,
        )

    def _count_outputs(self, ops: list[Op]) -> int:
        """Bytes that the attention of one layer puts out."""
        found = 0
        for i, op in enumerate(ops):
            before = [other for other in ops[:i] if other.kind == "linear"]
            if isinstance(op, Attend) and before:
                found += self.bytes * self.rows(before[-1]) * op.heads * op.v
        return found

    def _sum_kept(self, chain: Chain, saved: list[SavedTensor], stage: Stage, wide: set[str]) -> SplitBytes:
        """What the layers of one kind keep, of the residual's width and narrower."""
        many, kept, prefix = count_chains(stage), SplitBytes(), f"{stage.path}.*."
        running = {each: [op for op in iterate(each) if self.runs(op)] for each in many}
        for entry in saved:
            if entry.is_again:
                continue
            name = entry.module[len(prefix) :]
            having = [each for each, ops in running.items() if _has_module(ops, name)]
            if chain in having or not having:
                of = sum(many[each] for each in having or many)
                kept = kept.add(entry.bytes * entry.count * many[chain] // of, entry.module not in wide)
        return kept

    def list_usual(self) -> tuple[SavedTensor, ...]:
        """What autograd saves in fused kernels; or in a model that was not recorded, if it is written as most are."""
        found = []
        if not self.is_fused:
            self.notes.append(
                "what autograd saves was not recorded for this model: we assume code like that of most models"
            )
            found.append(SavedTensor("", "", self.count_logits() * FLOAT, 1))
        _, owing, _ = self.read_blocks()
        for stage in self.estimator.stages:
            is_again = stage.checkpoint and self.estimator.recipe.recompute != "none"
            for chain, many in count_chains(stage).items() if stage.path in owing else ():
                entries: list[tuple[Op, int]] = []
                self._save(chain, False, entries)
                prefix = f"{stage.path}.*." if stage.repeated else f"{stage.path}."
                found += [SavedTensor(prefix + op.name, stage.group, size, many, is_again) for op, size in entries]
                if is_again:
                    placed = [Placed(op, self.rows(op), 0, 0) for op in iterate(chain)]
                    found.append(SavedTensor(prefix[:-1], stage.group, self.find_stream(placed), many))
        return tuple(found)

    def _save(self, chain: Chain, is_saved: bool, entries: list[tuple[Op, int]], is_cheap: bool = False) -> bool:
        """Add what the ops of a chain save; in and out: whether the tensor that enters, or leaves, is saved already.

        `is_cheap`: the tensor that enters is made again.
        """
        linears: list[Op] = []  # those that made the current tensors
        for i, item in enumerate(chain):
            if i and isinstance(before := chain[i - 1], Op):
                is_cheap = self.is_light and before.kind in ("norm", "pointwise")
            elif i:
                is_cheap = False
            if not isinstance(item, Op):
                for branch in item:
                    self._save(branch, is_saved, entries, is_cheap)
                    is_saved = True  # the first one saved what they share
                linears = [op for branch in item for op in iterate(branch) if op.kind == "linear"]
                is_saved = False
                continue
            rows, size = self.rows(item), 0
            if item.kind in ("linear", "conv"):
                # Experts read rows of their own, in their own order.
                is_own = self.is_fused and item.copies > 1
                size = 0 if is_saved and not is_own else self.input_bytes * rows * item.n_in
                if is_cheap and (item.copies == 1 or i):  # what experts read first came over the network
                    size = 0
                linears = [item]
            elif isinstance(item, Norm):
                # Without a bias it is RMSNorm as HF writes it: the input in float32, and the normed tensor.
                width = item.over or item.size
                size = rows * width * self.bytes
                if not self.is_fused:
                    size += rows * 8 if item.bias else rows * width * FLOAT
                    size = rows * 8 if item.bias and is_saved else size
            elif isinstance(item, Pointwise) and linears:
                made = sum(op.n_out for op in linears)
                after = next((op for op in iterate(chain[i:]) if op.kind == "linear"), None)
                # Gated: the function's own result is saved beside what it and the gate read, if kernels are not fused.
                is_gated = item.gate in ("pair", "fused") and not self.is_fused
                gated = after.n_in if after is not None and is_gated else 0
                size = self.bytes * self.rows(linears[-1]) * (made + gated)
                if self.is_fused and after is None:  # what experts made is weighed before their last product
                    size = 0
            elif isinstance(item, Attend) and linears:
                tokens = self.rows(linears[-1])
                width = item.heads * item.qk + item.kv_heads * (item.qk + item.v)
                if self.is_light and any(isinstance(op, Linear) and not op.reads_stream for op in linears):
                    width = 0
                size = tokens * (self.bytes * width + self.input_bytes * item.heads * item.v)
                size += 0 if self.is_fused else tokens * FLOAT * item.heads
                if self.attention == "eager":
                    # Fused, what softmax and dropout made and a byte of its mask; else probabilities twice.
                    each = 2 * self.bytes + 1 if self.is_fused else FLOAT + self.bytes
                    size += each * item.heads * rows
            entries.append((item, size))
            is_saved = item.kind == "attend"
        return is_saved

    def runs(self, op: Op) -> bool:
        return op.kind in ("pointwise", "dropout") or self.rows(op) > 0

    def _find_op(self, ops: list[Op], name: str, size: int) -> int:
        """Which op of a layer a module's saved tensor belongs to: its own, else the one in it that is no product."""
        named = [i for i, op in enumerate(ops) if op.name == name]
        if named:  # several products of one module, as of experts: the one that reads as much
            return next((i for i in named if self.bytes * self.rows(ops[i]) * ops[i].n_in == size), named[0])
        inside = [i for i, op in enumerate(ops) if name and op.name.startswith(f"{name}.")]
        plain = [i for i in inside if ops[i].kind in ("pointwise", "attend", "product")]
        return (plain or inside or [0])[-1]

    def _list_masks(self, stage: Stage, prefix: str) -> list[SavedTensor]:
        """Masks that SDPA keeps: HF gives it booleans, of which every call makes its own in the model's dtype."""
        if self.attention == "eager" or self.is_fused:
            return []
        is_again = stage.checkpoint and self.estimator.recipe.recompute != "none"
        found = []
        for chain, many in count_chains(stage).items():
            ops = list(iterate(chain))
            size = self.bytes * self.count_mask(stage, ops)
            if size:
                name = next(op.name for op in ops if isinstance(op, Attend) and _find_pairs(op) is not None)
                found.append(SavedTensor(prefix + name, stage.group, size, many, is_again))
        return found

    def count_mask(self, stage: Stage, ops: list[Op]) -> int:
        """Pairs of the mask that HF gives SDPA for all rows of a layer; 0 where none is needed or causal is enough."""
        side = self.call.decoder if self.call.decoder is not None and stage.stream == "language" else self.call
        attends = [op for op in ops if op.kind == "attend"]
        pairs = [op for op in attends if _find_pairs(op) is not None]
        sees_images = any(isinstance(op.rows, Either) for op in attends) and bool(self.load.all_grids)
        if any(sees_images or side.layout != "unpadded" or 0 < find_reach(op) <= side.seq for op in pairs):
            return side.rows * side.seq * (side.context + side.seq)
        return 0

    def _cut_dropout(self, stage: Stage, saved: list[SavedTensor], prefix: str) -> list[SavedTensor]:
        """A dropout recorded on a CPU kept noise in the model's dtype; a GPU keeps one byte, and none where p is 0."""
        drops = {op.name: op.saves for chain in count_chains(stage) for op in iterate(chain) if isinstance(op, Dropout)}
        return [
            entry._replace(bytes=entry.bytes // self.bytes) if drops.get(entry.module[len(prefix) :]) else entry
            for entry in saved
            if drops.get(entry.module[len(prefix) :], True)
        ]

    def _list_outputs(self, stage: Stage, prefix: str) -> list[SavedTensor]:
        """Where a part of a head is rotated, cuDNN lays its output out like the queries, and the next product reads a
        copy."""
        is_again = stage.checkpoint and self.estimator.recipe.recompute != "none"
        found = []
        for chain, many in count_chains(stage).items():
            ops = list(iterate(chain))
            for i, op in enumerate(ops):
                before = [other for other in ops[:i] if other.kind == "linear"]
                if isinstance(op, Attend) and op.rotates_part and before and not isinstance(op.rows, Either):
                    size = self.bytes * self.rows(before[-1]) * op.heads * op.v
                    found.append(SavedTensor(prefix + op.name, stage.group, size, many, is_again))
        return found

    def _walk_back(self, placed: list[Placed]) -> int:
        """The most bytes at once in one layer's backward: what it saved and has not freed, and gradients."""
        alive = sum(entry.saved for entry in placed)
        made = most = 0
        stream = self.find_stream(placed)
        for i in reversed(range(len(placed))):
            made += placed[i].gradient
            most = max(most, alive + made + stream + self._count_gradients(placed, i))
            alive -= placed[i].saved
        return most

    def find_stream(self, placed: list[Placed]) -> int:
        """Bytes of the tensor that passes from layer to layer: what a layer's first op reads."""
        first = next((entry for entry in placed if entry.op.kind in ("norm", "linear", "conv")), None)
        return self.bytes * first.rows * (first.op.size or first.op.n_in) if first is not None else 0

    def _count_gradients(self, placed: list[Placed], i: int) -> int:
        """Bytes of gradients of activations that one op's backward reads and writes."""
        op, rows = placed[i].op, placed[i].rows
        if op.kind in ("linear", "conv"):
            return self.bytes * rows * (op.n_in + op.n_out)
        if op.kind == "embed":
            return self.bytes * rows * op.size
        if op.kind == "norm":
            # In float32 where its input was saved so: three tensors at once, else two.
            is_float = placed[i].saved >= (self.bytes + FLOAT) * rows * op.size
            return rows * op.size * (3 * FLOAT if is_float else 2 * self.bytes)
        if isinstance(op, Attend):
            return self._count_attention(op, placed, i)
        if op.kind == "pointwise":
            wide, rows, branches = find_width(placed, i)
            return self.bytes * rows * wide * (1 + branches)
        return 0

    def _count_attention(self, op: Attend, placed: list[Placed], i: int) -> int:
        before = [entry for entry in placed[:i] if entry.op.kind == "linear"]
        rows = before[-1].rows if before else 0
        if self.attention == "eager":
            # The softmax's result, its gradient and the scores' gradient, all in float32; the first is saved.
            return 2 * FLOAT * op.heads * placed[i].rows
        # Gradients of output and queries, of keys and values for every head; the queries' are added up in float32.
        return rows * op.heads * (self.bytes * (2 * op.v + 2 * op.qk) + FLOAT * op.qk)


def first_ops(stage: Stage) -> list[Op]:
    return list(iterate(stage.layers[0])) if stage.layers else []


def _count_parameters(op: Op) -> int:
    if op.tied:
        return 0
    return op.n_in * (op.n_out or op.size) * op.copies or op.size * op.copies


def _find_pairs(op: Op) -> Pairs | None:
    """The pairs of a sequence that an op runs over, its decoder's too; None for other sums."""
    rows = op.rows.inner if isinstance(op.rows, InDecoder) else op.rows
    return rows if isinstance(rows, Pairs) else None


def find_reach(op: Op) -> int:
    """How many keys back a query sees; 0: all of them."""
    pairs = _find_pairs(op)
    return pairs.window if pairs is not None else 0


def _has_module(ops: list[Op], name: str) -> bool:
    return any(op.name == name or op.name.startswith(f"{name}.") for op in ops) if name else True


def find_width(placed: list[Placed], i: int) -> tuple[int, int, int]:
    """Of an activation function: its width, its rows, and how many tensors it joins."""
    after = next((entry for entry in placed[i:] if entry.op.kind == "linear"), None)
    if after is None:
        return 0, 0, 0
    wide = after.op.n_in
    op = placed[i].op
    gate = op.gate if isinstance(op, Pointwise) else None
    return wide, after.rows, {"pair": 2, "fused": 3}.get(gate or "", 1)
