"""Guard and worker: however the one or the other or the runner ends, nothing of a job is left."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runner_jobs
from runner_jobs import is_gone, wait_until

from flopcalc.measure.jobs import process
from flopcalc.measure.jobs.job import Job, RunnerError
from flopcalc.measure.jobs.launchers import Local, Place
from flopcalc.measure.jobs.runner import run_jobs

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runner_jobs.HERE)


def make_job(name: str, do: str, folder: Path, timeout_s: float = 60.0, **row: Any) -> Job:
    args = {"name": name, "folder": str(folder)}
    return Job(name, runner_jobs.CALL, args, {"run": {"do": do, **row}}, timeout_s)


def wait_gone(pids: list[int]) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"process {pid} is still there")


def read_pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


# --- ends of the worker ---------------------------------------------------------------------------------------------
def test_every_end_of_a_job_beside_others_that_run(tmp_path: Path) -> None:
    jobs = [
        make_job(name, name.rstrip("0123456789"), tmp_path, 3.0 if name == "hang" else 60.0)
        for name in ("tell1", "crash", "kill", "tell2", "leave", "hang", "memory", "tell3", "unsendable", "tell4")
    ]
    launcher = Local(lambda: [Place("a"), Place("b"), Place("c")])
    results = {r.job: r for r in run_jobs(jobs, str(tmp_path / "run"), launcher=launcher).results}
    assert {name: r.reason for name, r in results.items()} == {
        "tell1": None, "crash": "killed", "kill": "killed", "tell2": None, "leave": "exit", "hang": "timeout",
        "memory": "oom", "tell3": None, "unsendable": "exception", "tell4": None,
    }  # fmt: skip
    assert str(results["crash"].detail) == "process ended by SIGSEGV"
    assert str(results["kill"].detail) == "process ended by SIGKILL (by a person?): last words"
    assert str(results["leave"].detail) == "process ended with code 3"
    assert str(results["hang"].detail) == "no answer within 3 s"
    assert str(results["memory"].detail).startswith("MemoryError")
    assert "not JSON serializable" in str(results["unsendable"].detail)
    # A process each, and the one that the kernel would take first.
    told = [results[f"tell{i}"].data for i in (1, 2, 3, 4)]
    assert len({data["process"] for data in told}) == 4
    assert {data["oom_score_adj"] for data in told} == {"1000"}


def test_a_kill_by_the_kernel_for_memory_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr(process, "_read_oom_kills", lambda: next(counts))
    (result,) = run_jobs([make_job("kill", "kill", tmp_path)], str(tmp_path / "run")).results
    assert result.reason == "oom"
    assert result.detail == "process ended by SIGKILL (the kernel was out of memory): last words"


def test_the_kernels_count_is_read(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 12\nzswpin 0\n")
    assert process._read_oom_kills(str(tmp_path / "vmstat")) == 12
    assert process._read_oom_kills(str(tmp_path / "none")) == 0


def test_a_hang_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    class Impatient(Local):
        """The time is over once the job has started what it starts."""

        def wait(self, timeout_s: float) -> Any:
            if (tmp_path / "a.family").exists():
                for run, _ in self._running:
                    run.deadline = 0.0 if run._state == "row" else run.deadline
            return super().wait(timeout_s)

    jobs = [make_job("a", "family", tmp_path, 600.0)]
    (result,) = run_jobs(jobs, str(tmp_path / "run"), launcher=Impatient()).results
    assert (result.reason, result.detail) == ("timeout", "no answer within 600 s")
    pids = read_pids(tmp_path / "a.family")
    assert len(pids) == 4
    # The run waits for their end before it goes on: the device's memory is free by then.
    assert [pid for pid in pids if not is_gone(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_is_killed_or_stopped_leaves_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(process, "_END_S", 0.1)

    class Hostile(Local):
        def wait(self, timeout_s: float) -> Any:
            run = self._running[0][0]
            if (tmp_path / "a.family").exists() and run._state == "row":
                os.kill(run.guard, number)
                if number == signal.SIGSTOP:  # it goes on as long as it may
                    run.deadline = 0.0
            return super().wait(timeout_s)

    jobs = [make_job("a", "family", tmp_path, 600.0)]
    (result,) = run_jobs(jobs, str(tmp_path / "run"), launcher=Hostile()).results
    assert result.reason == ("killed" if number == signal.SIGKILL else "timeout")
    assert [pid for pid in read_pids(tmp_path / "a.family") if not is_gone(pid)] == []


# --- a worker that does not keep to the rules -----------------------------------------------------------------------
def test_answers_that_are_none_fail_their_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_ANSWER_BYTES", 1 << 20)
    texts = {
        "words": "\x1b[31mwhat\n", "number": "5\n", "nothing": "{}\n", "deep": "[" * 99999 + "\n", "no line": "x",
    }  # fmt: skip
    jobs = [make_job(name, "babble", tmp_path, 1.0 if name == "no line" else 60.0, text=texts[name]) for name in texts]
    jobs.append(make_job("endless", "babble", tmp_path, text="x" * 4096, times=-1))
    jobs.append(make_job("tell", "tell", tmp_path))
    results = run_jobs(jobs, str(tmp_path / "run"), launcher=Local(lambda: [Place("a"), Place("b")])).results
    assert [(r.reason, str(r.detail)[:60]) for r in results[:-1]] == [
        ("exception", "the worker's answer cannot be read: what"),
        ("exception", "the worker's answer cannot be read: 5"),
        ("exception", "the worker's answer cannot be read: {}"),
        ("exception", "the worker's answer cannot be read: [[[[[[[[[[[[[[[[[[[[[[[["),
        ("timeout", "no answer within 1 s"),
        ("exception", "the answer is longer than 1 MiB"),
    ]
    assert results[-1].is_ok


def test_a_request_longer_than_a_pipe_arrives_or_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_S", 0.1)
    args = {"ballast": "x" * (1 << 20)}
    rows = {"run": {"do": "measure_args"}}
    # One whose Python never comes to read it.
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    deaf = Job("deaf", runner_jobs.CALL, args, rows, start_timeout_s=0.2, env=env)
    given_up, arrived = run_jobs([deaf, Job("good", runner_jobs.CALL, args, rows)], str(tmp_path / "run")).results
    assert given_up.detail == "worker did not start, tried twice: no answer within 0.2 s"
    assert arrived.data == 1 << 20


def test_last_words_are_plain_text(tmp_path: Path) -> None:
    (result,) = run_jobs([make_job("a", "bar", tmp_path)], str(tmp_path / "run")).results
    assert result.detail == "process ended with code 4: 10%|# | | 20%|## |"


# --- a runner in odd surroundings -----------------------------------------------------------------------------------
def test_a_runner_that_does_not_wait_for_its_children(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handed on to everything that it starts
    try:
        (result,) = run_jobs([make_job("a", "daemon", tmp_path)], str(tmp_path / "run")).results
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert is_gone(result.data)


def test_a_current_folder_with_files_like_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    (result,) = run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run")).results
    assert result.is_ok


def test_a_runner_with_many_open_files(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1200:
        pytest.skip("needs 1,200 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1200, limits[0]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        (result,) = run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run")).results
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert result.is_ok


def test_a_runner_without_standard_streams(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {runner_jobs.HERE!r})
from flopcalc.measure.jobs.runner import Job, LiveTable, run_jobs
job = Job("a", "runner_jobs:start", {{}}, {{"run": {{"do": "tell"}}}})
def note(result):
    for descriptor in (0, 1, 2):
        os.write(descriptor, b"a library's message")
run_jobs([job], {str(tmp_path / "run")!r}, progress=LiveTable(sys.stderr), on_result=note)
"""
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: os.closerange(0, 3), check=False)
    assert done.returncode == 0
    job = Job("a", runner_jobs.CALL, {}, {"run": {"do": "tell"}})
    assert run_jobs([job], str(tmp_path / "run")).ran == 0


