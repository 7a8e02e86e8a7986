"""One process per job: however it or the runner ends, there is a row that says so, and its group is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import runner_jobs
from impatient import Impatient
from runner_jobs import LIMIT_S, is_gone, read_pids, wait_gone, wait_until

from flopcalc.measure.jobs import process
from flopcalc.measure.jobs.job import Job, RunnerError
from flopcalc.measure.jobs.launchers import Local
from flopcalc.measure.jobs.runner import run_jobs


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runner_jobs.HERE)


def make_job(name: str, do: str, folder: Path, timeout_s: float = LIMIT_S, **row: Any) -> Job:
    args = {"name": name, "folder": str(folder)}
    return Job(name, runner_jobs.CALL, args, {"run": {"do": do, **row}}, timeout_s)


# --- ends of the worker ---------------------------------------------------------------------------------------------
ENDS = {
    "tell1": (None, None),
    "crash": ("killed", "process ended by SIGSEGV"),
    "kill": ("killed", "process ended by SIGKILL (by a person?): last words"),
    "tell2": (None, None),
    "leave": ("exit", "process ended with code 3"),
    "bar": ("exit", "process ended with code 4: 10%|# | | 20%|## |"),  # plain text: no colours, no cursor moves
    "hang": ("timeout", "no answer within 0.2 s"),
    "memory": ("oom", "MemoryError: "),
    "device_memory": ("oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 90 GiB"),
    "unsendable": ("exception", "TypeError: Object of type object is not JSON serializable [encoder.py:"),
    "tell3": (None, None),
}


def test_every_end_of_a_job_is_its_row_alone(tmp_path: Path) -> None:
    jobs = [make_job(name, name.rstrip("123"), tmp_path, 0.2 if name == "hang" else LIMIT_S) for name in ENDS]
    results = {r.job: r for r in run_jobs(jobs, str(tmp_path / "run"), launcher=Local(3)).results}
    assert {name: result.reason for name, result in results.items()} == {name: ENDS[name][0] for name in ENDS}
    for name, (_, detail) in ENDS.items():
        assert str(results[name].detail).startswith(str(detail)), name
        assert name == "unsendable" or results[name].detail == detail
    # A process each, and the one that the kernel would kill first.
    told = [results[f"tell{i}"].data for i in (1, 2, 3)]
    assert len({data["process"] for data in told} | {os.getpid()}) == 4
    assert {data["oom_score_adj"] for data in told} == {"1000"}


def test_a_kill_by_the_kernel_for_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = chain([4], repeat(5))
    monkeypatch.setattr(process, "_read_oom_kills", lambda: next(counts))
    (result,) = run_jobs([make_job("kill", "kill", tmp_path)], str(tmp_path / "run")).results
    assert result.reason == "oom"
    assert result.detail == "process ended by SIGKILL (the kernel was out of memory): last words"


def test_the_count_of_the_kernel_is_read(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 12\nzswpin 0\n")
    assert process._read_oom_kills(str(tmp_path / "vmstat")) == 12
    assert process._read_oom_kills(str(tmp_path / "none")) == 0


def test_a_hang_is_killed_with_its_group(tmp_path: Path) -> None:
    jobs = [make_job("a", "family", tmp_path, 600.0), make_job("b", "tell", tmp_path)]
    hung, other = run_jobs(jobs, str(tmp_path / "run"), launcher=Impatient(tmp_path / "a.family")).results
    assert (hung.reason, hung.detail, other.reason) == ("timeout", "no answer within 600 s", None)
    pids = read_pids(tmp_path / "a.family")
    assert is_gone(pids[0])  # the run waited for it: the memory of the device is free
    wait_gone(pids)


def test_a_forked_copy_hides_no_end(tmp_path: Path) -> None:
    (result,) = run_jobs([make_job("a", "orphan", tmp_path)], str(tmp_path / "run")).results
    assert result.detail == "process ended by SIGKILL (by a person?)"
    wait_gone(read_pids(tmp_path / "a.family"))


def test_a_worker_that_is_done_ends_by_itself(tmp_path: Path) -> None:
    jobs = [make_job("a", "print_late", tmp_path)]
    assert run_jobs(jobs, str(tmp_path / "run")).results[0].is_ok
    assert (tmp_path / "run/logs/a.log").read_text() == "in a buffer until the process ends\n"


def test_a_worker_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_S", 0.2)
    # A thread that never ends keeps Python from exiting.
    code = "import threading, time\ndef start(args):\n    threading.Thread(target=time.sleep, args=(600,)).start()\n"
    (tmp_path / "endless.py").write_text(f"{code}    return lambda row: row\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (result,) = run_jobs([Job("a", "endless:start", {}, {"run": 7})], str(tmp_path / "run")).results
    assert result.data == 7


def test_more_than_a_channel_holds_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ballast = "x" * (1 << 20)
    job = Job("a", runner_jobs.CALL, {"ballast": ballast}, {"run": {"do": "measure_args", "ballast": ballast}})
    (arrived,) = run_jobs([job], str(tmp_path / "good")).results
    assert arrived.data == 2 * ballast
    # One whose Python never comes to read it.
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    (given_up,) = run_jobs([job._replace(start_timeout_s=0.2)], str(tmp_path / "deaf")).results
    assert given_up.detail == "worker did not start, tried twice: no answer within 0.2 s"


def test_a_current_folder_with_files_like_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    (result,) = run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run")).results
    assert result.is_ok


def test_open_files_do_not_add_up(tmp_path: Path) -> None:
    jobs = [make_job(f"j{i}", "value", tmp_path, value=i) for i in range(8)]
    files: list[set[str]] = []
    before = set(os.listdir("/proc/self/fd"))
    outcome = run_jobs(
        jobs, str(tmp_path), launcher=Local(2), on_result=lambda _: files.append(set(os.listdir("/proc/self/fd")))
    )
    assert [r.data["value"] for r in outcome.results] == list(range(8))
    assert set(os.listdir("/proc/self/fd")) == before
    assert max(len(opened - before) for opened in files) <= 2 + 2  # journal, lock, a channel for each of two workers


# --- ends of the runner ---------------------------------------------------------------------------------------------
_PARENT = """
import sys
sys.path.insert(0, {here!r})
from flopcalc.measure.jobs.launchers import Local
from flopcalc.measure.jobs.runner import Job, run_jobs
rows = {{"run": {{"do": {do!r}}}}}
jobs = [Job(name, "runner_jobs:start", {{"name": name, "folder": {folder!r} + "/" + name}}, rows) for name in {names!r}]
try:
    out = run_jobs(jobs, {folder!r} + "/run", launcher=Local(2))
    print("ran", out.ran, out.stopped, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def spawn(tmp_path: Path) -> Any:
    """A runner in a process of its own, with two slots; returns when both jobs have begun."""
    parents = []

    def begin(do: str, names: str, mark: str) -> subprocess.Popen[str]:
        for name in names:
            (tmp_path / name).mkdir()
        code = _PARENT.format(here=runner_jobs.HERE, do=do, folder=str(tmp_path), names=names)
        parent = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        parents.append(parent)
        for name in names[:2]:
            wait_until((tmp_path / name / f"{name}.{mark}").exists, f"{name} did not begin")
        return parent

    yield begin
    for parent in parents:
        if parent.poll() is None:
            parent.kill()
        parent.communicate()


def make_gates(folder: Path, names: str) -> list[Job]:
    rows = {"run": {"do": "gate"}}
    return [Job(name, runner_jobs.CALL, {"name": name, "folder": str(folder / name)}, rows) for name in names]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_runner_that_ends_takes_its_jobs_along(tmp_path: Path, spawn: Any, number: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, which makes every process ignore the signal")
    parent = spawn("family", "ab", "family")
    pids = read_pids(tmp_path / "a/a.family") + read_pids(tmp_path / "b/b.family")
    assert len(pids) == 6
    assert [pid for pid in pids if is_gone(pid)] == []
    parent.send_signal(number)
    parent.communicate(timeout=LIMIT_S)
    assert parent.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_gone(pids)


def test_after_a_killed_runner_the_same_jobs_go_on(tmp_path: Path, spawn: Any) -> None:
    parent = spawn("gate", "abc", "process")
    jobs = make_gates(tmp_path, "abc")
    with pytest.raises(RunnerError, match=rf"in use by another run \(process {parent.pid}\)"):
        run_jobs(jobs, str(tmp_path / "run"))
    # One is let through and the third begins; then the runner dies with two under way.
    (tmp_path / "a/open").touch()
    wait_until((tmp_path / "c/c.process").exists, "c did not begin")
    parent.kill()
    parent.communicate(timeout=LIMIT_S)
    wait_gone([read_pids(tmp_path / f"{name}/{name}.process")[0] for name in "bc"])
    for name in "bc":
        (tmp_path / name / "open").touch()
    again = run_jobs(jobs, str(tmp_path / "run"), launcher=Local(2))
    assert (again.ran, again.ran_jobs, again.stopped) == (2, {"b", "c"}, False)
    assert [r.is_ok for r in again.results] == [True] * 3


def test_one_interrupt_lets_what_runs_finish(tmp_path: Path, spawn: Any) -> None:
    parent = spawn("gate", "abcd", "process")
    parent.send_signal(signal.SIGINT)
    assert parent.stderr.readline().startswith("stopping after what runs now")
    for name in "abcd":
        (tmp_path / name / "open").touch()
    out, _ = parent.communicate(timeout=LIMIT_S)
    assert out == "ran 2 True\n"
    assert not (tmp_path / "c/c.process").exists()
    assert run_jobs(make_gates(tmp_path, "abcd"), str(tmp_path / "run")).ran_jobs == {"c", "d"}


def test_a_second_interrupt_ends_them(tmp_path: Path, spawn: Any) -> None:
    parent = spawn("family", "abc", "family")
    parent.send_signal(signal.SIGINT)
    assert parent.stderr.readline().startswith("stopping after what runs now")
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=LIMIT_S)
    assert out == "interrupted\n"
    wait_gone(read_pids(tmp_path / "a/a.family") + read_pids(tmp_path / "b/b.family"))
