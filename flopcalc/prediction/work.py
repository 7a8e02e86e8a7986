"""What one step asks of a device: products, attention calls, moved bytes; and what the host dispatches for them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from flopcalc.base.vocabulary import CallKernel, CallMask, Direction, Execution, PassDirection, ProductDirection
from flopcalc.core.model.ops import Linear, Multiply
from flopcalc.hardware.attention_blocks import count_call_flops, count_pair_flops
from flopcalc.hardware.tiles import ProductSize
from flopcalc.prediction.timeline import Stack

# How tensor parallelism cuts a product: by its outputs, by its inputs, by its experts, or not at all.
Side = Literal["column", "row", "expert", "whole"]
# What cuts a moved tensor: sequence parallelism one of the residual's width, tensor parallelism all others.
Width = Literal["wide", "narrow"]


class TensorSplit(NamedTuple):
    """The side that tensor parallelism cuts a product along, and its columns of keys and values."""

    side: Side = "whole"
    kv: int = 0  # of the outputs those of keys and values, which are cut no finer than their heads
    kv_heads: int = 0


class ProductCall(NamedTuple):
    """Calls of one of the count's products, in one of its three directions."""

    module: str  # its path, layers folded: model.layers.*.mlp.up_proj
    group: str  # vision, projector, language, …: as in an Estimate
    op: Linear | Multiply  # what the spec says of it
    size: ProductSize  # of one call: executed FLOPs come from it too. Its m, n, k are the layer's in all directions
    calls: float = 1  # in one step
    is_again: bool = False  # recomputed
    split: TensorSplit = TensorSplit()
    format: str = ""  # what it is computed in, where that is not the step's own
    weight_bytes: float = 0.0  # that it reads of a number of a quantized weight; 0: the weight is plain

    @property
    def direction(self) -> ProductDirection:
        return self.size.direction

    @property
    def part(self) -> str:
        """mlp, attention_projections, lm_head, …"""
        return self.op.part

    @property
    def is_expert(self) -> bool:
        return self.split.side == "expert"

    @property
    def is_patches(self) -> bool:
        """A tower's convolution: images to patches."""
        return self.op.kind == "conv" and self.group == "vision"

    @property
    def is_last(self) -> bool:
        """It reads what attention or an activation function made: the last product of its block."""
        return isinstance(self.op, Linear) and self.op.split == "row"

    @property
    def is_shared(self) -> bool:
        """Of an expert that all tokens pass, beside routed ones."""
        return isinstance(self.op, Linear) and self.op.is_shared

    @property
    def is_lifting(self) -> bool:
        """Whether it makes queries, or keys and values, of a compressed form on the way forward."""
        is_inner = isinstance(self.op, Linear) and not self.op.reads_stream and not self.is_last
        is_inner = is_inner and self.part == "attention_projections"
        return is_inner and self.direction == "forward" and not self.is_again

    @property
    def flops(self) -> float:
        return 2.0 * self.size.m * self.size.n * self.size.k * self.calls

    def count_bytes(self, width: int) -> float:
        """Bytes that one call moves, `width` for a plain number; rows reach no more experts than there are rows."""
        m, n, k = self.size.m, self.size.n, self.size.k
        weight = self.weight_bytes if self.weight_bytes and self.direction != "wgrad" else width
        return width * m * (n + k) + weight * min(self.size.copies, m) * n * k


class Attention(NamedTuple):
    """One call of an attention kernel."""

    module: str
    group: str
    direction: PassDirection  # forward, backward
    mask: CallMask  # causal, dropout (causal, weights are dropped), full, window, apart, decode
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
    # eager: plain products; math: plain products in float32; flash, efficient, cudnn; without: what the device picks
    kernel: CallKernel = ""
    has_float_scores: bool = False  # queries and keys are multiplied in float32

    @property
    def flops(self) -> float:
        """Of all calls, as a kernel executes them: whole blocks, and backward the scores once more."""
        if self.mask == "decode" or self.kernel == "eager" or self.kernel == "math":
            once = self.length * self.keys * count_pair_flops(self.direction, self.qk, self.v)
        else:
            call = (self.qk, self.v, self.length, self.keys, self.mask in ("causal", "dropout"))
            once = count_call_flops(self.kernel or "cudnn", self.direction, *call)
        return float(once * self.batch * self.heads) * self.calls

    def count_bytes(self, width: int) -> float:
        """Bytes that one call of a fused kernel moves: each number once, on the way back its gradient too."""
        once = width * self.batch * (self.heads * self.length + self.kv_heads * self.keys) * (self.qk + self.v)
        return once * (2 if self.direction == "backward" else 1)


class MemoryCall(NamedTuple):
    """Calls of an operator that is bound by the bytes it moves."""

    module: str
    group: str
    direction: Direction  # forward, backward, optimizer
    kind: str  # class of operator: pointwise, reduce, norm, softmax, copy, gather, …; an optimizer's name
    reads: float  # bytes of one call
    writes: float
    calls: float = 1
    is_again: bool = False
    tensors: float = 0  # an optimizer: how many it goes over
    width: Width = "wide"
    is_cheap: bool = False  # makes what a product reads: a norm or an activation function
    is_bias: bool = False  # of experts, which a kernel that does them as a whole adds itself
    unseen: float = 0  # an optimizer: share of its bytes that has had no gradient but zeros


class HostCall(NamedTuple):
    """What the host dispatches for a module."""

    module: str
    group: str
    way: str  # forward, backward, again (forward, while backward runs), optimizer, cleared (gradients), loss (is read)
    kind: str
    many: float

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is the call of a whole layer that is run again."""
        return self.way == "again" and self.kind == "module" and self.module.endswith(".*")


class Work(NamedTuple):
    """The work of one micro-batch and of the optimizer's step, and the operators that the host dispatches."""

    products: tuple[ProductCall, ...]
    attention: tuple[Attention, ...]
    moved: tuple[MemoryCall, ...]
    hosted: tuple[HostCall, ...]
    stacks: tuple[Stack, ...]  # the model's stages in order of dataflow
    notes: tuple[str, ...] = ()
    is_recorded: bool = True  # all operators are known
    model_type: str = ""
    execution: Execution = "eager"
    has_scans: bool = False  # layers of state-space models or linear attention

    @property
    def dispatched(self) -> dict[str, float]:
        """Way and kind -> how many."""
        found: dict[str, float] = {}
        for each in self.hosted:
            name = f"{each.way} {each.kind}"
            found[name] = found.get(name, 0) + each.many
        return found
