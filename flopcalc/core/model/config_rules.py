"""What transformers' config classes and modelling code refuse, as data: whole numbers, lists per layer, head counts."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from flopcalc.core.spec.expressions import MissingNameError, evaluate, evaluate_truth, find_names
from flopcalc.core.spec.kinds import check_kind, describe_kind, is_number, is_whole
from flopcalc.core.spec.spec import find_key
from flopcalc.data import find_data_dir
from flopcalc.errors import ConfigError, SpecError, format_nearest, format_value
from flopcalc.files import MAX_TOML_BYTES, read_text

FILE = "config_rules.json"  # what config classes refuse; made by docs/make_config_rules.py
RULES = "config_rules.toml"  # what the modelling code cannot run
_RULE = "\n[[rule]]"  # begins a rule there
_OTHER_RULES = {  # of FILE, beside kinds
    "words", "words?", "act", "act?", "layers", "even", "inner", "float32", "falsy", "positive", "rope", "rope_outside",
    "rope_tables",
}  # fmt: skip
# The least whole number that a key takes, alone or in a list.
_LEAST = {
    1: re.compile("(.*_)?(strides?|patch_sizes?)(_.*)?"),
    0: re.compile("(.*_)?(head_dim|heads|shared_experts|depths?|padding|image_size|kernel_sizes?|num_blocks)(_q|_kv)?"),
}
# Keys of inner configs that published code reads otherwise than transformers' class, or not at all: a spec checks them.
_READ_OTHERWISE = {"kimi_k3": ("hidden_act", "num_key_value_heads")}
_DROPOUT = ("dropout", "dropout_prob", "dropout_rate", "pdrop")  # torch's dropout takes a probability alone


@cache
def _read_file(name: str) -> str:
    return read_text(os.path.join(find_data_dir(), name), MAX_TOML_BYTES, ConfigError)


def _find_value(name: str, start: int = 0) -> Any:
    """What FILE says after a line's first word, None without such a line: parsing one line is faster than all."""
    text, mark = _read_file(FILE), f"\n{json.dumps(name)}: "
    at = text.find(mark, start)
    return None if at < 0 else json.JSONDecoder().raw_decode(text, at + len(mark))[0]


@cache
def _find_words() -> dict[str, Any]:
    words: dict[str, object] = _find_value("words")
    return words


@cache
def _find_class(name: str) -> dict[str, Any] | None:
    """What the config class of a model_type refuses; None where transformers has none."""
    found: dict[str, object] | None = _find_value(name, _read_file(FILE).index('"classes": {'))
    return found


def is_type_of_transformers(model_type: str) -> bool:
    """Whether a config class of transformers has this type."""
    return _find_class(model_type) is not None


def list_float32(config: Mapping[str, object], dtype: str) -> tuple[str, ...]:
    """Patterns of the parameters that from_pretrained keeps in float32 where a model is loaded in a 16-bit format.

    transformers keeps `_keep_in_fp32_modules_strict` in both formats and `_keep_in_fp32_modules` in fp16. A model has
    the lists of its parts too (modeling_utils.py, post_init).
    """
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    found: dict[str, None] = {}
    for part in parts:
        name = part.get("model_type")
        kept = (_find_class(name) or {}).get("float32", {}) if isinstance(name, str) else {}
        for key in ("half", "fp16") if dtype == "fp16" else ("half",):
            found |= dict.fromkeys(kept.get(key, ()))
    return tuple(found)


def list_unconverted(config: Mapping[str, object]) -> tuple[str, ...]:
    """Modules that transformers' quantizers leave out: those of `_keep_in_fp32_modules`, in any format."""
    half = list_float32(config, "bf16")
    return tuple(name for name in list_float32(config, "fp16") if name not in half)


@cache
def _find_rules(name: str) -> list[dict[str, Any]]:
    """A model_type's rules: only those that name it are parsed, for most of the file's do not."""
    rules = [rule for rule in _read_file(RULES).split(_RULE)[1:] if f'"{name}"' in rule]
    found: list[dict[str, Any]] = tomllib.loads("".join(_RULE + rule for rule in rules)).get("rule", [])
    return [rule for rule in found if name in rule["types"]]


