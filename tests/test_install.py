"""Installed as a wheel and in an editable install, the data folder is found and the command runs."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import json, flopcalc
from flopcalc.base.data import find_data_dir
estimate = flopcalc.estimate_flops("qwen2-vl", seq_len=2048, image_grid_thw=[[1, 36, 52]])
print(json.dumps([estimate.total, flopcalc.peak_flops_per_s("h200"), find_data_dir(), flopcalc.__file__]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


def run_from(path: Path, where: Path) -> tuple[int, float, Path, Path]:
    """What a Python that sees flopcalc only at `path` counts, run outside the checkout."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(path)!r}){CODE}"],
        cwd=where,
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(where)},
    )
    total, peak, data, file = json.loads(done.stdout)
    return total, peak, Path(data), Path(file)


HINT = """
from flopcalc.base.data import describe_install
print(describe_install("hub"))
"""


def test_install_hints_fit_where_the_package_lies(wheel: Path, tmp_path: Path) -> None:
    """From a wheel pip knows the package; from a checkout that was never installed it is told the folder."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for path, where, expected in (
        (site, tmp_path, "pip install 'flopcalc[hub]'"),
        (ROOT, tmp_path, f"pip install -e '{ROOT}[hub]'"),
        (ROOT, ROOT, "pip install -e '.[hub]'"),
    ):
        code = f"import sys; sys.path = [{str(path)!r}, *sys.path[1:]]{HINT}"
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            cwd=where,
            check=True,
            capture_output=True,
            text=True,
            env={"PATH": "", "HOME": str(where)},
        )
        assert done.stdout == f"{expected}\n"


def test_wheel_carries_its_data(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "flopcalc/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"flopcalc"}  # no lab
    specs = sorted(path.relative_to(ROOT) for path in (ROOT / "model_specs").rglob("*.toml"))
    assert {f"flopcalc/{path.as_posix()}" for path in specs} <= set(names)
    total, peak, data, file = run_from(site, tmp_path)
    assert data == site / "flopcalc" / "model_specs"
    assert file == site / "flopcalc" / "__init__.py"
    checkout_total, checkout_peak, checkout_data, _ = run_from(ROOT, tmp_path)
    assert checkout_data == ROOT / "model_specs"
    assert (total, peak) == (checkout_total, checkout_peak)


def test_add_in_a_wheel_names_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # An editable install adds a checkout to the path.
    paths = f"[{str(tmp_path)!r}, *(path for path in sys.path if not os.path.isdir(os.path.join(path, 'lab')))]"
    code = f"import os, sys; sys.path = {paths}; from flopcalc.cli import main; main(['add', 'vit'])"
    environment = {"PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    words = "flopcalc: add needs a checkout of flopcalc: an installed package has no lab/\n"
    assert (done.returncode, done.stderr) == (2, words)


def test_wheel_needs_only_the_light_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    needed = [line.split(":", 1)[1].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert sorted(line.split(">")[0] for line in needed if "extra ==" not in line) == ["click", "tabulate"]
