"""Configs of other names, keys or nesting become configs of known families, by the key maps of model_specs/aliases."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, TypeGuard

from flopcalc.base.data import (
    ALIASES,
    DIFFUSERS,
    find_data_dir,
    find_data_file,
    find_user_dir,
    get_stem,
    list_data_files,
    load_toml,
)
from flopcalc.base.errors import ConfigError, SpecError, format_nearest, format_value
from flopcalc.base.files import MAX_TABLE_BYTES, read_text
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.core.spec.expressions import MissingNameError, evaluate, evaluate_truth, find_names, parse
from flopcalc.core.spec.merge import check_keys, find_parent, is_names
from flopcalc.core.spec.spec import Spec, find_key, find_spec, load_spec

# What a key of a kind must be, and whether a value is so. A rule may join several: "int|list".
KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("a whole number", lambda value: is_whole(value)),
    "number": ("a number", lambda value: is_number(value)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a word", lambda value: isinstance(value, str)),
    "table": ("an object", lambda value: isinstance(value, Mapping)),
    "list": ("a list of whole numbers", lambda value: is_list(value, is_whole)),
    "numbers": ("a list of numbers", lambda value: is_list(value, is_number)),
    "bools": ("a list of true and false", lambda value: is_list(value, lambda entry: isinstance(entry, bool))),
    "texts": ("a list of words", lambda value: is_list(value, lambda entry: isinstance(entry, str))),
    "any list": ("a list", lambda value: isinstance(value, (list, tuple))),
}


def describe_kind(kind: str) -> str:
    """'a whole number or an object' for "int|table"."""
    return " or ".join(KINDS[each][0] for each in kind.split("|"))


def check_kind(key: str, value: object, kind: str, where: str) -> None:
    """A ConfigError where a key's value is of another kind."""
    if not any(KINDS[each][1](value) for each in kind.split("|")):
        raise ConfigError(f"{where}: {key} must be {describe_kind(kind)}, not {format_value(value)}")


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_list(value: object, is_entry: Callable[[object], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_entry, value))


Config = dict[str, Any]
MARK = "_alias"  # the key of a mapped config that names the alias it came through
WHOLE = "*"  # as the value of a key: the whole config, for a model whose text config is not nested
_BESIDE = ("quantization_config", "dtype", "torch_dtype")  # keys of a wrapper that hold for the model inside it
MAX_DEPTH = 8  # configs inside configs, and aliases of aliases
ALIAS_KEYS = {
    "extends", "like", "source", "note", "required", "when", "cases", "root", "architectures", "keys", "drop", "spec",
    "witness", "configs", "published", "example", "checks", "workload", "untyped", "kinds",
}  # fmt: skip


@frozen()
class Alias(Value):
    """How the config of a foreign model type becomes one of a known type."""

    name: str
    path: str
    extends: str  # the known model type
    source: str
    note: str  # what a reader should know
    required: tuple[str, ...]
    when: str  # expression: only such configs are mapped
    kinds: dict[str, str]  # (dotted) key -> the kind of value that it must have
    checks: dict[str, str]  # what must hold of a config, in words -> expression
    cases: dict[str, str]  # another alias -> expression: where it is taken instead
    root: str  # key of the inner config that is the whole model
    architectures: dict[str, str]  # class -> the known family's class
    keys: dict[str, list[str]]  # key of the known family -> expressions over this config, or "*"
    drop: tuple[str, ...]  # keys that mean something else to the known family
    has_spec: bool  # module names differ: the file holds what differs, as a spec does
    witness: str  # what proves it
    untyped: tuple[str, ...]  # keys by which a config without model_type and architectures is known


def find_alias(model_type: str) -> Alias | None:
    """The alias of a model type, or None."""
    path = find_data_file(ALIASES, model_type)
    return load_alias(path) if path else None


