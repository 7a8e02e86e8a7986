"""Every recorded trace of every model type (tests/truth/types) equals the analytic count to the FLOP, row by row."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from places import TRUTH

from flopcalc import bind
from flopcalc.core.spec.spec import load_spec
from flopcalc.data import list_data_files
from flopcalc.measure.hf.compare import compare, make_load

sys.path.insert(0, str(TRUTH))

import record_types

RECORDED = sorted(path.stem for path in record_types.TYPES.glob("*.json"))


def test_every_spec_has_an_example_and_a_truth() -> None:
    specs = {name for name, path in list_data_files("specs").items() if not load_spec(path).is_tower}
    assert set(list_data_files("examples")) == specs
    assert set(RECORDED) == specs


@pytest.mark.parametrize("name", RECORDED)
def test_equals_traces(name: str) -> None:
    truth = record_types.load(record_types.TYPES / f"{name}.json")
    assert truth["configs"]
    for entry in truth["configs"]:
        config = {**entry["config"]}
        if truth["architecture"]:
            config["architectures"] = [truth["architecture"]]
        assert entry["cases"]
        for case in entry["cases"]:
            check_case(config, case)


def check_case(config: dict[str, Any], case: dict[str, Any]) -> None:
    where = f"{case['workload']} {case['recipe']}"
    verdict = compare(config, case["workload"], case["recipe"], case)
    assert not verdict.different, f"{where}: path: (ours, traced) = {dict(list(verdict.different.items())[:5])}"
    assert verdict.ours == verdict.traced, where
    assert verdict.parameters[0] == verdict.parameters[1], where
    # What is needed is never more than what is executed, and never nothing; adapters folded into experts are both.
    if not case["recipe"]:
        estimate = bind(config).estimate(make_load(case["workload"]))
        assert 0 < estimate.total_under("model") <= estimate.total_under("full"), where
