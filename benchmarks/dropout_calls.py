"""Attention with dropout, as text encoders and GPT-2 train with it, beside the same without.

`python benchmarks/dropout_calls.py --out FILE` times calls of SDPA on a GPU, in training's two directions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]
RESULT = Path(__file__).parent / "results" / "dropout_calls.json"
MASKS = ("dropout", "dropped", "full", "causal")
# Batch, heads, key heads, queries, keys: those of BERT's and GPT-2's steps.
SIZES = [(64, 12, 12, 128, 128), (32, 16, 16, 256, 256), (48, 12, 12, 384, 384), (32, 16, 16, 512, 512),
         (16, 12, 12, 896, 896), (8, 16, 16, 1024, 1024)]  # fmt: skip
TINY = [(1, 2, 2, 8, 8)]


def measure(out: Path, device: str) -> None:
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench
    from flopcalc.measure.predictor.single_calls import list_rows, measure_calls

    is_gpu = device == "cuda"
    bench, rows = Bench(device), list_rows("full" if is_gpu else "test")
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kept: Json = {
        "provenance": {**describe_machine(device), "command": "python benchmarks/dropout_calls.py", "date": date},
        "calls": [],
        "left_out": [],
    }
    for dim in (32, 64, 128) if is_gpu else (16,):
        known = rows.get(f"calls/attention/{dim}", {}).get("sizes", {})
        for mask in MASKS:
            sizes = [*(SIZES if is_gpu else TINY), *known.get(mask, ())]
            sizes = list({tuple(each): None for each in sizes})
            try:
                found = measure_calls(bench, {"qk": dim, "v": dim, "sizes": {mask: sizes}})
            except Exception as error:  # one mask may fail; the others are kept
                found = {"calls": [], "left_out": [f"{dim} {mask} {type(error).__name__}: {error}"[:300]]}
            for key, entries in found.items():
                kept[key] += entries
            out.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    measure(given.out, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
