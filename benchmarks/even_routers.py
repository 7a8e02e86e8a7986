"""FLOPs that tensor cores execute in training steps whose routers deal evenly, beside `--convention hardware`.

    python benchmarks/even_routers.py predict                    # write what we say about the new shapes, and commit it
    python benchmarks/even_routers.py measure --out FILE         # on a GPU with counters
    python benchmarks/even_routers.py report [--measured FILE]   # the error of every step

The protocol, fixed before anything was measured:

- KNOWN holds steps that our default was wrong for, while it modelled routers with random weights. NEW holds six shapes
  that nobody had measured, small and odd ones among them; what we say about them is committed first.
- Models are HF's, with random bf16 weights. A hook deals token t's k choices to the experts (t * k + j) mod E, so that
  each expert of a layer gets the same number of rows, or one more. Scores stay the router's own.
- A step is forward and backward with HF's sdpa, counted once by the GPU's own counter of tensor cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import executed_steps
import expert_steps

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
MEASURED, PREDICTED = RESULTS / "even_routers.json", RESULTS / "even_routers_predicted.json"
_COMMON = {"max_position_embeddings": 8192, "tie_word_embeddings": False}


def _granite(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "granitemoe", "hidden_size": hidden, "intermediate_size": inner, "num_local_experts": experts,
        "num_experts_per_tok": top, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 192, "vocab_size": 49152, **_COMMON,
    }  # fmt: skip


def _qwen2(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "qwen2_moe", "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "moe_intermediate_size": inner, "shared_expert_intermediate_size": 2 * inner, "num_experts": experts,
        "num_experts_per_tok": top, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128, "vocab_size": 64000, "decoder_sparse_step": 1, "mlp_only_layers": [],
        **_COMMON,
    }  # fmt: skip


def _glm4(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "glm4_moe", "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "moe_intermediate_size": inner, "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": top,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 128, "num_key_value_heads": 2, "head_dim": 128,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 64000, **_COMMON,
    }  # fmt: skip


def _deepseek_v3(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "deepseek_v3", "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "moe_intermediate_size": inner, "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": top,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "vocab_size": 64000, **_COMMON,
    }  # fmt: skip


# Name -> config, or a preset and how many layers are kept.
CONFIGS: dict[str, Json | tuple[str, int]] = {
    "mixtral-1024": expert_steps.CONFIGS["mixtral-1024"],
    "olmoe-1b-7b": expert_steps._olmoe(2048, 1024, 64, 8, 16),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 12),
    "qwen3-moe-1024": expert_steps.CONFIGS["qwen3-moe-1024"],
    "deepseek-v3-1536": _deepseek_v3(1536, 768, 48, 6, 5),
    "deepseek-v2-lite": ("deepseek-v2-lite", 5),
    "granitemoe-1152": _granite(1152, 512, 40, 8, 8),
    "olmoe-1024": expert_steps.CONFIGS["olmoe-1024"],
    "mixtral-1280": expert_steps._mixtral(1280, 2816, 6, 2, 6),
    "qwen2-moe-1280": _qwen2(1280, 704, 30, 4, 6),
    "glm4-moe-1536": _glm4(1536, 640, 24, 6, 6),
    "deepseek-v3-1024": _deepseek_v3(1024, 512, 20, 4, 6),
}
KNOWN: tuple[tuple[str, int, int], ...] = (
    ("mixtral-1024", 1, 1000), ("mixtral-1024", 4, 2048), ("olmoe-1b-7b", 2, 1024), ("olmoe-1b-7b", 6, 2048),
    ("qwen3-30b-a3b", 2, 2048), ("qwen3-30b-a3b", 1, 4096), ("qwen3-moe-1024", 2, 2048), ("deepseek-v3-1536", 2, 1024),
    ("deepseek-v2-lite", 3, 1250),
)  # fmt: skip
NEW: tuple[tuple[str, int, int], ...] = (
    ("granitemoe-1152", 1, 509),
    ("olmoe-1024", 3, 777),
    ("mixtral-1280", 1, 311),
    ("qwen2-moe-1280", 2, 1013),
    ("glm4-moe-1536", 2, 643),
    ("deepseek-v3-1024", 5, 391),
)
CASES = {f"{model} {batch}x{seq}": (model, batch, seq) for model, batch, seq in (*KNOWN, *NEW)}


def get_config(model: str) -> Json:
    from flopcalc.measure.predictor.runs import cut_config

    found = CONFIGS[model]
    return found if isinstance(found, dict) else cut_config(*found)


def deal_evenly(model: Any) -> int:
    """Replace what every router of a model chooses, not how it weighs it; how many routers there are."""
    many = 0
    for path, module in model.named_modules():
        if path.endswith(".experts") and hasattr(module, "num_experts"):
            module.register_forward_pre_hook(_choose_evenly)
            many += 1
    if not many:
        raise ValueError("no module with experts was found")
    return many


def _choose_evenly(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Token t takes the experts (t * k + j) mod E, which differ as long as k is no more than E."""
    hidden, chosen, *rest = given
    even = chosen.new_ones(chosen.numel()).cumsum(0) - 1
    return hidden, (even % int(module.num_experts)).reshape(chosen.shape).to(chosen.dtype), *rest


