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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "--model", "llama-3.2-1b", "--seq", "8"], "on which device?"),
        ([*LLAMA, "--convention", "full"], "leave --convention out"),
        ([*LLAMA, "--clipping", "hooks"], "not predicted"),
        ([*LLAMA, "--host-factor", "0"], "--host-factor"),
        ([*LLAMA, "--host-factor", "fast"], "not a number"),
        ([*LLAMA, "--top", "x"], "--top"),
        ([*LLAMA[:-1], "h2000"], "unknown"),
        (["predict", "--model", "llama-3.2-1b", "--device", "h200"], "how long are the sequences?"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
