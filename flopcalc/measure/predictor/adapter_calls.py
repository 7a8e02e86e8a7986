"""Products of adapters in fp32, by the form that they have: their rank is the depth, or a side of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flopcalc.measure.calibrate.tables import Bench, Json, round_digits
from flopcalc.measure.predictor.memory_calls import time_kernels
from flopcalc.prediction.kernels.machine import measure_narrow

_RANKS, _ROWS, _WIDTHS = [8, 16, 24, 32, 48, 64], [2700, 5500], [1024, 3072, 8192, 20480]


def list_sizes(is_tiny: bool) -> dict[str, list[int]]:
    """Ranks of adapters, rows of a batch, inputs or outputs of a layer."""
    return {"ranks": [4], "rows": [6, 12], "widths": [16]} if is_tiny else {
        "ranks": _RANKS, "rows": _ROWS, "widths": _WIDTHS,
    }  # fmt: skip


def measure_adapters(bench: Bench, ranks: list[int], rows: list[int], widths: list[int]) -> Json:
    """Seconds of each product's kernels."""
    found: list[Json] = []
    for rank in ranks:
        for m in rows:
            for width in widths:
                bench.free()
                for form, sizes, call in _make_products(bench, m, width, rank):
                    moved, flops = measure_narrow(form, *sizes)
                    seconds = round_digits(time_kernels(bench, call))
                    found.append({"narrow": f"fp32 {form}", "bytes": moved, "flops": flops, "seconds": seconds})
    return {"calls": found, "left_out": []}


def _make_products(
    bench: Bench, m: int, width: int, rank: int
) -> Iterator[tuple[str, tuple[int, int, int], Callable[[], Any]]]:
    """What autograd makes of both layers of an adapter: form, rows, depth and columns, call."""
    torch = bench.torch
    wide, narrow = (bench.random(m, size, dtype=torch.float32) for size in (width, rank))
    first, second = (bench.random(*size, dtype=torch.float32) for size in ((rank, width), (width, rank)))
    for form, left, right in (
        ("down", wide, first.t()), ("up", narrow, second.t()), ("down", wide, second), ("up", narrow, first),
        ("grad", narrow.t(), wide), ("down", wide.t(), narrow),
    ):  # fmt: skip
        yield form, (left.shape[0], left.shape[1], right.shape[1]), partial(torch.mm, left, right)
