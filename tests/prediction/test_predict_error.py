"""The benchmark of predictions: the committed report is what the committed measurements and this predictor give."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predict_error", ROOT / "benchmarks" / "predict_error.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_report_is_what_comes_out(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    files = [RESULTS / name for name in ("predict_cases.json", "predict_hosts.json", "predict_profiles.json.gz")]
    shown = script.report(*files, out)
    assert shown in (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    assert json.loads(out.read_text()) == json.loads((RESULTS / "predict_error.json").read_text())


def test_no_test_model_was_fitted_on(script: Any) -> None:
    from flopcalc.measure.tables.runs import MODELS

    assert not {preset for preset, *_ in script.TEST.values()} & {preset for preset, *_ in MODELS.values()}
    fitted = {case["model"] for case in script._read(RESULTS / "predict_profiles.json.gz")["cases"]}
    assert fitted <= set(MODELS)


def test_the_predictor_is_what_the_fit_gives(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "h200-sxm.json"
    script.fit(RESULTS / "predict_profiles.json.gz", RESULTS / "predict_hosts.json", out)
    made = json.loads(out.read_text())
    shipped = json.loads((ROOT / "model_specs" / "predictors" / "h200-sxm.json").read_text())
    assert made.keys() == shipped.keys()
    assert made["moved"] == shipped["moved"]
    # Searches end a little apart where another Python adds floats another way.
    assert made["products"]["shape"] == pytest.approx(shipped["products"]["shape"], rel=0.02)
    for name in ("gaps", "power"):
        assert made[name] == pytest.approx(shipped[name], rel=0.05)


def test_the_page_tells_the_blind_result() -> None:
    blind = json.loads((RESULTS / "predict_error_blind.json").read_text())["summary"]
    page = " ".join((ROOT / "docs" / "prediction.md").read_text(encoding="utf-8").split())
    device, host, _, memory = ({key: 100 * value for key, value in row.items() if key != "name"} for row in blind)
    for words in (
        f"device-bound {blind[0]['cases']} cases, {device['median']:.1f} % median and {device['worst']:.0f} % worst "
        f"error, {device['inside']:.0f} % inside",
        f"host-bound over the probe {blind[1]['cases']} cases, {host['median']:.1f} % and {host['worst']:.0f} %, "
        f"{host['inside']:.0f} % inside",
        f"memory {memory['median']:.1f} % and {memory['worst']:.1f} %",
    ):
        assert words in page
