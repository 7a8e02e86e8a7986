"""House rules about words: closed words are Literals in signatures, and one class name is one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "flopcalc"
# Names of parameters whose values are closed words; base/vocabulary.py has their Literals.
CLOSED = {
    "phase", "convention", "counting", "kernel", "attention_kernel", "optimizer", "recompute", "clipping", "direction",
    "execution", "mask",
}  # fmt: skip
# Functions that take text from outside and narrow it.
DOORS = {
    "check_execution:execution": "checks a word of the user",
    "choose_execution:execution": "checks a word of the user",
    "check_optimizer:optimizer": "checks a word of the user",
    "name_phase:phase": "also reads the names of a predictor file's factors",
}
MOST_DOUBLED = 10  # class names that more than one class may have


@cache
def list_trees() -> list[tuple[str, ast.Module]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())) for path in paths]


def list_bare(tree: ast.Module) -> Iterator[str]:
    """Parameters and fields in CLOSED that are annotated as plain text."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                given = child.args
                for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                    if parameter.arg in CLOSED and is_text(parameter.annotation):
                        yield f"{child.name}:{parameter.arg}"
            elif isinstance(node, ast.ClassDef) and isinstance(child, ast.AnnAssign):
                name = ast.unparse(child.target)
                if name in CLOSED and is_text(child.annotation):
                    yield f"{node.name}:{name}"


def is_text(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("str", "str | None", "None | str")


def test_closed_words_are_literals() -> None:
    bare = {place for _, tree in list_trees() for place in list_bare(tree)}
    assert bare == set(DOORS), "annotate with the Literal of base/vocabulary.py, or add a door with its reason"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(phase: str) -> None: ...", ["f:phase"]),
        ("def f(*, mask: str | None = None) -> None: ...", ["f:mask"]),
        ("class C:\n    kernel: str = 'flash'", ["C:kernel"]),
        ("class C:\n    def f(self, direction: str) -> None: ...", ["f:direction"]),
        ("def f(phase: Phase, name: str) -> None: ...", []),
    ],
)
def test_the_check_sees_plain_text(source: str, expected: list[str]) -> None:
    assert list(list_bare(ast.parse(source))) == expected


def test_one_class_name_is_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file, tree in list_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file)
    doubled = {name: files for name, files in homes.items() if len(files) > 1}
    assert len(doubled) <= MOST_DOUBLED, doubled
