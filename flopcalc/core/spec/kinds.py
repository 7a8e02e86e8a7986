"""Kinds of values in a config, and the error for a value of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard

from flopcalc.base.errors import ConfigError, format_value

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
