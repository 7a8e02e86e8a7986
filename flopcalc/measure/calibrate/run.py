"""`calibrate`: a suite goes in; the tables of this machine's device come out, measured row by row and resumable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from flopcalc.base.data import find_user_dir
from flopcalc.base.errors import CalibrationError, DeviceError, format_nearest
from flopcalc.hardware.tables import (
    FOLDER,
    SHAPES,
    MeasuredTable,
    find_table,
    is_stored,
    list_folder,
    load_table,
    save_table,
)
from flopcalc.measure.calibrate.probe import IDENTITY, probe_machine
from flopcalc.measure.calibrate.provenance import has_gpu
from flopcalc.measure.calibrate.tables import REPEATS, STATISTIC, SUITES, Json, attention, counts, gemm, memory, steps
from flopcalc.measure.jobs.runner import Job, Outcome, Progress, Result, run_jobs

# Table -> its jobs in a suite. In order of importance: a run that is cut short leaves the counts.
TABLES: dict[str, Callable[[str], list[Job]]] = {
    "counts": counts.plan,
    "padding": counts.plan_padding,
    "attention": attention.plan,
    "gemm": gemm.plan,
    "memory": memory.plan,
    "steps": steps.plan,
}


def plan_table(table: str, suite: str) -> list[Job]:
    return TABLES[table](suite)


def finish_table(table: str, records: list[Json]) -> list[Json]:
    """What can only be said with all rows at hand."""
    return memory.finish(records) if table == "memory" else records


TIME_TOLERANCE = 0.15
_SAMPLE_ROWS = 6  # of a table, for a check


class Written(NamedTuple):
    """What a run left: tables with their files, rows and failures; `empty`: tables of which no row was measured."""

    files: dict[str, str]
    rows: dict[str, int]
    failures: dict[str, int]
    stopped: bool
    ran: int
    empty: list[str]


def calibrate(
    suite: str,
    out: str,
    *,
    tables: Sequence[str] | None = None,
    work: str | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    command: str = "flopcalc calibrate",
    progress: Progress | None = None,
) -> Written:
    """Measure the suite's tables and write each whole one to out/<device-id>/<table>.json.

    A table without a row is not written: it would hide one that has some, here or among the shipped. Nor is one that
    its file holds already: its date is that of the measurement.
    """
    chosen = check_suite(suite, tables)
    machine = probe_machine(suite, work or os.path.join(out, ".run"))
    folder = os.path.join(out, machine["device_id"])
    state = os.path.join(work or os.path.join(out, ".run"), f"{machine['device_id']}-{suite}")
    plans = {table: plan_table(table, suite) for table in chosen}
    jobs = [job for table in chosen for job in plans[table]]
    identity = {key: machine.get(key) for key in IDENTITY} | {"suite": suite}
    outcome = run_jobs(jobs, state, identity=identity, fresh=fresh, retry_failed=retry_failed, progress=progress)
    written = Written({}, {}, {}, outcome.stopped, outcome.ran, [])
    for table in chosen:
        results = _select(outcome, plans[table])
        if len(results) < sum(len(job.rows) for job in plans[table]):
            continue  # not whole: it is written when the run goes on
        provenance = {
            **machine,
            "command": command,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "statistic": STATISTIC,
            "repeats": REPEATS,
            "suite": suite,
        }
        collected = _collect(results)
        failures = [_describe_failure(result, plans[table]) for result in results if not result.is_ok]
        if not collected:
            written.empty.append(table)
            written.failures[table] = len(failures)
            continue
        records = finish_table(table, collected)
        path = os.path.join(folder, f"{table}.json")
        has_run = any(job.id in outcome.ran_jobs for job in plans[table])
        if has_run or not is_stored(path, provenance, (*IDENTITY, "suite"), records, failures):
            save_table(folder, table, provenance, records, failures)
        written.files[table] = path
        written.rows[table], written.failures[table] = len(records), len(failures)
    return written


def check_suite(suite: str, tables: Sequence[str] | None) -> list[str]:
    if suite not in SUITES:
        raise CalibrationError(f"suite {suite!r} unknown; known: quick, full")
    for table in tables or ():
        if table not in TABLES:
            raise CalibrationError(
                f"table {table!r} unknown.{format_nearest(table, TABLES)} Known: {', '.join(TABLES)}"
            )
    if suite != "test" and not has_gpu():
        raise DeviceError("calibrate needs an NVIDIA GPU and found none on this machine")
    return [table for table in TABLES if not tables or table in tables]


def _select(outcome: Outcome, jobs: Sequence[Job]) -> list[Result]:
    names = {job.id for job in jobs}
    return [result for result in outcome.results if result.job in names]


def _collect(results: Sequence[Result]) -> list[Json]:
    records: list[Json] = []
    for result in results:
        if result.is_ok:
            records += result.data if isinstance(result.data, list) else [result.data]
    return records


def _describe_failure(result: Result, jobs: Sequence[Job]) -> Json:
    parameters = next(job.rows[result.row] for job in jobs if job.id == result.job)
    about = parameters if isinstance(parameters, Mapping) else {}
    kept = {key: value for key, value in about.items() if isinstance(value, (str, int, float)) and value != ""}
    return {"row": result.row, "reason": result.reason, "detail": result.detail, **kept}


# --- check ------------------------------------------------------------------------------------------------------------
class Difference(NamedTuple):
    """A stored value that a new measurement does not bear out."""

    table: str
    row: str
    column: str
    stored: Any
    measured: Any


class Check(NamedTuple):
    """What was measured again: rows per table, and what differed."""

    files: dict[str, str]
    rows: dict[str, int]
    differences: list[Difference]
    stopped: bool


def check(
    out: str | None,
    suite: str | None = None,
    *,
    tables: Sequence[str] | None = None,
    work: str | None = None,
    progress: Progress | None = None,
) -> Check:
    """Measure a sample of each stored table's rows again and compare: times within 15 %, counts exactly."""
    chosen = check_suite(suite or "quick", tables)
    base = work or os.path.join(out or os.path.join(find_user_dir(), FOLDER), ".run")
    machine = probe_machine(suite or "quick", base)
    stored = {table: load_table(path) for table, path in _find_stored(out, machine["device_id"], chosen).items()}
    if not stored:
        raise CalibrationError(f"no stored tables of {machine['device_id']} to check: run flopcalc calibrate first")
    jobs: list[Job] = []
    owners: dict[str, str] = {}
    for name, table in stored.items():
        for job in _sample(plan_table(name, str(table.provenance.get("suite", "quick")))):
            jobs.append(job)
            owners[job.id] = name
    folder = os.path.join(base, f"check-{machine['device_id']}-{os.getpid()}")
    try:
        outcome = run_jobs(jobs, folder, fresh=True, progress=progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    differences: list[Difference] = []
    rows: dict[str, int] = dict.fromkeys(stored, 0)
    for result in outcome.results:
        table = stored[owners[result.job]]
        compared = _compare(table, result)
        rows[table.name] += 1
        differences += compared
    return Check({name: table.path for name, table in stored.items()}, rows, differences, outcome.stopped)


def _find_stored(out: str | None, device_id: str, chosen: Sequence[str]) -> dict[str, str]:
    if out is None:
        found = {table: find_table(device_id, table) for table in chosen}
        return {table: path for table, path in found.items() if path is not None}
    return {table: path for table, path in list_folder(os.path.join(out, device_id)).items() if table in chosen}


def _sample(jobs: list[Job]) -> list[Job]:
    """About six rows of a table, spread evenly; a table of several jobs gives one row of each."""
    each = max(1, _SAMPLE_ROWS // len(jobs))
    sampled = []
    for job in jobs:
        rows = list(job.rows)
        taken = rows[:: max(1, len(rows) // each)][:each]
        sampled.append(job._replace(rows={row: job.rows[row] for row in taken}))
    return sampled


def _compare(table: MeasuredTable, result: Result) -> list[Difference]:
    failed = {failure.get("row") for failure in table.failures}
    if not result.is_ok:
        if result.row in failed:
            return []
        return [Difference(table.name, result.row, "status", "ok", f"failed: {result.detail}")]
    if result.row in failed:
        return [Difference(table.name, result.row, "status", "failed", "ok")]
    shape = SHAPES[table.name]
    stored = {tuple(record[key] for key in shape.keys): record for record in table.records()}
    differences = []
    for record in result.data if isinstance(result.data, list) else [result.data]:
        old = stored.get(tuple(record.get(key) for key in shape.keys))
        if old is None:
            differences.append(Difference(table.name, result.row, "row", "absent", "measured"))
            continue
        for column in shape.timed:
            was, now = old[column], record[column]
            if (was is None) != (now is None) or (was is not None and abs(now - was) > TIME_TOLERANCE * was):
                differences.append(Difference(table.name, result.row, column, was, now))
        for column in shape.exact:
            if old[column] is not None and record.get(column) != old[column]:
                differences.append(Difference(table.name, result.row, column, old[column], record.get(column)))
    return differences
