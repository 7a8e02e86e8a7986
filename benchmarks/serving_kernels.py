"""Fit model_specs/serving_kernels.json, what engines' kernels reach, from AIConfigurator's measured kernel tables.

    python benchmarks/serving_kernels.py FOLDER          FOLDER holds one folder of tables a system (a100_sxm, …)

A kernel takes floor + (compute³ + memory³)^(1/3) seconds. Rates are stored as shares of the device's peak and
bandwidth, so that a device without tables can borrow those of its generation. Prints how far fits lie from their rows.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from make_systems import LICENCE, SOURCE, SYSTEMS, read_rows
from scipy.optimize import least_squares

from flopcalc.base.data import find_data_dir
from flopcalc.hardware.devices import find_device, find_format_peak
from flopcalc.server.step import ROUTED_MOVES, TILE, count_distinct

# Our format -> theirs, bytes of a number, and the format that is computed in.
FORMATS = {"bf16": ("bfloat16", 2.0, "bf16"), "fp8": ("fp8", 1.0, "fp8"), "fp8-block": ("fp8_block", 1.0, "fp8"),
           "nvfp4": ("nvfp4", 0.5625, "nvfp4"), "int4": ("int4_wo", 0.52, "bf16"),
           "mxfp4": ("w4a16_mxfp4", 0.53, "bf16"),
           "mxfp4-fp8": ("w4a8_mxfp4_mxfp8", 0.53, "fp8")}  # fmt: skip
LEAST_ROWS = 40
SIZES = [2**power for power in range(10, 31, 2)]  # bytes of a sum over ranks


def fit(seconds: np.ndarray, flops: np.ndarray, moved: np.ndarray, peak: float, bandwidth: float, name: str,
        least: float = 0.1) -> list[float]:  # fmt: skip
    """Shares of peak and bandwidth, and the floor in seconds, with the least errors in logarithms."""

    def find_errors(logs: np.ndarray) -> Any:
        compute, memory, floor = np.exp(logs)
        return np.log((floor + ((flops / compute) ** 3 + (moved / memory) ** 3) ** (1 / 3)) / seconds)

    low, high = np.log([0.01 * peak, least * bandwidth, 1e-6]), np.log([1.2 * peak, bandwidth, 3e-4])
    start = np.log([0.4 * peak, 0.7 * bandwidth, max(2e-6, float(seconds.min()))])
    found = least_squares(find_errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    off = np.abs(find_errors(found.x))
    print(f"{name}: {len(seconds)} rows, median error {np.median(off):.3f}, nine in ten {np.quantile(off, 0.9):.3f}")
    compute, memory, floor = np.exp(found.x)
    return [round(compute / peak, 4), round(memory / bandwidth, 4), round(float(floor), 7)]


def collect(
    rows: Iterator[dict[str, str]], key: str, read: Callable[[dict[str, str]], tuple[float, ...] | None]
) -> dict[str, np.ndarray]:
    """What is read of each row, and its seconds, by the value of a column."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        values = read(row)
        if values is not None:
            found.setdefault(row[key], []).append((*values, float(row["latency"]) * 1e-3))
    return {name: np.array(each).T for name, each in found.items() if len(each) >= LEAST_ROWS}


def read_product(row: dict[str, str]) -> tuple[float, ...]:
    return tuple(int(row[name]) for name in "mnk")


def read_experts(row: dict[str, str]) -> tuple[float, ...] | None:
    """Rows, experts that are reached, the stream's and an expert's width; only where tokens fall evenly."""
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    tokens, hidden, width, active, experts, tp, ep = (int(row[name]) for name in names)
    if row["distribution"] == "power_law_1.2" or ep > 16 or experts > 512:
        return None
    return tokens * active / ep, count_distinct(experts, active, tokens) / ep, hidden, width / tp


