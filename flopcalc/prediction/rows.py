"""What a row of the count stands for, read off its FLOPs and parameters here and nowhere else."""

from __future__ import annotations

from flopcalc.core.count.count import Block, Row, adapter_flops, product_flops
from flopcalc.core.model.ops import Op


def find_owed(row: Row) -> tuple[str, ...]:
    """The gradients that a linear layer's backward computes: of its input, of its weight."""
    flops = product_flops(row.op)
    if not row.backward:
        return ()
    if row.owes_weight:
        return ("dgrad", "wgrad") if row.backward >= 2 * flops else ("wgrad",)
    return ("dgrad",) if row.backward >= flops else ()


def find_rank(row: Row) -> int:
    """The rank of the adapter that a module's forward pass goes through, by what it adds; 0 without one."""
    op = row.op
    if op.kind not in ("linear", "conv", "embed") or op.feature[0] == "executed":  # folded into the weight
        return 0
    own = product_flops(op) if op.feature[0] != "needed" else 0  # a folded adapter has a row of its own
    return max(0, row.forward - own) // sum(adapter_flops(op, 1))


def find_multiplied_rank(row: Row) -> int:
    """The rank of an adapter whose two products run beside the linear layer's own; 0 without one."""
    base, op = product_flops(row.op), row.op
    return (row.forward - base) // (2 * (op.n_in + op.n_out) * op.times) if row.forward > base and not op.flops else 0


def find_trained_rank(row: Row) -> int:
    """The rank of an adapter that trains, by its parameters."""
    return row.trainable // max(1, row.op.n_in + (row.op.n_out or row.op.size))


def name_module(block: Block, op: Op) -> str:
    """A module's path with its layer's number folded to *."""
    path = f"{block.path}.*" if block.layers is not None else block.path
    return f"{path}.{op.name}".rstrip(".")
