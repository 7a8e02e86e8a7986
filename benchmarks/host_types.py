"""What the code of model types takes on the host, of types that the shipped calibration did not measure.

Runs on a GPU machine: small steps of narrow models of each type, at two depths, each between runs of the probe, as
`flopcalc calibrate --predictor --suite full` does it. `predict_error.py refit` adds what was found to the shipped
predictor. Only ratios to the probe are used, so another machine than the calibrated one can measure them.

    python benchmarks/host_types.py [--kinds] [--out FILE] [--device cuda] [TYPE …]

`--kinds`: encoders, encoder-decoders, sound, images alone and rarer decoders, whose configs are in
data/host_kinds.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

from flopcalc.base.vocabulary import CallKernel, Phase
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.workload import Workload
from flopcalc.measure.hf.compare import make_load
from flopcalc.measure.predictor.fit.cases import ModelledCase, bind_case, model_cases
from flopcalc.measure.predictor.narrow import MARK, narrow
from flopcalc.measure.predictor.runs import Runner, make_case, name_case
from flopcalc.prediction.build_work import make_work
from lab.blind.kinds import KindsRunner

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def make_text(kind: str, layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int, **rest: Any) -> Json:
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, **rest,
    }  # fmt: skip


def _make_tower(kind: str, image: int, patch: int, **rest: Any) -> Json:
    return {"model_type": kind, "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
            "num_attention_heads": 16, "image_size": image, "patch_size": patch, **rest}  # fmt: skip


_LLAMA = make_text("llama", 32, 4096, 14336, 32, 8, 49280)
_EXPERTS: Json = {"num_experts_per_tok": 4, "moe_intermediate_size": 640}
# Model type -> a preset, or a config of ours where there is none; sequence length and patches of steps with images.
TYPES: dict[str, tuple[str | Json, int, list[list[int]]]] = {
    "llama": ("llama-3.2-1b", 0, []),  # measured before, to compare machines
    "aya_vision": (
        {"model_type": "aya_vision", "image_token_index": 49000, "downsample_factor": 2, "tie_word_embeddings": True,
         "text_config": make_text("cohere2", 32, 4096, 14336, 32, 8, 49280, sliding_window=4096),
         "vision_config": _make_tower("siglip_vision_model", 364, 14, vision_use_head=False)},
        640, [[1, 26, 26]],
    ),
    "idefics3": (
        {"model_type": "idefics3", "image_token_id": 49000, "scale_factor": 2, "text_config": _LLAMA,
         "vision_config": _make_tower("idefics3_vision", 364, 14)},
        640, [[1, 26, 26]],
    ),
    "smolvlm": (
        {"model_type": "smolvlm", "image_token_id": 49000, "scale_factor": 4, "text_config": _LLAMA,
         "vision_config": _make_tower("smolvlm_vision", 512, 16)},
        320, [[1, 32, 32]],
    ),
    "internvl": (
        {"model_type": "internvl", "image_token_id": 49000, "tie_word_embeddings": False,
         "text_config": make_text("qwen2", 28, 3584, 18944, 28, 4, 49280),
         "vision_config": _make_tower("internvl_vision", 448, 14, image_size=[448, 448], patch_size=[14, 14],
                                      attention_bias=True, use_qk_norm=False, norm_type="layer_norm")},
        640, [[1, 32, 32]],
    ),
    "glm4v": ("glm-4.1v-9b", 640, [[1, 36, 36]]),
    "mistral3": ("mistral-small-3.1-24b", 640, [[1, 36, 36]]),
    "qwen3_vl_moe": ("qwen3-vl-30b-a3b", 640, [[1, 36, 36]]),
    "llava_next": ("llava-v1.6-mistral-7b", 0, []),
    "olmoe": (make_text("olmoe", 16, 2048, 1024, 16, 16, 49280, num_experts=16, num_experts_per_tok=4), 0, []),
    "granite": (make_text("granite", 40, 4096, 12800, 32, 8, 49280), 0, []),
    "glm4_moe": ("glm-4.5-air", 0, []),
    "phimoe": ("phi-3.5-moe", 0, []),
    "minimax_m2": ("minimax-m2", 0, []),
    "glm4_moe_lite": ("glm-4.7-flash", 0, []),
    "dots1": (
        make_text("dots1", 16, 2048, 768, 16, 16, 49280, n_routed_experts=16, n_group=1, topk_group=1,
                  first_k_dense_replace=1, n_shared_experts=1, **_EXPERTS), 0, [],
    ),
    "ernie4_5_moe": (
        make_text("ernie4_5_moe", 16, 2048, 768, 16, 4, 49280, moe_num_experts=16, moe_k=4, moe_intermediate_size=640,
                  moe_num_shared_experts=1, moe_layer_start_index=1), 0, [],
    ),
    "granitemoeshared": (
        make_text("granitemoeshared", 16, 2048, 768, 16, 4, 49280, num_local_experts=16, num_experts_per_tok=4,
                  shared_intermediate_size=512), 0, [],
    ),
    "hunyuan_v1_moe": (
        make_text("hunyuan_v1_moe", 16, 2048, 768, 16, 4, 49280, num_experts=16, moe_topk=4, head_dim=128), 0, [],
    ),
    "lfm2": ("lfm2-1.2b", 0, []),
    "cohere2": ("command-r7b", 0, []),
    "exaone4": ("exaone-4.0-32b", 0, []),
    "seed_oss": ("seed-oss-36b", 0, []),
    "ministral3": ("devstral-2-123b", 0, []),
    "falcon": ("falcon-7b", 0, []),
    "gptj": ("gpt-j-6b", 0, []),
    "glm4": (make_text("glm4", 40, 4096, 13696, 32, 2, 49280, head_dim=128), 0, []),
    "glm": (make_text("glm", 40, 4096, 13696, 32, 2, 49280, head_dim=128), 0, []),
    "olmo": (make_text("olmo", 32, 4096, 11008, 32, 32, 49280), 0, []),
    "nemotron": (make_text("nemotron", 32, 4096, 16384, 32, 8, 49280), 0, []),
    "ernie4_5": (make_text("ernie4_5", 18, 1024, 3072, 16, 2, 49280, head_dim=128), 0, []),
    "hunyuan_v1_dense": (make_text("hunyuan_v1_dense", 32, 4096, 14336, 32, 8, 49280, head_dim=128), 0, []),
    "arcee": (make_text("arcee", 36, 2560, 18432, 20, 4, 49280), 0, []),
    "apertus": (make_text("apertus", 32, 4096, 21504, 32, 8, 49280), 0, []),
}  # fmt: skip
# Model type -> a narrow config, the keys of its depths (a dot goes into a part), its work, what is asked besides, and
# whether gradients are checkpointed.
KINDS: dict[str, Json] = json.loads((Path(__file__).parent / "data" / "host_kinds.json").read_text())
_DEPTHS = (4, 12)
_STEPS = 10
# Not taken over: llama was measured before. A narrow tower of internvl takes 7 % less time than its operators suggest,
# but whole models (ten steps of blind tests) take 3 to 10 % more.
_NOT_USED = ("llama", "internvl")
NOT_RECORDED = "-tokens"  # the operators of an encoder-decoder's tokens were not recorded


def get_config(name: str) -> Json:
    """The narrow config of `TYPE-narrow-LAYERS`."""
    kind, _, layers = name.rpartition(MARK)
    if kind in KINDS:
        made: Json = copy.deepcopy(KINDS[kind]["config"])
        for key in KINDS[kind]["depths"]:
            part, _, last = key.rpartition(".")
            (made[part] if part else made)[last] = int(layers)
        return made
    source = TYPES[kind][0]
    return narrow(dict(source if isinstance(source, dict) else load_config(source).config), int(layers))


def list_cases(kinds: list[str]) -> list[Json]:
    """Training is measured twice, minutes apart: autograd has its own thread, on a core of its own speed."""
    once = {layers: [case for kind in kinds for case in _list_type(kind, layers)] for layers in _DEPTHS}
    again = [case for case in once[_DEPTHS[-1]] if case["phase"] == "train"]
    return [*(case for cases in once.values() for case in cases), *again]


def _list_type(kind: str, layers: int) -> list[Json]:
    model = f"{kind}{MARK}{layers}"
    if kind in KINDS:
        work, asked = {"batch": 1, **KINDS[kind]["work"]}, KINDS[kind].get("asked", {})
        attention = asked.get("attention_kernel", "sdpa")
        return [
            {**make_case(model, phase, 1, work.get("seq", 0), attention=attention, recompute=recompute),
             "work": {**work, "phase": phase}}
            for recompute in KINDS[kind].get("recompute", ["none"])
            for phase in KINDS[kind].get("phases", ("train", "forward"))
            if (phase, recompute) != ("forward", "full")
        ]  # fmt: skip
    _, seq, grids = TYPES[kind]
    found = [make_case(model, "train", 1, 64), make_case(model, "prefill", 1, 64)]
    if grids:
        found += [make_case(model, "train", 1, seq, grids), make_case(model, "prefill", 1, seq, grids)]
    return [*found, make_case(model, "decode", 1, 2, context=128)]


def _is_used(kind: str) -> bool:
    return kind not in _NOT_USED and not kind.endswith(NOT_RECORDED)


def read_steps(path: Path) -> list[ModelledCase]:
    """The steps that were measured, of the types whose host times are taken over."""
    measured: Json = json.loads(path.read_text())
    cases = [case for case in measured["cases"] if _is_used(case["model"].rpartition(MARK)[0])]
    about = measured["provenance"]
    if not any("work" in case for case in cases):
        return model_cases(cases, get_config, about["device_id"], about["transformers"])
    return [model_kind(case, about["device_id"], about["transformers"]) for case in cases]


def make_latents(work: Json) -> Workload:
    """What a denoiser sees in a step: latents and text."""
    phase: Phase = "train" if work["phase"] == "train" else "forward"
    return Workload(work["batch"], work["text"], phase=phase, grids=(tuple(work["grid"]),) * work["batch"])


def model_kind(case: Json, device: str, transformers: str) -> ModelledCase:
    """A step of KINDS and the work that the predictor sees in it."""
    config, work = get_config(case["model"]), case["work"]
    estimator = bind_case(case, config, device)
    load = make_latents(work) if "_class_name" in config else make_load(work)
    kernel: CallKernel = "eager" if case["attention"] == "eager" else ""
    made = make_work(estimator, load, optimizer=case["optimizer"], kernel=kernel, transformers=transformers)
    return ModelledCase(case, estimator, load, made)


def measure(out: Path, kinds: list[str], device: str) -> None:
    """Time the cases; keep what is there after each."""
    from flopcalc.measure.calibrate.provenance import describe_machine

    begun = time.monotonic()
    about = {
        **describe_machine(device),
        "command": "python benchmarks/host_types.py",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    kept: Json = {"provenance": about, "cases": [], "failures": []}
    runner: Runner = Runner(device, get_config)
    for case in list_cases(kinds):
        name = name_case(case)
        if any(name.startswith(f"{failed['model']}/") for failed in kept["failures"]):
            continue
        try:
            if "work" in case:
                asked = {"attention_kernel": "eager"} if case["attention"] == "eager" else {}
                asked |= {"recompute": case["recompute"]} if case["recompute"] != "none" else {}
                runner.drop()
                probes = runner.probes
                runner = KindsRunner(
                    device, {"config": get_config(case["model"]), "work": case["work"], "asked": asked}
                )
                runner.probes, runner.is_tried = probes, False
            kept["cases"].append({**runner.measure_host(case, _STEPS), "is_host": True})
            print(f"{time.monotonic() - begun:6.1f} s  {name}", flush=True)
        except Exception as error:
            runner.drop()
            reason = f"{type(error).__name__}: {error}"[:300]
            kept["failures"].append({"model": case["model"], "case": name, "reason": reason})
            print(f"{time.monotonic() - begun:6.1f} s  {name}  failed: {reason}", flush=True)
        out.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"default: all of {', '.join(TYPES)}")
    parser.add_argument("--kinds", action="store_true", help="all types of data/host_kinds.json instead")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    out = args.out or RESULTS / ("host_kinds.json" if args.kinds else "host_types.json")
    measure(out, args.types or list(KINDS if args.kinds else TYPES), args.device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
