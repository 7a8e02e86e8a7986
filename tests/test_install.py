"""Installed as a wheel and in an editable install, the data folder is found and the command runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flopcalc

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import json, flopcalc
from flopcalc.base.data import find_data_dir
estimate = flopcalc.estimate_flops("qwen2-vl", seq_len=2048, image_grid_thw=[[1, 36, 52]])
print(json.dumps([estimate.total, flopcalc.peak_flops_per_s("h200"), find_data_dir(), flopcalc.__file__]))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


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


NAMES = """
import json, sys, flopcalc
values = {name: getattr(flopcalc, name) for name in flopcalc.__all__}
print(json.dumps([sorted(values), [name for name, value in values.items() if value is None]]))
"""


def test_wheel_gives_every_public_name_without_extras(wheel: Path, tmp_path: Path) -> None:
    """Not even click and tabulate are there: the command line and its tables alone need them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", NAMES], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={"PATH": "", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout) == [sorted(flopcalc.__all__), []]


def test_readme_of_the_packages_leads_to_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    headers, _, readme = metadata.partition("\n\n")
    repository = re.search(r"^Project-URL: Repository, (\S+)$", headers, re.MULTILINE)
    assert repository is not None
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert [target for target in targets if not target.startswith((repository[1], "#"))] == []
    assert f"]({repository[1]}/raw/main/docs/pictures/estimate.svg)" in readme
    paths = [target.split("/main/")[1].split("#")[0] for target in targets if "/main/" in target]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_sdist_installs_offline_and_passes_light_tests(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "--no-compile",
    ]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(sdist)], check=True, capture_output=True)
    assert run_from(tmp_path / "site", tmp_path)[0] == run_from(ROOT, tmp_path)[0]
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("flopcalc-*")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/base/test_units.py",
         "tests/core/workload", "tests/test_imports.py::test_public_names"],
        cwd=source, capture_output=True, text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHONPATH"))},
    )  # fmt: skip
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout
