"""How tensor parallelism cuts a model: the side of each linear layer, and which modules have the residual's width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Attend, Chain, Linear, Norm, Op, Stage, iterate, join
from flopcalc.prediction.work import TensorSplit


def count_chains(stage: Stage) -> Counter[Chain]:
    """The layers of a stage that differ, and how many of each; most are one object."""
    many = Counter(map(id, stage.layers))
    found: Counter[Chain] = Counter()
    for chain in stage.kinds:
        found[chain] += many[id(chain)]
    return found


def find_sides(ops: Sequence[Op]) -> dict[Op, TensorSplit]:
    """Of every linear layer of a block, how tensor parallelism cuts it, as its spec says."""
    found: dict[Op, TensorSplit] = {}
    core: Attend | None = None  # the attention that an op leads to
    for op in reversed(ops):
        if isinstance(op, Attend):
            core = op
        elif isinstance(op, Linear):
            found[op] = TensorSplit("expert") if op.copies > 1 else _find_side(op, core)
    return dict(reversed(found.items()))


def _find_side(op: Linear, core: Attend | None) -> TensorSplit:
    if op.split in ("row", "whole"):
        return TensorSplit(op.split)
    if core is not None and op.split == "fused":
        return TensorSplit("column", core.kv_heads * (core.qk + core.v), core.kv_heads)
    if core is not None and op.split == "keys" and core.kv_heads < core.heads:
        return TensorSplit("column", op.n_out, core.kv_heads)
    return TensorSplit("column")  # as many heads of keys as of queries are cut like them


def list_wide(estimator: Estimator) -> set[str]:
    """Modules whose own operators move tensors of the residual's width: norms, tables, layers, and what is around."""
    found = {""}
    for stage in estimator.stages:
        path = f"{stage.path}.*" if stage.repeated else stage.path
        found |= {path, stage.path}
        ops = [op for chain in count_chains(stage) for op in iterate(chain)]
        whole = [op for op in ops if op.kind == "embed" or (isinstance(op, Norm) and not op.over)]
        found |= {join(path, op.name) for op in whole}
    return found


def list_wide_saved(estimator: Estimator) -> set[str]:
    """Modules whose saved tensors are of the residual's width: the same, and linear layers that read it whole."""
    found = list_wide(estimator)
    for stage in estimator.stages:
        path = f"{stage.path}.*" if stage.repeated else stage.path
        for chain in count_chains(stage):
            for op, sided in find_sides(list(iterate(chain))).items():
                if sided.side in ("column", "whole") and isinstance(op, Linear) and op.reads_stream:
                    found.add(join(path, op.name))
    return found
