"""Time single calls on the device: products, attention, experts and transposed tensors at chosen sizes.

Whole steps show few head dims, layers and expert shapes, each at few sizes. They show products at a clock that the
power limit has lowered, and no memory layouts. Here one size changes at a time. A call's seconds are those
of its kernels under the profiler, as in a profiled step: CUDA events around the call would include the gaps around it.

Some calls are repeated for SECONDS under NVML's counter of energy, after a run-up, because a device at its power limit
takes about a second to settle: they show watts that whole steps (runs.py) cannot keep apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.vocabulary import FUSED_KERNELS, CallMask, ProductDirection
from flopcalc.hardware.tiles import DIRECTIONS
from flopcalc.measure.calibrate.tables import Bench, Json, round_digits
from flopcalc.measure.calibrate.tables.gemm import make_product
from flopcalc.measure.predictor import memory_calls
from flopcalc.measure.predictor.fit.points import ProfiledOperator, read_grouped
from flopcalc.measure.predictor.memory_calls import time_kernels
from flopcalc.measure.predictor.profiling import profile_step
from flopcalc.prediction.kernels.products import measure_narrow

_REPEATS = 6
_SWEPT_BYTES = 2**28  # written before each decoding call, more than any cache of the device holds
_LAYER_REPEATS = 3
_REST_SHARE = 1.5  # pause after a product, in its own seconds, so that none lowers the clock of the next


def list_rows(suite: str) -> dict[str, Json]:
    """Row of the journal -> what it measures: a head dim at all sizes, experts, adapters, layers and more."""
    given = load_toml(os.path.join(find_data_dir(), "single_calls.toml"))["test" if suite == "test" else "full"]
    found: dict[str, Json] = {}
    for qk, v, masks in given["dims"]:
        chosen = {mask: given["sizes"][mask] for mask in masks}
        name = f"{qk}" if qk == v else f"{qk}-{v}"
        found[f"calls/attention/{name}"] = {"is_call": True, "qk": qk, "v": v, "sizes": chosen}
    others = ("experts", "across", "memory", "adapters", "products")
    return found | {f"calls/{name}": {"is_call": True, **given[name]} for name in others}


def measure_calls(bench: Bench, row: Json) -> Json:
    """All calls of a row; calls that the device refuses are left out, with the reason."""
    if "experts" in row:
        makers = [partial(_make_experts, bench, row["rows"], *each) for each in row["experts"]]
        return _measure(bench, makers)
    if "across" in row:
        return _measure(bench, [partial(_make_across, bench, *each) for each in row["across"]])
    if "memory" in row:
        return memory_calls.measure_memory(bench, **row["memory"])
    if "adapters" in row:
        return _measure_adapters(bench, **row["adapters"])
    if "layers" in row:
        makers = [partial(_make_layer, bench, row["rows"], *each) for each in row["layers"]]
        return _measure(bench, makers, _LAYER_REPEATS)
    found: Json = {"calls": [], "left_out": []}
    for mask, sizes in row["sizes"].items():  # one profile per mask, because it does not show the mask
        makers = [partial(_make_attention, bench, mask, row["qk"], row["v"], *size) for size in sizes]
        for key, entries in _measure(bench, makers).items():
            found[key] += entries
    return found


Made = Iterator[tuple[Json, Callable[[], Any]]]  # a call's sizes, and the call


def _measure(bench: Bench, makers: Sequence[Callable[[], Made]], repeats: int = _REPEATS) -> Json:
    """Run what each maker makes a few times and find it in the profile by its sizes; list why others did not run."""
    run: list[tuple[Json, float]] = []
    refused: dict[str, None] = {}

    def step() -> None:
        run.clear()
        for make in makers:
            bench.free()
            try:
                for sizes, call in make():
                    start = time.perf_counter()
                    for _ in range(repeats):
                        call()
                    run.append((sizes, (time.perf_counter() - start) / repeats))
            except RuntimeError as error:  # no kernel for these sizes, or out of memory
                refused[str(error).splitlines()[0][:200]] = None

    seen = _read_profile(profile_step(bench, step)["operators"], bench.is_gpu)
    found = []
    for sizes, host_s in run:
        names = next(names for names in (_GROUPED, _MOVED, _PRODUCT, _ATTENTION) if sizes.keys() >= set(names))
        profiled = seen.get(tuple(sizes[name] for name in names) if names != _PRODUCT else _list_sizes(**sizes))
        if names != _ATTENTION and not bench.is_gpu:  # a CPU's profile has no kernels
            profiled = (host_s, {})
        if profiled is not None:
            seconds, kernel = profiled
            found.append({**sizes, **kernel, "seconds": round_digits(seconds if bench.is_gpu else host_s)})
    return {"calls": found, "left_out": list(refused)}


_ATTENTION = ("direction", "batch", "heads", "length", "keys")
_GROUPED = ("direction", "copies", "m", "n", "k")
_MOVED = ("kind", "images", "patches", "width")
_PRODUCT = ("direction", "m", "n", "k")
_ACROSS_KINDS = {"aten::copy_": "copy_strided_across", "aten::add": "pointwise_strided_across"}


def _read_profile(operators: Sequence[Sequence[Any]], is_gpu: bool) -> dict[tuple[Any, ...], tuple[float, Json]]:
    """Sizes -> seconds, and the attention kernel with the key heads that it was given."""
    found: dict[tuple[Any, ...], tuple[float, Json]] = {}
    for row in operators:
        operator = ProfiledOperator(*row)
        name = operator.name
        kernel = next((kernel for kernel in FUSED_KERNELS if f"{kernel}_attention" in name), "")
        if not (kernel or "grouped_mm" in name or name in (*_ACROSS_KINDS, "aten::mm")):
            continue
        if (is_gpu and not operator.us) or operator.launches % operator.calls:  # the profiler lost a kernel
            continue
        sizes, seconds = operator.sizes, operator.seconds
        if name == "aten::mm":
            found[(*sizes[0], sizes[1][1])] = (seconds, {})
            continue
        if name in _ACROSS_KINDS:
            found[(_ACROSS_KINDS[name], *sizes[0])] = (seconds, {})
            continue
        if not kernel:
            found[read_grouped(operator.is_backward, sizes)] = (seconds, {})
            continue
        direction = "backward" if "backward" in name else "forward"
        query, keys = sizes[1:3] if direction == "backward" else sizes[:2]
        # flash and efficient take (batch, length, heads, dim) below SDPA's own operators.
        heads, length = (1, 2) if kernel == "cudnn" or "scaled_dot_product" in name else (2, 1)
        key = (direction, query[0], query[heads], query[length], keys[length])
        found[key] = (seconds, {"kernel": kernel, "kv_heads": keys[heads]})
    return found


def _make_attention(
    bench: Bench, mask: CallMask, qk: int, v: int, batch: int, heads: int, kv_heads: int, length: int, keys: int
) -> Made:
    """A call as HF's models make it, forward and backward; decoding has no backward pass."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch = bench.torch
    is_decode = mask == "decode"

    def draw(count: int, rows: int, dim: int) -> Any:
        # Projections give (batch, length, heads, dim), viewed as (batch, heads, length, dim).
        return bench.random(batch, rows, count, dim).transpose(1, 2).detach().requires_grad_(not is_decode)

    inputs = (draw(heads, length, qk), draw(kv_heads, keys, qk), draw(kv_heads, keys, v))
    if is_decode:  # a cache has concatenated its keys
        inputs = (inputs[0], inputs[1].contiguous(), inputs[2].contiguous())
    given = None
    if mask == "window":
        given = torch.ones(length, keys, dtype=torch.bool, device=bench.device).tril().triu(-(length // 2))
        given = given.expand(batch, 1, length, keys)
    elif mask == "apart":
        at = torch.arange(length, device=bench.device) * 3 // length  # three images
        given = torch.where(at[:, None] == at, 0.0, -1e30).to(torch.bfloat16).expand(batch, 1, length, keys)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // kv_heads, mask in ("causal", "dropout")
    dropout = 0.1 if mask in ("dropout", "dropped") else 0.0

    # A step reads all weights between two uses of the same keys, so that no cache of the device holds them.
    swept = torch.empty(_SWEPT_BYTES if is_decode and bench.is_gpu else 0, dtype=torch.uint8, device=bench.device)

    def forward() -> Any:
        swept.zero_()
        return sdpa_attention_forward(module, *inputs, given, dropout=dropout)[0]

    sizes = {"direction": "forward", "mask": mask, "batch": batch, "heads": heads, "kv_heads": kv_heads, "qk": qk,
             "v": v, "length": length, "keys": keys}  # fmt: skip
    yield sizes, forward
    if not is_decode:
        yield {**sizes, "direction": "backward"}, bench.make_call(forward, "backward", inputs)


def _make_experts(bench: Bench, rows: Sequence[int], copies: int, n: int, k: int) -> Made:
    """Products as HF's experts make them, in every direction, from few rows to many."""
    weight = bench.random(copies, n, k, needs_grad=True)
    for mean in rows:
        given = bench.random(mean * copies, k, needs_grad=True)
        forward = partial(bench.torch._grouped_mm, given, weight.transpose(-2, -1), offs=_deal(bench, copies, mean))
        sizes = {"direction": "forward", "copies": copies, "m": mean * copies, "n": n, "k": k}
        yield sizes, forward
        gradients: dict[ProductDirection, object] = {"dgrad": given, "wgrad": weight}
        for direction, wanted in gradients.items():
            yield {**sizes, "direction": direction}, bench.make_call(forward, direction, wanted)


def _make_layer(bench: Bench, rows: Sequence[int], n: int, k: int) -> Made:
    """Products of a linear layer, in every direction, with a pause after each to keep the clock up."""
    for m in rows:
        for direction in DIRECTIONS:
            call = make_product(bench, direction, m, n, k)
            yield {"direction": direction, "m": m, "n": n, "k": k}, partial(_rest, bench, call)


def _rest(bench: Bench, call: Callable[[], object]) -> None:
    start = time.perf_counter()
    call()
    bench.synchronize()
    time.sleep(_REST_SHARE * (time.perf_counter() - start))


def _list_sizes(direction: ProductDirection, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Rows, depth and columns of the matrix product that a direction of a layer is."""
    return {"forward": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}[direction]


def _make_across(bench: Bench, images: int, patches: int, width: int) -> Made:
    """A transposed tensor: its contiguous copy, and its sum with a contiguous tensor."""
    given = bench.random(images, width, patches).transpose(1, 2)
    other = bench.random(images, patches, width)
    sizes = {"images": images, "patches": patches, "width": width}
    moved = 2 * images * patches * width
    copied, added = _ACROSS_KINDS.values()
    yield {**sizes, "kind": copied, "bytes": 2 * moved}, given.contiguous
    yield {**sizes, "kind": added, "bytes": 3 * moved}, partial(bench.torch.add, given, other)


def _deal(bench: Bench, copies: int, mean: int) -> Any:
    """Where each expert's rows end if a router prefers none."""
    torch = bench.torch
    chosen = torch.randint(copies, (mean * copies,), generator=torch.Generator().manual_seed(mean))
    return torch.bincount(chosen, minlength=copies).cumsum(0).to(bench.device, torch.int32)


SECONDS, RUN_UP_S = 2.0, 1.0
# Rows, columns and depth of bf16 products: a large one, then few rows over many weights, as decoding has them.
_PRODUCTS = ((8192, 8192, 8192), (512, 8192, 8192), (64, 16384, 8192), (16, 16384, 8192), (1, 16384, 8192))
_COPIED = (1 << 31, 1 << 26)  # bytes
# Query heads, heads of keys, head dim, sequences, queries of each, keys of each.
_POWER_ATTENTION = ((32, 8, 128, 4, 4096, 4096), (32, 8, 128, 64, 1, 4096))


def list_power_rows(is_tiny: bool) -> dict[str, Json]:
    """Row of the journal -> the call whose watts it measures."""
    shrink = 64 if is_tiny else 1
    calls: list[tuple[str, tuple[int, ...]]] = [("rest", ())]
    calls += [("product", size) for size in _PRODUCTS]
    calls += [("copy", (size,)) for size in _COPIED]
    calls += [("attention", size) for size in _POWER_ATTENTION]
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


# --- products of adapters in fp32, by their form: the rank is the depth, or a side of what comes out ------------------
def _measure_adapters(bench: Bench, ranks: list[int], rows: list[int], widths: list[int]) -> Json:
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
        ("down", wide, first.t()),
        ("up", narrow, second.t()),
        ("down", wide, second),
        ("up", narrow, first),
        ("grad", narrow.t(), wide),
        ("down", wide.t(), narrow),
    ):
        yield form, (left.shape[0], left.shape[1], right.shape[1]), partial(torch.mm, left, right)
