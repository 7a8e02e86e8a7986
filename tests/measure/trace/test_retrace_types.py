"""The recorded traces of the model types still hold: each is built and counted anew, the first case or all of them."""

from __future__ import annotations

import json
import os
import sys

import pytest
from places import TRUTH

sys.path.insert(0, str(TRUTH))

import record_types

from flopcalc.measure.hf.examples import find_example

# FLOPCALC_RETRACE=all runs every case (as `python tests/truth/record_types.py --check` does).
CASES = None if os.environ.get("FLOPCALC_RETRACE") == "all" else 1
RECORDED = sorted(path.stem for path in record_types.TYPES.glob("*.json"))


@pytest.mark.filterwarnings("ignore")  # peft and torch advise on training, which this is not
@pytest.mark.parametrize("name", RECORDED)
def test_trace_still_holds(name: str) -> None:
    if needs := find_example(name).needs:
        pytest.importorskip(needs)
    new = json.loads(json.dumps(record_types.record(name, CASES)))
    assert record_types.find_differences(record_types.load(record_types.TYPES / f"{name}.json"), new) == []


def test_a_changed_number_is_found() -> None:
    truth = record_types.load(record_types.TYPES / "llama.json")
    changed = json.loads(json.dumps(truth))
    changed["configs"][0]["cases"][0]["rows"]["lm_head"][1] += 1
    (line,) = record_types.find_differences(truth, changed)
    assert "lm_head" in line
