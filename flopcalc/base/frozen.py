"""Frozen values: dataclasses with slots that share their methods.

`dataclass` inspects every class and compiles six methods for it. With the forty classes of the core this was the
largest part of a cold start, so this file writes the methods once, and a class becomes a dataclass when somebody asks
for its fields. `fields`, `replace` and `asdict` of dataclasses work as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import get_annotations
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast, dataclass_transform


class _Fields:
    """What makes a class a dataclass, in the eyes of `dataclasses`: its fields, made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[type[Value], dict[str, Any]] = {}

    def __get__(self, value: Value | None, cls: type[Value]) -> dict[str, Any]:
        if cls not in self._made:
            self._made[cls] = _make_fields(cls)
        return self._made[cls]


def _make_fields(cls: type[Value]) -> dict[str, Any]:
    from dataclasses import dataclass

    kinds = {
        name: kind
        for base in reversed(cls.__mro__)
        for name, kind in get_annotations(base).items()
        if name in cls._names
    }
    twin = type(cls.__name__, (), {"__annotations__": kinds, "__doc__": cls.__doc__, **cls._defaults})
    made: type[Any] = dataclass(init=False, repr=False, eq=False, match_args=False)(twin)
    found: dict[str, Any] = made.__dataclass_fields__
    return found


class Value:
    """Made from its fields, equal and hashed by them, never changed."""

    __slots__ = ("_hash",)
    __dataclass_fields__ = _Fields()

    _hash: int
    _names: ClassVar[tuple[str, ...]] = ()
    _keys: ClassVar[frozenset[str]] = frozenset()  # the same
    _defaults: ClassVar[dict[str, object]] = {}

    def __init__(self, *positional: object, **named: object) -> None:
        cls = type(self)
        given = {**cls._defaults, **dict(zip(cls._names, positional, strict=False)), **named}
        if given.keys() != cls._keys or len(positional) > len(cls._names):
            wrong = sorted(given.keys() ^ cls._keys) or f"{len(positional)} of {len(cls._names)}"
            raise TypeError(f"{cls.__name__}: missing or unknown fields: {wrong}")
        set_field = object.__setattr__
        for name, value in given.items():
            set_field(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Checks and converts the fields, where a class does."""

    def replace(self, **changes: object) -> Self:
        """The same with some fields changed."""
        return type(self)(**dict(zip(self._names, self._get_values(), strict=True)) | changes)

    def _get_values(self) -> tuple[object, ...]:
        return tuple([getattr(self, name) for name in self._names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and type(self) is type(other) and self._get_values() == other._get_values()

    def __hash__(self) -> int:
        try:  # kept: chains and rows are folded by equality, layer after layer
            found: int = self._hash
        except AttributeError:
            found = hash(self._get_values())
            object.__setattr__(self, "_hash", found)
        return found

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{type(self).__name__}({values})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._get_values()


V = TypeVar("V", bound=Value)


@dataclass_transform(frozen_default=True)
def frozen(*, kw_only: bool = False, slots: bool = True) -> Callable[[type[V]], type[V]]:  # noqa: ARG001
    """Makes a subclass of `Value` a value; one with cached properties takes no slots. Type checkers read `kw_only`."""

    def make(cls: type[V]) -> type[V]:
        own = [name for name, kind in get_annotations(cls).items() if "ClassVar" not in str(kind)]
        new = tuple(name for name in own if name not in cls._names)  # others have their slots in the class it extends
        space = dict(cls.__dict__)
        defaults = {name: space.pop(name) for name in own if name in space}
        if slots:  # they can only be given when a class is made
            for name in ("__dict__", "__weakref__"):
                space.pop(name, None)
            space["__slots__"] = new
            made = cast("type[V]", type(cls.__name__, cls.__bases__, space))
            made.__qualname__ = cls.__qualname__
        else:
            made = cls
        kept = {name: value for name, value in cls._defaults.items() if name not in own}
        made._names = (*cls._names, *new)
        made._keys = frozenset(made._names)
        made._defaults = kept | defaults
        return made

    return make
