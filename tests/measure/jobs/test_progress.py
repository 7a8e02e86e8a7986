"""What those who wait see: counts, failures, what runs with its memory, the time left."""

from __future__ import annotations

import os
from io import StringIO

import pytest

from flopcalc.measure.jobs import progress as module
from flopcalc.measure.jobs.job import Job, Result, Running
from flopcalc.measure.jobs.progress import LiveTable, Progress, format_time


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 7


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 1000.0)


def make_job(name: str, rows: int = 1, expected_s: float = 0.0) -> Job:
    return Job(name, "m:f", {}, {str(i): {} for i in range(rows)}, expected_s=expected_s)


def make_result(name: str, row: str = "0", seconds: float = 0.0, reason: str | None = None) -> Result:
    status = "failed" if reason else "ok"
    return Result(name, row, "", status, reason, "why" if reason else None, None, seconds)


def test_the_line_says_rows_failures_and_time_left() -> None:
    stream = StringIO()
    line = Progress(stream, every_s=0.0)
    line.begin([make_job("a", 4)], {})
    line.note(make_result("a", "0", 90.0))
    line.tick(lambda: [Running("a", 5.0)])
    line.note(make_result("a", "1", 30.0, "oom"))
    line.end()
    assert stream.getvalue() == "a: 1/4 rows, 0:00 so far, 4:30 left\na: 2/4 rows, 1 failed, 0:00 so far, 2:00 left\n"


def test_the_line_on_a_terminal_is_rewritten() -> None:
    stream = Terminal()
    line = Progress(stream)
    line.begin([make_job("a", 2)], {})
    line.tick(list)
    line.tick(lambda: pytest.fail("too soon to look"))
    line.end()
    assert stream.getvalue() == "\ra: 0/2 rows, 0:00 so far, 0:00 left" * 2 + "\n"


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
    for row in "23":
        progress.note(make_result("a", row, 4.0))
    assert progress.estimate_left_s() == pytest.approx(3 * 2 + 4 * 4)


@pytest.mark.parametrize(("slots", "left_s"), [(1, 100.0), (2, 50.0), (3, 40.0), (9, 40.0)])
def test_slots_share_the_time_left(slots: int, left_s: float) -> None:
    # In order, each to the slot that is free first: with two, 30 + 20 against 10 + 40.
    progress = Progress(None)
    jobs = [make_job(str(i), 1, expected) for i, expected in enumerate((30.0, 10.0, 40.0, 20.0))]
    progress.begin(jobs, {}, slots)
    assert progress.estimate_left_s() == left_s


def test_the_table_off_a_terminal_is_a_line_for_each_result() -> None:
    stream = StringIO()
    table = LiveTable(stream)
    table.begin([make_job("a"), make_job("b"), make_job("c")], {("c", "0"): make_result("c")})
    table.tick(lambda: pytest.fail("no one would see it"))
    table.note(make_result("a", seconds=61.0))
    table.note(make_result("b", seconds=3700.0, reason="timeout"))
    table.end()
    assert stream.getvalue().splitlines() == [
        "[2/3] a: ok after 1:01",
        "[3/3] b: failed after 1:01:40, timeout: why",
        "3/3 done, 1 failed, 0:00 so far, 0:00 left",
    ]


def test_the_table_on_a_terminal_is_drawn_over_itself() -> None:
    stream = Terminal()
    table = LiveTable(stream)
    table.begin([make_job("first"), make_job("the second", expected_s=9.0)], {}, slots=2)
    table.tick(
        lambda: [Running("first", 5.0, 3 << 30, 7 << 30, "GPU 0"), Running("the second", 62.0, None, None, "GPU 1")]
    )
    drawn = stream.getvalue()
    assert drawn.splitlines() == [
        "running        time      memory      device  on",
        "first          0:05    3.00 GiB    7.00 GiB  GPU 0",
        "the second     1:02           -           -  GPU 1",
        "0/2 done, 0:00 so far, 0:09 left",
    ]
    table.note(make_result("first", seconds=6.0))
    # Up four lines, clear, the line that stays; then the table anew.
    assert stream.getvalue() == drawn + "\x1b[4A\x1b[J[1/2] first: ok after 0:06\n"
    table.tick(list)
    assert stream.getvalue().endswith("0:06\n1/2 done, 0:00 so far, 0:09 left\n")
    table.say("stopping")
    assert stream.getvalue().endswith("left\n\x1b[1A\x1b[Jstopping\n")


def test_the_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {7: os.terminal_size((20, 6))}  # of that one, wherever stdout goes
    monkeypatch.setattr(module.os, "get_terminal_size", sizes.__getitem__)
    stream = Terminal()
    table = LiveTable(stream)
    table.begin([make_job(str(i)) for i in range(9)], {})
    table.tick(lambda: [Running(f"job {i}", 1.0) for i in range(9)])
    lines = stream.getvalue().splitlines()
    assert lines[1:4] == ["job 0       0:01   ", "job 1       0:01   ", "… and 7 more"]
    assert len(lines) == 5
    assert max(map(len, lines)) < 20


class NoReader(Terminal):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("kind", [Progress, LiveTable])
@pytest.mark.parametrize("end", ["no reader", "closed", "none"])
def test_a_stream_that_takes_nothing_stops_no_run(
    kind: type[Progress], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = NoReader() if end == "no reader" else Terminal()
    if end == "none":  # a process without stderr
        monkeypatch.setattr(module.sys, "stderr", None)
    progress = kind(None if end == "none" else stream)
    progress.begin([make_job("a")], {})
    if end == "closed":
        stream.close()
    progress.tick(lambda: [Running("a", 1.0)])
    progress.say("text")
    progress.note(make_result("a"))
    progress.end()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_format_time(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
