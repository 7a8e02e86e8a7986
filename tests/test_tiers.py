"""The tier of heavy tests: which of them a change runs, that the time limit is said, and that mistakes are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import relevance
from places import HELPERS, ROOT
from relevance import (
    ENGINE,
    ITSELF,
    MIRROR,
    RULES,
    TYPES,
    Case,
    cap,
    find_changes,
    find_dependents,
    find_names,
    find_rule,
    list_engine_types,
    list_keys,
    mirror,
    read_base,
    sort_relevant,
)
from tiers import PROOF, find_cap_s, thin

SUITE = """
import pytest

def test_light(): pass

@pytest.mark.heavy
@pytest.mark.parametrize("name", ["olmo2", "olmo3", "exaone4", "exaone4_5", "bert"])
def test_type(name): pass

@pytest.mark.heavy
@pytest.mark.parametrize("n", range(200))
def test_heavy(n): pass

@pytest.mark.heavy
class TestHeavy:
    def test_inside(self): pass
"""
OLMO2 = [f"test_suite.py::test_type[{name}]" for name in ("olmo2", "olmo3", "exaone4", "exaone4_5")]
NUMBERS = [f"test_suite.py::test_heavy[{n}]" for n in range(200)]
INSIDE = "test_suite.py::TestHeavy::test_inside"
HEAVY = [*OLMO2, "test_suite.py::test_type[bert]", *NUMBERS, INSIDE]
CHANGED = ("--changed", "model_specs/specs/olmo2.toml")


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


# --- what changed -----------------------------------------------------------------------------------------------------
def test_the_page_names_a_commit() -> None:
    assert re.fullmatch("[0-9a-f]{7,40}", str(read_base(PROOF.read_text(encoding="utf-8"))))
    assert read_base("| 2026-11-18 | `0123456789ab` | 17,000 | 12 |") == "0123456789ab"
    assert read_base("| date | commit | passed | skipped |") is None


def test_changes_are_committed_uncommitted_and_untracked(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *names, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert find_changes(tmp_path, "HEAD") is None  # no checkout
    git("init")
    for name in ("same", "gone", "edited", "committed"):
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("ignored")
    git("add", ".")
    git("commit", "-m", "first")
    base = git("rev-parse", "HEAD").strip()
    assert find_changes(tmp_path, base) == []
    (tmp_path / "committed").write_text("2")
    git("commit", "-am", "second")
    for name in ("edited", "ä new", "ignored"):
        (tmp_path / name).write_text("2")
    git("mv", "gone", "moved")
    assert find_changes(tmp_path, base) == ["committed", "edited", "gone", "moved", "ä new"]
    assert find_changes(tmp_path, "0" * 40) is None  # as in a shallow clone
    assert find_changes(tmp_path, None) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model_specs/specs/llama.toml", TYPES),
        ("model_specs/specs/parts/bert-cross.toml", TYPES),
        ("model_specs/aliases/Dream.toml", TYPES),
        ("tests/truth/types/llama.json", TYPES),
        ("model_specs/heads.toml", ENGINE),
        ("flopcalc/core/count/formulas.py", ENGINE),
        ("flopcalc/base/data.py", ENGINE),
        ("flopcalc/measure/counters/rules.py", ENGINE),
        ("tests/helpers/tiny.py", ENGINE),
        ("flopcalc/measure/sweep/run.py", MIRROR),
        ("flopcalc/monitor/meter.py", MIRROR),
        ("tests/test_api.py", ITSELF),
        ("tests/core/model/test_caches.py", ITSELF),
        ("model_specs/devices.toml", relevance.PREDICTION),
        ("tests/conftest.py", None),
        ("docs/proof.md", None),
        ("README.md", None),
    ],
)
def test_rules(path: str, expected: object) -> None:
    assert find_rule(path) == expected


def test_rules_name_what_exists() -> None:
    places = {place for _, what in RULES if isinstance(what, tuple) for place in what}
    folders = {pattern.partition("*")[0] for pattern, _ in RULES}
    assert [name for name in places | folders if not (ROOT / name).exists() and name != "tests/test_"] == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("flopcalc/core/model/ops.py", "tests/core/model"),
        ("flopcalc/measure/hf/remote/base.py", "tests/measure/hf"),
        ("flopcalc/monitor/sinks/x.py", "tests/monitor"),
        ("flopcalc/api.py", ""),
    ],
)
def test_tests_mirror_the_tree(path: str, expected: str) -> None:
    assert mirror(path) == expected


# --- types ------------------------------------------------------------------------------------------------------------
def test_types_that_build_on_one() -> None:
    assert find_dependents(["olmo2"]) == {"olmo2": 0, "olmo3": 1, "exaone4": 2, "exaone4_5": 3}  # extends, then use
    assert find_dependents(["falcon"]) == {"falcon": 0, "RefinedWeb": 1, "RefinedWebModel": 1}  # aliases
    assert find_dependents(["aria_text"]) == {"aria_text": 0, "aria": 1}  # use
    assert {"llama", "mixtral", "llava", "qwen2_vl"} <= find_dependents(["llama"]).keys()
    assert "bert" not in find_dependents(["llama"])


@pytest.mark.parametrize(
    ("params", "label", "expected"),
    [
        ({"name": "llama"}, "llama", {"llama"}),
        ({"name": "bart-causal", "n": 3}, "bart-causal-3", {"bart-causal"}),
        ({"case": "FluxTransformer2DModel 0", "recipe": "plain"}, "", {"FluxTransformer2DModel"}),
        ({"config": {"model_type": "llava", "text_config": {"model_type": "llama"}}}, "x", {"llava", "llama"}),
        ({"preset": "qwen3-8b"}, "qwen3-8b", {"qwen3-8b", "qwen3"}),
        ({"number": 0, "size": (336, 336)}, "0-llava_next-336x336", {"llava_next"}),
        ({"name": "no type"}, "no type", set()),
        ({"path": "../presets/gpt2"}, "", set()),
        ({}, "", set()),
    ],
)
def test_names_of_a_case(params: dict[str, object], label: str, expected: set[str]) -> None:
    assert find_names(params, label) == expected


def test_the_engine_has_one_type_per_set_of_keys() -> None:
    chosen = list_engine_types()
    sets = [list_keys(name) for name in chosen]
    assert len(set(sets)) == len(sets)
    types = [name for name, paths in relevance.list_files().items() if any(p.parent.name == "examples" for p in paths)]
    assert {list_keys(name) for name in types} <= set(sets)
    assert list(chosen.values()) == list(range(len(sets)))
    is_new = [bool(keys - set().union(*sets[:n])) for n, keys in enumerate(sets)]
    assert is_new == sorted(is_new, reverse=True)  # first those that use a key for the first time


def test_a_broken_spec_stops_no_selection(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[")
    assert relevance.read_table(tmp_path / "broken.toml") == {}
    assert relevance.read_table(tmp_path / "none.toml") == {}


# --- order and limit --------------------------------------------------------------------------------------------------
def test_changed_types_come_first_then_the_engine_then_test_files() -> None:
    first, second = list(list_engine_types())[:2]
    a, b = "tests/core/model/test_a.py::test_a", "tests/web/test_b.py::test_b"
    cases = [
        Case(f"{b}[x]"),
        Case(f"{b}[y]"),
        Case("tests/core/count/test_c.py::test_c"),
        *(Case(f"{a}[{name}]", frozenset({name})) for name in ("olmo3", "olmo2", "bert-causal", second, first)),
        Case(f"{a}[{first}~2]", frozenset({first})),
        Case(f"{b}[{first}]", frozenset({first})),
    ]
    changed = ["model_specs/specs/olmo2.toml", "flopcalc/core/count/flops.py", "flopcalc/web/answers.py", "README.md"]
    engine = [f"{a}[{first}]", f"{b}[{first}]", f"{a}[{second}]", f"{a}[{first}~2]"]
    others = ["tests/core/count/test_c.py::test_c", f"{b}[x]", f"{b}[y]"]
    found = [case.node_id for case in sort_relevant(cases, changed)]
    assert found[:2] == [f"{a}[olmo2]", f"{a}[olmo3]"]
    assert [name for name in found[2:] if "bert-causal" not in name] == [*engine, *others]
    assert {case.node_id for case in sort_relevant(cases, None)} >= set(engine)
    assert not {case.node_id for case in sort_relevant(cases, None)} & set(others)
    assert sort_relevant(cases, []) == sort_relevant(cases, ["README.md"]) == []
    assert [case.node_id for case in sort_relevant(cases, ["tests/web/test_b.py"])] == [
        f"{b}[{first}]",
        f"{b}[x]",
        f"{b}[y]",
    ]


def test_the_limit_takes_what_fits_in_order() -> None:
    cases = [Case("a.py::a[1]"), Case("a.py::b[1]"), Case("a.py::c"), Case("a.py::a[2]")]
    taken = cap(cases, {"a.py::a": 3.0, "a.py::b": 9.0}, 8.0, 2.0)
    assert [case.node_id for case in taken] == ["a.py::a[1]", "a.py::c", "a.py::a[2]"]
    assert find_cap_s({"light": 500}) == 220
    assert find_cap_s({"light": 2000}) == 60


# --- the plugin -------------------------------------------------------------------------------------------------------
def test_a_plain_run_takes_what_is_relevant_and_says_so(suite: pytest.Pytester) -> None:
    ran, text = run(suite, *CHANGED)
    assert ran == {"test_suite.py::test_light", *OLMO2}
    assert "heavy tests: 4 of 206 ran, those that 1 changed files concern" in text
    assert "time limit" not in text


def test_what_the_limit_leaves_out_is_said(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.find_cap_s", lambda _: 4.5)
    ran, text = run(suite, *CHANGED)
    assert ran == {"test_suite.py::test_light", *OLMO2[:2]}
    assert (
        "heavy tests: the time limit left out 2 relevant ones: run them too with `pytest --relevant`, "
        "run all with `scripts/test --all`" in text
    )
    ran, text = run(suite, *CHANGED, "--relevant")
    assert ran == {"test_suite.py::test_light", *OLMO2}
    assert "time limit" not in text


def test_without_git_the_engines_run(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.find_changes", lambda *_: None)
    ran, text = run(suite)
    chosen = [node for node in HEAVY if node.partition("[")[2].removesuffix("]") in list_engine_types()]
    assert chosen
    assert ran == {"test_suite.py::test_light", *chosen}
    assert "git does not say what changed since the last full run (docs/proof.md)" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    thin(
        [
            (["--all"], {"test_suite.py::test_light", *HEAVY}),
            (["-m", "heavy"], set(HEAVY)),
            (["-m", "not heavy"], {"test_suite.py::test_light"}),
            (["-k", "inside"], set()),
            (["-k", "inside", "--all"], {INSIDE}),
            (["-k", "test_type"], set(OLMO2)),
            (["test_suite.py::test_heavy[7]", "test_suite.py::test_light"], {NUMBERS[7], "test_suite.py::test_light"}),
            (["test_suite.py::test_heavy"], set(NUMBERS)),
            (["test_suite.py::TestHeavy"], {INSIDE}),
            (["below/../test_suite.py::TestHeavy::test_inside"], {INSIDE}),
            (["test_suite.py"], {"test_suite.py::test_light", *OLMO2}),
        ],
        3,
    ),
)
def test_what_the_command_line_asks_for_runs(suite: pytest.Pytester, words: list[str], expected: set[str]) -> None:
    assert run(suite, *CHANGED, *words)[0] == expected


@pytest.mark.heavy
def test_workers_take_the_same_tests(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=":")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    result = suite.runpytest_subprocess("-p", "tiers", "-p", "xdist", "-n", "2", "-p", "no:cacheprovider", *CHANGED)
    result.assert_outcomes(passed=5)
    assert "heavy tests: 4 of 206 ran" in result.stdout.str()


# --- deliberate mistakes ----------------------------------------------------------------------------------------------
def run_with_mistake(folder: Path, file: str, right: str, wrong: str, *words: str) -> str:
    """What a default run prints whose package and specs are a copy with a mistake, which is the only change."""
    own = file.partition("/")[0]
    shutil.copytree(ROOT / own, folder / own, ignore=shutil.ignore_patterns("__pycache__"))
    for name in {"flopcalc", "lab", "model_specs", "tests"} - {own}:
        (folder / name).symlink_to(ROOT / name)
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(right) == 1
    (folder / file).write_text(text.replace(right, wrong), encoding="utf-8")
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-o", "pythonpath=tests/helpers")
    tests = ("tests/core/estimate/test_truth.py", "-k", "test_equals_the_other_traces", "-rf", "--tb=line")
    command = [sys.executable, "-P", "-m", "pytest", *plugins, *tests, "--changed", file, *words]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False).stdout


def list_failed(text: str) -> set[str]:
    return set(re.findall(r"^FAILED \S+::test_equals_the_other_traces\[(.+?)\]", text, re.MULTILINE))


def test_a_mistake_in_a_spec_is_found_by_a_default_run(tmp_path: Path) -> None:
    right, wrong = '  "gated_mlp",\n', '  "gated_mlp", "gated_mlp",\n'
    text = run_with_mistake(tmp_path, "model_specs/specs/olmo2.toml", right, wrong)
    assert list_failed(text) == {"olmo2", "olmo3", "exaone4", "exaone4_5"}, text
    assert "heavy tests: 4 of 591 ran" in text


def test_a_mistake_in_the_engine_is_found_by_a_default_run(tmp_path: Path) -> None:
    right, wrong = "(op.own_flops or 2 * op.n_in * op.n_out)", "(2 * op.n_in * op.n_out)"  # few specs have own FLOPs
    text = run_with_mistake(tmp_path, "flopcalc/core/count/formulas.py", right, wrong, "-x")
    assert len(list_failed(text)) == 1, text
    assert list_failed(text) <= list_engine_types().keys()
