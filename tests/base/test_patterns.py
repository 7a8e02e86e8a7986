"""Patterns under a time limit: the full meaning of `re`, and errors that name the pattern."""

from __future__ import annotations

import re

import pytest

from flopcalc.base import patterns
from flopcalc.base.errors import RecipeError
from flopcalc.base.patterns import find_matches, is_costly

NAMES = tuple(f"model.layers.{layer}.{part}" for layer in range(12) for part in ("self_attn.q_proj", "mlp.up_proj"))


@pytest.mark.parametrize(
    ("text", "costly"),
    [
        (r".*\.(q_proj|v_proj)", False),
        (r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj", False),
        (r"model\.layers\.(?!1\b)[0-9]+\.mlp\.up_proj", False),
        (r"(?:model\.)+layers\.1\..*", True),
        (r".*layers.*attn.*proj.*", True),
        (r"(?i:MODEL).*q_proj", True),
        (r"((a+)+)+!", True),
        (r"(a|b)*c", True),
        (r"a?" * 30 + "a" * 30, True),
        (r"[[a]b].*", True),
    ],
)
def test_the_helper_matches_as_re_does(text: str, costly: bool) -> None:
    assert is_costly(text) is costly
    with pytest.warns(FutureWarning) if "[[" in text else pytest.MonkeyPatch.context():
        expected = {name for name in NAMES if re.fullmatch(text, name)}
    assert find_matches(text, NAMES, "lora target", RecipeError) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(", "lora target '(' is no regular expression: missing ), unterminated subpattern"),
        ("(" * 4000 + ")" * 4000, "is no regular expression: maximum recursion depth exceeded"),
        ("a{99999999999}", "is no regular expression: the repetition number is too large"),
    ],
)
def test_what_is_no_pattern(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        find_matches(text, (), "lora target", RecipeError)


def test_a_slow_pattern_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LIMIT_S", 0.5)
    with pytest.raises(RecipeError, match=re.escape("lora target '((a+)+)+!' takes more than 0.5 s to match")):
        find_matches("((a+)+)+!", ("a" * 60,), "lora target", RecipeError)


def test_without_processes_a_costly_pattern_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns.sys, "executable", "/no/such/python")
    with pytest.raises(RecipeError, match=r"that failed \(FileNotFoundError\): write it with at most 2"):
        find_matches("(b+)+!", ("b",), "lora target", RecipeError)
