"""Runs jobs, each in a process of its own: jobs in, one result per row out, stored in a journal to resume from.

A job names a function and its rows. A row that raises, runs out of memory, hangs or kills its process becomes a failed
result, and the other rows go on. A launcher decides where the processes run and how many at once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any, NamedTuple

from flopcalc.measure.jobs.job import Job, Json, Result, RowError, RunnerError
from flopcalc.measure.jobs.journal import Journal, explain_disk_errors, lock_folder
from flopcalc.measure.jobs.launchers import POLL_S, Launcher, Local
from flopcalc.measure.jobs.progress import Progress

__all__ = ["Job", "Journal", "Outcome", "Progress", "Result", "RowError", "RunnerError", "run_jobs"]


class Outcome(NamedTuple):
    """All results, in the order of the jobs; `stopped` if Ctrl-C ended the run before the last row."""

    results: tuple[Result, ...]
    stopped: bool
    ran: int  # rows that ran now, not found in the journal
    ran_jobs: frozenset[str]  # the jobs of these rows


def run_jobs(
    jobs: Sequence[Job],
    folder: str,
    *,
    identity: Json | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
    launcher: Launcher | None = None,
    logs: str | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Outcome:
    """Run the rows that the folder's journal lacks; `identity` (device, versions) must equal the journal's."""
    logs = logs or os.path.join(folder, "logs")
    launcher = launcher or Local()
    show = progress or Progress(None)
    log_files = _name_logs(jobs)
    with (
        explain_disk_errors(folder),
        lock_folder(folder),
        closing(Journal(folder, identity or {}, fresh)) as journal,
        _catch_signals() as stops,
        closing(launcher),
    ):
        known = _find_known(jobs, journal.results, retry_failed)
        left: deque[Job] = deque()
        for job in jobs:
            if rows := {row: job.rows[row] for row in job.rows if (job.id, row) not in known}:
                left.append(job._replace(rows=rows))
        if left:  # a finished run opens no cluster and touches no device
            os.makedirs(logs, exist_ok=True)
            launcher.open(folder)
        show.begin(jobs, known, min(launcher.slots, len(left)) if left else 1)
        new: list[Result] = []

        def stop_if_asked() -> None:
            if stops:
                stops.clear()
                left.clear()
                launcher.stop()
                show.say("stopping after what runs now; Ctrl-C again stops at once. What is done is kept.")

        try:
            while left or launcher.running:
                stop_if_asked()
                while left and len(launcher.running) < launcher.slots:
                    job = left.popleft()
                    show.start(job.id)
                    launcher.start(job, os.path.join(logs, log_files[job.id]))
                show.tick()
                for result in launcher.wait(POLL_S):
                    journal.append(result)
                    new.append(result)
                    show.note(result)
                    if on_result is not None:
                        on_result(result)
                    stop_if_asked()  # before the next row begins
        finally:
            show.end()
    known |= {(result.job, result.row): result for result in new}
    results = tuple(known[job.id, row] for job in jobs for row in job.rows if (job.id, row) in known)
    stopped = len(results) < sum(len(job.rows) for job in jobs)
    return Outcome(results, stopped, len(new), frozenset(result.job for result in new))


def _find_known(jobs: Sequence[Job], stored: Sequence[Result], retry_failed: bool) -> dict[tuple[str, str], Result]:
    """The stored results that answer a row of the jobs; if there are several, the last."""
    keys = {(job.id, row): job.key(row) for job in jobs for row in job.rows}
    last = {(result.job, result.row): result for result in stored}
    return {
        place: last[place]
        for place, key in keys.items()
        if place in last and last[place].key == key and (last[place].is_ok or not retry_failed)
    }


def _name_logs(jobs: Sequence[Job]) -> dict[str, str]:
    """Job id -> name of its log file."""
    owners: dict[str, str] = {}
    for job in jobs:
        log = re.sub(r"[^\w.-]", "_", job.id) + ".log"
        if log in owners:
            raise RunnerError(f"jobs {owners[log]} and {job.id} would share the log {log}: rename one of them")
        owners[log] = job.id
    return {job: log for log, job in owners.items()}


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Ctrl-C once: it is in the list, to stop after what runs. Ctrl-C twice, SIGTERM, SIGHUP: end what runs now."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, signal.default_int_handler)

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, note)
        for other in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(other) is signal.SIG_DFL:  # else nohup's choice, or the program's own
                previous[other] = signal.signal(other, leave)
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
