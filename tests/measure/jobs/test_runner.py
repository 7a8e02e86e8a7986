"""The process runner: one bad row never touches another, everything resumes, nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runner_jobs
from places import HELPERS

from flopcalc.measure.jobs import journal, runner
from flopcalc.measure.jobs.job import Lost, Running, Task
from flopcalc.measure.jobs.launchers import Local, Place
from flopcalc.measure.jobs.runner import Job, Result, RunnerError, run_jobs

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
    if kind == "print":
        print("into the log", flush=True)
    raise AssertionError(kind)


def value(number: int) -> Json:
    return {"do": "value", "value": number}


def job(rows: dict[str, Json], name: str = "a", **kwargs: Any) -> Job:
    args = kwargs.pop("args", {})
    return Job(name, f"{HERE}:start", args, rows, **kwargs)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HELPERS))


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


def test_a_worker_that_cannot_start_fails_its_rows_only(tmp_path: Path) -> None:
    jobs = [job({"1": value(1), "2": value(2)}, args={"broken": True}), job({"3": value(3)}, "b")]
    results = run_jobs(jobs, str(tmp_path)).results
    assert [r.status for r in results] == ["failed", "failed", "ok"]
    assert "worker did not start: ImportError: no such library" in str(results[0].detail)


@pytest.mark.parametrize("end", ["killed", "exit", "timeout"])
def test_a_worker_that_dies_while_it_starts_is_started_once_more(tmp_path: Path, end: str) -> None:
    args: Json = {"starts": str(tmp_path / "starts"), "bad_starts": 1, "end": end}

    class Impatient(Local):
        """The time of the first start is over once it hangs."""

        def wait(self, timeout_s: float) -> Any:
            run = self._running[0][0]
            if end == "timeout" and run._state == "starting" and run._starts == 1 and Path(args["starts"]).exists():
                run.deadline = 0.0
            return super().wait(timeout_s)

    jobs = [job({"1": value(1), "2": value(2)}, args=args)]
    results = run_jobs(jobs, str(tmp_path / "run"), launcher=Impatient()).results
    assert [r.status for r in results] == ["ok", "ok"]
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


def test_a_result_is_kept_before_the_next_row_begins(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    seen: list[tuple[int, int]] = []

    def look(_result: Result) -> None:
        seen.append((len(begun.read_text().split()), len((tmp_path / "run/journal.jsonl").read_text().splitlines())))

    rows = {str(i): value(i) for i in range(3)}
    run_jobs([job(rows, args={"counter": str(begun)})], str(tmp_path / "run"), on_result=look)
    assert seen == [(1, 2), (2, 3), (3, 4)]  # the journal has a first line of its own


def test_a_row_whose_question_changed_is_measured_again(tmp_path: Path) -> None:
    run_jobs([job({"1": value(1)})], str(tmp_path))
    again = run_jobs([job({"1": value(2)})], str(tmp_path))
    assert again.ran == 1
    assert again.results[0].data["value"] == 2


def test_other_settings_refuse_the_journal(tmp_path: Path) -> None:
    run_jobs([job({"1": value(1)})], str(tmp_path), identity={"torch": "2.11"})
    with pytest.raises(RunnerError, match=r"begun with torch = '2.11', now it is '2.13'.*--fresh"):
        run_jobs([job({"1": value(1)})], str(tmp_path), identity={"torch": "2.13"})


def test_a_journal_without_results_takes_any_settings(tmp_path: Path) -> None:
    run_jobs([], str(tmp_path), identity={"torch": "2.11"})
    run_jobs([job({"1": value(1)})], str(tmp_path), identity={"torch": "2.13"})
    with pytest.raises(RunnerError, match=r"begun with torch = '2.13'"):
        run_jobs([job({"1": value(1)})], str(tmp_path), identity={"torch": "2.11"})


def test_where_a_job_writes_is_no_part_of_its_question(tmp_path: Path) -> None:
    first = job({"1": value(1)}, where={"counter": str(tmp_path / "first")})
    run_jobs([first], str(tmp_path / "run"))
    assert (tmp_path / "first").read_text() == "1\n"
    moved = first._replace(where={"counter": str(tmp_path / "second")})
    assert run_jobs([moved], str(tmp_path / "run")).ran == 0


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
    lines = journal.read_text()
    for first in ("{}", "[]", '{"run": 5}', "\0"):
        journal.write_text(f"{first}\n{lines}")
        with pytest.raises(RunnerError, match=r"journal.jsonl: line 1 is damaged .* run with --fresh"):
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
    monkeypatch.syspath_prepend(str(HELPERS))
    assert run_jobs(jobs, str(tmp_path)).ran == 2


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with (
        journal.lock_folder(str(tmp_path)),
        pytest.raises(RunnerError, match=rf"in use by another run \(process {os.getpid()}\)"),
    ):
        run_jobs([job({"1": value(1)})], str(tmp_path))
    assert run_jobs([job({"1": value(1)})], str(tmp_path)).ran == 1


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run/journal.jsonl").mkdir(parents=True)
    (tmp_path / "locked/lock").mkdir(parents=True)
    for folder, message in (
        ("file", "file: File exists"),
        ("file/below", "file/below: Not a directory"),
        ("run", "run/journal.jsonl: Is a directory"),
        ("locked", "locked/lock: Is a directory"),
    ):
        with pytest.raises(RunnerError) as caught:
            run_jobs([job({"1": value(1)})], str(tmp_path / folder))
        assert str(caught.value) == f"{tmp_path}/{message}; choose a folder that can be written to"
    with pytest.raises(RunnerError, match="file/logs: Not a directory; choose"):
        run_jobs([job({"1": value(1)})], str(tmp_path / "good"), logs=str(tmp_path / "file/logs"))

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(journal.fcntl, "flock", refuse)
    with pytest.raises(RunnerError, match="good/lock: No locks available; choose"):
        run_jobs([job({"1": value(1)})], str(tmp_path / "good"))


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """What a file on a full disk does: it keeps what it could not write, and fails with it again when closed."""

        def __init__(self, *_: Any) -> None: ...

        def seek(self, *_: int) -> int:
            return 0

        def __iter__(self) -> Any:
            return iter(())

        def truncate(self, _size: int) -> None: ...

        def write(self, _text: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.write(b"")

    monkeypatch.setattr(journal, "open", Full, raising=False)
    with pytest.raises(RunnerError, match=r"journal.jsonl: disk full; the rows before it are kept"):
        runner.Journal(str(tmp_path), {})


def test_a_log_that_cannot_be_opened_stops_the_run_in_words(tmp_path: Path) -> None:
    (tmp_path / "logs" / "b.log").mkdir(parents=True)
    jobs = [job({"1": value(1)}), job({"1": value(2)}, "b")]
    with pytest.raises(RunnerError, match=r"b cannot be started, its log is .*b.log: Is a directory; what was done is"):
        run_jobs(jobs, str(tmp_path))
    (tmp_path / "logs" / "b.log").rmdir()
    assert run_jobs(jobs, str(tmp_path)).ran_jobs == {"b"}


def test_a_log_on_a_full_disk_fails_its_own_job_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").symlink_to("/dev/full")
    full, good = run_jobs([job({"1": {"do": "print"}}), job({"1": value(1)}, "b")], str(tmp_path)).results
    assert full.reason == "exception"
    # Its words, and the last lines that it came through.
    assert full.detail is not None
    assert re.sub(r"\d+", "#", full.detail) == (
        'OSError: [Errno #] No space left on device [test_runner.py:# print("into the log", flush=True) < '
        "test_runner.py:# return lambda row: act(args, row)]"
    )
    assert good.is_ok


def test_an_interrupt_stops_after_the_current_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"counter": str(tmp_path / "runs")}
    jobs = [job({str(i): value(i) for i in range(6)}, args=args), job({"1": value(6)}, "b", args=args)]
    folder = str(tmp_path / "run")
    first = run_jobs(jobs, folder, on_result=lambda r: signal.raise_signal(signal.SIGINT) if r.row == "1" else None)
    assert (first.ran, first.stopped) == (2, True)
    assert capsys.readouterr().err.startswith("stopping after what runs now; Ctrl-C again stops at once.")
    # The row that ran was finished and is kept: the second run does the others alone.
    again = run_jobs(jobs, folder)
    assert (again.ran, again.stopped) == (5, False)
    assert (tmp_path / "runs").read_text().split() == [str(i) for i in range(7)]


def test_an_interrupt_while_a_worker_is_ended_begins_no_other(tmp_path: Path) -> None:
    rows = {"0": {"do": "hang"}, "1": {"do": "tell"}, "2": {"do": "tell"}}
    jobs = [Job("a", runner_jobs.CALL, {}, rows, timeout_s=0.2)]
    out = run_jobs(jobs, str(tmp_path), on_result=lambda _: signal.raise_signal(signal.SIGINT))
    assert [(r.row, r.reason) for r in out.results] == [("0", "timeout")]
    assert out.stopped


# --- launchers -------------------------------------------------------------------------------------------------------
def make_light_job(name: str, folder: Path, do: str, **row: Any) -> Job:
    return Job(name, runner_jobs.CALL, {"name": name, "folder": str(folder)}, {"run": {"do": do, **row}})


def test_slots_run_jobs_at_once_and_results_keep_their_order(tmp_path: Path) -> None:
    # Each comes to its end only when the others have begun; "d" comes first and waits for the last.
    jobs = [make_light_job(name, tmp_path, "meet", others=list("abcd")) for name in "dabc"]
    told: list[str] = []
    places = [Place(str(i)) for i in range(4)]
    out = run_jobs(jobs, str(tmp_path / "run"), launcher=Local(lambda: places), on_result=lambda r: told.append(r.job))
    assert [(r.job, r.data) for r in out.results] == [(name, "met") for name in "dabc"]
    assert sorted(told) == list("abcd")


def test_logs_have_a_folder_of_their_own_where_one_is_given(tmp_path: Path) -> None:
    run_jobs([make_light_job("a/b", tmp_path, "tell")], str(tmp_path / "run"), logs=str(tmp_path / "x"))
    assert (tmp_path / "x" / "a_b.log").read_text() == "told\n"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["journal.jsonl", "lock"]


class Engine:
    """A launcher that runs nothing: it answers what it was told to, or loses the task."""

    slots = 1

    def __init__(self, losses: dict[str, int]) -> None:
        self.losses = losses
        self.started: list[str] = []
        self.calls: list[str] = []
        self.task: Task | None = None

    @property
    def is_busy(self) -> bool:
        return self.task is not None

    def open(self, folder: str) -> None:
        self.calls.append(f"open {Path(folder).name}")

    def has_room(self) -> bool:
        return self.task is None

    def start(self, task: Task) -> None:
        self.task = task
        self.started.append(task.job.id)

    def wait(self, _timeout_s: float) -> list[Result | Lost]:
        assert self.task is not None
        job, self.task = self.task.job, None
        if self.losses.get(job.id, 0) > 0:
            self.losses[job.id] -= 1
            return [Lost(job.id, "node 3 died")]
        return [Result(job.id, row, job.key(row), "ok", None, None, 7, 0.5) for row in job.rows]

    def look(self) -> list[Running]:
        return []

    def stop(self) -> None:
        self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")


def test_a_lost_job_is_run_again_and_given_up_after_three_times(tmp_path: Path) -> None:
    from io import StringIO

    jobs = [job({"1": value(1)}, name) for name in "abc"]
    stream = StringIO()
    engine = Engine({"a": 2, "b": 9})
    results = run_jobs(jobs, str(tmp_path / "run"), launcher=engine, progress=runner.LiveTable(stream)).results
    assert [(r.job, r.status, r.reason, r.detail) for r in results] == [
        ("a", "ok", None, None),
        ("b", "failed", "worker lost", "lost 3 times, last: node 3 died"),
        ("c", "ok", None, None),
    ]
    assert engine.started == ["a", "b", "c", "a", "b", "a", "b"]
    assert engine.calls == ["open run", "close"]
    assert "a: its worker was lost (node 3 died), it is run again\n" in stream.getvalue()
    # A finished run opens no engine.
    assert run_jobs(jobs, str(tmp_path / "run"), launcher=Engine({})).ran == 0
    idle = Engine({})
    assert run_jobs(jobs, str(tmp_path / "run"), launcher=idle).ran == 0
    assert idle.calls == ["close"]
    assert run_jobs(jobs, str(tmp_path / "run"), launcher=Engine({}), retry_failed=True).ran_jobs == {"b"}


def test_an_engine_that_fails_to_open_is_closed(tmp_path: Path) -> None:
    class Broken(Engine):
        def open(self, folder: str) -> None:
            super().open(folder)
            raise RunnerError("half open")

    engine = Broken({})
    with pytest.raises(RunnerError, match="half open"):
        run_jobs([job({"1": value(1)})], str(tmp_path / "run"), launcher=engine)
    assert engine.calls == ["open run", "close"]


def test_an_interrupt_before_the_first_job_starts_none(tmp_path: Path) -> None:
    class Early(Local):
        def open(self, folder: str) -> None:
            super().open(folder)
            signal.raise_signal(signal.SIGINT)

    out = run_jobs([job({"1": value(1)})], str(tmp_path), launcher=Early())
    assert (out.ran, out.stopped) == (0, True)


def test_a_job_lost_while_the_run_stops_is_left_for_the_next_time(tmp_path: Path) -> None:
    class Interrupted(Engine):
        def wait(self, timeout_s: float) -> list[Result | Lost]:
            if "stop" not in self.calls:
                signal.raise_signal(signal.SIGINT)
                return []
            return super().wait(timeout_s)

    jobs = [job({"1": value(1)}, name) for name in "ab"]
    out = run_jobs(jobs, str(tmp_path), launcher=Interrupted({"a": 1}))
    assert (out.ran, out.stopped) == (0, True)
    assert run_jobs(jobs, str(tmp_path), launcher=Engine({})).ran == 2


def test_ids_are_used_once(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="two jobs share an id: a"):
        run_jobs([job({"1": value(1)}), job({"1": value(2)})], str(tmp_path))
    with pytest.raises(RunnerError, match=r"jobs a/b and a_b would share the log a_b\.log: rename one of them"):
        run_jobs([job({"1": value(1)}, "a/b"), job({"1": value(2)}, "a_b")], str(tmp_path))