def make_device(folder: Path, device_id: str) -> dict[str, Any]:
    device = find_device(device_id)
    bandwidth = 1e9 * (device.bandwidth_gb_per_s or 0)
    found: dict[str, Any] = {"products": {}, "experts": {}, "keys": {}, "latent": {}, "sums": {}}
    peaks = {name: find_format_peak(device_id, compute)[0] for name, (_, _, compute) in FORMATS.items()}
    for flow in ("trtllm", "vllm"):
        products = collect(read_rows(folder, f"gemm-{flow}-gemm"), "gemm_dtype", read_product)
        experts = collect(read_rows(folder, f"moe-{flow}-moe"), "moe_dtype", read_experts)
        for name, (theirs, size, _) in FORMATS.items():
            if theirs in products and name not in found["products"]:
                m, n, k, seconds = products[theirs]
                found["products"][name] = fit(seconds, 2 * m * n * k, n * k * size + 2 * m * (n + k), peaks[name],
                                              bandwidth, f"{device_id} {flow} product {name}")  # fmt: skip
            # vLLM's kernel for these two formats is of other models than gpt-oss, which runs TensorRT-LLM's.
            if theirs in experts and (flow, name) != ("vllm", "mxfp4-fp8"):
                rows, reached, hidden, width, seconds = experts[theirs]
                flops = 6 * (rows + TILE * reached) * hidden * width
                moved = 3 * reached * hidden * width * size + 2 * rows * (ROUTED_MOVES * hidden + 3 * width)
                found["experts"].setdefault(flow, {})[name] = fit(
                    seconds,
                    flops,
                    moved,
                    peaks[name],
                    bandwidth,
                    f"{device_id} {flow} experts {name}",
                    0.1 if name in ("int4", "mxfp4") else 0.7,
                )

    def read_keys(row: dict[str, str]) -> tuple[float, ...] | None:
        window, keys = float(row.get("window_size") or 0), int(row["isl"]) + int(row["step"])
        if row["head_dim"] == "256" or (window and window < keys):
            return None
        sizes = [int(row[name]) for name in ("batch_size", "num_heads", "num_key_value_heads", "head_dim")]
        return 4.0 * sizes[0] * sizes[1] * sizes[3] * keys, 2.0 * sizes[0] * sizes[2] * sizes[3] * keys

    def read_latent(row: dict[str, str]) -> tuple[float, ...]:
        batch, heads, keys = int(row["batch_size"]), int(row["num_heads"]), int(row["isl"]) + int(row["step"])
        return 2.0 * batch * heads * 1088 * keys, 576.0 * batch * keys

    for kind, table, read in (("keys", "attention-vllm-generation_attention", read_keys),
                              ("latent", "mla-trtllm-generation_mla", read_latent)):  # fmt: skip
        for name, (flops, moved, seconds) in collect(read_rows(folder, table), "kv_cache_dtype", read).items():
            ours, size = ("bf16", 2) if name == "bfloat16" else ("fp8", 1)
            found[kind][ours] = fit(
                seconds, flops, size * moved, peaks["bf16"], bandwidth, f"{device_id} {kind} {ours}"
            )
    for row in read_rows(folder, "comm-vllm-custom_allreduce"):
        size = 2 * int(row["message_size"])
        if row["backend"] == "vllm_graph" and size in SIZES:
            found["sums"].setdefault(row["num_gpus"], []).append([size, round(float(row["latency"]) * 1e-3, 8)])
    found["sums"] = {name: sorted(points) for name, points in found["sums"].items()}
    return found


def main() -> None:
    csv.field_size_limit(1 << 20)
    folder = Path(sys.argv[1])
    data = {
        "schema": 1,
        "provenance": {"source": SOURCE, "licence": LICENCE, "made_by": "python benchmarks/serving_kernels.py FOLDER"},
        "devices": {device: make_device(folder / name, device) for name, (device, _) in SYSTEMS.items()},
    }
    path = Path(find_data_dir()) / "serving_kernels.json"
    path.write_text(
        json.dumps(data, indent=None, separators=(", ", ": ")).replace('}, "', '},\n"') + "\n", encoding="utf-8"
    )
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
