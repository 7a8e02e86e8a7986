"""`calibrate` on the CPU: the real code path at tiny sizes, and a table of known rows for resume and check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import calibrate_stand_in
import pytest
from formats import settle_bf16
from places import HELPERS

from flopcalc.base.errors import CalibrationError, DeviceError
from flopcalc.cli import main
from flopcalc.hardware import tables as calibration
from flopcalc.hardware.tables import TableShape, load_table
from flopcalc.measure.calibrate import probe
from flopcalc.measure.calibrate import run as module
from flopcalc.measure.calibrate.run import calibrate, check
from flopcalc.measure.jobs.runner import RunnerError

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

Json = dict[str, Any]
ABOUT = {"device": "fake", "device_id": "cpu", "date": "2026-11-15", "torch": "1", "command": "flopcalc calibrate"}
MACHINE = {"device": "fake", "device_id": "cpu", "torch": "1"}


# --- a table of known rows ------------------------------------------------------------------------------------------
@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only the fake table, no GPU and no torch process."""
    monkeypatch.syspath_prepend(str(HELPERS))
    monkeypatch.setenv("FAKE_TABLE", str(tmp_path))
    monkeypatch.setenv("FAKE_RUNNER", str(os.getpid()))
    monkeypatch.setattr(module, "probe_machine", lambda *_: dict(MACHINE))
    monkeypatch.setitem(module.TABLES, "fake", calibrate_stand_in.plan)
    monkeypatch.setitem(calibration.SHAPES, "fake", TableShape(("name", "n"), ("seconds",), ("count",)))
    return tmp_path


def read(path: str) -> list[tuple[Any, ...]]:
    return list(load_table(path).rows)


@pytest.mark.heavy
def test_a_resumed_run_equals_an_uninterrupted_one(fake: Path) -> None:
    whole = calibrate("test", str(fake / "whole"), tables=["fake"])
    (fake / "stop-a2").touch()
    cut = calibrate("test", str(fake / "cut"), tables=["fake"])
    assert cut.stopped
    assert cut.files == {}
    assert 0 < cut.ran < 10
    rest = calibrate("test", str(fake / "cut"), tables=["fake"])
    assert rest.ran == 10 - cut.ran
    assert read(rest.files["fake"]) == read(whole.files["fake"])
    assert calibrate("test", str(fake / "cut"), tables=["fake"]).ran == 0
    assert calibrate("test", str(fake / "cut"), tables=["fake"], fresh=True).ran == 10


def test_a_killed_row_is_a_failure_with_its_parameters(fake: Path) -> None:
    (fake / "kill-a3").touch()
    written = calibrate("test", str(fake / "out"), tables=["fake"])
    table = load_table(written.files["fake"])
    assert len(table.rows) == 9
    (failure,) = table.failures
    assert (failure["row"], failure["reason"], failure["n"]) == ("n3", "killed", 3)
    (fake / "kill-a3").unlink()
    again = calibrate("test", str(fake / "out"), tables=["fake"], retry_failed=True)
    assert (again.ran, again.rows["fake"], again.failures["fake"]) == (1, 10, 0)


def test_provenance_says_where_and_how(fake: Path) -> None:
    written = calibrate("test", str(fake / "out"), tables=["fake"], command="flopcalc calibrate --suite test")
    about = load_table(written.files["fake"]).provenance
    assert about["command"] == "flopcalc calibrate --suite test"
    assert about["suite"] == "test"
    assert {"date", "statistic", "repeats", "device", "device_id"} <= about.keys()


