"""Watts of a GPU: at rest, in single calls that compute or move bytes, and in whole steps of every kind.

    python benchmarks/power_steps.py measure --out FILE [--tiny]   # on a GPU, about five minutes; --tiny: on a CPU
    python benchmarks/power_steps.py report [--measured FILE]

Every row repeats one call or step until SECONDS are over, after a run-up: at the limit of its power a GPU takes about a
second to settle. Joules are NVML's counter before and after; watts are joules over the wall time between them.
Single calls are those of `flopcalc calibrate --predictor`, with their FLOPs and bytes.
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


def measure(out: Path, device: str, is_tiny: bool) -> None:
    """All rows; the file is written after each."""
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.predictor.narrow import narrow
    from flopcalc.measure.predictor.runs import FIT_GRIDS, Runner, get_config, make_case, name_case
    from flopcalc.measure.predictor.single_calls import list_power_rows, measure_power, meter

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
    runner, seconds = Runner(device, configs), 0.01 if is_tiny else SECONDS
    for name, row in list_power_rows(is_tiny).items():
        keep({"row": name, "kind": row["power"]}, lambda row=row: measure_power(runner.bench, row))
    for model, (kind, steps) in STEPS.items():
        for phase, batch, seq, context in steps:
            sizes = (1, min(seq, 16), min(context, 16)) if is_tiny else (batch, seq, context)
            grids = [] if is_tiny or phase == "decode" else FIT_GRIDS.get(model, [])
            case = make_case(model, phase, sizes[0], sizes[1], grids, context=sizes[2])
            row = {"row": name_case(case), "kind": kind, **case}
            keep(row, lambda case=case: meter(runner.bench, runner.make_step(case), seconds))
        runner.drop()
    rest = list_power_rows(is_tiny)["power/rest"]
    keep({"row": "rest after work", "kind": "rest"}, lambda: measure_power(runner.bench, rest))


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
