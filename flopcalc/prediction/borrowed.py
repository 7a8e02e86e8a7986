"""Operators of a model that was not recorded: those of the modules of another model that play the same part in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.core.model.ops import Attend, Chain, Norm, Op, Pointwise, Stage, iterate, join
from flopcalc.core.workload.sums import Pairs
from flopcalc.prediction.rows import find_reader


class Roles(NamedTuple):
    """A stand-in's layers, and the modules in one by the part that they play."""

    path: str
    norm: str
    projections: Sequence[str]  # before attention
    attend: str
    output: str  # behind it
    inner: Sequence[str]  # of the MLP, before its activation function
    function: str
    outer: str  # and behind it

    @property
    def mlp(self) -> str:
        """The module around the MLP, which multiplies by the gate."""
        return self.function.rpartition(".")[0]


class StandIn(NamedTuple):
    """A recorded model type whose operators others borrow, and its modules by their parts."""

    type: str
    layers: Mapping[str, Roles]  # by group: vision, language
    outside: Mapping[str, Sequence[str]]  # kind of op -> modules outside of layers
    places: str = ""  # what its recording calls the tower's rows, where they are not its patches

    def find_roles(self, group: str) -> Roles:
        """The layers whose operators a group's layers borrow."""
        return self.layers.get(group) or self.layers.get("language") or self.layers["vision"]


@cache
def _load_stand_ins() -> dict[str, StandIn]:
    tables = load_toml(os.path.join(find_data_dir(), "stand_ins.toml"))
    return {
        name: StandIn(**{**table, "layers": {group: Roles(**roles) for group, roles in table["layers"].items()}})
        for name, table in tables.items()
    }


def choose_stand_in(stages: Iterable[Stage]) -> StandIn:
    """The type whose layers are nearest: a tower's, an encoder's, a decoder's, or those of both text and images."""
    layers = {stage.group: stage.layers[0] for stage in stages if stage.repeated and stage.layers}
    known = _load_stand_ins()
    if "vision" in layers:
        return known["seeing" if "language" in layers else "tower"]
    attends = [op for op in iterate(layers["language"]) if isinstance(op, Attend)] if "language" in layers else []
    is_encoder = attends and all(isinstance(op.rows, Pairs) and op.rows.mask == "full" for op in attends)
    return known["encoder" if is_encoder else "decoder"]


class Borrowed(NamedTuple):
    """A module, the stand-in's module whose operators it gets, and its sizes under the stand-in's names."""

    source: str
    module: str
    sizes: Mapping[str, int]
    rows: int  # that pass in one call
    window: int = 0  # of attention: how many keys back a query sees
    pairs: int = 0  # of attention: queries by the keys that a kernel reads


def choose_variant(signatures: Iterable[str], chain: Chain) -> str:
    """The recorded kind of layer that has grouped keys and biases as a layer has, or is nearest to it."""
    ops = list(iterate(chain))
    grouped = any(isinstance(op, Attend) and op.kv_heads < op.heads for op in ops)
    biased = any(op.kind == "linear" and op.bias for op in ops)

    def find_distance(signature: str) -> tuple[bool, bool]:
        return ("+grouped" in signature) != grouped, ("+bias" in signature) != biased

    return min(signatures, key=find_distance)


