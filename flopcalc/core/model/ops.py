"""Expand a bound spec into stages of ops: every size an int, every row count a named sum of the workload."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from flopcalc.core.spec.expressions import MissingNameError, evaluate, evaluate_truth, find_names
from flopcalc.core.spec.row_units import UNITS
from flopcalc.core.spec.spec import (
    MAX_LAYERS,
    SPANS,
    WORDS,
    BoundDims,
    check_required,
    find_key,
    find_spec,
    keeps_keys,
    rename_path,
)
from flopcalc.core.workload.sums import Feature
from flopcalc.errors import ConfigError, SpecError, format_value


class Op(NamedTuple):
    """One operation: its module's name, its sizes, and the feature that says how often it runs."""

    kind: str
    name: str
    part: str
    feature: Feature
    times: int = 1  # runs per unit of the feature (experts per token, rows per image)
    n_in: int = 0
    n_out: int = 0
    bias: bool = False
    param: str = "weight"  # the parameter's name inside its module
    tied: str | None = None  # full name of the parameter it shares
    targets: tuple[str, ...] = ()  # a bare parameter: the target names that PEFT maps to it, all of them needed
    is_bare: bool = False  # no linear module: LoRA reaches it by those names alone, by none if there are none
    copies: int = 1  # weight copies (experts)
    active: int = 1  # copies that one token reaches
    heads: int = 0
    qk: int = 0
    v: int = 0
    size: int = 0  # elements of a norm's weight, an embedding row, a bare parameter
    saves: bool = True  # autograd keeps a tensor for it when a gradient passes
    input_embedding: bool = False  # HF's checkpointing makes its output require a gradient
    flops: int = 0  # of a product of activations
    backward: int = 0  # and of its gradients
    source: str = ""  # the stream whose output it reads, if not its own chain
    detached: bool = False  # no gradient passes
    frozen: bool = False  # HF itself never trains its weights
    again: bool = False  # its module has run before: its parameters are counted there
    unused: bool = False  # nothing reads what it computes, so it gets no gradient
    nested: bool = False  # in a checkpointed block inside a checkpointed layer
    beside: str = ""  # the stream without which it does not run
    numbered: tuple[int | str, ...] = (0, 1)  # the copies that are modules (*): first number and step, or their names
    adapts: bool = True  # LoRA's all-linear reaches it, as every linear module but the head
    at: str = ""  # the module that multiplies by its weight, if not its own
    kv_heads: int = 0  # heads of keys and values
    cache: int = 0  # elements that each position leaves in the layer's cache, as HF's code caches
    cache_rows: Feature = ()  # how many positions the cache holds after a call; () where it holds none
    latent: int = 0  # elements of the compressed latent per position, where attention is latent

    @property
    def bias_name(self) -> str:
        """The bias's name in its module; a bare parameter has it beside itself (down_proj_bias)."""
        return f"{self.param}_bias" if self.is_bare and self.param != "weight" else "bias"

    @property
    def copy_names(self) -> list[str]:
        """What stands for * in the name of a module per copy."""
        first, step = self.numbered[0], self.numbered[-1]
        if isinstance(first, int) and isinstance(step, int):
            return [str(first + step * copy) for copy in range(self.copies)]
        return [str(name) for name in self.numbered]


Chain: TypeAlias = "tuple[Op | tuple[Chain, ...], ...]"


class Stage(NamedTuple):
    """A stack of a spec under one config: a chain of ops, or one chain per layer."""

    path: str
    layers: tuple[Chain, ...]
    repeated: bool
    stream: str
    group: str  # vision, projector or language: the word that --freeze knows it by
    checkpoint: bool
    dead: tuple[bool, ...]  # per layer: computed, but its output is never used
    reads: tuple[str, tuple[int, ...]] | None  # (stage path, layer whose output layer j of this one reads)
    joins: tuple[str, ...]  # streams that enter this one here
    adds: str | None  # path of a repeated stage: its j-th output is added after this one's layer j
    first: int = 0  # number of the first layer, where another stage holds those before it
    reversible: bool = False  # its backward runs every layer again, whatever the recipe says
    input_gradient: bool = False  # HF makes its input require a gradient, whatever trains


