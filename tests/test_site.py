"""The documentation site: its tools are an extra of their own, and it builds with warnings as errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from places import ROOT

import flopcalc

TOOLS = ("sphinx", "myst_parser", "furo")


def test_the_tools_of_the_site_are_not_installed_for_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = {re.split(r"[\[>=]", requirement)[0].replace("-", "_") for requirement in extras["docs"]}
    assert {*TOOLS, "flopcalc"} == names
    assert not [requirement for requirement in extras["test"] if re.search("sphinx|myst|furo|docs", requirement)]


def test_one_command_builds_the_site_with_the_page() -> None:
    script = (ROOT / "scripts" / "docs").read_text(encoding="utf-8")
    assert script.count("sphinx-build -q -W") == 2
    assert "python -m flopcalc web --out build/site/page" in script
    assert "- run: scripts/docs\n" in (ROOT / ".github" / "workflows" / "docs.yml").read_text(encoding="utf-8")
    assert "build/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()


def test_ci_and_the_workflows_call_the_scripts() -> None:
    flows = "".join((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8") for name in ("tests", "docs"))
    local = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name in ("check", "test"):
        assert f"- run: scripts/{name}\n" in flows
        assert re.search(rf"^[^#\n]*\bscripts/{name}\b", local, re.MULTILINE)
    # What .ci/run takes from the README, and that its second half is what scripts/test runs.
    assert re.search(r"^pip install .* && pytest$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (ROOT / "scripts" / "test").read_text(encoding="utf-8").endswith('\nexec pytest "$@"\n')


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_is_what_github_takes(path: Path) -> None:
    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    assert [step for step in steps if ("run" in step) == ("uses" in step)] == []
    # GitHub refuses a list as an input: several paths are one text with a line for each.
    values = [value for step in steps for value in step.get("with", {}).values()]
    assert [value for value in values if not isinstance(value, (str, int, bool))] == []
    for name in re.findall(r"\bscripts/\w+", "\n".join(step.get("run", "") for step in steps)):
        assert os.access(ROOT / name, os.X_OK)


def test_tests_run_on_every_python() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    assert flow["jobs"]["test"]["strategy"]["matrix"]["python-version"] == ["3.11", "3.12", "3.13", "3.14"]


def test_what_stands_around_the_code_can_be_read() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", flopcalc.__version__)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    checks = (ROOT / "scripts" / "check").read_text(encoding="utf-8")
    assert [hook["id"] for hook in hooks if hook["name"] not in checks] == []


def test_design_names_no_file_of_the_tree() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert re.findall(r"`[^`\s]*\.(?:py|toml|json|md|txt)`", text) == []


@pytest.mark.heavy
@pytest.mark.skipif(not all(map(find_spec, TOOLS)), reason="needs the extra docs: Sphinx, MyST and furo")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-t",
        "page",
        "-d",
        str(tmp_path / "doctrees"),
    ]
    subprocess.run([*command, "-c", "docs", ".", str(tmp_path / "site")], cwd=ROOT, check=True)
    made = tmp_path / "site" / "docs"
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not (made / page.with_suffix(".html")).exists()] == []
    functions = (made / "api.html").read_text(encoding="utf-8")
    assert [name for name in flopcalc.__all__[1:] if f'id="flopcalc.{name}"' not in functions] == []
    assert 'href="../page/index.html"' in (made / "index.html").read_text(encoding="utf-8")
    assert "docs/index.html" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
