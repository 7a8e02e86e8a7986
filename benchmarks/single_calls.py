"""Single calls that the shipped predictor's calibration did not have: memory by shape, adapters, images kept apart.

`measure` times them as `flopcalc calibrate --predictor` does today, and writes benchmarks/results/single_calls.json;
`python benchmarks/predict_error.py refit` takes them in.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def measure(out: Path, device: str) -> None:
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench
    from flopcalc.measure.predictor.single_calls import list_rows, measure_calls

    rows = list_rows("full" if device == "cuda" else "test")
    apart = next(row for row in rows.values() if "apart" in row.get("sizes", {}))
    bench = Bench(device)
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kept: Json = {
        "provenance": {**describe_machine(device), "command": "python benchmarks/single_calls.py", "date": date},
        "calls": [],
        "left_out": [],
    }
    for row in (rows["calls/memory"], rows["calls/adapters"], {**apart, "sizes": {"apart": apart["sizes"]["apart"]}}):
        for key, found in measure_calls(bench, row).items():
            kept[key] += found
    out.write_text(json.dumps(kept, indent=1) + "\n")


def read_calls(path: Path = RESULTS / "single_calls.json") -> list[Json]:
    found: list[Json] = json.loads(path.read_text())["calls"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=RESULTS / "single_calls.json")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    measure(given.out, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
