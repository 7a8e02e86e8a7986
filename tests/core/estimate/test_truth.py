"""Every recorded trace of a HF model (tests/truth/types) equals the analytic count to the FLOP, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from flopcalc.base.data import list_data_files
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.spec.spec import load_spec
from flopcalc.measure.hf.compare import compare_bound, make_executed, make_load
from lab.truth import Case, Entry, Truth, list_types, load

TYPES = list_types()


def find_wrong(truth: Truth, half: int | None = None) -> list[str]:
    """Every row, sum and parameter count that the analytic count has otherwise; a line for each.

    `half` is 0 or 1: only every second case, from that one on.
    """
    wrong: list[str] = []
    for entry in truth.entries:
        if entry.preset:
            wrong += check_preset(entry)
        named = {"architectures": [truth.architecture]} if truth.architecture else {}
        model = bind_model(load_config({**entry.config, **named}))
        bound: dict[str, CountedEstimator] = {}
        cases = entry.all_cases
        for case in cases if half is None else cases[half::2] or cases:
            recipe = json.dumps(case.recipe)
            if recipe not in bound:
                bound[recipe] = make_executed(model, case.recipe)
            where = f"{entry.preset} {json.dumps(case.workload)} {recipe}".strip()
            wrong += [f"{where}: {line}" for line in check_case(bound[recipe], case)]
    return wrong


def check_preset(entry: Entry) -> Iterator[str]:
    """A published size has the preset's dims; rotary sections and the dtype cost nothing."""
    inner = {key: value for key, value in entry.config.items() if isinstance(value, dict) and key != "rope_scaling"}
    published = load_config(entry.preset).config
    for ours, theirs in ((entry.config, published), *((value, published[key]) for key, value in inner.items())):
        for key in dict.fromkeys((*ours, *theirs)):
            if key not in (*inner, "rope_scaling", "dtype") and ours.get(key) != theirs.get(key):
                yield f"{entry.preset}: {key} is {theirs.get(key)} in the preset, {ours.get(key)} in the record"


def check_case(estimator: CountedEstimator, case: Case) -> Iterator[str]:
    traced = {"rows": case.rows, "total": case.total, "trainable": case.trainable, "sums": case.sums}
    verdict = compare_bound(estimator, case.workload, traced)
    for path, (ours, theirs) in verdict.different.items():
        yield f"{path}: ours {ours}, traced {theirs}"
    if verdict.ours != verdict.traced:
        yield f"sums: ours {verdict.ours}, traced {verdict.traced}"
    if verdict.parameters[0] != verdict.parameters[1]:
        yield f"parameters: ours {verdict.parameters[0]}, traced {verdict.parameters[1]}"
    # What is needed is never more than what is executed, and never nothing; adapters folded into experts are both.
    if not case.recipe:
        estimate = estimator.estimate(make_load(case.workload))
        needed, executed = estimate.total_under("model"), estimate.total_under("full")
        if not 0 < needed <= executed:
            yield f"{needed} are needed, {executed} are executed"


def test_every_spec_has_an_example_and_a_truth() -> None:
    specs = {name for name, path in list_data_files("specs").items() if not load_spec(path).is_tower}
    assert set(list_data_files("examples")) == specs
    assert set(TYPES) == specs


@pytest.mark.parametrize("name", TYPES)
def test_equals_traces(name: str) -> None:
    truth = load(name)
    assert truth.entries
    assert all(entry.all_cases for entry in truth.entries)
    assert_equals(truth, half=0)


@pytest.mark.heavy
@pytest.mark.parametrize("name", TYPES)
def test_equals_the_other_traces(name: str) -> None:
    assert_equals(load(name), half=1)


def assert_equals(truth: Truth, half: int) -> None:
    wrong = find_wrong(truth, half)
    assert not wrong, "\n".join([f"{len(wrong)} differ", *wrong])


def test_a_wrong_number_is_told() -> None:
    truth = load("gpt2")
    first = truth.entries[0]
    case = first.cases[0]
    forward, backward, again = case.rows["lm_head"]
    changed = case._replace(rows={**case.rows, "lm_head": (forward, backward + 2, again)}, total=case.total + 1)
    row, sums, parameters = find_wrong(truth._replace(entries=(first._replace(cases=(changed,), more=()),)))
    assert row.endswith(f"lm_head: ours {(forward, backward, again)}, traced {(forward, backward + 2, again)}")
    assert "sums: ours" in sums
    assert "parameters: ours" in parameters
    part = changed._replace(rows={"lm_head": changed.rows["lm_head"]}, sums=(1, 2, 3), total=case.total)
    row, sums = find_wrong(truth._replace(entries=(first._replace(cases=(part,), more=()),)))
    assert "lm_head: ours" in row
    assert sums.endswith("traced (1, 2, 3)")
    published = next(entry for entry in truth.entries if entry.preset)
    other = published._replace(config={**published.config, "n_layer": 11}, more=())
    (line,) = find_wrong(truth._replace(entries=(other,)))
    assert line == "gpt2: n_layer is 12 in the preset, 11 in the record"
