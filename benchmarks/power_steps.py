"""Watts of a GPU: at rest, in single calls that compute or move bytes, and in whole steps of every kind.

    python benchmarks/power_steps.py measure --out FILE [--tiny]   # on a GPU, about five minutes; --tiny: on a CPU
    python benchmarks/power_steps.py report [--measured FILE]

Every row repeats one call or step until SECONDS are over, after as long a run-up: at the limit of its power a GPU takes
about a second to settle. Joules are NVML's counter before and after; watts are joules over the wall time between them.
Single calls have their FLOPs and bytes beside them, so that watts can be fitted to the shares of both peaks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
MEASURED = Path(__file__).parent / "results" / "power_steps.json"
SECONDS = 2.0
# Rows, columns and depth of bf16 products: square ones, then few rows over many weights, as decoding has them.
PRODUCTS = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 8192, 2048),
    (512, 8192, 8192),
    (128, 16384, 8192),
    (64, 16384, 8192),
    (16, 16384, 8192),
    (1, 16384, 8192),
)
COPIED = (1 << 31, 1 << 26)  # bytes
# Query heads, heads of keys, head dim, sequences, queries of each, keys of each.
ATTENTION = ((32, 8, 128, 4, 4096, 4096), (32, 8, 128, 64, 1, 4096))
# Model -> kind, and phase, batch, length and context of its steps.
STEPS: dict[str, tuple[str, list[tuple[str, int, int, int]]]] = {
    "qwen2.5-0.5b": ("dense", [("train", 8, 2048, 0), ("prefill", 8, 1024, 0), ("decode", 64, 8, 1000)]),
    "llama-3.2-1b": (
        "dense",
        [("train", 4, 2048, 0), ("train", 1, 512, 0), ("prefill", 4, 2048, 0), ("decode", 1, 8, 1000),
         ("decode", 32, 8, 1000), ("decode", 128, 8, 1000)],
    ),
    "mistral-7b": ("dense", [("train", 4, 2048, 0), ("prefill", 4, 2048, 0), ("decode", 16, 8, 2000)]),
    "gemma-2b": ("dense", [("train", 4, 2048, 0), ("prefill", 2, 1024, 0)]),
    "mistral-large-123b": ("dense", [("train", 2, 2048, 0), ("prefill", 1, 1024, 0)]),
    "mixtral-8x7b": ("experts", [("train", 4, 2048, 0), ("prefill", 4, 1024, 0), ("decode", 16, 8, 1000)]),
    "qwen3-30b-a3b": ("experts", [("train", 4, 2048, 0), ("train", 1, 1024, 0), ("prefill", 4, 1024, 0)]),
    "qwen2-vl-2b": ("images", [("train", 4, 2048, 0), ("prefill", 4, 1024, 0)]),
    "llava-1.5-7b": ("images", [("train", 4, 2048, 0), ("prefill", 4, 1024, 0)]),
}  # fmt: skip


class Meter:
    """Joules and seconds of a call that is repeated."""

    def __init__(self, bench: Any, seconds: float) -> None:
        self.bench, self.seconds = bench, seconds

    def measure(self, call: Callable[[], object]) -> Json:
        """Repeat a call for a while, then again while the counter is read."""
        self._repeat(call)
        gauge = self.bench.gauge
        before = gauge.read_energy_j() if gauge is not None else None
        start = time.perf_counter()
        calls = self._repeat(call)
        clock = gauge.read_clock_mhz() if gauge is not None else None
        taken = time.perf_counter() - start
        after = gauge.read_energy_j() if gauge is not None else None
        joules = after - before if before is not None and after is not None else None
        return {
            "seconds": taken / calls, "calls": calls, "energy_j": joules / calls if joules is not None else None,
            "power_w": round(joules / taken, 1) if joules is not None else None, "sm_clock_mhz": clock,
        }  # fmt: skip

    def _repeat(self, call: Callable[[], object]) -> int:
        start, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - start < self.seconds:
            for _ in range(4):  # a queue that is never empty, and never long
                call()
            self.bench.synchronize()
            calls += 4
        return calls


def list_calls(torch: Any, device: str, shrink: int) -> list[tuple[Json, Callable[[], object]]]:
    """Single calls with their FLOPs and bytes."""
    made: list[tuple[Json, Callable[[], object]]] = []
    dtype = torch.bfloat16
    for m, n, k in PRODUCTS:
        m, n, k = (max(1, size // shrink) for size in (m, n, k))
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        row = {"row": f"product {m}x{n}x{k}", "kind": "product", "flops": 2 * m * n * k}
        made.append(({**row, "bytes": 2 * (m * k + k * n + m * n)}, lambda a=a, b=b: a @ b))
    for size in COPIED:
        source = torch.randn(size // shrink**2 // 4, device=device)
        target = torch.empty_like(source)
        row = {"row": f"copy {source.nbytes}", "kind": "copy", "flops": 0, "bytes": 2 * source.nbytes}
        made.append((row, lambda source=source, target=target: target.copy_(source)))
    for heads, kv_heads, dim, batch, length, keys in ATTENTION:
        length, keys = max(1, length // shrink), keys // shrink
        query = torch.randn(batch, heads, length, dim, device=device, dtype=dtype)
        key, value = (torch.randn(batch, kv_heads, keys, dim, device=device, dtype=dtype) for _ in range(2))
        row = {"row": f"attention {batch}x{length}x{keys}", "kind": "attention"}
        row |= {"flops": 4 * batch * heads * length * keys * dim, "bytes": 2 * key.nbytes + 2 * query.nbytes}
        attend = torch.nn.functional.scaled_dot_product_attention
        made.append((row, lambda q=query, k=key, v=value, attend=attend: attend(q, k, v, enable_gqa=True)))
    return made


def measure(out: Path, device: str, is_tiny: bool) -> None:
    """All rows; the file is written after each."""
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.predictor.narrow import narrow
    from flopcalc.measure.predictor.runs import FIT_GRIDS, Runner, get_config, make_case, name_case

    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    command = f"python benchmarks/power_steps.py measure{' --tiny' * is_tiny}"
    kept: Json = {"provenance": {**describe_machine(device), "command": command, "date": date}, "rows": []}
    kept["failures"] = []

    def keep(row: Json, find: Callable[[], Json]) -> None:
        try:
            kept["rows"].append({**row, **find()})
            print(f"{row['row']:44} {kept['rows'][-1]['power_w']} W", flush=True)
        except Exception as error:
            kept["failures"].append({**row, "reason": f"{type(error).__name__}: {error}"[:300]})
            print(f"{row['row']:44} failed: {error}"[:200], flush=True)
        out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    configs = (lambda name: {**narrow(get_config(name), 2), "vocab_size": 256}) if is_tiny else get_config
    runner = Runner(device, configs)
    meter = Meter(runner.bench, 0.01 if is_tiny else SECONDS)
    pause_s = meter.seconds / 4
    keep({"row": "rest", "kind": "rest", "flops": 0, "bytes": 0}, lambda: meter.measure(lambda: time.sleep(pause_s)))
    for row, call in list_calls(runner.bench.torch, device, 64 if is_tiny else 1):
        keep(row, lambda call=call: meter.measure(call))
    for model, (kind, steps) in STEPS.items():
        for phase, batch, seq, context in steps:
            sizes = (1, min(seq, 16), min(context, 16)) if is_tiny else (batch, seq, context)
            grids = [] if is_tiny or phase == "decode" else FIT_GRIDS.get(model, [])
            case = make_case(model, phase, sizes[0], sizes[1], grids, context=sizes[2])
            row = {"row": name_case(case), "kind": kind, **case}
            keep(row, lambda case=case: meter.measure(runner.make_step(case)))
        runner.drop()
    keep({"row": "rest after work", "kind": "rest"}, lambda: meter.measure(lambda: time.sleep(pause_s)))


def report(measured: Path) -> None:
    """Watts of every row."""
    from tabulate import tabulate

    rows = json.loads(measured.read_text(encoding="utf-8"))["rows"]
    shown = [
        [row["row"], row["kind"], f"{row['seconds'] * 1e3:.2f} ms", row["power_w"], row["sm_clock_mhz"]] for row in rows
    ]
    print(tabulate(shown, ["row", "kind", "time", "watts", "MHz"], tablefmt="github"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "report"])
    parser.add_argument("--out", type=Path, default=MEASURED)
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.command == "report":
        report(options.measured)
    else:
        measure(options.out, "cpu" if options.tiny else "cuda", options.tiny)


if __name__ == "__main__":
    sys.exit(main())
