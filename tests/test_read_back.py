"""Data that is read back from disk: what has not its declared form is refused in words, or made anew."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from flopcalc.base.errors import FlopcalcError, SpecError
from flopcalc.base.validate import FROM_0, Each, find_fault
from flopcalc.core.estimate.traced import Polynomials, Traced, load_trace, save_trace
from flopcalc.core.model.config import load_config
from flopcalc.measure.jobs.journal import Journal
from flopcalc.measure.jobs.runner import RunnerError
from flopcalc.measure.sweep.run import load_results
from flopcalc.measure.sweep.summary import format_summary, summarize
from flopcalc.prediction.kernels.constants import load_predictor
from flopcalc.prediction.kernels.machine import Machine

DEEP = "[" * 100_000


# --- the hub's cache ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("main", [b"", b"\xff\xfe", b"..", b"gone", b"a" * 5000, b"\0"])
def test_a_reference_that_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: bytes) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--mine"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_bytes(main)
    with pytest.raises(FlopcalcError, match="not in the local Hugging Face cache"):
        load_config("me/mine")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text('{"model_type": "llama"}')
    assert load_config("me/mine").config == {"model_type": "llama"}


# --- traces ----------------------------------------------------------------------------------------------
TRACED = Traced(
    "m", "m", {"total": 3, "trainable": 2}, {"torch": "2"}, {"tokens": None, "merge": 2},
    (Polynomials("train", False, ("b", "b * ceil(n / 64)"), {"layer": ((Fraction(-1, 3), Fraction(2)),) * 3}, 31, 0),),
    {"input_ids": ["b", "n"]},
)  # fmt: skip


def test_a_trace_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path))
    assert save_trace("key", TRACED) is None
    assert load_trace("key") == TRACED


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"-1/3"', '"1/0"'), ('"-1/3"', '"1e999999999"'), ('"-1/3"', "5"), ('"-1/3", "2"', '"2"'), ('"-1/3"', DEEP),
        ('"b * ceil', '"k * ceil'), ('"b * ceil', '"b * open'), ('"train"', '"Train"'), ('"total": 3', '"total": -3'),
        ('"merge": 2', '"merge": 0'), ('"merge": 2', '"merge": 1e400'), ('"reached": 31', '"reached": 1e400'),
        ('"axes": {"input_ids": [', '"axes": {"input_ids": 5, "x": ['), ('"schema": 2', '"schema": 1'), ("}]}", ""),
        ('{"schema": 2', '[{"schema": 2'),
    ],
)  # fmt: skip
def test_a_damaged_trace_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:  # fmt: skip
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path))
    save_trace("key", TRACED)
    path = tmp_path / "traces" / "key.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    assert load_trace("key") is None


# --- a sweep's files ----------------------------------------------------------------------------------------------
ROW = {"id": "a", "status": "ok", "trainer": "StandardTrainer", "model": "tiny", "batch_size": 1, "seq_len": 8}


@pytest.mark.parametrize("value", ["-1e308", "-1", "1e300", "true", '"x"'])
def test_results_out_of_range(tmp_path: Path, value: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(ROW)[:-1] + f', "peak_memory_bytes": {value}}}\n')
    with pytest.raises(FlopcalcError, match=r"line 1 is no row of a sweep \(peak_memory_bytes is "):
        load_results(str(path))


def test_a_setting_that_is_a_list(tmp_path: Path) -> None:
    """Found by the fuzz: rows are compared by their settings."""
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({**ROW, "environment": {"device": []}}) + "\n")
    with pytest.raises(FlopcalcError, match=r"environment\.device is \[\]"):
        load_results(str(path))


def test_numbers_beyond_all_floats_are_none(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(ROW)[:-1] + ', "loss": 1e400, "mfu": -1e400, "step_time_s": {"median": NaN}}\n')
    (row,) = load_results(str(path))
    assert (row["loss"], row["mfu"], row["step_time_s"]) == (None, None, {"median": None})
    assert json.dumps(summarize([row]), allow_nan=False)
    assert format_summary(summarize([row])).startswith("1 configuration: 1 ok")


GOOD = {
    "job": "a", "row": "b", "key": "c", "status": "ok", "reason": None, "detail": None, "data": {}, "seconds": 1.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (DEEP, "line 2 is damaged"),
        (json.dumps({**GOOD, "seconds": "x"}), "seconds: 'x' is no number of 0 or more"),
        (json.dumps(GOOD).replace("1.5", "1e400"), "seconds: inf is no number of 0 or more"),
        (json.dumps({**GOOD, "job": 5}), "job: 5 is no text"),
        (json.dumps({**GOOD, "reason": 5}), "reason: 5 is no text"),
        (json.dumps({**GOOD, "more": 5}), "unexpected keyword argument 'more'"),
        ("[]", "is no mapping"),
    ],
)
def test_a_damaged_journal(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "journal.jsonl").write_text(f'{{"run": {{}}}}\n{line}\n')
    with pytest.raises(RunnerError, match=words):
        Journal(str(tmp_path), {})


# --- predictors ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("table", "entry", "words"),
    [
        ("gaps", {"train": 1e308}, r"gaps\.train: 1e\+308 is no number of 0 or more up to 1e\+24; "),
        # Found by the fuzz: a format without a name is that of every product.
        ("products", {"narrow": {"": [0.0, 0.0]}}, r"products\.narrow: '' unknown; "),
    ],
)
def test_a_damaged_predictor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, entry: dict[str, Any], words: str
) -> None:
    load_predictor.cache_clear()
    data = dict(load_predictor("h200-sxm") or {})
    data[table] = {**data[table], **entry}
    (tmp_path / "predictors").mkdir()
    (tmp_path / "predictors" / "h200-sxm.json").write_text(json.dumps(data))
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    try:
        with pytest.raises(SpecError, match=words):
            Machine("h200")
    finally:
        load_predictor.cache_clear()


@pytest.mark.parametrize(
    ("value", "form", "fault"),
    [
        ([1, 2], [FROM_0], ""),
        ([1, -2], [FROM_0], "[1]: -2 is no number of 0 or more"),
        ({"a": {"b": True}}, {"a": Each(int)}, ".a.b: True is no whole number"),
        ({"a": 1}, {"a": int, "b?": str}, ""),
        ({"a": 1, "b": 2}, {"a": int, "b?": str}, ".b: 2 is no text"),
        ({"a": {"": 1}}, {"a": Each(int)}, ".a: '' unknown"),
    ],
)
def test_forms(value: Any, form: Any, fault: str) -> None:
    assert find_fault(value, form) == fault
