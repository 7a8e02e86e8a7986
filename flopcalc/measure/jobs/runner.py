"""Jobs go in, one result per row comes out: each job in a process of its own, so that no failure touches another.

A job names a Python function and its rows. The function is called once in a fresh process and gives back a function
of one row; the parent then asks for row after row. A row that raises, runs out of memory, hangs or kills its process
becomes a failed result, and the next rows go on, in a new process where that is needed. Results stand in a journal
(one JSON line each, on disk before the next result is taken), so the same call again runs only what is missing.
Where the processes run, and how many at once, is the launcher's part: without one, here and one after the other.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from flopcalc.measure.jobs.job import Job, Json, Result, RowError, RunnerError, Task, make_failure
from flopcalc.measure.jobs.journal import Journal, lock_folder, make_folder
from flopcalc.measure.jobs.launchers import Launcher, Local
from flopcalc.measure.jobs.process import POLL_S
from flopcalc.measure.jobs.progress import LiveTable, Progress

__all__ = [
    "Job", "Journal", "LiveTable", "Outcome", "Progress", "Result", "RowError", "RunnerError", "run_jobs",
]  # fmt: skip

_LOST_LIMIT = 3  # a job that took its machine with it so often is the cause, not the victim


class Outcome(NamedTuple):
    """All results there are, in the order of the jobs; `stopped` if Ctrl-C ended the run before the last row."""

    results: tuple[Result, ...]
    stopped: bool
    ran: int  # rows that were run now, not found in the journal
    ran_jobs: frozenset[str]  # the jobs that these rows belong to


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
    """Run what the folder's journal lacks; `identity` (device, versions) must be the one the journal began with."""
    logs = logs or os.path.join(folder, "logs")
    _check_ids(jobs)
    _fill_standard_streams()
    with lock_folder(folder), Journal(folder, identity or {}, fresh) as journal, _Signals() as signals:
        known = {(result.job, result.row): result for result in journal.results}
        found = {}
        for job in jobs:
            for row in job.rows:
                result = known.get((job.id, row))
                if result and result.key == job.key(row) and (result.is_ok or not retry_failed):
                    found[job.id, row] = result
        new: list[Result] = []
        show = progress or Progress(None)

        def keep(result: Result) -> None:
            journal.append(result)
            found[result.job, result.row] = result
            new.append(result)
            show.note(result)
            if on_result is not None:
                on_result(result)

        tasks = [
            Task(job, rows, os.path.join(logs, _make_log_name(job.id)))
            for job in jobs
            if (rows := tuple(row for row in job.rows if (job.id, row) not in found))
        ]
        launcher = launcher or Local()
        try:
            if tasks:  # a finished run opens no engine and touches no device
                make_folder(logs)
                launcher.open(folder)
            show.begin(jobs, found, min(launcher.slots, len(tasks)) if tasks else 1)
            try:
                _run_tasks(tasks, launcher, signals, show, keep)
            finally:
                show.end()
        finally:
            launcher.close()
        ordered = tuple(found[job.id, row] for job in jobs for row in job.rows if (job.id, row) in found)
        stopped = len(ordered) < sum(len(job.rows) for job in jobs)
        return Outcome(ordered, stopped, len(new), frozenset(result.job for result in new))


def _run_tasks(
    tasks: Sequence[Task], launcher: Launcher, signals: _Signals, progress: Progress, keep: Callable[[Result], None]
) -> None:
    waiting = deque(tasks)
    by_id = {task.job.id: task for task in tasks}
    losses: Counter[str] = Counter()
    is_stopping = False
    while waiting or launcher.is_busy:
        if signals.is_stop_asked and not is_stopping:
            is_stopping = True
            waiting.clear()
            launcher.stop()
            progress.say("stopping after what runs now; Ctrl-C again stops at once. What is done is kept.")
        while waiting and launcher.has_room():
            launcher.start(waiting.popleft())
        progress.tick(launcher.look)
        for event in launcher.wait(POLL_S):
            if isinstance(event, Result):
                keep(event)
                continue
            if is_stopping:
                continue  # it is run the next time
            task = by_id[event.job]
            losses[event.job] += 1
            if losses[event.job] < _LOST_LIMIT:
                progress.say(f"{event.job}: its worker was lost ({event.detail}), it is run again")
                waiting.append(task)
            else:
                for row in task.rows:
                    detail = f"lost {_LOST_LIMIT} times, last: {event.detail}"
                    keep(make_failure(task.job, row, "worker lost", detail, 0.0))


def _check_ids(jobs: Sequence[Job]) -> None:
    owners: dict[str, str] = {}
    for job in jobs:
        log = _make_log_name(job.id)
        other = owners.setdefault(log, job.id)
        if other != job.id:
            raise RunnerError(f"jobs {other} and {job.id} would share the log {log}: rename one of them")
    if len(owners) < len(jobs):
        twice = [name for name, count in Counter(job.id for job in jobs).items() if count > 1]
        raise RunnerError(f"two jobs share an id: {', '.join(twice)}")


def _fill_standard_streams() -> None:
    """Where stdin, stdout or stderr is closed, the journal would take its number, and then any library's messages."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _make_log_name(job: str) -> str:
    return f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in job)}.log"


class _Signals:
    """Ctrl-C once: stop after what runs. Twice: stop now. SIGTERM and a lost terminal: stop now, ending what runs."""

    def __init__(self) -> None:
        self.is_stop_asked = False
        self._exit_code: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._stop)
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:  # nohup's choice, or the program's own, stands
                    self._previous[number] = signal.signal(number, self._end)
        return self

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_stop_asked:
            raise KeyboardInterrupt
        self.is_stop_asked = True

    def _end(self, number: int, _frame: FrameType | None) -> None:
        self._exit_code = 128 + number
        sys.exit(self._exit_code)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, SystemExit) and self._exit_code is not None:
            error.code = self._exit_code  # Ray makes a 1 of it
        for number, handler in self._previous.items():
            signal.signal(number, handler)
