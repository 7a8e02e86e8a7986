"""A sweep's run: rows on disk after each result, failures as rows, resuming; with processes that need no torch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import sweep_stand_in as stand_in
from places import HELPERS

from flopcalc.measure.jobs.launchers import make_launcher
from flopcalc.measure.jobs.runner import Result, RunnerError
from flopcalc.measure.sweep import run as sweep_run
from flopcalc.measure.sweep.matrix import Configuration, SweepError, make_matrix
from flopcalc.measure.sweep.run import Swept, check_libraries, load_results, make_row, run_sweep, save_results

Json = dict[str, Any]
TWO = ("StandardTrainer", "DPSGDTrainer")
ROW = '"id": "a", "status": "ok", "trainer": "t", "model": "m"'


def matrix(seq_lens: tuple[int, ...] = (8,), **more: Any) -> tuple[Configuration, ...]:
    return make_matrix(**{"trainers": TWO, "batch_sizes": [2], "seq_lens": seq_lens, "models": ["tiny"], **more})


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the processes write down what they were asked."""
    monkeypatch.syspath_prepend(str(HELPERS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def sweep(configurations: tuple[Configuration, ...], **options: Any) -> Swept:
    return run_sweep(configurations, "logs", call=stand_in.CALL, **options)


def read_rows() -> list[Json]:
    return [json.loads(line) for line in Path("logs/results.jsonl").read_text().splitlines()]


def test_each_configuration_has_its_process_row_log_and_run(tmp_path: Path) -> None:
    swept = sweep(matrix((8, 9)))
    assert (len(swept.rows), swept.failed, swept.stopped, swept.ran) == (4, 0, False, 4)
    assert read_rows() == list(swept.rows)
    assert len({row["process"] for row in swept.rows} | {os.getpid()}) == 5
    row = swept.rows[1]
    known = {"id": "DPSGDTrainer_bs2_seq8", "status": "ok", "trainer": "DPSGDTrainer", "model": "tiny", "dtype": "fp32",
             "device": "cpu", "seed": 0, "noise_multiplier": 1.0}  # fmt: skip
    assert {key: row[key] for key in known} == known
    assert row["run_dir"] == str(tmp_path / "runs" / "DPSGDTrainer_bs2_seq8")
    assert "building DPSGDTrainer" in Path("logs/DPSGDTrainer_bs2_seq8.log").read_text()


def test_a_failure_is_a_row_and_touches_no_other() -> None:
    lengths = (8, stand_in.RAISES, stand_in.LACKS_MEMORY, stand_in.IS_KILLED, 9)
    swept = sweep(matrix(lengths, trainers=["DPSGDTrainer"]))
    assert [(row["status"], row.get("reason")) for row in swept.rows] == [
        ("ok", None),
        ("failed", "exception"),
        ("failed", "oom"),
        ("failed", "killed"),
        ("ok", None),
    ]
    assert swept.failed == 3
    assert "KeyError: 'not there'" in swept.rows[1]["detail"]
    assert "last words" in swept.rows[3]["detail"]
    asked = {"id": "DPSGDTrainer_bs2_seq13", "status": "failed", "trainer": "DPSGDTrainer", "batch_size": 2,
             "seq_len": 13, "model": "tiny", "dtype": "auto", "device": "auto", "attention": "sdpa"}  # fmt: skip
    assert {key: read_rows()[1][key] for key in asked} == asked


def test_what_is_done_is_not_done_again(calls: Path) -> None:
    sweep(matrix((8, stand_in.RAISES)))
    before = Path("logs/results.jsonl").stat()
    assert sweep(matrix((8, stand_in.RAISES))).ran == 0
    after = Path("logs/results.jsonl").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert len(calls.read_text().splitlines()) == 4
    assert sweep(matrix((8, stand_in.RAISES)), retry_failed=True).ran == 2
    assert sweep(matrix((8, stand_in.RAISES, 9))).ran == 2
    assert sweep(matrix((8, stand_in.RAISES)), fresh=True).ran == 4


def test_another_question_is_asked_again() -> None:
    sweep(matrix())
    seen: list[list[int]] = []
    swept = sweep(matrix(steps=7), on_rows=lambda rows: seen.append([row["steps"] for row in rows]))
    assert (swept.ran, [row["steps"] for row in read_rows()]) == (2, [7, 7])
    assert seen == [[7], [7, 7]]  # never beside rows that answered the old one


def test_rows_of_other_matrices_stay_unless_fresh() -> None:
    sweep(matrix((8,)))
    sweep(matrix((9,)))
    assert [row["seq_len"] for row in read_rows()] == [8, 8, 9, 9]
    sweep(matrix((8,)))
    assert [row["seq_len"] for row in read_rows()] == [9, 9, 8, 8]
    sweep(matrix((9,)), fresh=True)
    assert [row["seq_len"] for row in read_rows()] == [9, 9]


def test_one_name_for_two_models_is_refused() -> None:
    sweep(matrix())
    with pytest.raises(SweepError, match="holds DPSGDTrainer_bs2_seq8 of model tiny, now it is small: choose another"):
        sweep(matrix(models=["small"], trainers=["DPSGDTrainer"]))
    assert [row["model"] for row in read_rows()] == ["tiny", "tiny"]
    assert sweep(matrix(models=["small"]), fresh=True).ran == 2


def test_rows_are_on_disk_after_each_result(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = sweep_run.save_results

    def save(path: str, rows: list[Json]) -> None:
        real(path, rows)
        seen.append(len(read_rows()))

    monkeypatch.setattr(sweep_run, "save_results", save)
    sweep(matrix((8, 9)))
    assert seen == [1, 2, 3, 4, 4]


def test_a_lost_file_is_written_anew_from_the_journal() -> None:
    rows = list(sweep(matrix()).rows)
    Path("logs/results.jsonl").unlink()
    swept = sweep(matrix())
    assert (swept.ran, read_rows()) == (0, rows)


def test_other_versions_in_the_folder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(matrix())
    monkeypatch.setattr(sweep_run, "find_version", lambda _: "0.0")
    with pytest.raises(RunnerError, match=r"was begun with opacus = .*now it is '0.0': run with fresh"):
        sweep(matrix((9,)))
    assert len(read_rows()) == 2


def test_several_at_once() -> None:
    swept = sweep(matrix((8, 9)), launcher=make_launcher("local", slots=2, device="cpu"))
    assert [row["id"] for row in swept.rows] == [configuration.id for configuration in matrix((8, 9))]
    assert [row["id"] for row in read_rows()] == [row["id"] for row in swept.rows]


def test_a_loss_that_is_no_number_is_null() -> None:
    (row,) = sweep(matrix((stand_in.DIVERGES,), trainers=["StandardTrainer"])).rows
    assert row["loss"] == {"first": 7.0, "last": None}
    assert "NaN" not in Path("logs/results.jsonl").read_text()


def test_row_of_a_failure() -> None:
    (configuration,) = matrix(trainers=["StandardTrainer"])
    row = make_row(configuration, Result(configuration.id, "run", "k", "failed", "timeout", "no answer", None, 1.5))
    assert row == {
        "id": "StandardTrainer_bs2_seq8", "status": "failed", "trainer": "StandardTrainer", "batch_size": 2,
        "seq_len": 8, "model": "tiny", "dtype": "auto", "device": "auto", "attention": "sdpa", "steps": 10, "warmup": 3,
        "learning_rate": 1e-3, "max_grad_norm": 1.0, "noise_multiplier": 1.0, "seed": 0, "seconds": 1.5,
        "reason": "timeout", "detail": "no answer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "results.jsonl: no such file or folder. Give the logs_dir of a `flopcalc sweep run`"),
        ("{", "line 1 is no row of a sweep"),
        (
            '{"id": "a", "status": "ok", "trainer": "t", "model": "m"}\n[]',
            "line 2 is no row of a sweep (no JSON object): remove the file",
        ),
        ('{"id": "a"}', "line 1 is no row of a sweep (status is None)"),
        (f'{{{ROW}, "trainer": ["x"]}}', "(trainer is ['x'])"),
        (f'{{{ROW}, "step_time_s": {{"median": "1"}}}}', "(step_time_s.median is '1')"),
        (f'{{{ROW}, "peak_memory_bytes": true}}', "(peak_memory_bytes is True)"),
        (f'{{{ROW}, "notes": 3}}', "(notes is 3)"),
    ],
)
def test_results_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(SweepError) as error:
        load_results(str(tmp_path))
    assert message in str(error.value)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    save_results(str(path), [{"a": 1}])

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SweepError, match="disk full; the results so far are in the journal next to it"):
        save_results(str(path), [{"a": 2}])
    assert path.read_text() == '{"a": 1}\n'


def test_missing_libraries_are_said_before_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "find_version", lambda name: None if name == "opacus" else "1")
    check_libraries(matrix(trainers=["StandardTrainer"]))
    with pytest.raises(SweepError, match=r"the sweep needs opacus: pip install 'flopcalc\[sweep\]'"):
        check_libraries(matrix())


def test_rows_come_back_as_they_went(tmp_path: Path) -> None:
    """Any text that a process or a folder's name may hold: lines' ends of Unicode, bytes that are no UTF-8."""
    row = {"id": "a", "status": "failed", "trainer": "t", "model": "mod\u00e8le-\udcff", "detail": "x\u2028y\x85z\n"}
    path = tmp_path / "results.jsonl"
    save_results(str(path), [row, row])
    assert load_results(str(path)) == [row, row]


def test_what_another_version_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{{ROW}, "mfu": NaN, "step_time_s": 3, "new": [1]}}\n\n{{{ROW}}}')
    first, second = load_results(str(path))
    assert (first["mfu"], first["new"], second) == (None, [1], json.loads(f"{{{ROW}}}"))


def test_a_folder_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    with pytest.raises(SweepError, match="logs_dir file: cannot be made: File exists"):
        run_sweep(matrix(), "file", call=stand_in.CALL)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere, and tests may run as root
    with pytest.raises(SweepError, match="logs_dir logs: cannot be written to; choose another folder"):
        sweep(matrix())