@lru_cache(maxsize=256)
def load_alias(path: str) -> Alias:
    """Read and check one alias file."""
    tables = load_toml(path)
    check_keys(tables, ALIAS_KEYS, path)
    extends = find_parent(tables)
    for key in ("kinds", "checks", "cases", "architectures", "keys", "spec"):
        if not isinstance(tables.get(key, {}), dict):
            raise SpecError(f"{path}: [{key}] must be a table")
    for key in ("required", "drop", "untyped"):
        if not is_names(tables.get(key, [])):
            raise SpecError(f"{path}: {key} must be a list of config keys")
    for key in ("extends", "like", "source", "note", "when", "root", "witness", "example"):
        if not isinstance(tables.get(key, ""), str):
            raise SpecError(f"{path}: {key} must be a string")
    if not extends or not tables.get("source"):
        raise SpecError(f'{path}: needs extends = "…", a known model type, and source = "…", where its code was read')
    for key, kind in tables.get("kinds", {}).items():
        if not isinstance(kind, str) or not set(kind.split("|")) <= KINDS.keys():
            raise SpecError(f"{path}: [kinds] {key}: {format_value(kind)} is none of {', '.join(KINDS)}")
    keys = {name: _list(value) for name, value in tables.get("keys", {}).items()}
    texts = [text for texts in keys.values() for text in texts if text != WHOLE]
    for text in (
        *texts,
        *tables.get("checks", {}).values(),
        *tables.get("cases", {}).values(),
        tables.get("when", "true"),
    ):
        try:
            parse(text)
        except (SpecError, TypeError, AttributeError):
            raise SpecError(f"{path}: not an expression: {format_value(text)}") from None
    return Alias(
        get_stem(path),
        path,
        extends,
        tables["source"],
        tables.get("note", ""),
        tuple(tables.get("required", ())),
        tables.get("when", ""),
        tables.get("kinds", {}),
        tables.get("checks", {}),
        tables.get("cases", {}),
        tables.get("root", ""),
        tables.get("architectures", {}),
        keys,
        tuple(tables.get("drop", ())),
        "spec" in tables,
        tables.get("witness", ""),
        tuple(tables.get("untyped", ())),
    )


def list_aliases() -> dict[str, Alias]:
    """Every alias, by name."""
    return {name: load_alias(path) for name, path in list_data_files(ALIASES).items()}


@cache
def load_families() -> tuple[tuple[str, str], ...]:
    """Class and model type of every shipped spec that is a model by itself."""
    text = read_text(os.path.join(find_data_dir(), "catalogue.json"), MAX_TABLE_BYTES, SpecError)
    return tuple((entry["architecture"], entry["model_type"]) for entry in json.loads(text)["families"])


def list_types() -> list[str]:
    """Every model type that a config, or --model-type, may name: no parts of models, and no variants of their heads."""
    files = list_data_files("specs")
    own, pipelines = os.path.join(find_user_dir(), "specs"), os.path.join(find_data_dir(), "specs", DIFFUSERS)
    added = [name for name, path in files.items() if os.path.dirname(path) == own]
    denoisers = [
        name
        for name, path in files.items()
        if os.path.dirname(path) == pipelines and "input" in load_spec(path).latents
    ]
    return sorted({*(kind for _, kind in load_families()), *list_aliases(), *added, *denoisers})


def find_family(model_type: str, config: Mapping[str, object]) -> Spec | None:
    """The spec that counts a mapped config: the alias's own, where its modules have other names."""
    name = config.get(MARK)
    alias = find_alias(name) if isinstance(name, str) else None
    return load_spec(alias.path) if alias is not None and alias.has_spec else find_spec(model_type)


def map_config(config: Config, where: str) -> tuple[Config, list[str]]:
    """A config with every alias in it put into the known family's terms, and notes; unchanged if it has none."""
    notes: list[str] = []
    mapped = _map(config, where, notes, MAX_DEPTH)
    return mapped, list(dict.fromkeys(notes))


def name_family(config: Config, model_type: str, where: str) -> Config:
    """The same config as one of a model type that the user says; its keys must suffice."""
    if find_alias(model_type) is None and find_spec(model_type) is None:
        near = format_nearest(model_type, list_types())
        raise ConfigError(f"{spell('model_type')} {format_value(model_type)}: no spec or alias of that name.{near}")
    named = {**{key: value for key, value in config.items() if key != MARK}, "model_type": model_type}
    mapped, _ = map_config(named, where)
    spec = find_family(mapped["model_type"], mapped)
    if spec is not None:
        missing = [key for key in spec.required if not _has_any(mapped, (key, *spec.renamed.get(key, ())))]
        _refuse_missing(missing, where, model_type)
    return named


def strip_marks(config: Mapping[str, object]) -> Config:
    """A mapped config as one of the known family itself, with that family's module names."""
    return {
        key: strip_marks(value) if isinstance(value, Mapping) else value for key, value in config.items() if key != MARK
    }


def _map(config: Config, where: str, notes: list[str], depth: int) -> Config:
    if depth == 0:
        raise ConfigError(f"{where}: aliases lead to one another, or configs are nested too deeply")
    model_type = config.get("model_type")
    alias = find_alias(model_type) if isinstance(model_type, str) and MARK not in config else None
    if alias is not None and not alias.when and find_data_file("specs", alias.name):
        alias = None  # a spec of the same name, the user's own or a later one, knows the config as it is
    alias = alias and _choose(alias, config, where)
    if alias is not None:
        config = _apply(alias, config, where, notes, depth)
    inner = {
        key: _map(value, f"{where}: {key}", notes, depth - 1)
        for key, value in config.items()
        if isinstance(value, dict) and isinstance(value.get("model_type"), str)
    }
    changed = {key: value for key, value in inner.items() if value is not config[key]}
    return {**config, **changed} if changed else config


