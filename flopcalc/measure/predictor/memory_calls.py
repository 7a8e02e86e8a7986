"""Memory-bound calls whose time depends on more than their bytes: sums, sorts, spread copies, added rows.

A step's profile shows the bytes of such a call and not its shape. Here every kind is timed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flopcalc.measure.calibrate.tables import Bench, Json, round_digits
from flopcalc.measure.predictor.profiling import profile_step

_REPEATS = 6

Made = Iterator[tuple[str, int, int, Callable[[], Any]]]  # kind, bytes that it reads and writes, call


def measure_memory(bench: Bench, heads: list[list[int]], routed: list[list[int]]) -> Json:
    """Seconds of each call's kernels."""
    found: list[Json] = []
    makers = [partial(_make_norm, bench, *size) for size in heads]
    makers += [partial(_make_routed, bench, *size) for size in routed]
    for make in makers:
        bench.free()
        for kind, reads, writes, call in make():
            seconds = round_digits(time_kernels(bench, call))
            found.append({"kind": kind, "reads": reads, "writes": writes, "seconds": seconds})
    return {"calls": found, "left_out": []}


def time_kernels(bench: Bench, call: Callable[[], Any]) -> float:
    """Seconds of a call's kernels, as in a profiled step."""
    if not bench.is_gpu:
        return bench.time(call).seconds

    def step() -> None:
        for _ in range(_REPEATS):
            call()

    return float(profile_step(bench, step)["busy_us"]) * 1e-6 / _REPEATS


def _make_norm(bench: Bench, tokens: int, heads: int, dim: int) -> Made:
    """A norm over each head: its mean, and the sum that is the gradient of its weight."""
    torch = bench.torch
    given = bench.random(1, tokens, heads, dim, dtype=torch.float32)
    elements = given.numel()
    yield "reduce_short", 4 * elements, 4 * elements // dim, partial(given.mean, -1, keepdim=True)
    # Sums that leave 64 numbers take less than half as long; no norm over heads that we know has so few.
    for each in (given.to(torch.bfloat16), given) if dim > 64 else ():
        size = each.element_size()
        yield "reduce_narrow", size * elements, size * dim, partial(each.sum, (0, 1, 2))


def _make_routed(bench: Bench, tokens: int, kept: int, width: int, experts: int) -> Made:
    """What a router's rows go through: chosen, sorted, added up, and both of the last on the way back."""
    torch = bench.torch
    scores = bench.random(tokens, experts, dtype=torch.float32)
    many = tokens * kept
    yield "sort_top", 4 * tokens * experts, 12 * many, partial(scores.topk, kept)
    chosen = scores.topk(kept).indices.flatten()
    yield "sort_whole", 8 * many, 16 * many, partial(torch.sort, chosen)
    rows = bench.random(tokens, kept, width)
    yield "reduce_few", 2 * many * width, 2 * tokens * width, partial(rows.sum, 1)
    token = bench.random(tokens, 1, width).expand(tokens, kept, width)
    yield "copy_strided_spread", 2 * tokens * width, 2 * many * width, token.contiguous
    order = torch.sort(chosen).indices
    flat, into = rows.view(many, width), torch.zeros_like(rows.view(many, width))
    for place, at in ((into, order), (into[:tokens], order // kept)):
        added = partial(place.index_put_, (at,), flat, accumulate=True)
        yield "scatter_backward", 8 * many + 2 * many * width, 2 * many * width, added
