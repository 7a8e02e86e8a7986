"""Lists that a spec writes with loops, as the blocks of a convolutional network in their order of execution."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flopcalc.base.errors import SpecError, format_nearest, format_value
from flopcalc.core.spec.expressions import Budget, NameScope, evaluate, evaluate_truth, parse

Lists = Mapping[str, list[dict[str, Any]]]
_WORDS = ("kind", "path")  # an entry's keys that hold text; braces in it are replaced by values
_CONTROL = ("for", "times", "when", "do", *_WORDS)
_BRACES = re.compile(r"\{(\w+)\}")


class _Inner:
    """The names of an entry, and those around it."""

    def __init__(self, values: dict[str, Any], outer: NameScope) -> None:
        self.values, self._outer = values, outer

    def lookup(self, name: str) -> Any:
        return self.values[name] if name in self.values else self._outer.lookup(name)


def list_entries(name: str, lists: Lists, scope: NameScope, budget: Budget) -> list[dict[str, Any]]:
    """The entries of one of a spec's [lists], each with the names of all loops around it."""
    found: list[dict[str, Any]] = []
    _expand(lists[name], lists, _Inner({}, scope), budget, found)
    return found


def _expand(rows: Any, lists: Lists, scope: _Inner, budget: Budget, found: list[dict[str, Any]]) -> None:
    for row in rows:
        if not evaluate_truth(row.get("when", "true"), scope):
            continue
        times = evaluate(row.get("times", "1"), scope)
        if isinstance(times, bool) or not isinstance(times, int) or times < 0:
            raise SpecError(f"times = {row['times']!r} must be a whole number, not {format_value(times)}")
        budget.spend("blocks", times)
        for number in range(times):
            inner = _Inner({**scope.values, **({row["for"]: number} if "for" in row else {})}, scope)
            for key, text in row.items():
                if key not in _CONTROL:
                    inner.values[key] = evaluate(text, inner)
            for key in _WORDS:
                if key in row:
                    inner.values[key] = _BRACES.sub(lambda part: str(inner.lookup(part[1])), row[key])  # noqa: B023
            if "do" not in row:
                found.append(inner.values)
                continue
            _expand(lists[row["do"]] if isinstance(row["do"], str) else row["do"], lists, inner, budget, found)


def check_lists(rows: object, lists: Lists, where: str) -> None:
    """An error where a list of a spec cannot be read."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SpecError(f"{where} must be a list of tables")
    for row in rows:
        inner = row.get("do", [])
        for key, text in row.items():
            if key != "do" and not isinstance(text, str):
                raise SpecError(f"{where}: {key} must be an expression, not {format_value(text)}")
            if key not in ("do", "for", *_WORDS):
                parse(text)
        if isinstance(inner, list):
            check_lists(inner, lists, where)
        elif inner not in lists:
            raise SpecError(f"{where}: no list {format_value(inner)}.{format_nearest(str(inner), lists)}")
