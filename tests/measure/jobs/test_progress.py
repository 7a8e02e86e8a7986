"""What a run shows: counts, failures, what runs, the time left."""

from __future__ import annotations

import os
from io import StringIO
from types import SimpleNamespace

import pytest

from flopcalc.measure.jobs import progress as module
from flopcalc.measure.jobs.job import Job, Result
from flopcalc.measure.jobs.progress import Progress, format_time


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def make_job(name: str, rows: int = 1, expected_s: float = 0.0) -> Job:
    return Job(name, "m:f", {}, {str(i): {} for i in range(rows)}, expected_s=expected_s)


def make_result(name: str, row: str = "0", seconds: float = 0.0, reason: str | None = None) -> Result:
    status = "failed" if reason else "ok"
    return Result(name, row, "", status, reason, "why" if reason else None, None, seconds)


def test_the_status_is_repeated_in_a_file(clock: list[float]) -> None:
    stream = StringIO()
    progress = Progress(stream)
    progress.begin([make_job("a", 4), make_job("b")], {("b", "0"): make_result("b")})
    progress.start("a")
    clock[0] += 5
    progress.note(make_result("a", "0", 90.0))
    progress.tick()
    progress.tick()  # too soon
    progress.note(make_result("a", "1", 30.0, "oom"))
    progress.end()
    assert stream.getvalue().splitlines() == [
        "2/5 done, 0:05 so far, 4:30 left; running: a 0:05",
        "3/5 done, 1 failed, 0:05 so far, 2:00 left",
    ]


def test_the_status_is_rewritten_on_a_terminal(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_terminal_size", lambda: os.terminal_size((49, 20)))
    stream = Terminal()
    progress = Progress(stream, lists_results=True)
    progress.begin([make_job("a"), make_job("b")], {})
    progress.tick()
    assert stream.getvalue() == "\r0/2 done, 0:00 so far, 0:00 left\x1b[K"
    stream.truncate(stream.seek(0))
    progress.start("a")
    clock[0] += 61
    progress.start("b")
    progress.tick()
    status = "\r0/2 done, 1:01 so far, 0:00 left; running: a 1:0\x1b[K"  # one line, cut to the width
    assert stream.getvalue() == status
    progress.note(make_result("a", seconds=61.0))
    assert stream.getvalue() == f"{status}\r\x1b[K[1/2] a: ok after 1:01\n"
    progress.tick()  # at once, for the line has replaced it
    assert stream.getvalue().endswith("\r1/2 done, 1:01 so far, 1:01 left; running: b 0:0\x1b[K")


@pytest.mark.usefixtures("clock")
def test_results_in_a_file_are_lines_without_a_status() -> None:
    stream = StringIO()
    progress = Progress(stream, lists_results=True)
    progress.begin([make_job("a"), make_job("b"), make_job("c")], {("c", "0"): make_result("c")})
    progress.tick()
    progress.note(make_result("a", seconds=61.0))
    progress.note(make_result("b", seconds=3700.0, reason="timeout"))
    progress.end()
    assert stream.getvalue().splitlines() == [
        "[2/3] a: ok after 1:01",
        "[3/3] b: failed after 1:01:40, timeout: why",
        "3/3 done, 1 failed, 0:00 so far, 0:00 left",
    ]


def test_the_time_left_is_that_of_rows_so_far_else_what_was_expected() -> None:
    jobs = [make_job("a", 4, 40.0), make_job("b", 4, 8.0), make_job("c", 4)]
    progress = Progress(None)
    progress.begin(jobs, {("b", "0"): make_result("b", "0", 100.0)})
    # Nothing ran yet: four rows of 10 s and three of 2 s; nothing is known of c.
    assert progress.estimate_left_s() == pytest.approx(46.0)
    progress.note(make_result("a", "0", 3.0))
    # Three rows of a like its first, three of b as expected, four of c like all rows so far.
    assert progress.estimate_left_s() == pytest.approx(3 * 3 + 3 * 2 + 4 * 3)
    progress.note(make_result("a", "1", 5.0))
    assert progress.estimate_left_s() == pytest.approx(2 * 4 + 3 * 2 + 4 * 4)
    progress.begin(jobs, {}, slots=2)
    assert progress.estimate_left_s() == pytest.approx(24.0)


class NoReader(Terminal):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("end", ["no reader", "closed", "none"])
def test_a_stream_that_takes_nothing_stops_no_run(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = NoReader() if end == "no reader" else Terminal()
    if end == "none":  # a process without stderr
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=None))
    progress = Progress(None if end == "none" else stream, lists_results=True)
    progress.begin([make_job("a")], {})
    if end == "closed":
        stream.close()
    progress.tick()
    progress.say("text")
    progress.note(make_result("a"))
    progress.end()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_format_time(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
