"""Fits the constants of model_specs/systems from AIConfigurator's measured kernel tables, one file a system.

    python benchmarks/make_systems.py FOLDER          FOLDER holds one folder of tables a system (a100_sxm, …)

The tables are ai-dynamo/aiconfigurator's `systems/data` (Apache-2.0) in whole or thinned: products and collectives of
TensorRT-LLM's flow, attention of vLLM's. Needs `pip install '.[measure]'`. Prints how far each fit lies from its rows.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flopcalc.base.data import find_data_dir
from flopcalc.hardware.devices import find_device
from flopcalc.measure.predictor.fit.points import ProductPoint
from flopcalc.measure.predictor.fit.products import ProductTable
from flopcalc.measure.predictor.fit.solvers import fit_positive, round_digits
from flopcalc.prediction.kernels.machine import ProductShape

SOURCE = "ai-dynamo/aiconfigurator:systems/data@095f58a51c4ca8e61b66ec108d86f223f8d559ce"
LICENCE = "Apache-2.0"
SYSTEMS = {  # folder -> device id, processors
    "a100_sxm": ("a100-sxm-80gb", 108),
    "h100_sxm": ("h100-sxm", 132),
    "h200_sxm": ("h200-sxm", 132),
    "b200_sxm": ("b200-sxm", 148),
    "b300_sxm": ("b300-sxm", 148),
    "gb200": ("gb200", 148),
    "gb300": ("gb300", 148),
    "l40s": ("l40s", 142),
    "rtx_pro_6000_server": ("rtx-pro-6000-server", 188),
    "b60": ("arc-pro-b60", 20),
}
# Our format -> theirs. Blackwell's blocks of 32 (mxfp8) are what its kernels for scaled blocks compute in.
FORMATS = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
BLOCKS = ("b200-sxm", "b300-sxm", "gb200", "gb300")
MIN_ROWS = 256  # of a product: what training and prefill run
LONG_MS = 0.5  # calls of attention from here on show the rate that long ones keep up
START = ProductShape(half=0.95, quarter=0.8, eighth=0.7)
LEAST, MOST = (0.7, 0.5, 0.4), (1.0, 1.0, 1.0)  # of half, quarter, eighth
# Share of these bursts' rate that products keep up in a step, by number format, chosen by published runs. A100 and
# H100: about 0.85 and 0.72 of the published peak. Blackwell in bf16: 0.48 of a B200's 2,250 TFLOP/s, which Megatron's
# products reach in MooreThreads/SimuMax (configs/system/b200_bf16_ceperm.json: 0.485 in the median of 514), over the
# B200's bursts here. The other three have no measurement of their own: large products run at the limit of power, so
# they keep up the B200's FLOP/s times their boards' watts over its 1,000 (1,100, 1,200 and 1,400). Attention: the
# same file's mean of sdp_fwd and sdp_bwd at 4,096 to 131,072 tokens, over the rate that the engines' table gives.
# Narrow formats: dense runs of Megatron-Bridge; all releases were looked at. Training's fp8 kernels are faster than
# those of the engines' table.
SUSTAINED = {
    "a100-sxm-80gb": {"bf16": 0.95},
    "h100-sxm": {"bf16": 0.872, "fp8": 0.95},
    **{
        name: {"bf16": plain, "attention": 0.83, "fp8": 1.1, "mxfp8": 0.83, "nvfp4": 1.12}
        for name, plain in (("b200-sxm", 0.66), ("b300-sxm", 0.69), ("gb200", 0.78), ("gb300", 0.75))
    },
}
# Formats whose experts are one kernel each way in recipes of Megatron-Bridge from release 26.06 on
# (cutedsl_fused_grouped_mlp, NVTE_CUTEDSL_FUSED_GROUPED_MLP), which replay whole iterations as CUDA graphs. Of the
# published runs on B200 and B300 only Qwen3-30B's of 26.06 on B300 has them, so those two have none here.
JOINED_EXPERTS = {"gb200": ["mxfp8"], "gb300": ["mxfp8"]}
REPLAYED_EXPERTS = {"gb200": ["mxfp8"], "gb300": ["mxfp8"]}
DIMS = (64, 128, 256)  # head dims that engines and training have equally good kernels for
WIDTHS = {"fp8": 1.0, "mxfp8": 1.03, "nvfp4": 0.56}  # bytes of a number with its scales
STREAMED = 0.8  # share of the memory's bandwidth that bringing inputs to a format reaches
COLLECTIVES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "alltoall": 1}


def main() -> None:
    folder = Path(sys.argv[1])
    out = Path(find_data_dir()) / "systems"
    out.mkdir(exist_ok=True)
    for name, (device, units) in SYSTEMS.items():
        found = make_system(folder / name, device, units)
        path = out / f"{device}.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def make_system(folder: Path, device: str, units: int) -> dict[str, Any]:
    products = {}
    flow = "trtllm" if list(folder.glob("gemm-trtllm-gemm.csv*")) else "vllm"
    rows = list(read_rows(folder, f"gemm-{flow}-gemm"))
    formats = {**FORMATS, **({"mxfp8": "fp8_block"} if device in BLOCKS else {})}
    for ours, theirs in formats.items():
        own = [row for row in rows if row["gemm_dtype"] == theirs and int(row["m"]) >= MIN_ROWS]
        if own:
            products[ours] = fit_format(own, ours, device, units)
            print(f"{device} {ours}: {products[ours]}", flush=True)
    return {
        "schema": 1,
        "device_id": device,
        "provenance": {
            "source": SOURCE,
            "licence": LICENCE,
            "made_by": "python benchmarks/make_systems.py FOLDER",
            "kernels": f"products: {flow} {rows[0]['version']}; attention: vllm; collectives: nccl",
        },
        "products": products,
        "sustained": SUSTAINED.get(device, {}),
        **({"joined_experts": JOINED_EXPERTS[device]} if device in JOINED_EXPERTS else {}),
        **({"replayed_experts": REPLAYED_EXPERTS[device]} if device in REPLAYED_EXPERTS else {}),
        "attention_flops_per_s": find_attention_rates(folder),
        "decode_bytes_per_s": find_decode_rate(folder),
        "collectives": list_collectives(folder),
    }


def read_rows(folder: Path, name: str) -> Iterator[dict[str, str]]:
    for path in sorted(folder.glob(f"{name}.csv*")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from csv.DictReader(file)


def fit_format(rows: list[dict[str, str]], kind: str, device: str, units: int) -> dict[str, Any]:
    """Constants of `time_matrix` with the least sum of errors in logarithms, and what they leave over.

    A call in a narrow format brings its input to the format first; that is taken off as bytes moved.
    """
    points = [
        ProductPoint("forward", *(int(row[name]) for name in "mnk"), float(row["latency"]) * 1e-3, 1) for row in rows
    ]
    table = ProductTable(points)
    seconds = np.array([point.seconds for point in points])
    casts = np.zeros(len(points))
    if kind in WIDTHS:
        rate = STREAMED * 1e9 * (find_device(device).bandwidth_gb_per_s or 0)
        casts = np.array([point.m * point.k * (2 + WIDTHS[kind]) for point in points]) / rate
    rate = float(np.quantile(table.flops / seconds, 0.99))
    start = START._replace(rate=1.05 * rate, bandwidth=float((table.bytes / seconds).max()), units=float(units))

    def list_errors(constants: Any) -> Any:
        shares = [min(most, max(least, each)) for least, most, each in zip(LEAST, MOST, constants[3:6], strict=True)]
        shape = ProductShape(*constants[:3], *shares, *constants[6:])._replace(units=float(units))
        return np.log((table.predict(shape) + casts) / seconds)

    constants = list(fit_positive(list_errors, list(start[:-1]), 0.1, 0.02, [float("inf")] * 8))
    constants[3:6] = [min(most, max(least, e)) for least, most, e in zip(LEAST, MOST, constants[3:6], strict=True)]
    left = np.abs(list_errors(constants))
    return {
        "shape": [*round_digits(constants, 4), units],
        "rows": len(rows),
        "median_error": round(float(np.median(left)), 3),
        "error_of_nine_in_ten": round(float(np.quantile(left, 0.9)), 3),
    }


def find_attention_rates(folder: Path) -> dict[str, float]:
    """FLOP/s of long causal calls by head dim, half of the pairs counted."""
    found: dict[str, list[float]] = {}
    for row in read_rows(folder, "attention-vllm-context_attention"):
        length, dim = int(row["isl"]), int(row["head_dim"])
        window = float(row.get("window_size") or 0)
        is_whole = (not window or window >= length) and not int(row.get("step") or 0) and dim in DIMS
        if row["attn_dtype"] == "bfloat16" and is_whole and length >= 2048 and float(row["latency"]) > LONG_MS:
            flops = 4 * int(row["batch_size"]) * int(row["num_heads"]) * dim * length * (length + 1) / 2
            found.setdefault(str(dim), []).append(flops / float(row["latency"]) * 1e3)
    return {dim: float(f"{median(rates):.4g}") for dim, rates in sorted(found.items(), key=lambda each: int(each[0]))}


def find_decode_rate(folder: Path) -> float:
    """Bytes/s of keys and values that large calls with one new token read."""
    found = []
    for row in read_rows(folder, "attention-vllm-generation_attention"):
        keys = int(row["isl"]) + int(row["step"])
        window = float(row.get("window_size") or 0)
        if row["kv_cache_dtype"] == "bfloat16" and (not window or window >= keys) and float(row["latency"]) > 0.2:
            sizes = [int(row[name]) for name in ("batch_size", "num_key_value_heads", "head_dim")]
            found.append(4 * float(np.prod(sizes)) * keys / float(row["latency"]) * 1e3)
    return float(f"{median(found):.4g}")


def list_collectives(folder: Path) -> dict[str, dict[str, list[list[float]]]]:
    """Devices -> collective -> (bytes, bus bandwidth in bytes/s), as nccl-tests defines it."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for row in read_rows(folder, "comm-nccl-nccl"):
        if row["nccl_dtype"] != "half":
            continue
        devices, size = int(row["num_gpus"]), 2 * int(row["message_size"])
        share = COLLECTIVES[row["op_name"]] * (devices - 1) / devices
        rate = float(f"{share * size / (float(row['latency']) * 1e-3):.4g}")
        name = row["op_name"].replace("alltoall", "all_to_all")
        found.setdefault(str(devices), {}).setdefault(name, []).append([size, rate])
    return {devices: {name: sorted(points) for name, points in each.items()} for devices, each in sorted(found.items())}


if __name__ == "__main__":
    main()
