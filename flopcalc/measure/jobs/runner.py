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
from collections.abc import Callable, Sequence
from contextlib import closing
from types import FrameType
from typing import Any, NamedTuple

from flopcalc.measure.jobs.job import Job, Json, Result, RowError, RunnerError, Task
from flopcalc.measure.jobs.journal import Journal, lock_folder, make_folder
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
    with lock_folder(folder), closing(Journal(folder, identity or {}, fresh)) as journal, _Signals() as signals:
        stored = {(result.job, result.row): result for result in journal.results}
        known: dict[tuple[str, str], Result] = {}
        tasks: deque[Task] = deque()
        for job in jobs:
            for row in job.rows:
                result = stored.get((job.id, row))
                if result and result.key == job.key(row) and (result.is_ok or not retry_failed):
                    known[job.id, row] = result
            if rows := tuple(row for row in job.rows if (job.id, row) not in known):
                tasks.append(Task(job, rows, os.path.join(logs, log_files[job.id])))
        new: list[Result] = []

        def keep(result: Result) -> None:
            journal.append(result)
            known[result.job, result.row] = result
            new.append(result)
            show.note(result)
            if on_result is not None:
                on_result(result)

        try:
            if tasks:  # a finished run opens no cluster and touches no device
                make_folder(logs)
                launcher.open(folder)
            show.begin(jobs, known, min(launcher.slots, len(tasks)) if tasks else 1)
            try:
                _run_tasks(tasks, launcher, signals, show, keep)
            finally:
                show.end()
        finally:
            launcher.close()
    results = tuple(known[job.id, row] for job in jobs for row in job.rows if (job.id, row) in known)
    stopped = len(results) < sum(len(job.rows) for job in jobs)
    return Outcome(results, stopped, len(new), frozenset(result.job for result in new))


def _run_tasks(
    tasks: deque[Task], launcher: Launcher, signals: _Signals, progress: Progress, keep: Callable[[Result], None]
) -> None:
    is_stopping = False
    while tasks or launcher.running:
        if signals.is_stop_asked and not is_stopping:
            is_stopping = True
            tasks.clear()
            launcher.stop()
            progress.say("stopping after what runs now; Ctrl-C again stops at once. What is done is kept.")
        while tasks and len(launcher.running) < launcher.slots:
            progress.start(tasks[0].job.id)
            launcher.start(tasks.popleft())
        progress.tick()
        for result in launcher.wait(POLL_S):
            keep(result)


def _name_logs(jobs: Sequence[Job]) -> dict[str, str]:
    """Job id -> name of its log file."""
    owners: dict[str, str] = {}
    for job in jobs:
        log = re.sub(r"[^\w.-]", "_", job.id) + ".log"
        if log in owners:
            raise RunnerError(f"jobs {owners[log]} and {job.id} would share the log {log}: rename one of them")
        owners[log] = job.id
    return {job: log for log, job in owners.items()}


class _Signals:
    """Ctrl-C once: stop after what runs. Ctrl-C twice, SIGTERM, SIGHUP: stop now and end what runs."""

    def __init__(self) -> None:
        self.is_stop_asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._stop)
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:  # else nohup's choice, or the program's own
                    self._previous[number] = signal.signal(number, self._end)
        return self

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_stop_asked:
            raise KeyboardInterrupt
        self.is_stop_asked = True

    def _end(self, number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
