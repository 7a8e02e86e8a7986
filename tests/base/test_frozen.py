"""Frozen values behave as frozen dataclasses do."""

from __future__ import annotations

import ast
import pickle
from dataclasses import MISSING, FrozenInstanceError, asdict, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from flopcalc.base.frozen import Value, frozen


@frozen()
class Size(Value):
    """Two numbers, one with a default."""

    width: int
    height: int = 1


@frozen(kw_only=True)
class Named(Size):
    """A field more, required after one with a default."""

    name: str


@frozen()
class Wide(Size):
    """Another default for a field of the class that it extends."""

    width: int = 7


@frozen()
class Checked(Value):
    """Converts its field."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.upper())


class Other(Size):
    """The same fields, another class."""

    __slots__ = ()


@frozen(slots=False)
class Area(Value):
    """With a cached property."""

    width: int

    @cached_property
    def square(self) -> int:
        return self.width**2


def test_values() -> None:
    size = Size(2)
    assert (size.width, size.height) == (2, 1)
    assert size == Size(2, 1) == Size(width=2)
    assert hash(size) == hash(size) == hash(Size(2, 1)) == hash(replace(Size(3), width=2))
    assert hash(pickle.loads(pickle.dumps(size))) == hash(size)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Size([2]))  # type: ignore[arg-type]
    assert size != Size(3)
    assert size != Other(2)
    assert size != (2, 1)
    assert repr(Named(width=2, name="a")) == "Named(width=2, height=1, name='a')"
    assert [field.name for field in fields(Named)] == ["width", "height", "name"]
    assert replace(size, height=5) == size.replace(height=5) == Size(2, 5)
    assert asdict(size) == {"width": 2, "height": 1}
    assert is_dataclass(Size)
    assert fields(Size)[0] is fields(Size)[0]  # made once: `replace` asks for them every time
    assert [field.default for field in fields(Size)] == [MISSING, 1]
    assert (Named._names, Wide(3).width, Wide().height) == (("width", "height", "name"), 3, 1)
    assert Wide() == Wide(7, 1)
    assert Checked("a").text == "A"
    assert pickle.loads(pickle.dumps(Named(width=2, name="a"))) == Named(width=2, name="a")
    assert not hasattr(size, "__dict__")
    assert Area(3).square == 9


@pytest.mark.parametrize(
    ("positional", "named"), [((), {}), ((1, 2, 3), {}), ((1,), {"depth": 2}), ((), {"height": 2})]
)
def test_wrong_fields(positional: tuple[int, ...], named: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="Size: missing or unknown fields"):
        Size(*positional, **named)


def test_replace_unknown() -> None:
    with pytest.raises(TypeError, match=r"unknown fields: \['depth'\]"):
        Size(2).replace(depth=1)


def test_frozen() -> None:
    size = Size(2)
    with pytest.raises(FrozenInstanceError):
        size.width = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del size.width


def test_a_value_is_a_named_tuple_or_a_value() -> None:
    """The rule of docs/design.md: `@dataclass` is for records that change."""
    root = Path(__file__).parents[2]
    decorators = [
        f"{path.relative_to(root)}: {node.name} {ast.unparse(decorator)}"
        for folder in ("flopcalc", "lab")
        for path in sorted((root / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).startswith("dataclass")
    ]
    assert decorators == ["flopcalc/measure/counters/gpm.py: Activity dataclass"]
