"""LoRA, QLoRA and fp8 steps on a GPU: what the number formats of products cost, beside what `flopcalc predict` says.

Fixed before anything was measured:

- `lora-…`: PEFT's LoRA (rank 16) on all linear layers. PEFT keeps adapters in float32, so without autocast they compute
  in float32; `autocast` runs the same step under torch.autocast in bf16.
- `qlora-…`: the same over weights in nf4 (bitsandbytes), computed in bf16. Left out where bitsandbytes is not there.
- `prefill-…`: a prefill in bf16, and with every linear layer but the head through torch._scaled_mm in fp8, inputs
  scaled by their own maximum.
- Steps are timed without pause, as in predict_error.py; some are profiled, which gives the device's time by operator.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flopcalc.measure.predictor.runs import Runner

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
_RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Name -> preset, layers, batch, length, recomputation, kind, autocast, profiled.
CASES: dict[str, tuple[str, int, int, int, str, str, bool, bool]] = {
    "lora-7b": ("llama-2-7b", 32, 4, 2048, "full", "lora", False, False),
    "lora-7b-8": ("llama-2-7b", 8, 4, 2048, "full", "lora", False, True),
    "lora-7b-8-autocast": ("llama-2-7b", 8, 4, 2048, "full", "lora", True, True),
    "lora-7b-8-plain": ("llama-2-7b", 8, 4, 1024, "none", "lora", False, False),
    "lora-3b-12": ("llama-3.2-3b", 12, 3, 1500, "none", "lora", False, False),
    "lora-3b-12-autocast": ("llama-3.2-3b", 12, 3, 1500, "none", "lora", True, False),
    "qlora-7b-8": ("llama-2-7b", 8, 4, 2048, "full", "qlora", True, True),
    "prefill-8b-bf16": ("llama-3.1-8b", 8, 4, 2048, "none", "bf16", False, False),
    "prefill-8b-fp8": ("llama-3.1-8b", 8, 4, 2048, "none", "fp8", False, True),
    # Models and lengths that no constant was fitted on: results/formats_blind.json.
    "blind-lora-mistral": ("mistral-7b", 10, 2, 1536, "full", "lora", False, False),
    "blind-lora-mistral-autocast": ("mistral-7b", 10, 2, 1536, "full", "lora", True, False),
    "blind-lora-qwen": ("qwen2.5-7b", 8, 4, 1024, "none", "lora", False, False),
    "blind-lora-qwen-autocast": ("qwen2.5-7b", 8, 4, 1024, "none", "lora", True, False),
    "blind-lora-qwen3-8b": ("qwen3-8b", 12, 3, 2048, "full", "lora", False, False),
    "blind-prefill-mistral-fp8": ("mistral-7b", 10, 4, 2048, "none", "fp8", False, False),
}


def make_case(name: str) -> Json:
    from flopcalc.measure.predictor import runs

    _, _, batch, seq, again, kind, _, _ = CASES[name]
    phase = "train" if kind in ("lora", "qlora") else "prefill"
    return runs.make_case(name, phase, batch, seq, recompute=again)


def get_config(name: str) -> Json:
    from flopcalc.measure.predictor.runs import cut_config

    return cut_config(*CASES[name][:2])


class FormatsRunner(Runner):
    """A runner whose models get adapters, narrow weights or fp8 products."""

    def _take(self, name: str) -> None:
        if name == self.name:
            return
        super()._take(name)
        kind = CASES[name][5]
        if kind == "qlora":
            narrow_weights(self.bench.torch, self.model)
        if kind in ("lora", "qlora"):
            self.model = add_lora(self.model)
        if kind == "fp8":
            use_fp8(self.bench.torch, self.model)

    def _set_optimizer(self, name: str) -> None:
        if name != self.optimizer_name:
            trained = [each for each in self.model.parameters() if each.requires_grad]
            self.optimizer = self.bench.torch.optim.AdamW(trained, lr=1e-5, fused=self.bench.is_gpu)
            self.optimizer_name = name

    def make_step(self, case: Json) -> Callable[[], Any]:
        step = super().make_step(case)
        torch = self.bench.torch
        has_autocast = CASES[case["model"]][6]
        kind = "cuda" if self.bench.is_gpu else "cpu"

        def run() -> None:
            with torch.autocast(kind, torch.bfloat16) if has_autocast else contextlib.nullcontext():
                step()

        return run


def add_lora(model: Any) -> Any:
    """PEFT's LoRA on all linear layers, adapters in float32 as PEFT keeps them."""
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    made = get_peft_model(model, LoraConfig(r=_RANK, lora_alpha=32, target_modules=list(TARGETS)))
    return made.base_model.model