def _choose(alias: Alias, config: Config, where: str) -> Alias | None:
    """The alias that a config's keys ask for, or None where it is none of a foreign kind."""
    scope = _Keys(config)
    words = f"which model of {alias.extends} this is cannot be told"
    for name, text in alias.cases.items():
        if scope.holds(text, where, words):
            found = find_alias(name)
            if found is None:
                raise SpecError(f"{alias.path}: [cases] {name!r} is no alias")
            return found
    return alias if not alias.when or scope.holds(alias.when, where, words) else None


def _apply(alias: Alias, config: Config, where: str, notes: list[str], depth: int) -> Config:
    if alias.root:
        inner = config.get(alias.root)
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: missing key {alias.root!r}, which {alias.name!r} needs")
        beside: Config = {key: config[key] for key in _BESIDE if key in config}
        config = {**beside, **inner}
    _refuse_missing([key for key in alias.required if not _has_any(config, (key,))], where, alias.name)
    scope = _Keys(config)
    for key, kind in alias.kinds.items():
        if (given := find_key(config, key)[1]) is not None:
            check_kind(key, given, kind, where)
    for words, text in alias.checks.items():
        if not scope.holds(text, where, words):
            raise ConfigError(f"{where}: {words}")
    mapped: Config = {key: value for key, value in config.items() if key not in alias.drop}
    for key, texts in alias.keys.items():
        try:
            value = scope.evaluate(texts)
        except MissingNameError:
            continue  # the known family's default holds, or its spec names what is missing
        except SpecError as error:
            raise ConfigError(f"{where}: {error}") from None
        _put(mapped, key.split("."), value)
    mapped["model_type"] = alias.extends
    if alias.note or not notes:  # of a chain of aliases and their inner configs, the outermost says enough
        notes.append(alias.note or f"model_type {alias.name} is counted as {alias.extends}")
    if alias.extends != alias.name and find_alias(alias.extends) is not None:  # an alias of an alias
        mapped = _map(mapped, where, notes, depth - 1)
    named = mapped.get("architectures")
    if isinstance(named, list):
        mapped["architectures"] = [alias.architectures.get(str(name), name) for name in named]
    if alias.has_spec or MARK not in mapped:
        mapped[MARK] = alias.name
    return mapped


def _put(config: Config, parts: list[str], value: object) -> None:
    """Set a dotted key, in copies of the inner objects."""
    *outer, last = parts
    for part in outer:
        inner = config.get(part)
        config[part] = dict(inner) if isinstance(inner, dict) else {}
        config = config[part]
    config[last] = value


def _refuse_missing(missing: list[str], where: str, name: str) -> None:
    if missing:
        plural = "s" if len(missing) > 1 else ""
        raise ConfigError(f"{where}: missing key{plural} {', '.join(map(repr, missing))}, which {name!r} needs")


def _has_any(config: Config, keys: Iterable[str]) -> bool:
    return any(find_key(config, key)[1] is not None for key in keys)


def _list(value: object) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [str(entry).lower() if isinstance(entry, bool) else str(entry) for entry in listed]


class _Keys:
    """The keys of a config as names with values; null counts as missing."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def lookup(self, name: str) -> Any:
        value = find_key(self.config, name)[1]
        if value is None:
            raise MissingNameError(name)
        return value

    def holds(self, text: str, where: str, words: str) -> bool:
        """Whether an expression is true; where a value is of a kind that it cannot take, an error in these words."""
        try:
            return evaluate_truth(text, self)
        except SpecError:
            given = {name: find_key(self.config, name)[1] for name in sorted(find_names(text))}
            read = ", ".join(f"{name} is {format_value(value)}" for name, value in given.items() if value is not None)
            raise ConfigError(f"{where}: {words} ({read})") from None

    def evaluate(self, texts: list[str]) -> Any:
        """The first expression whose names all have values, as a config would hold it."""
        missing: MissingNameError | None = None
        for text in texts:
            if text == WHOLE:
                return {key: value for key, value in self.config.items() if not isinstance(value, dict)}
            try:
                is_name = isinstance(parse(text), (ast.Name, ast.Attribute)) and text not in ("true", "false", "none")
                return self.lookup(text) if is_name else _plain(evaluate(text, self))
            except MissingNameError as error:
                missing = missing or error
        assert missing is not None
        raise missing


def _plain(value: Any) -> Any:
    """A fraction as the number that JSON would hold."""
    if not hasattr(value, "denominator") or isinstance(value, int):
        return value
    return int(value) if value.denominator == 1 else float(value)
