"""Integer expressions of spec files: text and a scope of names in, an exact value out; never eval."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from flopcalc.base.errors import FlopcalcError, SpecError, format_value
from flopcalc.base.units import is_digits

if TYPE_CHECKING:
    from fractions import Fraction


class MissingNameError(FlopcalcError):
    """A name in an expression that neither the spec nor the config defines."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no value for {name!r}")
        self.name = name


class NameScope(Protocol):
    def lookup(self, name: str) -> Any:
        """The value of a (dotted) name, or MissingNameError."""


class Budget:
    """What reading one spec under one config may cost: far more than any model needs, and less than a few seconds."""

    MOST: ClassVar[dict[str, int]] = {"ops": 20_000, "stacks": 1000, "blocks": 20_000, "list entries": 1_000_000}

    def __init__(self) -> None:
        self._spent = dict.fromkeys(self.MOST, 0)

    def spend(self, what: str, amount: int = 1) -> None:
        self._spent[what] += amount
        if self._spent[what] > self.MOST[what]:
            raise BudgetError(f"more than {self.MOST[what]:,} {what}: the spec and the config multiply each other")


class BudgetError(FlopcalcError):
    """A spec and a config that together are more work than any model."""


class Object(dict[Any, Any]):
    """An object of a config as a constant; keys that are numbers written as words, as JSON has them, are numbers."""

    def __init__(self, table: dict[Any, Any]) -> None:
        super().__init__({int(key) if is_digits(key) else key: value for key, value in table.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class Names:
    """A scope of plain names with values."""

    def __init__(self, values: dict[str, object]) -> None:
        self._values = values

    def lookup(self, name: str) -> Any:
        if name not in self._values:
            raise MissingNameError(name)
        return self._values[name]


Number: TypeAlias = "int | Fraction"
_CONSTANTS = {"true": True, "false": False, "none": None}
_CACHE: dict[str, ast.expr] = {}
MAX_LENGTH = 500
# Products and powers beyond this are no size of any model, and would only grow from dim to dim.
MAX_BITS = 4096
MAX_ENTRIES = 10_000  # of a list of lists


def parse(text: str) -> ast.expr:
    """The checked syntax tree; a SpecError for anything outside the grammar."""
    tree = _CACHE.get(text)
    if tree is None:
        if len(text) > MAX_LENGTH:
            raise SpecError(f"expression longer than {MAX_LENGTH} characters: {text[:40]!r}…")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SpecError(f"not an expression: {text!r}") from None
        _check(tree, text)
        _CACHE[text] = tree
    return tree


@cache
def find_names(text: str) -> frozenset[str]:
    """Every (dotted) name an expression reads, functions and constants left out."""
    return frozenset(_names(parse(text)))


def evaluate_truth(text: str, scope: NameScope) -> bool:
    """The value of an expression that must be true or false (null counts as false)."""
    return _truth(evaluate(text, scope), text)


def evaluate(text: str, scope: NameScope) -> Any:
    """The value of an expression: int, bool, str, list or None; a division that leaves a rest stays a Fraction."""
    try:
        return _eval(parse(text), scope, text)
    except RecursionError:
        raise SpecError(f"{text!r} is nested too deeply, or defined by itself") from None


def _check(node: ast.AST, text: str) -> None:
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and not (
            isinstance(child.func, ast.Name) and child.func.id in _FUNCTIONS and not child.keywords
        ):
            raise SpecError(f"unknown function in {text!r}; known: {', '.join(sorted(_FUNCTIONS))}")
        if isinstance(child, ast.Constant) and not isinstance(child.value, (int, float, str)):
            raise SpecError(f"constant {child.value!r} not allowed in {text!r}")
        if not isinstance(child, _ALLOWED):
            raise SpecError(f"{type(child).__name__} not allowed in {text!r}")


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = _dotted(node)
        return set() if name in _CONSTANTS else {name}
    children = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    return set().union(*(_names(child) for child in children))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise SpecError("only a name may stand before a dot")


def _number(value: object, text: str) -> Number:
    if type(value) is int:
        if value.bit_length() > MAX_BITS:
            raise SpecError(f"{format_value(value)} in {text!r} is too large")
        return value
    from fractions import Fraction

    if isinstance(value, float) and math.isfinite(value):
        return Fraction(value)
    if isinstance(value, Fraction):
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            raise SpecError(f"{format_value(value)} in {text!r} is too large")
        return value
    raise SpecError(f"{format_value(value)} in {text!r} is not a number")


def _truth(value: object, text: str) -> bool:
    # A config's "false" is a word, and a word is not false: say so instead of taking it for true.
    if value is None or isinstance(value, (bool, int)):
        return bool(value)
    raise SpecError(f"{format_value(value)} in {text!r} is neither true nor false")


def _divide(left: Number, right: Number) -> Number:
    if type(left) is int and type(right) is int and left % right == 0:
        return left // right
    from fractions import Fraction

    return Fraction(left) / Fraction(right)


def _power(left: Any, right: object) -> Any:
    if type(right) is not int or not 0 <= right <= 8:
        raise SpecError("an exponent must be an integer from 0 to 8")
    return left**right


def _count_rotations(places: object, most: int) -> int:
    """Reformer's rotations for a power of two of hash buckets, at most `places`: above `most` for two factors of it."""
    if type(places) is not int or places < 1:
        raise ValueError("no whole number above 0")
    power = places.bit_length() - 1
    count: int = 2**power
    return count if count <= most else 2 ** (power // 2) + 2 ** (power - power // 2)


def _at(value: object, index: object) -> Any:
    """A value given once, or per layer in a list."""
    if not isinstance(value, (list, tuple)):
        return value
    if type(index) is not int or not -len(value) <= index < len(value):
        raise SpecError(f"index {format_value(index)} outside a list of {len(value)}")
    return value[index]


def _override(table: object, index: object, key: object, otherwise: object) -> Any:
    """What an object keyed by layer says about one layer's key, as HF's per_layer_config does, else `otherwise`."""
    if not isinstance(table, dict):
        raise SpecError(f"{format_value(table)} is not an object")
    for name, layer in table.items():  # HF pads the numbers: "05"
        if is_digits(str(name)) and int(name) == index and isinstance(layer, dict):
            return layer.get(key, otherwise)
    return otherwise


def _wrap(indices: object, length: int) -> list[int]:
    """Indices into a list of `length`, negative ones counted from its end; one index alone is a list of one."""
    listed: list[Any] = list(indices) if isinstance(indices, (list, tuple)) else [indices]
    return [index if index >= 0 else index + length for index in listed]


def _chunks(count: int, length: int, before: int, after: int) -> list[int]:
    """Sizes of the chunks that a sequence is cut into, each with its places before and after it."""
    _check_chunks(count, length)
    starts = range(0, count, length)
    return [min(start + length + after, count) - max(start - before, 0) for start in starts]


def _queued(count: int, length: int, queue: int, period: int, kept: int) -> list[int]:
    """Places carried along with each chunk: a queue of the newest, and a store of `kept` that it overflows into."""
    _check_chunks(count, length)
    carried, stored, waiting = [], 0, 0
    for start in range(0, count, length):
        carried.append(stored + waiting)
        waiting += min(length, count - start)
        moved = min(max(period, waiting - queue), waiting) if waiting > queue else 0
        stored, waiting = min(stored + moved, kept), waiting - moved
    return carried


def _strided(count: int, block: int, local: int, stride: int, heads: int, step: int) -> int:
    """Keys that the first queries see, over all heads: in `local` blocks, and in every `stride`-th of those before."""
    if not (0 <= count <= 10**9 and block > 0 and local > 0 and stride > 0 and 0 <= heads <= 10**4 and step >= 0):
        raise ValueError
    whole, rest = divmod(count, block)
    few, far = min(whole, local), max(whole - local, 0)
    near = block * (few * (few - 1) // 2 + (whole - few) * (local - 1)) + rest * min(whole, local - 1)
    own = whole * block * (block + 1) // 2 + rest * (rest + 1) // 2  # in a query's own block
    strides = 0
    for shift in (head * step % stride for head in range(heads)):
        strides += block * (_sum_floors(far + shift, stride) - _sum_floors(shift, stride))
        strides += rest * ((far + 1 + shift) // stride if whole >= local else 0)
    return heads * (block * near + own) + block * strides


def _sum_floors(most: int, by: int) -> int:
    """The sum of n // by over n up to `most`."""
    groups, rest = divmod(most, by)
    return by * groups * (groups - 1) // 2 + groups * (rest + 1)


def _check_chunks(count: int, length: int) -> None:
    if not (0 <= count <= 10**9 and length > 0 and count <= 10**6 * length):
        raise ValueError


def _run(sizes: object, index: int) -> int:
    """Which of several runs, of these sizes, holds an item."""
    runs = _listed(sizes)
    for place in range(len(runs)):
        if index < sum(runs[: place + 1]):
            return place
    raise SpecError(f"index {format_value(index)} outside runs of {format_value(runs)}")


def _field(kernels: object, strides: object, first: int | None) -> int:
    """How many inputs one output of a chain of convolutions sees."""
    steps = _listed(strides)
    return 1 + sum(int((kernel - 1) * math.prod(steps[:i])) for i, kernel in enumerate(_listed(kernels)[:first]))


def _pick(indices: object, values: object) -> list[Any]:
    places, entries = _listed(indices), _listed(values)
    if not all(isinstance(place, int) and 0 <= place < len(entries) for place in places):
        raise ValueError
    return [entries[place] for place in places]


def _is_in(part: object, whole: object) -> bool:
    """An entry of a list, or a piece of a string, as in 'c2p|p2c'."""
    return part in whole if isinstance(part, str) and isinstance(whole, str) else part in _listed(whole)


def _listed(value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise SpecError(f"{format_value(value)} is not a list")
    return list(value)


def _list_values(table: object) -> list[Any]:
    if not isinstance(table, dict):
        raise SpecError(f"{format_value(table)} is not an object")
    return list(table.values())


_FUNCTIONS: dict[str, Callable[..., Any] | None] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "floor": math.floor,
    "len": lambda values: len(values if isinstance(values, dict) else _listed(values)),
    "count": lambda values, wanted, first=None: sum(1 for value in _listed(values)[:first] if value == wanted),
    "values": lambda table: _list_values(table),
    "isqrt": math.isqrt,
    "buckets": lambda places, most: _count_rotations(places, most),
    "where": lambda values, wanted: [i for i, value in enumerate(_listed(values)) if value == wanted],
    # Adjacent digits are one whole number: 4, '/' and 8 of '4/8'.
    "letters": lambda word: [int(part) if is_digits(part) else part for part in re.findall("[0-9]+|.", word)],
    "at": lambda value, index: _at(value, index),
    "override": _override,
    "wrap": lambda indices, length: _wrap(indices, length),
    "below": lambda values, limit: sum(value < limit for value in set(_listed(values))),
    "sum": lambda values, first=None: sum(_listed(values)[:first]),
    "dot": lambda a, b: sum(x * y for x, y in zip(_listed(a), _listed(b), strict=True)),
    "chunks": _chunks,
    "queued": _queued,
    "strided": _strided,
    "prod": lambda values, first=None: math.prod(_listed(values)[:first]),
    "field": lambda kernels, strides, first=None: _field(kernels, strides, first),
    "run": lambda sizes, index: _run(sizes, index),
    "pick": lambda indices, values: _pick(indices, values),
    "has": None,  # has(key): the config gives it, and not as null
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divide,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: _power,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: bool(a == b),
    ast.NotEq: lambda a, b: bool(a != b),
    ast.Lt: lambda a, b: bool(a < b),
    ast.LtE: lambda a, b: bool(a <= b),
    ast.Gt: lambda a, b: bool(a > b),
    ast.GtE: lambda a, b: bool(a >= b),
    ast.In: lambda a, b: _is_in(a, b),
    ast.NotIn: lambda a, b: not _is_in(a, b),
}
_ALLOWED = (
    ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.Subscript, ast.Call, ast.List, ast.Load, ast.And, ast.Or, ast.Not, ast.USub,
    *_BINARY, *_COMPARE,
)  # fmt: skip


def _as_object(value: object) -> Any:
    return Object(value) if type(value) is dict else value


def _eval(node: ast.expr, scope: NameScope, text: str) -> Any:
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = _dotted(node)
        return _CONSTANTS[name] if name in _CONSTANTS else _as_object(scope.lookup(name))
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp):
        left = _number(_eval(node.left, scope, text), text)
        right = _number(_eval(node.right, scope, text), text)
        try:
            return _BINARY[type(node.op)](left, right)
        except ZeroDivisionError:
            raise SpecError(f"{text!r} divides by zero") from None
    if isinstance(node, ast.Compare):
        left = _eval(node.left, scope, text)
        for operator, right_node in zip(node.ops, node.comparators, strict=True):
            right = _eval(right_node, scope, text)
            try:
                holds = _COMPARE[type(operator)](left, right)
            except TypeError:
                raise SpecError(f"{text!r} compares {format_value(left)} with {format_value(right)}") from None
            if not holds:
                return False
            left = right
        return True
    if isinstance(node, ast.BoolOp):
        is_and = isinstance(node.op, ast.And)
        for child in node.values:
            if _truth(_eval(child, scope, text), text) != is_and:
                return not is_and
        return is_and
    if isinstance(node, ast.IfExp):
        return _eval(node.body if _truth(_eval(node.test, scope, text), text) else node.orelse, scope, text)
    if isinstance(node, ast.UnaryOp):
        value = _eval(node.operand, scope, text)
        return not _truth(value, text) if isinstance(node.op, ast.Not) else -_number(value, text)
    if isinstance(node, ast.Subscript):
        whole = _eval(node.value, scope, text)
        index = _eval(node.slice, scope, text)
        if isinstance(whole, Object):
            if not isinstance(index, (int, str)) or index not in whole:
                raise SpecError(f"{text!r}: no {format_value(index)} among {', '.join(map(str, whole))}")
            return _as_object(whole[index])
        values = _listed(whole)
        if type(index) is not int or not -len(values) <= index < len(values):
            raise SpecError(f"{text!r}: index {format_value(index)} outside a list of {len(values)}")
        return _as_object(values[index])
    if isinstance(node, ast.List):
        made = [_eval(item, scope, text) for item in node.elts]
        if any(isinstance(entry, (list, tuple)) for entry in made) and _count_entries(made, MAX_ENTRIES) > MAX_ENTRIES:
            raise SpecError(f"{text!r} is a list of more than {MAX_ENTRIES:,} entries")
        return made
    assert isinstance(node, ast.Call)  # _check let nothing else through
    assert isinstance(node.func, ast.Name)
    function = _FUNCTIONS[node.func.id]
    if function is None:
        return _has(node, scope, text)
    values = [_eval(argument, scope, text) for argument in node.args]
    try:
        value = function(*values)
    except (TypeError, ValueError, OverflowError):
        raise SpecError(f"{text!r}: {node.func.id} cannot take {format_value(values)}") from None
    _spend(scope, *values, value)
    return value


def _spend(scope: NameScope, *values: object) -> None:
    """Charge the scope's budget, where it has one, for lists that were read or made."""
    entries = sum(len(value) for value in values if isinstance(value, (list, tuple, str)))
    budget: Budget | None = getattr(scope, "budget", None)
    if entries and budget is not None:
        budget.spend("list entries", entries)


def _count_entries(value: object, most: int) -> int:
    """Entries of a list with those of the lists inside, as far as `most`: a list may hold another many times."""
    if not isinstance(value, (list, tuple)):
        return 1
    count = 0
    for entry in value:
        count += _count_entries(entry, most - count)
        if count > most:
            break
    return count


def _has(node: ast.Call, scope: NameScope, text: str) -> bool:
    if len(node.args) != 1:
        raise SpecError(f"{text!r}: has() takes one name")
    try:
        return scope.lookup(_dotted(node.args[0])) is not None
    except MissingNameError:
        return False
