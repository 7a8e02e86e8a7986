"""Numbers that were seen in several runs become expressions: coefficient x sum of the workload x sizes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import gcd, lcm
from typing import Any

from lab.operators.dispatch import Event

_NUMBERS = (1, 2, 3, 4, 6, 8)
_Product = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]  # its value in every run, and the sizes in it


@cache
def list_coefficients(part: int = 1) -> dict[Fraction, int]:
    """Coefficients with their costs; those of a share of a head come with its denominator."""
    return {
        each: (each.numerator != 1) + (each.denominator != 1) + (each.numerator > 4) + (each.denominator > 4)
        for each in {Fraction(n, d) for n in _NUMBERS for d in (1, 2, 3, 4, 8, part)}
    }


class Fitter:
    """Finds coefficient x feature x sizes for numbers that were seen in several runs."""

    def __init__(
        self,
        features: list[Mapping[str, int]],
        sizes: list[Mapping[str, int]],
        part: int = 1,
        base: str = "tokens*width",
    ) -> None:
        self.base = base  # what a number that no expression gives is in proportion to
        self.coefficients = list_coefficients(part)
        names = [name for name in sizes[0] if all(name in other for other in sizes)]
        self.features: dict[tuple[int, ...], str] = {}
        for name in features[0]:
            vector = tuple(each.get(name, 0) for each in features)
            if all(vector):
                self.features.setdefault(vector, name)
        self.sizes: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in names:
            self.sizes[tuple(each[name] for each in sizes)].append(name)
        self._products = self._index_products(len(features))
        self.approximate = 0
        self._found: dict[tuple[tuple[int, ...], str], str] = {}

    def fit(self, numbers: tuple[int, ...], module: str) -> str | None:
        key = (numbers, module)
        if key not in self._found:
            self._found[key] = self._fit(numbers, module)
        return self._found[key] or None

    def _index_products(self, runs: int) -> dict[tuple[int, ...], list[_Product]]:
        """No size, one, or two of them multiplied, by how they change from run to run."""
        listed = list(self.sizes)
        products: list[_Product] = [((1,) * runs, ()), *((vector, (vector,)) for vector in listed)]
        for i, first in enumerate(listed):
            for second in listed[i:]:
                products.append((tuple(a * b for a, b in zip(first, second, strict=True)), (first, second)))
        found: dict[tuple[int, ...], list[_Product]] = defaultdict(list)
        for vector, used in products:
            found[_reduce(vector)].append((vector, used))
        return dict(found)

    def _fit(self, numbers: tuple[int, ...], module: str) -> str:
        best: tuple[Any, ...] | None = None
        for rank, (feature, name) in enumerate(self.features.items()):
            whole = lcm(*feature)
            change = _reduce([number * (whole // each) for number, each in zip(numbers, feature, strict=True)])
            for vector, used in self._products.get(change, ()):
                coefficient = Fraction(numbers[0], feature[0] * vector[0])
                cost = self.coefficients.get(coefficient)
                if cost is None:
                    continue
                names, distance = self._name(used, module)
                # A size that is the same in every run may as well be a plain number.
                fixed = sum(len(set(each)) == 1 for each in used)
                score = (len(used) + cost + fixed, len(used), distance, rank)
                if best is None or score < best[0]:
                    best = (score, coefficient, name, names)
        if best is None:
            return ""
        _, coefficient, name, names = best
        parts = [] if coefficient == 1 else [str(coefficient)]
        return "*".join([*parts, name, *names])

    def _name(self, used: Iterable[tuple[int, ...]], module: str) -> tuple[list[str], int]:
        names, distance = [], 0
        for vector in used:
            options = [(_distance(name, module), place, name) for place, name in enumerate(self.sizes[vector])]
            far, _, name = min(options)
            own, _, attribute = name.rpartition(".")
            names.append(f".{attribute}" if own and own in (module, f"/{module}") else name)
            distance += far
        return names, distance


def _reduce(numbers: Sequence[int]) -> tuple[int, ...]:
    """The same proportions in the smallest whole numbers."""
    common = gcd(*numbers) or 1
    return tuple(number // common for number in numbers)


def _distance(name: str, module: str) -> int:
    """How far a size's op lies from a module: 0 in it, more outside; whole-model names last."""
    own = name.lstrip("/").replace(":", ".").rpartition(".")[0].split(".")
    here = module.split(".")
    shared = 0
    for a, b in zip(own, here, strict=False):
        if a != b:
            break
        shared += 1
    return len(own) + len(here) - 2 * shared + (3 if name.startswith("/") and module and ":" in name else 0)


Row = tuple[str, str, Any, str, str]  # direction, kind, count, reads, writes