def test_other_versions_refuse_to_resume(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate("test", str(fake / "out"), tables=["fake"])
    for name, value in {"torch": "2", "commit": "abc", "power_limit_w": 500.0}.items():
        monkeypatch.setattr(module, "probe_machine", lambda *_, name=name, value=value: {**MACHINE, name: value})
        with pytest.raises(RunnerError, match=f"begun with {name} = "):
            calibrate("test", str(fake / "out"), tables=["fake"])


def test_a_run_that_measures_nothing_leaves_the_table_as_it_is(fake: Path) -> None:
    (fake / "kill-b1").touch()
    out = str(fake / "out")
    first = calibrate("test", out, tables=["fake"], command="first")
    path = Path(first.files["fake"])
    before = path.read_bytes()
    again = calibrate("test", out, tables=["fake"], command="second")
    assert (again.ran, again.files, again.rows, again.failures) == (0, first.files, {"fake": 9}, {"fake": 1})
    assert path.read_bytes() == before
    (fake / "kill-b1").unlink()
    calibrate("test", out, tables=["fake"], command="third", retry_failed=True)
    assert load_table(str(path)).provenance["command"] == "third"
    # A file that is gone, or holds other rows (the run was killed before it wrote), is written from the journal.
    whole = read(str(path))
    path.unlink()
    calibrate("test", out, tables=["fake"])
    assert read(str(path)) == whole
    path.write_bytes(before)
    assert calibrate("test", out, tables=["fake"]).ran == 0
    assert read(str(path)) == whole


@pytest.mark.heavy
def run_command(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_table_without_a_row_is_not_written(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(fake / "out")
    words = ["--suite", "test", "--out", out, "--tables", "fake"]
    (fake / "raise").touch()
    assert run_command(words) == 1
    path = Path(out, "cpu", "fake.json")
    assert not path.exists()  # it would stand before a shipped one
    (fake / "raise").unlink()
    assert run_command([*words, "--retry-failed"]) == 0
    before = path.read_bytes()
    (fake / "raise").touch()
    capsys.readouterr()
    assert run_command([*words, "--fresh"]) == 1
    shown = capsys.readouterr()
    assert "fake: no row was measured (10 failed), so it was not written" in shown.err
    assert shown.out == ""
    assert path.read_bytes() == before


@pytest.mark.heavy
def test_check_holds_or_says_what_does_not(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(fake / "out")
    calibrate("test", out, tables=["fake"])
    found = check(out, "test", tables=["fake"])
    assert found.differences == []
    assert found.rows == {"fake": 6}
    assert run_command(["--suite", "test", "--out", out, "--tables", "fake", "--check"]) == 0
    (fake / "slower").touch()
    assert {d.column for d in check(out, "test", tables=["fake"]).differences} == {"seconds"}
    (fake / "slower").unlink()
    (fake / "more").touch()
    assert {d.column for d in check(out, "test", tables=["fake"]).differences} == {"count"}
    assert run_command(["--suite", "test", "--out", out, "--tables", "fake", "--check"]) == 1
    assert "DOES NOT HOLD" in capsys.readouterr().out
    (fake / "more").unlink()
    (fake / "kill-a1").touch()
    assert {d.column for d in check(out, "test", tables=["fake"]).differences} == {"status"}
    with pytest.raises(CalibrationError, match="no stored tables"):
        check(str(fake / "nothing"), "test", tables=["fake"])


# --- the command ----------------------------------------------------------------------------------------------------
def test_without_a_gpu_it_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    assert run_command(["--suite", "quick", "--out", str(tmp_path)]) == 2
    assert run_command(["--check", "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.err == "flopcalc: calibrate needs an NVIDIA GPU and found none on this machine\n" * 2
    assert os.listdir(tmp_path) == []


def test_a_probe_that_is_interrupted_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_jobs: Any, folder: str, **_options: Any) -> None:
        os.makedirs(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "run_jobs", interrupt)
    assert run_command(["--suite", "test", "--work", str(tmp_path), "--out", str(tmp_path / "out")]) == 130
    assert os.listdir(tmp_path) == []


def test_wrong_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--suite", "slow", "--out", str(tmp_path)]) == 2
    assert run_command(["--suite", "test", "--tables", "gem", "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "Did you mean gemm" in lines[1]


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    with pytest.raises(DeviceError):
        calibrate("quick", "/nowhere")


def test_plans_are_torch_free_and_their_rows_json() -> None:
    code = (
        "import sys, json\nfrom flopcalc.measure.calibrate.run import TABLES, plan_table\n"
        "print(json.dumps({s: {t: sum(len(j.rows) for j in plan_table(t, s)) for t in TABLES} for s in "
        "('quick', 'full', 'test')}))\nassert 'torch' not in sys.modules and 'click' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    assert all(sizes["full"][table] >= sizes["quick"][table] > 0 for table in sizes["quick"])
    assert sizes["quick"]["gemm"] > 450


# --- the real tables at tiny sizes ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, calibration.MeasuredTable]:
    """The test suite's tables, each row run in this process."""
    settle_bf16()
    out = tmp_path_factory.mktemp("tables")
    found = {}
    for table in module.TABLES:
        if table in ("counts", "steps"):
            jobs = [job for job in module.plan_table(table, "test") if job.id.endswith(("llama", "qwen2_5_vl"))]
        else:
            jobs = module.plan_table(table, "test")
        records: list[Json] = []
        for job in jobs:
            name, _, function = job.call.partition(":")
            run = getattr(sys.modules[name] if name in sys.modules else __import__(name), function)(job.args)
            for row in job.rows.values():
                data = run(json.loads(json.dumps(row)))
                records += data if isinstance(data, list) else [data]
        records = module.finish_table(table, json.loads(json.dumps(records)))
        found[table] = load_table(calibration.save_table(str(out), table, ABOUT, records))
    return found


@pytest.mark.heavy
def test_every_record_fills_its_tables_keys(measured: dict[str, calibration.MeasuredTable]) -> None:
    for name, table in measured.items():
        keys = [tuple(record[key] for key in calibration.SHAPES[name].keys) for record in table.records()]
        assert keys, name
        assert len(set(keys)) == len(keys), name
        assert all(None not in key for key in keys), name


@pytest.mark.heavy
def test_counts_agree_with_the_counter_where_attention_is_eager(measured: dict[str, calibration.MeasuredTable]) -> None:
    rows = measured["counts"].select(kernel="eager")
    assert {row["recompute"] for row in rows} == {"none", "full"}
    assert all(row["flop_counter"] == row["analytic_hardware"] for row in rows)
    assert all(row["profiler"] is not None for row in rows)
    assert all(row["executed"] is None for row in rows)  # no counter on a CPU: null, never a guess


@pytest.mark.heavy
def test_padding_rows_sum_to_the_step(measured: dict[str, calibration.MeasuredTable]) -> None:
    for family in ("llama", "qwen2_5_vl"):
        (step,) = measured["counts"].select(family=family, kernel="eager", recompute="none")
        rows = measured["padding"].select(family=family)
        kept = [row for row in rows if row["kernel"] in ("", "eager")]
        # Eager code multiplies all pairs: a causal call's needed half becomes a whole.
        length = step["seq"]
        total = sum(
            row["needed_flops"] * row["calls"] * (2 * length if row["shape"].startswith("causal") else length + 1)
            for row in kept
        )
        assert total == step["analytic_hardware"] * (length + 1)


@pytest.mark.heavy
def test_memory_factors_are_relative_to_a_copy(measured: dict[str, calibration.MeasuredTable]) -> None:
    table = measured["memory"]
    assert table.select(op="copy")[0]["factor"] == pytest.approx(1.0, rel=1e-3)
    assert table.select(op="hf_rms_norm", direction="backward")[0]["factor"] > 0
    assert {"launch_queued", "launch_graph", "host_per_op"} <= {row["op"] for row in table.records()}


@pytest.mark.heavy
def test_a_worker_process_measures_the_same_table(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    command = [sys.executable, "-m", "flopcalc", "calibrate", "--suite", "test", "--out", out]
    command += ["--work", str(tmp_path / "work"), "--tables", "gemm,attention"]
    subprocess.run(command, check=True)
    assert sorted(os.listdir(os.path.join(out, "cpu"))) == ["attention.json", "gemm.json"]
    assert os.listdir(out) == ["cpu"]
    table = load_table(os.path.join(out, "cpu", "gemm.json"))
    assert table.provenance["device_id"] == "cpu"
    assert {row["mode"] for row in table.records()} == {"burst", "sustained"}
