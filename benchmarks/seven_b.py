"""The comparison that started this project: a 7B model at 512, 1024 and 2048 tokens, estimated against counted.

    python benchmarks/seven_b.py --out benchmarks/results/seven_b.json      on a GPU with 80 GB or more

Qwen2.5-7B at full depth with random weights, one training step, SDPA attention; every witness that the machine has.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime

from flopcalc import make_workload
from flopcalc.measure.calibrate.provenance import describe_machine
from flopcalc.measure.counters.witness import crosscheck

MODEL = "qwen2.5-7b"
LENGTHS = (512, 1024, 2048)
WITNESSES = ("flop_counter", "fvcore", "profiler", "cupti")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    rows = []
    for attention in ("sdpa", "eager"):
        for length in LENGTHS:
            witnesses = WITNESSES if attention == "eager" else ("cupti",)
            found = crosscheck(MODEL, make_workload(1, length), device="cuda", attention=attention, witnesses=witnesses)
            for row in found.rows:
                counted = row.counted
                rows.append(
                    {
                        "seq": length,
                        "attention": attention,
                        "witness": counted.witness,
                        "counted": counted.total,
                        "corrected": counted.corrected,
                        "analytic": row.expected,
                        "analytic_as": row.expected_as,
                        "ratio": row.ratio,
                        "seconds": round(counted.seconds, 2),
                        "reason": counted.reason,
                    }
                )
                print(rows[-1], flush=True)
    about = {
        **describe_machine("cuda"),
        "command": "python benchmarks/seven_b.py",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": MODEL,
    }
    with open(options.out, "w", encoding="utf-8") as file:
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        file.write(f'{{\n "provenance": {json.dumps(about)},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
