"""Small steps on a machine other than the calibrated one: the shipped predictor, and after `flopcalc calibrate --host`.

Fixed before anything was measured:

- `flopcalc calibrate --host` runs first; then the steps of CASES are timed without pause, the middle of all steps.
- Each is predicted twice: with the shipped predictor as it is, and with this host's file. Nothing is fitted on them.
- A case is inside if its middle step lies in the interval. All cases count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
# Preset, layers, phase, batch, length, context.
CASES: tuple[tuple[str, int, str, int, int, int], ...] = (
    ("llama-3.2-1b", 16, "train", 1, 96, 0),
    ("llama-3.2-1b", 16, "decode", 2, 2, 400),
    ("qwen2.5-0.5b", 24, "train", 2, 160, 0),
    ("qwen2.5-0.5b", 24, "prefill", 1, 128, 0),
    ("qwen3-1.7b", 14, "train", 1, 128, 0),
    ("qwen3-1.7b", 14, "decode", 1, 2, 300),
    ("gemma-3-1b", 13, "train", 1, 96, 0),
    ("gpt2-medium", 24, "train", 1, 200, 0),
    ("gpt2-medium", 24, "prefill", 1, 200, 0),
    ("olmo-2-1b", 16, "train", 1, 160, 0),
    ("phi-1.5", 24, "decode", 1, 2, 200),
    ("smollm3-3b", 12, "train", 1, 96, 0),
)


def measure(out: Path, device: str) -> None:
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench
    from flopcalc.measure.predictor.host_speed import measure_host
    from flopcalc.measure.predictor.runs import Runner, cut_config, make_case

    begun = time.monotonic()
    about = {**describe_machine(device), "command": "python benchmarks/host_steps.py",
             "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
    kept: Json = {"provenance": about, "host": measure_host(Bench(device)), "cases": [], "failures": []}
    kept["host_calibration_s"] = round(time.monotonic() - begun, 1)
    runner = Runner(device, lambda name: cut_config(*json.loads(name)), work_s=1.0)
    for preset, layers, phase, batch, seq, context in CASES:
        case = make_case(json.dumps([preset, layers]), phase, batch, seq, context=context)
        try:
            found = runner.measure(case)
            kept["cases"].append({**found, "preset": preset, "layers": layers})
            print(f"{time.monotonic() - begun:6.1f} s  {preset} {phase}", flush=True)
        except Exception as error:
            kept["failures"].append({"case": f"{preset} {phase}", "reason": f"{type(error).__name__}: {error}"[:300]})
            print(f"{time.monotonic() - begun:6.1f} s  {preset} {phase} failed: {error}", flush=True)
            runner.drop()
        out.write_text(json.dumps(kept, indent=1) + "\n")


def predict_cases(kept: Json, has_host: bool) -> list[Json]:
    """Every case with the shipped predictor, adapted to this host or not."""
    from flopcalc import predict
    from flopcalc.measure.predictor.runs import cut_config
    from flopcalc.prediction.kernels.constants import load_predictor

    before = os.environ.get("FLOPCALC_DATA")
    with TemporaryDirectory() as folder:
        os.environ["FLOPCALC_DATA"] = folder
        if has_host:
            path = Path(folder) / "predictors" / "h200-sxm.host.json"
            path.parent.mkdir()
            path.write_text(json.dumps({"schema": 1, "provenance": kept["provenance"], "probe_s": kept["host"]}))
        load_predictor.cache_clear()
        try:
            rows = []
            for case in kept["cases"]:
                context = {"context": case["context"]} if case["phase"] == "decode" else {}
                found = predict(
                    cut_config(case["preset"], case["layers"]), device="h200", batch_size=case["batch"],
                    seq_len=case["seq"], phase=case["phase"], advise=False, memory=False, **context,
                )  # fmt: skip
                low, mid, high = found.step_time_s
                rows.append({"case": f"{case['preset']} {case['phase']} {case['batch']}x{case['seq']}",
                             "bound": found.bound, "measured_s": case["seconds"], "predicted_s": mid,
                             "error": mid / case["seconds"] - 1,
                             "is_inside": low <= case["seconds"] <= high})  # fmt: skip
            return rows
        finally:
            del os.environ["FLOPCALC_DATA"]
            if before is not None:
                os.environ["FLOPCALC_DATA"] = before
            load_predictor.cache_clear()


def report(measured: Path) -> str:
    from flopcalc.base.text_table import format_grid

    kept = json.loads(measured.read_text())
    plain, own = predict_cases(kept, False), predict_cases(kept, True)
    lines = [
        [one["case"], one["bound"], f"{1e3 * one['measured_s']:.2f}", f"{100 * one['error']:+.1f} %",
         "yes" if one["is_inside"] else "no", f"{100 * two['error']:+.1f} %", "yes" if two["is_inside"] else "no"]
        for one, two in zip(plain, own, strict=True)
    ]  # fmt: skip
    sums = [
        f"{name}: {100 * statistics.median(abs(row['error']) for row in rows):.1f} % median error, "
        f"{100 * max(abs(row['error']) for row in rows):.1f} % worst, {sum(row['is_inside'] for row in rows)} of "
        f"{len(rows)} inside"
        for name, rows in (("shipped", plain), ("with calibrate --host", own))
    ]
    head = ["step", "bound", "measured ms", "shipped", "inside", "with --host", "inside"]
    return "; ".join(sums) + "\n\n" + format_grid(head, lines, "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="measure, and write here; without: report what was measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--measured", type=Path, default=RESULTS / "host_steps.json")
    given = parser.parse_args()
    if given.out is None:
        print(report(given.measured))
        return 0
    measure(given.out, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
