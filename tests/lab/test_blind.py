"""The blind test: the page shows what was committed, and no model was seen before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

from lab.blind import steps
from lab.blind.rounds import load_round

PAGE = ROOT / "lab" / "blind" / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def script() -> Iterator[ModuleType]:
    steps.choose_round(1)
    yield steps
    steps.choose_round(1)


@pytest.mark.parametrize("number", range(1, 8))
def test_the_page_shows_the_blind_predictions(number: int) -> None:
    steps.choose_round(number)
    assert steps.make_page() in PAGE.read_text(encoding="utf-8")


def test_the_users_page_has_a_line_of_every_round() -> None:
    assert steps.summarize_rounds() in (ROOT / "docs" / "prediction-accuracy.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("number", "title"),
    [
        (2, "### Second round"),
        (3, "### Third round"),
        (4, "### Fourth round"),
        (5, "### Fifth round"),
        (6, "### Sixth round"),
        (7, "### Seventh round"),
    ],
)
def test_later_rounds_are_told_as_they_were(number: int, title: str) -> None:
    steps.choose_round(number)
    later = steps.ROUND
    for before in map(load_round, range(1, number)):
        assert not set(later.models) & set(before.models)
        assert not set(later.executed) & set(before.executed)
    names = {kind: RESULTS / later.name_result(kind) for kind in ("steps", "executed", "predictions")}
    rows = steps.list_rows(names["steps"], names["predictions"]) if later.models else []
    page = " ".join(PAGE.read_text(encoding="utf-8").split(title)[1].split())
    for bound, words in (("device", "GPU"), ("host", "Host")) if rows else ():
        own = [row for row in rows if row["bound"] == bound]
        median, worst, inside = steps.summarize(own).split(" / ")
        assert f"{words}-bound steps: {median} median error, {worst} worst, {inside} inside" in page
    assert len(rows) == (36 if later.models else 0)
    said = json.loads(names["predictions"].read_text())["executed_flops"]
    counted = json.loads(names["executed"].read_text())["cases"]
    errors = [abs(said[case["name"]] / case["executed_flops"] - 1) for case in counted]
    assert f"Executed FLOPs: {sum(error < 0.01 for error in errors)} of {len(errors)} steps within 1 %" in page


def test_every_step_was_predicted_and_measured_or_failed(script: Any) -> None:
    asked = [script.name_case(case) for *_, case in script.list_steps()]
    said = json.loads((RESULTS / "blind_predictions.json").read_text())
    kept = json.loads((RESULTS / "blind_steps.json").read_text())
    assert list(said["steps"]) == asked
    assert {case["name"] for case in (*kept["cases"], *kept["failures"])} == set(asked)
    kinds = [model.kind for model in script.ROUND.models.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"dense": 5, "experts": 5, "lora": 5, "vision": 5}


@pytest.mark.parametrize("number", [1, 2])
def test_counts_for_the_rows_of_a_router_are_what_was_executed(number: int) -> None:
    steps.choose_round(number)
    cases = json.loads((RESULTS / "expert_routes.json").read_text())["cases"]
    own = [case for case in cases if case["round"] == number]
    assert len(own) == 4 - (number == 2)
    for case in own:
        name, rows = case["name"], case["rows_per_expert"]
        assert steps.count_executed(name, rows) == pytest.approx(case["executed_flops"], rel=0.004)


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 1.0), (1.0, 1.0), (1.1, 1.5), (1.2, 2.0), (9.0, 2.0)])
def test_predictions_are_read_between_factors(script: Any, factor: float, expected: float) -> None:
    table = {"1.0": [0.5, 1.0, 2.0], "1.2": [1.5, 2.0, 4.0]}
    assert script.read_between(table, factor)[1] == pytest.approx(expected)
