"""Watts of a device at rest and in single calls that compute or move bytes, by NVML's counter of energy.

Whole steps have their joules beside their seconds (runs.py). Calls show what steps cannot keep apart. A call is
repeated for SECONDS, after a run-up, because a device at its power limit takes about a second to settle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flopcalc.measure.calibrate.tables import Bench, Json, round_digits

SECONDS, RUN_UP_S = 2.0, 1.0
# Rows, columns and depth of bf16 products: a large one, then few rows over many weights, as decoding has them.
_PRODUCTS = ((8192, 8192, 8192), (512, 8192, 8192), (64, 16384, 8192), (16, 16384, 8192), (1, 16384, 8192))
_COPIED = (1 << 31, 1 << 26)  # bytes
# Query heads, heads of keys, head dim, sequences, queries of each, keys of each.
_ATTENTION = ((32, 8, 128, 4, 4096, 4096), (32, 8, 128, 64, 1, 4096))


def list_power_rows(is_tiny: bool) -> dict[str, Json]:
    """Row of the journal -> the call whose watts it measures."""
    shrink = 64 if is_tiny else 1
    calls: list[tuple[str, tuple[int, ...]]] = [("rest", ())]
    calls += [("product", size) for size in _PRODUCTS]
    calls += [("copy", (size,)) for size in _COPIED]
    calls += [("attention", size) for size in _ATTENTION]
    rows: dict[str, Json] = {}
    for kind, size in calls:
        sizes = [max(1, number // shrink) for number in size]
        name = "/".join(["power", kind, *(["x".join(map(str, sizes))] if sizes else [])])
        rows[name] = {"power": kind, "sizes": sizes, "seconds": 0.01 if is_tiny else SECONDS}
    return rows


def measure_power(bench: Bench, row: Json) -> Json:
    """The row with the call's FLOPs, bytes, seconds and watts; no watts where NVML does not count energy."""
    flops, moved, call = _make_call(bench, row["power"], row["sizes"])
    return {**row, "flops": flops, "bytes": moved, **meter(bench, call, row["seconds"])}


def meter(bench: Bench, call: Callable[[], object], seconds: float) -> Json:
    """Seconds, joules and watts of a call that is repeated without pause."""
    gauge = bench.gauge
    _repeat(bench, call, seconds * RUN_UP_S / SECONDS)
    before_j = gauge.read_energy_j() if gauge is not None else None
    start = time.perf_counter()
    calls = _repeat(bench, call, seconds)
    clock = gauge.read_clock_mhz() if gauge is not None else None
    taken = time.perf_counter() - start
    after_j = gauge.read_energy_j() if gauge is not None else None
    joules = after_j - before_j if before_j is not None and after_j is not None else None
    return {
        "seconds": round_digits(taken / calls),
        "repeats": calls,
        "energy_j": round_digits(None if joules is None else joules / calls),
        "power_w": round_digits(None if joules is None else joules / taken),
        "sm_clock_mhz": clock,
    }


def _repeat(bench: Bench, call: Callable[[], object], seconds: float) -> int:
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < seconds:
        for _ in range(4):  # a queue that is never empty, and never long
            call()
        bench.synchronize()
        calls += 4
    return calls


def _make_call(bench: Bench, kind: str, sizes: list[int]) -> tuple[int, int, Callable[[], Any]]:
    """FLOPs and bytes of a call, and the call."""
    torch = bench.torch
    if kind == "rest":
        return 0, 0, partial(time.sleep, 0.05)
    if kind == "product":
        m, n, k = sizes
        left, right = bench.random(m, k), bench.random(k, n)
        return 2 * m * n * k, 2 * (m * k + k * n + m * n), lambda: left @ right
    if kind == "copy":
        source = bench.random(max(1, sizes[0] // 2))
        return 0, 2 * source.nbytes, partial(torch.empty_like(source).copy_, source)
    heads, kv_heads, dim, batch, length, keys = sizes
    query = bench.random(batch, heads, length, dim)
    key, value = (bench.random(batch, kv_heads, keys, dim) for _ in range(2))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, enable_gqa=True)
    return 4 * batch * heads * length * keys * dim, 2 * key.nbytes + 2 * query.nbytes, attend
