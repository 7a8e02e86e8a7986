"""Jobs, results and what runs now go in; a line or a table for those who wait comes out on a stream."""

from __future__ import annotations

import heapq
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from flopcalc.measure.jobs.job import Job, Result, Running
from flopcalc.units import format_bytes

_Look = Callable[[], Sequence[Running]]  # looking costs a little, so it is done only when something is shown


class Progress:
    """One line on a stream: rows done, failed, time left; rewritten on a terminal, repeated every few seconds else."""

    def __init__(self, stream: TextIO | None, every_s: float = 5.0) -> None:
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._every_s = 0.5 if self._is_terminal else every_s
        self._shown = 0.0
        self._width = 0
        self.begin((), {})

    def begin(self, jobs: Sequence[Job], found: Mapping[tuple[str, str], Result], slots: int = 1) -> None:
        self._start = time.monotonic()
        self._slots = max(1, slots)
        self._total = sum(len(job.rows) for job in jobs)
        self._left = {job.id: sum((job.id, row) not in found for row in job.rows) for job in jobs}
        self._expected = {job.id: job.expected_s / max(len(job.rows), 1) for job in jobs}
        self._spent: dict[str, list[float]] = {job.id: [] for job in jobs}
        self._failed = sum(not result.is_ok for result in found.values())
        self._job = jobs[0].id if jobs else ""

    def note(self, result: Result) -> None:
        self._job = result.job
        self._left[result.job] -= 1
        self._spent[result.job].append(result.seconds)
        self._failed += not result.is_ok

    def estimate_left_s(self) -> float:
        """Seconds left: rows so far of a job where there are some, else what was expected of it; slots share them."""
        known = [s for spent in self._spent.values() for s in spent]
        mean = sum(known) / len(known) if known else 0.0
        slots = [0.0] * self._slots
        for job, rows in self._left.items():
            spent = self._spent[job]
            each = sum(spent) / len(spent) if spent else self._expected[job] or mean
            heapq.heapreplace(slots, slots[0] + rows * each)  # the next job goes where a slot is free first
        return max(slots)

    def tick(self, look: _Look) -> None:
        """Show how things stand, if it is time to."""
        now = time.monotonic()
        if self._stream is not None and now - self._shown >= self._every_s:
            self._shown = now
            self._show(look())

    def say(self, text: str) -> None:
        """A message, also where no progress is shown."""
        _write(self._stream or sys.stderr, f"\n{text}\n" if self._is_terminal else f"{text}\n")

    def end(self) -> None:
        if self._stream is not None:
            self._show(())
            if self._is_terminal:
                _write(self._stream, "\n")

    def _format_counts(self, what: str) -> str:
        done = self._total - sum(self._left.values())
        failed = f", {self._failed} failed" if self._failed else ""
        spent = format_time(time.monotonic() - self._start)
        return f"{done}/{self._total} {what}{failed}, {spent} so far, {format_time(self.estimate_left_s())} left"

    def _show(self, running: Sequence[Running]) -> None:
        self._job = running[0].job if running else self._job
        text = f"{self._job}: {self._format_counts('rows')}"
        if self._is_terminal:
            _write(self._stream, "\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            _write(self._stream, text + "\n")


class LiveTable(Progress):
    """Finished jobs as lines; below them, on a terminal, a table that is drawn anew: what runs, its time and memory."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stderr)
        self._drawn = 0  # lines of the table that stand on the terminal now

    def note(self, result: Result) -> None:
        super().note(result)
        took = f" after {format_time(result.seconds)}"
        fate = f"ok{took}" if result.is_ok else f"failed{took}, {result.reason}: {result.detail}"
        done = self._total - sum(self._left.values())
        self._write_line(f"[{done}/{self._total}] {result.job}: {fate}")

    def say(self, text: str) -> None:
        self._write_line(text)

    def tick(self, look: _Look) -> None:
        if self._is_terminal:  # elsewhere a line for each result is enough
            super().tick(look)

    def end(self) -> None:
        self._erase()
        self._write_line(self._format_counts("done"))

    def _write_line(self, text: str) -> None:
        self._erase()
        _write(self._stream, text + "\n")
        self._shown = 0.0  # the table comes back with the next tick

    def _show(self, running: Sequence[Running]) -> None:
        columns, height = self._find_size()
        with_place = len({run.place for run in running}) > 1
        head = ("running", "time", "memory", "device", "on" if with_place else "")
        rows = [head] + [
            (run.job, format_time(run.seconds), _format_memory(run.host_bytes), _format_memory(run.device_bytes),
             run.place if with_place else "")
            for run in running
        ]  # fmt: skip
        width = max(len(row[0]) for row in rows)
        lines = [f"{a:<{width}}  {b:>7}  {c:>10}  {d:>10}  {e}".rstrip() for a, b, c, d, e in rows if running]
        room = max(1, height - 2)  # a table taller than the terminal could not be drawn over
        if len(lines) > room:
            lines[room - 1 :] = [f"… and {len(lines) - room + 1} more"]
        lines.append(self._format_counts("done"))
        self._erase()
        _write(self._stream, "".join(line[: columns - 1] + "\n" for line in lines))
        self._drawn = len(lines)

    def _find_size(self) -> os.terminal_size:
        """Of the terminal that is written to: the output itself may go to a file."""
        with suppress(OSError, ValueError, AttributeError):
            size = os.get_terminal_size(self._stream.fileno())  # type: ignore[union-attr]
            if size.columns and size.lines:
                return size
        return os.terminal_size((80, 24))

    def _erase(self) -> None:
        if self._drawn:
            _write(self._stream, f"\x1b[{self._drawn}A\x1b[J")  # up to the table's first line, clear from there on
            self._drawn = 0


def _write(stream: TextIO | None, text: str) -> None:
    """That no one reads it, or that its disk is full, is no reason to end a run."""
    if stream is not None:  # None: a process without stderr
        with suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def _format_memory(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