def expand(dims: BoundDims) -> tuple[Stage, ...]:
    """All stages of a model in dataflow order, inner specs (towers, language models) included."""
    try:
        stages = tuple(_expand(dims, {}, "encoder"))
    except MissingNameError as error:
        raise ConfigError(f"{dims.where}: missing key {error.name!r}, which {dims.spec.name!r} needs") from None
    except SpecError as error:
        # A list that is too short, a word where a number should be: the config's fault as far as anyone can tell.
        raise ConfigError(f"{dims.where}: {error}") from None
    except RecursionError:
        raise SpecError(f"{dims.spec.file}: uses itself, through its stacks or its dims") from None
    if dims.spec.main_input != "input_ids":
        stages = tuple(map(remove_hooks, stages))
    lengths = {stage.path: stage.first + len(stage.layers) for stage in stages}
    for stage in stages:
        if stage.reads is not None and max(stage.reads[1], default=-1) >= lengths.get(stage.reads[0], 0):
            path, layers = stage.reads
            raise ConfigError(
                f"{dims.where}: {stage.path!r} reads layer {max(layers)} of {path!r}, which has {lengths.get(path, 0)}"
            )
    return stages


def _expand(dims: BoundDims, rename: dict[str, str], side: str) -> list[Stage]:
    for words, text in dims.spec.checks.items():
        if not evaluate_truth(text, dims):
            raise ConfigError(f"{dims.where}: {words}")
    _check_layers(dims)
    stages: list[Stage] = []
    rename = {old: rename_path(new, rename) for old, new in dims.spec.rename.items()} | rename
    for stack in dims.spec.stacks:
        if "when" in stack and not evaluate_truth(stack["when"], dims):
            continue
        if "use" in stack:
            stages += _expand_inner(stack, dims, side)
        else:
            stages.append(_expand_stack(stack, dims, rename, side))
    return stages


def _check_layers(dims: BoundDims) -> None:
    """What a config gives per layer (HF's per_layer_config) must be something that the spec reads so."""
    layers = dims.config.get("per_layer_config")
    if not isinstance(layers, dict):
        return
    texts = [text for texts in dims.spec.dims.values() for text in texts]
    for key in dict.fromkeys(key for layer in layers.values() if isinstance(layer, dict) for key in layer):
        if not any(f"override(per_layer_config, i, '{key}'" in text for text in texts):
            raise ConfigError(f"{dims.where}: per_layer_config gives {key!r}, which this spec does not read per layer")


def _expand_inner(stack: dict[str, Any], dims: BoundDims, side: str) -> list[Stage]:
    """The stages of another spec, found by name or by the inner config's own model_type."""
    key: str = stack["config"]
    defaults: dict[str, Any] = stack.get("defaults", {})
    names = (key, *dims.spec.renamed.get(key, ()))
    key = next((name for name in names if dims.config.get(name) is not None), key)
    config = dims.config.get(key)
    where = f"{dims.where}: {key}"
    is_flat = config is None and bool(stack.get("flat"))
    if is_flat:
        config, where = dims.config, dims.where
    if not isinstance(config, dict):
        raise ConfigError(f"{dims.where}: {key!r} must be an object, not {format_value(config)}")
    name = stack["use"]
    if name == "model_type":
        name = config.get("model_type", defaults.get("model_type"))
        if not isinstance(name, str):
            raise ConfigError(f"{where}: model_type must be a string, not {format_value(name)}")
    spec = dims.extra.get(name) or find_spec(name)
    if spec is None:
        raise ConfigError(
            f"{where}: model_type {name!r} has no spec, so {dims.spec.name!r} cannot be counted with it; "
            "add one with --spec FILE (see CONTRIBUTING.md)"
        )
    if is_flat:
        check_required(spec, config, where)
    settings = {key: dims.evaluate(text) for key, text in stack.get("set", {}).items()}
    inner = BoundDims(spec, config, where, settings, defaults, dims.extra)
    inner_stages = _expand(inner, stack.get("rename", {}), stack.get("side", side))
    if "stream" in stack:
        inner_stages = [stage._replace(stream=stack["stream"]) for stage in inner_stages]
    if "only" in stack:
        inner_stages = [
            stage._replace(layers=tuple(_restrict(chain, stack["only"]) for chain in stage.layers))
            for stage in inner_stages
        ]
    adds = stack.get("adds")
    if adds:
        inner_stages = [stage._replace(adds=adds) if stage.repeated else stage for stage in inner_stages]
    joins = tuple(stack.get("joins", ()))
    if joins:
        inner_stages[0] = inner_stages[0]._replace(joins=joins)
    return inner_stages


