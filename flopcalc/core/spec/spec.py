"""Specs: TOML files in, checked Spec values out; bind(spec, config) gives the scope in which its dims have values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from flopcalc.base.data import find_data_dir, find_data_file, get_stem, list_data_files, load_toml
from flopcalc.base.errors import ConfigError, SpecError, find_nearest, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.vocabulary import COMPONENTS, PHASES, Component
from flopcalc.core.spec.computed_keys import find_computed
from flopcalc.core.spec.expressions import Budget, MissingNameError, evaluate, find_names, parse
from flopcalc.core.spec.loops import check_lists, list_entries
from flopcalc.core.spec.merge import ROW_KEYS, Table, check_keys, is_names, load_tables
from flopcalc.core.spec.row_units import UNITS

# Keys that each table of a spec may hold; anything else is an error that names the nearest known word.
_STACK_KEYS = {
    "name", "path", "repeat", "first", "stream", "side", "rows", "needed", "part", "checkpoint", "ops", "when", "dead",
    "reads", "joins", "adds", "untrained", "reversible", "input_gradient", "together", "width",
    "use", "config", "flat", "rename", "set", "defaults", "only", "body",
}  # fmt: skip
_AUDIO_KEYS = {"rate", "most", "tokens", "input", "axis", "mask"}
_VISION_KEYS = {
    "kind", "patch", "merge", "side", "most", "tokens", "videos", "pixels", "sizes", "grid", "flattened", "canvas",
    "text", "tower", "frames", "least", "images",
}  # fmt: skip
_LATENT_KEYS = {
    "input", "axes", "text", "pixels", "frames", "pack", "side", "deep", "length", "expanded", "square", "most",
    "videos", "unread",
}  # fmt: skip
_POSITION_KEYS = {"kind", "limit"}
_OP_COMMON = {
    "op", "name", "when", "rows", "needed", "less", "times", "part", "from", "joined", "to", "detached", "again",
    "unused", "state",
}  # fmt: skip
OP_KEYS: dict[str, set[str]] = {
    "linear": _OP_COMMON
    | {"in", "out", "bias", "tied", "param", "targets", "copies", "active", "input_embedding", "at", "flops"}
    | {"adapts", "numbered", "float32", "split", "shared", "groups"},
    "conv": _OP_COMMON | {"in", "out", "bias", "param", "input_embedding", "at", "split"},
    "attend": _OP_COMMON
    | {"heads", "qk", "v", "out", "span", "mask", "window", "length", "kv_heads", "cache", "cache_rows", "latent"}
    | {"queries", "rotates", "float_scores"},
    "product": _OP_COMMON | {"flops", "backward", "pair", "float32"},
    "norm": _OP_COMMON | {"dim", "bias", "tied", "copies", "over"},
    "embed": _OP_COMMON | {"count", "dim", "tied", "input_embedding"},
    "param": _OP_COMMON | {"size", "tied"},
    "pointwise": _OP_COMMON | {"gate"},
    "dropout": _OP_COMMON | {"p"},
}
PARTS = COMPONENTS
HEAD_PARTS = ("lm_head", "head")  # what reads the body's output
# What a block usually is, by the last word of its name: the part of its products with weights that say none.
_BLOCK_PARTS: dict[str, Component] = {
    "attention": "attention_projections",
    "indexer": "attention_projections",
    "mlp": "mlp",
    "experts": "mlp",
    "moe": "mlp",
    "mamba": "ssm",
}
ROWS = ("tokens", "logits", "cached", "patches", "merged", "images", "tiles")
SIDES = ("encoder", "decoder")
SPANS = ("seq", "frames", "windows", "images", "tiles")
MASKS = ("causal", "full")
# How tensor parallelism cuts a product: by its outputs (column), of which all (keys) or the last (fused) are keys and
# values and are cut no finer than their heads; by its inputs (row); or not at all (whole).
Split = Literal["column", "keys", "fused", "row", "whole"]
# What an activation function is multiplied by: nothing, the other of two products (pair), or the other half of one.
Gate = Literal["plain", "pair", "fused"]
Rotated = Literal["all", "part"]  # how much of each head a rotation turns
_OP_WORDS: dict[str, tuple[str, ...]] = {
    "part": PARTS,
    "span": SPANS,
    "mask": MASKS,
    "split": get_args(Split),
    "gate": get_args(Gate),
    "rotates": get_args(Rotated),
}
# What the values of these keys are; anything else in a stack or an op is a string, most of them expressions.
_KEY_TYPES: dict[str, tuple[type, ...]] = {
    "ops": (list,), "joins": (list,), "reads": (list,), "tied": (list,), "checkpoint": (bool, str), "flat": (bool,),
    "reversible": (bool,), "input_gradient": (bool,),
    "input_embedding": (bool, str), "detached": (bool,), "pair": (bool,), "shared": (bool,), "float_scores": (bool,),
    "rename": (dict,), "set": (dict,), "defaults": (dict,),
    "pixels": (dict, str), "keep": (bool,),
    **dict.fromkeys(("in", "out", "times", "copies", "active", "heads", "qk", "v", "dim", "count", "size"), (str, int)),
    **dict.fromkeys(("flops", "backward", "kv_heads", "cache", "latent", "state"), (str, int)),
    **dict.fromkeys(("length", "repeat", "first", "over", "width"), (str, int)),
}  # fmt: skip
_KINDS = {"vision": ("grid", "fixed", "tiles"), "positions": ("learned", "rotary")}
# Keys of an op that hold no expression.
WORDS = {
    "op", "block", "name", "rows", "needed", "less", "cache_rows", "queries", "part", "span", "mask", "param", "from",
    "joined", "to", "at", "under", "with", "split", "gate", "rotates",
}  # fmt: skip
_HEAD_KEYS = {"use", "like", "set", "base", "stack", "keep", "refuse"}
MAX_LAYERS = 10_000
_NO_SIZES = ("feature_layers", "chunk_size")  # -2 counts from the end, -1 means all
_SIZES = ("_dim", "_size", "_heads", "_experts", "_layers", "_rank")  # end keys whose values are never negative
OWN_TYPE = ("model_type", "backbone")  # values of `use`: the inner config's own model_type names the spec
_BODY = "-body"  # ends the names of variants without a head, which other models use
_BACKBONE = "_backbone"  # ends the names of parts that other models read stage by stage


@frozen()
class Spec(Value):
    """One architecture: where its dims are in a config, and its stacks of ops in dataflow order."""

    name: str
    file: str
    architecture: str
    source: str
    required: tuple[str, ...]
    defaults: Table
    renamed: dict[str, list[str]]  # config key -> names that other releases give it
    dims: dict[str, list[str]]
    blocks: dict[str, list[Any]]
    checks: dict[str, str]  # what must hold of a config, in words -> expression
    config_checks: dict[str, str]  # the same, of keys that the config itself gives
    stacks: list[Table]
    vision: Table
    audio: dict[str, str]
    positions: dict[str, str]
    variants: dict[str, str]  # HF class -> spec to take instead of this one
    rename: dict[str, str]  # path prefix -> new prefix, in stacks taken from a spec that it extends
    is_tower: bool  # part of a model, not one by itself
    latents: dict[str, str]  # of a denoiser: what its input is made of
    heads: Mapping[str, Table]  # what it says about other heads than its own; see heads.toml
    refused: Mapping[str, str]  # HF class of this model type -> why it is not described
    reentrant: str = ""  # what a reader should know of reentrant checkpointing here
    sums: tuple[str, ...] = ()  # names of [sums], already written out in stacks and blocks
    body: str = ""  # the variant that other models take in its place: the same without its head
    note: str = ""  # printed with every result
    phases: tuple[str, ...] = ()  # those that it describes; none named: all that its ops allow
    nulls: Mapping[str, object] = MappingProxyType({})  # config key -> what HF's code takes its null for
    has_sdpa: bool = True  # HF's class takes PyTorch's SDPA
    has_conv1d: bool = False  # its layers are transformers' Conv1D, not torch.nn.Linear
    untimed: str = ""  # why its time cannot be predicted
    unrecomputed: str = ""  # why its class cannot run with gradient checkpointing
    lists: Mapping[str, list[Table]] = MappingProxyType({})  # lists written with loops; specs read them as names
    own_ops: frozenset[str] = frozenset()  # names of the ops that a user's own file has; of a shipped one none
    main_input: str = "input_ids"  # HF's main_input_name: only text makes checkpointing ask embeddings for a gradient


def find_spec(model_type: str) -> Spec | None:
    """The spec of a model_type, or None."""
    path = find_data_file("specs", model_type)
    return load_spec(path) if path else None


def find_body(model_type: str, extra: dict[str, Spec]) -> Spec | None:
    """The spec that other models take for a model_type: the body that it names, else its own; `extra` come first."""
    spec = extra.get(model_type) or find_spec(model_type)
    return spec if spec is None or not spec.body else extra.get(spec.body) or find_spec(spec.body)


def find_backbone(model_type: str, where: str) -> str:
    """The name of the part that describes a model type below another model, which reads its stages."""
    if "widths" in getattr(find_spec(f"{model_type}{_BACKBONE}"), "dims", ()):
        return f"{model_type}{_BACKBONE}"
    parts = [name for name in list_data_files("specs") if name.endswith(_BACKBONE)]
    known = [name.removesuffix(_BACKBONE) for name in parts if "widths" in getattr(find_spec(name), "dims", ())]
    words = f"is not described as a backbone; these are: {', '.join(known)}"
    raise ConfigError(f"{where}: model_type {format_value(model_type)} {words}")


@lru_cache(maxsize=1024)
def load_spec(path: str) -> Spec:
    """The spec of a data file, read once."""
    return read_spec(path)


def read_spec(path: str) -> Spec:
    """Read, merge with what it extends, and check one spec file."""
    tables = load_tables(path)
    _check_tables(tables, path)
    spec = Spec(
        name=get_stem(path),
        file=os.path.basename(path),
        architecture=_text(tables, "architecture", path),
        source=_text(tables, "source", path),
        required=tuple(tables.get("required", ())),
        defaults=tables.get("defaults", {}),
        renamed=tables.get("renamed", {}),
        dims={name: _candidates(value, name, path) for name, value in tables.get("dims", {}).items()},
        blocks=tables.get("blocks", {}),
        checks=tables.get("checks", {}),
        config_checks=tables.get("config_checks", {}),
        stacks=tables.get("stack", []),
        vision=tables.get("vision", {}),
        audio=tables.get("audio", {}),
        positions=tables.get("positions", {}),
        variants=tables.get("variants", {}),
        rename=tables.get("rename", {}),
        is_tower=bool(tables.get("tower", False)),
        reentrant=str(tables.get("reentrant", "")),
        sums=tuple(tables.get("sums", ())),
        latents=tables.get("latents", {}),
        body=next((name for name in tables.get("variants", {}).values() if str(name).endswith(_BODY)), ""),
        heads=tables.get("heads", {}),
        refused=tables.get("refused", {}),
        nulls=tables.get("nulls", {}),
        note=str(tables.get("note", "")),
        phases=tuple(tables.get("phases", ())),
        has_sdpa=tables.get("sdpa", True),
        has_conv1d=tables.get("conv1d", False),
        untimed=str(tables.get("untimed", "")),
        unrecomputed=str(tables.get("unrecomputed", "")),
        lists=tables.get("lists", {}),
        own_ops=_list_own_ops(path),
        main_input=str(tables.get("main_input", "input_ids")),
    )
    _check_spec(spec, path)
    return spec


def _list_own_ops(path: str) -> frozenset[str]:
    """Names of the ops in a user's own file, not in what it extends; none of a shipped file, whose roles are tested."""
    left: list[Any] = [] if os.path.abspath(path).startswith(os.path.join(find_data_dir(), "")) else [load_toml(path)]
    found = set()
    while left:
        value = left.pop()
        if isinstance(value, dict):
            found |= {str(value.get("name", ""))} if "op" in value else set()
            left += value.values()
        elif isinstance(value, list):
            left += value
    return frozenset(found)


