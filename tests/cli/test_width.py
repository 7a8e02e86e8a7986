"""Every command's text keeps to the terminal's width, whatever it is asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from places import ROOT

from flopcalc.cli import main

Capture = pytest.CaptureFixture[str]
FILES = ROOT / "tests" / "compat" / "records" / "files"
LONG = "a-model-with-a-name-that-is-longer-than-anybody-would-type-and-then-some-more-of-it-at-the-end"
PLAN = ("plan", "qwen2.5-0.5b", "--tokens", "1B", "--seq", "512", "--global-batch", "16", "--zero", "1", "--pp", "1")
# What is asked -> exit code 0; LONG is a folder with a config.
CASES: tuple[tuple[str, ...], ...] = (
    ("estimate", "qwen2.5-vl-3b", "--text", "64", "--image", "640x480", "--by", "module"),
    ("estimate", "sweep-tiny", "--seq", "1k,2k", "--device", "h200,rtx-pro-6000-workstation", "--gpus", "1,2",
     "--tokens-per-second", "9k", "--tokens", "1T"),
    ("estimate", LONG, "--seq", "64", "--convention", "hardware", "--recompute", "full-reentrant", "--clipping",
     "hooks"),
    ("explain", "qwen1.5-moe-a2.7b", "--seq", "2k", "--op", "*"),
    ("compare", "gpt2", "qwen2-vl-2b@seq=4096;image=1024x768", f"{LONG}@seq=64",
     "gpt2-xl@step_time=350ms;gpus=8", "--seq", "1k", "--device", "h200"),
    ("predict", "qwen2.5-0.5b", "--seq", "512", "--device", "h200", "--memory"),
    (*PLAN, "--device", "h200", "--gpus", "2"),
    (*PLAN, "--device", "h200,h100-sxm", "--gpus", "2,4"),
    ("models",), ("models", "qwen"), ("models", "qwen2-vl-7b"), ("models", "bamba"),
    ("devices",), ("devices", "a100"), ("devices", "h200"),
    ("calibration", "list"),
    ("calibration", "show", "h200-sxm", "steps"), ("calibration", "show", "h200-sxm", "padding"),
    ("calibration", "show", "h200-sxm", "attention"),
    ("calibration", "diff", "calibration/mini-gpu", "h200-sxm"),
    ("sweep", "summarize", "--logs-dir", "sweep"),
    ("monitor", "show", "monitor"),
    ("--help",), ("estimate", "--help"), ("plan", "--help"), ("compare", "--help"), ("sweep", "run", "--help"),
)  # fmt: skip
SLOW: tuple[tuple[str, ...], ...] = (
    ("models", "--coverage"),
    ("predict", LONG, "--seq", "64", "--device", "h100-sxm,rtx-pro-6000-workstation", "--batch", "1,2", "--memory"),
    ("verify", "--model-type", "gpt2", "--seq", "8", "--recompute", "full", "--lora", "r=3,targets=all-linear"),
    ("crosscheck", LONG, "--seq", "8", "--device", "cpu"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    (tmp_path / LONG).mkdir()
    shutil.copy(FILES / "config.json", tmp_path / LONG / "config.json")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    assert lines
    assert [line for line in lines if len(line) > columns] == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_eighty_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    check(capsys, monkeypatch, arguments, 80)


@pytest.mark.heavy
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("arguments", [*CASES, *SLOW], ids=" ".join)
def test_other_widths(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], columns: int
) -> None:
    if arguments[0] in ("verify", "crosscheck"):
        pytest.importorskip("torch")
    check(capsys, monkeypatch, arguments, columns)
