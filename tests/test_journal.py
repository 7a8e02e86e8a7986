"""`scripts/test --all`: a stopped run goes on, another tree begins anew, and a full run is written down."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import journal
import pytest
from places import HELPERS
from relevance import find_unconcerned

SUITE = """
import os, pytest

def test_light(): pass

@pytest.mark.heavy
@pytest.mark.parametrize("n", range(3))
def test_heavy(n): pass

def test_skipped(): pytest.skip("not here")

def test_other():
    assert not os.path.exists("build/broken")
"""
NAMES = ["test_light", "test_heavy[0]", "test_heavy[1]", "test_heavy[2]", "test_skipped", "test_other"]
PAGE = (
    "# Proof\n\n| date | commit | passed | skipped |\n|---|---|---|---|\n| not yet run | `0123456` | - | - |\n\nEnd.\n"
)


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *names, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A checkout with a few tests, one of which fails while build/broken exists."""
    root = pytester.path
    pytester.makeini("[pytest]\nmarkers = heavy: x\ntestpaths = tests")
    (root / "tests").mkdir()
    (root / "tests" / "test_suite.py").write_text(SUITE)
    (root / "proof.md").write_text(PAGE)
    (root / ".gitignore").write_text("build/\n__pycache__/\nrunpytest-*\n")
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "first")
    (root / "build").mkdir()
    monkeypatch.setattr(journal, "ROOT", root)
    monkeypatch.setattr(journal, "FILE", root / "build" / "tests.jsonl")
    monkeypatch.setattr(journal, "PROOF", root / "proof.md")
    monkeypatch.setattr(journal, "DURATIONS", root / "durations.json")
    return pytester


def run(suite: pytest.Pytester, *words: str) -> tuple[list[str], str, int]:
    """The tests that ran, in order; what was printed; the exit code."""
    plugins = ("-p", "tiers", "-p", "journal", "-p", "no:xdist", "-p", "no:cacheprovider")
    result = suite.runpytest_inprocess(*plugins, "-v", "--all", "--resume", *words)
    text = result.stdout.str()
    ends = (" PASSED", " FAILED", " SKIPPED")
    ran = [
        line.split(" ")[0] for line in text.splitlines() if line.startswith("tests/") and any(w in line for w in ends)
    ]
    return [name.removeprefix("tests/test_suite.py::") for name in ran], text, int(result.ret)


def test_a_stopped_run_goes_on_with_failed_tests_first(suite: pytest.Pytester) -> None:
    broken = suite.path / "build" / "broken"
    broken.touch()
    ran, text, code = run(suite, "-k", "light or other or skipped")
    assert ran == ["test_light", "test_skipped", "test_other"]
    assert code == 1
    assert "journal: build/tests.jsonl, new" in text
    assert (
        "all parts of the run together: 1 passed, 1 skipped, 1 failed, 0 left\ncontinue with `scripts/test --all`"
        in text
    )
    with journal.FILE.open("a") as stream:  # a kill in the middle of a line
        stream.write('{"id": "tests/test_suite.py::test_hea')
    broken.unlink()
    ran, text, code = run(suite)
    assert ran == ["test_other", "test_heavy[0]", "test_heavy[1]", "test_heavy[2]"]
    assert code == 0
    assert "journal: build/tests.jsonl, continued" in text
    assert "all parts of the run together: 5 passed, 1 skipped, 0 failed, 0 left\nno failure in a full run" in text
    ran, text, code = run(suite)
    assert (ran, code) == ([], 0)
    assert "5 passed, 1 skipped, 0 failed, 0 left" in text
    assert run(suite, "--fresh")[0] == NAMES


def test_a_run_that_ends_early_says_what_is_left(suite: pytest.Pytester) -> None:
    (suite.path / "build" / "broken").touch()
    (suite.path / "tests" / "test_suite.py").write_text(SUITE + "\ndef test_last(): pass\n")
    _, text, code = run(suite, "-x")
    assert code == 1
    assert "4 passed, 1 skipped, 1 failed, 1 left\ncontinue with `scripts/test --all`" in text


def test_another_tree_begins_anew(suite: pytest.Pytester) -> None:
    run(suite)
    commit = git(suite.path, "rev-parse", "HEAD")[:12]
    (suite.path / "new.txt").write_text("1")
    ran, text, _ = run(suite)
    assert ran == NAMES
    assert f"begun anew: the last was of another tree, {commit}" in text
    (suite.path / "new.txt").write_text("2")
    ran, text, _ = run(suite)
    assert ran == NAMES
    assert f"begun anew: the last was of another tree, {commit} with changes" in text
    git(suite.path, "add", ".")
    git(suite.path, "commit", "-m", "second")
    assert run(suite)[0] == NAMES
    assert run(suite)[0] == []


