"""Tables and text keep to the terminal's width: words go to a second line, columns to a second table, none is lost."""

from __future__ import annotations

import sys

import pytest

from flopcalc.base import text_table
from flopcalc.base.text_table import find_width, format_grid, format_text, wrap

HEADERS = ["name", "count", "what it is"]
ROWS = [["alpha", "1", "the first of the letters"], ["beta", "22,000", "the second"], ["gamma", "-", ""]]
PLAIN = """\
name      count  what it is
------  -------  ------------------------
alpha         1  the first of the letters
beta     22,000  the second
gamma         -"""


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [("80", 80), ("120", 120), ("7", 40), ("0", None), ("", None), ("x", None), ("-5", None), ("9" * 9, None)],
)
def test_columns_say_the_width(monkeypatch: pytest.MonkeyPatch, columns: str, expected: int | None) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert find_width() == expected


class Terminal:
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


@pytest.mark.parametrize(("answer", "expected"), [(132, 132), (0, 80), (None, 80)])
def test_a_terminal_says_its_width(monkeypatch: pytest.MonkeyPatch, answer: int | None, expected: int) -> None:
    def ask(_: int) -> object:
        if answer is None:
            raise OSError("no terminal")
        return type("Size", (), {"columns": answer})

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(text_table.os, "get_terminal_size", ask)
    assert find_width() == expected


def test_without_a_terminal_a_row_is_a_line() -> None:
    assert format_grid(HEADERS, ROWS) == PLAIN
    wide = [["a", "1", "word " * 60]]
    assert format_grid(HEADERS, wide).count("\n") == 2


def test_markdown_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert format_grid(["a", "b"], [["x" * 50, "1"], ["y", "2\n3"]], "github").splitlines() == [
        f"| a{' ' * 49} |      b |",
        f"|{'-' * 52}|--------|",
        f"| {'x' * 50} |      1 |",
        f"| y{' ' * 49} | 2<br>3 |",
    ]


NARROW = {
    "headers lose their padding": (
        ["name", "count", "what it is"],
        [["alpha", "1", "the first of the letters"], ["beta", "22,000", "the second"]],
        0,
        """\
name    count  what it is
-----  ------  ------------------------
alpha       1  the first of the letters
beta   22,000  the second""",
    ),
    "words go to a second line": (
        ["name", "count", "what it is"],
        [["alpha", "1", "the first of the letters, and not the last one"], ["beta", "22,000", "the second"]],
        0,
        """\
name    count  what it is
-----  ------  -------------------------
alpha       1  the first of the letters,
               and not the last one
beta   22,000  the second""",
    ),
    "columns go to a second table that names its rows": (
        ["model", "column 0", "column 1", "column 2"],
        [["a-long-name", "1,234,567", "1,234,567", "1,234,567"], ["b", "7", "8", "9"]],
        1,
        """\
model         column 0   column 1
-----------  ---------  ---------
a-long-name  1,234,567  1,234,567
b                    7          8

model         column 2
-----------  ---------
a-long-name  1,234,567
b                    9""",
    ),
    "or numbers them": (
        ["size", "column 0", "column 1", "column 2"],
        [["1,000,000", "1,234,567", "1,234,567", "1,234,567"], ["6", "7", "8", "9"]],
        0,
        """\
row       size   column 0   column 1
---  ---------  ---------  ---------
  1  1,000,000  1,234,567  1,234,567
  2          6          7          8

row   column 2
---  ---------
  1  1,234,567
  2          9""",
    ),
    "a path is cut behind a mark, a number anywhere": (
        ["key", "value"],
        [["model.layers.0.self_attn.q_proj.weight", "1" * 40]],
        1,
        """\
key                              value
-----------------  -------------------
model.layers.0.    1111111111111111111
self_attn.q_proj.  1111111111111111111
weight                              11""",
    ),
    "no rows": (["a", "b"], [], 0, "a    b\n---  ---"),
}


@pytest.mark.parametrize("case", NARROW)
def test_forty_columns(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    headers, rows, keys, shown = NARROW[case]
    monkeypatch.setenv("COLUMNS", "40")
    assert format_grid(headers, rows, keys=keys) == shown


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "word " * 40
    assert max(map(len, wrap(words))) == 79  # 80 where there is no terminal
    monkeypatch.setenv("COLUMNS", "300")
    assert max(map(len, wrap(words))) == 99  # longer lines are hard to read
    monkeypatch.setenv("COLUMNS", "40")
    assert format_text("a word and hub.co/some/very/long/path/of/a/file.json", "note  ", " " * 6).splitlines() == [
        "note  a word and",
        "      hub.co/some/very/long/path/of/a/",
        "      file.json",
    ]
    assert wrap("") == []
    assert wrap("   = 12 × 34", "  ", "") == ["     = 12 × 34"]