def borrow_layer(
    roles: Roles,
    chain: Chain,
    width: int,
    around: Mapping[str, int],
    count_rows: Callable[[Op], int],
    has_cache: bool,
) -> list[Borrowed]:
    """What the modules of a layer borrow from a recorded layer; `width` is that of the residual stream.

    `around` has the sizes of the whole model, from `Outside.size`.
    """
    ops = list(iterate(chain))
    sizes = {**around, **_size_layer(roles, ops, width)}
    found: list[Borrowed] = []
    linears: list[Op] = []  # since the last attention, activation function or norm of the residual stream
    is_behind = False  # an activation function came since then
    for i, op in enumerate(ops):
        rows, name = count_rows(op), op.name.replace("*", "#")
        if op.kind in ("linear", "conv"):
            source = _find_linear(roles, op, ops[i:], len(linears), is_behind)
            own = {f"{source}.n_in": op.n_in, f"{source}.n_out": op.n_out}
            found.append(Borrowed(source, name, {**sizes, **own}, rows))
            linears.append(op)
        elif isinstance(op, Norm):
            own = {f"{roles.norm}.size": op.over or op.size}
            found.append(Borrowed(roles.norm, name, {**sizes, **own}, rows))
            if not op.over:
                linears, is_behind = [], False
        elif isinstance(op, Attend):
            own = _size_attention(roles, op, width, has_cache)
            after = find_reader(ops, i)
            window = op.rows.window if isinstance(op.rows, Pairs) else 0
            if after is not None and rows:
                found.append(Borrowed(roles.attend, name, {**sizes, **own}, count_rows(after), window, rows))
            linears, is_behind = [], False
        elif isinstance(op, Pointwise) and linears and not is_behind:
            found += _borrow_function(roles, op, linears, ops[i:], sizes, count_rows)
            linears, is_behind = [], True
    first = next((op for op in ops if op.kind in ("norm", "linear", "conv")), None)
    return [*found, Borrowed("", "", sizes, count_rows(first))] if first is not None else found


def _find_linear(roles: Roles, op: Op, left: Sequence[Op], before: int, is_behind: bool) -> str:
    """The stand-in's linear module that plays the part of one."""
    if op.part == "attention_projections":
        if any(isinstance(each, Attend) for each in left):
            return roles.projections[min(before, len(roles.projections) - 1)]
        return roles.output
    return roles.outer if is_behind else roles.inner[min(before, len(roles.inner) - 1)]


def _borrow_function(
    roles: Roles,
    op: Pointwise,
    linears: Sequence[Op],
    left: Sequence[Op],
    sizes: Mapping[str, int],
    count_rows: Callable[[Op], int],
) -> list[Borrowed]:
    """An activation function, and the product with a gate where there is one."""
    after = next((each for each in left if each.kind in ("linear", "conv")), None)
    wide = after.n_in if after is not None else linears[-1].n_out
    rows = count_rows(linears[-1])
    own = {**sizes, **{f"{name}.n_out": wide for name in roles.inner}, f"{roles.outer}.n_in": wide}
    name = op.name.replace("*", "#")
    found = [Borrowed(roles.function, name, own, rows)]
    if op.gate in ("pair", "fused") and len(roles.inner) > 1:
        found.append(Borrowed(roles.mlp, name.rpartition(".")[0], own, rows))
    return found


