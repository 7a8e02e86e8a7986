"""Which polynomials FLOPs may be, and the one that holds at every traced point, solved in exact rationals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.spec.expressions import Names, evaluate

Point = dict[str, Any]  # b, n, c and grids
_LENGTHS = (6, 9, 14, 23, 31)
_FRESH = 4  # points that the solution must predict
DEFAULT_CHUNK = 64  # gated delta nets fix it in their code
LARGEST = 4096  # a chunk or window beyond this is not traced, and lengths beyond it are refused
FAR = 1003  # every solution must hold at this length, too
# What is tried in its place where the module refuses it, as one with fewer positions does.
LESS_FAR = (512, 256, 128, 64, 48, 32, 16)


class NoPolynomialError(FlopcalcError):
    """The traced FLOPs follow none of the forms that are tried."""


def _solve(matrix: list[list[Fraction]]) -> list[list[Fraction]] | None:
    """The inverse of a square matrix by elimination, or None if it has none."""
    size = len(matrix)
    work = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if work[row][column]), None)
        if pivot is None:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        scale = work[column][column]
        work[column] = [value / scale for value in work[column]]
        for row in range(size):
            factor = work[row][column]
            if row != column and factor:
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]


def _choose_points(monomials: Sequence[str], candidates: Sequence[Point]) -> tuple[list[Point], list[list[Fraction]]]:
    """As many candidates as monomials, such that their equations have one solution; and the inverse."""
    chosen: list[Point] = []
    basis: list[list[Fraction]] = []
    for point in candidates:
        row = [Fraction(_evaluate(text, point)) for text in monomials]
        reduced = _reduce(row, basis)
        if any(reduced):
            chosen.append(point)
            basis.append(reduced)
        if len(chosen) == len(monomials):
            inverse = _solve([[Fraction(_evaluate(text, p)) for text in monomials] for p in chosen])
            if inverse is not None:
                return chosen, inverse
    raise AssertionError("the candidate points do not tell the monomials apart")


def _reduce(row: list[Fraction], basis: list[list[Fraction]]) -> list[Fraction]:
    for known in basis:
        lead = next(i for i, value in enumerate(known) if value)
        if row[lead]:
            factor = row[lead] / known[lead]
            row = [a - factor * b for a, b in zip(row, known, strict=True)]
    return row


def _evaluate(text: str, point: Point) -> int:
    grids = point.get("grids", ())
    names = {
        "b": point["b"],
        "n": point["n"],
        "c": point.get("c", 0),
        "images": point["b"] * len(grids),
        "patches": point["b"] * sum(t * h * w for t, h, w in grids),
        "pairs": point["b"] * sum(t * (h * w) ** 2 for t, h, w in grids),
    }
    return int(evaluate(text, Names(names)))


class Sizes(NamedTuple):
    """Sizes in a config at which a count may change its form."""

    chunks: tuple[int, ...]
    windows: tuple[int, ...]
    chunk_limit: int  # the least that is too large to trace beyond; 0: none
    window_limit: int


class Form(NamedTuple):
    """A set of monomials, and the points that are traced to solve for them."""

    monomials: tuple[str, ...]
    candidates: tuple[Point, ...]
    far: int = 0  # this many of the last candidates are beyond chunks and windows: all of them are checked


def list_forms(
    phase: Phase,
    grids: Sequence[tuple[object, ...]],
    tokens: Callable[[object], int],
    chunks: Sizes,
    longest: int = 0,
    has_length: bool = True,
) -> list[Form]:
    """Polynomials to try: plain ones first, then with ceil terms of each chunk size (or a cache's window).

    No length beyond `longest` is traced, 0 for any; a module without a length is a polynomial of its batch alone.
    """
    if phase == "decode":
        return _list_cached(chunks)
    if grids:
        return [_list_visual(grids, tokens)]
    if not has_length:
        return [Form(("1", "b"), tuple({"b": b, "n": 1} for b in (1, 2, 3, 5, 4, 7)))]
    plain = ("b", "b * n", "b * n * n", "1", "n", "n * n")
    bound = longest or 10**9
    lengths = _LENGTHS if bound >= _LENGTHS[-1] else sorted({max(1, bound * part // 6) for part in range(2, 7)})
    points = [{"b": b, "n": n} for n in lengths for b in (1, 2, 3)]
    points.sort(key=lambda point: (point["b"] * point["n"], point["b"]))
    # Beyond every chunk last: what holds below one alone is refused there.
    beyond = {2 * size + 1 for size in chunks.chunks if size > 16} | {min(bound, FAR)}
    far = [{"b": 2, "n": n} for n in sorted(beyond) if n <= bound]
    forms = [Form(plain, (*points, *far), len(far))]
    for chunk in (size for size in chunks.chunks if 4 * size < bound):
        k = f"ceil(n / {chunk})"
        extra = (f"b * {k}", f"b * n * {k}", f"b * {k} * {k}")
        sizes = {chunk // 2 + 1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 3 * chunk, 3 * chunk + 2, 4 * chunk + 1}
        near = [{"b": b, "n": n} for n in sorted(sizes) for b in (1, 2) if n > 0]
        forms.append(Form((*plain[:3], *extra, *plain[3:]), (*points, *near, *far), len(far)))
    return forms


def _list_cached(sizes: Sizes) -> list[Form]:
    """Decoding: linear in the cached keys, up to the size of a window."""
    windows = sizes.windows
    points = [{"b": b, "n": 1, "c": c} for c in (5, 11, 7, 17, 23, 9) for b in (1, 2, 3)]
    beyond = sorted({1, FAR, *(size + 3 for size in windows), *(size + 3 for size in sizes.chunks)})
    far = [{"b": 1, "n": 1, "c": c} for c in beyond]
    plain = ("1", "b", "c", "b * c")
    forms = [Form(plain, (*points, *far), len(far))]
    for size in windows:
        near = [{"b": b, "n": 1, "c": c} for c in (size - 2, size, size + 2, size + 5) for b in (1, 2) if c > 0]
        forms.append(Form((*plain, f"b * min(c + 1, {size})"), (*points, *near, *far), len(far)))
    return forms


def _list_visual(grids: Sequence[tuple[object, ...]], tokens: Callable[[object], int]) -> Form:
    monomials = ["b", "b * n", "b * n * n", "1", "images", "n", "n * n"]
    if len({grid for each in grids for grid in each}) > 1:  # images of several sizes
        monomials += ["patches", "pairs", "patches * patches"]
    points = []
    for number, each in enumerate(grids):
        least = sum(tokens(grid) for grid in each) + len(each) + 2
        points += [
            {"b": b, "n": least + extra, "grids": each} for extra in (3, 8, 17, 30)[number % 2 :] for b in (1, 2)
        ]
    points.append({"b": 1, "n": FAR, "grids": grids[0]})
    return Form(tuple(monomials), tuple(points), 1)


def fit(form: Form, trace: Callable[[Point], dict[str, tuple[int, int, int]]]) -> dict[str, Any] | None:
    """Solve for every module's coefficients; None if the solution fails at fresh points."""
    chosen, inverse = _choose_points(form.monomials, form.candidates)
    fresh = [point for point in reversed(form.candidates) if point not in chosen][: max(_FRESH, form.far)]
    assert len(fresh) >= _FRESH
    traces = [trace(point) for point in chosen]
    paths = list(dict.fromkeys(path for each in traces for path in each))
    rows = {}
    for path in paths:
        rows[path] = tuple(
            tuple(
                sum((inverse[i][j] * traces[j].get(path, (0, 0, 0))[way] for j in range(len(chosen))), Fraction(0))
                for i in range(len(chosen))
            )
            for way in range(3)
        )
    for point in fresh:
        values = [_evaluate(text, point) for text in form.monomials]
        found = trace(point)
        for path in dict.fromkeys((*paths, *found)):
            for way in range(3):
                told = sum(
                    (c * v for c, v in zip(rows.get(path, ((), (), ()))[way], values, strict=False)), Fraction(0)
                )
                if told != found.get(path, (0, 0, 0))[way]:
                    return None
    return rows
