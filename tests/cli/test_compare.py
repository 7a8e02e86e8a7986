"""`flopcalc compare`: step times, for all or for one, and every format."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from flopcalc.cli import main

Capture = pytest.CaptureFixture[str]
TIMED = ("sweep-tiny@step_time=2ms", "sweep-tiny@tokens_per_second=9k;gpus=2", "gpt2", "--seq", "64", "--peak", "1T")


def run(capsys: Capture, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert end.value.code == code
    return out if code == 0 else err


def run_json(capsys: Capture, *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def test_each_column_has_its_time(capsys: Capture) -> None:
    shown = run_json(capsys, "compare", *TIMED, "--step-time", "1s")
    singles = [
        run_json(capsys, "estimate", model, "--seq", "64", "--peak", "1T", *options)
        for model, options in (
            ("sweep-tiny", ("--step-time", "2ms")),
            ("sweep-tiny", ("--tokens-per-second", "9k", "--gpus", "2")),
            ("gpt2", ("--step-time", "1s")),
        )
    ]
    for column, single in zip(shown, singles, strict=True):
        assert column["mfu"]["value"] > 0
        assert (column["mfu"], column["hfu"]) == (single["mfu"], single["hfu"])


def test_without_a_time_there_is_no_mfu(capsys: Capture) -> None:
    shown = run_json(capsys, "compare", *TIMED)
    assert [column["mfu"] is None for column in shown] == [False, False, True]
    lines = run(capsys, "compare", *TIMED).splitlines()
    assert next(line for line in lines if line.startswith("MFU")).split()[-1] == "-"
    assert not [line for line in run(capsys, "compare", "gpt2", "--seq", "64").splitlines() if line.startswith("MFU")]


def test_csv(capsys: Capture) -> None:
    shown = run_json(capsys, "compare", *TIMED)
    rows = list(csv.DictReader(io.StringIO(run(capsys, "compare", *TIMED, "--format", "csv"))))
    for row, column in zip(rows, shown, strict=True):
        assert (row["label"], row["convention"]) == (column["label"], "model")
        assert {key: int(row[key]) for key in column["flops"]} == column["flops"]
        assert row["mfu"] == ("" if column["mfu"] is None else str(column["mfu"]["value"]))


def test_markdown_and_json(capsys: Capture) -> None:
    text = run(capsys, "compare", *TIMED, "--format", "markdown")
    assert text.startswith("|                       | sweep-tiny@step_time=2ms   |")
    assert "\n- sweep-tiny@step_time=2ms: --peak 1T = 1,000,000,000,000\n" in text
    assert run(capsys, "compare", *TIMED, "--format", "json") == run(capsys, "compare", *TIMED, "--json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt2", "--seq", "5", "--step-time", "1"), "MFU needs a peak"),
        (("gpt2@step_time=1;tokens_per_second=2", "--seq", "5", "--peak", "1T"), "both given: give one of them"),
        (("gpt2@seq=5;seq=6",), "seq is given twice"),
        (("gpt2", "--seq", "5", "--gpus", "3", "--pp", "2"), "3 GPUs are no multiple of tp · pp · cp = 2"),
        (("gpt2", "--seq", "5", "--json", "--format", "csv"), "--json contradicts --format csv"),
    ],
)
def test_refused(capsys: Capture, arguments: tuple[str, ...], words: str) -> None:
    assert words in run(capsys, "compare", *arguments, code=2)