def _check_tables(tables: Table, path: str) -> None:
    """The kinds of value that TOML may hold where a spec wants others."""
    if not is_names(tables.get("required", [])):
        raise SpecError(f"{path}: required must be a list of config keys")
    for key, names in tables.get("renamed", {}).items():
        if not is_names(names):
            raise SpecError(f"{path}: [renamed] {key} must be a list of names")
    phases = tables.get("phases", [])
    if not is_names(phases) or not set(phases) <= set(PHASES):
        raise SpecError(f"{path}: phases must be a list of {', '.join(PHASES)}")
    for key in ("sdpa", "conv1d"):
        if not isinstance(tables.get(key, True), bool):
            raise SpecError(f"{path}: {key} must be true or false, not {format_value(tables[key])}")
    if not is_names(list(tables.get("refused", {}).values())):
        raise SpecError(f"{path}: [refused] must map classes to reasons")


def _text(tables: dict[str, object], key: str, path: str) -> str:
    value = tables.get(key)
    if not isinstance(value, str) or not value:
        raise SpecError(f'{path}: needs {key} = "…"')
    return value


def _candidates(value: object, name: str, path: str) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(entry, (str, int)) for entry in listed):
        raise SpecError(f"{path}: dim {name!r} must be an expression or a list of them")
    return [str(entry).lower() if isinstance(entry, bool) else str(entry) for entry in listed]


