"""Data that is read back from files: a value and its declared type in, the first fault in words out.

The type is the one that the code uses: a TypedDict or NamedTuple, a list, dict or tuple of types, text, a number. What
a type cannot say stands beside it, in Annotated: the least number, a mapping's names, a list's items, a rule. A mapping
may hold more names than its TypedDict has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Union, get_args, get_origin, get_type_hints

from flopcalc.base.errors import format_value

_Check = Callable[[Any], str]  # the fault of a value


class AtLeast(NamedTuple):
    """The least number that is allowed, and how such numbers are called."""

    limit: float
    words: str


class Keys(NamedTuple):
    """The names that a mapping must have, and what all its names must match."""

    needed: tuple[str, ...] = ()
    names: str = ".+"


class Items(NamedTuple):
    """The types of a list's values, one after the other."""

    kinds: tuple[Any, ...]


class Rule(NamedTuple):
    """What values must keep beyond their type, and the words that say of one that it does not."""

    holds: Callable[[Any], bool]
    words: str


MOST = 1e24  # of any number that is read back: more than all FLOPs, bytes and seconds of a run
_FINITE = AtLeast(-MOST, "finite number")
FromZero = Annotated[float, AtLeast(0.0, "number of 0 or more")]
Positive = Annotated[float, AtLeast(sys.float_info.min, "positive number")]
FromOne = Annotated[float, AtLeast(1.0, "number of 1 or more")]
_PLAIN = {str: "text", bool: "true or false", int: "whole number", NoneType: "null"}


def find_fault(value: object, kind: Any) -> str:
    """Where a value is not of its type, and how; nothing where it is."""
    return _make_check(kind)(value)


@cache
def _make_check(kind: Any) -> _Check:
    base, *details = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    rules = [detail for detail in details if isinstance(detail, Rule)]
    check = _make_type_check(base, next((detail for detail in details if not isinstance(detail, Rule)), None))
    return partial(_check_rules, check, rules) if rules else check


def _make_type_check(kind: Any, detail: Any) -> _Check:
    origin, parts = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return lambda _: ""
    if kind is float:
        return partial(_check_number, *(detail or _FINITE))
    if kind in _PLAIN:
        return lambda value: "" if type(value) is kind else f": {format_value(value)} is no {_PLAIN[kind]}"
    if origin is Literal:
        return lambda value: "" if value in parts else f": {format_value(value)} unknown; known: {', '.join(parts)}"
    if origin in (Union, UnionType):
        return partial(_check_either, [_make_check(part) for part in parts])
    if origin is dict:
        return partial(_check_mapping, detail or Keys(), _make_check(parts[1]))
    if origin in (list, tuple):
        kinds = detail.kinds if detail else parts
        return partial(_check_list, [_make_check(part) for part in kinds], origin is list and not detail)
    hints = get_type_hints(kind, include_extras=True)
    extra = [name for name, hint in hints.items() if get_origin(hint) is NotRequired]
    needed = [name for name in hints if name in getattr(kind, "__required_keys__", hints) and name not in extra]
    fields = {name: _make_check(get_args(hint)[0] if name in extra else hint) for name, hint in hints.items()}
    return partial(_check_fields, needed, fields)


def _check_rules(check: _Check, rules: Sequence[Rule], value: Any) -> str:
    words = (f": {format_value(value)} {rule.words}" for rule in rules if not rule.holds(value))
    return check(value) or next(words, "")


def _check_number(limit: float, words: str, value: Any) -> str:
    is_number = type(value) in (float, int)
    if is_number and limit <= value <= MOST:
        return ""
    most = f" up to {MOST:g}" if is_number and MOST < value < float("inf") else ""
    return f": {format_value(value)} is no {words}{most}"


def _check_either(checks: Sequence[_Check], value: object) -> str:
    faults = [check(value) for check in checks]
    return faults[0] if all(faults) else ""


def _check_list(checks: Sequence[_Check], repeats: bool, value: object) -> str:
    if not isinstance(value, list):
        return f": {format_value(value)} is no list"
    if len(value) != len(checks) and not repeats:
        return f": a list of {len(value)}, not of {len(checks)}"
    for at, item in enumerate(value):
        if fault := checks[0 if repeats else at](item):
            return f"[{at}]{fault}"
    return ""


def _check_mapping(keys: Keys, check: _Check, value: object) -> str:
    if isinstance(value, dict) and (unknown := [name for name in value if not re.fullmatch(keys.names, name)]):
        return f": {format_value(unknown[0])} unknown"
    return _check_fields(keys.needed, dict.fromkeys(value, check) if isinstance(value, dict) else {}, value)


def _check_fields(needed: Sequence[str], fields: Mapping[str, _Check], value: object) -> str:
    if not isinstance(value, dict):
        return f": {format_value(value)} is no mapping"
    if missing := [name for name in needed if name not in value]:
        return f": {', '.join(missing)} missing"
    faults = (f".{name}{fault}" for name, check in fields.items() if name in value and (fault := check(value[name])))
    return next(faults, "")
