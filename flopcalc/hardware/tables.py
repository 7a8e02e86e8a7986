"""Calibration tables: a file of measurements goes in, checked rows come out; the user's own win over the shipped.

A table is JSON: schema, table, provenance (where, when and how it was measured), columns, rows (one a line, sorted)
and failures. It is written by `flopcalc calibrate`, never by hand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir, find_user_dir
from flopcalc.base.errors import CalibrationError, format_nearest, format_value
from flopcalc.base.files import MAX_TABLE_BYTES, read_json, write_whole
from flopcalc.base.validate import MOST

SCHEMA = 1
FOLDER = "calibration"
REQUIRED_PROVENANCE = ("device", "device_id", "date", "torch", "command")
_CACHED_TABLES = 16
# Columns of keys that hold sizes; the other keys hold words.
_SIZES = ("m", "n", "k", "qk_dim", "v_dim", "length", "batch", "heads", "bytes", "seq")


class TableShape(NamedTuple):
    """A table's columns: those that say what was measured, the timed ones, those that must repeat exactly, the rest."""

    keys: tuple[str, ...]
    timed: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.keys + self.timed + self.exact + self.other


SHAPES = {
    "gemm": TableShape(
        ("dtype", "direction", "m", "n", "k", "mode"),
        ("seconds",),
        ("executed_flops",),
        ("spread", "tflops", "sm_clock_mhz", "power_w"),
    ),
    "attention": TableShape(
        ("kernel", "qk_dim", "v_dim", "mask", "length", "direction", "batch", "heads"),
        ("seconds",),
        ("needed_flops", "executed_flops"),
        ("spread", "tflops"),
    ),
    "memory": TableShape(
        ("op", "direction", "bytes"),
        ("seconds",),
        (),
        ("spread", "gb_per_s", "factor"),
    ),
    "counts": TableShape(
        ("family", "phase", "seq", "batch", "images", "kernel", "recompute"),
        (),
        (
            "analytic_model",
            "analytic_full",
            "analytic_hardware",
            "executed",
            "flop_counter",
            "profiler",
            "profiler_corrected",
            "fvcore",
        ),
        ("ratio", "parameters"),
    ),
    "padding": TableShape(
        ("family", "seq", "batch", "images", "module", "kernel", "direction", "shape"),
        (),
        ("needed_flops", "executed_flops"),
        ("calls", "calls_recompute"),
    ),
    "steps": TableShape(
        ("model", "batch", "seq", "images", "attention", "recompute"),
        ("seconds",),
        ("model_flops", "hardware_flops", "parameters"),
        ("spread", "mfu", "hfu", "tokens_per_s", "energy_j", "power_w", "sm_clock_mhz", "peak_memory_bytes"),
    ),
}


class MeasuredTable(NamedTuple):
    """One table as read from its file."""

    name: str
    path: str
    provenance: dict[str, Any]
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    failures: tuple[dict[str, Any], ...]

    @property
    def device_id(self) -> str:
        return str(self.provenance.get("device_id", os.path.basename(os.path.dirname(self.path))))

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that say what a row measures."""
        return SHAPES[self.name].keys if self.name in SHAPES else self.columns[:1]

    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def select(self, **wanted: object) -> list[dict[str, Any]]:
        """The rows whose columns have these values."""
        for column in wanted:
            if column not in self.columns:
                raise CalibrationError(f"{self.path}: no column {column!r}.{format_nearest(column, self.columns)}")
        return [record for record in self.records() if all(record[column] == v for column, v in wanted.items())]


# --- where tables lie -------------------------------------------------------------------------------------------------
def list_tables() -> dict[str, dict[str, str]]:
    """Device id -> table -> file, of all tables; the user's own replace the shipped ones."""
    found: dict[str, dict[str, str]] = {}
    for root in (find_data_dir(), find_user_dir()):
        base = os.path.join(root, FOLDER)
        for device in os.listdir(base) if os.path.isdir(base) else ():
            if not device.startswith("."):
                found.setdefault(device, {}).update(list_folder(os.path.join(base, device)))
    return {device: dict(sorted(tables.items())) for device, tables in sorted(found.items()) if tables}


def list_folder(folder: str) -> dict[str, str]:
    """Table -> file of the tables in one folder."""
    if not os.path.isdir(folder):
        return {}
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith("."))
    return {name.removesuffix(".json"): os.path.join(folder, name) for name in names}


