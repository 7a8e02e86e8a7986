"""Decoding in CUDA graphs: what is predicted beside the tokens that were measured."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from places import ROOT

from flopcalc import predict
from flopcalc.measure.predictor.runs import cut_config

RESULTS = ROOT / "benchmarks" / "results"
CAPTURED = re.compile(r"captured without torch.compile, takes ([\d.]+) ms")


def predict_token(model: str, layers: int, execution: Any) -> Any:
    return predict(
        cut_config(model, layers), device="h200", batch_size=1, seq_len=1, phase="decode", context=512,
        execution=execution, memory=False, advise=False,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])
def test_graphs_are_as_measured(model: str) -> None:
    kept = json.loads((RESULTS / "decode_steps.json").read_text())
    cases = [case for case in kept["cases"] if case["model"] == model]
    measured = {case["way"]: case["token_s"] for case in cases}
    found = predict_token(model, cases[0]["layers"], "graphs")
    (captured,) = [float(match[1]) / 1e3 for note in found.notes if (match := CAPTURED.search(note))]
    assert captured == pytest.approx(measured["graph"], rel=0.02)
    assert found.step_time_s.mid < captured
    if "graph-compiled" in measured:
        assert found.step_time_s.mid == pytest.approx(measured["graph-compiled"], rel=0.02)


def test_other_executions_say_nothing_about_captured_graphs() -> None:
    assert not [note for note in predict_token("llama-3.2-1b", 4, "compiled").notes if "captured" in note]


def test_generate_takes_longer_than_forward_passes() -> None:
    found = predict_token("llama-3.2-1b", 16, "eager")
    assert found.generate == {"token_s": pytest.approx(1.4 * found.step_time_s.mid), "new_length_s": 0.06}
    assert found.to_dict()["generate"] == found.generate
    kept = json.loads((RESULTS / "decode_steps.json").read_text())["cases"]
    measured = [case["token_s"] for case in kept if case["model"] == "llama-3.2-1b" and "generate" in case["way"]]
    assert found.generate["token_s"] == pytest.approx(sum(measured) / len(measured), rel=0.1)
    assert predict_token("llama-3.2-1b", 2, "graphs").generate is None