def test_a_run_goes_on_after_a_change_that_concerns_few(suite: pytest.Pytester) -> None:
    """Light tests run again, and heavy ones of the file or the type that changed."""
    run(suite)
    other = suite.path / "tests" / "test_more.py"
    for text, expected in (("", NAMES[:1] + NAMES[4:]), ("# changed\n", NAMES)):
        other.write_text("def test_more(): pass\n")
        (suite.path / "tests" / "test_suite.py").write_text(text + SUITE)
        git(suite.path, "add", ".")
        git(suite.path, "commit", "-m", "tests")
        ran, printed, code = run(suite)
        assert [name for name in ran if not name.startswith("tests/")] == expected
        assert ("3 heavy tests that the changes since do not concern" in printed) == (expected != NAMES)
        assert (code, "6 passed, 1 skipped, 0 failed, 0 left" in printed) == (0, True)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["docs/proof.md", "changelog.d/x.md"], (False, False, False)),
        (["model_specs/specs/mistral.toml"], (False, True, False)),
        (["model_specs/specs/llama.toml"], (True, True, False)),  # mistral builds on it
        (["tests/lab/test_b.py"], (False, False, True)),
        (["lab/truth/recording.py"], (False, False, True)),
        (["tests/helpers/journal.py"], (False, False, False)),
        (["tests/helpers/browser.py"], (False, False, False)),  # tests of the page alone import it
        (["tests/helpers/formats.py"], (True, True, True)),  # conftest.py imports it
        (["benchmarks/versions.py", "lab/README.md"], (False, False, False)),
        (["flopcalc/core/model/ops.py"], (True, True, True)),
        (["constraints.txt", "docs/a.md"], (True, True, True)),
        (["unheard.of"], (True, True, True)),
    ],
)
def test_what_a_change_concerns(changed: list[str], expected: tuple[bool, ...]) -> None:
    cases = ("tests/a/test_a.py::test_a[llama]", "tests/a/test_a.py::test_a[mistral]", "tests/lab/test_b.py::test_b[x]")
    free = find_unconcerned(cases, changed)
    assert tuple(case not in free for case in cases) == expected


def test_files_that_change_during_a_run_are_said(suite: pytest.Pytester) -> None:
    test = suite.path / "tests" / "test_suite.py"
    test.write_text(SUITE + "    open('late.txt', 'w').close()\n")
    _, text, code = run(suite)
    assert code == 0
    assert "files changed during the run; test this tree with `scripts/test --all`" in text
    with pytest.raises(SystemExit, match=r"build/tests\.jsonl has no full run without a failure"):
        journal.record()


def test_a_full_run_is_written_down(suite: pytest.Pytester) -> None:
    with pytest.raises(SystemExit, match="no full run"):
        journal.record()
    run(suite, "-k", "heavy")
    with pytest.raises(SystemExit, match="no full run"):
        journal.record()
    run(suite)
    row = journal.record()
    commit = git(suite.path, "rev-parse", "HEAD")[:12]
    end = journal.read_journal(journal.FILE)[-1]["end"]
    assert row == f"| {end} | `{commit}` | 5 | 1 |"
    assert (suite.path / "proof.md").read_text() == PAGE.replace("| not yet run | `0123456` | - | - |", row)
    durations = json.loads((suite.path / "durations.json").read_text())
    assert list(durations) == ["light", "heavy"]
    assert list(durations["heavy"]) == ["tests/test_suite.py::test_heavy"]
    assert run(suite)[0] == NAMES  # the page changed
    with pytest.raises(SystemExit, match="uncommitted changes"):
        journal.record()


def test_durations_are_means_of_a_function() -> None:
    lines = [
        {"commit": "0", "changes": ""},
        {"id": "a.py::a[1]", "outcome": "failed", "s": 9.0, "heavy": 1},
        {"id": "a.py::a[1]", "outcome": "passed", "s": 1.0, "heavy": 1},
        {"id": "a.py::a[2]", "outcome": "passed", "s": 2.04, "heavy": 1},
        {"id": "a.py::b", "outcome": "passed", "s": 0.4},
        {"id": "a.py::c", "outcome": "skipped", "s": 2.3},
        {"end": "2026-11-18"},
    ]
    assert journal.sum_durations(lines) == {"light": 3, "heavy": {"a.py::a": 1.52}}


def test_a_run_outside_of_git_cannot_be_continued(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "read_tree", lambda _: None)
    plugins = ("-p", "tiers", "-p", "journal", "-p", "no:xdist", "-p", "no:cacheprovider")
    result = suite.runpytest_inprocess(*plugins, "--all", "--resume")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "must be a git checkout; run `pytest --all`" in result.stderr.str()


@pytest.mark.heavy
def test_workers_leave_out_the_same_tests(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    # The module's constants are of this process: a copy of the helpers has the checkout's root above it.
    helpers = suite.path / "tests" / "helpers"
    helpers.mkdir()
    for file in HELPERS.glob("*.py"):
        if file.stem in ("journal", "relevance", "tiers", "places"):
            (helpers / file.name).write_text(file.read_text())
    (suite.path / "docs").mkdir()
    (suite.path / "docs" / "proof.md").write_text(PAGE)
    monkeypatch.setenv("PYTHONPATH", str(helpers), prepend=":")
    words = ("-p", "tiers", "-p", "journal", "-p", "xdist", "-n", "2", "-p", "no:cacheprovider", "--all", "--resume")
    result = suite.runpytest_subprocess(*words, "-k", "heavy")
    result.assert_outcomes(passed=3)
    result = suite.runpytest_subprocess(*words)
    result.assert_outcomes(passed=2, skipped=1)
    assert "5 passed, 1 skipped, 0 failed, 0 left" in result.stdout.str()
    result = suite.runpytest_subprocess(*words)
    assert result.ret == 0
