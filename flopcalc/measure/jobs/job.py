"""What the runner, the launchers and the workers exchange: jobs and tasks in, results out."""

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
    """The run cannot start or go on: folder in use, other settings in its journal, disk full."""


class RowError(Exception):
    """Raised by a row's function if the row cannot be measured; its text is the whole detail."""


class Job(NamedTuple):
    """What one process does: `call` ('package.module:function') gets `args` and returns a function of one row."""

    id: str
    call: str
    args: Json
    rows: Mapping[str, Any]  # row id -> its parameters (JSON), in order
    timeout_s: float = 120.0  # for one row
    start_timeout_s: float = 300.0  # for the call itself: imports, building a model
    expected_s: float = 0.0  # for the whole job, used to show the time left; 0: not known
    env: Mapping[str, str] = {}
    # Passed to the call with `args`, but not part of the key: files that it reads or writes.
    where: Mapping[str, Any] = {}

    def key(self, row: str) -> str:
        """Identifies the question of a row; a journal's result with another key is not used."""
        module, _, function = self.call.partition(":")
        call = f"{_FIRST_PATHS.get(module, module)}:{function}"
        text = json.dumps([call, self.args, self.rows[row]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Task(NamedTuple):
    """A job as a launcher gets it: the rows to run, and the log file of its process."""

    job: Job
    rows: tuple[str, ...]
    log: str


class Result(NamedTuple):
    """The outcome of one row; a line of the journal has these fields."""

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


def make_result(job: Job, row: str, answer: Json, seconds: float) -> Result:
    reason, detail, data = (answer.get(name) for name in ("reason", "detail", "data"))
    return Result(job.id, row, job.key(row), answer["status"], reason, detail, data, round(seconds, 3))


def make_failure(reason: str, detail: str) -> Json:
    """The answer for a row, or for a task, that no worker answered."""
    return {"status": "failed", "reason": reason, "detail": detail, "ends": True}
