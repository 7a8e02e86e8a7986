"""Measures products of experts on a GPU: one grouped kernel, one cuBLAS call for each expert, and a plain product.

    python benchmarks/expert_products.py --out benchmarks/results/expert_products.json

Every product runs for 0.8 s, on random numbers, so that the GPU is at its power limit as in training. Rows are dealt
out evenly. The calls of single experts run on four streams, as in Transformer Engine's GroupedLinear. Results are
TFLOP/s. The shapes are those of one GPU of published runs (benchmarks/data/published_training.csv).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

# Experts on a GPU, their rows together, outputs and inputs of the first product.
SHAPES = {
    "nemotron-3-super": (8, 180224, 2688, 1024),
    "nemotron-3-nano": (16, 98304, 1856, 2688),
    "nemotron-3-ultra": (8, 180224, 5120, 2048),
    "qwen3-30b-a3b": (16, 131072, 1536, 2048),
    "qwen3-next-80b-a3b": (16, 40960, 1024, 2048),
    "qwen3-235b-a22b": (4, 16384, 3072, 4096),
    "deepseek-v3": (4, 32768, 4096, 7168),
    "gpt-oss-120b": (2, 65536, 5760, 2880),
}
LONG_MS = 800
STREAMS = 4


def time_ms(run: Callable[[], object], many: int, before: int) -> float:
    for _ in range(before):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(many):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / many


def measure(copies: int, rows: int, n: int, k: int) -> dict[str, int]:
    """TFLOP/s of each kind of product."""

    def make(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    inputs, weights, gradients = make(rows, k), make(copies, k, n) * 0.02, make(rows, n)
    outputs, back, summed = make(rows, n), make(rows, k), make(copies, k, n)
    ends = (torch.arange(1, copies + 1, device="cuda") * (rows // copies)).int()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def loop(run: Callable[[int, slice], object]) -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        for expert in range(copies):
            with torch.cuda.stream(streams[expert % STREAMS]):
                run(expert, slice(expert * (rows // copies), (expert + 1) * (rows // copies)))
        for stream in streams:
            current.wait_stream(stream)

    kinds: dict[str, Callable[[], object]] = {
        "grouped forward": lambda: torch._grouped_mm(inputs, weights, offs=ends),
        "grouped dgrad": lambda: torch._grouped_mm(gradients, weights.transpose(1, 2), offs=ends),
        "grouped wgrad": lambda: torch._grouped_mm(inputs.t(), gradients, offs=ends),
        "single forward": lambda: loop(lambda i, own: torch.mm(inputs[own], weights[i], out=outputs[own])),
        "single dgrad": lambda: loop(lambda i, own: torch.mm(gradients[own], weights[i].t(), out=back[own])),
        "single wgrad": lambda: loop(lambda i, own: torch.mm(inputs[own].t(), gradients[own], out=summed[i])),
        "plain forward": lambda: torch.mm(inputs, weights[0], out=outputs),
        "plain dgrad": lambda: torch.mm(gradients, weights[0].t(), out=back),
    }
    found = {}
    for name, run in kinds.items():
        once = time_ms(run, 5, 2)
        found[name] = round(2 * rows * n * k / time_ms(run, max(5, int(LONG_MS / once)), 0) / 1e9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = [
        {"model": name, "experts": shape[0], "rows": shape[1], "n": shape[2], "k": shape[3], "tflops": measure(*shape)}
        for name, shape in SHAPES.items()
    ]
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    out.write_text(json.dumps({"provenance": device, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