def _restrict(chain: Chain, which: str) -> Chain:
    """The same ops, run on the workload's images alone, or on its videos alone."""
    return tuple(
        item._replace(feature=("only", which, *item.feature))
        if isinstance(item, Op)
        else tuple(_restrict(branch, which) for branch in item)
        for item in chain
    )


def _expand_stack(stack: dict[str, Any], dims: BoundDims, rename: dict[str, str], side: str) -> Stage:
    path = rename_path(stack["path"], rename)
    repeated = "repeat" in stack
    count = _size(dims, str(stack["repeat"]), f"{path} repeat", minimum=0) if repeated else 1
    if count > MAX_LAYERS:
        raise ConfigError(f"{dims.where}: {count} layers in {path!r}; more than {MAX_LAYERS} is surely a mistake")
    part = stack.get("part", "other")
    rows = (stack.get("rows", "tokens"), stack.get("needed", ""))
    builder = _Builder(dims, rows, part, path, rename, stack.get("side", side))
    layers = []
    dead = []
    reads_layers = []
    first = _size(dims, str(stack.get("first", 0)), f"{path} first", minimum=0)
    for layer in range(first, first + count):
        dims.set_layer(layer if repeated else None)
        chain = builder.build(stack.get("ops", []))
        is_frozen = "untrained" in stack and evaluate_truth(stack["untrained"], dims)
        layers.append(_map(chain, lambda op: op._replace(frozen=True)) if is_frozen else chain)
        dead.append(evaluate_truth(stack["dead"], dims) if "dead" in stack else False)
        if "reads" in stack:
            reads_layers.append(_size(dims, stack["reads"][1], f"{path} reads", minimum=0))
    dims.set_layer(None)
    return Stage(
        path=path,
        layers=tuple(layers),
        repeated=repeated,
        stream=stack.get("stream", "language"),
        group=part if part in ("vision", "projector", "audio") else "language",
        checkpoint=bool(stack.get("checkpoint", False)),
        dead=tuple(dead),
        reads=(rename_path(stack["reads"][0], rename), tuple(reads_layers)) if "reads" in stack else None,
        joins=tuple(stack.get("joins", ())),
        adds=stack.get("adds"),
        first=first,
        reversible=bool(stack.get("reversible", False)),
        input_gradient=bool(stack.get("input_gradient", False)),
    )


