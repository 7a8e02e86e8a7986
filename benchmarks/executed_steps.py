"""FLOPs that tensor cores execute in whole training steps, beside `--convention hardware --device h200`.

Fixed before anything was measured: the steps of CASES run once each, forward and backward, with HF's sdpa, counted by
the GPU's own counter of bf16 tensor cores. None of their sizes is in the tables. Lengths are odd on purpose; experts
and towers are among them. Weights are random, dropout is as the config has it. Experts are counted with the rows that
their routers dealt out, which expert_routes.json has.
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
RESULTS = Path(__file__).parent / "results"
# Name -> preset or config of expert_steps.py, layers (text, vision), batch, length, patches of each sample's image.
CASES: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "llama-3.2-1b 3x1200": ("llama-3.2-1b", 6, 0, 3, 1200, []),
    "llama-3.2-3b 1x700": ("llama-3.2-3b", 4, 0, 1, 700, []),
    "qwen3-1.7b 2x1500": ("qwen3-1.7b", 5, 0, 2, 1500, []),
    "mistral-7b 3x1100": ("mistral-7b", 2, 0, 3, 1100, []),
    "qwen2.5-0.5b 4x1000": ("qwen2.5-0.5b", 8, 0, 4, 1000, []),
    "olmoe-2048 3x1500": ("olmoe-2048", 0, 0, 3, 1500, []),
    "mixtral-1536 2x1300": ("mixtral-1536", 0, 0, 2, 1300, []),
    "qwen3-moe-1024 1x900": ("qwen3-moe-1024", 0, 0, 1, 900, []),
    "deepseek-v2-1280 2x1500": ("deepseek-v2-1280", 0, 0, 2, 1500, []),
    "qwen2-vl-2b 2x900 image": ("qwen2-vl-2b", 6, 8, 2, 900, [[1, 28, 40]]),
    "llava-1.5-7b 1x1000 image": ("llava-1.5-7b", 3, 8, 1, 1000, [[1, 24, 24]]),
    "gpt2-medium 3x700": ("gpt2-medium", 8, 0, 3, 700, []),
}


def get_config(name: str) -> Json:
    from flopcalc.measure.predictor.runs import cut_config

    preset, layers, vision, *_ = CASES[name]
    if layers:
        return cut_config(preset, layers, vision)
    sys.path.insert(0, str(Path(__file__).parent))
    import expert_steps

    return expert_steps.get_config(preset)


def measure_cases(
    out: Path,
    device: str,
    command: str,
    cases: dict[str, Json],
    configs: Callable[[str], Json],
    prepare: Callable[[Any], object] | None = None,
) -> None:
    """One step of each case under the counter; `prepare` may change a runner's model before it runs."""
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.predictor.runs import Runner

    kept: Json = {
        "provenance": {
            **describe_machine(device),
            "command": command,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "cases": [],
        "failures": [],
    }
    for name, case in cases.items():
        begun = time.monotonic()
        runner = Runner(device, configs)
        try:
            step = runner.make_step(case)
            if prepare is not None:
                prepare(runner)
            runner.optimizer.step = lambda: None  # products alone
            step()
            runner.bench.synchronize()
            executed = runner.bench.count_executed(step)
            kept["cases"].append({"case": name, "executed_flops": executed})
            print(f"{time.monotonic() - begun:6.1f} s  {name}", flush=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            kept["failures"].append({"case": name, "reason": reason})
            print(f"{time.monotonic() - begun:6.1f} s  {name}  failed: {reason}", flush=True)
        runner.drop()
        out.write_text(json.dumps(kept, indent=1) + "\n")


def measure(out: Path, device: str) -> None:
    """One step of each case under the counter."""
    from flopcalc.measure.predictor.runs import make_case

    cases = {name: make_case(name, "train", batch, seq, grids) for name, (*_, batch, seq, grids) in CASES.items()}
    measure_cases(out, device, "python benchmarks/executed_steps.py", cases, get_config)


def count(name: str, device: str | None = "h200") -> int:
    """FLOPs of the same step as `estimate --convention hardware --device h200` counts them, with its routers' rows."""
    from flopcalc import bind

    _, _, _, batch, seq, grids = CASES[name]
    routes = json.loads((RESULTS / "expert_routes.json").read_text())["cases"]
    rows = next((case["rows_per_expert"] for case in routes if case["name"] == name), None)
    estimator = bind(get_config(name), convention="hardware", device=device, attention_kernel="auto", routing=rows)
    images = [grid for _ in range(batch) for grid in grids] or None
    return int(estimator(batch, seq, image_grid_thw=images).total)


def report(measured: Path) -> str:
    """Every case: executed, counted, and how far the count is off."""
    from flopcalc.base.text_table import format_grid

    rows = []
    for case in json.loads(measured.read_text())["cases"]:
        counted, executed = count(case["case"]), case["executed_flops"]
        rows.append(
            [
                case["case"],
                f"{executed / 1e12:.3f} T",
                f"{counted / 1e12:.3f} T",
                f"{100 * (counted / executed - 1):+.2f} %",
            ]
        )
    return format_grid(["step", "executed", "counted", "error"], rows, "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="measure, and write here; without: report what was measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--measured", type=Path, default=RESULTS / "executed_steps.json")
    given = parser.parse_args()
    if given.out is None:
        print(report(given.measured))
        return 0
    measure(given.out, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
