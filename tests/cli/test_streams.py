"""Output that an encoding lacks, closed streams, full disks: no traceback, and the exit codes that README names."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from flopcalc.cli import main

ENCODINGS = ("latin-1", "cp437", "iso8859-5", "utf-8")  # where it is ascii, click writes UTF-8


def write_as(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: str) -> str:
    """What a command writes to a terminal of an encoding."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 0
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    text = write_as(monkeypatch, encoding, "estimate", "gpt2", "--seq", "5")
    times = "×" if encoding in ("latin-1", "utf-8") else "x"
    assert text.splitlines()[1] == f"train, 1 {times} 5 tokens; convention model"
    assert json.loads(write_as(monkeypatch, encoding, "estimate", "gpt2", "--seq", "5", "--json"))["schema"] == 1


def test_plain_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="iso8859-5", write_through=True))
    with pytest.raises(SystemExit):
        main(["estimate", "5µs…—×▁█é漢\udcff"])
    assert raw.getvalue().startswith(b"flopcalc: no preset, file or folder '5us...-x_#e?")
    assert b"\\udcff" in raw.getvalue()  # as repr() shows it


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("estimate gpt2 --seq 5 >&-", 0, ""),
        ("estimate gpt2 --seq 0 2>&-", 2, ""),
        ("estimate gpt2 --seq 5 >/dev/full", 2, "flopcalc: output failed: No space left on device\n"),
        ("estimate gpt2 --seq 0 2>/dev/full", 2, ""),
    ],
)
def test_closed_and_full(command: str, code: int, words: str) -> None:
    shell = ["sh", "-c", f'exec "$0" -m flopcalc {command}', sys.executable]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", words)


def test_a_reader_that_left() -> None:
    shell = ["bash", "-c", 'set -o pipefail; "$0" -m flopcalc models --json | head -c 10', sys.executable]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 10, "")


@pytest.mark.parametrize(("command", "code"), [("verify", 1), ("models", 0)])
def test_a_reader_that_left_before_the_answer(command: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code of verify is its answer: 0 would say that every row agrees."""

    def leave(_: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("flopcalc.cli._run", leave)
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == code