def find_table(device_id: str, name: str) -> str | None:
    """The file of a device's table: the user's own, else the shipped one, else None."""
    for part in (device_id, name):
        if not part or "/" in part or "\\" in part or "\0" in part or part.startswith("."):
            return None
    for root in (find_user_dir(), find_data_dir()):
        path = os.path.join(root, FOLDER, device_id, f"{name}.json")
        if os.path.isfile(path):
            return path
    return None


def find_folder_tables(where: str) -> dict[str, str]:
    """Table -> file, for a device id or a folder; an error that names what is known when there is neither."""
    known = list_tables()
    if where in known:
        return known[where]
    tables = list_folder(where)
    if not tables:
        devices = ", ".join(known) or "none yet"
        raise CalibrationError(
            f"no calibration tables for {where!r}: give a folder of tables, or one of these devices: {devices}."
            f"{format_nearest(where, known)}"
        )
    return tables


# --- reading ----------------------------------------------------------------------------------------------------------
def load_table(path: str) -> MeasuredTable:
    """A checked table, or a CalibrationError that names the file; one that has not changed is not parsed again."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
    table = _parse_table(path, found.st_mtime_ns, found.st_size, found.st_ino)
    # Copies of what can be changed: the kept table stays as it was read.
    return table._replace(provenance=dict(table.provenance), failures=tuple(map(dict, table.failures)))


@lru_cache(maxsize=_CACHED_TABLES)
def _parse_table(path: str, _mtime_ns: int, _size: int, _inode: int) -> MeasuredTable:
    content = read_json(path, MAX_TABLE_BYTES, CalibrationError)
    if not isinstance(content, dict):
        raise CalibrationError(f"{path}: holds {format_value(content)}, not a table")
    if content.get("schema") != SCHEMA:
        raise CalibrationError(
            f"{path}: schema {format_value(content.get('schema'))} is not {SCHEMA}, the one this flopcalc reads: "
            "update flopcalc, or measure again with flopcalc calibrate"
        )
    name, provenance, columns = content.get("table"), content.get("provenance"), content.get("columns")
    rows, failures = content.get("rows"), content.get("failures", [])
    if not isinstance(name, str) or not isinstance(provenance, dict):
        raise CalibrationError(f"{path}: table and provenance are missing")
    stem = os.path.basename(path).removesuffix(".json")
    if name != stem:
        raise CalibrationError(f"{path}: table {format_value(name)} is not {stem!r}, what its file is called")
    unsaid = [key for key in REQUIRED_PROVENANCE if provenance.get(key) in (None, "")]
    if unsaid:
        raise CalibrationError(f"{path}: provenance lacks {', '.join(unsaid)}")
    if not isinstance(columns, list) or not all(isinstance(column, str) for column in columns):
        raise CalibrationError(f"{path}: columns must be a list of names")
    missing = [column for column in (SHAPES[name].columns if name in SHAPES else ()) if column not in columns]
    if missing:
        raise CalibrationError(f"{path}: columns missing: {', '.join(missing)}")
    if not isinstance(rows, list) or not isinstance(failures, list):
        raise CalibrationError(f"{path}: rows and failures must be lists")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list) or len(row) != len(columns):
            raise CalibrationError(f"{path}: row {number} does not hold {len(columns)} values")
    if name in SHAPES:
        _check_values(path, SHAPES[name], columns, rows)
    if not all(isinstance(failure, dict) for failure in failures):
        raise CalibrationError(f"{path}: a failure is an object")
    return MeasuredTable(name, path, provenance, tuple(columns), tuple(map(tuple, rows)), tuple(failures))


def _check_values(path: str, shape: TableShape, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Column by column: the types of a whole column are one set, and its rows are looked at only if that is wrong."""
    kinds: list[tuple[tuple[str, ...], set[type], str]] = [
        (tuple(name for name in shape.keys if name not in _SIZES), {str}, "a word"),
        (tuple(name for name in shape.keys if name in _SIZES), {int}, "a size"),
        (shape.timed, {int, float, type(None)}, "a number or null"),
        (shape.exact, {int, type(None)}, "a whole number or null"),
    ]
    values = dict(zip(columns, zip(*rows, strict=True), strict=True)) if rows else {}
    for names, allowed, words in kinds:
        for name in names if rows else ():
            column = values[name]
            is_inside = _is_moved if name == "bytes" else _is_size if name in _SIZES else _is_finite
            if set(map(type, column)) <= allowed and (str in allowed or all(map(is_inside, column))):
                continue
            for number, value in enumerate(column, 1):
                if type(value) not in allowed or (str not in allowed and not is_inside(value)):
                    raise CalibrationError(
                        f"{path}: row {number}, column {name!r}: {format_value(value)} is not {words}"
                    )


