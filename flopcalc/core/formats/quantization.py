"""A config's quantization_config: which modules' weights it stores how, in rules of which the first that fits holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NoReturn

from flopcalc.base.errors import ConfigError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.patterns import is_costly
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import Group
from flopcalc.core.formats.stored import StoredFormat, load_stored


def say_by_hand() -> str:
    """What to do where a config's quantization is not understood."""
    return f"{spell('weights', 'FORMAT')} says the format by hand"


# What a module is to a quantizer: torch.nn.Linear; a subclass of it, which some libraries pass over; a stack of
# experts, which are bare parameters in transformers 5 and were linears in the checkpoints; the output head; a table of
# embeddings; anything else. A rule for linears holds for subclasses too.
Kind = Literal["linear", "subclass", "expert", "head", "embed", "other"]
ALL_KINDS: tuple[Kind, ...] = ("linear", "expert", "head", "embed", "other")
WITH_HEAD: tuple[Kind, ...] = ("linear", "expert", "head")

# What lists of modules in a downloaded config may hold.
MAX_PATTERNS = 20_000
MAX_REPEATS = 5


@frozen()
class ModulePlace(Value):
    """A module that a rule is asked about: its names, as this model and as older checkpoints spell them."""

    names: tuple[str, ...]
    kind: Kind
    group: Group = "language"  # or the tower that it belongs to


@frozen()
class QuantizationRule(Value):
    """How the weights are stored of the modules that match: by kind and, where there are patterns, by name too."""

    stored: StoredFormat | None  # None: left as they are
    kinds: tuple[Kind, ...] = ("linear", "expert")
    patterns: tuple[Pattern, ...] = ()
    is_language: bool = False  # layers of the language model alone

    def fits(self, place: ModulePlace) -> bool:
        kind = "linear" if place.kind == "subclass" and "subclass" not in self.kinds else place.kind
        if kind not in self.kinds or (self.is_language and place.group != "language"):
            return False
        return not self.patterns or any(pattern.matches(name) for pattern in self.patterns for name in place.names)


@frozen()
class Pattern(Value):
    """A name in a list of modules, in the way of the library that wrote it."""

    text: str
    style: Literal["hf", "regex", "glob", "name"]

    def matches(self, name: str) -> bool:
        if self.style == "name":
            return name == self.text or name.endswith(f".{self.text}")
        if self.style == "glob":
            return fnmatchcase(name, self.text) or fnmatchcase(name, f"{self.text}.*")
        if self.style == "regex":
            return _compile(self.text).match(name) is not None
        # transformers: from the start to a module's end, as a regex, or the end of the name.
        return name.endswith(self.text) or _compile(rf"(?:{self.text})(?:(?<=\.)|(?=\.|$))").match(name) is not None


@cache
def _compile(text: str) -> re.Pattern[str]:
    """A list may hold hundreds of names, each asked about every module."""
    return re.compile(text)


@frozen()
class Quantization(Value):
    """What a quantization_config says: rules for weights, the cache's format, and what is worth saying."""

    method: str
    rules: tuple[QuantizationRule, ...]
    kv_cache: str = ""
    notes: tuple[str, ...] = ()

    def find(self, place: ModulePlace) -> StoredFormat | None:
        """How a module's weight is stored; None: as the rest of the model."""
        return next((rule.stored for rule in self.rules if rule.fits(place)), None)


def find_config(config: Mapping[str, object], where: str) -> Mapping[str, Any] | None:
    """The quantization_config of a model, at the top or in one of its parts; two that differ are an error."""
    found: list[tuple[str, Mapping[str, object]]] = []
    parts = [("", config), *((f"{key}.", value) for key, value in config.items() if isinstance(value, Mapping))]
    for prefix, part in parts:
        for key in ("quantization_config", "compression_config"):
            value = part.get(key)
            if value is None:
                continue
            value = value.to_dict() if hasattr(value, "to_dict") else value
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}: {prefix}{key} must be an object, not {format_value(value)}; {say_by_hand()}"
                )
            found.append((f"{prefix}{key}", value))
    mlx = config.get("quantization")  # MLX says it there; its newer files repeat it in quantization_config
    if isinstance(mlx, Mapping) and "bits" in mlx and all(value == mlx for _, value in found):
        return {"quant_method": "mlx", **mlx}
    for name, value in found[1:]:
        if value != found[0][1]:
            raise ConfigError(f"{where}: {found[0][0]} and {name} contradict each other; {say_by_hand()}")
    return found[0][1] if found else None


class Keys:
    """The keys of a quantization_config, taken one by one; what is left at the end is unknown."""

    def __init__(self, config: Mapping[str, object], where: str, name: str = "quantization_config") -> None:
        self.config, self.where, self.name = config, where, name
        self.seen: set[str] = set()

    def fail(self, key: str, why: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {self.name}.{key} {why}; {say_by_hand()}")

    def take(self, key: str, kind: type | tuple[type, ...], default: object = None) -> Any:
        """The value of a key, of a kind; null and a missing one are the default."""
        self.seen.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        is_number = (
            kind is not bool and isinstance(value, bool) and bool not in (kind if isinstance(kind, tuple) else (kind,))
        )
        if not isinstance(value, kind) or is_number:
            self.fail(key, f"is {format_value(value)}, which is not read here")
        return value

    def choose(self, key: str, known: Iterable[object], default: object) -> Any:
        """One of several values."""
        self.seen.add(key)
        value = self.config.get(key)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        choices = tuple(known)
        if isinstance(value, (Mapping, list)) or value not in choices:
            self.fail(key, f"is {format_value(value)}; known: {', '.join(map(str, choices))}")
        return value

    def enter(self, key: str, value: object, name: str) -> Keys:
        """The keys of an object inside this one."""
        if not isinstance(value, Mapping):
            self.fail(key, f"holds {format_value(value)}, which is no object")
        return Keys(value, self.where, f"{self.name}.{name}")

    def pick(self, old: str, new: str) -> str:
        """Which of two names of one key the file has; both with different values is an error."""
        if old in self.config and new in self.config and self.config[old] != self.config[new]:
            self.fail(old, f"and {new} contradict each other")
        self.skip(old, new)
        return old if old in self.config else new

    def take_names(self, key: str) -> tuple[str, ...] | None:
        """A list of module names; None where there is none."""
        value = self.take(key, (list, tuple))
        if value is None:
            return None
        for name in value:
            if not isinstance(name, str) or not name:
                self.fail(key, f"holds {format_value(name)}, which is no module's name")
        return tuple(value)

    def compile(self, key: str, names: Iterable[str], style: Literal["hf", "regex", "glob", "name"]) -> list[Pattern]:
        """Patterns of a list of names; a regex that cannot be read is an error."""
        found: list[Pattern] = []
        for name in names:
            if len(found) == MAX_PATTERNS:
                self.fail(key, f"holds more than {MAX_PATTERNS:,} names")
            if style in ("hf", "regex") and is_costly(name, MAX_REPEATS):
                self.fail(key, f"holds {format_value(name)}, a pattern that may take for ever to match")
            pattern = Pattern(name, style)
            try:
                pattern.matches("model")
            except (re.error, RecursionError, OverflowError) as error:
                self.fail(key, f"holds {format_value(name)}, which is no pattern: {error}")
            found.append(pattern)
        return found

    def skip(self, *keys: str) -> None:
        """Keys that say nothing about formats."""
        self.seen.update(keys)

    def finish(self) -> None:
        """An unknown key is an error that names it."""
        for key in self.config:
            if key not in self.seen:
                near = format_nearest(str(key), self.seen)
                raise ConfigError(f"{self.where}: {self.name}.{key} is not known.{near} {say_by_hand()}")


def has_quantization(config: Mapping[str, object]) -> bool:
    """Whether a config, or one of its parts, says how weights are quantized."""
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    is_mlx = isinstance(config.get("quantization"), Mapping)
    return is_mlx or any(
        part.get(key) is not None for part in parts for key in ("quantization_config", "compression_config")
    )


def make_stored(word: str, key: str = "", /, **changes: Any) -> StoredFormat:
    """A format of the file with some of its fields changed; `key` is what said so."""
    return replace(load_stored()[word], key=key, **changes)


def make_grouped(keys: Keys, name: str, size: int, key: str = "group_size", **changes: object) -> StoredFormat:
    """A format with groups of this many inputs; -1: all of a row."""
    if size != -1 and size < 1:
        keys.fail(key, f"is {size}; it is a number of inputs, or -1 for all")
    if size == -1:
        return make_stored(name, f"{keys.name}.{key}", inputs=0, **changes)
    return make_stored(name, f"{keys.name}.{key}", inputs=size, **{"name": f"{name}-g{size}", **changes})


def exclude(keys: Keys, *names: str, adds_head: bool = False) -> list[QuantizationRule]:
    """transformers' list of modules that stay as they are; without one, the output head does."""
    given = [found for key in names if (found := keys.take_names(key)) is not None]
    if len(given) > 1 and given[0] != given[1]:
        keys.fail(names[0], f"and {names[1]} contradict each other")
    rules = []
    if not given or adds_head:
        rules.append(QuantizationRule(None, ("head",)))
    if given and given[0]:
        rules.append(QuantizationRule(None, ALL_KINDS, tuple(keys.compile(names[0], given[0], "hf"))))
    return rules
