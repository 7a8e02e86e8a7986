"""Cases of whole steps: a runner on the CPU, and a calibration that ends in a predictor's file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc.errors import CalibrationError, DeviceError
from flopcalc.measure import predictor
from flopcalc.measure.runner import Outcome, Result
from flopcalc.measure.tables import counts, runs

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_cases_run_and_are_profiled() -> None:
    runner = runs.Runner("cpu", lambda name: counts.get_config(name, "test"))
    for case in runs.list_cases("test"):
        found = runner.measure(case, profiled=True)
        assert found["seconds"] > 0
        assert {row[0] for row in found["operators"]} >= {"aten::mm", "aten::mul"}
        assert found["kernels"] == 0  # none without a GPU
    host = runner.measure_host(runs.make_case("llama", "train", 1, 16), 3)
    assert host["ratio"] > 0
    assert host["probe_s"] > 0


@pytest.mark.parametrize(
    ("preset", "layers", "vision"), [("llama-3.1-8b", 3, 0), ("qwen2-vl-2b", 2, 4), ("gpt2-medium", 5, 0)]
)
def test_configs_are_cut_in_depth_alone(preset: str, layers: int, vision: int) -> None:
    from flopcalc.estimate import bind

    stages = [stage for stage in bind(runs.cut_config(preset, layers, vision)).stages if stage.repeated]
    assert [len(stage.layers) for stage in stages] == ([vision, layers] if vision else [layers])


def test_every_case_has_its_own_name() -> None:
    cases = [*runs.list_cases("full"), *runs.list_host_cases("full")]
    assert len({runs.name_case(case) for case in runs.list_cases("full")}) > 95
    assert all(runs.name_case(case).startswith(case["model"]) for case in cases)


def _fake(monkeypatch: pytest.MonkeyPatch, results: list[Any], stopped: bool = False) -> None:
    provenance = {"device": "NVIDIA H200", "device_id": "h200-sxm", "torch": "2.11.0"}
    monkeypatch.setattr(predictor, "probe_machine", lambda *_: provenance)
    monkeypatch.setattr(predictor, "has_gpu", lambda: True)
    outcome = Outcome(tuple(results), stopped, len(results), frozenset({"runs"}))
    monkeypatch.setattr(predictor, "run_jobs", lambda *_, **__: outcome)


def test_a_calibration_ends_in_a_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = json.loads(gzip.decompress((RESULTS / "predict_profiles.json.gz").read_bytes()))["cases"]
    hosts = json.loads((RESULTS / "predict_hosts.json").read_text())["cases"]
    kept = [case for case in cases if case["model"].startswith("llama")]
    kept += [host for host in hosts if host["model"].startswith("llama-3.2")]
    _fake(monkeypatch, [Result("runs", str(i), "", "ok", None, None, case, 0.0) for i, case in enumerate(kept)])
    path = predictor.calibrate_predictor("quick", str(tmp_path))
    assert path == str(tmp_path / "h200-sxm.json")
    found = json.loads(Path(path).read_text())
    assert found["provenance"]["command"] == "flopcalc calibrate --predictor"
    assert found["products"]["shape"][0] == pytest.approx(850e12, rel=0.1)


def test_what_cannot_be_calibrated_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="found none"):
        predictor.calibrate_predictor("quick", str(tmp_path))
    with pytest.raises(CalibrationError, match="suite 'slow' unknown"):
        predictor.calibrate_predictor("slow", str(tmp_path))
    _fake(monkeypatch, [], stopped=True)
    assert predictor.calibrate_predictor("quick", str(tmp_path)) is None
    _fake(monkeypatch, [])
    with pytest.raises(CalibrationError, match="too little was measured"):
        predictor.calibrate_predictor("quick", str(tmp_path))
