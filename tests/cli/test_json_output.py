"""JSON that commands print: never NaN or Infinity, and always written in the one place that makes sure of it."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from flopcalc.base.files import format_json
from flopcalc.cli import main

PLAN = ("--tokens", "1e9", "--device", "h200", "--gpus", "2", "--global-batch", "2", "--tp", "1", "--micro-batch", "1")
NAN = "base_model: gpt2\nmicro_batch_size: 2\nsequence_len: 64\nlearning_rate: .nan\nbf16: .inf\nx: {y: [-.inf]}\n"
LOG = (
    '{"type":"start","schema":1,"version":"0","time":1.0,"model":"tiny","world":1,"settings":{}}\n'
    '{"type":"step","time":NaN,"global_step":1,"perf/mfu":NaN,"perf/step_time":Infinity,"perf/steps":1}\n'
)
ROW = '{"id":"a","status":"ok","trainer":"StandardTrainer","model":"tiny","batch_size":1,"seq_len":8,"mfu":NaN}\n'
# Those that need torch are held to the same by the second test.
COMMANDS: dict[str, tuple[str, ...]] = {
    "estimate": ("estimate", "gpt2", "--seq", "64"),
    "estimate run": ("estimate", "gpt2", "--seq", "64", "--device", "h200", "--tokens", "1e18", "--mfu", "1e-50"),
    "estimate list": ("estimate", "gpt2", "--seq", "64,128"),
    "estimate launch": ("estimate", "--launch", "nan.yaml"),
    "compare": ("compare", "gpt2", "gpt2-xl", "--seq", "64"),
    "translate": ("translate", "gpt2", "--seq", "64", "--tflops", "1e40", "--tokens-per-second", "1e-50"),
    "predict": ("predict", "gpt2", "--seq", "64", "--device", "h200"),
    "plan": ("plan", "gpt2", "--seq", "64", *PLAN),
    "plan launch": ("plan", "--launch", "nan.yaml", *PLAN),
    "explain": ("explain", "gpt2", "--op", "*attn*", "--seq", "64"),
    "models": ("models",),
    "devices": ("devices",),
    "calibration list": ("calibration", "list"),
    "calibration show": ("calibration", "show", "h200-sxm", "steps"),
    "sweep summarize": ("sweep", "summarize", "--logs-dir", "."),
    "monitor": ("monitor", "show", "log.jsonl"),
}


def fail(constant: str) -> None:
    raise AssertionError(constant)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_is_finite(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, text in (("nan.yaml", NAN), ("log.jsonl", LOG), ("results.jsonl", ROW)):
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main([*COMMANDS[name], "--json"])
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    assert json.loads(out, parse_constant=fail)


def test_commands_print_json_in_one_place() -> None:
    wrong = []
    for path in (ROOT / "flopcalc" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_echo = isinstance(node, ast.Call) and ast.unparse(node.func) == "click.echo"
            if is_echo and "json.dumps" in ast.unparse(node):
                wrong.append(f"{path.name}: {ast.unparse(node)[:80]}")
    assert wrong == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"a": 1.5, "b": "NaN"}, {"a": 1.5, "b": "NaN"}),
        ([{"a": math.nan}], [{"a": None, "notes": ["null stands for 1 numbers that are not finite"]}]),
        (
            {"a": {"b": [1.0, math.inf]}, "c": (-math.inf,), "notes": ["x"]},
            {"a": {"b": [1.0, None]}, "c": [None], "notes": ["x", "null stands for 2 numbers that are not finite"]},
        ),
    ],
)
def test_a_number_that_is_not_finite_is_null_with_a_note(value: Any, shown: Any) -> None:
    assert json.loads(format_json(value), parse_constant=fail) == shown
