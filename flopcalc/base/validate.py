"""Declared forms of data that is read back: a value and its form in, the first fault in words out.

A form is a dict: a mapping of these names (with ? where one may be absent) and maybe others; a tuple: a list of so many
values; a list of one form: a list of any length; a number: one from there on; a type: a value of it; an Each or a Rule.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flopcalc.base.errors import format_value


class Each(NamedTuple):
    """A mapping of any names but the empty one, or of those that match, whose values are all of one form."""

    form: Any
    needed: tuple[str, ...] = ()
    names: str = ".+"


class Rule(NamedTuple):
    """A form, what its values must keep beyond it, and the words that say of one that it does not."""

    form: Any
    holds: Callable[[Any], bool]
    words: str


MOST = 1e24  # of any number that is read back: more than all FLOPs, bytes and seconds of a run
ANY, FROM_0, POSITIVE, FROM_1 = -MOST, 0.0, sys.float_info.min, 1.0
_NUMBERS = {ANY: "finite number", FROM_0: "number of 0 or more", POSITIVE: "positive number",
            FROM_1: "number of 1 or more"}  # fmt: skip
_TYPES = {str: "text", bool: "true or false", int: "whole number"}


def find_fault(value: Any, form: Any) -> str:
    """Where a value is not of its form, and how; nothing where it is."""
    if type(form) is float:
        if type(value) in (float, int) and form <= value <= MOST:
            return ""
        limit = f" up to {MOST:g}" if type(value) in (float, int) and MOST < value < float("inf") else ""
        return f": {format_value(value)} is no {_NUMBERS[form]}{limit}"
    if form is object:
        return ""
    if isinstance(form, type):
        return "" if type(value) is form else f": {format_value(value)} is no {_TYPES[form]}"
    if isinstance(form, Rule):
        fault = find_fault(value, form.form)
        return fault or ("" if form.holds(value) else f": {format_value(value)} {form.words}")
    if isinstance(form, (dict, Each)):
        return _find_fault_inside(value, form)
    if not isinstance(value, list):
        return f": {format_value(value)} is no list"
    if isinstance(form, list):
        form = form * len(value)
    if len(value) != len(form):
        return f": a list of {len(value)}, not of {len(form)}"
    for i, each in enumerate(value):
        if fault := find_fault(each, form[i]):
            return f"[{i}]{fault}"
    return ""


def _find_fault_inside(value: object, form: dict[str, object] | Each) -> str:
    """The same of a mapping."""
    if not isinstance(value, dict):
        return f": {format_value(value)} is no mapping"
    if isinstance(form, Each):
        needed: Sequence[str] = form.needed
        parts = dict.fromkeys(value, form.form)
        if strange := [name for name in value if not re.fullmatch(form.names, name)]:
            return f": {format_value(strange[0])} unknown"
    else:
        needed = [name for name in form if not name.endswith("?")]
        parts = {name.rstrip("?"): part for name, part in form.items()}
    if missing := [name for name in needed if name not in value]:
        return f": {', '.join(missing)} missing"
    for name, part in parts.items():
        if name in value and (fault := find_fault(value[name], part)):
            return f".{name}{fault}"
    return ""
