"""What a model's body hands its output to: its spec's own head, a classifier, a value head, or nothing."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import ConfigError, SpecError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_size, is_digits
from flopcalc.core.model.config import Source
from flopcalc.core.model.expand import expand, expand_stack
from flopcalc.core.model.live import unwrap
from flopcalc.core.model.ops import (
    Chain,
    Linear,
    Norm,
    Op,
    Stage,
    iterate,
    join,
    rename_stage,
)
from flopcalc.core.spec.expressions import MissingNameError
from flopcalc.core.spec.spec import BoundDims, Spec
from flopcalc.core.workload.sums import InDecoder, Logits

HEADS = ("lm", "none", "sequence", "token", "value")  # what --head takes
_COUNTED = ("sequence", "token")  # heads that have a number of labels
SAVED = ("classifier", "score")  # modules that PEFT trains whole for task types SEQ_CLS and TOKEN_CLS
DEFAULT_LABELS = 2  # transformers' PretrainedConfig without num_labels and id2label


@frozen()
class Head(Value):
    """A head: what kind it is, how many labels it predicts, and the table that describes its modules."""

    kind: str = "lm"
    labels: int = 0
    table: str = "lm"  # its name in heads.toml and in a spec's [heads]
    note: str = ""  # what a reader should know of how it was found

    def __str__(self) -> str:
        return f"{self.kind}:{self.labels}" if self.kind in _COUNTED else self.kind


@cache
def _load() -> dict[str, Any]:
    return load_toml(os.path.join(find_data_dir(), "heads.toml"))


# --- which head -------------------------------------------------------------------------------------------------------
def list_classes(source: Source) -> list[str]:
    """The classes that a live model is, transformers' own first; else the one that the config names."""
    if source.module is not None:
        classes = type(unwrap(source.module)).__mro__
        # Own classes may have any name, so what they extend says more.
        return [
            each.__name__
            for each in sorted(
                classes,
                key=lambda each: (
                    not each.__module__.startswith("transformers.models.") or each.__name__.endswith("PreTrainedModel")
                ),
            )
        ]
    named = source.config.get("architectures")
    return [str(named[0])] if isinstance(named, (list, tuple)) and named else []


def is_same_class(named: str, architecture: str) -> bool:
    """Whether two names mean one class: remote code and releases differ in underscores and case alone."""
    return named == architecture or named.replace("_", "").lower() == architecture.replace("_", "").lower()


def find_head(source: Source, spec: Spec) -> Head:
    """The head that was asked for, else the one of the model's class; the spec's own where neither says any."""
    if source.head:
        return _parse(source.head, source)
    names = list_classes(source)
    if not names:
        note = (
            f"the config names no class in architectures: counted as {spec.architecture}; "
            f"{spell('head', 'none')}, sequence:N or "
            "token:N counts another head"
        )
        return Head(note=note)
    known = next((name for name in names if is_same_class(name, spec.architecture) or name in spec.variants), None)
    head = name_head(source, names[: names.index(known)] if known is not None else names)
    is_embedding = source.module is None and re.search("embed", f"{source.name} {source.hub_id}", re.IGNORECASE)
    if head.kind != "lm" or not is_embedding or not names[0].endswith("ForCausalLM"):
        return head
    note = f"embeddings need no logits, so {names[0]} is counted without its head; {spell('head', 'lm')} counts it"
    return Head("none", table="none", note=note)


def name_head(source: Source, names: list[str] | None = None) -> Head:
    """The head that the names of a model's classes imply; the usual one if they imply none."""
    for name in list_classes(source) if names is None else names:
        table = find_ending(name) or ("none" if has_unknown_head(name) else "")
        if table:
            return Head() if table == "lm" else _make(table, source)
    return Head()


def has_unknown_head(name: str) -> bool:
    """Whether a class's name says that it scores or ranks, but not with which modules."""
    found = find_ending(name)
    if found == "none":
        return re.search(r"For[A-Z]\w*Model$", name) is not None
    return not found and any(word in name for word in _load()["unknown"]["words"])


def find_ending(name: str) -> str:
    """The head that the suffix of a class's name implies, as in heads.toml; empty if it implies none."""
    endings = _load()["endings"]
    found = max((ending for ending in endings if name.endswith(ending)), key=len, default=None)
    return "" if found is None else str(endings[found])


