"""Nothing heavy is imported, by the package or by a whole run of the command line; the public names are what shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flopcalc

HEAVY = ("torch", "transformers", "numpy", "fvcore", "peft", "huggingface_hub")
ESTIMATE = """
from flopcalc.cli import main
try:
    main(["estimate", "--model", "qwen2-vl", "--seq", "2048", "--image", "1024x768", "--device", "h200",
          "--step-time", "1", "--json"])
except SystemExit as end:
    assert end.code == 0, end.code
"""
TABLE = ESTIMATE.replace('"--json"', '"--by", "module"')
BIND = """
import flopcalc
flopcalc.bind("qwen2-vl")(1, 2048, image_grid_thw=[[1, 36, 52]]).to_dict()
for name in flopcalc.__all__:
    getattr(flopcalc, name)
"""


def find_heavy(script: str, path: Path | None = None) -> set[str]:
    """Heavy modules in sys.modules after a script has run in a fresh interpreter."""
    report = f"\nimport sys\nprint('HEAVY', *[name for name in {HEAVY!r} if name in sys.modules])\n"
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", script + report], capture_output=True, text=True, env=environment, check=True
    )
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "HEAVY"
    return set(last[1:])


@pytest.mark.parametrize(
    "script", ["import flopcalc", ESTIMATE, TABLE, BIND], ids=["import", "estimate --json", "table", "bind"]
)
def test_nothing_heavy_is_imported(script: str) -> None:
    assert find_heavy(script) == set()


@pytest.mark.parametrize("name", HEAVY)
def test_this_check_can_fail(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("")
    assert find_heavy(f"import flopcalc, {name}", tmp_path) == {name}


def test_commands_are_loaded_when_called() -> None:
    late = ("flopcalc.core.estimate", "flopcalc.base.text_table")
    script = f"import sys, flopcalc.cli; print([name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    done = subprocess.run(
        [sys.executable, "-c", "import sys, flopcalc; print('click' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_tables_alone_import_tabulate() -> None:
    for script, is_imported in ((ESTIMATE, False), (TABLE, True)):
        done = subprocess.run(
            [sys.executable, "-c", script + "\nimport sys\nprint('tabulate' in sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == str(is_imported)


def test_public_names() -> None:
    assert sorted(flopcalc.__all__) == dir(flopcalc)
    assert len(set(flopcalc.__all__)) == len(flopcalc.__all__)
    for name in flopcalc.__all__:
        assert getattr(flopcalc, name) is not None
    names = {name: getattr(flopcalc, name) for name in flopcalc.__all__ if name != "__version__"}
    assert all(value.__name__ == name for name, value in names.items())


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'estimate_flop'"):
        _ = flopcalc.estimate_flop  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ConfigError", "SpecError", "WorkloadError", "RecipeError", "DeviceError"])
def test_one_family_of_errors(name: str) -> None:
    assert issubclass(getattr(flopcalc, name), flopcalc.FlopcalcError)
    assert issubclass(flopcalc.FlopcalcError, ValueError)