def measure(out: Path, device: str, is_tiny: bool) -> None:
    """One step of each case under the counter."""
    from flopcalc.measure.predictor.narrow import narrow
    from flopcalc.measure.predictor.runs import make_case

    cases = {
        name: make_case(model, "train", *((1, 37) if is_tiny else (batch, seq)))
        for name, (model, batch, seq) in CASES.items()
    }
    configs = (lambda model: {**narrow(get_config(model), 2), "vocab_size": 256}) if is_tiny else get_config
    command = f"python benchmarks/even_routers.py measure{' --tiny' * is_tiny}"
    executed_steps.measure_cases(out, device, command, cases, configs, lambda runner: deal_evenly(runner.model))


def count(name: str) -> int:
    """FLOPs of the same step as `estimate --convention hardware --device h200 --routing even` counts them."""
    from flopcalc import estimate_flops

    model, batch, seq = CASES[name]
    return estimate_flops(
        get_config(model), batch_size=batch, seq_len=seq, convention="hardware", device="h200", routing="even"
    ).total


def predict(out: Path) -> None:
    """Write what we say about the new shapes."""
    from flopcalc.base.data import find_commit

    new = [f"{model} {batch}x{seq}" for model, batch, seq in NEW]
    kept = {
        "commit": find_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "executed_flops": {name: count(name) for name in new},
    }
    out.write_text(json.dumps(kept, indent=1) + "\n")


def list_errors(measured: Path, predicted: Path = PREDICTED) -> list[tuple[str, int, int, float]]:
    """Step, FLOPs executed and counted, and the error; for new shapes, of what was committed before."""
    said = json.loads(predicted.read_text())["executed_flops"]
    found = []
    for case in json.loads(measured.read_text())["cases"]:
        name, executed = case["case"], case["executed_flops"]
        counted = said[name] if name in said else count(name)
        found.append((name, executed, counted, counted / executed - 1))
    return found


def report(measured: Path) -> str:
    """Every step: executed, counted, and how far the count is off."""
    from flopcalc.base.text_table import format_grid

    new = {f"{model} {batch}x{seq}" for model, batch, seq in NEW}
    rows = [
        [
            name,
            "yes" if name in new else "",
            f"{executed / 1e12:.3f} T",
            f"{counted / 1e12:.3f} T",
            f"{100 * error:+.2f} %",
        ]
        for name, executed, counted, error in list_errors(measured)
    ]
    return format_grid(["step", "new", "executed", "counted", "error"], rows, "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("predict", "measure", "report"))
    parser.add_argument("--out", type=Path, help="where predict and measure write")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="report: what was measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="measure: stand-ins for a CPU")
    given = parser.parse_args()
    if given.command == "report":
        print(report(given.measured))
    elif given.command == "predict":
        predict(given.out or PREDICTED)
    else:
        measure(given.out or MEASURED, given.device, given.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
