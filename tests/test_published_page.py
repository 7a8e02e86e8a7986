"""docs/published.md is what the rows and the conventions say, and most rows are explained."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import quoted_rows as page

from flopcalc.core.estimate.published_conventions import load_quoted

# Rows that neither a convention explains within 0.5 %, nor a formula of their release, nor rounding.
UNKNOWN = {
    ("Megatron-Bridge performance summary 26.08", "Nemotron_3_Ultra"),
    ("Megatron-Bridge performance summary 26.06", "LLAMA3_70B"),
    ("Megatron-LM examples/llama FP8", "LLAMA3-405B"),
    ("Megatron-MoE-ModelZoo Qwen3", "Qwen3-235B-A22B"),
    ("Megatron-MoE-ModelZoo Qwen3", "Qwen3-Next-80B-A3B"),
    ("AMD Primus DeepSeek-V4 projection calibration", "DeepSeek-V4 Flash, 16 layers cr=[0x3,4x6,128x7]"),
}


def test_page_is_fresh() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.make_page(), "run python benchmarks/quoted_rows.py"


def test_all_rows_are_judged() -> None:
    states = Counter(each.state for each in page.explain_all())
    assert states == {"explained": 186, "explained, not nearest": 5, "by another formula": 16, "unexplained": 20}


def test_the_commonest_conventions_are_those_of_the_page() -> None:
    counted = Counter(each.convention for each in page.explain_all())
    assert counted == {
        name: quoted.published_rows for name, quoted in load_quoted().conventions.items() if quoted.published_rows
    }


def test_what_is_unexplained_is_rounded_or_named() -> None:
    left = [each for each in page.explain_all() if each.state == "unexplained"]
    unknown = [each for each in left if abs(each.difference) > each.rounding]
    assert {(each.row["source"], each.row["model"]) for each in unknown} == UNKNOWN
    assert len(unknown) == len(UNKNOWN)


@pytest.mark.parametrize("each", page.load_tables()["source"], ids=lambda each: each["prefix"])
def test_sources_have_a_commit_and_a_licence(each: dict[str, str]) -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert each["repository"] in notice
    assert each["commit"][:7] in notice
    assert each["licence"] in notice
