"""What a release needs: one command cuts it, workflows are pinned and valid, what a person must fill in is listed."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from places import ROOT

import flopcalc

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CUT = (
    "CHANGELOG.md",
    "CITATION.cff",
    "pyproject.toml",
    "flopcalc/_version.py",
    "recipe/recipe.yaml",
    "scripts/release",
)
PLACEHOLDER = re.compile(r"\bOWNER\b|\bTODO\b")


def copy_release_files(folder: Path) -> None:
    shutil.copytree(ROOT / "changelog.d", folder / "changelog.d")
    for name in CUT:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def cut(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(folder / "scripts" / "release"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PATH": path})


@pytest.mark.skipif(find_spec("scriv") is None, reason="needs scriv, of the extra dev")
def test_one_command_cuts_a_release(tmp_path: Path) -> None:
    copy_release_files(tmp_path)
    (tmp_path / "changelog.d" / "herring.md").write_text("- A herring is counted.\n", encoding="utf-8")
    before = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    fragments = [
        path.read_text("utf-8") for path in (tmp_path / "changelog.d").glob("*.md") if path.name != "README.md"
    ]
    done = cut(tmp_path, "9.8.7")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "changelog.d").iterdir()] == ["README.md"]
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    after = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    head, _, old = before.partition("<!-- scriv-insert-here -->")
    assert after.startswith(head)
    assert after.endswith(old)
    cut_part = after[len(head) : -len(old)]
    assert f"\n## 9.8.7 ({today})\n" in cut_part
    assert [text for text in fragments if text.strip() not in cut_part] == []
    assert '\n__version__ = "9.8.7"\n' in (tmp_path / "flopcalc" / "_version.py").read_text(encoding="utf-8")
    assert yaml.safe_load((tmp_path / "recipe" / "recipe.yaml").read_text("utf-8"))["context"]["version"] == "9.8.7"
    citation = yaml.safe_load((tmp_path / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], str(citation["date-released"])) == ("9.8.7", today)


@pytest.mark.parametrize("arguments", [(), ("0.2",), ("v0.2.0",), ("0.2.0; true",)])
def test_what_is_no_version_changes_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    copy_release_files(tmp_path)
    done = cut(tmp_path, *arguments)
    assert done.returncode != 0
    assert "version" in done.stderr
    assert all((tmp_path / name).read_bytes() == (ROOT / name).read_bytes() for name in CUT)


def test_every_file_has_the_same_version() -> None:
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {recipe["context"]["version"], citation["version"]} == {flopcalc.__version__}


def test_the_recipe_needs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))
    run = [need.replace(" ", "") for need in recipe["requirements"]["run"] if not need.startswith("python")]
    assert run == project["dependencies"]
    assert recipe["context"]["python_min"] == project["requires-python"].removeprefix(">=")
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {place}" for name, place in project["scripts"].items()
    ]
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (project["description"], project["license"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    assert [
        line for line in lines if not re.search(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)
    ] == []


def test_an_action_has_one_commit() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    pins = set(re.findall(r"uses: (\S+)@(\w+) # (\S+)", text))
    assert len({action for action, _, _ in pins}) == len(pins)


SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "custom.github-workflows-require-timeout": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="needs check-jsonschema, of the extra dev")
@pytest.mark.parametrize(("schema", "pattern"), SCHEMAS.items())
def test_files_fit_their_schemas(schema: str, pattern: str) -> None:
    files = sorted(map(str, ROOT.glob(pattern)))
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_space_is_a_static_one() -> None:
    _, front, text = (ROOT / ".github" / "space" / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    card = yaml.safe_load(front)
    assert (card["sdk"], card["app_file"], card["license"]) == ("static", "index.html", "apache-2.0")
    assert len(card["short_description"]) <= 60  # the hub refuses longer ones
    assert "scripts/space" in text


def test_what_a_person_must_fill_in_is_listed() -> None:
    """The list in docs/releasing.md names every file with a placeholder, and no other."""
    page = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    files = [
        *ROOT.glob("*.*"), *(ROOT / "paper").iterdir(), *(ROOT / "recipe").iterdir(),
        *(ROOT / ".github").rglob("*.md"), *(ROOT / ".github" / "ISSUE_TEMPLATE").iterdir(),
    ]  # fmt: skip
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.is_file() and path.name != ".git" and PLACEHOLDER.search(path.read_text(encoding="utf-8"))
    }
    assert listed == found