def check_head(text: object) -> str:
    """A head as --head takes it, or an error that says what it may be."""
    if not isinstance(text, str):
        raise ConfigError(f"head must be {_CHOICES}, not {format_value(text)}")
    kind, colon, number = text.strip().partition(":")
    if kind not in HEADS:
        raise ConfigError(f"head {format_value(text)} unknown: it is {_CHOICES}.{format_nearest(kind, HEADS)}")
    if not colon:
        return kind
    if kind not in _COUNTED:
        raise ConfigError(f"head {kind} has no number of labels: leave {format_value(colon + number)} out")
    if not is_digits(number):
        raise ConfigError(f"head {format_value(text)}: the number of labels must be a whole number, as in {kind}:2")
    return f"{kind}:{check_size(int(number), 'labels')}"


_CHOICES = "lm, none, sequence[:N], token[:N] or value"


def _parse(text: str, source: Source) -> Head:
    kind, _, number = check_head(text).partition(":")
    if kind == "lm":
        return Head()
    named = next((find_ending(name) for name in list_classes(source) if find_ending(name)), "")
    tables = _load()["heads"]
    # The class itself says which of several heads of a kind it has.
    table = named if named in tables and tables[named]["kind"] == kind and "labels" not in tables[named] else kind
    return _make(table, source, int(number) if number else None)


def _make(table: str, source: Source, labels: int | None = None) -> Head:
    found = _load()["heads"][table]
    if labels is None:
        fixed = found.get("labels")
        if isinstance(fixed, int):
            labels = fixed
        elif fixed is not None:
            labels = _read_size(source, fixed)
        else:
            labels = read_labels(source.config, source.where) if found["kind"] in _COUNTED else 0
    return Head(str(found["kind"]), labels, table)


def _read_size(source: Source, keys: list[str]) -> int:
    given = next((source.config[key] for key in keys if source.config.get(key) is not None), keys[-1])
    return check_size(int(given) if is_digits(given) else given, f"{source.where}: {keys[0]}")


def read_labels(config: dict[str, object], where: str) -> int:
    """How many labels a config has: num_labels, else those that it names, else transformers' default."""
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        if table.get("num_labels") is not None:
            return check_size(table["num_labels"], f"{where}: num_labels")
        for key in ("id2label", "label2id"):
            names = table.get(key)
            if isinstance(names, (dict, list)) and names:
                return len(names)
    return DEFAULT_LABELS


# --- its stages -------------------------------------------------------------------------------------------------------
def expand_head(dims: BoundDims, head: Head) -> tuple[tuple[Stage, ...], tuple[str, str]]:
    """The body of a model under another class's names, and that class's head; what the module that holds the body is
    called in the spec, and here."""
    table = _find_table(dims.spec, head)
    settings = {name: dims.evaluate(text) for name, text in table.get("set", {}).items()}
    settings["labels"] = head.labels
    inner = BoundDims(dims.spec, dims.config, dims.where, settings, None, dims.extra, dims.budget)
    stages = expand(inner)
    prefix = find_prefix(stages)
    body = [stage for stage in stages if not _is_head(stage, prefix)]
    own = [stage for stage in stages if _is_head(stage, prefix)]
    if table.get("keep"):
        body = list(stages)
    settings["width"] = _find_width(own or stages)
    inner = BoundDims(dims.spec, dims.config, dims.where, settings, None, dims.extra, dims.budget)
    side = (
        "decoder"
        if any(isinstance(op.rows, InDecoder) for stage in own for chain in stage.layers[:1] for op in iterate(chain))
        else "encoder"
    )
    within, base = table.get("within"), ""
    if within is not None:  # the whole model is a module of another
        body = [rename_stage(stage, "", within) for stage in body]
    else:
        base = table.get("base", "" if head.kind == "none" else prefix)
        body = [rename_stage(stage, prefix, base) for stage in (body if table.get("keep") else _cut(body, prefix))]
    try:
        common = {"part": "head", "stream": (own or body)[-1].stream}
        last = next((stage for stage in reversed(body) if not _has_logits(stage)), stages[-1])
        output = [last.path, str(last.first + len(last.layers) - 1)]  # what a sibling stack reads
        stacks = [
            {**common, **({"reads": output} if stack.get("beside") else {}), **_place(stack, base)}
            for stack in table["stack"]
        ]
        added = [stage for stack in stacks for stage in expand_stack(stack, inner, {}, side)]
        added = [_set_adapted(stage, table.get("saved", SAVED)) for stage in added]
    except MissingNameError as error:
        raise ConfigError(f"{dims.where}: missing key {error.name!r}, which its head {head} needs") from None
    renamed = ("", within) if within is not None else (prefix, base)
    return tuple(body + added), renamed


def _find_table(spec: Spec, head: Head) -> dict[str, Any]:
    """What heads.toml says about a head, with the spec's own values on top."""
    own = spec.heads.get(head.table, {})
    if "refuse" in own:
        raise ConfigError(f"{spec.name!r} with head {head} is not described: {own['refuse']}")
    shapes = _load()["heads"]
    other: str = own.get("use") or own.get("like") or head.table  # `like` is the key's earlier name
    if other not in shapes:
        raise SpecError(f"{spec.file}: [heads] {head.table}: no head {other!r}.{format_nearest(other, shapes)}")
    return {**shapes[head.table], **shapes[other], **own}


def find_prefix(stages: tuple[Stage, ...]) -> str:
    """The module that holds the body in a class with a head; empty where the body's modules stand at the top."""
    first = stages[0].path.partition(".")[0]
    layers = [stage for stage in stages if stage.repeated and stage.group == "language"]
    is_inside = [stage.path.startswith(f"{first}.") for stage in layers or stages[:1]]
    return first if all(is_inside) else ""


def _cut(stages: list[Stage], prefix: str) -> list[Stage]:
    """The stages without ops that stand outside of the body: what a head of the spec's own class holds."""

    def keep(chain: Chain) -> Chain:
        kept = (item if isinstance(item, Op) else tuple(keep(branch) for branch in item) for item in chain)
        return tuple(item for item in kept if not (isinstance(item, Op) and _is_outside(item, prefix)))

    if not prefix or not any(
        _is_outside(op, prefix) for stage in stages for chain in stage.layers[:1] for op in iterate(chain)
    ):
        return stages
    return [stage.map_layers(keep) for stage in stages]


def _is_outside(op: Op, prefix: str) -> bool:
    return op.name.startswith("/") and not op.name.startswith(f"/{prefix}.")


def _place(stack: dict[str, object], base: str) -> dict[str, Any]:
    """A stack of a head; a path that begins with a dot is in the body."""
    path = str(stack["path"])
    return {**stack, "path": f"{base}{path}" if base else path.removeprefix(".")} if path.startswith(".") else stack


def has_lm_head(stages: tuple[Stage, ...]) -> bool:
    """Whether a model predicts words."""
    return any(op.part == "lm_head" for stage in stages for chain in stage.layers[:1] for op in iterate(chain))


def _has_logits(stage: Stage) -> bool:
    return any(
        op.part == "lm_head" or isinstance(op.rows.inner if isinstance(op.rows, InDecoder) else op.rows, Logits)
        for chain in stage.layers[:1]
        for op in iterate(chain)
    )


def _set_adapted(stage: Stage, saved: tuple[str, ...]) -> Stage:
    """LoRA's all-linear reaches every linear layer of a head but those that PEFT trains whole."""

    def set_op(op: Op) -> Op:
        is_saved = any(name in saved for name in join(stage.path, op.name).split("."))
        return op.replace(adapts=not is_saved) if isinstance(op, Linear) else op

    return stage.map_ops(set_op)


def list_saved(stage: Stage) -> list[str]:
    """Paths of a head's linear layers that PEFT trains as well as adapters, as for task types SEQ_CLS and TOKEN_CLS."""
    ops = (op for chain in stage.layers[:1] for op in iterate(chain) if op.part == "head" and isinstance(op, Linear))
    return [join(stage.path, op.name) for op in ops if not op.adapts]


def _is_head(stage: Stage, prefix: str) -> bool:
    return _has_logits(stage) or bool(prefix and not f"{stage.path}.".startswith(f"{prefix}."))


def _find_width(stages: list[Stage] | tuple[Stage, ...]) -> int:
    """What the spec's own head reads; without one, what the last norm hands on."""
    ops = [op for stage in stages for chain in stage.layers[-1:] for op in iterate(chain)]
    found = next((op.n_in for op in ops if isinstance(op, Linear)), None)
    return found if found is not None else next(op.size for op in reversed(ops) if isinstance(op, Norm))
