"""Progress on a stream: how many rows are done, what runs now, the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from shutil import get_terminal_size
from typing import TextIO

from flopcalc.measure.jobs.job import Job, Result


class Progress:
    """A status line: rewritten on a terminal, repeated every few seconds elsewhere.

    With `lists_results` every result has a line of its own, and the status line is for terminals only.
    """

    def __init__(self, stream: TextIO | None, *, lists_results: bool = False) -> None:
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._lists_results = lists_results
        self._every_s = 0.5 if self._is_terminal else 5.0
        self._shown_s = 0.0
        self.begin((), {})

    def begin(self, jobs: Sequence[Job], known: Mapping[tuple[str, str], Result], slots: int = 1) -> None:
        self._began_s = time.monotonic()
        self._slots = slots
        self._total = sum(len(job.rows) for job in jobs)
        self._left = {job.id: sum((job.id, row) not in known for row in job.rows) for job in jobs}
        self._expected_s = {job.id: job.expected_s / max(len(job.rows), 1) for job in jobs}
        self._spent_s: dict[str, list[float]] = {job.id: [] for job in jobs}
        self._failed = sum(not result.is_ok for result in known.values())
        self._running: dict[str, float] = {}  # job -> when it was started

    def start(self, job: str) -> None:
        self._running[job] = time.monotonic()

    def note(self, result: Result) -> None:
        self._left[result.job] -= 1
        if not self._left[result.job]:
            self._running.pop(result.job, None)
        self._spent_s[result.job].append(result.seconds)
        self._failed += not result.is_ok
        if self._lists_results:
            took = f" after {format_time(result.seconds)}"
            fate = f"ok{took}" if result.is_ok else f"failed{took}, {result.reason}: {result.detail}"
            self.say(f"[{self._total - sum(self._left.values())}/{self._total}] {result.job}: {fate}")

    def tick(self) -> None:
        """Show the status, if it is time to."""
        now = time.monotonic()
        if now - self._shown_s < self._every_s or (self._lists_results and not self._is_terminal):
            return
        self._shown_s = now
        running = ", ".join(f"{job} {format_time(now - began_s)}" for job, began_s in self._running.items())
        text = self._format_counts() + (f"; running: {running}" if running else "")
        columns = get_terminal_size().columns
        self._write(f"\r{text[: columns - 1]}\x1b[K" if self._is_terminal else f"{text}\n")

    def say(self, text: str) -> None:
        """A line that stays; on stderr if no progress is shown."""
        self._write(f"\r\x1b[K{text}\n" if self._is_terminal else f"{text}\n", self._stream or sys.stderr)
        self._shown_s = 0.0

    def end(self) -> None:
        if self._stream is not None:
            self.say(self._format_counts())

    def estimate_left_s(self) -> float:
        """From the rows of each job so far, else from what was expected of it, else from all rows so far."""
        known = [seconds for spent in self._spent_s.values() for seconds in spent]
        total_s = 0.0
        for job, rows in self._left.items():
            spent = self._spent_s[job] or ([self._expected_s[job]] if self._expected_s[job] else known)
            total_s += rows * sum(spent) / max(len(spent), 1)
        return total_s / self._slots

    def _format_counts(self) -> str:
        done = self._total - sum(self._left.values())
        failed = f", {self._failed} failed" if self._failed else ""
        spent = format_time(time.monotonic() - self._began_s)
        return f"{done}/{self._total} done{failed}, {spent} so far, {format_time(self.estimate_left_s())} left"

    def _write(self, text: str, stream: TextIO | None = None) -> None:
        """A stream that nobody reads, or a full disk under it, must not end a run."""
        stream = stream or self._stream
        if stream is not None:  # None: a process without stderr
            with suppress(OSError, ValueError):
                stream.write(text)
                stream.flush()


def format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
