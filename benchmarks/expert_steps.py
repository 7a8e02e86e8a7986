"""Steps of models with experts, small to middle: measure them on a GPU, then compare what `flopcalc predict` says.

The protocol, fixed before anything was measured:

- FIT holds steps that are timed and profiled. What the profiles show goes into the model of experts' products and of
  the work over routed rows.
- TEST holds other sizes, batches and lengths, timed alone. Nobody looks at them before the model is frozen, that is
  committed; then `report` predicts every case once.
- Steps are timed without pause by the device's clock, as the large steps of predict_error.py: the middle of all steps.
- A fixed probe, timed around each case, tells how many times longer than the calibrated host this one takes; `report`
  predicts with that factor, as predict_error.py does.
- Weights are HF's own random ones, so a router prefers few experts; how many rows each expert gets is kept.
- Versions of transformers run other code for experts. A run is of one version, named in its provenance.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
_COMMON = {"max_position_embeddings": 8192, "tie_word_embeddings": False}


def _olmoe(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "olmoe", "hidden_size": hidden, "intermediate_size": inner, "num_experts": experts,
        "num_experts_per_tok": top, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128, "vocab_size": 50304, **_COMMON,
    }  # fmt: skip


def _mixtral(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": inner, "num_local_experts": experts,
        "num_experts_per_tok": top, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 256, "vocab_size": 32000, "sliding_window": None, **_COMMON,
    }  # fmt: skip


def _qwen3(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "qwen3_moe", "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": top,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 64000, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **_COMMON,
    }  # fmt: skip


def _deepseek(hidden: int, inner: int, experts: int, top: int, layers: int) -> Json:
    return {
        "model_type": "deepseek_v2", "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "moe_intermediate_size": inner, "n_routed_experts": experts, "n_shared_experts": 2,
        "num_experts_per_tok": top, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "vocab_size": 64000,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, **_COMMON,
    }  # fmt: skip


CONFIGS: dict[str, Json] = {
    "olmoe-2048": _olmoe(2048, 1024, 64, 8, 4),
    "olmoe-1024": _olmoe(1024, 512, 32, 4, 8),
    "mixtral-1024": _mixtral(1024, 3584, 8, 2, 8),
    "qwen3-moe-1024": _qwen3(1024, 384, 64, 8, 8),
    "qwen3-moe-2048": _qwen3(2048, 768, 128, 8, 4),
    "deepseek-v2-2048": _deepseek(2048, 1408, 64, 6, 5),
    "deepseek-v2-1024": _deepseek(1024, 704, 32, 4, 8),
    "olmoe-1536": _olmoe(1536, 768, 48, 6, 6),
    "mixtral-1536": _mixtral(1536, 5376, 8, 2, 6),
    "mixtral-2048": _mixtral(2048, 4096, 16, 2, 5),
    "qwen3-moe-1536": _qwen3(1536, 512, 96, 6, 6),
    "deepseek-v2-1280": _deepseek(1280, 896, 40, 4, 7),
}
# Model, batch, length, recomputation.
FIT: tuple[tuple[str, int, int, str], ...] = (
    ("olmoe-2048", 4, 1024, "none"),
    ("olmoe-2048", 1, 4096, "full"),
    ("olmoe-1024", 8, 1024, "none"),
    ("mixtral-1024", 8, 1024, "none"),
    ("mixtral-1024", 2, 2048, "none"),
    ("qwen3-moe-1024", 8, 1024, "none"),
    ("qwen3-moe-2048", 4, 1024, "none"),
    ("deepseek-v2-2048", 4, 1024, "none"),
    ("deepseek-v2-1024", 8, 1024, "none"),
)
TEST: tuple[tuple[str, int, int, str], ...] = (
    ("olmoe-1536", 6, 1360, "none"),
    ("olmoe-1536", 3, 2464, "full"),
    ("olmoe-2048", 3, 1500, "none"),
    ("mixtral-1536", 6, 1360, "none"),
    ("mixtral-1536", 4, 1880, "none"),
    ("mixtral-2048", 5, 1200, "none"),
    ("mixtral-2048", 3, 2464, "full"),
    ("qwen3-moe-1536", 6, 1360, "none"),
    ("qwen3-moe-1536", 3, 2464, "none"),
    ("qwen3-moe-2048", 3, 1500, "full"),
    ("deepseek-v2-1280", 6, 1360, "none"),
    ("deepseek-v2-1280", 4, 1880, "none"),
    ("deepseek-v2-2048", 3, 1500, "none"),
)


def get_config(name: str) -> Json:
    return CONFIGS[name]


def list_cases(which: str) -> list[Json]:
    """The steps of FIT or of TEST, as the predictor's runs describe them."""
    from flopcalc.measure.predictor.runs import make_case

    chosen = FIT if which == "fit" else TEST
    return [make_case(model, "train", batch, seq, recompute=again) for model, batch, seq, again in chosen]


