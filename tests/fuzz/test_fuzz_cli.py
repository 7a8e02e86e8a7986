"""Drawn command lines and files: exit code 0 or 2, one line of error, in time; and all that was ever found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzzing import CORPUS, KINDS, read_case, run_here

SEED = "standing"


def try_cases(kind: str, rng: random.Random, count: int, folder: Path) -> None:
    wrong = []
    for number in range(count):
        if problem := run_here(KINDS[kind][0](rng), folder / "case"):
            wrong.append(f"{kind} {number}: {problem}")
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize("kind", [kind for kind, (_, count) in KINDS.items() if count])
def test_some(kind: str, tmp_path: Path) -> None:
    try_cases(kind, random.Random(f"{SEED} {kind}"), KINDS[kind][1], tmp_path)


@pytest.fixture
def new_seed() -> int:
    """Another one in every run; a test that fails shows it among its arguments."""
    return random.SystemRandom().randrange(10**9)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_more(kind: str, tmp_path: Path, new_seed: int) -> None:
    try_cases(kind, random.Random(new_seed), 20 * KINDS[kind][1] or 40, tmp_path)


@pytest.mark.parametrize("name", sorted(path.stem for path in CORPUS.glob("*.json")))
def test_what_was_found_once(name: str, tmp_path: Path) -> None:
    assert run_here(read_case(CORPUS / f"{name}.json"), tmp_path / "case") == ""
