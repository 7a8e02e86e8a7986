"""Calibration tables and benchmarks/results/seven_b.json go in; docs/crosscheck.md comes out.

python docs/make_crosscheck.py            write the page
python docs/make_crosscheck.py --check    exit 1 if the page is stale
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flopcalc import bind
from flopcalc.base.text_table import format_grid
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.ops import join
from flopcalc.hardware.tables import MeasuredTable, find_table, load_table
from flopcalc.measure.calibrate.tables.counts import CONFIGS, get_grids
from flopcalc.measure.predictor.fit.cases import find_random

HERE = Path(__file__).resolve().parent
PAGE = HERE / "crosscheck.md"
DEVICE = "h200-sxm"
NAMED = 4  # differences shown per family
FP32_ROUTER = "model.layers.*.mlp.gate"  # of DeepSeek-V3: HF casts it to fp32


def load(name: str) -> MeasuredTable:
    path = find_table(DEVICE, name)
    if path is None:
        raise SystemExit(f"no table {name} for {DEVICE}")
    return load_table(path)


def estimate_row(row: dict[str, Any], device: str | None = DEVICE) -> Estimate:
    """The analytic hardware count of a measured step, with the device's tables or by the rule alone."""
    grids = get_grids(row["family"], "quick")
    bound = bind(
        CONFIGS[row["family"]],
        recipe={"recompute": row["recompute"]},
        convention="hardware",
        attention_kernel=row["kernel"],
        device=device,
        routing=find_random(CONFIGS[row["family"]]),
    )
    images = [grid for _ in range(row["batch"]) for grid in grids] or None
    return bound(row["batch"], row["seq"], image_grid_thw=images, phase=row["phase"])


def sum_alone(padding: MeasuredTable, row: dict[str, Any]) -> dict[str, int] | None:
    """Module -> what its calls execute one by one; None where the table has not every call of this step."""
    calls = "calls_recompute" if row["recompute"] == "full" else "calls"
    wanted = {key: row[key] for key in ("family", "seq", "batch")}
    found: dict[str, int] = {}
    kernels = set()
    for record in padding.select(**wanted):
        if row["phase"] == "forward" and record["direction"] != "forward":
            continue
        if record["module"] == FP32_ROUTER and row["family"] == "deepseek_v3":
            continue  # the table measured it in bf16; the step runs it in fp32, off the bf16 counter
        if record["kernel"] in ("", row["kernel"]):
            kernels.add(record["kernel"])
            module = re.sub(r"\.\d+\.", ".*.", record["module"]) if "experts" in record["shape"] else record["module"]
            found[module] = found.get(module, 0) + record["executed_flops"] * record[calls]
    return found if row["kernel"] in kernels else None


def analytic_by_module(estimate: Estimate) -> dict[str, int]:
    estimator, work, _ = estimate.terms[0]
    found: dict[str, int] = {}
    for counted in estimator.rows(work, "hardware"):
        block, row, _ = counted
        path = join(f"{block.path}.*" if block.layers is not None else block.path, row.op.name)
        flops = (counted.flops.total - counted.flops.clipping) * block.copies
        if flops:
            found[path] = found.get(path, 0) + flops
    return found


def name_difference(module: str, difference: int) -> str:
    """Why a product executes something else than it needs."""
    if module.endswith(("attn", "attention")):
        return "head dim or length padded to the blocks of the attention kernel"
    if module.endswith("patch_embedding"):
        return "three colour channels padded by the convolution"
    if module.endswith(".experts"):
        return "uneven expert rows, padded to the tiles of a grouped product"
    if module.endswith(".gate") and difference < 0:
        return "a router in fp32, off the bf16 counter"
    return "sizes that are not a multiple of the product's tiles"


def percent(part: float) -> str:
    return f"{100 * part:+.2f} %"


def describe(table: MeasuredTable) -> str:
    about = table.provenance
    return (
        f"{about['device']}, driver {about['driver']}, CUDA {about['cuda']}, torch {about['torch']}, transformers "
        f"{about['transformers']}, {about['date'][:10]}, by `{about['command']}`"
    )


def estimate_seven_b(model: str, row: dict[str, Any]) -> int:
    """The analytic count that a row's witness should equal, by the code and tables of today."""
    if row["analytic_as"].startswith("full"):
        estimate = bind(model, convention="full")(1, row["seq"])
        return estimate.forward if row["analytic_as"].endswith("forward") else estimate.total
    kernel = row["analytic_as"].partition(", ")[2]
    return bind(model, convention="hardware", attention_kernel=kernel, device=DEVICE)(1, row["seq"]).total


