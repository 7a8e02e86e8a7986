"""A launcher for tests of time limits: the time is over when a file is there, whatever the clock says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flopcalc.measure.jobs.job import Result
from flopcalc.measure.jobs.launchers import Local


class Impatient(Local):
    """Ends the time of the worker that runs when the file appears; once, so that later workers have theirs."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self._mark = mark
        self._has_ended_one = False

    def wait(self, timeout_s: float) -> Iterator[Result]:
        if not self._has_ended_one and self._mark.exists():
            self._has_ended_one = True
            for run in self.running:
                run.worker.deadline_s = 0.0
        return super().wait(timeout_s)