def _check_types(table: Table, where: str) -> None:
    for key, value in table.items():
        kinds = _KEY_TYPES.get(key, (str,))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise SpecError(f"{where}: {key} must be a {wanted}, not {format_value(value)}")
    for key in ("tied", "reads"):
        if key in table and not (is_names(table[key]) and len(table[key]) == 2):
            raise SpecError(f"{where}: {key} must be two strings, not {format_value(table[key])}")
    for key in ("rename", "set"):
        if not is_names(list(table.get(key, {}).values())):
            raise SpecError(f"{where}: {key} must map names to strings")
    if not is_names(table.get("joins", [])):
        raise SpecError(f"{where}: joins must be a list of streams")


def _check_expression(text: object, where: str) -> None:
    if not isinstance(text, str):
        raise SpecError(f"{where} must be an expression, not {format_value(text)}")
    try:
        parse(text)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _check_spec(spec: Spec, path: str) -> None:
    for name, entries in spec.dims.items():
        for entry in entries:
            _check_expression(entry, f"{path}: dim {name!r}")
    for name, rows in spec.lists.items():
        check_lists(rows, spec.lists, f"{path}: [lists] {name}")
    for label, checks in (("checks", spec.checks), ("config_checks", spec.config_checks)):
        for reason, text in checks.items():
            _check_expression(text, f"{path}: [{label}] {reason!r}")
    for table, known, label in (
        (spec.vision, _VISION_KEYS, "vision"),
        (spec.audio, _AUDIO_KEYS, "audio"),
        (spec.latents, _LATENT_KEYS, "latents"),
        (spec.positions, _POSITION_KEYS, "positions"),
    ):
        where = f"{path}: [{label}]"
        check_keys(table, known, where)
        _check_types(table, where)
        if table and label in _KINDS and table.get("kind") not in _KINDS[label]:
            raise SpecError(f"{where} needs kind = {' or '.join(map(repr, _KINDS[label]))}")
        pixels: Any = table.get("pixels", {}) if label == "vision" else {}
        plain = {"kind", "videos", "pixels", "input", "sizes", "flattened", "canvas", "text", "tower", "mask"}
        if label == "latents":
            plain = {"input", "axes", "text"}
        texts = {key: table[key] for key in table.keys() - plain}
        texts |= {key: str(text) for key, text in pixels.items() if key != "rule"}
        for key, text in texts.items():
            _check_expression(text, f"{where} {key}")
    if not spec.stacks:
        raise SpecError(f"{path}: needs at least one [[stack]]")
    for name, head in spec.heads.items():
        _check_head(head, spec, f"{path}: [heads] {name}")
    checked: set[str] = set()
    for stack in spec.stacks:
        where = f"{path}: stack {stack.get('path') or stack.get('use')!r}"
        check_keys(stack, _STACK_KEYS, where)
        _check_types(stack, where)
        for key in stack.keys() & {"repeat", "first", "when", "dead", "untrained", "width"}:
            _check_expression(str(stack[key]), f"{where} {key}")
        if "use" in stack and "config" not in stack:
            raise SpecError(f'{where}: needs config = "…", the key that holds the inner config')
        if "use" not in stack:
            if "path" not in stack:
                raise SpecError(f"{where}: needs a path")
            for key, words in (("part", PARTS), ("side", SIDES)):
                if key in stack and stack[key] not in words:
                    raise SpecError(f"{where}: {key} {stack[key]!r} unknown.{format_nearest(stack[key], words)}")
            _check_rows(stack, spec.sums, where)
            try:
                _check_ops(stack.get("ops", []), spec, where, checked, ())
            except RecursionError:
                raise SpecError(f"{where}: its lists and blocks are nested too deeply") from None


