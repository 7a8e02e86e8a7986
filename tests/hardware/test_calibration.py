"""Calibration tables: written whole or not at all, checked when read, the user's own before the shipped."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from places import ROOT

from flopcalc.base.errors import CalibrationError
from flopcalc.cli.calibration import calibration as command
from flopcalc.hardware import tables as calibration
from flopcalc.hardware.tables import find_table, interpolate, list_tables, load_table, save_table

ABOUT = {
    "device": "Some GPU",
    "device_id": "some-gpu",
    "suite": "quick",
    "date": "2026-11-15T00:00:00Z",
    "torch": "2",
    "command": "flopcalc calibrate",
}
SHIPPED = ROOT / "model_specs" / "calibration"


def memory_row(op: str, moved: int, seconds: float) -> dict[str, Any]:
    return {"op": op, "direction": "forward", "bytes": moved, "seconds": seconds, "gb_per_s": moved / seconds / 1e9}


ROWS = [memory_row("copy", 8, 2.0), memory_row("add", 64, 1.0), memory_row("add", 8, 0.5)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty shipped and user folders."""
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    monkeypatch.setattr(calibration, "find_data_dir", lambda: str(shipped))
    monkeypatch.setattr(calibration, "find_user_dir", lambda: str(own))
    return tmp_path


def test_rows_stand_one_a_line_and_sorted(tmp_path: Path) -> None:
    failures = [{"row": "b", "reason": "oom"}, {"row": "a", "reason": "timeout"}]
    path = save_table(str(tmp_path), "memory", ABOUT, ROWS, failures)
    table = load_table(path)
    assert [row[:3] for row in table.rows] == [("add", "forward", 8), ("add", "forward", 64), ("copy", "forward", 8)]
    assert [failure["row"] for failure in table.failures] == ["a", "b"]
    lines = Path(path).read_text().splitlines()
    assert sum(line.startswith("  [") for line in lines) == 3
    assert table.device_id == "some-gpu"
    assert table.select(op="copy")[0]["seconds"] == 2.0
    assert table.select(op="copy")[0]["factor"] is None
    with pytest.raises(CalibrationError, match=r"no column 'opp'. Did you mean op"):
        table.select(opp="copy")


def test_the_same_rows_make_the_same_file(tmp_path: Path) -> None:
    first = Path(save_table(str(tmp_path / "a"), "memory", ABOUT, ROWS)).read_bytes()
    assert Path(save_table(str(tmp_path / "b"), "memory", ABOUT, ROWS[::-1])).read_bytes() == first


def change(path: str, **entries: Any) -> None:
    content = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**content, **entries}))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"schema": 2}, "schema 2 is not 1"),
        ({"schema": None}, "schema None is not 1"),
        ({"columns": ["op"]}, "columns missing: direction"),
        ({"columns": 3}, "columns must be a list"),
        ({"rows": [["add"]]}, "row 1 does not hold 7 values"),
        ({"rows": {}}, "rows and failures must be lists"),
        ({"failures": [1]}, "a failure is an object"),
        ({"provenance": None}, "table and provenance are missing"),
        ({"provenance": {**ABOUT, "date": None}}, "provenance lacks date"),
        ({"provenance": {"device": "Some GPU", "torch": "2"}}, "provenance lacks device_id, date, command"),
        ({"table": "gemm"}, "table 'gemm' is not 'memory'"),
        ({"table": "other"}, "table 'other' is not 'memory'"),
    ],
)
def test_a_table_of_another_form_is_named(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    path = save_table(str(tmp_path), "memory", ABOUT, ROWS)
    change(path, **entries)
    with pytest.raises(CalibrationError, match=message) as caught:
        load_table(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("m", True, "True is not a size"),
        ("m", "2", "'2' is not a size"),
        ("m", 0, "0 is not a size"),
        ("m", 2.0, "2.0 is not a size"),
        ("dtype", None, "None is not a word"),
        ("dtype", ["bf16"], "is not a word"),
        ("seconds", "1", "'1' is not a number or null"),
        ("seconds", False, "False is not a number or null"),
        ("seconds", float("nan"), "nan is not a number or null"),
        ("seconds", float("inf"), "inf is not a number or null"),
        ("seconds", {}, "is not a number or null"),
        ("executed_flops", 1.5, "1.5 is not a whole number or null"),
        ("executed_flops", True, "True is not a whole number or null"),
        ("executed_flops", "9", "'9' is not a whole number or null"),
    ],
)
def test_a_wrong_value_is_named_by_row_and_column(tmp_path: Path, column: str, value: Any, words: str) -> None:
    row = {"dtype": "bf16", "direction": "forward", "m": 1, "n": 2, "k": 3, "mode": "burst", "seconds": 1.0}
    path = save_table(str(tmp_path), "gemm", ABOUT, [row, {**row, "n": 4, "seconds": None, "executed_flops": 5}])
    assert len(load_table(path).rows) == 2
    content = json.loads(Path(path).read_text())
    content["rows"][1][content["columns"].index(column)] = value
    change(path, rows=content["rows"])
    with pytest.raises(CalibrationError) as caught:
        load_table(path)
    assert str(caught.value).startswith(f"{path}: row 2, column '{column}': ")
    assert words in str(caught.value)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_tables_load(path: Path) -> None:
    assert load_table(str(path)).rows


