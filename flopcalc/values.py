"""Frozen values: dataclasses with slots that share their methods.

`dataclass` compiles six methods for every class. With the forty classes of the core this was the largest part of a
cold start, so this file writes them once. `fields`, `replace` and `asdict` of dataclasses work as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform


class Value:
    """Made from its fields, equal and hashed by them, never changed."""

    __slots__ = ("_hash",)

    _hash: int  # found when it is first asked for: predictions look up the same values thousands of times
    _names: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, object]] = {}

    def __init__(self, *positional: object, **named: object) -> None:
        cls = type(self)
        given = {**cls._defaults, **dict(zip(cls._names, positional, strict=False)), **named}
        if len(given) != len(cls._names) or len(positional) > len(cls._names) or not given.keys() >= set(cls._names):
            wrong = sorted(given.keys() ^ set(cls._names)) or f"{len(positional)} of {len(cls._names)}"
            raise TypeError(f"{cls.__name__}: missing or unknown fields: {wrong}")
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def _get_values(self) -> tuple[object, ...]:
        return tuple([getattr(self, name) for name in self._names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and type(self) is type(other) and self._get_values() == other._get_values()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash(self._get_values())
            object.__setattr__(self, "_hash", found)
            return found

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{type(self).__name__}({values})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._get_values()


V = TypeVar("V", bound=Value)


@dataclass_transform(frozen_default=True)
def frozen(*, kw_only: bool = False, slots: bool = True) -> Callable[[type[V]], type[V]]:
    """Makes a subclass of `Value` a dataclass; one with cached properties takes no slots."""

    def make(cls: type[V]) -> type[V]:
        made = dataclass(init=False, repr=False, eq=False, match_args=False, slots=slots, kw_only=kw_only)(cls)
        own = fields(made)  # type: ignore[arg-type]  # mypy does not see what the line before made
        made._names = tuple(field.name for field in own)
        made._defaults = {field.name: field.default for field in own if field.default is not MISSING}
        return made

    return make
