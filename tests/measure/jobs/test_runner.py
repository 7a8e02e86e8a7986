"""The runner: one bad row never touches another, what is in the journal is not run again, errors are one line."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import runner_jobs
from impatient import Impatient

from flopcalc.measure.jobs.job import Job, Result, RunnerError, make_failure
from flopcalc.measure.jobs.launchers import LauncherError, Local, Remote
from flopcalc.measure.jobs.runner import Progress, run_jobs

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runner_jobs.HERE)


def value(number: int) -> Json:
    return {"do": "value", "value": number}


def make_job(rows: dict[str, Json], name: str = "a", **options: Any) -> Job:
    return Job(name, runner_jobs.CALL, options.pop("args", {}), rows, **options)


ONE = {"1": value(1)}


# --- failures -------------------------------------------------------------------------------------------------------
def test_every_failure_is_a_row_and_the_others_survive(tmp_path: Path) -> None:
    rows = {"1": value(1), "2": {"do": "raise"}, "3": value(3), "4": {"do": "kill"}, "5": value(5),
            "6": {"do": "device_memory"}, "7": {"do": "device"}, "8": value(8)}  # fmt: skip
    results = {r.row: r for r in run_jobs([make_job(rows)], str(tmp_path)).results}
    assert {row: (r.status, r.reason) for row, r in results.items()} == {
        "1": ("ok", None), "2": ("failed", "exception"), "3": ("ok", None), "4": ("failed", "killed"),
        "5": ("ok", None), "6": ("failed", "oom"), "7": ("failed", "exception"), "8": ("ok", None),
    }  # fmt: skip
    assert "KeyError: 'not there'" in str(results["2"].detail)
    # An exception leaves the process as it is; a death, or an error of the device itself, makes a new one.
    process = {row: r.data["process"] for row, r in results.items() if r.is_ok}
    assert process["1"] == process["3"]
    assert len(set(process.values())) == 3


@pytest.mark.parametrize(
    ("end", "bad_starts", "reason", "detail", "starts"),
    [
        ("kill", 1, None, "None", 2),
        ("hang", 1, None, "None", 2),
        ("kill", 9, "killed", "worker did not start, tried twice: process ended by SIGKILL", 2),
        ("raise", 9, "exception", "worker did not start: KeyError: 'not there'", 1),
    ],
)
def test_a_worker_that_dies_while_it_starts_is_started_once_more(
    tmp_path: Path, end: str, bad_starts: int, reason: str | None, detail: str, starts: int
) -> None:
    args: Json = {"starts": str(tmp_path / "starts"), "bad_starts": bad_starts, "end": end}

    jobs = [make_job({"1": value(1), "2": value(2)}, args=args), make_job(ONE, "b")]
    launcher = Impatient(tmp_path / "starts") if end == "hang" else None
    *mine, other = run_jobs(jobs, str(tmp_path / "run"), launcher=launcher).results
    assert [r.reason for r in mine] == [reason, reason]
    assert str(mine[1].detail).startswith(detail)
    assert (tmp_path / "starts").read_text() == "start\n" * starts
    assert other.is_ok


def test_a_row_error_is_its_plain_message(tmp_path: Path) -> None:
    (result,) = run_jobs([make_job({"1": {"do": "row_error"}})], str(tmp_path)).results
    assert (result.reason, result.detail) == ("exception", "this row cannot be measured")
    assert "Traceback" not in (tmp_path / "logs" / "a.log").read_text()


def test_a_function_that_does_not_exist(tmp_path: Path) -> None:
    (result,) = run_jobs([Job("a", "runner_jobs:nothing", {}, ONE)], str(tmp_path)).results
    detail = "worker did not start: AttributeError: module 'runner_jobs' has no attribute 'nothing'"
    assert str(result.detail).startswith(detail)


# --- resume ---------------------------------------------------------------------------------------------------------
def test_a_second_run_does_nothing_and_failed_rows_can_be_tried_again(tmp_path: Path) -> None:
    args = {"begun": str(tmp_path / "begun")}
    jobs = [make_job({"1": value(1), "2": {"do": "raise"}}, args=args)]
    folder = str(tmp_path / "run")
    first, second = run_jobs(jobs, folder), run_jobs(jobs, folder)
    assert (first.ran, second.ran) == (2, 0)
    assert (first.ran_jobs, second.ran_jobs) == ({"a"}, set())
    assert first.results == second.results
    assert run_jobs(jobs, folder, retry_failed=True).ran == 1
    assert (tmp_path / "begun").read_text().split() == ["1", "raise", "raise"]
    assert run_jobs(jobs, folder, fresh=True).ran == 2


def test_a_result_is_kept_before_the_next_row_begins(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    seen: list[tuple[int, int]] = []

    def look(_result: Result) -> None:
        seen.append((len(begun.read_text().split()), len((tmp_path / "run/journal.jsonl").read_text().splitlines())))

    rows = {str(i): value(i) for i in range(3)}
    run_jobs([make_job(rows, args={"begun": str(begun)})], str(tmp_path / "run"), on_result=look)
    assert seen == [(1, 2), (2, 3), (3, 4)]  # the journal has a first line of its own


def test_the_journal_of_an_older_version_is_read(tmp_path: Path) -> None:
    """Written by flopcalc 0.1: the format must not change."""
    line = {"job": "a", "row": "1", "key": "37962937e1c99eca", "status": "ok", "reason": None, "detail": None,
            "data": {"value": 1, "process": 77}, "seconds": 0.25}  # fmt: skip
    (tmp_path / "journal.jsonl").write_text(f'{{"run": {{"torch": "2.11"}}}}\n{json.dumps(line)}\n')
    outcome = run_jobs([make_job(ONE)], str(tmp_path), identity={"torch": "2.11"})
    assert (outcome.ran, outcome.results) == (0, (Result(**line),))


def test_a_function_that_moved_keeps_its_keys() -> None:
    job = Job("a", "flopcalc.measure.tables.gemm:start", {"n": 1}, ONE)
    assert job._replace(call="flopcalc.measure.calibrate.tables.gemm:start").key("1") == job.key("1")
    assert job._replace(call="flopcalc.measure.calibrate.tables.memory:start").key("1") != job.key("1")
    runs = job._replace(call="flopcalc.measure.tables.runs:start")
    assert runs._replace(call="flopcalc.measure.predictor.runs:start").key("1") == runs.key("1")


def test_a_row_whose_question_changed_is_measured_again(tmp_path: Path) -> None:
    where = {"begun": str(tmp_path / "begun")}
    first = make_job(ONE, where=where)
    assert [run_jobs([first], str(tmp_path / "run")).ran for _ in range(2)] == [1, 0]
    assert (tmp_path / "begun").read_text() == "1\n"
    # Where it writes is no part of the question.
    assert run_jobs([first._replace(where={})], str(tmp_path / "run")).ran == 0
    again = run_jobs([make_job({"1": value(2)})], str(tmp_path / "run"))
    assert (again.ran, again.results[0].data["value"]) == (1, 2)


def test_other_settings_refuse_a_journal_with_results(tmp_path: Path) -> None:
    run_jobs([], str(tmp_path), identity={"torch": "2.10"})
    run_jobs([make_job(ONE)], str(tmp_path), identity={"torch": "2.11"})
    with pytest.raises(RunnerError, match=r"begun with torch = '2.11', now it is '2.13'.*fresh"):
        run_jobs([make_job(ONE)], str(tmp_path), identity={"torch": "2.13"})


def test_a_line_cut_off_by_a_kill_is_run_again(tmp_path: Path) -> None:
    jobs = [make_job({"1": value(1), "2": value(2)})]
    run_jobs(jobs, str(tmp_path))
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = run_jobs(jobs, str(tmp_path))
    assert (again.ran, [r.data["value"] for r in again.results]) == (1, [1, 2])
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    run_jobs([make_job(ONE)], str(tmp_path))
    path = tmp_path / "journal.jsonl"
    lines = path.read_text()
    for first in ("{}", "[]", '{"run": 5}', "\0"):
        path.write_text(f"{first}\n{lines}")
        with pytest.raises(RunnerError, match=r"journal.jsonl: line 1 is damaged .* run with fresh"):
            run_jobs([make_job(ONE)], str(tmp_path))


# --- disks and folders ----------------------------------------------------------------------------------------------
KEPT = "make room or choose another folder, and run again: what was done is kept"


def test_a_full_disk_keeps_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [make_job({"1": value(1), "2": value(2), "3": value(3)})]
    sync = os.fsync
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunnerError) as caught:
        run_jobs(jobs, str(tmp_path))
    assert str(caught.value) == f"{tmp_path}: disk full; {KEPT}"
    assert run_jobs(jobs, str(tmp_path)).ran == 1  # the second row is in the file, though perhaps not on the disk


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "locked/lock").mkdir(parents=True)
    for folder, message in (
        ("file", "file: File exists"),
        ("file/below", "file/below: Not a directory"),
        ("locked", "locked/lock: Is a directory"),
    ):
        with pytest.raises(RunnerError) as caught:
            run_jobs([make_job(ONE)], str(tmp_path / folder))
        assert str(caught.value) == f"{tmp_path}/{message}; {KEPT}"
    with pytest.raises(RunnerError, match="file/logs: Not a directory; make room or choose"):
        run_jobs([make_job(ONE)], str(tmp_path / "good"), logs=str(tmp_path / "file/logs"))


def test_a_log_that_cannot_be_opened_stops_the_run_in_words(tmp_path: Path) -> None:
    (tmp_path / "logs" / "b.log").mkdir(parents=True)
    jobs = [make_job(ONE), make_job(ONE, "b")]
    with pytest.raises(RunnerError, match=rf"logs/b.log: Is a directory; {KEPT}"):
        run_jobs(jobs, str(tmp_path))
    (tmp_path / "logs" / "b.log").rmdir()
    assert run_jobs(jobs, str(tmp_path)).ran_jobs == {"b"}


def test_an_error_of_one_job_loses_no_result_of_another(tmp_path: Path) -> None:
    class Fragile(Local):
        """The second job breaks the run in the moment in which the first one has a result."""

        def wait(self, timeout_s: float) -> Any:
            for result in super().wait(timeout_s):
                yield result
                raise LauncherError("broken")

    jobs = [make_job(ONE), make_job(ONE, "b")]
    with pytest.raises(LauncherError, match="broken"):
        run_jobs(jobs, str(tmp_path), launcher=Fragile(2))
    assert run_jobs(jobs, str(tmp_path)).ran == 1


def test_a_log_on_a_full_disk_fails_its_own_job_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").symlink_to("/dev/full")
    full, good = run_jobs([make_job({"1": {"do": "print"}}), make_job(ONE, "b")], str(tmp_path)).results
    # Its words, and the last lines of code that raised.
    assert re.sub(r"\d+", "#", str(full.detail)) == (
        'OSError: [Errno #] No space left on device [runner_jobs.py:# print("into the log", flush=True) < '
        'runner_jobs.py:# return ACTIONS[row["do"]](args, row) < runner_jobs.py:# return lambda row: act(args, row)]'
    )
    assert (full.reason, good.is_ok) == ("exception", True)


def test_logs_are_named_after_their_jobs(tmp_path: Path) -> None:
    jobs = [Job("a/b", runner_jobs.CALL, {}, {"run": {"do": "tell"}})]
    run_jobs(jobs, str(tmp_path / "run"), logs=str(tmp_path / "x"))
    assert (tmp_path / "x" / "a_b.log").read_text() == "told\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["journal.jsonl", "lock"]
    for other in ("a_b", "a/b"):
        with pytest.raises(RunnerError, match=rf"jobs a/b and {other} would share the log a_b\.log: rename one"):
            run_jobs([*jobs, make_job(ONE, other)], str(tmp_path / "run"))


# --- interrupts and launchers -----------------------------------------------------------------------------------------
def test_an_interrupt_stops_after_the_current_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"begun": str(tmp_path / "begun")}
    jobs = [make_job({str(i): value(i) for i in range(6)}, args=args), make_job({"1": value(6)}, "b", args=args)]
    folder = str(tmp_path / "run")
    first = run_jobs(jobs, folder, on_result=lambda r: signal.raise_signal(signal.SIGINT) if r.row == "1" else None)
    assert (first.ran, first.stopped) == (2, True)
    assert capsys.readouterr().err.startswith("stopping after what runs now; Ctrl-C again stops at once.")
    again = run_jobs(jobs, folder)
    assert (again.ran, again.stopped) == (5, False)
    assert (tmp_path / "begun").read_text().split() == [str(i) for i in range(7)]


def test_an_interrupt_after_a_failure_begins_no_other_row(tmp_path: Path) -> None:
    jobs = [make_job({"0": {"do": "hang"}, "1": value(1), "2": value(2)}, timeout_s=0.2)]
    out = run_jobs(jobs, str(tmp_path), on_result=lambda _: signal.raise_signal(signal.SIGINT))
    assert [(r.row, r.reason) for r in out.results] == [("0", "timeout")]
    assert out.stopped


def test_an_interrupt_before_the_first_job_starts_none(tmp_path: Path) -> None:
    class Early(Local):
        def open(self, folder: str) -> None:
            super().open(folder)
            signal.raise_signal(signal.SIGINT)

    out = run_jobs([make_job(ONE)], str(tmp_path), launcher=Early())
    assert (out.ran, out.stopped) == (0, True)


def test_slots_run_jobs_at_once_and_results_keep_their_order(tmp_path: Path) -> None:
    # Each ends only when the others have begun.
    jobs = [
        Job(name, runner_jobs.CALL, {"name": name, "folder": str(tmp_path)}, {"run": {"do": "meet", "others": "abc"}})
        for name in "cab"
    ]
    stream = StringIO()
    out = run_jobs(jobs, str(tmp_path / "run"), launcher=Local(3), progress=Progress(stream, lists_results=True))
    assert [(r.job, r.data) for r in out.results] == [(name, "met") for name in "cab"]
    assert sorted(line[6:10] for line in stream.getvalue().splitlines()[:3]) == ["a: o", "b: o", "c: o"]


class Engine(Remote):
    """A cluster that runs nothing: it answers, or loses the job."""

    def __init__(self, losses: dict[str, int], **_: Any) -> None:
        super().__init__(1)
        self.losses = losses
        self.started: list[str] = []
        self.calls: list[str] = []

    def open(self, folder: str) -> None:
        self.calls.append(f"open {Path(folder).name}")

    def _send(self, job: Job) -> int:
        self.started.append(job.id)
        return len(self.started)

    def _fetch(self, handle: int) -> Json | None:
        job = self.running[handle][0]
        if self.losses.get(job.id, 0) > 0:
            self.losses[job.id] -= 1
            return make_failure("worker lost", "node 3 died")
        return {"results": [Result(job.id, "1", job.key("1"), "ok", None, None, 7, 0.5)], "log": "done\n"}

    def close(self) -> None:
        super().close()
        self.calls.append("close")


def test_a_lost_job_is_run_again_and_given_up_after_three_times(tmp_path: Path) -> None:
    jobs = [make_job(ONE, name) for name in "abc"]
    engine = Engine({"a": 2, "b": 9})
    results = run_jobs(jobs, str(tmp_path / "run"), launcher=engine).results
    assert [(r.job, r.reason, r.detail, r.data) for r in results] == [
        ("a", None, None, 7),
        ("b", "worker lost", "lost 3 times, last: node 3 died", None),
        ("c", None, None, 7),
    ]
    assert engine.started == ["a", "a", "a", "b", "b", "b", "c"]
    assert engine.calls == ["open run", "close"]
    assert (tmp_path / "run/logs/a.log").read_text() == "worker lost: node 3 died\n" * 2 + "done\n"
    # A finished run opens no cluster.
    idle = Engine({})
    assert (run_jobs(jobs, str(tmp_path / "run"), launcher=idle).ran, idle.calls) == (0, ["close"])
    assert run_jobs(jobs, str(tmp_path / "run"), launcher=Engine({}), retry_failed=True).ran_jobs == {"b"}


def test_a_job_lost_while_the_run_stops_is_left_for_the_next_time(tmp_path: Path) -> None:
    class Interrupted(Engine):
        def _fetch(self, handle: int) -> Json | None:
            if not self._is_stopping:
                signal.raise_signal(signal.SIGINT)
                return None
            return super()._fetch(handle)

    jobs = [make_job(ONE, name) for name in "ab"]
    out = run_jobs(jobs, str(tmp_path), launcher=Interrupted({"a": 1}))
    assert (out.ran, out.stopped) == (0, True)
    assert run_jobs(jobs, str(tmp_path), launcher=Engine({})).ran == 2


def test_a_launcher_that_fails_to_open_is_closed(tmp_path: Path) -> None:
    class Broken(Engine):
        def open(self, folder: str) -> None:
            super().open(folder)
            raise LauncherError("half open")

    engine = Broken({})
    with pytest.raises(RunnerError, match="half open"):
        run_jobs([make_job(ONE)], str(tmp_path / "run"), launcher=engine)
    assert engine.calls == ["open run", "close"]
