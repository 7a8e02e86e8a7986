"""Expand a bound spec into stages of ops, inner specs (towers, language models) included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopcalc.base.errors import ConfigError, SpecError, format_value
from flopcalc.base.spelling import spell
from flopcalc.core.model.layers import LayerBuilder
from flopcalc.core.model.ops import Linear, Stage, iterate, map_ops, remove_hooks, rename_stage, restrict
from flopcalc.core.model.sizes import find_size, format_origin, is_partial
from flopcalc.core.spec.aliases import find_family
from flopcalc.core.spec.expressions import BudgetError, MissingNameError, evaluate_truth
from flopcalc.core.spec.merge import Table, rename_path
from flopcalc.core.spec.spec import MAX_LAYERS, OWN_TYPE, BoundDims, Spec, check_required, find_backbone, find_body


def expand(dims: BoundDims) -> tuple[Stage, ...]:
    """All stages of a model in dataflow order, inner specs (towers, language models) included."""
    try:
        stages = tuple(_expand(dims, {}, "encoder"))
    except MissingNameError as error:
        raise ConfigError(f"{dims.where}: missing key {error.name!r}, which {dims.spec.name!r} needs") from None
    except BudgetError as error:
        raise SpecError(f"{dims.where}, {dims.spec.file}: {error}") from None
    except SpecError as error:
        # A list that is too short, a word where a number should be: most likely the config is wrong.
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
    return tuple(fill_widths(stages))


def fill_widths(stages: Sequence[Stage]) -> list[Stage]:
    """The stages, each with a width: where its spec says none, its stream's; where no stack of that says one, what its
    first op reads."""
    said: dict[str, int] = {}
    for stage in stages:
        if stage.width:
            said.setdefault(stage.stream, stage.width)
    found = []
    for stage in stages:
        width = stage.width or said.get(stage.stream, 0)
        if not width:
            ops = (op for chain in stage.kinds for op in iterate(chain))
            width = next((op.size or op.n_in for op in ops if op.kind in ("norm", "embed", "linear")), 0)
            if width:
                said[stage.stream] = width
                # Towers of several resolutions have no one width.
                stage = stage.replace(is_width_inferred=stage.repeated and stage.group == "language")
        found.append(stage.replace(width=width or 1))
    return found


def _expand(dims: BoundDims, rename: dict[str, str], side: str, root: str = "") -> list[Stage]:
    """The stages of one spec; `root` is the module that holds the whole body of a model inside another."""
    for words, text in (dims.spec.checks | dims.spec.config_checks).items():
        try:
            is_kept = evaluate_truth(text, dims) or (words in dims.spec.config_checks and is_partial(dims, text))
        except SpecError:  # a value is of another kind, or 0: the check's words say more than its expression
            is_kept = False
        if not is_kept:
            raise ConfigError(f"{dims.where}: {words}{format_origin(dims, text)}")
    _check_layers(dims)
    stages: list[Stage] = []
    # A tower that is a model by itself has no prefix there, and here the one that it is given.
    own = {old: new for old, new in dims.spec.rename.items() if new or old not in rename}
    rename = rename | {old: rename_path(new, rename) for old, new in own.items()}
    for stack in dims.spec.stacks:
        dims.budget.spend("stacks")
        if "when" in stack and not evaluate_truth(stack["when"], dims):
            continue
        if "use" in stack:
            inner = _expand_inner(stack, dims, side)
            stages += [rename_stage(stage, root, rename[root]) for stage in inner] if root else inner
        else:
            stages += expand_stack(stack, dims, rename, side)
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


def _expand_inner(stack: Table, dims: BoundDims, side: str) -> list[Stage]:
    """The stages of another spec, found by name or by the inner config's own model_type."""
    key: str = stack["config"]
    defaults: Table = stack.get("defaults", {})
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
    if name in OWN_TYPE:
        name = config.get("model_type", defaults.get("model_type"))
        if not isinstance(name, str):
            raise ConfigError(f"{where}: model_type must be a string, not {format_value(name)}")
    if stack["use"] == "backbone":
        name = find_backbone(name, where)
    spec = dims.extra.get(name) or find_family(name, config)
    spec = find_body(spec.name, dims.extra) if spec is not None and spec.body else spec
    if spec is None:
        raise ConfigError(
            f"{where}: model_type {name!r} has no spec, so {dims.spec.name!r} cannot be counted with it; "
            f"add one with {spell('spec', 'FILE')} (see CONTRIBUTING.md)"
        )
    if is_flat:
        check_required(spec, config, where)
    if "used" in stack.get("set", {}) and "used" not in spec.dims:
        raise ConfigError(
            f"{where}: a tower of model_type {name!r} has no hidden states for {dims.spec.name!r} to read"
        )
    for dim in ("image_block", "inner_head"):
        if dim in stack.get("set", {}) and dim not in spec.dims:
            raise ConfigError(f"{where}: a text model of type {name!r} is not described inside {dims.spec.name!r}")
    settings = {key: dims.evaluate(text) for key, text in stack.get("set", {}).items()}
    inner = BoundDims(spec, config, where, settings, defaults, dims.extra, dims.budget)
    root = _find_root(spec) if "body" in stack else ""
    rename = {root: stack["body"]} if root else stack.get("rename", {})
    inner_stages = _expand(inner, rename, stack.get("side", side), root)
    if "body" in stack:
        inner_stages = [stage for stage in inner_stages if not _is_head(stage, stack["body"])]
    if "stream" in stack:
        inner_stages = [stage.replace(stream=stack["stream"]) for stage in inner_stages]
    if "only" in stack:
        inner_stages = [stage.map_layers(lambda chain: restrict(chain, stack["only"])) for stage in inner_stages]
    adds = stack.get("adds")
    if adds:
        inner_stages = [stage.replace(adds=adds) if stage.repeated else stage for stage in inner_stages]
    joins = tuple(stack.get("joins", ()))
    if joins:
        inner_stages[0] = inner_stages[0].replace(joins=joins)
    return inner_stages