class _Builder:
    """Builds the chain of one layer; what does not change from layer to layer is built once."""

    def __init__(
        self, dims: BoundDims, rows: tuple[str, str], part: str, path: str, rename: dict[str, str], side: str
    ) -> None:  # fmt: skip
        self.dims = dims
        self.rows, self.needed = rows
        self.part = part
        self.path = path
        self.rename = rename
        self.side = side
        self._changing: list[str] | None = None
        self._chains: dict[tuple[Any, ...], Chain] = {}
        self._alike: dict[Chain, Chain] = {}

    def build(self, items: list[Any]) -> Chain:
        """The chain of the current layer; layers in which every changing name has the same value share one."""
        if self._changing is None:
            self._changing = self._find_changing(items)
        key = tuple([self._read(name) for name in self._changing])
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chain(items)
            chain = self._chains[key] = self._alike.setdefault(chain, chain)
        return chain

    def _find_changing(self, items: list[Any]) -> list[str]:
        """Names that the ops read and that change from layer to layer."""
        texts = {value for item in self._flatten(items) for name, value in item.items() if _is_expression(name, value)}
        texts |= {
            text.partition(":")[2]
            for item in self._flatten(items)
            for text in (item.get("rows", self.rows), item.get("needed", self.needed), item.get("less", ""))
            if ":" in text
        }
        texts |= {item["cache_rows"].partition(":")[2] for item in self._flatten(items) if "cache_rows" in item}
        tied = [item["tied"] for item in self._flatten(items) if "tied" in item]
        texts |= {condition for condition, _ in tied} | {name for _, target in tied for name in _BRACES.findall(target)}
        texts |= {name for item in self._flatten(items) for name in _BRACES.findall(item.get("name", ""))}
        texts |= {name for item in self._flatten(items) for name in _BRACES.findall(item.get("under", ""))}
        names = {name for text in texts for name in find_names(text)}
        return sorted(name for name in names if self.dims.depends_on_layer(name))

    def _read(self, name: str) -> Any:
        value = self.dims.lookup(name)
        value = tuple(value) if isinstance(value, list) else value
        try:
            hash(value)
        except TypeError:  # an object where a size should be: refused when it is used
            return type(value)
        return value

    def _flatten(self, items: list[Any]) -> list[dict[str, Any]]:
        flat: list[dict[str, Any]] = []
        for item in items:
            if isinstance(item, dict):
                flat.append(item)
                flat += self._flatten([item["block"]] if "block" in item else [])
            else:
                flat += self._flatten(self.dims.spec.blocks[item] if isinstance(item, str) else item)
        return flat

    def _chain(self, items: list[Any]) -> Chain:
        """A series: each item reads the one before it."""
        built: list[Op | tuple[Chain, ...]] = []
        for item in items:
            if isinstance(item, str):
                built.extend(self._chain(self.dims.spec.blocks[item]))
            elif isinstance(item, list):
                # Siblings: branches that read the same tensor; a branch is an op or a series of its own.
                branches = tuple(
                    branch
                    for branch in (self._chain(entry if isinstance(entry, list) else [entry]) for entry in item)
                    if branch
                )
                if branches:
                    built.append(branches)
            elif "block" in item:
                if evaluate_truth(item.get("when", "true"), self.dims):
                    chain = self._chain([item["block"]])
                    if "under" in item:
                        chain = _put_under(chain, _absolute(self._fill(item["under"]), self.rename))
                    if "with" in item:
                        chain = _map(chain, partial(Op._replace, beside=item["with"]))
                    built.extend(_map(chain, lambda op: op._replace(nested=True)) if item.get("checkpoint") else chain)
            else:
                op = self._make(item)
                if op is not None and "again" in item:
                    op = op._replace(again=evaluate_truth(item["again"], self.dims))
                if op is not None and "unused" in item:
                    op = op._replace(unused=evaluate_truth(item["unused"], self.dims))
                if op is not None:
                    built.append(op)
        return tuple(built)

    def _make(self, item: dict[str, Any]) -> Op | None:
        dims = self.dims
        if "when" in item and not evaluate_truth(item["when"], dims):
            return None
        kind: str = item["op"]
        name: str = _absolute(self._fill(item.get("name", "")), self.rename)
        where = f"{self.path}.{name}" if name else self.path
        part = item.get("part", self.part)

        def size(field: str, minimum: int = 1, default: str | None = None) -> int:
            text = item.get(field, default)
            if text is None:
                raise SpecError(f"{dims.spec.file}: op {where!r} needs {field!r}")
            return _size(dims, str(text), f"{where} {field}", minimum)

        feature = self._features(item)
        source: str = item.get("from", "")
        detached = bool(item.get("detached", False))
        times = size("times", default="1")
        flag = evaluate_truth(item["bias"], dims) if "bias" in item else False
        if kind in ("linear", "conv"):
            if size("active", default="1") > size("copies", default="1"):
                raise ConfigError(
                    f"{dims.where}: {size('active')} experts a token ({item['active']}) of only {size('copies')}"
                )
            return Op(
                kind, name, part, feature, times, size("in"), size("out"), flag,
                param=item.get("param", "weight"),
                tied=self._tied(item),
                targets=self._targets(item),
                is_bare="targets" in item,
                copies=size("copies", default="1"),
                active=size("active", default="1"),
                input_embedding=self._is_input(item),
                flops=size("flops") if "flops" in item else 0,
                source=source,
                detached=detached,
                at=item.get("at", ""),
                numbered=self._numbered(item),
                adapts=evaluate_truth(item["adapts"], dims) if "adapts" in item else part != "lm_head",
            )  # fmt: skip
        if kind == "attend":
            if "rows" not in item:
                feature, times = self._attend(item, size)
                feature = self._sided(feature)
                if "less" in item:
                    feature = ("minus", feature, self._feature(item["less"]))
            part = part if part in ("vision", "audio", "projector") else "attention_scores"
            heads, qk, v = size("heads"), size("qk"), size("v", 0)
            kv_heads = size("kv_heads", default=str(heads))
            cache = size("cache", 0, default=str(kv_heads * (qk + v) if keeps_keys(item) else 0))
            return Op(
                kind, name, part, feature, times, heads=heads, qk=qk, v=v, detached=detached,
                kv_heads=kv_heads, cache=cache, cache_rows=self._cache_rows(item) if cache else (),
                latent=size("latent", 0, default="0"),
            )  # fmt: skip
        if kind == "product":
            flops = size("flops", 0)
            back = size("backward", 0) if "backward" in item else 2 * flops
            return Op(kind, name, part, feature, times, flops=flops, backward=back, source=source, detached=detached)
        if kind == "embed":
            return Op(
                kind, name, part, feature, times, n_in=size("count"), size=size("dim"), tied=self._tied(item),
                source=source,
                input_embedding=self._is_input(item),
            )  # fmt: skip
        if kind == "norm":
            copies = size("copies", default="1")
            return Op(
                kind, name, part, feature, times, bias=flag, tied=self._tied(item), size=size("dim"), source=source,
                detached=detached, copies=copies, active=copies,
            )  # fmt: skip
        if kind == "param":
            return Op(kind, name, part, feature, size=size("size"), tied=self._tied(item), detached=detached)
        if kind == "dropout":
            saves = dims.evaluate(item["p"])
            if isinstance(saves, bool) or not isinstance(saves, (int, float)):
                raise ConfigError(f"{dims.where}: {item['p']} must be a number, not {format_value(saves)}")
            return Op(kind, name, part, feature, saves=saves > 0, source=source)
        return Op(kind, name, part, feature, source=source)

    def _tied(self, item: dict[str, Any]) -> str | None:
        if "tied" not in item:
            return None
        condition, target = item["tied"]
        if not evaluate_truth(condition, self.dims):
            return None
        return rename_path(self._fill(target), self.rename)

    def _fill(self, name: str) -> str:
        return _BRACES.sub(lambda found: str(self.dims.lookup(found[1])), name) if "{" in name else name

    def _numbered(self, item: dict[str, Any]) -> tuple[int | str, ...]:
        return tuple(self.dims.evaluate(item["numbered"])) if "numbered" in item else (0, 1)

    def _is_input(self, item: dict[str, Any]) -> bool:
        value = item.get("input_embedding", False)
        return value if isinstance(value, bool) else evaluate_truth(value, self.dims)

    def _targets(self, item: dict[str, Any]) -> tuple[str, ...]:
        names = self.dims.evaluate(item["targets"]) if "targets" in item else []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SpecError(f"{self.dims.spec.file}: targets of {item.get('name')!r} must be a list of names")
        return tuple(names)

    def _attend(self, item: dict[str, Any], size: Any) -> tuple[Feature, int]:
        span = item.get("span", "seq")
        if span == "seq":
            mask = item.get("mask", "causal")
            window = self.dims.evaluate(item["window"]) if "window" in item else None
            if window is None:
                return ("pairs", mask, 0), 1
            return ("pairs", mask, _size(self.dims, item["window"], f"{self.path} window", 1)), 1
        if span == "frames":
            return ("frames",), 1
        if span == "windows":
            return ("windows", _size(self.dims, "merge", "merge", 1), size("window")), 1
        if span in ("images", "tiles"):
            length = size("length")
            return (span,), length * length
        raise SpecError(f"{self.dims.spec.file}: span {span!r} unknown; known: {', '.join(SPANS)}")

    def _cache_rows(self, item: dict[str, Any]) -> Feature:
        """Positions that a layer's cache holds: those said, else all of its own side's that its window lets it see."""
        if "cache_rows" in item:
            return self._sum(item["cache_rows"])
        unit = "decoder" if self.side == "decoder" else "sequence"
        window = self.dims.evaluate(item["window"]) if "window" in item else None
        return ("sum", unit, "n + c" if window is None else f"min(n + c, {window})", ())

    def _features(self, item: dict[str, Any]) -> Feature:
        feature = self._feature(item.get("rows", self.rows))
        needed = item.get("needed", "" if "rows" in item else self.needed)
        if needed:
            feature = ("either", self._feature(needed), feature)
        return ("minus", feature, self._feature(item["less"])) if "less" in item else feature

    def _feature(self, rows: str) -> Feature:
        if ":" in rows:
            return self._sum(rows)
        if rows == "merged":
            return ("merged", _size(self.dims, "merge", "merge", 1) ** 2)
        return self._sided((rows,))

    def _sided(self, feature: Feature) -> Feature:
        return ("decoder", *feature) if self.side == "decoder" and feature[0] in _SIDED else feature

    def _sum(self, rows: str) -> Feature:
        """An expression over the workload: the spec's own names get their values here, the unit's stay open."""
        unit, _, text = rows.partition(":")
        constants = []
        for name in sorted(find_names(text) - set(UNITS[unit])):
            value = self._read(name)
            constants.append((name, value))
        return ("sum", unit, text.strip(), tuple(constants))