class _Keys:
    """A config's keys, and the names of a rule: each the first of its expressions whose keys the config has."""

    def __init__(self, config: Mapping[str, object], names: Mapping[str, list[str]]) -> None:
        self.config = dict(config)
        self.names = names
        self.own: Mapping[str, Any] = {}  # values of the rule itself: an entry of a list, and its place

    def lookup(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        for text in self.names.get(name, ()):
            try:
                return evaluate(text, self)
            except MissingNameError:
                continue
        is_given, value = find_key(self.config, name)
        if not is_given or value is None:
            raise MissingNameError(name)
        return value

    def format_values(self, text: str, key: str = "") -> str:
        """'experts is 8, n_group is 3': what an expression reads, and this key."""
        names = {name for each in (text, *(t for ts in self.names.values() for t in ts)) for name in find_names(each)}
        names |= {key}
        given = [(name, *find_key(self.config, name)) for name in sorted(names)]
        return ", ".join(f"{name} is {format_value(value)}" for name, is_given, value in given if is_given)


def check_config(config: Mapping[str, object], where: str, model_type: str | None = None) -> None:
    """A ConfigError where HF's config class refuses a value; inner configs too. Unknown types pass."""
    name = config.get("model_type") if model_type is None else model_type
    rules = _find_class(name) if isinstance(name, str) else None
    if not isinstance(name, str) or rules is None:
        own = _READ_OTHERWISE.get(name, ()) if isinstance(name, str) else ()
        for key, inner in config.items():  # whose own types may be known
            if isinstance(inner, Mapping):
                check_config({each: inner[each] for each in inner if each not in own}, f"{where}: {key}")
        return
    for kind, names in rules.items():
        for key in names.split() if kind not in _OTHER_RULES else ():
            if key in config:
                _check_value(key, config[key], kind, where)
    for key in rules.get("positive", "").split():
        if is_whole(value := config.get(key)) and value < 1:
            raise ConfigError(f"{where}: {key} must be at least 1, not {format_value(value)}")
    if "num_labels" in config:  # of every class, which makes names of so many
        _check_value("num_labels", config["num_labels"], "int", where)
    for key, known in (rules.get("words", {}) | rules.get("words?", {})).items():
        if key in config and config[key] not in (known if key in rules.get("words", {}) else (*known, None)):
            raise ConfigError(f"{where}: {key} must be one of {', '.join(known)}, not {format_value(config[key])}")
    config = _choose_rope(config)
    acts = rules.get("act", "").split()
    for key in (*acts, *rules.get("act?", "").split()):
        if (word := config.get(key, "")) != "" and (word is not None or key in acts):
            _check_word(word.removeprefix("gated-") if isinstance(word, str) else word, "act", f"{where}: {key}")
    _check_rope(config, rules, where)
    for key, (count_key, default) in rules.get("layers", {}).items():
        _check_layers(config, key, config.get(count_key, default), count_key, where)
    for text in rules.get("even", ()):
        _check_even(config, text, where)
    for rule in _find_rules(name):
        if not _names_class(config, rule.get("not_for", ())):
            _check_rule(rule, config, where)
    for key, inner in rules.get("inner", {}).items():
        if isinstance(value := config.get(key), Mapping):
            classes = value.get("architectures") or config.get("architectures")  # that build this part, or do not
            check_config({**value, "architectures": classes}, f"{where}: {key}", _name_inner(value, inner))
        elif value is not None:
            raise ConfigError(f"{where}: {key} must be an object, not {format_value(value)}")


def _check_rule(rule: Mapping[str, Any], config: Mapping[str, Any], where: str) -> None:
    """A rule of RULES: once, or for every entry of a list."""
    keys = _Keys(config, rule.get("names", {}))
    for key in rule.get("not_null", ()):
        if find_key(keys.config, key) == (True, None) and not _holds(rule.get("unless", "false"), keys):
            raise ConfigError(f"{where}: {key} is null, and transformers' code needs a value")
    own: list[dict[str, Any]] = [{}]
    if each := rule.get("each", ""):
        value = find_key(keys.config, each)[1]
        entries = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if entries is value and "length" in rule:
            _check_length(len(entries), rule["length"], keys, f"{where}: {each}")
        own = [{"entry": entry, "i": i} for i, entry in enumerate(entries)]
    for keys.own in own if "check" in rule else ():
        try:
            is_kept = evaluate_truth(rule["check"], keys)
        except MissingNameError:  # a key is left out
            continue
        except SpecError:  # it divides by 0, or a value is of another kind: HF's code cannot compute with it either
            is_kept = False
        if not is_kept:
            raise ConfigError(f"{where}: {rule['words']} ({keys.format_values(rule['check'], each)})")


def _check_length(length: int, text: str, keys: _Keys, key: str) -> None:
    """A list with an entry for each layer, or for as many others as an expression says."""
    try:
        wanted = evaluate(text, keys)
    except (MissingNameError, SpecError):  # a key is left out, or refused by itself
        return
    if length != wanted:
        read = keys.format_values(text)
        raise ConfigError(f"{key} must have {wanted} entries, not {length}{f' ({read})' if read else ''}")


def fill_nulls(config: Mapping[str, object], model_type: str | None = None) -> dict[str, Any]:
    """The same config with values in place of the nulls that transformers takes for them; inner configs too."""
    name = config.get("model_type") if model_type is None else model_type
    rules = (_find_class(name) if isinstance(name, str) else None) or {}
    means: dict[str, object] = dict.fromkeys(rules.get("falsy", "").split(), False)
    for rule in _find_rules(name) if isinstance(name, str) else ():
        means |= rule.get("null_means", {})
    config = _choose_rope(config)
    filled: dict[str, object] = {key: value for key, value in means.items() if key in config and config[key] is None}
    if "rope_scaling" in config:
        filled["rope_parameters"] = config["rope_scaling"]
    for key, inner in rules.get("inner", {}).items():
        if isinstance(value := config.get(key), Mapping):
            filled[key] = fill_nulls(value, _name_inner(value, inner))
    return {**config, **filled}


def _name_inner(config: Mapping[str, object], inner: str) -> Any:
    """The type of an inner config: its own where the class takes any, after the star the one without."""
    return config.get("model_type") or inner[1:] if inner.startswith("*") else inner


def _holds(text: str, keys: _Keys) -> bool:
    """Whether an expression is true; not where its keys are left out."""
    try:
        return evaluate_truth(text, keys)
    except (MissingNameError, SpecError):
        return False


def _names_class(config: Mapping[str, object], endings: Iterable[str]) -> bool:
    """Whether the class that the config names ends so."""
    classes = config.get("architectures")
    return isinstance(classes, list) and any(str(each).endswith(tuple(endings)) for each in classes[:1])


def _check_value(key: str, value: object, kind: str, where: str) -> None:
    """A value of one of the kinds that a rule joins, null where it ends in '?'."""
    if value is None:
        if not kind.endswith("?"):
            raise ConfigError(f"{where}: missing key '{key}': it is null, and must be {describe_kind(kind)}")
        return
    check_kind(key, value, kind.removesuffix("?"), where)
    entries = value if isinstance(value, (list, tuple)) else (value,)
    for least, names in _LEAST.items():
        if any(is_whole(entry) and entry < least for entry in entries) and names.fullmatch(key):
            raise ConfigError(f"{where}: {key} must be at least {least}, not {format_value(value)}")
    if is_number(value) and key.endswith(_DROPOUT) and not 0 <= value <= 1:
        raise ConfigError(f"{where}: {key} must be from 0 to 1, not {format_value(value)}")


def _check_rope(config: Mapping[str, Any], rules: Mapping[str, Any], where: str) -> None:
    """Tables of rotary embeddings: a known type, numbers where it needs some, no null where the class has a value."""
    tables = _list_rope_tables(config)
    if "rope" in rules and config.get("rope_scaling") and not tables:
        raise ConfigError(f"{where}: rope_scaling must be an object, not {format_value(config['rope_scaling'])}")
    for table in tables:
        rope_type = table.get("rope_type", table.get("type", "default"))
        _check_word(rope_type, "rope", f"{where}: rope_type")
        if "rope" not in rules:
            continue
        # Phi-3 reads yarn as longrope, and has its lists there.
        needs = _find_words()["rope_needs"].get("longrope" if "short_factor" in table else rope_type, ())
        for key in needs if "rope_theta" not in table else (*needs, "rope_theta"):
            value = table.get(key)
            if not (is_number(value) or isinstance(value, (list, tuple))):
                raise ConfigError(
                    f"{where}: rotary embeddings of type {rope_type} need a number as {key}, not {format_value(value)}"
                )
        for key in rules["rope"].split():
            if key in table and table[key] is None:
                raise ConfigError(f"{where}: {key} of rotary embeddings is null, and transformers' code needs a value")
    if "partial_rotary_factor" in rules.get("rope", "").split():
        for factor in _list_factors(config):
            if not (is_number(factor) and 0 <= factor <= 1):
                raise ConfigError(
                    f"{where}: the share of a head that rotary embeddings turn (partial_rotary_factor) must be from 0 "
                    f"to 1, not {format_value(factor)}"
                )
    if "rope_tables" in rules and tables and not any(isinstance(each, Mapping) for each in _find_rope(config).values()):
        kinds = rules["rope_tables"].replace(" ", ", ")
        raise ConfigError(f"{where}: rotary embeddings must have a table for each kind of layer: {kinds}")
    for key in rules.get("rope_outside", "").split():
        if key in config and config[key] is None and not all(key in table for table in tables or [{}]):
            raise ConfigError(f"{where}: {key} is null, and rotary embeddings need a number")


def _check_word(word: object, vocabulary: str, key: str) -> None:
    known = _find_words()[vocabulary]
    if word not in known:
        near = format_nearest(str(word), known)
        raise ConfigError(f"{key} holds {format_value(word)}, which HF does not know.{near}")


def _check_layers(config: Mapping[str, object], key: str, count: object, count_key: str, where: str) -> None:
    """A list of words, one for each layer."""
    words = config.get(key)
    if not isinstance(words, (list, tuple)):
        return
    for word in words:
        _check_word(word, key, f"{where}: {key}")
    if len(words) != count:
        raise ConfigError(f"{where}: {key} has {len(words)} entries, but {count_key} is {format_value(count)}")


def _check_even(config: Mapping[str, object], text: str, where: str) -> None:
    """Rotary embeddings turn pairs of numbers: a head that they turn as a whole is even ('… above 4': a wider one)."""
    text, _, least = text.partition(" above ")
    whole, _, heads = text.partition(" / ")
    size, count = config.get(whole), config.get(heads, 1)
    if heads and (config.get("head_dim") is not None or heads not in config):
        return
    if not (is_whole(size) and is_whole(count)) or count < 1:
        return
    dim = size // count
    shares = [factor if is_number(factor) else 1.0 for factor in _list_factors(config)]
    if dim % 2 and dim > int(least or 0) and any(int(dim * share) == dim for share in shares):
        behind = f"{whole} is {size}" + (f", {heads} is {count}" if heads else "")
        raise ConfigError(f"{where}: head_dim must be even: rotary embeddings turn pairs of numbers ({behind})")


def _choose_rope(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config with one table of rotary embeddings: transformers takes rope_scaling, if there is one, instead of
    rope_parameters (modeling_rope_utils.py, convert_rope_params_to_dict).
    """
    dropped = "rope_parameters" if config.get("rope_scaling") else "rope_scaling"
    return {key: value for key, value in config.items() if key != dropped} if dropped in config else config


def _find_rope(config: Mapping[str, object]) -> Mapping[str, Any]:
    rope = config.get("rope_scaling", config.get("rope_parameters"))
    return rope if isinstance(rope, Mapping) else {}


def _list_rope_tables(config: Mapping[str, object]) -> list[Mapping[str, Any]]:
    """The table of rotary embeddings, or one for each kind of layer."""
    rope = _find_rope(config)
    if not rope:
        return []
    return [table for table in rope.values() if isinstance(table, Mapping)] or [rope]


def _list_factors(config: Mapping[str, object]) -> Iterator[Any]:
    """The share of a head that is turned, as the config has it: one, or one for each kind of layer."""
    for table in _list_rope_tables(config) or [{}]:
        names = ("partial_rotary_factor", "rotary_pct", "rope_pct")
        given = (found[name] for found in (table, config) for name in names if found.get(name) is not None)
        yield next(given, 1.0)
