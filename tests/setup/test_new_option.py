"""The option that CONTRIBUTING adds as an example: its two lines, in a copy of the package, reach every door."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASK_PAGE = """
import json
from flopcalc import FlopcalcError, estimate_flops
from flopcalc.web.setups import describe_form
for value in (0, 3):
    try:
        estimate_flops("gpt2", seq_len=64, epochs=value)
    except FlopcalcError as error:
        print(error)
print([each for section in describe_form({}) for each in section["fields"] if each["name"] == "epochs"])
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the two lines of CONTRIBUTING, and no other change."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "flopcalc", folder / "flopcalc", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "model_specs").symlink_to(ROOT / "model_specs")
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add an option")[1]
    row, use = re.findall(r"```py\n(.*?)\n```", page, re.DOTALL)
    table = folder / "flopcalc" / "setup" / "fields.py"
    before, after = table.read_text(encoding="utf-8").split("    # output\n")
    table.write_text(f"{before}    # output\n    {row}\n{after}", encoding="utf-8")
    code = folder / "flopcalc" / "setup" / "counting.py"
    text, changed = re.subn(r"return count_run\(.*", lambda _: use, code.read_text(encoding="utf-8"))
    assert changed == 1
    code.write_text(text, encoding="utf-8")
    return folder


def run(copy: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_command_line(copy: Path) -> None:
    shown = " ".join(run(copy, "-m", "flopcalc", "estimate", "--help").split("Output:")[1].split())
    assert "--epochs N Passes over the tokens of a run (default 1)." in shown
    asked = ("-m", "flopcalc", "estimate", "gpt2", "--seq", "1024", "--tokens", "1024000", "--json")
    once, thrice = (json.loads(run(copy, *asked, *more))["run"] for more in ((), ("--epochs", "3")))
    assert (once["steps"], thrice["steps"], thrice["flops"]) == (1000, 3000, 3 * once["flops"])
    refused = run(copy, "-m", "flopcalc", "predict", "gpt2", "--epochs", "3")
    assert refused == "flopcalc: predict takes no --epochs: estimate does\n"


def test_python_and_page(copy: Path) -> None:
    wrong, *_, field = run(copy, "-c", ASK_PAGE).splitlines()
    assert wrong == "epochs must be at least 1, not 0"
    assert field == "[{'name': 'epochs', 'kind': 'text', 'hint': '1', 'commands': ('estimate',)}]"


def test_schema(copy: Path) -> None:
    found = json.loads(run(copy, "-m", "flopcalc", "schema"))["properties"]["epochs"]
    assert (found["description"], found["default"]) == ("Passes over the tokens of a run.", 1)
    assert (found["minimum"], found["x-group"], found["x-commands"]) == (1, "output", ["estimate"])
