"""What a row of the count says to those who turn it into work: gradients owed, adapters, its module's path."""

from __future__ import annotations

from flopcalc.core.count.products import Block, Product, Row
from flopcalc.core.model.ops import Op


def find_base(row: Row) -> Product | None:
    """The product of a module's own weight."""
    return row.find("base")


def find_owed(row: Row) -> tuple[str, ...]:
    """The gradients that a linear layer's backward computes: of its input, of its weight."""
    base = find_base(row)
    if base is None:
        return ()
    owed = (("dgrad", base.passes.input_gradient), ("wgrad", base.passes.weight_gradient))
    return tuple(name for name, times in owed if times)


def find_rank(row: Row) -> int:
    """The rank of the adapter that a module's forward pass goes through; 0 without one."""
    return row.rank


def find_multiplied_rank(row: Row) -> int:
    """The rank of an adapter whose two products run beside the linear layer's own; 0 without one, or folded."""
    return row.rank if row.find("fold") is None else 0


def find_trained_rank(row: Row) -> int:
    """The rank of an adapter that trains."""
    trains = any(
        product.passes.weight_gradient for product in row.products if product.role in ("adapter_a", "adapter_b")
    )
    return row.rank if trains else 0


def name_module(block: Block, op: Op) -> str:
    """A module's path with its layer's number folded to *."""
    path = f"{block.path}.*" if block.layers is not None else block.path
    return f"{path}.{op.name}".rstrip(".")
