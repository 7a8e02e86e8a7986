"""Table memory: the bytes-bound operators that HF really dispatches, by size; what a launch and the host cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flopcalc.base.vocabulary import PassDirection
from flopcalc.hardware.tables import interpolate
from flopcalc.measure.calibrate.tables import Bench, Json, Timing, get_device, round_digits, summarize
from flopcalc.measure.jobs.runner import Job

_MB = 1 << 20
_WIDTH = 4096  # of the last axis, where an operator has one
_VOCAB = 32000
# Operator -> bytes per element that one fused kernel would move, forward and backward (bf16: 2 a tensor), 0: none.
# 'element' is one of the operator's main tensor: activations, logits, or parameters for an optimizer.
_BYTES = {
    "copy": (4, 0),  # read, write
    "add": (6, 0),  # its backward moves nothing
    "mul": (6, 10),  # backward reads g, a, b, writes two gradients
    "silu": (4, 6),
    "gelu": (4, 6),
    "silu_mul": (6, 10),
    "hf_rms_norm": (4, 6),  # fp32 inside, as LlamaRMSNorm computes it
    "rms_norm": (4, 6),
    "layer_norm": (4, 6),
    "hf_rotary": (4, 4),
    "softmax": (4, 6),
    "hf_cross_entropy": (2, 4),  # reads logits; reads them again and writes their gradient
    "embedding": (4, 4),
    "adamw_fused_bf16": (14, 0),  # reads p, g, m, v, writes p, m, v
    "adamw_fused_fp32": (28, 0),
    "adamw_foreach_bf16": (14, 0),
}
_SIZES_MB = {"quick": (1, 8, 32, 128, 512, 2048), "full": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)}
_COPY_SIZES_MB = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_COSTS = ("launch_queued", "launch_graph", "host_per_op")


def plan(suite: str) -> list[Job]:
    """One job; copies come first, the rest is compared with them."""
    rows: dict[str, Json] = {}
    for op, sizes in _BYTES.items():
        for direction, each in zip(("forward", "backward"), sizes, strict=True):
            if not each:
                continue
            chosen = (1,) if suite == "test" else _COPY_SIZES_MB if op == "copy" else _SIZES_MB[suite]
            for size in chosen:
                elements = _round(op, (size * _MB if suite != "test" else 1 << 16) // each)
                rows[f"{op}/{direction}/{size}MB"] = {
                    "op": op,
                    "direction": direction,
                    "bytes": elements * each,
                    "elements": elements,
                }
    for op in _COSTS:
        rows[op] = {"op": op, "direction": "forward", "bytes": 0, "elements": 0}
    args = {"device": get_device(suite)}
    return [Job("memory", f"{__name__}:start", args, rows, timeout_s=60, expected_s=10 + 0.15 * len(rows))]


def _round(op: str, elements: int) -> int:
    """Whole rows of the operator's last axis."""
    width = _VOCAB if op == "hf_cross_entropy" else _WIDTH
    return max(1, elements // width) * width


def finish(records: list[Json]) -> list[Json]:
    """Add `factor`: time over the time in which a copy moves as many bytes."""
    copies = [(record["bytes"], record["gb_per_s"]) for record in records if record["op"] == "copy"]
    for record in records:
        found = interpolate(copies, record["bytes"]) if record["bytes"] else None
        record["factor"] = (
            round_digits(record["seconds"] * found.value * 1e9 / record["bytes"], 4) if found is not None else None
        )
    return records


def start(args: Json) -> Callable[[Json], Json]:
    bench = Bench(args["device"])
    return lambda row: measure(bench, row)


def measure(bench: Bench, row: Json) -> Json:
    bench.free()
    op, direction, moved = row["op"], row["direction"], row["bytes"]
    if op in _COSTS:
        timing = _measure_cost(bench, op)
    else:
        timing = bench.time(_make_call(bench, op, direction, row["elements"]))
    return {
        "op": op,
        "direction": direction,
        "bytes": moved,
        "seconds": round_digits(timing.seconds),
        "spread": round_digits(timing.spread, 3),
        "gb_per_s": round_digits(moved / timing.seconds / 1e9) if moved else None,
        "factor": None,
    }


def _make_call(bench: Bench, op: str, direction: PassDirection, elements: int) -> Callable[[], Any]:
    if op.startswith("adamw"):
        return _make_optimizer(bench, op, elements)
    if op == "copy":
        source, target = bench.random(elements), bench.random(elements)
        return lambda: target.copy_(source)
    forward, inputs = _make_forward(bench, op, elements)
    return bench.make_call(forward, direction, inputs)


def _make_forward(bench: Bench, op: str, elements: int) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    """The operator on its inputs, and the inputs that owe a gradient."""
    torch = bench.torch
    functional = torch.nn.functional
    rows = elements // _WIDTH
    if op in ("add", "mul", "silu_mul"):
        a, b = bench.random(rows, _WIDTH, needs_grad=True), bench.random(rows, _WIDTH, needs_grad=True)
        run = {"add": lambda: a + b, "mul": lambda: a * b, "silu_mul": lambda: functional.silu(a) * b}[op]
        return run, (a, b)
    if op == "hf_cross_entropy":
        logits = bench.random(elements // _VOCAB, _VOCAB, needs_grad=True)
        labels = torch.randint(_VOCAB, (elements // _VOCAB,), device=bench.device)
        return lambda: functional.cross_entropy(logits.float(), labels), (logits,)
    if op == "embedding":
        table = bench.random(_VOCAB, _WIDTH, needs_grad=True)
        ids = torch.randint(_VOCAB, (rows,), device=bench.device)
        return lambda: functional.embedding(ids, table), (table,)
    if op == "hf_rotary":
        return _make_rotary(bench, rows)
    x = bench.random(rows, _WIDTH, needs_grad=True)
    weight = bench.random(_WIDTH, needs_grad=True)
    if op == "silu":
        return lambda: functional.silu(x), (x,)
    if op == "gelu":
        return lambda: functional.gelu(x), (x,)
    if op == "softmax":
        return lambda: functional.softmax(x, dim=-1), (x,)
    if op == "rms_norm":
        return lambda: functional.rms_norm(x, (_WIDTH,), weight, 1e-6), (x, weight)
    if op == "layer_norm":
        bias = bench.random(_WIDTH, needs_grad=True)
        return lambda: functional.layer_norm(x, (_WIDTH,), weight, bias), (x, weight, bias)
    assert op == "hf_rms_norm", op

    def normalize() -> Any:
        # LlamaRMSNorm.forward, line by line: its upcast is what costs.
        states = x.to(torch.float32)
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + 1e-6)
        return weight * states.to(x.dtype)

    return normalize, (x, weight)


def _make_rotary(bench: Bench, rows: int) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    """apply_rotary_pos_emb of HF's Llama on queries of 32 heads of 128 (keys would be the same work again)."""
    torch = bench.torch
    query = bench.random(1, rows, 32, 128).transpose(1, 2).detach().requires_grad_()
    cos, sin = bench.random(1, 1, rows, 128), bench.random(1, 1, rows, 128)

    def rotate() -> Any:
        half = query.shape[-1] // 2
        turned = torch.cat((-query[..., half:], query[..., :half]), dim=-1)
        return (query * cos) + (turned * sin)

    return rotate, (query,)


def _make_optimizer(bench: Bench, op: str, elements: int) -> Callable[[], Any]:
    torch = bench.torch
    dtype = torch.float32 if op.endswith("fp32") else torch.bfloat16
    # As many tensors as a model has, not one: foreach and fused work over lists.
    pieces = max(1, min(64, elements // (1 << 20)))
    parameters = [bench.random(elements // pieces, dtype=dtype, needs_grad=True) for _ in range(pieces)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    is_fused = "fused" in op
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=is_fused, foreach=not is_fused)
    step: Callable[[], object] = optimizer.step
    return step


def _measure_cost(bench: Bench, op: str) -> Timing:
    """Seconds of one tiny kernel, queued or in a CUDA graph; seconds the host takes to dispatch one operator."""
    torch = bench.torch
    x = bench.random(256)
    count = 500
    taken = []
    if op == "host_per_op" or not bench.is_gpu:
        for _ in range(7):
            bench.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                x.add(1.0)
            taken.append((time.perf_counter() - start) / count)
        bench.synchronize()
        return Timing(*summarize(taken), len(taken))
    if op == "launch_graph":
        x.add_(1.0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                x.add_(1.0)
        once = bench.time(graph.replay)
    else:
        # Five repeats of 100: more would fill the launch queue, and the host's pace would be timed instead.
        count = 100

        def queue() -> None:
            for _ in range(count):
                x.add_(1.0)

        once = bench.time(queue, work_s=0.0)
    return Timing(once.seconds / count, once.spread, once.repeats)