def _is_finite(value: float | None) -> bool:
    return value is None or -MOST < value < MOST  # JSON as Python reads it knows NaN and Infinity


def _is_size(value: int) -> bool:
    return 1 <= value <= 10**15


def _is_moved(value: int) -> bool:
    return 0 <= value <= 10**15  # a row may be the cost of a launch alone


def is_stored(
    path: str,
    provenance: Mapping[str, object],
    keys: Iterable[str],
    records: Iterable[Mapping[str, object]],
    failures: Iterable[Mapping[str, object]],
) -> bool:
    """Whether a file holds just these rows and failures, measured under the same `keys` of the provenance."""
    try:
        table = load_table(path)
    except CalibrationError:
        return False
    if any(table.provenance.get(key) != provenance.get(key) for key in keys):
        return False
    rows, failed = _arrange(table.columns, records, failures)
    given: list[object] = json.loads(json.dumps([rows, failed]))
    return given == [list(map(list, table.rows)), list(table.failures)]


# --- writing ----------------------------------------------------------------------------------------------------------
def save_table(
    folder: str,
    name: str,
    provenance: Mapping[str, object],
    records: Iterable[Mapping[str, object]],
    failures: Iterable[Mapping[str, object]] = (),
) -> str:
    """Write a table whole or not at all: a full disk or a kill leaves the old file."""
    columns = SHAPES[name].columns
    rows, failed = _arrange(columns, records, failures)
    path = os.path.join(folder, f"{name}.json")
    text = _format(name, provenance, columns, rows, failed)
    try:
        os.makedirs(folder, exist_ok=True)
        write_whole(path, text)
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name itself, not only the content
        finally:
            os.close(directory)
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be written: {error.strerror}; the old table, if any, stands") from None
    return path


def _arrange(
    columns: Sequence[str], records: Iterable[Mapping[str, object]], failures: Iterable[Mapping[str, object]]
) -> tuple[list[list[Any]], list[Mapping[str, Any]]]:
    """Rows and failures in the order of the file."""
    rows = sorted(([record.get(column) for column in columns] for record in records), key=_sort_key)
    return rows, sorted(failures, key=lambda failure: str(failure.get("row")))


def _format(
    name: str,
    provenance: Mapping[str, object],
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    failures: Sequence[Mapping[str, object]],
) -> str:
    def block(lines: Iterable[object]) -> str:
        shown = ",\n".join("  " + json.dumps(line, ensure_ascii=False) for line in lines)
        return f"[\n{shown}\n ]" if shown else "[]"

    about = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in provenance.items()
    )
    return (
        f'{{\n "schema": {SCHEMA},\n "table": {json.dumps(name)},\n "provenance": {{\n{about}\n }},\n'
        f' "columns": {json.dumps(list(columns))},\n "rows": {block(rows)},\n "failures": {block(failures)}\n}}\n'
    )


def _sort_key(row: Sequence[object]) -> list[tuple[int, float, str]]:
    """Numbers before words, nothing last: rows of mixed values have one order."""
    return [
        (2, 0.0, "")
        if value is None
        else (0, float(value), "")
        if isinstance(value, (int, float))
        else (1, 0.0, str(value))
        for value in row
    ]


# --- looking up -------------------------------------------------------------------------------------------------------
class Found(NamedTuple):
    """A value read between rows; `beyond` is how far outside the measured range it was asked for (1: inside)."""

    value: float
    beyond: float


def interpolate(points: Iterable[tuple[float, float]], x: float) -> Found | None:
    """y at x between (x, y) points, straight in log-log; outside the range the nearest point's y, marked so."""
    import math
    from itertools import pairwise

    known = sorted((a, b) for a, b in points if a > 0 and b is not None and b > 0)
    if not known or x <= 0:
        return None
    if x <= known[0][0]:
        return Found(known[0][1], known[0][0] / x)
    if x >= known[-1][0]:
        return Found(known[-1][1], x / known[-1][0])
    for (x0, y0), (x1, y1) in pairwise(known):
        if x0 <= x <= x1:
            if x1 == x0:
                return Found(y0, 1.0)
            share = math.log(x / x0) / math.log(x1 / x0)
            return Found(y0 * (y1 / y0) ** share, 1.0)
    return None