def fit_events(lists: list[list[Event]], fitter: Fitter, module: str, widest: tuple[int, ...]) -> list[Row]:
    """Rows that hold in every run."""
    names = [[(event.direction, event.name, _letters(event)) for event in events] for events in lists]
    if all(other == names[0] for other in names):
        found: Counter[tuple[str, str, str, str]] = Counter()
        for events in zip(*lists, strict=True):
            reads = fit_tensors([event.reads for event in events], fitter, module, widest)
            writes = fit_tensors([event.writes for event in events], fitter, module, widest)
            found[events[0].direction[0], events[0].kind, reads, writes] += 1
        return sorted((d, kind, count, reads, writes) for (d, kind, reads, writes), count in found.items())
    # A loop over images: as many operators as there are of them; sizes are of all calls together.
    rows: list[Row] = []
    kinds = [
        [(*name, event.kind) for event, name in zip(*pair, strict=True)] for pair in zip(lists, names, strict=True)
    ]
    for key in sorted({key for each in kinds for key in each}):
        groups = [
            [event for event, name in zip(events, each, strict=True) if name == key]
            for events, each in zip(lists, kinds, strict=True)
        ]
        for alike in split_sizes(groups):
            count = fit_count(tuple(map(len, alike)), fitter, module)
            reads, writes = (
                fit_tensors(
                    [add_up([event[side] for event in group], letters) for group in alike], fitter, module, widest
                )
                for side, letters in zip((4, 5), key[2], strict=True)
            )
            is_plain = isinstance(count, int) and not reads and not writes
            rows.append(
                (
                    key[0][0],
                    key[3],
                    count if is_plain else f"n*{count}".replace("n*n", "n"),
                    reads,
                    writes,
                )
            )
    return merge_rows(rows)


def merge_rows(rows: list[Row]) -> list[Row]:
    """Rows of one kind that move nothing, together, where their calls are plain numbers."""
    plain: Counter[tuple[str, str]] = Counter()
    rest = []
    for row in rows:
        if isinstance(row[2], int):
            plain[row[0], row[1]] += row[2]
        else:
            rest.append(row)
    return sorted([*rest, *((way, kind, count, "", "") for (way, kind), count in plain.items())], key=str)


def split_sizes(groups: list[list[Event]]) -> list[list[list[Event]]]:
    """Operators of one name by their sizes, where every run has as many different ones; else all together."""
    sizes = [list(dict.fromkeys((event.writes, event.reads) for event in group)) for group in groups]
    if len({len(each) for each in sizes}) != 1:
        return [groups]
    return [
        [
            [event for event in group if (event.writes, event.reads) == each[n]]
            for group, each in zip(groups, sizes, strict=True)
        ]
        for n in range(len(sizes[0]))
    ]


def add_up(sizes: list[Any], letters: str) -> tuple[tuple[str, int], ...]:
    """Operand by operand where all have as many, else all operands of a dtype together."""
    if all(len(each) == len(letters) for each in sizes):
        return tuple((letter, sum(each[j][1] for each in sizes)) for j, letter in enumerate(letters))
    return add_all(sizes, letters)


def add_all(sizes: list[Any], letters: str) -> tuple[tuple[str, int], ...]:
    """(dtype, elements of all its operands)."""
    return tuple(
        (each, sum(count for size in sizes for letter, count in size if letter == each))
        for each in dict.fromkeys(letters)
    )


def _letters(event: Event) -> tuple[str, str]:
    reads = "".join(letter for letter, _ in event.reads)
    return "".join(dict.fromkeys(reads)) if event.name == "cat" else reads, "".join(each for each, _ in event.writes)


def fit_count(numbers: tuple[int, ...], fitter: Fitter, module: str) -> int | str:
    if len(set(numbers)) == 1:
        return numbers[0]
    text = fitter.fit(numbers, module) if all(numbers) else None
    if text is not None:
        return f"n*{text}"
    loops = ("images", "frames", "panes")
    for vector, name in sorted(fitter.features.items(), key=lambda item: item[1] not in loops):
        rises = {(b - a, y - x) for a, b, x, y in zip(vector, vector[1:], numbers, numbers[1:], strict=False) if b != a}
        steps = {Fraction(y, b) for b, y in rises}
        if len(steps) == 1:
            step = steps.pop()
            base = numbers[0] - step * vector[0]
            if all(base + step * v == n for v, n in zip(vector, numbers, strict=True)) and base.denominator == 1:
                sign_ = f"n*{base} + " if base >= 0 else f"n*~{base} + "
                return f"{sign_}n*{step}*{name}"
    fitter.approximate += 1
    return f"n*~{sum(numbers) // len(numbers)}"


def fit_tensors(sizes: list[Any], fitter: Fitter, module: str, widest: tuple[int, ...]) -> str:
    """The tensors of one operator as an expression: one by one, or those of a dtype together where that fails."""
    letters = "".join(dict.fromkeys(letter for each in sizes for letter, _ in each))
    together = [add_all([each], letters) for each in sizes]
    if len({len(each) for each in sizes}) > 1:
        sizes = together
    terms = []
    for tensors in zip(*sizes, strict=True):
        letter, numbers = tensors[0][0], tuple(count for _, count in tensors)
        if any(numbers):
            terms.append((letter, fitter.fit(numbers, module) if all(numbers) else None, numbers))
    if any(text is None for _, text, _ in terms) and sizes != together:
        return fit_tensors(together, fitter, module, widest)
    return _approximate(terms, fitter, widest)


def _approximate(terms: list[tuple[str, str | None, tuple[int, ...]]], fitter: Fitter, widest: tuple[int, ...]) -> str:
    found = []
    for letter, text, numbers in terms:
        if text is None:
            fitter.approximate += 1
            text = f"~{sum(numbers) / sum(widest):.4f}*{fitter.base}"
        found.append((letter, text))
    return " + ".join(sorted(_write(letter, text, count) for (letter, text), count in Counter(found).items()))


def _write(letter: str, text: str, count: int) -> str:
    """A term that stands there so often."""
    if count == 1:
        return f"{letter}*{text}"
    first, _, rest = text.partition("*")
    if not first[0].isdigit():
        return f"{letter}*{count}*{text}"
    coefficient = Fraction(first) * count
    return f"{letter}*{rest}" if coefficient == 1 else f"{letter}*{coefficient}*{rest}"
