"""What the runner, its launchers and its workers hand to each other: jobs and tasks in, results out; data only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.errors import FlopcalcError

Json = dict[str, Any]
# Journals name a job's function by the path it had when they were first written: module now -> then.
_FIRST_PATHS = {
    "flopcalc.measure.calibrate.provenance": "flopcalc.measure.provenance",
    "flopcalc.measure.calibrate.tables.attention": "flopcalc.measure.tables.attention",
    "flopcalc.measure.calibrate.tables.counts": "flopcalc.measure.tables.counts",
    "flopcalc.measure.calibrate.tables.gemm": "flopcalc.measure.tables.gemm",
    "flopcalc.measure.calibrate.tables.memory": "flopcalc.measure.tables.memory",
    "flopcalc.measure.calibrate.tables.steps": "flopcalc.measure.tables.steps",
    "flopcalc.measure.predictor.host_calls": "flopcalc.measure.calls",
    "flopcalc.measure.predictor.runs": "flopcalc.measure.tables.runs",
    "flopcalc.measure.predictor.single_calls": "flopcalc.measure.alone",
}


class RunnerError(FlopcalcError):
    """A run that cannot start or go on: folder in use, other settings in its journal, disk full."""


class RowError(Exception):
    """Raised by a row's function when the row cannot be measured; its text is the whole detail."""


class Job(NamedTuple):
    """What one process does: `call` ('package.module:function') is given `args`, then row after row."""

    id: str
    call: str
    args: Json
    rows: Mapping[str, Any]  # row id -> its parameters (JSON), in order
    timeout_s: float = 120.0  # of one row
    start_timeout_s: float = 300.0  # of the call itself: imports, building a model
    expected_s: float = 0.0  # of the whole job, for the time left; 0: not known
    env: Mapping[str, str] = {}
    # Given to the call with `args`, but no part of the question: files that it reads or writes.
    where: Mapping[str, Any] = {}

    def key(self, row: str) -> str:
        """Changes when a row's meaning does, so that a journal's result is not taken for another question's."""
        module, _, function = self.call.partition(":")
        call = f"{_FIRST_PATHS.get(module, module)}:{function}"
        text = json.dumps([call, self.args, self.rows[row]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Task(NamedTuple):
    """A job as a launcher gets it: the rows that are still to be run, and the file that takes the worker's output."""

    job: Job
    rows: tuple[str, ...]
    log: str


class Result(NamedTuple):
    """What became of one row."""

    job: str
    row: str
    key: str
    status: str  # ok, failed
    reason: str | None  # oom, timeout, killed, exit, exception, worker lost
    detail: str | None
    data: Any
    seconds: float

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


class Lost(NamedTuple):
    """A job whose machine or engine went away under it: nothing is known of its rows, it may be run elsewhere."""

    job: str
    detail: str


class Running(NamedTuple):
    """A job that runs now, for those who watch."""

    job: str
    seconds: float
    host_bytes: int | None = None  # resident memory of all its processes; None: not known here
    device_bytes: int | None = None  # memory in use on its device
    place: str = ""


def make_failure(job: Job, row: str, reason: str, detail: str, seconds: float) -> Result:
    return Result(job.id, row, job.key(row), "failed", reason, detail, None, round(seconds, 3))
