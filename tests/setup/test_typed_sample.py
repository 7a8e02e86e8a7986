"""A type checker knows the keywords of estimate_flops, bind, predict, plan and translate, and what each may hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).with_name("typed_sample.py")
ROOT = Path(__file__).resolve().parents[2]
# Large libraries are not read: the keywords need none of them.
SETTINGS = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*,transformers.*,diffusers.*,peft.*,matplotlib.*,pandas.*,scipy.*,ray.*,accelerate.*,lightning.*]
follow_imports = skip
"""
_MARK = re.compile(r"# error: (.+)$")


@pytest.mark.heavy  # mypy reads the whole package: about ten seconds
def test_marked_errors_and_no_others(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", SAMPLE]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = dict(re.findall(r"^[^\n]*typed_sample\.py:(\d+): error: ([^\n]*)$", printed.stdout, re.MULTILINE))
    lines = SAMPLE.read_text(encoding="utf-8").split("\n")
    marked = {str(number): mark[1] for number, line in enumerate(lines, 1) if (mark := _MARK.search(line))}
    assert found.keys() == marked.keys(), printed.stdout + printed.stderr
    assert {line: text[: len(marked[line])] for line, text in found.items()} == marked
