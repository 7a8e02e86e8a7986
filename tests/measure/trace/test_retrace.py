"""The recorded traces still hold: every model is built and counted anew, and every number compared.

A run takes a part of each model's cases; FLOPCALC_RETRACE=all, or `python tests/truth/record.py --check`, takes all.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest
from places import TRUTH

sys.path.insert(0, str(TRUTH))

import record
from cases import FAMILIES

EVERY = os.environ.get("FLOPCALC_RETRACE") == "all"
MODELS = [(family, model.name) for family, models in FAMILIES.items() for model in models]


def test_every_family_is_recorded() -> None:
    assert {path.stem for path in TRUTH.glob("*.json")} == set(FAMILIES)


@pytest.mark.filterwarnings("ignore")  # peft and torch advise on training, which this is not
@pytest.mark.parametrize(("family", "name"), MODELS)
def test_trace_still_holds(family: str, name: str) -> None:
    recorded = json.loads((TRUTH / f"{family}.json").read_text())
    old = {"models": [model for model in recorded["models"] if model["name"] == name]}
    assert old["models"], f"{family}/{name} was never recorded: run tests/truth/record.py {family}"
    model = next(model for model in FAMILIES[family] if model.name == name)
    assert len(model.cases) == len(old["models"][0]["cases"])
    picked = pick(len(model.cases), model.published)
    new = {"models": [record.record_model(family, replace(model, cases=[model.cases[i] for i in picked]))]}
    old["models"][0]["cases"] = [old["models"][0]["cases"][i] for i in picked]
    assert record.find_differences(old, new) == []


def pick(many: int, published: bool) -> list[int]:
    """Cases to run: the first, and others at even distances; all of them if asked for."""
    step = 1 if EVERY else many if published else 5
    return list(range(0, many, max(1, step)))


def test_a_changed_number_is_found() -> None:
    truth = json.loads((TRUTH / "gpt2.json").read_text())
    changed = json.loads(json.dumps(truth))
    changed["models"][0]["cases"][0]["rows"]["lm_head"][1] += 1
    assert len(record.find_differences(truth, changed)) == 1
