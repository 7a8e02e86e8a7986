"""What the fused kernels of a training framework move besides products and attention: each tensor once per use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flopcalc.base.vocabulary import PassDirection
from flopcalc.core.count.products import Block, CountedRow, Row
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Linear, Norm, Op
from flopcalc.core.workload.workload import Workload
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.rows import name_module
from flopcalc.prediction.work import Attention, MemoryCall, ProductCall, TensorSplit, Width, Work

_FLOAT = 4  # bytes of what is always computed in float32
_CLOSED = ("attention_projections", "router", "lm_head", "head")  # parts with no activation function after them


def list_fused(
    estimator: Estimator,
    load: Workload,
    rows: Sequence[CountedRow],
    sides: Mapping[Block, Mapping[Op, TensorSplit]],
    attention: Sequence[Attention],
    dtype_bytes: int,
) -> list[MemoryCall]:
    """Norms, activations, residual sums, rotations, routing and the loss of one step; recomputed layers run again."""
    is_train = load.phase == "train"
    is_checkpointed = is_train and estimator.recipe.recompute != "none"
    again = {stage.path for stage in estimator.stages if stage.checkpoint and is_checkpointed}
    blocks: dict[Block, list[tuple[Row, int]]] = {}
    for counted in rows:
        if counted.row.find("padding") is None:
            value = counted.row.op.rows.count(load, "full")
            blocks.setdefault(counted.block, []).append((counted.row, value))
    found: list[MemoryCall] = []
    for block, own in blocks.items():
        flows = is_train and any(row.has_backward or row.trainable for row, _ in own)
        lister = _Lister(block, sides[block], dtype_bytes, flows and block.path in again, flows)
        lister.add(own)
        found += lister.moved
    return found + _list_rotations(attention, dtype_bytes)


class _Lister:
    """The moved bytes of one block."""

    def __init__(
        self, block: Block, sides: Mapping[Op, TensorSplit], dtype_bytes: int, is_again: bool, flows: bool
    ) -> None:
        self.block, self.sides, self.bytes = block, sides, dtype_bytes
        self.is_again, self.flows = is_again, flows
        self.moved: list[MemoryCall] = []
        self.opened = 0  # outputs that the next activation reads
        self.is_routed = False  # a product of experts came
        self.is_latent = False  # experts read and write a narrower form of the residual stream

    def add(self, rows: Sequence[tuple[Row, int]]) -> None:
        for row, value in rows:
            op, amount = row.op, value * row.op.times
            if isinstance(op, Linear):
                self._add_linear(op, value)
            elif isinstance(op, Norm) and amount:
                width: Width = "narrow" if op.over else "wide"
                self._put(op, width, amount * (op.over or op.size), (1, 1), (2, 1), is_cheap=True)
            elif op.kind == "embed" and amount:
                self._put(op, "wide", amount * op.size, (1, 1), (2, 1))

    def _add_linear(self, op: Linear, value: int) -> None:
        amount = value * op.times
        side = self.sides[op].side
        if side == "expert" and not self.is_routed:
            self.is_routed, self.opened = True, 0  # no activation function lies before the first of them
            self.is_latent = not op.reads_stream
        if op.copies > 1 and op.bias:
            self._add_bias(op, amount)
        if side == "row" or (side == "expert" and op.split == "row"):
            if self.opened:  # the activation reads what was opened and writes this one's input
                opened = self.opened / op.n_in
                self._put(op, "narrow", amount * op.n_in, (opened, 1), (opened + 1, opened), is_cheap=True)
            if side == "row" or not self.is_latent:
                self._put(op, "wide", value * op.n_out, (2, 1), (2, 1))  # the residual sum
            if op.copies > 1:  # rows are put in the experts' order and back
                self._put(op, "narrow", amount * op.n_out, (2, 2), (2, 2))
            self.opened = 0
            return
        if op.part not in _CLOSED:
            self.opened += op.n_out
        if op.part == "lm_head" and amount:
            # Logits to float32, the loss over them, and back.
            widen = _FLOAT / self.bytes
            self._put(op, "narrow", amount * op.n_out, (1 + widen, widen), (widen, widen))

    def _add_bias(self, op: Linear, amount: float) -> None:
        """What biases of experts move in Megatron-Core, whose only experts with biases are gpt-oss's.

        The first product adds its bias itself; its gradient is a sum. The activation after it clamps its two halves
        and joins them again apart from its kernel (weighted_bias_quick_geglu_impl). The second bias is weighted by the
        router's float32 scores, added expert by expert, joined, and cast (TEGroupedMLP._apply_bias).
        """
        if op.split != "row":
            self._put(op, "narrow", amount * op.n_out, (0, 0), (1, 0), is_bias=True)
            self._put(op, "narrow", amount * op.n_out, (2, 2), (3, 2), is_cheap=True)
        else:
            self._put(op, "narrow", amount * op.n_out, (7, 7), (11, 8), is_bias=True)
            self._put(op, "narrow", amount * op.n_out, (0, 0), (1, 0))

    def _put(
        self, op: Op, width: Width, size: float, forward: tuple[float, float], backward: tuple[float, float], *,
        is_cheap: bool = False, is_bias: bool = False,
    ) -> None:  # fmt: skip
        """Numbers of one call, and how often each pass reads and writes them."""
        if not size:
            return
        passes: list[tuple[PassDirection, tuple[float, float], bool]] = [("forward", forward, False)]
        passes += [("backward", backward, False)] if self.flows else []
        passes += [("forward", forward, True)] if self.is_again else []
        for direction, (reads, writes), is_again in passes:
            if not reads + writes:
                continue
            self.moved.append(
                MemoryCall(
                    name_module(self.block, op),
                    self.block.group,
                    direction,
                    "pointwise",
                    self.bytes * size * reads,
                    self.bytes * size * writes,
                    self.block.copies,
                    is_again,
                    0,
                    width,
                    is_cheap,
                    is_bias,
                )
            )


def _list_rotations(attention: Sequence[Attention], dtype_bytes: int) -> list[MemoryCall]:
    """Rotary embeddings and the like: queries and keys once more; of eager attention the scores too."""
    found = []
    for call in attention:
        rows = call.batch * call.length
        size = dtype_bytes * rows * (call.heads + call.kv_heads) * call.qk
        moved = MemoryCall(
            call.module, call.group, call.direction, "pointwise", size, size, call.calls, call.is_again, 0, "narrow"
        )
        found.append(moved)
        if call.kernel == "eager":
            # Softmax reads and writes, dropout reads, writes and writes its mask; backward as much.
            pairs = rows * call.heads * call.keys
            found.append(
                moved._replace(kind="softmax", reads=2.0 * dtype_bytes * pairs, writes=(2.0 * dtype_bytes + 1) * pairs)
            )
    return found


# --- experts ----------------------------------------------------------------------------------------------------------
class FusedExperts(NamedTuple):
    """Experts whose two products, activation function and casts are one kernel each way (Transformer Engine's grouped
    MLP of CuTe DSL, which Megatron-Bridge trains with in mxfp8 from release 26.06 on)."""

    host_s: float  # seconds that the host takes for a product of experts, joined or not
    overlap: float  # how well host and device overlap: 1 hides nothing
    modules: frozenset[str] = frozenset()

    def makes(self, product: ProductCall) -> bool:
        """Whether the kernel itself makes what a product reads: the second one's input, the first one's gradient."""
        return product.module in self.modules and product.is_last == (product.direction == "forward")

    def find_wait(self, device_s: float) -> float:
        """Seconds that the device waits at each product of experts, if it computes for `device_s` per product."""
        return float((device_s**self.overlap + self.host_s**self.overlap) ** (1 / self.overlap)) - device_s


def find_fused_experts(work: Work, machine: Machine) -> FusedExperts:
    """What of a step's experts one kernel does on a machine, and what the host takes for them.

    A step that is replayed as a CUDA graph needs no host. Models with scans are not replayed where they route
    (Megatron-Bridge's recipes of hybrid models); models that select keys are (its deepseek_v4.py).
    """
    fitted = machine.fitted
    experts = [each for each in work.products if each.is_expert]
    if not experts or not machine.joins_experts:
        return FusedExperts(fitted.expert_host_s, fitted.host_overlap)
    host_s = 0.0 if machine.replays_experts and not work.has_scans else fitted.expert_host_s
    return FusedExperts(host_s, fitted.host_overlap, frozenset(each.module for each in experts))
