"""docs/crosscheck.md is what the shipped tables say, and its claims hold in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_crosscheck as page  # noqa: E402

COUNTS = page.load("counts").records()


def test_page_is_fresh() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.make_page(), "run python docs/make_crosscheck.py"


@pytest.mark.parametrize(
    "row", COUNTS, ids=lambda row: "/".join(str(row[k]) for k in ("family", "phase", "seq", "kernel"))
)
def test_named_differences_close_the_gap_to_one_percent(row: dict[str, object]) -> None:
    """Where every dim is a multiple of 128 the count itself is within 1 %; elsewhere the calls measured alone are."""
    executed = row["executed"]
    assert isinstance(executed, int)
    if row["family"] == "llama":
        assert executed == pytest.approx(row["analytic_hardware"], rel=0.01)
    alone = page.sum_alone(page.load("padding"), row)
    assert alone is not None
    assert executed == pytest.approx(sum(alone.values()), rel=0.01)


def test_software_counters_equal_the_analytic_count() -> None:
    eager = [row for row in COUNTS if row["kernel"] == "eager" and row["flop_counter"] is not None]
    assert eager
    for row in eager:
        assert row["flop_counter"] == page.estimate_row(row).total
