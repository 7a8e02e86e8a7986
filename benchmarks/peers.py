"""What other counters say of small HF models' forward pass, beside the operator counter and the analytic count.

    python benchmarks/peers.py --out benchmarks/results/peers.json    needs fvcore, calflops, deepspeed and torchinfo

The models have random weights and run on the CPU, with HF's default attention (SDPA) and with its eager one.
A tool is called as its own guide calls it; what it raises is written down.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flopcalc import estimate_flops
from flopcalc.measure.counters import witness
from flopcalc.measure.hf.models import build_model, make_batch

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
}
VISION = {
    "depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 512,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [3],
}  # fmt: skip
IDS = {"image_token_id": 7990, "video_token_id": 7991, "vision_start_token_id": 7992, "vision_end_token_id": 7993}
ROPE = {"rope_type": "default", "type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama", **TEXT}, {"batch": 1, "seq": 512}),
    "mixtral": (
        {"model_type": "mixtral", **TEXT, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        {"batch": 1, "seq": 512},
    ),
    "qwen2_5_vl": (
        {
            "model_type": "qwen2_5_vl",
            **IDS,
            "vision_config": VISION,
            "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, "rope_scaling": ROPE},
        },
        {"batch": 1, "seq": 512, "images": [[1, 24, 32]]},
    ),
}


class _Call(torch.nn.Module):
    """A HF model as tools want it: tensors by position in, logits out."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.model(**dict(zip(self._names, tensors, strict=True)), use_cache=False, return_dict=False)[0]


def count_fvcore(model: Any, batch: Mapping[str, Any]) -> int:
    from fvcore.nn import FlopCountAnalysis

    analysis = FlopCountAnalysis(_Call(model, tuple(batch)), tuple(batch.values()))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    return 2 * round(analysis.total())  # it counts multiply-accumulates


def count_calflops(model: Any, batch: Mapping[str, Any]) -> int:
    from calflops import calculate_flops

    flops, _, _ = calculate_flops(
        model, kwargs=dict(batch), print_results=False, print_detailed=False, output_as_string=False
    )
    return round(flops)


def count_deepspeed(model: Any, batch: Mapping[str, Any]) -> int:
    from deepspeed.profiling.flops_profiler import get_model_profile

    flops, _, _ = get_model_profile(
        model, kwargs=dict(batch), print_profile=False, detailed=False, as_string=False, warm_up=0
    )
    return round(flops)


def count_torchinfo(model: Any, batch: Mapping[str, Any]) -> int:
    from torchinfo import summary

    found = summary(model, input_data=dict(batch), verbose=0, device="cpu")
    return 2 * int(found.total_mult_adds)


TOOLS: dict[str, Callable[[Any, Mapping[str, Any]], int]] = {
    "fvcore": count_fvcore,
    "calflops": count_calflops,
    "deepspeed": count_deepspeed,
    "torchinfo": count_torchinfo,
}


def measure(name: str, attention: str) -> list[dict[str, Any]]:
    config, workload = CASES[name]
    analytic = estimate_flops(
        config,
        seq_len=workload["seq"],
        batch_size=workload["batch"],
        image_grid_thw=workload.get("images"),
        phase="forward",
        convention="full",
    ).total
    rows = []
    for tool in ("operator counter", *TOOLS):
        model = build_model(config, attention).eval()  # a new one each: some tools leave hooks behind
        model.config.use_cache = False
        batch = make_batch(model.config, workload)
        error = None
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                counted = TOOLS[tool](model, batch) if tool in TOOLS else witness.count(model, batch, "forward").total
        except Exception as raised:
            counted, error = None, f"{type(raised).__name__}: {raised}".split("\n")[0][:160]
        rows.append(
            {"model": name, "attention": attention, "tool": tool, "counted": counted, "flopcalc": analytic}
            | ({"error": error} if error else {})
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [row for name in CASES for attention in ("sdpa", "eager") for row in measure(name, attention)]
    versions = {name: metadata.version(name) for name in ("torch", "transformers", *TOOLS)}
    found = {"schema": 1, "date": datetime.now(UTC).date().isoformat(), "versions": versions, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
