"""The benchmark of predictions: the committed report is what the committed measurements and this predictor give."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "prediction-accuracy.md"
RECORD = ROOT / "lab" / "blind" / "README.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predict_error", ROOT / "benchmarks" / "predict_error.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.heavy
def test_the_report_is_what_comes_out(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    shown = script.report(RESULTS / "predict_cases.json", out)
    assert shown in RECORD.read_text(encoding="utf-8")
    for page in (PAGE, ROOT / "docs" / "prediction.md"):
        assert shown.partition("\n\n")[0] in page.read_text(encoding="utf-8")
    assert json.loads(out.read_text()) == json.loads((RESULTS / "predict_error.json").read_text())


def test_the_calibration_measured_no_test_model(script: Any) -> None:
    from flopcalc.measure.predictor.runs import MODELS, NARROW

    fitted = {preset for preset, *_ in MODELS.values()} | set(NARROW)
    assert not {preset for preset, *_ in script.TEST.values()} & fitted
    measured = script._read(RESULTS / "predict_profiles.json.gz")
    seen = {case["model"].partition("-narrow-")[0] for case in measured["cases"] if "model" in case}
    later = {"deepseek-v2-lite", "olmo-3-7b", "granite-3.0-3b-a800m"}  # recorded after this calibration
    assert seen == (set(MODELS) | set(NARROW)) - later
    assert measured["failures"] == []


def test_every_test_case_was_measured_and_is_shown(script: Any) -> None:
    from flopcalc.measure.predictor.runs import name_case

    def name(case: Any) -> tuple[str, bool]:
        return name_case(case), case.get("is_host", case.get("clock") == "probe")

    planned = {
        (name_case(case), is_host)
        for model in script.TEST
        for is_host, cases in ((False, script.list_test_cases(model)), (True, script.list_host_cases(model)))
        for case in cases
    }
    kept = json.loads((RESULTS / "predict_cases.json").read_text())
    assert kept["failures"] == []
    assert {name(case) for case in kept["cases"] if not case["is_again"]} == planned
    done = sorted(script._identify(case) for case in kept["cases"] if not case["is_again"])
    rounds = [
        script._identify({**case, "is_host": is_host, "round": i, "is_again": False})
        for model in script.TEST
        for case, is_host, i in script.list_rounds(model)
    ]
    assert done == sorted(rounds)
    for file in ("predict_error.json", "predict_error_blind.json"):
        shown = [name(case) for case in json.loads((RESULTS / file).read_text())["cases"]]
        assert set(shown) == planned
        assert len(shown) == len(planned)


@pytest.mark.heavy
def test_a_refit_is_as_right_as_the_predictor_that_ships(script: Any, tmp_path: Path) -> None:
    """Most of the shipped file was fitted by earlier code, before its test; a fit of the same records is as good."""
    made, out = tmp_path / "h200-sxm.json", tmp_path / "report.json"
    script.fit(RESULTS / "predict_profiles.json.gz", made)
    fitted = json.loads(made.read_text())
    shipped = json.loads((ROOT / "model_specs" / "predictors" / "h200-sxm.json").read_text())
    assert fitted.keys() == shipped.keys()
    for name in ("schema", "provenance", "probe_s", "error"):
        assert fitted[name] == shipped[name], name
    script.report(RESULTS / "predict_cases.json", out, made)
    found, expected = (
        {row["name"]: row for row in json.loads(path.read_text())["summary"]}
        for path in (out, RESULTS / "predict_error.json")
    )
    for name, row in expected.items():
        assert found[name]["cases"] == row["cases"]
        for key in ("median", "worst"):
            assert found[name][key] == pytest.approx(row[key], abs=0.004), (name, key)
        assert found[name].get("inside") == row.get("inside")


def test_suite_quick_is_picked_out_of_a_full_calibration(script: Any) -> None:
    """Every row of quick, once, and all single calls; not the operators that full times one by one."""
    from flopcalc.measure.predictor import runs

    found = script.pick_quick(script._read(RESULTS / "predict_profiles.json.gz")["cases"])
    later = (
        "calls/memory",
        "calls/adapters",
    )  # timed by benchmarks/single_calls.py, after that calibration, as watts were
    asked = [
        name for job in runs.plan("quick") for name in job.rows if name not in later and not name.startswith("power/")
    ]
    steps = [("host/" if case["is_host"] else "") + runs.name_case(case) for case in found if "model" in case]
    assert len(found) == len(asked)
    assert sorted(steps) == sorted(name for name in asked if not name.startswith("calls/"))
    assert not any("units" in case for case in found)


def _fold(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


def test_the_page_tells_the_blind_result() -> None:
    """What came out before anybody had seen a test case: the figures that count."""
    kept = json.loads((RESULTS / "predict_error_blind.json").read_text())
    summary = {row["name"]: row for row in kept["summary"]}
    assert {"device-bound steps", "host-bound steps", "all steps", "peak memory"} <= set(summary)
    device, host, every, memory = (
        summary[name] for name in ("device-bound steps", "host-bound steps", "all steps", "peak memory")
    )
    assert (
        f"device-bound {device['cases']} cases, {100 * device['median']:.1f} % median and {100 * device['worst']:.1f} "
        f"% worst, {100 * device['inside']:.0f} % inside; host-bound {host['cases']} cases, "
        f"{100 * host['median']:.1f} % and {100 * host['worst']:.1f} %, {100 * host['inside']:.0f} % inside; "
        f"memory {100 * memory['median']:.1f} % and {100 * memory['worst']:.1f} %; {100 * every['inside']:.1f} % of "
        f"all inside at a mean width of {100 * every['width']:.1f} %"
    ) in _fold(PAGE)
    assert (
        f"with {every['cases']} steps of models and shapes that no fit had seen. GPU-bound steps: "
        f"{100 * device['median']:.1f} % median error, {100 * device['worst']:.1f} % worst. CPU-bound steps: "
        f"{100 * host['median']:.1f} % median error, {100 * host['worst']:.1f} % worst."
    ) in _fold(ROOT / "README.md")
    outside = sum(not case["is_inside"] for case in kept["cases"])
    assert f"{outside} of {every['cases']} cases lie outside their interval" in _fold(PAGE)


def test_the_page_says_what_the_predictor_has_seen_since(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """It is fitted on nothing of the test; that it is the one which was tested is said as long as it is true."""
    from flopcalc.measure.predictor.fit import predictor

    taken: list[Any] = []
    monkeypatch.setattr(predictor, "fit_predictor", lambda records, *_: taken.extend(records) or {})
    script.fit(RESULTS / "predict_profiles.json.gz", tmp_path / "x.json")
    assert taken
    assert not [case for case in taken if case.get("model") in script.TEST]
    blind, now = (
        json.loads((RESULTS / name).read_text()) for name in ("predict_error_blind.json", "predict_error.json")
    )
    assert ("the predictor that ships is the one that was tested" in _fold(PAGE)) is (blind == now)


def test_the_blind_report_is_of_the_same_measurements() -> None:
    blind, now = (
        json.loads((RESULTS / name).read_text()) for name in ("predict_error_blind.json", "predict_error.json")
    )
    for key in ("model", "phase", "batch", "seq", "context", "recompute", "clock", "measured_s", "memory_bytes"):
        assert [case[key] for case in blind["cases"]] == [case[key] for case in now["cases"]], key
    assert blind["provenance"] == now["provenance"]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_calibration_is_kept(script: Any, tmp_path: Path, is_whole: bool) -> None:
    lines: list[Any] = [
        {"run": {"device_id": "h200-sxm"}},
        {"job": "runs", "row": "a/train/1x48", "status": "ok", "detail": None, "data": {"model": "a", "seconds": 0.1}},
        {"job": "runs", "row": "host/units", "status": "ok", "detail": None, "data": {"units": {"view": 0.4}}},
    ]
    if not is_whole:
        lines.insert(2, {"job": "runs", "row": "b/train/1x48", "status": "failed", "detail": "out of memory"})
    journal, predictor = tmp_path / "journal.jsonl", tmp_path / "h200-sxm.json"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    predictor.write_text(json.dumps({"schema": 2, "provenance": {"device_id": "h200-sxm", "torch": "2"}, "moved": {}}))
    outs = [tmp_path / "one.json.gz", tmp_path / "two.json.gz"]
    for out in outs:
        script.keep(journal, predictor, out)
    assert script._read(outs[0]) == {
        "provenance": {"device_id": "h200-sxm", "torch": "2"},
        "cases": [{"model": "a", "seconds": 0.1}, {"units": {"view": 0.4}}],
        "failures": [] if is_whole else [{"case": "b/train/1x48", "reason": "out of memory"}],
    }
    assert outs[0].read_bytes() == outs[1].read_bytes()  # no time stamp inside


def _fake_runner(ran: list[str], stop_at: int) -> type:
    from flopcalc.measure.predictor.runs import name_case

    class Runner:
        def __init__(self, *_: Any) -> None: ...

        def measure(self, case: dict[str, Any], _: int = 0) -> dict[str, Any]:
            if len(ran) == stop_at:
                raise KeyboardInterrupt
            ran.append(name_case(case))
            if ran[-1].startswith("phi-1.5/decode") and len(ran) < 10:
                raise RuntimeError("out of memory")
            return {**case, "seconds": 0.1}

        measure_host = measure

        def drop(self) -> None: ...

    return Runner


def test_a_stopped_measurement_goes_on(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case once, what failed or had no time once more; never with another machine's."""
    from flopcalc.measure.calibrate import provenance
    from flopcalc.measure.predictor import runs

    out = tmp_path / "cases.json"
    monkeypatch.setattr(script, "TEST", {name: script.TEST[name] for name in ("phi-1.5", "cerebras-gpt-590m")})
    monkeypatch.setattr(script, "_REPEATED", ("cerebras-gpt-590m",))
    monkeypatch.setattr(provenance, "describe_machine", lambda _: {"device": "a"})
    planned = [runs.name_case(case) for model in script.TEST for case, *_ in script.list_rounds(model)]
    again = [runs.name_case(case) for case in script.list_host_cases("cerebras-gpt-590m")]
    assert len(planned) == 3 * 2 * len(again)
    ran: list[str] = []
    monkeypatch.setattr(runs, "Runner", _fake_runner(ran, 8))
    with pytest.raises(KeyboardInterrupt):
        script.measure(out, 60, "cpu")
    assert ran == planned[:8]
    monkeypatch.setattr(runs, "Runner", _fake_runner(ran, -1))
    script.measure(out, -1, "cpu")  # no time at all
    kept = json.loads(out.read_text())
    assert len(kept["cases"]) == 7
    assert {each["reason"] for each in kept["failures"]} == {"no time was left"}
    script.measure(out, 60, "cpu")
    failed = next(name for name in planned if name.startswith("phi-1.5/decode"))
    assert ran == [*planned[:8], failed, *planned[8:], *again]
    kept = json.loads(out.read_text())
    assert [each["case"] for each in kept["failures"]] == [failed]
    script.measure(out, 60, "cpu")
    kept = json.loads(out.read_text())
    assert kept["failures"] == []
    assert [case["is_again"] for case in kept["cases"]].count(True) == len(again)
    assert len(kept["cases"]) == len(planned) + len(again)
    monkeypatch.setattr(provenance, "describe_machine", lambda _: {"device": "b"})
    with pytest.raises(SystemExit, match="another machine"):
        script.measure(out, 60, "cpu")


