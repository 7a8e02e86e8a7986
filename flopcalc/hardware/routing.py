"""Routing: how many rows the experts of a layer get, and how many tiles of a kernel those rows fill."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from functools import lru_cache

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_items, check_size, parse_size

KEY = "rows_per_expert"  # of a JSON file; the monitor writes such files
MAX_SPREAD = 1.0
_SPREAD = r"spread:(\d+(?:\.\d*)?|\.\d+)"
_ALL = 10**18  # more rows than any expert gets
_FORMS = "even, spread:S with S from 0 to 1, rows per expert (N,N,…), or a JSON file of rows"


@frozen()
class Routing(Value):
    """How a router deals rows out to experts: evenly, with a spread, or as counted in a run."""

    spread: float | None = None  # standard deviation of experts' shares over their mean; chance adds to it
    rows: tuple[tuple[int, ...], ...] = ()  # rows per expert: one list for all layers, or one for each

    def __str__(self) -> str:
        if self.rows:
            layers = f" in {len(self.rows)} layers" if len(self.rows) > 1 else ""
            return f"rows of {len(self.rows[0])} experts{layers}"
        return "even" if self.spread is None else f"spread:{self.spread:g}"

    def take(self, layers: Sequence[int]) -> Routing:
        """The same for some of the layers with experts, by their place among these."""
        return self.replace(rows=tuple(self.rows[layer] for layer in layers)) if len(self.rows) > 1 else self

    def count_steps(self, experts: int, rows: int, size: int) -> float:
        """Steps of `size` rows that a layer's experts fill together: a mean over layers, expected for a spread."""
        if self.spread is not None:
            return experts * _expect_steps(self.spread, rows / experts, size)
        if not self.rows:
            least, more = divmod(rows, experts)
            return (experts - more) * -(-least // size) + more * -(-(least + 1) // size)
        return sum(-(-own // size) for layer in self.rows for own in deal(layer, experts, rows)) / len(self.rows)

    def count_busy(self, experts: int, rows: int) -> float:
        """Experts of a layer that get a row."""
        return self.count_steps(experts, rows, _ALL)

    def find_busiest(self, experts: int, ranks: int) -> float:
        """Rows of the busiest of `ranks` GPUs that share a layer's experts, over their mean."""
        if ranks == 1 or not (self.rows or self.spread):
            return 1.0
        if self.rows:
            shares = [sum(_find_busiest(layer, experts // ranks)) / sum(layer) for layer in self.rows]
            return ranks * sum(shares) / len(shares)
        from statistics import NormalDist  # imported lazily: slow to import

        # The largest of `ranks` normal variables (Blom 1958), each the mean of a rank's experts.
        largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return 1 + largest * (self.spread or 0.0) / math.sqrt(experts / ranks)


EVEN = Routing()
RANDOM = Routing(0.4)  # about what routers with HF's random weights do; each step differs


@lru_cache(maxsize=4096)
def deal(shares: tuple[int, ...], experts: int, rows: int) -> tuple[int, ...]:
    """Whole rows for each expert, in proportion to its share; of a rank with fewer experts, those of the busiest."""
    shares = _find_busiest(shares, experts)
    total = sum(shares)
    dealt = [rows * share // total for share in shares]
    left = sorted(range(experts), key=lambda i: (-(rows * shares[i] % total), i))[: rows - sum(dealt)]
    for i in left:
        dealt[i] += 1
    return tuple(dealt)


def _find_busiest(shares: tuple[int, ...], experts: int) -> tuple[int, ...]:
    groups = [shares[i : i + experts] for i in range(0, len(shares), experts)]
    return max(groups, key=sum)


def _expect_steps(spread: float, mean: float, size: int) -> float:
    """Steps of one expert on average: shares are normal with a spread, and rows are drawn by them."""
    if mean > 8 * size:
        return mean / size + 0.5
    deviation = math.sqrt(2 * (mean + (spread * mean) ** 2))
    last = 2 + int((1 + 5 * spread) * mean / size)
    more = sum(math.erfc((size * i - mean) / deviation) / 2 for i in range(1, last))
    return -math.expm1(-mean) + more


def parse_routing(value: object) -> Routing:
    """A Routing as given: a word, rows per expert (one list, or one for each layer), or a JSON file of them."""
    if isinstance(value, Routing):
        return value
    if isinstance(value, str) and value == "even":
        return EVEN
    if isinstance(value, str) and (found := re.fullmatch(_SPREAD, value)):
        spread = float(found[1])
        if spread > MAX_SPREAD:
            raise WorkloadError(
                f"{spell('routing')}: a spread is 0 to {MAX_SPREAD:g}, not {found[1]}; give rows instead"
            )
        return Routing(spread)
    if isinstance(value, str) and "," in value and value[0].isdigit():
        return _read_rows([parse_size(piece.strip(), "routing", 0) for piece in value.split(",")], spell("routing"))
    if isinstance(value, (str, os.PathLike)):
        if not os.path.isfile(value):
            raise WorkloadError(f"{spell('routing')} is {_FORMS}; {format_value(os.fspath(value))} is none of them")
        data = read_json(value, MAX_JSON_BYTES, WorkloadError)
        return _read_rows(data.get(KEY) if isinstance(data, dict) else data, os.fspath(value))
    return _read_rows(value, spell("routing"))


def _read_rows(value: object, where: str) -> Routing:
    layers = check_items(value, where, form=f"{KEY}: a list of rows, or one for each layer with experts")
    if not layers or not all(isinstance(layer, (list, tuple)) for layer in layers):
        layers = [layers]
    rows = tuple(tuple(check_size(each, f"{where}: rows of an expert", 0) for each in layer) for layer in layers)
    if not all(map(sum, rows)):
        raise WorkloadError(f"{where}: a layer without rows")
    return Routing(None, rows)
