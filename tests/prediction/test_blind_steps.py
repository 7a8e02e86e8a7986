"""The blind test: the page shows what was committed, and no model was seen before."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("blind_steps", ROOT / "benchmarks" / "blind_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_the_page_shows_the_blind_predictions(script: Any) -> None:
    assert script.make_page() in (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")


def test_every_step_was_predicted_and_measured_or_failed(script: Any) -> None:
    asked = [script.name_case(case) for *_, case in script.list_steps()]
    said = json.loads((RESULTS / "blind_predictions.json").read_text())
    kept = json.loads((RESULTS / "blind_steps.json").read_text())
    assert list(said["steps"]) == asked
    assert {case["name"] for case in (*kept["cases"], *kept["failures"])} == set(asked)
    kinds = [model.kind for model in script.MODELS.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"dense": 5, "experts": 5, "lora": 5, "vision": 5}


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 1.0), (1.0, 1.0), (1.1, 1.5), (1.2, 2.0), (9.0, 2.0)])
def test_predictions_are_read_between_factors(script: Any, factor: float, expected: float) -> None:
    table = {"1.0": [0.5, 1.0, 2.0], "1.2": [1.5, 2.0, 4.0]}
    assert script.read_between(table, factor)[1] == pytest.approx(expected)