def _check_head(table: object, spec: Spec, where: str) -> None:
    """What a spec says about another head than its own."""
    if not isinstance(table, dict):
        raise SpecError(f"{where} must be a table")
    check_keys(table, _HEAD_KEYS, where)
    _check_types({key: table[key] for key in table.keys() - {"stack"}}, where)
    for text in table.get("set", {}).values():
        _check_expression(text, f"{where} set")
    stacks = table.get("stack", [])
    if not isinstance(stacks, list) or not all(isinstance(stack, dict) for stack in stacks):
        raise SpecError(f"{where}: stack must be a list of tables")
    for stack in stacks:
        check_keys(stack, _STACK_KEYS, where)
        _check_types(stack, where)
        _check_ops(stack.get("ops", []), spec, where, set(), ())


def _check_ops(items: object, spec: Spec, where: str, checked: set[str], above: tuple[str, ...]) -> None:
    """Every op of a list and of the blocks that it names, each block once; `above` are the blocks around it."""
    if not isinstance(items, list):
        raise SpecError(f"{where}: ops must be a list")
    for item in items:
        if isinstance(item, list):
            _check_ops(item, spec, where, checked, above)
        elif isinstance(item, str):
            if item not in spec.blocks:
                raise SpecError(f"{where}: no block {item!r}.{format_nearest(item, spec.blocks)}")
            if item in above:
                raise SpecError(f"{where}: block {item!r} leads back to itself")
            if item not in checked:
                _check_ops(spec.blocks[item], spec, f"{where}, block {item!r}", checked, (*above, item))
                checked.add(item)
        elif isinstance(item, dict) and "block" in item:
            here = f"{where}, block {format_value(item['block'])}"
            check_keys(item, {"block", "when", "under", "checkpoint", "with"}, here)
            _check_types(item, here)
            _check_expression(item.get("when", "true"), f"{here}, when")
            _check_ops([item["block"]], spec, where, checked, above)
        elif isinstance(item, dict):
            _check_op(item, spec, where)
        else:
            raise SpecError(f"{where}: {item!r} is neither an op, a list of ops nor a block's name")


