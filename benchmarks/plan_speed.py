"""How fast layouts are searched on one core: layouts a second for a dense model and one of experts.

python benchmarks/plan_speed.py [--out FILE]     exit code 1 if 10,000 layouts take more than 5 s
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from flopcalc import bind
from flopcalc.api import plan

GOAL_S = 5.0  # for 10,000 layouts
CASES = (
    ("llama-3.1-70b", "h200", 1024, 1024),
    ("llama-3.1-405b", "h100-sxm", 16384, 2048),
    ("deepseek-v3", "h200", 2048, 16384),
)


def measure(model: str, device: str, gpus: int, batch: int) -> dict[str, float | str | int]:
    """One search, the model already bound."""
    estimator = bind(model)
    start = time.process_time()  # CPU time: other work on the machine does not count
    found = plan(estimator, tokens="2T", device=device, gpus=gpus, seq_len=4096, global_batch=batch)
    seconds = time.process_time() - start
    looked_at = found.layouts + sum(found.skipped.values())
    return {
        "model": model,
        "device": device,
        "gpus": gpus,
        "layouts": looked_at,
        "timed": found.layouts,
        "seconds": seconds,
        "timed_per_s": found.layouts / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [measure(*case) for case in CASES]
    for row in rows:
        print(
            f"{row['model']:16} {row['gpus']:6} x {row['device']:9} {row['timed']:7,} of {row['layouts']:7,} layouts "
            f"timed in {row['seconds']:.2f} s: {row['timed_per_s']:,.0f} a second"
        )
    slowest = min(float(row["timed_per_s"]) for row in rows)
    print(f"10,000 layouts take {10_000 / slowest:.1f} s (goal {GOAL_S:g} s)")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if 10_000 / slowest <= GOAL_S else 1)


if __name__ == "__main__":
    main()