def _size_attention(roles: Roles, op: Attend, width: int, has_cache: bool = False) -> dict[str, int]:
    """Sizes of attention and of its projections under the stand-in's names; with a cache, keys are what it holds."""
    widths = [op.heads * op.qk, op.kv_heads * op.qk, op.kv_heads * op.v]
    if has_cache:
        widths[1:] = [op.cache // 2, op.cache - op.cache // 2]
    if len(roles.projections) == 1:
        widths = [sum(widths)]
    sizes = {f"{name}.n_out": wide for name, wide in zip(roles.projections, widths, strict=True)}
    sizes |= {f"{name}.n_in": width for name in roles.projections}
    sizes |= {f"{roles.output}.n_in": op.heads * op.v, f"{roles.output}.n_out": width}
    own = {"heads": op.heads, "qk": op.qk, "v": op.v, "kv": op.kv_heads}
    return sizes | {f"{roles.attend}.{name}": value for name, value in own.items()}


def _size_layer(roles: Roles, ops: Sequence[Op], width: int) -> dict[str, int]:
    """Sizes of a whole layer under the stand-in's names: those of its first attention and of its widest MLP."""
    core = next((op for op in ops if isinstance(op, Attend)), None)
    wide = max((op.n_in for op in ops if op.kind == "linear" and op.part != "attention_projections"), default=width)
    sizes = {"width": width, f"{roles.norm}.size": width, f"{roles.outer}.n_in": wide, f"{roles.outer}.n_out": width}
    sizes |= {f"{name}.n_out": wide for name in roles.inner} | {f"{name}.n_in": width for name in roles.inner}
    if core is None:  # what attention needs around the layers has no bytes
        return sizes | {f"{roles.attend}.{name}": 0 for name in ("heads", "qk", "v", "kv")}
    return sizes | _size_attention(roles, core, width)


# --- outside of layers ------------------------------------------------------------------------------------------------
class Outside(NamedTuple):
    """What the stand-in has outside of its layers, and the stages of the model that borrows it."""

    stand_in: StandIn
    stages: Sequence[Stage]

    def list_ops(self) -> list[tuple[Stage, Op, str]]:
        """The model's own ops outside of layers, each with the stand-in's module that plays its part, or none."""
        return [
            (stage, op, _find_outside(self.stand_in.outside, op, stage.group))
            for stage in self.stages
            for op in (iterate(stage.layers[0]) if not stage.repeated and stage.layers else ())
        ]

    def size(self) -> dict[str, int]:
        """Sizes of the whole model under the stand-in's names, which begin with a slash; 0 of what it does not have."""
        sizes = {
            f"/{source}.{name}": 0 for names in self.stand_in.outside.values() for source in names for name in _SIZES
        }
        for _, op, source in reversed(self.list_ops()):  # the first of several that play one part wins
            if source:
                sizes |= {f"/{source}.{name}": getattr(op, name) for name in _SIZES}
        for group, roles in self.stand_in.layers.items():
            layers = [stage for stage in self.stages if stage.repeated and stage.layers and stage.group == group]
            width, ops = (layers[0].width, list(iterate(layers[0].layers[0]))) if layers else (0, [])
            own = _size_layer(roles, ops, width)
            sizes |= {f"/{roles.path}:{name}": size for name, size in own.items()} | {"width": width}
        return sizes


_SIZES = ("n_in", "n_out", "size")


def borrow_outside(
    given: Outside, names: Iterable[str], count_rows: Callable[[Op], int], tokens: int
) -> list[Borrowed]:
    """What the modules outside of layers borrow; those around layers get what lies around the stand-in's."""
    sizes = given.size()
    found: list[Borrowed] = []
    for stage, op, source in given.list_ops():
        if source:
            module = join(stage.path, op.name).replace("*", "#")
            own = {f"{source}.{name}": getattr(op, name) for name in _SIZES}
            found.append(Borrowed(source, module, {**sizes, **own}, count_rows(op)))
    known = {name for modules in given.stand_in.outside.values() for name in modules}
    tower = given.stand_in.layers["vision"].path.rpartition(".")[0] if "vision" in given.stand_in.layers else ""
    for name in names:
        if name not in known:
            is_seeing = bool(tower) and f"{name}.".startswith(f"{tower}.")
            around = _find_around(given.stages, "vision" if is_seeing else "language") if name else ""
            found.append(Borrowed(name, around, sizes, tokens))
    return found


def _find_outside(sources: Mapping[str, Sequence[str]], op: Op, group: str) -> str:
    """The stand-in's module outside of layers that plays the part of one; none where none does."""
    alike, linears = sources.get(op.kind, ()), sources["linear"]
    if op.kind in ("linear", "conv"):
        if op.part == "lm_head" or not alike:
            return linears[-1]
        return alike[0] if op.kind == "conv" or len(linears) > 1 else linears[-1]
    if not alike:
        return ""
    return alike[-1] if op.kind == "norm" and group == "language" else alike[0]


def _find_around(stages: Sequence[Stage], group: str) -> str:
    """The module around the layers of a group."""
    paths = [stage.path for stage in stages if stage.repeated and stage.group == group]
    return paths[-1].rpartition(".")[0] if paths else ""
