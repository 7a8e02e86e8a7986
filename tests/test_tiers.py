"""The tier of heavy tests: which of them run, and that every run says how to repeat it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from places import HELPERS, ROOT
from tiers import ONE_IN, is_in_share, name_share, thin

from flopcalc import __version__

SUITE = """
import pytest

def test_light(): pass

@pytest.mark.heavy
@pytest.mark.parametrize("n", range(200))
def test_heavy(n): pass

@pytest.mark.heavy
class TestHeavy:
    def test_inside(self): pass
"""
LINE = "heavy tests: {} of 201 ran, about 1 in 400; repeat with `pytest --heavy-share abh`, run all with `pytest --all`"
HEAVY = [*(f"test_suite.py::test_heavy[{n}]" for n in range(200)), "test_suite.py::TestHeavy::test_inside"]


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    (pytester.path / "test_suite.py").write_text(SUITE)
    (pytester.path / "below").mkdir()
    pytester.makeini("[pytest]\nmarkers = heavy: x")
    return pytester


def run(suite: pytest.Pytester, *words: str) -> tuple[set[str], str]:
    """The tests that ran, and what was printed."""
    result = suite.runpytest_inprocess("-p", "tiers", "-p", "no:xdist", "-p", "no:cacheprovider", "-v", *words)
    text = result.stdout.str()
    return {line.split(" ")[0] for line in text.splitlines() if " PASSED" in line}, text


def choose(share: str) -> set[str]:
    return {node for node in HEAVY if is_in_share(share, node)}


def test_a_share_is_stable_and_about_one_in_four_hundred() -> None:
    nodes = [f"tests/test_a.py::test_b[{n}]" for n in range(64000)]
    taken = {share: {node for node in nodes if is_in_share(share, node)} for share in ("a", "b")}
    assert [n for n, node in enumerate(nodes) if node in taken["a"]][:5] == [643, 1035, 1172, 1473, 1633]
    assert all(0.7 < len(each) * ONE_IN / len(nodes) < 1.3 for each in taken.values())
    assert len(taken["a"] & taken["b"]) < len(taken["a"]) / 4


def test_every_heavy_test_runs_over_time() -> None:
    assert set().union(*(choose(f"commit {n}") for n in range(3600))) == set(HEAVY)


def test_the_share_is_named_by_the_commit_and_outside_of_git_by_the_version(tmp_path: Path) -> None:
    assert name_share(tmp_path) == __version__
    (tmp_path / ".git").mkdir()  # not a checkout that git reads
    assert name_share(tmp_path) == __version__
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert head.stdout.startswith(name_share(ROOT))
    assert len(name_share(ROOT)) == 12


def test_a_plain_run_takes_the_share_and_says_so(suite: pytest.Pytester) -> None:
    ran, text = run(suite, "--heavy-share", "abh")
    assert ran == {"test_suite.py::test_light", *choose("abh")}
    assert 0 < len(choose("abh")) < 30
    assert text.count("--heavy-share abh") == 2  # at the top, and at the end with the number
    assert LINE.format(len(choose("abh"))) in text
    ran, text = run(suite)  # of this checkout
    name = name_share(ROOT)
    assert ran == {"test_suite.py::test_light", *choose(name)}
    assert f"--heavy-share {name}" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    thin(
        [
            (["--all"], {"test_suite.py::test_light", *HEAVY}),
            (["-m", "heavy"], set(HEAVY)),
            (["-m", "not heavy"], {"test_suite.py::test_light"}),
            (["-k", "inside"], set()),
            (["-k", "inside", "--all"], {HEAVY[-1]}),
            (["-k", "test_heavy"], choose("abh")),
            (["test_suite.py::test_heavy[7]", "test_suite.py::test_light"], {HEAVY[7], "test_suite.py::test_light"}),
            (["test_suite.py::test_heavy"], set(HEAVY[:-1])),
            (["test_suite.py::TestHeavy"], {HEAVY[-1]}),
            (["below/../test_suite.py::TestHeavy::test_inside"], {HEAVY[-1]}),
            (["test_suite.py"], {"test_suite.py::test_light", *choose("abh")}),
        ],
        3,
    ),
)
def test_what_the_command_line_asks_for_runs(suite: pytest.Pytester, words: list[str], expected: set[str]) -> None:
    assert not is_in_share("abh", HEAVY[7])
    assert not is_in_share("abh", HEAVY[-1])
    assert run(suite, "--heavy-share", "abh", *words)[0] == expected


@pytest.mark.heavy
def test_workers_take_the_same_share(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=":")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    words = ("-p", "tiers", "-p", "xdist", "-n", "2", "-p", "no:cacheprovider", "--heavy-share", "abh")
    result = suite.runpytest_subprocess(*words)
    result.assert_outcomes(passed=1 + len(choose("abh")))
    assert LINE.format(len(choose("abh"))) in result.stdout.str()
