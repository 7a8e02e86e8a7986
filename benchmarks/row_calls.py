"""Norms and sums over rows, whose time depends on rows more than on bytes where the rows are short.

`python benchmarks/row_calls.py measure` times them on a GPU and writes benchmarks/results/row_calls.json; `fit` prints
seconds of a call, of a row and of a byte: `row_s` of model_specs/predictors/defaults.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

Json = dict[str, Any]
RESULT = Path(__file__).parent / "results" / "row_calls.json"
ROWS = (8192, 16384, 32768, 50688, 65536, 100_000)
WIDTHS = (64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 4096)
TINY = ((64,), (24, 48))
_FLUSHED = 1 << 28  # bytes: several times what a GPU's cache holds


def list_calls(bench: Any, rows: int, width: int, size: int) -> list[tuple[str, int, int, Any]]:
    """Kind, bytes that it reads and writes as a recording has them, call."""
    torch, aten = bench.torch, bench.torch.ops.aten
    dtype = torch.bfloat16 if size == 2 else torch.float32
    given, gradient, weight = (bench.random(*each, dtype=dtype) for each in ((rows, width), (rows, width), (width,)))
    normed = partial(aten.native_layer_norm, given, [width], weight, weight, 1e-5)
    _, mean, rstd = normed()
    back = partial(
        aten.native_layer_norm_backward, gradient, given, [width], mean, rstd, weight, weight, [True, True, True]
    )
    whole, kept, own = size * rows * width, 2 * size * rows, 2 * size * width
    return [
        ("norm", whole + own, whole + kept, normed),
        ("norm_backward", 2 * whole + own + kept, whole + own, back),
        ("reduce", whole, size * width, partial(torch.sum, gradient, 0)),
    ]


def measure(out: Path, device: str) -> None:
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench
    from flopcalc.measure.predictor.memory_calls import time_kernels

    bench = Bench(device)
    # A bias's gradient is summed after two products that read the same rows: those are no longer in the cache.
    flush = bench.random(_FLUSHED // 2 if device == "cuda" else 8, dtype=bench.torch.bfloat16).zero_
    flush_s = time_kernels(bench, flush)
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kept: Json = {
        "provenance": {**describe_machine(device), "command": "python benchmarks/row_calls.py measure", "date": date},
        "calls": [],
    }
    for size in (2, 4):
        for rows in ROWS if device == "cuda" else TINY[0]:
            for width in WIDTHS if device == "cuda" else TINY[1]:
                bench.free()
                for kind, reads, writes, call in list_calls(bench, rows, width, size):
                    if kind == "reduce":
                        seconds = time_kernels(bench, lambda: (flush(), call())) - flush_s  # noqa: B023
                    else:
                        seconds = time_kernels(bench, call)
                    seconds = float(f"{seconds:.4g}")
                    row = {"kind": kind, "rows": rows, "width": width, "bytes_each": size}
                    kept["calls"].append({**row, "reads": reads, "writes": writes, "seconds": seconds})
    out.write_text(json.dumps(kept, indent=1) + "\n")


def fit(path: Path) -> dict[str, list[float]]:
    """Kind -> seconds of a call, of a row, of a byte, by least relative squares over what one grid of blocks takes.

    Of widths that are whole blocks of 128: sums over rows of 192 or 320 take up to twice as long as over rows of 384.
    """
    from flopcalc.measure.predictor.fit.solvers import round_digits, solve_nonnegative
    from flopcalc.prediction.kernels.memory_bound import MOST_ROWS, count_rows

    found: dict[str, list[Any]] = {}
    for call in json.loads(path.read_text())["calls"]:
        if call["bytes_each"] != 2 or call["width"] % 128 or call["width"] < 384:
            continue
        rows = count_rows(call["kind"], call["reads"], call["writes"])
        if 0 < rows <= MOST_ROWS:
            features = (1.0, rows, call["reads"] + call["writes"])
            found.setdefault(call["kind"], []).append((features, call["seconds"]))
    return {kind: round_digits(solve_nonnegative(rows)) for kind, rows in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("measure", "fit"))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.out, given.device)
    else:
        print(json.dumps(fit(given.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