def narrow_weights(torch: Any, model: Any) -> None:
    """Linear layers in nf4, as bitsandbytes computes with them in bf16."""
    import bitsandbytes as bnb

    for parent, name, layer in _list_linears(torch, model):
        made = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
            compress_statistics=True,
        )
        weight = bnb.nn.Params4bit(
            layer.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        made.weight = weight
        setattr(parent, name, made.to(layer.weight.device))


def use_fp8(torch: Any, model: Any) -> None:
    """Linear layers through torch._scaled_mm, one scale per tensor, inputs scaled by their own maximum."""
    kind, most = torch.float8_e4m3fn, 448.0

    class Scaled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            weight = layer.weight.data
            self.scale = weight.abs().max().float() / most
            self.weight = (weight.float() / self.scale).to(kind)

        def forward(self, x: Any) -> Any:
            rows = x.reshape(-1, x.shape[-1])
            scale = rows.abs().max().float() / most
            narrow = (rows / scale.to(rows.dtype)).to(kind)
            made = torch._scaled_mm(
                narrow, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
            )
            return made.view(*x.shape[:-1], -1)

    for parent, name, layer in _list_linears(torch, model):
        setattr(parent, name, Scaled(layer))


def _list_linears(torch: Any, model: Any) -> list[tuple[Any, str, Any]]:
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, torch.nn.Linear) and name in TARGETS
    ]


def measure(out: Path, names: list[str], device: str) -> None:
    """Time the cases; keep what is there after each."""
    from flopcalc.base.data import find_version
    from flopcalc.measure.calibrate.provenance import describe_machine

    about = {
        **describe_machine(device),
        "peft": find_version("peft"),
        "bitsandbytes": find_version("bitsandbytes"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    kept: Json = {"provenance": about, "cases": [], "failures": []}
    for name in names:
        begun = time.monotonic()
        runner = FormatsRunner(device, get_config, work_s=0.6)
        try:
            found = runner.measure(make_case(name), profiled=CASES[name][7])
            kept["cases"].append({**found, "kind": CASES[name][5], "autocast": CASES[name][6]})
            print(f"{time.monotonic() - begun:6.1f} s  {name}  {found['seconds']}", flush=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            kept["failures"].append({"case": name, "reason": reason})
            print(f"{time.monotonic() - begun:6.1f} s  {name}  failed: {reason}", flush=True)
        runner.drop()
        out.write_text(json.dumps(kept))


# --- fit and report ---------------------------------------------------------------------------------------------------
def read(path: Path) -> Json:
    found: Json = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    return found


def fit_dequantize(measured: Json) -> list[float]:
    """Seconds of a call and of a byte: weights of four bits made whole."""
    whole: list[tuple[float, float]] = []
    for case in measured["cases"]:
        for name, _, shapes, _, calls, launches, us, _ in case.get("operators", ()):
            if name == "bitsandbytes::gemm_4bit" and launches % calls == 0:
                sizes = json.loads(shapes) if shapes else []
                whole.append((2.5 * 2 * sizes[1][0], us * 1e-6 / calls))  # two weights a byte
    return _draw_line(whole)


def _draw_line(points: list[tuple[float, float]]) -> list[float]:
    """Start and slope of the least squares of relative errors, neither below 0."""
    from flopcalc.measure.predictor.fit.solvers import round_digits, solve_nonnegative

    return round_digits(solve_nonnegative([((1.0, size), seconds) for size, seconds in points]))


def compare(case: Json, factor: float = 1.0) -> Json:
    """One case: measured and predicted."""
    from flopcalc import predict

    name, kind = case["model"], case["kind"]
    options: Json = {}
    if kind in ("lora", "qlora"):
        options = {
            "lora": {"r": _RANK, "targets": list(TARGETS)},
            "autocast": case["autocast"],
            "recompute": case["recompute"],
        }
    if kind == "qlora":
        options["weights"] = "nf4"
    found = predict(
        get_config(name),
        device="h200",
        batch_size=case["batch"],
        seq_len=case["seq"],
        phase=case["phase"],
        advise=False,
        host_factor=factor,
        transformers="5.17",
        **options,
    )
    low, mid, high = found.step_time_s
    return {"case": name, "measured_s": case["seconds"], "predicted_s": mid, "bound": found.bound,
            "is_inside": low <= case["seconds"] <= high}  # fmt: skip


def report(measured: Json) -> str:
    """Every case beside its prediction; fp8 is measured, not predicted."""
    from flopcalc.base.text_table import format_grid
    from flopcalc.prediction.kernels.constants import load_predictor

    constants = load_predictor("h200-sxm")
    assert constants is not None
    rows = []
    for case in measured["cases"]:
        if case["kind"] == "fp8":
            rows.append([case["model"], "", f"{1e3 * case['seconds']:.1f}", "", "", ""])
            continue
        factor = case["probe_s"] / constants["probe_s"]["train" if case["phase"] == "train" else "forward"]
        row = compare(case, factor)
        error = row["predicted_s"] / row["measured_s"] - 1
        rows.append(
            [
                row["case"],
                row["bound"],
                f"{1e3 * row['measured_s']:.1f}",
                f"{1e3 * row['predicted_s']:.1f}",
                f"{100 * error:+.1f} %",
                "yes" if row["is_inside"] else "no",
            ]
        )
    return format_grid(["case", "bound", "measured ms", "predicted ms", "error", "inside"], rows, "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="measure, and write here; without: report what was measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--measured", type=Path, default=RESULTS / "formats_steps.json.gz")
    parser.add_argument("names", nargs="*", default=list(CASES))
    given = parser.parse_args()
    if given.out is None:
        print(report(read(given.measured)))
        return 0
    measure(given.out, given.names or list(CASES), given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