def measure(out: Path, which: str, device: str) -> None:
    """Time the steps of FIT with their profiles, or those of TEST; keep what is there after each."""
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.predictor.runs import Runner, name_case

    kept: Json = {"provenance": {**describe_machine(device), "date": _tell_date()}, "cases": [], "failures": []}
    runner = Runner(device, get_config, work_s=0.6)
    for case in list_cases(which):
        begun = time.monotonic()
        try:
            found = runner.measure(case, profiled=which == "fit")
            found["rows_per_expert"] = find_routes(runner, case)
            kept["cases"].append(found)
            print(f"{time.monotonic() - begun:6.1f} s  {name_case(case)}", flush=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            kept["failures"].append({"case": name_case(case), "reason": reason})
            print(f"{time.monotonic() - begun:6.1f} s  {name_case(case)}  failed: {reason}", flush=True)
            runner.drop()
        out.write_text(json.dumps(kept))


def _tell_date() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def find_routes(runner: Any, case: Json) -> list[list[int]]:
    """How many rows each expert of each layer gets, in one forward pass of the same batch."""
    torch = runner.bench.torch
    found: list[list[int]] = []
    hooks = []
    for path, module in runner.model.named_modules():
        if path.endswith(".experts") and hasattr(module, "num_experts"):

            def note(own: Any, given: Any) -> None:
                found.append(torch.bincount(given[1].flatten(), minlength=int(own.num_experts)).tolist())

            hooks.append(module.register_forward_pre_hook(note))
    with torch.no_grad():
        runner.model(**runner._make_inputs(case), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


# --- report -----------------------------------------------------------------------------------------------------------
def compare(case: Json, version: str) -> Json:
    """One case: measured, predicted, error, inside the interval or not."""
    from flopcalc import predict
    from flopcalc.prediction.kernels.constants import load_predictor

    constants = load_predictor("h200-sxm")
    assert constants is not None
    pace = case["probe_s"] / constants["probe_s"]["train"]
    found = predict(
        get_config(case["model"]), device="h200", batch_size=case["batch"], seq_len=case["seq"],
        recompute=case["recompute"], advise=False, transformers=version, host_factor=pace,
    )  # fmt: skip
    low, mid, high = found.step_time_s
    return {
        **{key: case[key] for key in ("model", "batch", "seq", "recompute")},
        "host_factor": round(pace, 3),
        "measured_s": case["seconds"],
        "predicted_s": round(mid, 6),
        "low_s": round(low, 6),
        "high_s": round(high, 6),
        "bound": found.bound,
        "error": round(mid / case["seconds"] - 1, 4),
        "is_inside": low <= case["seconds"] <= high,
    }


def report(measured: Path) -> str:
    """All cases of a file and the sums."""
    from flopcalc.base.text_table import format_grid

    kept = json.loads(gzip.decompress(measured.read_bytes()) if measured.suffix == ".gz" else measured.read_bytes())
    version = kept["provenance"]["transformers"]
    rows = [compare(case, version) for case in kept["cases"]]
    errors = [abs(row["error"]) for row in rows]
    lines = [
        [row["model"], f"{row['batch']} × {row['seq']}", row["recompute"], row["bound"], f"{row['host_factor']:.2f}",
         f"{1e3 * row['measured_s']:.2f}", f"{1e3 * row['predicted_s']:.2f}", f"{100 * row['error']:+.1f} %",
         "yes" if row["is_inside"] else "no"]
        for row in rows
    ]  # fmt: skip
    head = ["model", "tokens", "recompute", "bound", "host factor", "measured ms", "predicted ms", "error", "inside"]
    inside = sum(row["is_inside"] for row in rows)
    return (
        f"transformers {version}: {len(rows)} steps, {100 * statistics.median(errors):.1f} % median error, "
        f"{100 * max(errors):.1f} % worst, {inside} inside their interval\n\n{format_grid(head, lines, 'github')}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("measure", "report"))
    parser.add_argument("--cases", choices=("fit", "test"), default="test", help="measure: which steps")
    parser.add_argument("--out", type=Path, help="measure: where to write")
    parser.add_argument("--measured", type=Path, help="report: what was measured")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.command == "report":
        print(report(given.measured))
        return 0
    measure(given.out, given.cases, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
