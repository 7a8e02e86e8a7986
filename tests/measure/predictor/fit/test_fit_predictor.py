"""The whole fit: what it refuses, how its file is written, and how right a refit of the committed records is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fitted import LLAMA

from flopcalc.base.errors import CalibrationError
from flopcalc.measure.predictor.fit.predictor import fit_predictor, save_predictor
from flopcalc.measure.predictor.runs import make_case


def test_without_kernels_there_is_nothing_to_fit() -> None:
    case = {**make_case("llama", "train", 2, 32), "operators": [], "is_host": False}
    for records in ([], [case], [{"units": {"view": 0.4}}], [{**case, "is_host": True}]):
        with pytest.raises(CalibrationError, match="no kernels"):
            fit_predictor(records, lambda _: LLAMA, {"device_id": "h200-sxm"})


def test_a_predictor_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "predictors" / "x.json"
    save_predictor(str(path), {"schema": 1, "moved": {"copy": [[1, 2.0]]}})
    assert json.loads(path.read_text()) == {"schema": 1, "moved": {"copy": [[1, 2.0]]}}
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]
    monkeypatch.chdir(tmp_path)
    save_predictor("y.json", {"schema": 1})
    assert json.loads((tmp_path / "y.json").read_text()) == {"schema": 1}


def test_a_predictor_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"file/x\.json: cannot be written: .*; what was measured is kept"):
        save_predictor(str(tmp_path / "file" / "x.json"), {"schema": 1})
    (tmp_path / "x.json").mkdir()
    with pytest.raises(CalibrationError, match="cannot be written: Is a directory"):
        save_predictor(str(tmp_path / "x.json"), {"schema": 1})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "x.json"]  # nothing half written
