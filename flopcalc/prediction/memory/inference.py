"""Tensors of a step without training: the widest moment of a layer, of a tower and of the head, and the cache."""

from __future__ import annotations

from collections import Counter

from flopcalc.core.formats.formats import count_cache_bytes
from flopcalc.core.model.ops import Attend, Stage, iterate
from flopcalc.prediction.memory.tensors import FLOAT, Placed, Step, find_reach, find_width, first_ops
from flopcalc.prediction.operators import Operator, Operators

_TOWERS = ("vision", "audio", "projector")  # groups that run before the language model


class Serving(Step):
    """One model under one workload without training."""

    copied_cache = 0  # bytes of a layer's cache that adding a token copies

    def find_widest(self, found: Operators) -> tuple[int, int, int]:
        """Bytes at the widest moment of a layer, of a tower's layer, and of what the head reads."""
        layer = tower = head = 0
        seen = self._count_seen()
        for stage in self.estimator.stages:
            written_out = _find_written_out(found.rows, stage)
            gathers, casts = (_find_written(found.rows, stage, kind) for kind in ("gather", "cast"))
            for chain in stage.kinds:
                placed = [Placed(op, self.rows(op), 0, 0) for op in iterate(chain) if self.runs(op)]
                if any(entry.op.part == "lm_head" for entry in placed):
                    head = max(head, self.find_stream(placed))
                elif placed:
                    mask = self.count_mask(stage, [entry.op for entry in placed]) if self.attention == "sdpa" else 0
                    # Of windows alone, booleans of one row serve all.
                    held = mask if self.call.layout != "unpadded" else mask // max(1, self.call.rows)
                    # HF's frames hold the embeddings, the layer's input and the residual all the while; of a tower,
                    # whose input is the residual, the text's embeddings and the input.
                    is_tower = stage.group in _TOWERS
                    held += self.find_stream(placed) * (2 if is_tower else 3)
                    held += max(self._list_working(placed, written_out, gathers, casts, mask, is_tower))
                    if is_tower:
                        tower = max(tower, held)
                    else:
                        layer = max(layer, held + seen)
        return layer, tower, head

    def _count_seen(self) -> int:
        """Bytes of images that stay while the language model runs: what the projector read, made, and joined."""
        total = 0
        for stage in self.estimator.stages:
            if stage.group == "projector" and stage.layers:
                placed = [Placed(op, self.rows(op), 0, 0) for op in first_ops(stage)]
                linears = [entry for entry in placed if entry.op.kind == "linear"]
                made = self.bytes * linears[-1].rows * linears[-1].op.n_out if linears else 0
                total += self.find_stream(placed) + 2 * made * len(stage.layers)
        return total

    def _list_working(
        self,
        placed: list[Placed],
        written_out: set[str],
        gathers: dict[str, int],
        casts: dict[str, int],
        mask: int,
        is_tower: bool,
    ) -> list[int]:
        """Bytes beside the residual stream at every moment of one layer's forward pass without autograd."""
        stream = self.find_stream(placed)
        working = [self._count_working(placed, i, stream, written_out, casts, is_tower) for i in range(len(placed))]
        for i, entry in enumerate(placed):
            if entry.op.kind == "attend":  # SDPA makes numbers of the booleans
                working[i] += self.bytes * mask
        for first, last in _find_experts(placed):
            # The rows gathered for the experts stay until all is done.
            gathered = self.bytes * placed[first].rows * placed[first].op.n_in
            for i in range(first, last + 1):
                working[i] += stream if placed[i].op.kind == "linear" else 0
                working[i] += gathered if i > first else 0
            # At the end also: what the last product made, weighted, and the same in the tokens' order.
            made = placed[last].rows * placed[last].op.n_out
            is_float = gathers.get(placed[last].op.name, 0) == FLOAT * made
            working.append(stream + gathered + made * (self.bytes + 2 * (FLOAT if is_float else self.bytes)))
        return working

    def _count_working(
        self, placed: list[Placed], i: int, stream: int, written_out: set[str], casts: dict[str, int], is_tower: bool
    ) -> int:
        """Bytes without the residual stream while one op runs; the normed stream stays until its block is done."""
        op, rows = placed[i].op, placed[i].rows
        if op.kind == "norm":
            return 2 * FLOAT * rows * op.size
        if op.kind in ("linear", "conv"):
            return self.bytes * rows * (op.n_in + op.n_out)
        if isinstance(op, Attend):
            width = sum(self.bytes * entry.rows * entry.op.n_out for entry in placed[:i] if entry.op.kind == "linear")
            if self.attention == "eager":
                return stream + width + (2 * FLOAT + self.bytes) * op.heads * placed[i].rows
            before = next((entry for entry in reversed(placed[:i]) if entry.op.kind == "linear"), None)
            queries = before.rows * op.heads * op.qk if before is not None else 0
            if before is None or not casts.get(op.name, 0) == FLOAT * queries > 0:
                return stream + width + 3 * self.bytes * queries  # the rotation's products
            # In float32 both operands stay, and what is rotated: queries, then keys and the rotated queries. The
            # third stream that a language's layer holds, the residual after attention, is not there yet: the normed
            # one takes its place.
            keys = min(queries, before.rows * (op.latent or op.kv_heads * (op.qk + op.v)) // 2)
            rotated = queries + keys + max(3 * queries, queries + 3 * keys)
            return (stream if is_tower else 0) + width + FLOAT * rotated
        if op.kind == "pointwise":
            wide, rows, branches = find_width(placed, i)
            return stream + self.bytes * rows * wide * max(1 + branches, 4 if op.name in written_out else 0)
        return 0

    def count_cache(self) -> int:
        """Bytes of keys, values and recurrent states of all layers once the call is done, as HF's cache holds them.

        Where kernels are fused, a serving engine's: of latent attention it keeps the latents. A convolution's last
        inputs are in the format of activations, recurrent states in float32.
        """
        sequences = (self.load.decoder or self.load).rows
        total = self.copied_cache = 0
        for stage in self.estimator.stages:
            for chain, layers in Counter(stage.layers).items():
                for op in iterate(chain):
                    total += layers * sequences * op.state * (self.bytes if op.kind == "conv" else FLOAT)
                    if not isinstance(op, Attend) or not op.cache:
                        continue
                    width = op.latent if self.is_fused and op.latent else op.cache
                    each = count_cache_bytes(self.estimator.formats, self._count_positions(op) * width)
                    # Adding a token copies: keys, then values; with a window both before either is freed.
                    self.copied_cache = max(self.copied_cache, each if find_reach(op) else each // 2)
                    total += layers * each
        if not total:
            self.notes.append("no layer caches anything")
        return total

    def _count_positions(self, op: Attend) -> int:
        """Positions of all rows whose keys an attention op caches."""
        if self.load.phase == "prefill" and find_reach(op):
            # What prefill cuts off for a window still lies in memory: the rest is a view of the whole.
            side = self.load.decoder or self.load
            return side.rows * (side.context + side.seq)
        return op.cache_rows.count(self.call, "full") if op.cache_rows is not None else 0


def _find_written_out(rows: tuple[Operator, ...], stage: Stage) -> set[str]:
    """Names of a stage's activation functions that HF writes out in several operators, such as gelu_new."""
    prefix = f"{stage.path}.*." if stage.repeated else f"{stage.path}."
    calls: Counter[str] = Counter()
    for row in rows:
        if row.direction == "forward" and row.kind == "pointwise" and row.module.startswith(prefix):
            calls[row.module[len(prefix) :]] += row.count
    return {name for name, count in calls.items() if count >= 4 * len(stage.layers)}


def _find_written(rows: tuple[Operator, ...], stage: Stage, kind: str) -> dict[str, int]:
    """Per module of a stage, the most bytes that one call of a kind writes: they show what is computed in float32."""
    prefix = f"{stage.path}.*." if stage.repeated else f"{stage.path}."
    found: dict[str, int] = {}
    for row in rows:
        if row.direction == "forward" and row.kind.startswith(kind) and row.module.startswith(prefix):
            name = row.module[len(prefix) :]
            found[name] = max(found.get(name, 0), row.writes)
    return found


def _find_experts(placed: list[Placed]) -> list[tuple[int, int]]:
    """First and last product of every group of experts that several rows of a token go through."""
    found: dict[str, list[int]] = {}
    for i, (op, *_) in enumerate(placed):
        if op.kind == "linear" and op.part == "mlp" and op.copies > 1 and op.times > 1:
            found.setdefault(op.name, []).append(i)
    return [(places[0], places[-1]) for places in found.values() if len(places) > 1]