@pytest.mark.parametrize(
    ("seconds", "middle"), [((0.3,), 0.3), ((0.3, 0.2), 0.2), ((0.3, 0.1, 0.2), 0.2), ((0.9, 0.2, 0.3), 0.3)]
)
@pytest.mark.parametrize("is_host", [True, False])
def test_the_middle_round_counts(script: Any, is_host: bool, seconds: tuple[float, ...], middle: float) -> None:
    """Of small steps by their ratio to the probe, of others by their seconds; repetitions are no rounds."""
    from flopcalc.measure.predictor.runs import make_case

    def measured(taken: float, i: int, is_again: bool) -> dict[str, Any]:
        kept = {"ratio": taken, "seconds": 1 / taken} if is_host else {"ratio": 1 / taken, "seconds": taken}
        marks = {"is_host": is_host, "round": i, "is_again": is_again}
        return {**make_case("yi-6b", "prefill", 1, 104), **kept, **marks}

    rounds = [measured(taken, i, False) for i, taken in enumerate(seconds)]
    cases = [*rounds, measured(2 * middle, 0, True)]
    found = script.join_rounds(cases)
    assert [each["round"] for each in found] == [seconds.index(middle)]
    assert script._list_repeated(cases) == [pytest.approx(1.0)]


def test_small_steps_are_measured_in_rounds(script: Any) -> None:
    for model in script.TEST:
        rounds = list(script.list_rounds(model))
        assert [case for case, is_host, _ in rounds if not is_host] == list(script.list_test_cases(model))
        for i in range(3):
            assert [case for case, is_host, j in rounds if is_host and i == j] == list(script.list_host_cases(model))


def test_a_report_leaves_the_surroundings_as_they_were(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopcalc.prediction.kernels.constants import load_predictor

    for before in (None, "a folder of my own"):
        if before is not None:
            monkeypatch.setenv("FLOPCALC_DATA", before)
        else:
            monkeypatch.delenv("FLOPCALC_DATA", raising=False)
        with script.calibrated_here() as constants:
            assert constants["is_own"]
        assert os.environ.get("FLOPCALC_DATA") == before
        shipped = load_predictor("h200-sxm")
        assert shipped is not None
        assert not shipped["is_own"]
