"""The process runner: one bad row never touches another, everything resumes, nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcalc.measure import runner
from flopcalc.measure.runner import Job, Result, RunnerError, make_command_job, run_jobs

HERE = "test_runner"
Json = dict[str, Any]


# --- what the worker processes run --------------------------------------------------------------------------------
def start(args: Json) -> Callable[[Any], Any]:
    if args.get("broken"):
        raise ImportError("no such library")
    if "starts" in args:
        with open(args["starts"], "a") as file:
            file.write("start\n")
        if len(Path(args["starts"]).read_text().split()) <= args["bad_starts"]:
            end_start(args["end"])
    return lambda row: act(args, row)


def end_start(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "timeout":
        time.sleep(600)
    raise OSError("broken")


def act(args: Json, row: Json) -> Any:
    kind = row["do"]
    if "counter" in args:
        with open(args["counter"], "a") as file:
            file.write(f"{row.get('value', kind)}\n")
    if kind == "value":
        return {"value": row["value"], "process": os.getpid()}
    if kind == "raise":
        raise KeyError("not there")
    if kind == "row_error":
        raise runner.RowError("this row   cannot be measured")
    if kind == "oom":
        raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 90 GiB")
    if kind == "memory":
        raise MemoryError
    if kind == "device":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if kind == "kill":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        child = subprocess.Popen(["sleep", "600"])
        Path(args["child"]).write_text(str(child.pid))
        time.sleep(600)
    if kind == "slow":
        time.sleep(row["seconds"])
        return {"value": "slow"}
    raise AssertionError(kind)


def value(number: int) -> Json:
    return {"do": "value", "value": number}


def job(rows: dict[str, Json], name: str = "a", **kwargs: Any) -> Job:
    args = kwargs.pop("args", {})
    return Job(name, f"{HERE}:start", args, rows, **kwargs)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


# --- failures ------------------------------------------------------------------------------------------------------
def test_every_failure_is_a_row_and_the_others_survive(tmp_path: Path) -> None:
    rows = {"1": value(1), "2": {"do": "raise"}, "3": value(3), "4": {"do": "kill"}, "5": value(5), "6": {"do": "exit"},
            "7": {"do": "oom"}, "8": {"do": "memory"}, "9": {"do": "device"}, "10": value(10)}  # fmt: skip
    results = {r.row: r for r in run_jobs([job(rows)], str(tmp_path)).results}
    assert {row: (r.status, r.reason) for row, r in results.items()} == {
        "1": ("ok", None), "2": ("failed", "exception"), "3": ("ok", None), "4": ("failed", "killed"),
        "5": ("ok", None), "6": ("failed", "exit"), "7": ("failed", "oom"), "8": ("failed", "oom"),
        "9": ("failed", "exception"), "10": ("ok", None),
    }  # fmt: skip
    assert "KeyError: 'not there'" in str(results["2"].detail)
    assert "SIGKILL" in str(results["4"].detail)
    assert "last words" in str(results["4"].detail)
    # An exception leaves the process as it is; a death, or an error of the device itself, makes a new one.
    process = {row: r.data["process"] for row, r in results.items() if r.is_ok}
    assert process["1"] == process["3"]
    assert len(set(process.values())) == 3


def test_a_hang_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    args = {"child": str(tmp_path / "child")}
    rows = {"1": {"do": "hang"}, "2": value(2)}
    results = run_jobs([job(rows, args=args, timeout_s=1.5)], str(tmp_path / "run")).results
    assert [r.reason for r in results] == ["timeout", None]
    assert wait_gone(int((tmp_path / "child").read_text()))


def test_a_worker_that_cannot_start_fails_its_rows_only(tmp_path: Path) -> None:
    jobs = [job({"1": value(1), "2": value(2)}, args={"broken": True}), job({"3": value(3)}, "b")]
    results = run_jobs(jobs, str(tmp_path)).results
    assert [r.status for r in results] == ["failed", "failed", "ok"]
    assert "worker did not start: ImportError: no such library" in str(results[0].detail)


@pytest.mark.parametrize("end", ["killed", "exit", "timeout"])
def test_a_worker_that_dies_while_it_starts_is_started_once_more(tmp_path: Path, end: str) -> None:
    args = {"starts": str(tmp_path / "starts"), "bad_starts": 1, "end": end}
    limit = 3.0 if end == "timeout" else 60.0
    jobs = [job({"1": value(1), "2": value(2)}, args=args, start_timeout_s=limit)]
    assert [r.status for r in run_jobs(jobs, str(tmp_path / "run")).results] == ["ok", "ok"]
    assert len((tmp_path / "starts").read_text().split()) == 2


@pytest.mark.parametrize(("end", "starts"), [("killed", 2), ("exception", 1)])
def test_a_worker_that_never_starts_is_given_up(tmp_path: Path, end: str, starts: int) -> None:
    args = {"starts": str(tmp_path / "starts"), "bad_starts": 9, "end": end}
    results = run_jobs([job({"1": value(1), "2": value(2)}, args=args)], str(tmp_path / "run")).results
    assert [(r.status, r.reason) for r in results] == [("failed", end)] * 2
    assert ("did not start, tried twice: " in str(results[0].detail)) is (starts == 2)
    assert len((tmp_path / "starts").read_text().split()) == starts


def test_a_row_error_is_its_plain_message(tmp_path: Path) -> None:
    (result,) = run_jobs([job({"1": {"do": "row_error"}})], str(tmp_path)).results
    assert (result.reason, result.detail) == ("exception", "this row cannot be measured")
    assert "Traceback" not in (tmp_path / "logs" / "a.log").read_text()


def test_commands_give_their_last_json_line(tmp_path: Path) -> None:
    code = "print('noise'); print('{\"a\": 1}'); print('more noise')"
    jobs = [
        make_command_job("good", [sys.executable, "-c", code], 30),
        make_command_job("bad", [sys.executable, "-c", "raise SystemExit(4)"], 30),
        make_command_job("silent", [sys.executable, "-c", "pass"], 30),
    ]
    good, bad, silent = run_jobs(jobs, str(tmp_path)).results
    assert good.data == {"a": 1}
    assert str(bad.detail).startswith("command ended with code 4")
    assert str(silent.detail).startswith("command printed no JSON line")


# --- resume --------------------------------------------------------------------------------------------------------
def test_a_second_run_does_nothing_and_failed_rows_can_be_tried_again(tmp_path: Path) -> None:
    args = {"counter": str(tmp_path / "runs")}
    jobs = [job({"1": value(1), "2": {"do": "raise"}}, args=args)]
    folder = str(tmp_path / "run")
    first, second = run_jobs(jobs, folder), run_jobs(jobs, folder)
    assert (first.ran, second.ran) == (2, 0)
    assert (first.ran_jobs, second.ran_jobs) == ({"a"}, set())
    assert first.results == second.results
    assert run_jobs(jobs, folder, retry_failed=True).ran == 1
    assert (tmp_path / "runs").read_text().split() == ["1", "raise", "raise"]
    assert run_jobs(jobs, folder, fresh=True).ran == 2


def test_a_row_whose_question_changed_is_measured_again(tmp_path: Path) -> None:
    run_jobs([job({"1": value(1)})], str(tmp_path))
    again = run_jobs([job({"1": value(2)})], str(tmp_path))
    assert again.ran == 1
    assert again.results[0].data["value"] == 2


def test_other_settings_refuse_the_journal(tmp_path: Path) -> None:
    run_jobs([job({"1": value(1)})], str(tmp_path), identity={"torch": "2.11"})
    with pytest.raises(RunnerError, match=r"begun with torch = '2.11', now it is '2.13'.*--fresh"):
        run_jobs([job({"1": value(1)})], str(tmp_path), identity={"torch": "2.13"})


def test_a_line_cut_off_by_a_kill_is_run_again(tmp_path: Path) -> None:
    jobs = [job({"1": value(1), "2": value(2)})]
    run_jobs(jobs, str(tmp_path))
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    again = run_jobs(jobs, str(tmp_path))
    assert again.ran == 1
    assert [r.data["value"] for r in again.results] == [1, 2]
    assert len([json.loads(line) for line in journal.read_text().splitlines()]) == 3


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    run_jobs([job({"1": value(1)})], str(tmp_path))
    journal = tmp_path / "journal.jsonl"
    journal.write_text("{}\n" + journal.read_text())
    with pytest.raises(RunnerError, match=r"journal.jsonl: line 1 is damaged"):
        run_jobs([job({"1": value(1)})], str(tmp_path))


def test_a_full_disk_keeps_the_rows_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job({"1": value(1), "2": value(2), "3": value(3)})]
    append = runner.Journal.append
    sync = os.fsync
    failing = [False]

    def fsync(descriptor: int) -> None:
        if failing[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    def fail_second(journal: runner.Journal, result: Result) -> None:
        failing[0] = result.row == "2"
        append(journal, result)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(runner.Journal, "append", fail_second)
    with pytest.raises(RunnerError, match=r"disk full; the rows before it are kept"):
        run_jobs(jobs, str(tmp_path))
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert run_jobs(jobs, str(tmp_path)).ran == 2


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with (
        runner._lock(str(tmp_path)),
        pytest.raises(RunnerError, match=rf"in use by another run \(process {os.getpid()}\)"),
    ):
        run_jobs([job({"1": value(1)})], str(tmp_path))
    assert run_jobs([job({"1": value(1)})], str(tmp_path)).ran == 1


# --- the parent's own end ------------------------------------------------------------------------------------------
_PARENT = """
import sys
sys.path.insert(0, {here!r})
from flopcalc.measure.runner import Job, run_jobs
rows = {{str(i): {{"do": "slow", "seconds": {seconds}, "value": i}} for i in range(6)}}
out = run_jobs([Job("a", "test_runner:start", {{"counter": {counter!r}}}, rows)], {folder!r})
print(out.ran, out.stopped)
"""


def spawn_parent(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    code = _PARENT.format(
        here=str(Path(__file__).parent), counter=str(tmp_path / "runs"), folder=str(tmp_path / "run"), seconds=seconds
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "runs").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return parent


def find_workers(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in listed.split()]


def test_interrupt_stops_after_the_current_row(tmp_path: Path) -> None:
    parent = spawn_parent(tmp_path, 0.5)
    workers = find_workers(parent.pid)
    parent.send_signal(signal.SIGINT)
    out, err = parent.communicate(timeout=20)
    ran, stopped = out.split()
    assert stopped == "True"
    assert 1 <= int(ran) <= 2
    assert "stopping after the current row" in err
    assert all(wait_gone(worker) for worker in workers)
    # The row that ran was finished and is kept: the second run does the others alone.
    rows = {str(i): {"do": "slow", "seconds": 0.5, "value": i} for i in range(6)}
    again = run_jobs([Job("a", f"{HERE}:start", {"counter": str(tmp_path / "runs")}, rows)], str(tmp_path / "run"))
    assert again.ran == 6 - int(ran)
    assert not again.stopped
    assert sorted((tmp_path / "runs").read_text().split()) == [str(i) for i in range(6)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_no_orphan(tmp_path: Path, number: int) -> None:
    parent = spawn_parent(tmp_path, 60)
    workers = find_workers(parent.pid)
    assert workers
    parent.send_signal(number)
    parent.communicate(timeout=20)
    assert all(wait_gone(worker) for worker in workers)


def test_progress_says_rows_failures_and_time_left(tmp_path: Path) -> None:
    from io import StringIO

    stream = StringIO()
    progress = runner.Progress(stream, every_s=0.0)
    run_jobs([job({"1": value(1), "2": {"do": "raise"}})], str(tmp_path), progress=progress)
    lines = stream.getvalue().splitlines()
    assert "a: 2/2 rows, 1 failed" in lines[-1]
    assert lines[-1].endswith("0:00 left")


def test_the_time_left_is_that_of_rows_so_far_else_what_was_expected() -> None:
    rows = {str(i): value(i) for i in range(4)}
    jobs = [job(rows, "a", expected_s=40.0), job(rows, "b", expected_s=8.0), job(rows, "c")]

    def make_result(name: str, row: str, seconds: float) -> Result:
        return Result(name, row, "", "ok", None, None, None, seconds)

    progress = runner.Progress(None)
    progress.begin(jobs, {("b", "0"): make_result("b", "0", 100.0)})
    # Nothing ran yet: four rows of 10 s and three of 2 s; nothing is known of c.
    assert progress.estimate_left_s() == pytest.approx(46.0)
    progress.note(make_result("a", "0", 3.0))
    # Three rows of a like its first, three of b as expected, four of c like all rows so far.
    assert progress.estimate_left_s() == pytest.approx(3 * 3 + 3 * 2 + 4 * 3)
    progress.note(make_result("a", "1", 5.0))
    assert progress.estimate_left_s() == pytest.approx(2 * 4 + 3 * 2 + 4 * 4)
    for row in "23":
        progress.note(make_result("a", row, 4.0))
    assert progress.estimate_left_s() == pytest.approx(3 * 2 + 4 * 4)