# --- ends of the runner and the guard -------------------------------------------------------------------------------
_PARENT = """
import sys
sys.path.insert(0, {here!r})
from flopcalc.measure.jobs.launchers import Local, Place
from flopcalc.measure.jobs.runner import Job, run_jobs
rows = {{"run": {{"do": {do!r}}}}}
jobs = [Job(name, "runner_jobs:start", {{"name": name, "folder": {folder!r} + "/" + name}}, rows) for name in {names!r}]
try:
    out = run_jobs(jobs, {folder!r} + "/run", launcher=Local(lambda: [Place("a"), Place("b")]))
    print("ran", out.ran, out.stopped, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def spawn(tmp_path: Path) -> Any:
    """A runner of its own with two slots, waited for until both have begun."""
    parents = []

    def begin(do: str, names: str, mark: str) -> subprocess.Popen[str]:
        for name in names:
            (tmp_path / name).mkdir()
        code = _PARENT.format(here=runner_jobs.HERE, do=do, folder=str(tmp_path), names=names)
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        parents.append(parent)
        for name in names[:2]:
            wait_until((tmp_path / name / f"{name}.{mark}").exists, f"{name} did not begin")
        return parent

    yield begin
    for parent in parents:
        if parent.poll() is None:
            parent.kill()
            parent.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_runner_that_is_ended_takes_everything_along(tmp_path: Path, spawn: Any, number: int) -> None:
    parent = spawn("family", "ab", "family")
    pids = read_pids(tmp_path / "a/a.family") + read_pids(tmp_path / "b/b.family")
    assert [pid for pid in pids if is_gone(pid)] == []
    parent.send_signal(number)
    parent.communicate(timeout=60)
    assert parent.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_gone(pids)


def test_after_a_killed_runner_the_same_jobs_go_on(tmp_path: Path, spawn: Any) -> None:
    parent = spawn("gate", "abc", "process")
    rows = {"run": {"do": "gate"}}
    jobs = [Job(n, runner_jobs.CALL, {"name": n, "folder": str(tmp_path / n)}, rows) for n in "abc"]
    with pytest.raises(RunnerError, match=rf"in use by another run \(process {parent.pid}\)"):
        run_jobs(jobs, str(tmp_path / "run"))
    # One is let through and the third begins; then the runner dies with two under way.
    (tmp_path / "a/open").touch()
    wait_until((tmp_path / "c/c.process").exists, "c did not begin")
    pids = [int((tmp_path / f"{n}/{n}.process").read_text().split()[0]) for n in "bc"]
    parent.kill()
    parent.communicate(timeout=60)
    wait_gone(pids)
    for name in "bc":
        (tmp_path / name / "open").touch()
    again = run_jobs(jobs, str(tmp_path / "run"), launcher=Local(lambda: [Place("a"), Place("b")]))
    assert (again.ran, again.ran_jobs, again.stopped) == (2, {"b", "c"}, False)
    assert [r.is_ok for r in again.results] == [True] * 3
    assert {n: (tmp_path / f"{n}/{n}.begun").read_text().count("begun") for n in "abc"} == {"a": 1, "b": 2, "c": 2}
    assert run_jobs(jobs, str(tmp_path / "run")).ran == 0


def test_one_interrupt_lets_the_running_ones_finish(tmp_path: Path, spawn: Any) -> None:
    parent = spawn("gate", "abcd", "process")
    parent.send_signal(signal.SIGINT)
    assert parent.stderr.readline().startswith("stopping after what runs now")
    for name in "abcd":
        (tmp_path / name / "open").touch()
    out, _ = parent.communicate(timeout=60)
    assert out == "ran 2 True\n"
    assert not (tmp_path / "c/c.begun").exists()
    rows = {"run": {"do": "gate"}}
    jobs = [Job(n, runner_jobs.CALL, {"name": n, "folder": str(tmp_path / n)}, rows) for n in "abcd"]
    assert run_jobs(jobs, str(tmp_path / "run")).ran_jobs == {"c", "d"}


def test_a_second_interrupt_ends_them(tmp_path: Path, spawn: Any) -> None:
    parent = spawn("family", "abc", "family")
    parent.send_signal(signal.SIGINT)
    assert parent.stderr.readline().startswith("stopping after what runs now")
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=60)
    assert out == "interrupted\n"
    pids = read_pids(tmp_path / "a/a.family") + read_pids(tmp_path / "b/b.family")
    assert [pid for pid in pids if not is_gone(pid)] == []


def test_a_killed_guard_takes_its_worker_along(tmp_path: Path, spawn: Any) -> None:
    parent = spawn("gate", "ab", "process")
    worker = int((tmp_path / "a/a.process").read_text().split()[0])
    guard = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    assert guard != parent.pid
    os.kill(guard, signal.SIGKILL)
    (tmp_path / "b/open").touch()
    assert parent.communicate(timeout=60)[0] == "ran 2 False\n"
    assert is_gone(worker)


# --- nothing is left ------------------------------------------------------------------------------------------------
def read_rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_and_open_files_stay_flat_over_two_hundred_jobs(tmp_path: Path) -> None:
    # itemgetter("value") is a function of one row: a child that imports nothing.
    jobs = [Job(f"j{i}", "operator:itemgetter", "value", {"run": {"value": i}}) for i in range(200)]  # type: ignore[arg-type]
    files: list[set[str]] = []
    memory: list[int] = []

    def look(result: Any) -> None:
        assert result.is_ok
        files.append(set(os.listdir("/proc/self/fd")))
        memory.append(read_rss_bytes())

    before = set(os.listdir("/proc/self/fd"))
    outcome = run_jobs(jobs, str(tmp_path), launcher=Local(lambda: [Place("a"), Place("b")]), on_result=look)
    assert [r.data for r in outcome.results] == list(range(200))
    assert set(os.listdir("/proc/self/fd")) == before
    # The journal and the lock, and three pipes for each of two workers.
    assert max(len(opened - before) for opened in files) <= 2 + 2 * 3
    assert memory[199] - memory[49] < 4 << 20
    assert process.read_children(os.getpid()) == []
