"""Pytest plugin: `heavy` tests run with `--all`; any other run takes a share of them, chosen by the commit."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

ONE_IN = 400
ROOT = Path(__file__).resolve().parents[2]
# One model type of each kind, for tests that take every type with --all: dense, experts, latent attention, scan,
# delta rule, windows, masked words, encoder-decoder, sound, images.
LIGHT_TYPES = (
    "llama", "mixtral", "deepseek_v3", "mamba2", "qwen3_next", "gemma3_text", "bert", "t5", "whisper", "qwen2_5_vl",
)  # fmt: skip
_COUNT = pytest.StashKey[tuple[int, int]]()  # heavy tests that run, heavy tests that were collected


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


def is_in_share(share: str, node_id: str) -> bool:
    """Whether a heavy test belongs to the share: about one in four hundred does, each commit picks others."""
    return int.from_bytes(sha256(f"{share}\n{node_id}".encode()).digest()[:8]) % ONE_IN == 0


def name_share(root: Path) -> str:
    """The commit's hash; outside of git the version."""
    if (root / ".git").exists():
        try:
            command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git here, or a checkout that it does not read
            pass
    from flopcalc._version import __version__

    return __version__


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("heavy tests")
    group.addoption("--all", action="store_true", help="run every heavy test, not only a share of them")
    group.addoption("--heavy-share", metavar="WORD", help="run the heavy tests that WORD picks (default: HEAD)")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.heavy_share is None:
        config.option.heavy_share = name_share(ROOT)  # xdist hands the options on to its workers


def pytest_report_header(config: pytest.Config) -> str:
    return f"heavy tests: {_describe(config)}"


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    heavy = [item for item in items if item.get_closest_marker("heavy")]
    left_out = [] if _takes_all(config) else [item for item in heavy if not _is_taken(config, item)]
    config.stash[_COUNT] = len(heavy) - len(left_out), len(heavy)
    if hasattr(config, "workeroutput"):
        config.workeroutput["heavy"] = config.stash[_COUNT]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_testnodedown(node: Any) -> None:
    if "heavy" in getattr(node, "workeroutput", {}):
        node.config.stash[_COUNT] = tuple(node.workeroutput["heavy"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    taken, total = config.stash.get(_COUNT, (0, 0))
    if total:
        terminalreporter.write_line(f"heavy tests: {taken} of {total} ran, {_describe(config)}")


def _describe(config: pytest.Config) -> str:
    if config.option.all:
        return "all of them (--all)"
    if _takes_all(config):
        return f"those of -m '{config.option.markexpr}'"
    again = f"pytest --heavy-share {config.option.heavy_share}"
    return f"about 1 in {ONE_IN}; repeat with `{again}`, run all with `pytest --all`"


def _takes_all(config: pytest.Config) -> bool:
    """With --all, and where -m speaks of heavy tests itself."""
    return config.option.all or "heavy" in config.option.markexpr


def _is_taken(config: pytest.Config, item: pytest.Item) -> bool:
    is_named = any(_names(config, word, item) for word in config.args)
    return is_named or is_in_share(config.option.heavy_share, item.nodeid)


def _names(config: pytest.Config, word: str, item: pytest.Item) -> bool:
    """Whether an argument such as `tests/test_x.py::test_y` names this very test, or all of its cases."""
    path, _, name = word.partition("::")
    if not name or (config.invocation_params.dir / path).resolve() != item.path.resolve():
        return False
    own = item.nodeid.partition("::")[2]
    return own == name or own.startswith((f"{name}[", f"{name}::"))