def test_a_table_is_parsed_again_only_if_its_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_table(str(tmp_path), "memory", ABOUT, ROWS, [{"row": "a", "reason": "oom"}])
    parsed: list[int] = []
    loads = json.loads

    def count(data: Any, **options: Any) -> Any:
        parsed.append(1)
        return loads(data, **options)

    monkeypatch.setattr(json, "loads", count)
    first = load_table(path)
    first.provenance["device"] = "changed"
    first.failures[0]["row"] = "changed"
    second = load_table(path)
    assert len(parsed) == 1
    assert second.rows is first.rows
    assert second.provenance == ABOUT
    assert second.failures == ({"row": "a", "reason": "oom"},)
    save_table(str(tmp_path), "memory", ABOUT, ROWS[:1])
    assert len(load_table(path).rows) == 1
    assert len(parsed) == 2
    os.unlink(path)
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_table(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"schema": 1, "rows": [' + b"[" * 100_000])
def test_a_corrupt_table_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "memory.json"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"memory\.json"):
        load_table(str(path))
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_table(str(tmp_path / "absent.json"))


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = save_table(str(tmp_path), "memory", ABOUT, ROWS)
    before = Path(path).read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(CalibrationError, match=r"memory.json: cannot be written: No space left on device"):
        save_table(str(tmp_path), "memory", ABOUT, ROWS[:1])
    assert Path(path).read_bytes() == before
    assert os.listdir(tmp_path) == ["memory.json"]


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_table(tmp_path: Path) -> None:
    path = save_table(str(tmp_path), "memory", ABOUT, ROWS)
    before = Path(path).read_bytes()
    code = (
        "import os, signal\nfrom flopcalc.hardware.tables import save_table\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"save_table({str(tmp_path)!r}, 'memory', {{}}, [])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert Path(path).read_bytes() == before
    assert calibration.list_folder(str(tmp_path)) == {"memory": path}


def test_the_users_tables_win(home: Path) -> None:
    shipped = save_table(str(home / "shipped" / "calibration" / "some-gpu"), "memory", ABOUT, ROWS)
    assert find_table("some-gpu", "memory") == shipped
    own = save_table(str(home / "own" / "calibration" / "some-gpu"), "memory", ABOUT, ROWS[:1])
    assert find_table("some-gpu", "memory") == own
    assert list_tables() == {"some-gpu": {"memory": own}}
    assert find_table("some-gpu", "gemm") is None
    assert find_table("../some-gpu", "memory") is None
    assert find_table("some-gpu", ".memory") is None


def test_interpolation_is_straight_in_log_log_and_says_how_far_outside() -> None:
    points = [(10.0, 1.0), (1000.0, 100.0)]
    found = interpolate(points, 100.0)
    assert found is not None
    assert found.value == pytest.approx(10.0)
    assert found.beyond == 1.0
    above, below = interpolate(points, 4000.0), interpolate(points, 5.0)
    assert (above, below) == ((100.0, 4.0), (1.0, 2.0))
    assert interpolate([], 1.0) is None


def test_reading_imports_nothing_heavy() -> None:
    code = (
        "import sys, flopcalc.hardware.tables\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'click', 'flopcalc.measure') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the command ----------------------------------------------------------------------------------------------------
def test_list_show_and_diff(home: Path) -> None:
    run = CliRunner().invoke
    assert "no calibration tables yet" in run(command, ["list"]).output
    save_table(
        str(home / "shipped" / "calibration" / "some-gpu"), "memory", ABOUT, ROWS, [{"row": "x", "reason": "oom"}]
    )
    other = str(home / "other")
    save_table(other, "memory", ABOUT, [{**row, "seconds": row["seconds"] * 2} for row in ROWS[1:]])
    save_table(other, "gemm", ABOUT, [])
    listed = json.loads(run(command, ["list", "--json"]).output)
    assert [(entry["device"], entry["table"], entry["rows"], entry["failures"]) for entry in listed] == [
        ("some-gpu", "memory", 3, 1)
    ]
    assert "some-gpu" in run(command, ["list"]).output
    assert "failed: x: oom" in run(command, ["show", "some-gpu", "memory"]).output
    shown = json.loads(run(command, ["show", "some-gpu", "memory", "--json"]).output)
    assert shown["rows"][0]["op"] == "add"
    gemm, memory = json.loads(run(command, ["diff", "some-gpu", other, "--json"]).output)
    assert gemm == {"table": "gemm", "only_in": other}
    assert (memory["both"], memory["only_a"], memory["only_b"]) == (2, 1, 0)
    assert memory["time_ratio"]["median"] == 2.0
    assert "2.000" in run(command, ["diff", "some-gpu", other]).output


def test_unknown_tables_are_named(home: Path) -> None:
    save_table(str(home / "shipped" / "calibration" / "some-gpu"), "memory", ABOUT, ROWS)
    run = CliRunner().invoke
    assert "Did you mean memory" in str(run(command, ["show", "some-gpu", "memry"]).exception)
    assert "some-gpu" in str(run(command, ["show", "other-gpu", "memory"]).exception)
