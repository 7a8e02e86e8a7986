"""Expressions of spec files: exact values, a closed grammar, and an error for everything else."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from flopcalc import SpecError
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.spec.expressions import MissingNameError, evaluate, evaluate_truth, find_names, parse


class Names:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def lookup(self, name: str) -> Any:
        if name not in self.values:
            raise MissingNameError(name)
        return self.values[name]


SCOPE = Names(
    d=24, h=4, ratio=2.5, kinds=["full", "sliding", "full"], flag=True, word="default", nothing=None, table={"a": 1},
    patches={"1225": 128, "4900": 256},
    **{"text_config.hidden_size": 7},
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("d", 24),
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-d + 30", 6),
        ("d / h", 6),
        ("7 // 2", 3),
        ("-7 // 2", -4),
        ("7 % 4", 3),
        ("d ** 2", 576),
        ("floor(d * ratio)", 60),
        ("floor(7 / 2)", 3),
        ("ceil(7 / 2)", 4),
        ("1 / 3 * 3", 1),
        ("min(d, h, 3)", 3),
        ("max(d, h)", 24),
        ("len(kinds)", 3),
        ("count(kinds, 'full')", 2),
        ("count(kinds, 'full', 2)", 1),
        ("at(kinds, 1)", "sliding"),
        ("at(word, 1)", "default"),
        ("wrap(-2, 25)", [23]),
        ("max(wrap([-2, -5, 6], 25))", 23),
        ("patches[70 ** 2]", 256),
        ("patches[max(patches)]", 256),
        ("max(values(patches))", 256),
        ("table['a']", 1),
        ("letters('MM-')", ["M", "M", "-"]),
        ("letters('16/8')", [16, "/", 8]),
        ("'fault' in word", True),
        ("sum([3, 4, 5])", 12),
        ("sum([3, 4, 5], 2)", 7),
        ("prod([3, 4, 5])", 60),
        ("prod([3, 4, 5], 2)", 12),
        ("prod([3, 4, 5], 0)", 1),
        ("field([10, 3, 2], [5, 2, 2])", 30),
        ("field([10, 3, 2], [5, 2, 2], 1)", 10),
        ("run([3, 1, 2], 2)", 0),
        ("run([3, 1, 2], 4)", 2),
        ("isqrt(17)", 4),
        ("[buckets(17, 16), buckets(17, 15), buckets(40, 16)]", [16, 8, 12]),
        ("kinds[1]", "sliding"),
        ("kinds[-1] == 'full'", True),
        ("text_config.hidden_size", 7),
        ("d if flag else h", 24),
        ("none if not flag else h", 4),
        ("none", None),
        ("true", True),
        ("false or flag", True),
        ("flag and h > 3", True),
        ("1 < h < 5", True),
        ("1 < h < 3", False),
        ("h in [1, 4]", True),
        ("'x' not in kinds", True),
        ("below([5, 2, 2, 9], 6)", 2),
        ("pick([0, 1, 1], ['a', 'b'])", ["a", "b", "b"]),
        ("dot([1, 2, 3], [4, 5, 6])", 32),
        ("chunks(10, 4, 1, 2)", [6, 7, 3]),
        ("chunks(0, 4, 1, 2)", []),
        # chunks of 4, 4, 2; after the first 4 wait, of 8 then 5 move to the store, which keeps 3
        ("queued(10, 4, 6, 5, 3)", [0, 4, 6]),
        # three blocks of two: 3 pairs within each; the second block is seen by the third
        ("strided(6, 2, 1, 2, 1, 0)", 9 + 4),
        # a second head sees the first block, from the two behind it
        ("strided(6, 2, 1, 2, 2, 1)", 9 + 4 + 9 + 8),
        ("has(d)", True),
        ("has(nothing)", False),
        ("has(absent)", False),
        ("not has(absent.key)", True),
        ("['gate', 'up']", ["gate", "up"]),
        (" d ", 24),
    ],
)
def test_values(text: str, value: Any) -> None:
    result = evaluate(text, SCOPE)
    assert result == value
    assert type(result) in (type(value), Fraction)


def test_override_reads_one_layer_of_an_object() -> None:
    scope = Names(layers={"3": {"head_dim": 14}, "05": {"head_dim": 16}}, head_dim=10)
    assert evaluate("override(layers, 5, 'head_dim', head_dim)", scope) == 16  # HF pads the numbers
    assert evaluate("override(layers, 3, 'head_dim', head_dim)", scope) == 14
    assert evaluate("override(layers, 2, 'head_dim', head_dim)", scope) == 10
    assert evaluate("override(layers, 3, 'heads', 4)", scope) == 4
    with pytest.raises(SpecError, match="override"):
        evaluate("override(head_dim, 3, 'heads', 4)", scope)


def test_a_division_with_a_rest_stays_exact() -> None:
    assert evaluate("7 / 2", SCOPE) == Fraction(7, 2)
    assert evaluate("(7 / 2) * 2", SCOPE) == 7


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "open('/etc/passwd')",
        "eval('1')",
        "d.__class__.__mro__[0]()",
        "lambda: 1",
        "[x for x in kinds]",
        "{1: 2}",
        "{1}",
        "(1, 2)",
        "f'{d}'",
        "d := 3",
        "kinds[0:2]",
        "min(*kinds)",
        "min(d, key=h)",
        "d @ h",
        "d << 2",
        "d & 1",
        "~d",
        "+d",
        "d is none",
        "b'x'",
        "...",
        "1j",
        "import os",
        "d; h",
        "",
        "d +",
        "x" * 501,
        "(" * 300,
        "await d",
        "min(min)(d)",
        "'a'.upper()",
        "\0",
    ],
)
def test_grammar_is_closed(text: str) -> None:
    with pytest.raises(SpecError):
        evaluate(text, SCOPE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("d / 0", "divides by zero"),
        ("d // 0", "divides by zero"),
        ("d % 0", "divides by zero"),
        ("word + 1", "'default' in 'word + 1' is not a number"),
        ("kinds * 2", "is not a number"),
        ("flag * 2", "True in 'flag * 2' is not a number"),
        ("nothing + 1", "is not a number"),
        ("-word", "is not a number"),
        ("d < word", "compares 24 with 'default'"),
        ("kinds[9]", "index 9 outside a list of 3"),
        ("kinds[flag]", "index True"),
        ("word[0]", "is not a list"),
        ("at(kinds, 3)", "at cannot take"),
        ("wrap(word, 3)", "wrap cannot take"),
        ("pick([2], ['a', 'b'])", "pick cannot take"),
        ("values(word)", "values cannot take"),
        ("patches[9]", "no 9 among 1225, 4900"),
        ("patches[kinds]", "no ['full', 'sliding', 'full'] among 1225, 4900"),
        ("letters(d)", "letters cannot take"),
        ("run([3, 1], 4)", "run cannot take"),
        ("d in word", "is not a list"),
        ("len(word)", "len cannot take"),
        ("isqrt(-1)", "cannot take"),
        ("buckets(0, 4)", "cannot take"),
        ("min(d)", "cannot take"),
        ("floor(word)", "cannot take"),
        ("d ** 9", "exponent"),
        ("d ** ratio", "exponent"),
        ("2 ** 2 ** 2 ** 2", "exponent"),
        ("has(d, h)", "one name"),
        ("has(1)", "only a name"),
        ("kinds[0].upper", "only a name"),
        ("word and flag", "'default' in 'word and flag' is neither true nor false"),
        ("1 if word else 2", "neither true nor false"),
        ("not table", "neither true nor false"),
    ],
)
def test_bad_values(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        evaluate(text, SCOPE)
    assert words in str(caught.value)


def test_powers_of_powers_do_not_explode() -> None:
    text = "9"
    for _ in range(40):
        text = f"({text})**8"
    with pytest.raises(SpecError, match="too large"):
        evaluate(text, SCOPE)


def test_foreign_objects_are_no_numbers() -> None:
    for value in (object(), {1}, b"x", 1j, float("nan"), float("inf"), 10**5000):
        with pytest.raises(SpecError):
            evaluate("x * 2", Names(x=value))


def test_missing_name() -> None:
    with pytest.raises(MissingNameError) as caught:
        evaluate("d * absent", SCOPE)
    assert caught.value.name == "absent"
    assert isinstance(caught.value, FlopcalcError)


def test_find_names() -> None:
    assert find_names("min(d, text_config.h) if flag else none + kinds[i]") == {
        "d",
        "text_config.h",
        "flag",
        "kinds",
        "i",
    }


def test_truth() -> None:
    assert evaluate_truth("nothing", SCOPE) is False
    assert evaluate_truth("1", SCOPE) is True
    with pytest.raises(SpecError, match="neither true nor false"):
        evaluate_truth("word", SCOPE)


def test_parse_is_remembered() -> None:
    assert parse("d * 3 + h") is parse("d * 3 + h")
