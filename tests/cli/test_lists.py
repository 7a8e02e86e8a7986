"""Lists of values: a row each, whose JSON is the single result's, as a table, CSV, Markdown or a curve."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc.cli import main

Capture = pytest.CaptureFixture[str]
TINY = ("estimate", "sweep-tiny")
PREDICT = ("predict", "qwen2.5-0.5b")
SERVING = ("serving", "llama-3.2-1b", "--input-len", "64", "--output-len", "8")
PLAN = ("plan", "qwen2.5-0.5b", "--tokens", "1B", "--global-batch", "16", "--pp", "1", "--zero", "1", "--tp", "1")


def run(capsys: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    return out


def run_json(capsys: Capture, *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


@pytest.mark.parametrize(
    ("command", "lists", "rest"),
    [
        (TINY, {"seq": ["64", "128", "1k"]}, ()),
        (TINY, {"batch": ["1", "3"], "seq": ["64", "128"]}, ("--grad-accum", "2")),
        (TINY, {"device": ["h200", "b200"], "batch": ["1", "2"], "seq": ["8", "9"]}, ("--tokens-per-second", "9k")),
        (TINY, {"device": ["h200", "b200"], "gpus": ["1", "2"]}, ("--seq", "64", "--step-time", "1ms")),
        (PREDICT, {"device": ["h200", "h100-sxm"], "seq": ["128", "256"]}, ()),
        (PLAN, {"device": ["h200", "h100-sxm"], "gpus": ["2", "4"]}, ("--seq", "512")),
        (SERVING, {"device": ["l4", "h100"], "rate": ["2", "0.5"]}, ("--ttft", "2s")),
        (SERVING, {"gpus": ["1", "2"], "users": ["3", "9"]}, ("--device", "h100", "--think", "5s")),
        (SERVING, {"device": ["h100", "l4"], "concurrency": ["1", "1k"]}, ()),
    ],
)
def test_rows_are_the_single_results(
    capsys: Capture, command: tuple[str, ...], lists: dict[str, list[str]], rest: tuple[str, ...]
) -> None:
    arguments = [piece for name, values in lists.items() for piece in (f"--{name}", ",".join(values))]
    shown = run_json(capsys, *command, *arguments, *rest)
    assert set(shown) == {"schema", "rows"}
    assert shown["schema"] == 1
    combinations: list[dict[str, str]] = [{}]
    for name, values in lists.items():
        combinations = [{**before, name: value} for before in combinations for value in values]
    assert len(shown["rows"]) == len(combinations)
    for row, chosen in zip(shown["rows"], combinations, strict=True):
        sizes = {name: {"1k": 1024, "0.5": 0.5}.get(value) or int(value) for name, value in chosen.items()
                 if name != "device"}  # fmt: skip
        assert row.pop("varied") == {**({"device": chosen["device"]} if "device" in chosen else {}), **sizes}
        plain = [piece for name, value in chosen.items() for piece in (f"--{name}", str(sizes.get(name, value)))]
        assert row == run_json(capsys, *command, *plain, *rest)


def test_one_value_stays_a_bare_object(capsys: Capture) -> None:
    assert "rows" not in run_json(capsys, *TINY, "--seq", "64")
    assert run_json(capsys, *TINY, "--lengths", "64,32")["workload"]["layout"] == "packed"


def test_table(capsys: Capture) -> None:
    text = run(capsys, *TINY, "--seq", "64,1k", "--batch", "1,2")
    lines = text.splitlines()
    assert lines[0] == "sweep-tiny: FLOPs of one train step, convention model"
    assert lines[2].split() == ["batch", "seq", "tokens", "forward", "backward", "step", "per", "token"]
    assert [line.split()[:3] for line in lines[4:8]] == [
        ["1", "64", "64"],
        ["1", "1,024", "1,024"],
        ["2", "64", "128"],
        ["2", "1,024", "2,048"],
    ]
    text = run(capsys, *TINY, "--seq", "64,1k", "--device", "h200,b200", "--tokens-per-second", "1M", "--tokens", "1B")
    assert lines[2] != text.splitlines()[2]
    assert text.splitlines()[2].split()[-3:] == ["MFU", "HFU", "GPU-hours"]
    assert max(len(line) for line in text.splitlines()) <= 80
    text = run(capsys, *PREDICT, "--seq", "128,256", "--device", "h200", "--memory")
    assert "tokens/s" in text
    assert "max batch" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_notes_name_their_rows(capsys: Capture) -> None:
    text = run(capsys, "estimate", "llama-2-7b", "--seq", "4k,8k", "--batch", "1,2")
    assert "note  --seq 8192: length 8192 is beyond max_position_embeddings = 4096" in text
    text = run(capsys, "predict", "llama-3.1-8b", "--seq", "2048", "--batch", "1,4", "--device", "h100-sxm,h200")
    assert "105.96 GiB ✗" in text
    assert "note  --device h100-sxm --batch 4: does not fit" in text
    assert "note  host time is" in text


def test_csv_and_markdown(capsys: Capture) -> None:
    shown = run_json(capsys, *TINY, "--seq", "64,128", "--recompute", "full", "--convention", "hardware")["rows"]
    arguments = (*TINY, "--seq", "64,128", "--recompute", "full", "--convention", "hardware")
    rows = list(csv.DictReader(io.StringIO(run(capsys, *arguments, "--format", "csv"))))
    assert [int(row["seq"]) for row in rows] == [64, 128]
    for row, single in zip(rows, shown, strict=True):
        assert {key: int(row[key]) for key in single["flops"]} == single["flops"]
        assert row["convention"] == "hardware"
        assert row["mfu"] == ""
    assert "|   seq |" in run(capsys, *arguments, "--format", "markdown")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (TINY, ("--seq", "64,128,256")),
        (TINY, ("--seq", "64,128", "--batch", "1,2")),
        (TINY, ("--seq", "64", "--device", "h200,b200")),
        (PREDICT, ("--seq", "64,128", "--device", "h200")),
    ],
)
def test_curve(capsys: Capture, tmp_path: Path, command: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.svg"
    assert run(capsys, *command, *arguments, "--plot", str(path)).endswith(f"written: {path}\n")
    assert path.read_text(encoding="utf-8").startswith("<?xml")
    assert run_json(capsys, *command, *arguments, "--plot", str(path))["rows"]


def test_a_curve_has_a_title_and_hollow_points_that_do_not_fit(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "tokens.svg"
    arguments = ("--seq", "4096", "--batch", "1,16", "--device", "h200,h100")
    run(capsys, "predict", "llama-3.1-8b", *arguments, "--plot", str(path))
    drawn = path.read_text(encoding="utf-8")
    for text in ("llama-3.1-8b: one train step", "device h200", "device h100", "does not fit in memory"):
        assert f"<!-- {text} -->" in drawn
    assert "fill: #ffffff; stroke: #1f77b4" in drawn  # a hollow point in the colour of its line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*TINY, "--seq", "64", "--plot", "x.svg"), "--plot draws a curve over a list"),
        ((*TINY, "--seq", "64,128", "--plot", "x"), "ends in .png, .svg or .pdf"),
        ((*TINY, "--seq", "64,128", "--plot", "no/folder/x.svg"), "cannot be written"),
        ((*TINY, "--seq", "64,128", "--plot", "x.doc"), "x.doc"),
        ((*TINY, "--seq", "64,,128"), "--seq: '64,,128' has an empty value"),
        ((*TINY, "--seq", "1k,1024"), "--seq: '1k,1024' lists a value twice"),
        ((*TINY, "--seq", "1,x"), "--seq: 'x' is not a whole number"),
        ((*TINY, "--seq", ",".join(map(str, range(1, 66)))), "65 combinations of the listed values: at most 64"),
        ((*TINY, "--seq", "64,128", "--by", "module"), "--by and --depth break one result down"),
        ((*TINY, "--seq", "64,128", "--depth", "2"), "--by and --depth break one result down"),
        ((*TINY, "--seq", "64,128", "--peak", "1T", "--step-time", "1"), "one --step-time cannot hold for several"),
        ((*TINY, "--seq", "64", "--device", "h200,b2000"), "device 'b2000' unknown"),
        ((*PREDICT, "--seq", "64", "--device", "h200", "--plot", "x.svg"), "--plot draws a curve over a list"),
        ((*PLAN, "--device", "h200", "--gpus", "2,4", "--plot", "x.svg"), "--plot and --timeline are of one plan"),
        (("explain", "gpt2", "--seq", "1,2", "--op", "*"), "--seq: '1,2' is a list; one number is needed here"),
        (
            ("compare", "gpt2", "--seq", "1,2"),
            "takes one --seq for all columns; for several write gpt2@seq=1 gpt2@seq=2. `flopcalc estimate MODEL --seq",
        ),
        (("compare", "gpt2", "b@batch=2", "--seq", "1,2"), "gpt2@seq=2 'b@batch=2;seq=1' 'b@batch=2;seq=2'"),
        (("compare", "gpt2", "--recompute", "none,full"), "write gpt2@recompute=none gpt2@recompute=full"),
        (("estimate", "gpt2,gpt2-xl", "--seq", "8"), "`flopcalc compare A B` takes several models"),
        ((*SERVING, "--device", "h100", "--rate", "1,x"), "--rate: 'x' is not a number"),
        ((*SERVING, "--device", "h100", "--concurrency", "4", "--plot", "x.svg"), "a curve needs a list"),
        ((*SERVING, "--device", "h100", "--concurrency", ",".join(map(str, range(1, 66)))), "65 combinations"),
        (("explain", "gpt2", "--seq", "8", "--device", "h100,h200", "--op", "*"), "One device is needed"),
    ],
)
def test_refused(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "title", "header"),
    [
        (("--device", "h100", "--concurrency", "1,2"), "vLLM on 1 × NVIDIA H100 80GB HBM3 (one GPU): 64 tokens in, 8",
         "concurrency TTFT TPOT end to end tokens/s per GPU $ per 1M output"),
        (("--device", "l4,h100", "--rate", "1", "--itl", "1s"), "llama-3.2-1b, vLLM: 64 tokens in, 8 out, 1 requests/s",
         "device GPUs TTFT TPOT end to end tokens/s per GPU $ per 1M output objectives GPUs needed"),
        (("--device", "h100", "--gpus", "1,2", "--users", "3"), "llama-3.2-1b, vLLM: 64 tokens in, 8 out, 3 users",
         "gpus GPUs TTFT TPOT end to end tokens/s per GPU $ per 1M output"),
    ],
)  # fmt: skip
def test_table_of_serving(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], title: str, header: str
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = run(capsys, *SERVING, *arguments).splitlines()
    assert title in lines[0]
    assert lines[2].split() == header.split()
