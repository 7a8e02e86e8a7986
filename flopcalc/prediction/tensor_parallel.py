"""How tensor parallelism may cut a model: the width of each residual stream, and the side of each linear layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import Attend, Chain, Op, Stage, iterate
from flopcalc.prediction.work import Side


class TensorSplit(NamedTuple):
    """The side that tensor parallelism cuts a linear layer along, and its columns of keys and values."""

    side: Side = "whole"
    kv: int = 0
    kv_heads: int = 0


def count_chains(stage: Stage) -> Counter[Chain]:
    """The layers of a stage that differ, and how many of each; most are one object."""
    many = Counter(map(id, stage.layers))
    found: Counter[Chain] = Counter()
    for chain in stage.kinds:
        found[chain] += many[id(chain)]
    return found


def find_widths(estimator: Estimator) -> dict[str, int]:
    """Stage path -> the width of its residual stream: of the language what the head reads, else the first op's."""
    ops = [[op for chain in count_chains(stage) for op in iterate(chain)] for stage in estimator.stages]
    heads = [op.n_in for own in ops for op in own if op.part == "lm_head" and op.kind == "linear"]
    found: dict[str, int] = {}
    streams: dict[str, int] = {"language": heads[0]} if heads else {}
    for stage, own in zip(estimator.stages, ops, strict=True):
        sizes = [op.size for op in own if op.kind in ("embed", "norm")]
        sizes += [op.n_in for op in own if op.kind == "linear"]
        if sizes:
            found[stage.path] = streams.setdefault(stage.stream, sizes[0])
        else:
            found[stage.path] = streams.get(stage.stream, 1)
    return found


def find_sides(ops: Sequence[Op], hidden: int) -> dict[Op, TensorSplit]:
    """Of every linear layer of a block, how tensor parallelism cuts it."""
    found: dict[Op, TensorSplit] = {}
    attends = [(place, op) for place, op in enumerate(ops) if isinstance(op, Attend)]
    for place, op in enumerate(ops):
        core = next((attend for at, attend in attends if at > place), None)
        before = ops[place - 1] if place else None
        if op.kind not in ("linear", "conv"):
            continue
        if op.copies > 1:
            found[op] = TensorSplit("expert")
        elif op.part == "router":
            found[op] = TensorSplit("whole")
        elif op.n_out == hidden and (op.n_in != hidden or (before is not None and before.kind == "attend")):
            found[op] = TensorSplit("row")
        elif op.part == "attention_projections" and core is not None:
            found[op] = _side_projection(
                op, core, [each for each in ops[: ops.index(core)] if each.part == op.part], hidden
            )
        else:
            found[op] = TensorSplit("column")
    return found


def _side_projection(op: Op, core: Attend, beside: Sequence[Op], hidden: int) -> TensorSplit:
    """A projection before attention: keys are cut no finer than their heads, what is of low rank not at all."""
    queries, keys, values = core.heads * core.qk, core.kv_heads * core.qk, core.kv_heads * core.v
    if op.n_out == queries + keys + values:
        return TensorSplit("column", keys + values, core.kv_heads)
    if op.n_out >= queries:
        return TensorSplit("column")
    is_low_rank = op.n_in == hidden and any(each.kind == "linear" and each.n_in != hidden for each in beside)
    is_keys = op.n_out in (keys, values, keys + values)
    return TensorSplit("column", op.n_out, core.kv_heads) if is_keys and not is_low_rank else TensorSplit("whole")


def list_wide(estimator: Estimator, widths: dict[str, int]) -> set[str]:
    """Modules whose own operators move tensors of the residual's width: norms, tables, layers, and what is around."""
    found = {""}
    for stage in estimator.stages:
        path = f"{stage.path}.*" if stage.repeated else stage.path
        found |= {path, stage.path}
        ops = [op for chain in count_chains(stage) for op in iterate(chain)]
        sizes = [op for op in ops if op.kind in ("norm", "embed") and op.size == widths[stage.path]]
        found |= {f"{path}.{op.name}".rstrip(".") for op in sizes}
    return found


def list_wide_saved(estimator: Estimator) -> set[str]:
    """Modules whose saved tensors are of the residual's width: the same, and linear layers that read it whole."""
    widths = find_widths(estimator)
    found = list_wide(estimator, widths)
    for stage in estimator.stages:
        path = f"{stage.path}.*" if stage.repeated else stage.path
        for chain in count_chains(stage):
            for op, sided in find_sides(list(iterate(chain)), widths[stage.path]).items():
                if sided.side in ("column", "whole") and op.n_in == widths[stage.path]:
                    found.add(f"{path}.{op.name}".rstrip("."))
    return found