def _check_op(op: Table, spec: Spec, where: str) -> None:
    kind = op.get("op")
    if not isinstance(kind, str) or kind not in OP_KEYS:
        raise SpecError(f"{where}: unknown op {kind!r}.{format_nearest(str(kind), OP_KEYS)}")
    where = f"{where}, op {op.get('name', kind)!r}"
    check_keys(op, OP_KEYS[kind], where)
    _check_types(op, where)
    _check_rows(op, spec.sums, where)
    for key, known in _OP_WORDS.items():
        if key in op and op[key] not in known:
            raise SpecError(f"{where}: {key} {op[key]!r} unknown.{format_nearest(op[key], known)}")
    for key, value in op.items():
        if isinstance(value, str) and key not in WORDS:
            _check_expression(value, f"{where}, {key}")


def keeps_keys(op: dict[str, object]) -> bool:
    """Whether an attend op of a spec may decode, so that its keys and values stay in a cache."""
    if "rows" in op:
        return str(op["rows"]).partition(":")[0] in ("sequence", "document", "decoder")
    return (op.get("span", "seq"), op.get("mask", "causal")) == ("seq", "causal")


def find_block_part(name: str) -> Component | None:
    """The part of a block's products with weights if neither op nor stack says one; None if the name implies none."""
    return _BLOCK_PARTS.get(name.rpartition("_")[2])


