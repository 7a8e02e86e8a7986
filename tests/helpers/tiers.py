"""Pytest plugin: a run takes the `heavy` tests that the changes since the last full run concern; `--all` takes all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from places import ROOT
from relevance import Case, cap, find_changes, find_names, read_base, sort_relevant

PROOF = ROOT / "docs" / "proof.md"
DURATIONS = ROOT / "tests" / "durations.json"  # CPU seconds of all light tests, and of a case of each heavy function
RUN_S = 8 * 60 * 2  # CPU seconds: a default run ends within eight minutes on two idle cores
START_S = 240  # of these, what two workers need to import torch and collect
USUAL_S = 2.0  # a heavy case whose function was not timed yet
# One model type of each kind, for tests that take every type with --all: dense, experts, latent attention, scan,
# delta rule, windows, masked words, encoder-decoder, sound, images.
LIGHT_TYPES = (
    "llama",
    "mixtral",
    "deepseek_v3",
    "mamba2",
    "qwen3_next",
    "gemma3_text",
    "bert",
    "t5",
    "whisper",
    "qwen2_5_vl",
)
_COUNT = pytest.StashKey[tuple[int, int, int]]()  # heavy tests that run, that are relevant, that were collected


def mark_heavy(cases: Iterable[Any], light: Iterable[Any] = ()) -> list[Any]:
    """The cases for `parametrize`, all but those of `light` marked heavy; a tuple is a case of several values."""
    all_of_them, kept = list(cases), list(light)
    if unknown := [case for case in kept if case not in all_of_them]:
        raise ValueError(f"no such cases: {unknown}")
    return [
        case if case in kept else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.heavy)
        for case in all_of_them
    ]


def thin(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases for `parametrize`: the first and every so-manieth after it run by default, the others are heavy."""
    all_of_them = list(cases)
    return mark_heavy(all_of_them, all_of_them[::every])


def find_cap_s(durations: dict[str, Any]) -> float:
    """Seconds that a default run has left for heavy tests, and not less than a minute."""
    return max(RUN_S - START_S - durations["light"], 60.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("heavy tests")
    group.addoption("--all", action="store_true", help="run every heavy test")
    group.addoption("--relevant", action="store_true", help="run every heavy test that the changes concern, uncapped")
    group.addoption(
        "--changed", action="append", metavar="PATH", help="take these files as changed; default: since the last --all"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.option.changed = config.workerinput["changed"]
    elif config.option.changed is None:
        config.option.changed = find_changes(ROOT, read_base(PROOF.read_text(encoding="utf-8")))


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node: Any) -> None:
    node.workerinput["changed"] = node.config.option.changed


def pytest_report_header(config: pytest.Config) -> str:
    return f"heavy tests: {_describe(config)}"


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    heavy = [item for item in items if item.get_closest_marker("heavy")]
    if _takes_all(config) or not heavy:
        config.stash[_COUNT] = len(heavy), len(heavy), len(heavy)
    else:
        named = {item.nodeid for item in heavy if any(_names(config, word, item) for word in config.args)}
        relevant = sort_relevant([make_case(item) for item in heavy if item.nodeid not in named], config.option.changed)
        durations = json.loads(DURATIONS.read_text(encoding="utf-8"))
        capped = cap(relevant, durations["heavy"], find_cap_s(durations), USUAL_S)
        taken = named | {case.node_id for case in (relevant if config.option.relevant else capped)}
        config.stash[_COUNT] = len(taken), len(named) + len(relevant), len(heavy)
        config.hook.pytest_deselected(items=[item for item in heavy if item.nodeid not in taken])
        left_out = {item.nodeid for item in heavy} - taken
        items[:] = [item for item in items if item.nodeid not in left_out]
    if hasattr(config, "workeroutput"):
        config.workeroutput["heavy"] = config.stash[_COUNT]


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_testnodedown(node: Any) -> None:
    if "heavy" in getattr(node, "workeroutput", {}):
        node.config.stash[_COUNT] = tuple(node.workeroutput["heavy"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    taken, relevant, total = config.stash.get(_COUNT, (0, 0, 0))
    if total:
        terminalreporter.write_line(f"heavy tests: {taken} of {total} ran, {_describe(config)}")
    if relevant > taken:
        line = f"the time limit left out {relevant - taken} relevant ones: run them too with `pytest --relevant`"
        terminalreporter.write_line(f"heavy tests: {line}, run all with `scripts/test --all`")


def make_case(item: pytest.Item) -> Case:
    """A heavy test with the types that its parameters name."""
    call = getattr(item, "callspec", None)
    return Case(item.nodeid, find_names(call.params, call.id) if call else frozenset())


def _describe(config: pytest.Config) -> str:
    if config.option.all:
        return "all of them (--all)"
    if _takes_all(config):
        return f"those of -m '{config.option.markexpr}'"
    if config.option.changed is None:
        return "one type per set of spec keys: git does not say what changed since the last full run (docs/proof.md)"
    return f"those that {len(config.option.changed)} changed files concern"


def _takes_all(config: pytest.Config) -> bool:
    """With --all, and where -m speaks of heavy tests itself."""
    return config.option.all or "heavy" in config.option.markexpr


def _names(config: pytest.Config, word: str, item: pytest.Item) -> bool:
    """Whether an argument such as `tests/test_x.py::test_y` names this very test, or all of its cases."""
    path, _, name = word.partition("::")
    if not name or (config.invocation_params.dir / path).resolve() != item.path.resolve():
        return False
    own = item.nodeid.partition("::")[2]
    return own == name or own.startswith((f"{name}[", f"{name}::"))
