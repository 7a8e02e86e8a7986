"""FLOPs of one op per unit of its sum, each a pure function of shapes."""

from __future__ import annotations

from flopcalc.base.vocabulary import Mask
from flopcalc.core.model.ops import Attend, Embed, Linear
from flopcalc.hardware.attention_blocks import KernelShape as KernelShape
from flopcalc.hardware.attention_blocks import block_pairs, count_pair_flops


def product_flops(op: Linear) -> int:
    """A (rows, in) by (in, out) product: 2 · in · out per row. A convolution's `in` is channels x kernel.

    A weight that is looked up by position before it is multiplied says its FLOPs itself.
    """
    return (op.own_flops or 2 * op.n_in * op.n_out) * op.times


def score_flops(op: Attend) -> int:
    """Queries by keys: (q, qk) · (qk, k), 2 · heads · qk per pair."""
    return 2 * op.heads * op.qk * op.times


def value_flops(op: Attend) -> int:
    """Probabilities by values: (q, k) · (k, v), 2 · heads · v per pair."""
    return 2 * op.heads * op.v * op.times


def fused_forward_flops(op: Attend, shape: KernelShape) -> int:
    """One kernel's forward per pair: scores and values, the head dim padded."""
    pair = count_pair_flops("forward", op.qk, op.v) * op.heads * op.times
    return pair * shape.pad_forward[0] // shape.pad_forward[1]


def fused_backward_flops(op: Attend, shape: KernelShape) -> int:
    """One kernel's backward per pair: it forms the scores again, then dV, dP, dQ and dK."""
    pair = count_pair_flops("backward", op.qk, op.v) * op.heads * op.times
    return pair * shape.pad_backward[0] // shape.pad_backward[1]


def fused_call_flops(op: Attend, shape: KernelShape, mask: Mask, length: int) -> tuple[int, int]:
    """Forward and backward of one fused call by the kernel's constants: pairs in blocks, head dims padded."""
    full = length * length
    forward = block_pairs(length, 0, shape.block_forward) if mask == "causal" else full
    backward = block_pairs(length, 0, shape.block_backward) if mask == "causal" else full
    return fused_forward_flops(op, shape) * forward, fused_backward_flops(op, shape) * backward


def adapter_flops(op: Linear | Embed, rank: int) -> tuple[int, int]:
    """LoRA's two products: (rows, in) · (in, r) and (rows, r) · (r, out); an embedding's first is a look-up."""
    if isinstance(op, Embed):
        return 0, 2 * rank * op.dim * op.times
    return 2 * op.n_in * rank * op.times, 2 * rank * op.n_out * op.times


def fold_flops(op: Linear, rank: int) -> int:
    """LoRA on a bare parameter is folded into it: (out, r) · (r, in) for every copy, whatever the rows."""
    return 2 * op.copies * rank * op.n_in * op.n_out


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


def adapter_parameters(op: Linear | Embed, rank: int) -> tuple[int, int]:
    """Elements of LoRA's two matrices, all copies."""
    if isinstance(op, Embed):
        return op.count * rank, rank * op.dim
    return op.copies * op.n_in * rank, op.copies * rank * op.n_out
