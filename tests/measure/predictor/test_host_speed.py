"""`calibrate --host`: a machine's own host, measured by the probe and put into the shipped constants."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from flopcalc import predict
from flopcalc.base.errors import CalibrationError, DeviceError, SpecError
from flopcalc.measure.calibrate.run import run_command
from flopcalc.measure.calibrate.tables import Bench
from flopcalc.measure.predictor import host_speed as measuring
from flopcalc.prediction.kernels.constants import FOLLOWS, adapt_host, load_host, load_measured, load_predictor

OPTIONS: dict[str, Any] = {"device": "h200", "batch_size": 1, "seq_len": 64, "advise": False, "memory": False}


def make_host(train: float, forward: float, spread: float = 0.2) -> dict[str, Any]:
    edges = {
        mode: {"low_s": mid * (1 - spread), "mid_s": mid, "high_s": mid * (1 + spread)}
        for mode, mid in (("train", train), ("forward", forward))
    }
    return {"schema": 1, "provenance": {"device_id": "h200-sxm", "date": "2026-11-16T00:00:00Z"}, "probe_s": edges}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's data folder, empty, with no predictor remembered from before or after."""
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    (tmp_path / "predictors").mkdir()
    yield tmp_path / "predictors"
    load_predictor.cache_clear()


def _round(values: list[float]) -> list[float]:
    """To the five digits that constants have."""
    return [float(f"{value:.5g}") for value in values]


def test_constants_follow_the_probe() -> None:
    shipped = load_measured("h200-sxm")
    assert shipped is not None
    probes = shipped["probe_s"]
    slower = 2 ** (1 / FOLLOWS), 3 ** (1 / FOLLOWS)
    found = adapt_host(shipped, make_host(slower[0] * probes["train"], slower[1] * probes["forward"]))
    for phase, pace in (("train", 2), ("forward", 3), ("decode", 3), ("again", 2)):
        assert found["host"][phase] == _round([pace * value for value in shipped["host"][phase]])
    for name, (seconds, factor) in shipped["host"]["types"]["llama"].items():
        pace = 2 if "train" in name else 3
        assert found["host"]["types"]["llama"][name] == [*_round([pace * seconds]), factor]
    assert found["compiled"]["launch_s"] == pytest.approx(3 * shipped["compiled"]["launch_s"])
    assert found["own_host"] == {"train": pytest.approx(2), "forward": pytest.approx(3), "spread": pytest.approx(0.3),
                                 "date": "2026-11-16T00:00:00Z"}  # fmt: skip
    for same in ("products", "attention", "moved", "optimizer"):
        assert found[same] == shipped[same]


def test_predictions_are_of_this_host(folder: Path) -> None:
    before = predict("llama-3.2-1b", **OPTIONS)
    probes = load_measured("h200-sxm")["probe_s"]  # type: ignore[index]
    path = folder / "h200-sxm.host.json"
    slower = 2 ** (1 / FOLLOWS)
    path.write_text(json.dumps(make_host(slower * probes["train"], slower * probes["forward"])))
    load_predictor.cache_clear()
    found = predict("llama-3.2-1b", **OPTIONS)
    assert found.host_s == pytest.approx(2 * before.host_s)
    assert found.device_s == before.device_s
    assert found.evidence["host_factor"]["train"] == pytest.approx(2)
    assert before.evidence["host_factor"] is None
    assert "host time is scaled to this machine's CPU: 2.00 × the calibrated host (2026-11-16)" in found.notes
    widths = [(each.step_time_s.mid - each.step_time_s.low) / each.step_time_s.mid for each in (before, found)]
    assert widths[0] - widths[1] == pytest.approx(0.4 - 0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema": 9}, "schema 9"), ({"probe_s": {}}, "train"), ({"provenance": {}}, "device_id")],
)
def test_a_damaged_file_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "h200-sxm.host.json").write_text(json.dumps({**make_host(0.01, 0.01), **change}))
    with pytest.raises(SpecError, match=message) as caught:
        load_host("h200-sxm")
    assert "calibrate --host" in str(caught.value)


def test_rounds_are_measured() -> None:
    pauses: list[int] = []
    found = measuring.measure_host(Bench("cpu"), rounds=3, repeats=1, pause=lambda: pauses.append(1))
    assert len(pauses) == 3
    for edges in found.values():
        assert 0 < edges["low_s"] <= edges["mid_s"] <= edges["high_s"]


def test_the_file_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = make_host(0.01, 0.02)["probe_s"]
    monkeypatch.setattr(measuring, "measure_host", lambda _: probe)
    monkeypatch.setattr(measuring, "describe_machine", lambda _: {"device": "NVIDIA H200", "device_id": "h200-sxm"})
    path = measuring.calibrate_host(device="cpu")
    assert path == str(folder / "h200-sxm.host.json")
    found = load_host("h200-sxm")
    assert found is not None
    assert found["probe_s"] == probe
    assert found["provenance"]["command"] == "flopcalc calibrate --host"
    monkeypatch.setattr(measuring, "describe_machine", lambda _: {"device": "GPU", "device_id": "gpu"})
    with pytest.raises(CalibrationError, match="GPU has no predictor"):
        measuring.calibrate_host(device="cpu")


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "has_gpu", lambda: False)
    with pytest.raises(DeviceError, match="needs an NVIDIA GPU"):
        measuring.calibrate_host()
    options = Namespace(suite="quick", tables="gemm", out=None, work=None, resume=False, fresh=False,
                        retry_failed=False, check=False, predictor=False, host=True)  # fmt: skip
    with pytest.raises(CalibrationError, match="--host measures the host alone"):
        run_command(options, "")