def write_seven_b() -> Iterator[str]:
    found = json.loads((HERE.parent / "benchmarks" / "results" / "seven_b.json").read_text())
    about = found["provenance"]
    yield "## A 7B model at 512, 1024 and 2048 tokens"
    yield ""
    yield (
        f"One training step of {about['model']} at full depth with random weights, batch 1, on {about['device']} "
        f"(torch {about['torch']}, {about['date'][:10]}), by `{about['command']}`."
    )
    yield ""
    rows = []
    for row in found["rows"]:
        figures = [(row["witness"], row["counted"])]
        if row["corrected"] is not None:
            figures.append((f"{row['witness']}, corrected", row["corrected"]))
        for name, counted in figures:
            analytic = estimate_seven_b(about["model"], row)
            rows.append(
                [
                    str(row["seq"]),
                    row["attention"],
                    name,
                    f"{counted:,}",
                    f"{analytic:,}",
                    row["analytic_as"],
                    "equal" if counted == analytic else percent(counted / analytic - 1),
                    f"{row['seconds']:.2f} s",
                ]
            )
    yield format_grid(
        ["tokens", "attention", "witness", "counted", "analytic", "convention", "difference", "cost"], rows, "github"
    )
    yield ""
    yield (
        "The operator counter, fvcore and the corrected profiler agree to the FLOP. The uncorrected profiler also "
        "counts elementwise work. The GPU's counter sees more than the analytic count. We did not analyse the "
        "difference for this model. In the steps below it is padding inside the calls."
    )


def write_counts(counts: MeasuredTable, padding: MeasuredTable) -> Iterator[str]:
    yield "## Steps of six families"
    yield ""
    yield (
        "One step of a few layers of each family at real widths (`flopcalc/measure/calibrate/tables/counts.py`). "
        "`executed` is what the tensor cores executed, read by CUPTI. The last three columns are its difference from "
        "three counts:"
    )
    yield ""
    yield "- `rule`: convention hardware from the config alone, with blocks of 128 and no padding."
    yield (
        "- `tables`: the same with `--device`: measured constants of the kernel, and measured calls and products. "
        "Weights are random, so routers are uneven: experts are counted with `--routing spread:0.4`."
    )
    yield (
        "- `alone`: the sum of every product and attention call of the step, each measured alone (table padding). "
        "If this equals `executed`, the whole difference is padding inside those calls."
    )
    yield ""
    yield (
        "The padding table was measured on the shapes of these same steps. So `tables` and `alone` explain the steps; "
        "they are no prediction. Only `rule` and the 7B model above use no measurement of the step."
    )
    yield ""
    rows = []
    for row in counts.records():
        executed = row["executed"]
        alone = sum_alone(padding, row)
        rows.append(
            [
                row["family"],
                row["phase"],
                f"{row['batch']} × {row['seq']}",
                row["kernel"],
                row["recompute"],
                f"{executed / 1e12:.3f} T",
                percent(executed / row["analytic_hardware"] - 1),
                percent(executed / estimate_row(row).total - 1),
                percent(executed / sum(alone.values()) - 1) if alone else "-",
            ]
        )
    headers = ["family", "phase", "tokens", "kernel", "recompute", "executed", "rule", "tables", "alone"]
    yield format_grid(headers, rows, "github")
    yield ""
    yield (
        f"{len(counts.failures)} rows failed, each because torch has no such kernel for the shapes: "
        + "; ".join(sorted({f"{f['row'].split('/')[0]} with {f['row'].split('/')[3]}" for f in counts.failures}))
        + "."
    )


def write_differences(counts: MeasuredTable, padding: MeasuredTable) -> Iterator[str]:
    yield "## Where the differences come from"
    yield ""
    yield (
        "Training steps of 2 × 2048 tokens without recomputation, with cuDNN attention. The table shows what calls "
        "execute alone minus what the rule gives for them, in percent of the step. It lists the largest differences."
    )
    yield ""
    rows = []
    for row in counts.select(phase="train", kernel="cudnn", recompute="none", seq=2048):
        alone = sum_alone(padding, row)
        assert alone is not None
        expected = analytic_by_module(estimate_row(row, None))
        total = sum(expected.values())
        differences = {module: alone.get(module, 0) - flops for module, flops in expected.items()}
        largest = sorted(differences, key=lambda module: -abs(differences[module]))[:NAMED]
        for module in largest:
            if abs(differences[module]) > 1e-5 * total:
                why = name_difference(module, differences[module])
                rows.append([row["family"], f"`{module}`", percent(differences[module] / total), why])
    yield format_grid(["family", "module", "of the step", "named difference"], rows, "github")


def make_page() -> str:
    counts, padding = load("counts"), load("padding")
    lines = [
        "# Analytic counts against real GPUs",
        "",
        "<!-- Written by docs/make_crosscheck.py from the tables: run it again instead of editing this page. -->",
        "",
        f"Measured on {describe(counts)}.",
        "",
        *write_seven_b(),
        "",
        *write_counts(counts, padding),
        "",
        *write_differences(counts, padding),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    page = make_page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
            print("docs/crosscheck.md is stale: run python docs/make_crosscheck.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
