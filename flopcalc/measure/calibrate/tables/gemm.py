"""Table gemm: time of the three products of a linear layer over the shapes that language and vision models have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flopcalc.base.vocabulary import ProductDirection
from flopcalc.hardware.tiles import DIRECTIONS
from flopcalc.measure.calibrate.tables import Bench, Json, get_device, round_digits
from flopcalc.measure.jobs.runner import Job

# (n, k): a linear layer of k inputs and n outputs.
_LAYERS = {
    "llama-8b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096)),
    "llama-70b": ((8192, 8192), (28672, 8192), (8192, 28672)),
    "qwen2.5-7b": ((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944), (152064, 3584)),
    "deepseek-v3": ((24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (576, 7168)),
    "mixtral": ((28672, 4096),),
    "0.5b-1b": ((896, 896), (4864, 896), (2048, 2048), (8192, 2048), (2048, 8192), (151936, 896)),
    "vision": ((3840, 1280), (1280, 1280), (5120, 1280), (3420, 1280), (1280, 3420), (4304, 1152), (1152, 4304)),
}
_TOKENS = {"quick": (512, 1024, 2048, 8192, 16384), "full": (512, 1024, 2048, 4096, 6144, 8192, 12288, 16384)}
# Layers whose executed FLOPs are counted: every width that is no multiple of a tile, and some that are.
_COUNTED = {
    (4096, 4096), (14336, 4096), (128256, 4096), (512, 3584), (152064, 3584), (576, 7168), (896, 896), (4864, 896),
    (3420, 1280), (1280, 3420), (4304, 1152), (1152, 4304), (3840, 1280), (151936, 896),
}  # fmt: skip
_ODD_TOKENS = (577, 1000, 1872)  # CLIP's rows, a ragged batch, patches of a 504 x 728 image
_SUSTAINED = (
    (8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 4096, 4096), (16384, 28672, 8192),
    (8192, 128256, 4096), (8192, 18944, 3584), (8192, 8192, 2048), (8192, 2048, 2048), (8192, 4864, 896),
    (8192, 5120, 1280), (2048, 4096, 4096),
)  # fmt: skip
_FP8 = (
    (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672), (4096, 7168),
    (18944, 3584), (8192, 2048), (2048, 8192),
)  # fmt: skip


def plan(suite: str) -> list[Job]:
    """One job: every shape in every direction, then the sustained ones, then fp8."""
    rows: dict[str, Json] = {}

    def add(dtype: str, direction: ProductDirection, m: int, n: int, k: int, mode: str, counted: bool) -> None:
        rows[f"{dtype}/{direction}/{m}x{n}x{k}/{mode}"] = {
            "dtype": dtype, "direction": direction, "m": m, "n": n, "k": k, "mode": mode, "counted": counted
        }  # fmt: skip

    if suite == "test":
        for direction in DIRECTIONS:
            add("bf16", direction, 64, 48, 32, "burst", True)
        add("bf16", "forward", 64, 48, 32, "sustained", False)
    else:
        layers = dict.fromkeys(layer for group in _LAYERS.values() for layer in group)
        for n, k in layers:
            for m in _TOKENS[suite]:
                for direction in DIRECTIONS:
                    add("bf16", direction, m, n, k, "burst", (n, k) in _COUNTED and m in (512, 2048))
        for n, k in _COUNTED:
            if n < 20000:
                for m in _ODD_TOKENS:
                    add("bf16", "forward", m, n, k, "burst", True)
        for m, n, k in _SUSTAINED:
            add("bf16", "forward", m, n, k, "sustained", False)
        for n, k in _FP8:
            for m in (2048, 8192):
                add("fp8", "forward", m, n, k, "burst", False)
    return [
        Job("gemm", f"{__name__}:start", {"device": get_device(suite)}, rows, timeout_s=60, expected_s=0.13 * len(rows))
    ]


def start(args: Json) -> Callable[[Json], Json]:
    bench = Bench(args["device"])
    return lambda row: measure(bench, row)


def measure(bench: Bench, row: Json) -> Json:
    """One product; m rows, k inputs, n outputs, as autograd lays them out."""
    m, n, k = row["m"], row["n"], row["k"]
    bench.free()
    call = _make_fp8(bench, m, n, k) if row["dtype"] == "fp8" else make_product(bench, row["direction"], m, n, k)
    timing = bench.sustain(call) if row["mode"] == "sustained" else bench.time(call, idle_s=0.01)
    executed = bench.count_executed(call) if row["counted"] else None
    return {
        **{key: row[key] for key in ("dtype", "direction", "m", "n", "k", "mode")},
        "seconds": round_digits(timing.seconds),
        "spread": round_digits(timing.spread, 3),
        "tflops": round_digits(2 * m * n * k / timing.seconds / 1e12),
        "sm_clock_mhz": timing.clock_mhz,
        "power_w": timing.power_w,
        "executed_flops": executed,
    }


def make_product(bench: Bench, direction: ProductDirection, m: int, n: int, k: int) -> Callable[[], Any]:
    """forward: x (m, k) · Wᵀ (k, n); dgrad: g (m, n) · W (n, k); wgrad: gᵀ (n, m) · x (m, k)."""
    torch = bench.torch
    if direction == "forward":
        x, weight = bench.random(m, k), bench.random(n, k)
        return lambda: torch.mm(x, weight.t())
    if direction == "dgrad":
        g, weight = bench.random(m, n), bench.random(n, k)
        return lambda: torch.mm(g, weight)
    g, x = bench.random(m, n), bench.random(m, k)
    return lambda: torch.mm(g.t(), x)


def _make_fp8(bench: Bench, m: int, n: int, k: int) -> Callable[[], Any]:
    """Tensor-wise scaled e4m3 product with bf16 output, as torch's own fp8 linear calls it."""
    torch = bench.torch
    x = bench.random(m, k).to(torch.float8_e4m3fn)
    weight = bench.random(n, k).to(torch.float8_e4m3fn)
    scale = torch.ones((), device=bench.device)
    return lambda: torch._scaled_mm(
        x, weight.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )
