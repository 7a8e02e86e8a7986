"""What a spec's keys should say of its ops, inferred from their sizes: `add` compares it with the spec, and writes it.

Sizes tell an op's role only where all dims of a config differ, as those of examples do. How much of a head HF rotates
is read from the operators that were recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flopcalc.base.data import load_toml
from flopcalc.core.estimate.binding import bind_config
from flopcalc.core.model.ops import Attend, Linear, Norm, Op, Pointwise, Stage, iterate
from flopcalc.core.spec.spec import Gate, Rotated, Split
from flopcalc.core.workload.workload import Workload
from flopcalc.prediction.operators import list_operators
from flopcalc.prediction.recordings import load_file

__all__ = ["Difference", "compare", "infer_keys", "infer_rotation", "write_key"]

_SHARED = re.compile(r"\bshared?_(expert|mlp)")  # what models call their shared experts


class Difference(NamedTuple):
    """A key of an op whose sizes say something else than its spec."""

    name: str
    op: str
    key: str
    said: str
    inferred: str


def compare(stages: Iterable[Stage]) -> Iterator[Difference]:
    """What the language layers of a model say otherwise than the sizes of their ops do."""
    for stage in stages:
        for chain in stage.kinds if stage.repeated and stage.group == "language" else ():
            ops = list(iterate(chain))
            has_experts = any(op.copies > 1 for op in ops)
            for place, op in enumerate(ops):
                for key, said, inferred in _infer(ops, place, stage.width, has_experts):
                    if said != inferred:
                        yield Difference(op.name, op.kind, key, said, inferred)


def _infer(ops: Sequence[Op], place: int, width: int, has_experts: bool) -> Iterator[tuple[str, str, str]]:
    """Key, what the spec says and what sizes say, of one op."""
    op = ops[place]
    if isinstance(op, Linear) and op.part != "other":
        said, split = op.split or "column", infer_split(ops, place, width)
        heads = next((each for each in ops[place:] if isinstance(each, Attend)), None)
        if said in ("keys", "fused") and split == "column" and (heads is None or heads.kv_heads == heads.heads):
            said = "column"  # keys are cut as finely as queries
        yield "split", said, split
        if has_experts:
            yield "shared", str(op.is_shared), str(bool(_SHARED.search(op.name)))
    elif isinstance(op, Norm):
        over = infer_over(ops, place, width)
        yield "over", "all" if op.over > op.size else "its weight", "all" if over > op.size else "its weight"
    elif isinstance(op, Pointwise):
        yield "gate", op.gate or "plain", infer_gate(ops, place)


def infer_split(ops: Sequence[Op], place: int, width: int) -> Split:
    """How tensor parallelism cuts a linear layer of a layer's ops whose residual stream has a width."""
    op, before = ops[place], ops[place - 1] if place else None
    if op.part == "router":
        return "whole"
    if op.copies > 1:
        first = next(each for each in ops if each.copies > 1)
        return "row" if op.n_out == first.n_in and op is not first else "column"
    if op.n_out == width and (op.n_in != width or (before is not None and before.kind == "attend")):
        return "row"
    core = next((at for at, each in enumerate(ops) if at > place and isinstance(each, Attend)), None)
    if op.part != "attention_projections" or core is None:
        return "column"
    return _infer_projection(op, ops[core], [each for each in ops[:core] if each.part == op.part], width)


def _infer_projection(op: Op, core: Op, beside: Sequence[Op], width: int) -> Split:
    """A projection before attention: what is of low rank is not cut."""
    assert isinstance(core, Attend)
    queries, keys, values = core.heads * core.qk, core.kv_heads * core.qk, core.kv_heads * core.v
    if op.n_out == queries + keys + values:
        return "fused" if core.kv_heads < core.heads else "column"
    if op.n_out >= queries:
        return "column"
    is_low_rank = op.n_in == width and any(each.kind == "linear" and each.n_in != width for each in beside)
    return "keys" if op.n_out in (keys, values, keys + values) and not is_low_rank else "whole"


def infer_over(ops: Sequence[Op], place: int, width: int) -> int:
    """Elements of a row that a norm runs over: one of heads over all that the layer before it writes."""
    before = ops[place - 1] if place else None
    is_inner = ops[place].size < width // 2 and before is not None and before.kind == "linear"
    return before.n_out if is_inner and before is not None else ops[place].size


def infer_gate(ops: Sequence[Op], place: int) -> Gate:
    """Whether the products before an activation function are twice as wide as what the one behind it reads."""
    before = [op.n_out for op in ops[:place] if isinstance(op, Linear)]
    after = next((op.n_in for op in ops[place:] if isinstance(op, Linear)), None)
    last = ops[place - 1] if place else None
    if after is None or not isinstance(last, Linear) or last.part == "router":
        return "plain"
    return "fused" if before[-1] == 2 * after else "pair" if before[-2:] == [after, after] else "plain"


def infer_keys(model_type: str, example: str) -> list[Difference]:
    """Where the sizes of all tiny configs of an example file agree on a key, and the spec says another value."""
    found: list[set[Difference]] = []
    tables = load_toml(example)
    named = {"architectures": [tables["architecture"]]} if "architecture" in tables else {}
    for config in tables.get("configs", []):
        given = {key: value for key, value in config.items() if key != "null_keys"}
        full = {"model_type": model_type, **named, **given, **dict.fromkeys(config.get("null_keys", []))}
        found.append(set(compare(bind_config(full).stages)))
    return sorted(set.intersection(*found)) if found else []


def infer_rotation(model_type: str, config: dict[str, object]) -> tuple[Rotated, Rotated] | None:
    """What a spec says of the part of a head that is rotated, and what its recorded operators show; None without these.

    HF's rotation has two concatenations of its own. Two more join the rotated part of queries and of keys to the rest.
    """
    if load_file(model_type) is None:
        return None
    estimator = bind_config({"model_type": model_type, **config})
    if estimator.has_decoder or not estimator.needs_text:  # positions are added there, not rotated
        return None
    stages = [stage for stage in estimator.stages if stage.repeated and stage.group == "language"]
    load = Workload(rows=1, seq=16)
    rows = [row for row in list_operators(estimator, load).rows if row.direction == "forward" and not row.is_again]
    said = shown = False
    for stage in stages:
        cores = [op for op in iterate(stage.layers[0]) if isinstance(op, Attend)]
        said = said or any(op.rotates_part for op in cores)
        names = {f"{stage.path}.*.{op.name}" for op in cores}
        joins = sum(row.count for row in rows if row.module in names and row.kind.startswith("cat"))
        shown = shown or joins >= 4 * len(stage.layers)
    return "part" if said else "all", "part" if shown else "all"


# --- writing ----------------------------------------------------------------------------------------------------------
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*')


def write_key(path: Path, op: str, name: str, key: str, value: str) -> int:
    """Write a key into every op of a kind and name that a spec's own text holds; how many there were."""
    text = path.read_text(encoding="utf-8")
    # Braces inside strings and comments are no tables.
    bare = _STRING.sub(lambda found: "_" * len(found[0]), text)
    places = []
    for found in re.finditer(r"\{[^{}]*\}", bare):
        table = text[found.start() : found.end()]
        own = re.search(r'\bname = "([^"]*)"', table)
        if f'op = "{op}"' in table and (own[1] if own else "") == name and f"{key} = " not in table:
            places.append(len(table[:-1].rstrip()) + found.start())
    for place in reversed(places):
        text = f"{text[:place]}, {key} = {value}{text[place:]}"
    path.write_text(text, encoding="utf-8")
    return len(places)
