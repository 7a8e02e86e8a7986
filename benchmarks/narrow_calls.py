"""Kernels of weights of few bits, of fp8 layers and of UNets, one call at a time on a GPU.

`python benchmarks/narrow_calls.py [--out FILE] [--device cuda]` writes seconds of each call's kernels, with its sizes,
to benchmarks/results/narrow_calls.json; about two minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

Json = dict[str, Any]
RESULT = Path(__file__).parent / "results" / "narrow_calls.json"
LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (9728, 2560), (2560, 9728), (18944, 3584))  # n, k
ROWS = (4096, 1536, 8192)
FEW = (1, 4, 16, 64, 256, 768)
# Batch, channels in and out, side of the picture, kernel, stride.
CONVOLUTIONS = (
    (2, 4, 320, 64, 3, 1), (2, 320, 320, 64, 3, 1), (8, 320, 320, 96, 3, 1), (2, 320, 640, 64, 3, 1),
    (2, 640, 640, 64, 3, 1), (2, 320, 320, 128, 3, 1), (2, 640, 640, 32, 3, 1), (8, 640, 640, 48, 3, 1),
    (2, 1280, 1280, 32, 3, 1), (2, 1280, 1280, 16, 3, 1), (8, 1280, 1280, 24, 3, 1), (2, 1280, 1280, 8, 3, 1),
    (2, 2560, 1280, 16, 3, 1), (2, 2560, 1280, 32, 3, 1), (2, 1920, 640, 64, 3, 1), (8, 960, 320, 96, 3, 1),
    (2, 320, 320, 64, 3, 2), (2, 640, 640, 64, 3, 2), (2, 320, 640, 64, 1, 1), (8, 320, 320, 96, 1, 1),
    (2, 2560, 1280, 16, 1, 1), (2, 320, 4, 64, 3, 1),
)  # fmt: skip
NORMS = ((2, 320, 64), (8, 320, 96), (2, 640, 64), (2, 1280, 32), (2, 2560, 16), (2, 320, 128), (8, 960, 96))


def find_most(given: Any) -> Any:
    return given.abs().max().float()


def narrow_down(given: Any, scale: Any, dtype: Any) -> Any:
    return (given / scale.to(given.dtype)).to(dtype)


def list_products(bench: Any, is_tiny: bool) -> Iterator[tuple[Json, Callable[[], Any]]]:
    """Products of fp8 and of packed int4, casts to fp8, and weights of int8 brought to bf16."""
    torch = bench.torch
    for n, k in LAYERS if not is_tiny else ((128, 128),):
        weight = bench.random(n, k, dtype=torch.bfloat16)
        narrow = weight.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=bench.device)
        for m in ROWS if not is_tiny else (64,):
            given = bench.random(m, k, dtype=torch.bfloat16)
            yield {"kind": "amax", "m": m, "k": k}, partial(find_most, given)
            yield {"kind": "cast_fp8", "m": m, "k": k}, partial(narrow_down, given, one, torch.float8_e4m3fn)
            few = given.to(torch.float8_e4m3fn)
            call = partial(torch._scaled_mm, few, narrow, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
            yield {"kind": "scaled_mm", "m": m, "n": n, "k": k}, call
        whole = weight.to(torch.int8)
        yield {"kind": "int8_to_bf16", "n": n, "k": k}, partial(whole.to, torch.bfloat16)
        if not bench.is_gpu:
            continue
        pairs = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=bench.device)
        packed = torch._convert_weight_to_int4pack(pairs, 8)
        scales = bench.random(k // 128, n, 2, dtype=torch.bfloat16)
        for m in FEW:
            given = bench.random(m, k, dtype=torch.bfloat16)
            yield (
                {"kind": "int4pack_mm", "m": m, "n": n, "k": k},
                partial(torch._weight_int4pack_mm, given, packed, 128, scales),
            )


def list_pictures(bench: Any, is_tiny: bool) -> Iterator[tuple[Json, Callable[[], Any]]]:
    """Convolutions and group norms, forward and backward."""
    torch, aten = bench.torch, bench.torch.ops.aten
    for batch, inner, outer, side, kernel, stride in CONVOLUTIONS if not is_tiny else ((1, 4, 8, 8, 3, 1),):
        given = bench.random(batch, inner, side, side, dtype=torch.bfloat16)
        weight = bench.random(outer, inner, kernel, kernel, dtype=torch.bfloat16)
        bias, pad = bench.random(outer, dtype=torch.bfloat16), kernel // 2
        sizes = {"batch": batch, "in": inner, "out": outer, "side": side, "kernel": kernel, "stride": stride}
        call = partial(torch.nn.functional.conv2d, given, weight, bias, stride, pad)
        yield {"kind": "conv", **sizes}, call
        back = partial(
            aten.convolution_backward, call(), given, weight, [outer], [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1
        )
        yield {"kind": "conv_dgrad", **sizes}, partial(back, [True, False, False])
        yield {"kind": "conv_wgrad", **sizes}, partial(back, [False, True, False])
    for batch, channels, side in NORMS if not is_tiny else ((1, 32, 8),):
        given = bench.random(batch, channels, side, side, dtype=torch.bfloat16)
        weight = bench.random(channels, dtype=torch.bfloat16)
        own = (batch, channels, side * side, 32)
        normed = partial(aten.native_group_norm, given, weight, weight, *own, 1e-5)
        out, mean, rstd = normed()
        sizes = {"batch": batch, "in": channels, "side": side}
        yield {"kind": "group_norm", **sizes}, normed
        back = partial(aten.native_group_norm_backward, out, given, mean, rstd, weight, *own, [True, True, True])
        yield {"kind": "group_norm_backward", **sizes}, back


def measure(out: Path, device: str) -> None:
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench
    from flopcalc.measure.predictor.memory_calls import time_kernels

    bench, is_tiny = Bench(device), device != "cuda"
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = {**describe_machine(device), "command": "python benchmarks/narrow_calls.py", "date": date}
    kept: Json = {"provenance": about, "calls": [], "failures": []}
    for make in (list_products, list_pictures):
        for row, call in make(bench, is_tiny):
            try:
                call()
                kept["calls"].append({**row, "seconds": float(f"{time_kernels(bench, call):.4g}")})
            except Exception as error:
                kept["failures"].append({**row, "reason": f"{type(error).__name__}: {error}"[:200]})
        out.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{len(kept['calls'])} calls, {len(kept['failures'])} failures", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    measure(given.out, given.device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
