"""What a row of the count says to those who turn it into work: gradients owed, adapters, its module's path."""

from __future__ import annotations

from collections.abc import Sequence, Set

from flopcalc.base.vocabulary import ProductDirection
from flopcalc.core.count.products import Block, Product, Row
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Attend, Chain, Op, iterate, join
from flopcalc.core.workload.sums import Either
from flopcalc.core.workload.workload import Workload


def find_owed(product: Product) -> tuple[ProductDirection, ...]:
    """The gradients that a product's backward computes: of its input, of its weight."""
    owed: dict[ProductDirection, int]
    owed = {"dgrad": product.passes.input_gradient, "wgrad": product.passes.weight_gradient}
    return tuple(name for name, times in owed.items() if times)


def find_trained_rank(row: Row) -> int:
    """The rank of an adapter that trains; 0 without one."""
    trains = any(
        product.passes.weight_gradient for product in row.products if product.role in ("adapter_a", "adapter_b")
    )
    return row.rank if trains else 0


def name_module(block: Block, op: Op) -> str:
    """A module's path with its layer's number folded to *."""
    path = f"{block.path}.*" if block.layers is not None else block.path
    return join(path, op.name)


def find_reader(ops: Sequence[Op], place: int) -> Op | None:
    """The product that reads what an attention op makes, as many rows as queries; without one, the last before it.

    What is before attention may run over all keys.
    """
    return next((op for op in (*ops[place:], *reversed(ops[:place])) if op.kind == "linear"), None)


def count_queries(op: Attend, ops: Sequence[Op], load: Workload, *, is_needed: bool = False) -> int:
    """Queries of an attention op in one call: as its spec says, else as many as the rows of what reads it.

    `is_needed`: only those that the model needs, where HF's code computes more.
    """
    reader = find_reader(ops, ops.index(op)) if op.queries is None else None
    rows = op.queries or (reader.rows if reader is not None else None)
    if rows is None:
        return 0
    rows = rows.needed if is_needed and isinstance(rows, Either) else rows
    return rows.count(load, "full") * (reader.times if reader is not None else 1)


def find_shifted(estimator: Estimator, chain: Chain | None, trained: Set[str], modules: list[str]) -> set[str]:
    """Modules without weights that owe gradients to what modulates them: where a denoiser's modulation trains.

    `chain` is a layer, None all that is outside of layers; `trained` are the modules there whose weights train.
    """
    if not estimator.is_diffusion:
        return set()
    ops = {op.name: op for op in iterate(chain)} if chain is not None else {}
    for stage in estimator.stages if chain is None else ():
        if not stage.repeated:
            ops |= {join(stage.path, op.name): op for op in iterate(stage.layers[0])}
    if not any(op.part == "modulation" and name in trained for name, op in ops.items()):
        return set()
    return {module for module in modules if module not in ops}
