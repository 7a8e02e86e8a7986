"""Table attention: time and executed FLOPs of one attention call, by kernel, head dim, mask, length and direction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flopcalc.base.vocabulary import Mask, PassDirection, PickedKernel
from flopcalc.measure.calibrate.tables import Bench, Json, get_device, round_digits
from flopcalc.measure.jobs.runner import Job, RowError

KERNELS: tuple[PickedKernel, ...] = ("flash", "cudnn", "efficient", "eager")
_BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_MAIN_DIMS = ((64, 64), (128, 128))
_OTHER_DIMS = ((80, 80), (96, 96), (256, 256), (192, 128))  # the last: multi-head latent attention
_ODD_LENGTHS = (577, 1300, 1872)  # CLIP's rows, and images of no round size
_TOKENS = 16384  # batch x length of a call
_EAGER_SCORES = 2**29  # batch x heads x length²: the scores of eager code, 1 GB in bf16


def plan(suite: str) -> list[Job]:
    """One job; kernels come one after another."""
    wanted: list[tuple[PickedKernel, tuple[int, int], Mask, int]] = []
    if suite == "test":
        wanted = [("eager", (16, 16), "causal", 32), ("flash", (16, 16), "full", 32), ("cudnn", (16, 8), "full", 32)]
    elif suite == "full":
        masks: tuple[Mask, ...] = ("causal", "full")
        for kernel in KERNELS:
            for dims in _MAIN_DIMS + _OTHER_DIMS:
                for mask in masks:
                    wanted += [(kernel, dims, mask, n) for n in (*_LENGTHS, 577, 1280, 1300, 1872)]
    else:
        for kernel in KERNELS:
            is_plain = kernel in ("flash", "cudnn")
            for dims in _MAIN_DIMS:
                causal = _LENGTHS if is_plain else (512, 1024, 2048, 4096)
                wanted += [(kernel, dims, "causal", n) for n in causal]
                wanted += [(kernel, dims, "full", n) for n in ((1024, 4096, 16384) if is_plain else (1024, 4096))]
            if kernel == "eager":
                continue
            for dims in _OTHER_DIMS:
                wanted += [(kernel, dims, "causal", n) for n in (1024, 2048, 8192)]
                wanted += [(kernel, dims, "full", n) for n in (1024, 4096)]
            wanted += [(kernel, dims, "full", n) for dims in ((64, 64), (80, 80)) for n in _ODD_LENGTHS]
            wanted += [(kernel, (128, 128), "causal", 1300)]
    rows: dict[str, Json] = {}
    for kernel, (qk, v), mask, length in wanted:
        batch, heads = choose_size(kernel, max(qk, v), length) if suite != "test" else (1, 2)
        for direction in ("forward", "backward"):
            rows[f"{kernel}/{qk}-{v}/{mask}/{length}/{direction}"] = {
                "kernel": kernel, "qk_dim": qk, "v_dim": v, "mask": mask, "length": length,
                "direction": direction, "batch": batch, "heads": heads,
            }  # fmt: skip
    args = {"device": get_device(suite)}
    return [Job("attention", f"{__name__}:start", args, rows, timeout_s=60, expected_s=8 + 0.3 * len(rows))]


def choose_size(kernel: PickedKernel, dim: int, length: int) -> tuple[int, int]:
    """Batch and heads: a model of width 2048 on 16k tokens, less where eager scores would not fit."""
    heads = max(4, 2048 // dim)
    batch = max(1, _TOKENS // length)
    while kernel == "eager" and batch * heads * length * length > _EAGER_SCORES and batch > 1:
        batch //= 2
    while kernel == "eager" and batch * heads * length * length > _EAGER_SCORES and heads > 1:
        heads //= 2
    return batch, heads


def start(args: Json) -> Callable[[Json], Json]:
    bench = Bench(args["device"])
    return lambda row: measure(bench, row)


def measure(bench: Bench, row: Json) -> Json:
    """One call; a kernel that does not take these dims makes a failed row with torch's reason."""
    bench.free()
    call = make_call(
        bench,
        row["kernel"],
        row["direction"],
        row["batch"],
        row["heads"],
        row["length"],
        row["qk_dim"],
        row["v_dim"],
        row["mask"] == "causal",
    )
    needed = count_needed(row)
    timing = bench.time(call)
    return {
        **row,
        "seconds": round_digits(timing.seconds),
        "spread": round_digits(timing.spread, 3),
        "tflops": round_digits(needed / timing.seconds / 1e12),
        "needed_flops": needed,
        "executed_flops": bench.count_executed(call),
    }


def count_needed(row: Json) -> int:
    """FLOPs of the kernel's products over the pairs that the mask keeps.

    forward: scores and values. backward: dV, dP, dQ, dK, and the scores once more in a fused kernel.
    """
    length = row["length"]
    pairs = length * (length + 1) // 2 if row["mask"] == "causal" else length * length
    scores, values = 2 * row["qk_dim"], 2 * row["v_dim"]
    if row["direction"] == "forward":
        each = scores + values
    else:
        each = (2 if row["kernel"] == "eager" else 3) * scores + 2 * values
    return int(row["batch"] * row["heads"] * pairs * each)


def choose_kernel(bench: Bench, kernel: PickedKernel) -> AbstractContextManager[Any]:
    """Forces one of SDPA's kernels; on the CPU, which has its own, nothing is forced."""
    if kernel not in _BACKENDS or not bench.is_gpu:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context: AbstractContextManager[object] = sdpa_kernel(getattr(SDPBackend, _BACKENDS[kernel]))
    return context


def make_call(
    bench: Bench,
    kernel: PickedKernel,
    direction: PassDirection,
    batch: int,
    heads: int,
    length: int,
    qk: int,
    v: int,
    is_causal: bool,
) -> Callable[[], Any]:
    """A function that runs one attention call forward, or its backward alone."""
    torch = bench.torch

    def make(dim: int) -> Any:
        # (batch, length, heads, dim) seen as (batch, heads, length, dim): the layout that HF's projections give.
        made = bench.random(batch, length, heads, dim).transpose(1, 2)
        return made.detach().requires_grad_(direction == "backward")

    query, key, value = make(qk), make(qk), make(v)

    def forward() -> Any:
        if kernel == "eager":
            return _attend_eagerly(torch, query, key, value, is_causal)
        with choose_kernel(bench, kernel):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    try:
        out = forward()
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise RowError(f"kernel {kernel} does not take head dims {qk}/{v} here: {error}") from None
        raise
    if direction == "forward":
        return forward
    gradient = torch.randn_like(out)
    inputs = (query, key, value)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _attend_eagerly(torch: Any, query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    """HF's eager_attention_forward: scores, mask, softmax in fp32, values."""
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    if is_causal:
        length = query.shape[2]
        mask = torch.full((length, length), torch.finfo(query.dtype).min, device=query.device, dtype=query.dtype)
        scores = scores + mask.triu(1)
    weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)
