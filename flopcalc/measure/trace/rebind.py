"""Functions that were set on a live module, made to act on its copy: deepcopy leaves what they hold as it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch


def rebind(made: torch.nn.Module, memo: Mapping[int, object]) -> None:
    """Let what is set on the copy's modules hold the copy; `memo` is deepcopy's: who became whom.

    A trainer wraps a forward like so: the new one is a function that holds the live model's own as a bound method.
    """
    seen: dict[int, FunctionType] = {}
    for each in made.modules():
        for name, value in list(vars(each).items()):
            if isinstance(value, (FunctionType, MethodType, partial)):
                each.__dict__[name] = _rebind(value, memo, seen)


def _rebind(value: object, memo: Mapping[int, object], seen: dict[int, FunctionType]) -> Any:
    if isinstance(value, torch.nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(_rebind(value.__func__, memo, seen), _rebind(value.__self__, memo, seen))
    if isinstance(value, partial):
        given = [_rebind(each, memo, seen) for each in value.args]
        named = {name: _rebind(each, memo, seen) for name, each in value.keywords.items()}
        return partial(_rebind(value.func, memo, seen), *given, **named)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    if id(value) not in seen:
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        seen[id(value)] = made  # before its cells: it may hold itself
        for cell, held in zip(cells, value.__closure__, strict=True):
            with suppress(ValueError):  # nothing is in it yet
                cell.cell_contents = _rebind(held.cell_contents, memo, seen)
    return seen[id(value)]
