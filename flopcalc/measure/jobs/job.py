"""What the runner, the launchers and the workers exchange: jobs in, results out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.validate import FromZero

Json = dict[str, Any]
# Journals name a job's function by the path that it had when they were first written.
_MOVED = re.compile(r"^flopcalc\.measure\.(calibrate\.tables|predictor)\.")
_FIRST_PATH = "flopcalc.measure.tables."


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
    # Passed to the call with `args`, but not part of the key: files that it reads or writes.
    where: Mapping[str, Any] = {}

    def key(self, row: str) -> str:
        """Identifies the question of a row; a journal's result with another key is not used."""
        text = json.dumps([_MOVED.sub(_FIRST_PATH, self.call), self.args, self.rows[row]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Result(NamedTuple):
    """The outcome of one row; a line of the journal has these fields."""

    job: str
    row: str
    key: str
    status: str  # ok, failed
    reason: str | None  # oom, timeout, killed, exit, exception, worker lost
    detail: str | None
    data: Any
    seconds: FromZero

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


def make_result(job: Job, row: str, answer: Json, seconds: float) -> Result:
    reason, detail, data = (answer.get(name) for name in ("reason", "detail", "data"))
    return Result(job.id, row, job.key(row), answer["status"], reason, detail, data, round(seconds, 3))


def make_failure(reason: str, detail: str) -> Json:
    """The answer for a row, or for a job, that no worker answered."""
    return {"status": "failed", "reason": reason, "detail": detail, "ends": True}
