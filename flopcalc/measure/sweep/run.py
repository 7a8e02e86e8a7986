"""Configurations in; each measured in a process of its own, rows in LOGS/results.jsonl; what there is so far out."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcalc._version import __version__
from flopcalc.base.data import describe_install, find_version
from flopcalc.base.errors import format_value
from flopcalc.base.files import MAX_LOG_BYTES, read_bytes, read_text, write_whole
from flopcalc.base.spelling import spell
from flopcalc.base.validate import FromZero, find_fault
from flopcalc.base.vocabulary import BASELINE
from flopcalc.measure.jobs.journal import describe_error
from flopcalc.measure.jobs.runner import Progress, Result, run_jobs
from flopcalc.measure.sweep.matrix import CHILD, Configuration, SweepError
from flopcalc.report.sweep import get_value

if TYPE_CHECKING:
    from flopcalc.measure.jobs.launchers import Launcher

Json = dict[str, Any]
RESULTS = "results.jsonl"


class Swept(NamedTuple):
    """The rows that the matrix has so far, in its order; `stopped` if some are missing, `ran` were run now."""

    rows: tuple[Json, ...]
    stopped: bool
    ran: int

    @property
    def failed(self) -> int:
        return sum(row["status"] != "ok" for row in self.rows)


def run_sweep(
    configurations: Sequence[Configuration],
    logs_dir: str = "logs",
    *,
    runs_dir: str | None = "runs",
    launcher: Launcher | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
    on_rows: Callable[[Sequence[Json]], None] | None = None,
    call: str = CHILD,
) -> Swept:
    """Run what the folder lacks; rows of other matrices that were measured into it stay, unless `fresh`.

    `on_rows` is given the matrix's rows so far after each result.
    """
    _check_folder(logs_dir)
    path = os.path.join(logs_dir, RESULTS)
    owners = {configuration.id: configuration for configuration in configurations}
    stored = {} if fresh else {row["id"]: row for row in load_results(path, must_exist=False)}
    for name in stored.keys() & owners.keys():
        was, now = stored[name]["model"], owners[name].model
        if was != now:
            raise SweepError(
                f"{path} holds {name} of model {was}, now it is {now}: choose another {spell('logs_dir')}, measure "
                f"both models in one matrix, or run with {spell('fresh')} to forget what is there"
            )
    others: list[Json] | None = None
    found = {
        name: row
        for name, row in stored.items()
        if name in owners and all(asked in (row.get(key), "auto") for key, asked in owners[name].to_row().items())
    }  # with other steps, say, it is of another matrix

    def save(rows: Sequence[Json]) -> None:
        nonlocal others
        if others is None:  # read when the folder is ours: another sweep may have ended in it just before
            before = [] if fresh else load_results(path, must_exist=False)
            others = [row for row in before if row["id"] not in owners]
        save_results(path, [*others, *rows])

    def keep(result: Result) -> None:
        found[result.job] = make_row(owners[result.job], result)
        rows = [found[name] for name in owners if name in found]
        save(rows)
        if on_rows is not None:
            on_rows(rows)

    jobs = [configuration.to_job(runs_dir, call) for configuration in configurations]
    outcome = run_jobs(
        jobs,
        logs_dir,
        identity=describe_versions(),
        fresh=fresh,
        retry_failed=retry_failed,
        progress=progress,
        launcher=launcher,
        logs=logs_dir,
        on_result=keep,
    )
    rows = tuple(make_row(owners[result.job], result) for result in outcome.results)
    save(rows)
    return Swept(rows, outcome.stopped, outcome.ran)


def _check_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise SweepError(f"{spell('logs_dir')} {folder}: cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise SweepError(f"{spell('logs_dir')} {folder}: cannot be written to; choose another folder")


def make_row(configuration: Configuration, result: Result) -> Json:
    """One line of results.jsonl: the configuration, then what its process measured, or why it did not."""
    asked = configuration.to_row()
    row: Json = {"id": asked.pop("id"), "status": result.status, **asked, "seconds": result.seconds}
    if not result.is_ok:
        return row | {"reason": result.reason, "detail": result.detail}
    # The model as it was asked for; dtype and device as they turned out; a loss that is no number is null.
    data = json.loads(json.dumps(result.data), parse_constant=lambda _: None)
    return {**row, **data, "model": configuration.model}


def describe_versions() -> Json:
    """What must not change between the parts of a sweep: its rows are compared with each other."""
    libraries = {name: find_version(name) for name in ("torch", "transformers", "opacus")}
    return {"command": "sweep", "flopcalc": __version__, "python": platform.python_version(), **libraries}


def check_libraries(configurations: Sequence[Configuration]) -> None:
    """An error in words before the first process starts, not the same failure in every row."""
    needed = ["torch", "transformers"]
    if any(configuration.trainer != BASELINE for configuration in configurations):
        needed.append("opacus")
    missing = [name for name in needed if find_version(name) is None]
    if missing:
        raise SweepError(f"the sweep needs {', '.join(missing)}: {describe_install('sweep')}")


# --- results.jsonl ----------------------------------------------------------------------------------------------------
def load_results(path: str, *, must_exist: bool = True) -> list[Json]:
    """The rows of a results.jsonl, or of the folder that holds it."""
    name = os.path.join(path, RESULTS) if os.path.isdir(path) else path
    if not os.path.lexists(name):
        if not must_exist:
            return []
        raise SweepError(f"{name}: no such file or folder. Give the {spell('logs_dir')} of a `flopcalc sweep run`")
    text = read_text(name, MAX_LOG_BYTES, SweepError)
    lines = text.removesuffix("\n").split("\n")  # splitlines() would also cut at U+2028 inside a text
    return [_parse(line, f"{name}: line {number}") for number, line in enumerate(lines, start=1) if line]


def _parse(line: str, where: str) -> Json:
    try:
        row = json.loads(line, parse_constant=lambda _: None, parse_float=_parse_float)
    except (ValueError, RecursionError):
        row = None
    wrong = "no JSON object" if not isinstance(row, dict) else _find_wrong(row)
    if wrong is not None:
        raise SweepError(
            f"{where} is no row of a sweep ({wrong}): remove the file, and `flopcalc sweep run` writes it anew"
        )
    return dict(row)


# What the summary reads of a row; a newer or an older flopcalc may write more or less, but not something else there.
_TEXTS = ("id", "status", "trainer", "model")
_SETTINGS = (
    ("dtype",),
    ("device",),
    ("attention",),
    ("steps",),
    ("warmup",),
    ("environment", "device"),
    ("environment", "threads"),
)
_NUMBERS = (
    ("batch_size",), ("seq_len",), ("parameters",), ("step_time_s", "median"), ("step_time_s", "p10"),
    ("step_time_s", "p90"), ("tokens_per_s",), ("peak_memory_bytes",), ("flops", "total"), ("counted_over_analytic",),
    ("measured_over_analytic",), ("mfu",), ("hfu",),
)  # fmt: skip


def _parse_float(text: str) -> float | None:
    """A number beyond all floats is none, as NaN and Infinity are."""
    value = float(text)
    return value if math.isfinite(value) else None


def _find_wrong(row: Json) -> str | None:
    """What keeps a JSON object from being a row, or None."""
    for key in _TEXTS:
        if not isinstance(row.get(key), str):
            return f"{key} is {format_value(row.get(key))}"
    for keys in _SETTINGS:
        value = get_value(row, *keys)
        if not isinstance(value, str | int | float | None):
            return f"{'.'.join(keys)} is {format_value(value)}"
    if not isinstance(row.get("notes", []), list):
        return f"notes is {format_value(row['notes'])}"
    for keys in _NUMBERS:
        value = get_value(row, *keys)
        if value is not None and find_fault(value, FromZero):
            return f"{'.'.join(keys)} is {format_value(value)}"
    return None


def save_results(path: str, rows: Sequence[Json]) -> None:
    """Whole or not at all; a file that says the same already is left alone."""
    text = "".join(json.dumps(row) + "\n" for row in rows)  # ASCII: a path may hold bytes that are no UTF-8
    try:
        if os.path.isfile(path) and read_bytes(path, MAX_LOG_BYTES, SweepError) == text.encode():
            return
        write_whole(path, text)
    except OSError as error:
        raise SweepError(
            f"{path}: {describe_error(error)}; the results so far are in the journal next to it: run again to continue"
        ) from None