_BRACES = re.compile(r"\{(\w+)\}")  # a dim's value inside the name of a module or of a tied parameter
_SIDED = ("tokens", "logits", "cached", "pairs", "calls")  # features that a decoder has of its own


def remove_hooks(stage: Stage) -> Stage:
    """The stage as it is where HF's checkpointing does not make its input require a gradient."""

    def remove(op: Op) -> Op:
        return op._replace(input_embedding=False) if op.input_embedding else op

    return stage._replace(layers=tuple(_map(chain, remove) for chain in stage.layers))


def _put_under(chain: Chain, path: str) -> Chain:
    """A block's ops with their names below another module's path."""

    def move(op: Op) -> Op:
        name = op.name if op.name.startswith("/") else f"{path}.{op.name}" if op.name else path
        at = path if op.at == "." else f"{path}.{op.at}" if op.at else ""
        return op._replace(name=name, at=at)

    return _map(chain, move)


def _map(chain: Chain, change: Callable[[Op], Op]) -> Chain:
    return tuple(
        change(item) if isinstance(item, Op) else tuple(_map(branch, change) for branch in item) for item in chain
    )


def _absolute(name: str, rename: dict[str, str]) -> str:
    """A name that starts with / is a whole path: a module that several layers share."""
    return f"/{rename_path(name[1:], rename)}" if name.startswith("/") else name


