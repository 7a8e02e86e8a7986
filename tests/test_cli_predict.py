"""`flopcalc predict`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from flopcalc.cli import main

LLAMA = ["predict", "--model", "llama-3.2-1b", "--seq", "2048", "--batch", "4", "--device", "h200"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *LLAMA, "--memory", "--top", "2")
    assert code == 0
    assert "bound by the device" in out
    for words in ("matrix products", "all others", "largest batch that fits: ", "helps most: "):
        assert words in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *LLAMA, "--json", "--memory", "--compile", "--optimizer", "none")
    shown = json.loads(out)
    assert code == 0
    assert shown["bound"] == "device"
    assert shown["breakdown"]["optimizer"] == 0
    assert shown["memory_bytes"]["largest_batch"] > 4


def test_a_slow_host_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA, "--host-factor", "10", "--json")
    assert json.loads(out)["bound"] == "host"


def test_rows_of_nothing_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA, "--lora", "r=8,targets=q_proj")
    shares = [line.split()[-2] for line in out.split("module,")[0].splitlines() if line.endswith(" %")]
    assert shares
    assert "0.0" not in shares
    assert "optimizer" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "t5-v1.1-xl", "--seq", "64", "--decoder-seq", "8", "--batch", "2"],
        ["--model", "t5-v1.1-xl", "--seq", "64", "--decoder-seq", "2", "--phase", "decode"],
        ["--model", "voxtral-mini-3b", "--text", "16", "--audio", "30"],
    ],
)
def test_other_shapes_of_models(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "predict", "--device", "h200", "--json", "--memory", *arguments)
    shown = json.loads(out)
    assert code == 0
    assert shown["breakdown"]["products"] > 0
    assert shown["breakdown"]["attention"] > 0
    assert shown["memory_bytes"]["largest_batch"] > 1


def test_what_does_not_fit_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "predict", "--model", "llama-3.1-70b", "--seq", "512", "--device", "h200", "--memory")
    assert "largest batch that fits: none" in out
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("note: does not fit: the step needs ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "--model", "llama-3.2-1b", "--seq", "8"], "on which device?"),
        ([*LLAMA, "--convention", "full"], "leave --convention out"),
        ([*LLAMA, "--clipping", "hooks"], "not predicted"),
        ([*LLAMA, "--host-factor", "0"], "--host-factor"),
        ([*LLAMA, "--host-factor", "fast"], "not a number"),
        ([*LLAMA, "--top", "x"], "--top"),
        ([*LLAMA, "--dtype", "fp8"], "not in fp8"),
        ([*LLAMA, "--dtype", "fp32", "--attention-kernel", "cudnn"], "takes bf16 and fp16"),
        ([*LLAMA[:-1], "h2000"], "your own devices.toml adds one"),
        (["predict", "--model", "llama-3.2-1b", "--device", "h200"], "how long are the sequences?"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err


def test_optimizers_are_those_of_the_prediction() -> None:
    from flopcalc.cli.predict import OPTIMIZERS
    from flopcalc.prediction import work

    assert OPTIMIZERS == work.OPTIMIZERS