def _check_rows(table: Table, sums: tuple[str, ...], where: str) -> None:
    """`rows` and its like: a word, or 'UNIT: EXPRESSION', the sum of it over the workload's units."""
    for key in ROW_KEYS:
        text = table.get(key)
        if text is None or (text in ROWS and key != "cache_rows"):
            continue
        unit, colon, expression = text.partition(":")
        if not colon and key == "cache_rows":
            raise SpecError(f'{where}: cache_rows must be "UNIT: EXPRESSION", not {text!r}')
        if not colon:
            raise SpecError(f"{where}: {key} {text!r} unknown.{format_nearest(text, (*ROWS, *sums))}")
        if unit not in UNITS:
            raise SpecError(f"{where}: {key} {text!r}: no unit {unit!r}.{format_nearest(unit, UNITS)}")
        _check_expression(expression, f"{where}, {key}")


class BoundDims:
    """The names of a spec with their values under one config; dims are computed when first asked for."""

    __slots__ = (
        "_depends",
        "_fixed",
        "_inner",
        "_layered",
        "budget",
        "config",
        "defaults",
        "extra",
        "layer",
        "spec",
        "where",
    )

    def __init__(
        self, spec: Spec, config: dict[str, object], where: str, settings: dict[str, object] | None = None,
        defaults: dict[str, object] | None = None, extra: dict[str, Spec] | None = None, budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.budget = budget or Budget()  # one for a model and the specs inside it
        self.extra = extra or {}  # specs that the user added for this call, by model_type
        self.config = config
        self.where = where
        self.defaults = {**spec.defaults, **(defaults or {})}
        self.layer: int | None = None
        self._fixed: Table = dict(settings or {})
        self._layered: Table = {}
        self._depends: dict[str, bool] = {}
        self._inner: dict[str, BoundDims | None] = {}

    def set_layer(self, layer: int | None) -> None:
        self.layer = layer
        self._layered = {}

    def lookup(self, name: str) -> Any:
        if name == "i":
            if self.layer is None:
                raise SpecError(f"{self.spec.file}: 'i' used outside a repeated stack")
            return self.layer
        if name in self._fixed:
            return self._fixed[name]
        if name in self._layered:
            return self._layered[name]
        entries = self.spec.dims.get(name)
        if entries is None and name in self.spec.lists:
            self._fixed[name] = found = list_entries(name, self.spec.lists, self, self.budget)
            return found
        if entries is None:
            return self._read_config(name)
        value = self._first(name, entries)
        (self._layered if self.depends_on_layer(name) else self._fixed)[name] = value
        return value

    def depends_on_layer(self, name: str) -> bool:
        """Whether a name's value changes from layer to layer, directly or through other dims."""
        known = self._depends.get(name)
        if known is None:
            self._depends[name] = False  # a cycle ends here; evaluation reports it
            known = name == "i" or (
                name not in self._fixed
                and any(
                    self.depends_on_layer(inner)
                    for entry in self.spec.dims.get(name, ())
                    for inner in find_names(entry)
                )
            )
            self._depends[name] = known
        return known

    def evaluate(self, text: str) -> Any:
        return evaluate(text, self)

    def _first(self, name: str, entries: list[str]) -> Any:
        # The first entry whose config keys are all present. The name itself, inside, means the config's key.
        missing: MissingNameError | None = None
        for entry in entries:
            try:
                return self._read_config(name) if entry == name else evaluate(entry, self)
            except MissingNameError as error:
                missing = missing or error
            except RecursionError:
                raise SpecError(f"{self.spec.file}: dim {name!r} is defined by itself") from None
        assert missing is not None
        raise missing

    def _read_config(self, name: str) -> Any:
        for key in (name, *self.spec.renamed.get(name, ())):
            is_given, value = find_key(self.config, key)
            if is_given:
                default = self.defaults.get(name)
                if value is None:  # HF's code asks of a flag whether it is true
                    value = self.spec.nulls.get(name, False if isinstance(default, bool) else None)
                elif (
                    type(value) is int and value < 0 and key.endswith(_SIZES) and not key.endswith(_NO_SIZES)
                ):  # in a sum it would only be smaller
                    raise ConfigError(f"{self.where}: {key} must be at least 0, not {value}")
                elif isinstance(default, bool) and value in ("true", "false"):
                    raise ConfigError(f"{self.where}: {key} must be true or false, not {value!r}")
                break
        else:
            value = self._find_inner_default(name)
            value = self.defaults.get(name) if value is None else value
        if value is None and (derive := find_computed(name)) is not None:
            value = self._fixed[name] = derive(self.lookup)
        if value is None:
            raise MissingNameError(name)
        return value

    def _find_inner_default(self, name: str) -> Any:
        """What an inner config's own spec says about a key that the config leaves out: its default, or a dim."""
        outer, _, key = name.partition(".")
        inner = self.bind_inner(outer) if key and key != "model_type" else None
        if inner is None:
            return None
        value = inner.defaults.get(key)
        if value is None and key in inner.spec.dims and not inner.depends_on_layer(key):
            try:
                value = inner.lookup(key)
            except MissingNameError:
                return None
        return value

    def bind_inner(self, key: str) -> BoundDims | None:
        """The dims of an inner config whose own model_type says what it is; None where there is none, or no spec."""
        if key in self._inner:
            return self._inner[key]
        config = self.config.get(key)
        found: BoundDims | None = None
        for stack in self.spec.stacks:
            if stack.get("use") not in OWN_TYPE or stack["config"] != key or not isinstance(config, dict):
                continue
            defaults: dict[str, object] = stack.get("defaults", {})
            name = str(config.get("model_type", defaults.get("model_type")))
            is_backbone = stack["use"] == "backbone"
            spec = (
                find_spec(find_backbone(name, f"{self.where}: {key}")) if is_backbone else find_body(name, self.extra)
            )
            if spec is not None:
                found = BoundDims(spec, config, f"{self.where}: {key}", {}, defaults, self.extra, self.budget)
                break
        self._inner[key] = found
        return found


def find_key(config: dict[str, object], dotted: str) -> tuple[bool, Any]:
    """Whether a config gives a (dotted) key, if only as null, and its value."""
    value: object = config
    for key in dotted.split("."):
        if not isinstance(value, dict) or key not in value:
            return False, None
        value = value[key]
    return True, value


def bind(spec: Spec, config: dict[str, object], where: str, extra: dict[str, Spec] | None = None) -> BoundDims:
    """A spec's dims under a config, after checking that the config has what the spec cannot do without."""
    check_required(spec, config, where)
    inner = {stack["config"] for stack in spec.stacks if "use" in stack}
    whole = {key: value for key, value in spec.defaults.items() if key in inner and isinstance(value, dict)}
    left_out = {key: value for key, value in whole.items() if config.get(key) is None}
    return BoundDims(spec, {**config, **left_out} if left_out else config, where, extra=extra)


def check_required(spec: Spec, config: dict[str, object], where: str) -> None:
    lacking = [
        key for key in spec.required if all(config.get(name) is None for name in (key, *spec.renamed.get(key, ())))
    ]
    if lacking:
        others = [name for name, value in config.items() if value is not None and name not in spec.required]
        near = {name: key for key in reversed(lacking) for name in find_nearest(key, others, 1, 0.6)}
        like = "".join(f" Is your {name} the {key}?" for name, key in near.items())
        keys = f"key{'s' if lacking[1:] else ''} {', '.join(map(repr, lacking))}"
        raise ConfigError(f"{where}: missing {keys}, which {spec.name!r} needs.{like}")
