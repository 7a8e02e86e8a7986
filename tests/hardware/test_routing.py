"""Routing: rows per expert as they are given, and the tiles that they fill."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from flopcalc.base.errors import WorkloadError
from flopcalc.hardware.routing import EVEN, KEY, Routing, deal, parse_routing


@pytest.mark.parametrize(
    ("given", "routing", "shown"),
    [
        ("even", EVEN, "even"),
        ("spread:0.4", Routing(0.4), "spread:0.4"),
        ("spread:0", Routing(0.0), "spread:0"),
        ("spread:1", Routing(1.0), "spread:1"),
        ("spread:.25", Routing(0.25), "spread:0.25"),
        ("3,0, 5", Routing(None, ((3, 0, 5),)), "rows of 3 experts"),
        ([3, 0, 5], Routing(None, ((3, 0, 5),)), "rows of 3 experts"),
        ([(3, 5), [4, 4]], Routing(None, ((3, 5), (4, 4))), "rows of 2 experts in 2 layers"),
        (Routing(0.3), Routing(0.3), "spread:0.3"),
    ],
)
def test_what_is_given_is_read(given: Any, routing: Routing, shown: str) -> None:
    assert parse_routing(given) == routing
    assert str(routing) == shown


@pytest.mark.parametrize("data", [[[1, 2], [3, 4]], {KEY: [[1, 2], [3, 4]], "model": "x"}])
def test_files_are_read(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(data))
    assert parse_routing(path) == parse_routing(str(path)) == Routing(None, ((1, 2), (3, 4)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "odd",
            "routing is even, spread:S with S from 0 to 1, rows per expert (N,N,…), or a JSON file of rows; 'odd' is",
        ),
        ("spread:1.5", "a spread is 0 to 1, not 1.5"),
        ("spread:-1", "is none of them"),
        ("1,x", "'x' is not a whole number"),
        ("1,-2", "must be at least 0"),
        ([1, -2], "rows of an expert must be at least 0"),
        ([], "a layer without rows"),
        ([0, 0], "a layer without rows"),
        ([[1], [0]], "a layer without rows"),
        ([1.5], "must be a whole number"),
        ([[1], 2], "must be a whole number"),
        (4, "a list of rows, or one for each layer"),
    ],
)
def test_what_is_wrong_is_said(given: Any, said: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        parse_routing(given)
    assert said in str(raised.value)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"rows": [1]}')
    with pytest.raises(WorkloadError, match=KEY):
        parse_routing(path)


@pytest.mark.parametrize(
    ("shares", "experts", "rows", "dealt"),
    [
        ((1, 1, 1), 3, 8, (3, 3, 2)),
        ((2, 1, 0), 3, 8, (5, 3, 0)),
        ((5, 3, 2, 7), 2, 18, (4, 14)),
        ((10, 20, 30), 3, 60, (10, 20, 30)),
    ],
)
def test_rows_are_dealt_in_proportion(shares: tuple[int, ...], experts: int, rows: int, dealt: tuple[int, ...]) -> None:
    """With fewer experts than shares, those of the busiest rank."""
    assert deal(shares, experts, rows) == dealt
    assert sum(dealt) == rows


@pytest.mark.parametrize(
    ("routing", "experts", "rows", "size", "steps"),
    [
        (EVEN, 8, 800, 128, 8),
        (EVEN, 8, 1025, 128, 9),
        (EVEN, 8, 5, 128, 5),
        (EVEN, 8, 0, 128, 0),
        (Routing(None, ((800, 0, 0, 0, 0, 0, 0, 0),)), 8, 800, 128, 7),
        (Routing(None, ((1, 3), (2, 2))), 2, 512, 128, 4),
        (Routing(None, ((1, 2), (2, 1))), 2, 384, 256, 2),
        (Routing(0.4), 8, 8e5, 128, 8e5 / 128 + 4),
        (Routing(0.4), 8, 0.008, 128, 0.008),
    ],
)
def test_steps_of_all_experts(routing: Routing, experts: int, rows: Any, size: int, steps: float) -> None:
    assert routing.count_steps(experts, rows, size) == pytest.approx(steps, rel=1e-2)


@pytest.mark.parametrize(
    ("spread", "mean", "size"), [(0.0, 100, 128), (0.4, 300, 128), (0.4, 90, 128), (0.6, 500, 256)]
)
def test_a_spread_is_what_such_shares_fill_on_average(spread: float, mean: int, size: int) -> None:
    draw = random.Random(1)
    steps = 0
    for _ in range(20_000):
        deviation = math.sqrt(mean + (spread * mean) ** 2)
        steps += -(-max(0, round(draw.gauss(mean, deviation))) // size)
    assert Routing(spread).count_steps(1, mean, size) == pytest.approx(steps / 20_000, rel=0.03)


@pytest.mark.parametrize(
    ("routing", "experts", "rows", "busy"),
    [(EVEN, 8, 5, 5), (EVEN, 8, 50, 8), (Routing(None, ((4, 0, 4, 0),)), 4, 100, 2), (Routing(0.4), 8, 800, 8)],
)
def test_experts_that_get_a_row(routing: Routing, experts: int, rows: int, busy: int) -> None:
    assert routing.count_busy(experts, rows) == pytest.approx(busy)


@pytest.mark.parametrize(
    ("routing", "experts", "ranks", "share"),
    [
        (EVEN, 64, 8, 1.0),
        (Routing(0.4), 64, 1, 1.0),
        (Routing(0.0), 64, 8, 1.0),
        (Routing(None, ((3, 1),)), 2, 2, 1.5),
        (Routing(None, ((3, 1, 0, 0), (1, 1, 1, 1))), 4, 2, 1.5),
        (Routing(0.4), 64, 8, 1 + 0.4 / math.sqrt(8) * 1.4236),
    ],
)
def test_the_busiest_rank(routing: Routing, experts: int, ranks: int, share: float) -> None:
    """The largest of eight normal variables is 1.4236 on average."""
    assert routing.find_busiest(experts, ranks) == pytest.approx(share, rel=2e-3)


def test_layers_are_taken_by_their_place() -> None:
    routing = Routing(None, ((1,), (2,), (3,)))
    assert routing.take([2, 0]) == Routing(None, ((3,), (1,)))
    assert EVEN.take([5]) is EVEN
    one = Routing(None, ((1, 2),))
    assert one.take([5]) is one