def _is_expression(name: str, value: Any) -> bool:
    return isinstance(value, str) and name not in WORDS


def _size(dims: BoundDims, text: str, what: str, minimum: int) -> int:
    """An expression's value as a whole number of at least `minimum`, else an error that names the config."""
    try:
        value = evaluate(text, dims)
    except MissingNameError as error:
        raise ConfigError(f"{dims.where}: missing key {error.name!r}, needed for {what}") from None
    except SpecError as error:
        raise ConfigError(f"{dims.where}: {what}: {error}{_format_origin(dims, text)}") from None
    if isinstance(value, bool) or getattr(value, "denominator", None) != 1:
        wrong = f"must be a whole number, not {format_value(value)}"
    elif not minimum <= value <= 10**12:
        wrong = f"is {format_value(value)}, which is not a size"
    else:
        return int(value)
    raise ConfigError(f"{dims.where}: {what} = {text} {wrong}{_format_origin(dims, text)}")


def _format_origin(dims: BoundDims, text: str) -> str:
    """' (hidden_size is '4096')': the config's keys behind an expression, for an error that names them."""
    keys: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [text]
    while waiting:
        for name in sorted(find_names(waiting.pop()) - seen):
            seen.add(name)
            entries = [entry for entry in dims.spec.dims.get(name, ()) if entry != name]
            waiting += entries
            if not entries and find_key(dims.config, name)[0]:
                keys[name] = None
    shown = [f"{key} is {format_value(find_key(dims.config, key)[1])}" for key in keys]
    return f" ({', '.join(shown)})" if shown else ""


def iterate(chain: Any) -> Iterable[Op]:
    """Every op of a chain in order of execution."""
    for item in chain:
        if isinstance(item, Op):
            yield item
        else:
            yield from iterate(item)


def join(path: str, name: str) -> str:
    if name.startswith("/"):
        return name[1:]
    return f"{path}.{name}" if name else path
