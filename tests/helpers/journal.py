"""Pytest plugin of `scripts/test --all`: a run that was stopped is continued; `--record` writes down a full one."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Generator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import pytest
from places import ROOT
from relevance import LAST_RUN, ask_git, find_unconcerned
from tiers import DURATIONS, PROOF

Entry = dict[str, Any]  # a line of the journal
FILE = ROOT / "build" / "tests.jsonl"  # line 1: the tree that was tested; then a line per test, as it ends
AGAIN = "scripts/test --all"
_SIZE = pytest.StashKey[int | None]()  # of the journal at the start; a worker that starts later must read no more
_CPU = pytest.StashKey[float]()  # when the test began
_COLLECTED = pytest.StashKey[int]()
_WORST = ("passed", "skipped", "failed")  # of a test's set-up, call and tear-down


def read_tree(root: Path) -> Entry | None:
    """The commit, and a hash of what was changed after it ('' if nothing was); None without git."""
    commit = ask_git(root, "rev-parse", "HEAD")
    changes = ask_git(root, "diff", "HEAD")
    new = ask_git(root, "ls-files", "--others", "--exclude-standard", "-z")
    if commit is None or changes is None or new is None:
        return None
    files = [root / name for name in new.split("\0") if (root / name).is_file()]
    text = changes.encode() + b"".join(str(file).encode() + file.read_bytes() for file in files)
    return {"commit": commit.strip(), "changes": sha256(text).hexdigest() if text else ""}


def read_journal(file: Path, size: int | None = None) -> list[Entry]:
    """The lines of a journal, or of its first bytes; one that a kill cut off is left out."""
    if not file.exists():
        return []
    with file.open("rb") as stream:
        lines = stream.read(-1 if size is None else size).splitlines()
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def find_outcomes(entries: list[Entry]) -> dict[str, str]:
    """Node id -> how its last run ended."""
    return {entry["id"]: entry["outcome"] for entry in entries if "id" in entry}


def keep_unconcerned(old: list[Entry], tree: Entry) -> list[Entry]:
    """What a run of another commit leaves to do no more: heavy tests that what changed since cannot concern."""
    changed = ask_git(ROOT, "diff", "--name-only", "--no-renames", "-z", old[0]["commit"], tree["commit"])
    if changed is None or old[0]["changes"] or tree["changes"]:
        return []
    files = [name for name in changed.split("\0") if name]
    done = {entry["id"]: entry for entry in old if "heavy" in entry}
    free = find_unconcerned(done, files)
    return [entry for name, entry in done.items() if entry["outcome"] != "failed" and name in free]


class Journal:
    """Writes down each test as it ends; with xdist, in the process that the workers report to."""

    def __init__(self, stream: TextIO, tree: Entry, note: str) -> None:
        self.stream = stream
        self.tree = tree
        self.note = note
        self._reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def write(self, entry: Entry) -> None:
        print(json.dumps(entry), file=self.stream, flush=True)

    def pytest_report_header(self) -> str:
        return f"journal: {FILE.relative_to(ROOT)}, {self.note}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports[report.nodeid].append(report)
        if report.when in ("setup", "call"):
            return
        reports = self._reports.pop(report.nodeid)  # torn down, or its worker crashed
        outcome = max((each.outcome for each in reports), key=_WORST.index)
        entry = {"id": report.nodeid, "outcome": outcome, "s": round(getattr(report, "cpu_s", 0.0), 2)}
        self.write(entry | ({"heavy": 1} if "heavy" in report.keywords else {}))


def read_cpu_s() -> float:
    """CPU seconds of this process and of its children that ended: about the same on an idle and a busy machine."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_CPU] = read_cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.cpu_s = read_cpu_s() - item.stash[_CPU]  # type: ignore[attr-defined]  # since the test began
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("heavy tests")
    group.addoption("--resume", action="store_true", help="with --all: go on where the last run of this tree stopped")
    group.addoption("--fresh", action="store_true", help="with --all: begin anew")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if hasattr(config, "workerinput"):
        config.stash[_SIZE] = config.workerinput["journal_size"]
    if not option.resume or hasattr(config, "workerinput") or option.collectonly:
        return
    tree = read_tree(ROOT)
    if tree is None:
        raise pytest.UsageError("to continue a run, flopcalc must be a git checkout; run `pytest --all`")
    old = read_journal(FILE)
    note = "new"
    kept: list[Entry] = []
    if old and not option.fresh:
        kept = [] if old[0] == tree else keep_unconcerned(old, tree)
        note = f"begun anew: the last was of another tree, {_name(old[0])}"
        if old[0] == tree:
            note = "continued"
        elif kept:
            note = f"continued from {_name(old[0])}: {len(kept):,} heavy tests that the changes since do not concern"
    if note != "continued":
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text("".join(json.dumps(entry) + "\n" for entry in (tree, *kept)), encoding="utf-8")
    config.stash[_SIZE] = FILE.stat().st_size
    stream = FILE.open("a", encoding="utf-8")
    config.add_cleanup(stream.close)
    stream.write("\n")  # after a line that was cut off
    config.pluginmanager.register(Journal(stream, tree, note), "test-journal")


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node: Any) -> None:
    node.workerinput["journal_size"] = node.config.stash.get(_SIZE, None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size = config.stash.get(_SIZE, None)
    if size is None:
        return
    config.stash[_COLLECTED] = len(items)
    if hasattr(config, "workeroutput"):
        config.workeroutput["collected"] = len(items)
    outcomes = find_outcomes(read_journal(FILE, size))
    done = [item for item in items if outcomes.get(item.nodeid) in ("passed", "skipped")]
    failed = [item for item in items if outcomes.get(item.nodeid) == "failed"]
    config.hook.pytest_deselected(items=done)
    items[:] = failed + [item for item in items if item.nodeid not in outcomes]


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_testnodedown(node: Any) -> None:
    if "collected" in getattr(node, "workeroutput", {}):
        node.config.stash[_COLLECTED] = node.workeroutput["collected"]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_all_done = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(_COLLECTED, 0)
    if is_all_done and session.config.pluginmanager.has_plugin("test-journal"):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    journal = config.pluginmanager.get_plugin("test-journal")
    if journal is None:
        return
    counts = Counter(find_outcomes(read_journal(FILE)).values())
    left = max(config.stash.get(_COLLECTED, 0) - counts.total(), 0)
    told = ", ".join(f"{counts[word]:,} {word}" for word in _WORST)
    terminalreporter.write_line(f"all parts of the run together: {told}, {left:,} left")
    option = config.option
    narrowed = (option.keyword, option.markexpr, option.deselect, option.ignore, option.ignore_glob)
    is_whole = config.args_source == config.ArgsSource.TESTPATHS and not any(narrowed)
    if left or counts["failed"] or _COLLECTED not in config.stash:
        terminalreporter.write_line(f"continue with `{AGAIN}`")
    elif read_tree(ROOT) != journal.tree:
        terminalreporter.write_line(f"files changed during the run; test this tree with `{AGAIN}`")
    elif is_whole:
        journal.write({"end": datetime.now(UTC).date().isoformat()})
        terminalreporter.write_line("no failure in a full run: `scripts/test --record` writes it into docs/proof.md")


def record() -> str:
    """Write the last full run into docs/proof.md, and how long its tests took into tests/durations.json."""
    entries = read_journal(FILE)
    end = next((entry["end"] for entry in reversed(entries) if "end" in entry), None)
    if end is None:
        raise SystemExit(f"{FILE.relative_to(ROOT)} has no full run without a failure; continue with `{AGAIN}`")
    if entries[0]["changes"]:
        raise SystemExit("the run was made with uncommitted changes; commit them and run it again")
    counts = Counter(find_outcomes(entries).values())
    row = f"| {end} | `{entries[0]['commit'][:12]}` | {counts['passed']:,} | {counts['skipped']:,} |"
    PROOF.write_text(re.sub(LAST_RUN, row, PROOF.read_text(encoding="utf-8")), encoding="utf-8")
    DURATIONS.write_text(json.dumps(sum_durations(entries), indent=1) + "\n", encoding="utf-8")
    return row


def sum_durations(entries: list[Entry]) -> Entry:
    """CPU seconds of all light tests together, and of a usual case of each heavy function."""
    tests = {entry["id"]: entry for entry in entries if "id" in entry}.values()
    heavy: dict[str, list[float]] = defaultdict(list)
    for test in tests:
        if "heavy" in test:
            heavy[test["id"].partition("[")[0]].append(test["s"])
    return {
        "light": round(sum(test["s"] for test in tests if "heavy" not in test)),
        "heavy": {name: round(sum(each) / len(each), 2) for name, each in sorted(heavy.items())},
    }


def _name(tree: Entry) -> str:
    return tree["commit"][:12] + (" with changes" if tree["changes"] else "")


if __name__ == "__main__":
    print(record())