def _find_root(spec: Spec) -> str:
    """The module that holds all of a model except its head: model, transformer, gpt_neox."""
    paths = [str(stack["path"]) for stack in spec.stacks if "path" in stack and stack.get("part") != "lm_head"]
    paths = paths or [path for stack in spec.stacks for path in stack.get("rename", {}).values()]
    roots = {path.partition(".")[0] for path in paths}
    if len(roots) != 1:
        named = ", ".join(sorted(roots))
        raise SpecError(f"{spec.file}: cannot be a part of another model: its modules lie in {named or 'others'}")
    return roots.pop()


def _is_head(stage: Stage, body: str) -> bool:
    """Whether a stage reads the body's output: it makes logits, or is outside of the body."""
    parts = {op.part for chain in stage.kinds for op in iterate(chain) if isinstance(op, Linear)}
    return parts == {"lm_head"} or not f"{stage.path}.".startswith(f"{body}.")


def _find_width(stack: Table, dims: BoundDims, path: str) -> int:
    """The width of a stack's residual stream: what it says, else the dim `d`; 0: that of its stream's other stacks."""
    if "width" in stack:
        return find_size(dims, str(stack["width"]), f"{path} width", minimum=1)
    if stack.get("part") == "projector" or "d" not in dims.spec.dims or dims.depends_on_layer("d"):
        return 0
    width = dims.evaluate("d if has(d) else 0")
    return width if isinstance(width, int) else 0


def expand_stack(stack: Table, dims: BoundDims, rename: dict[str, str], side: str) -> list[Stage]:
    """The stage of a stack; several where gradient checkpointing wraps some of its layers and not others."""
    path = rename_path(stack["path"], rename)
    repeated = "repeat" in stack
    count = find_size(dims, str(stack["repeat"]), f"{path} repeat", minimum=0) if repeated else 1
    if count > MAX_LAYERS:
        raise ConfigError(f"{dims.where}: {count} layers in {path!r}; more than {MAX_LAYERS} is surely a mistake")
    part = stack.get("part", "other")
    rows = (stack.get("rows", "tokens"), stack.get("needed", ""))
    builder = LayerBuilder(dims, rows, stack.get("part", ""), path, rename, stack.get("side", side), repeated)
    layers = []
    dead = []
    wrapped = []
    reads_layers = []
    regions: list[Any] = []
    first = find_size(dims, str(stack.get("first", 0)), f"{path} first", minimum=0)
    for layer in range(first, first + count):
        dims.set_layer(layer if repeated else None)
        chain = builder.build(stack.get("ops", []))
        is_frozen = "untrained" in stack and evaluate_truth(stack["untrained"], dims)
        layers.append(map_ops(chain, lambda op: op.replace(frozen=True)) if is_frozen else chain)
        dead.append(evaluate_truth(stack["dead"], dims) if "dead" in stack else False)
        given = stack.get("checkpoint", False)
        wrapped.append(given if isinstance(given, bool) else evaluate_truth(given, dims))
        if "reads" in stack:
            reads_layers.append(find_size(dims, stack["reads"][1], f"{path} reads", minimum=0))
        region = dims.evaluate(stack["together"]) if "together" in stack else layer
        if regions and regions[-1] == region:  # one chain: what trains in any of them comes after the first's input
            layers[-2:] = [(*layers[-2], *layers[-1])]
            del dead[-1], wrapped[-1]
        else:
            regions.append(region)
    dims.set_layer(None)
    count = len(layers)
    stage = Stage(
        path=path,
        layers=tuple(layers),
        repeated=repeated,
        stream=stack.get("stream", "language"),
        group=part if part in ("vision", "projector", "audio") else "language",
        checkpoint=any(wrapped),
        dead=tuple(dead),
        reads=(rename_path(stack["reads"][0], rename), tuple(reads_layers)) if "reads" in stack else None,
        joins=tuple(stack.get("joins", ())),
        adds=stack.get("adds"),
        first=first,
        reversible=bool(stack.get("reversible", False)),
        input_gradient=bool(stack.get("input_gradient", False)),
        width=_find_width(stack, dims, path),
    )
    if len(set(wrapped)) < 2:
        return [stage]
    starts = [i for i in range(count) if i == 0 or wrapped[i] != wrapped[i - 1]]
    return [
        stage.replace(
            layers=stage.layers[start:end], dead=stage.dead[start:end], first=first + start, checkpoint=wrapped[start]
        )
        for start, end in zip(starts, [*starts[1:], count], strict=True)
    ]
