"""Three steps of a diffusion transformer on a GPU: how long they take, and which operators they run.

    python benchmarks/diffusion_steps.py --out DIR                       SD3 medium at 1024x1024; about 2 minutes
    python benchmarks/diffusion_steps.py --out DIR --model flux.1-dev    Flux: 24 GB of weights; about 4 minutes
    python benchmarks/diffusion_steps.py --out DIR --tiny                a tiny model: tries the script, also on a CPU
    python benchmarks/diffusion_steps.py --show FILE                     the tables; needs no torch
    python benchmarks/diffusion_steps.py --predict FILE                  predicts a file's steps again; needs no torch

The steps: one sampling step, one with guidance (two samples), one training step of LoRA on attention with gradient
checkpointing. Weights are random. Writes DIR/diffusion_steps.json after every step: the median time, FLOPs, MFU, what
`flopcalc predict` says, and each operator with its calls and its time on the device, as torch's profiler sees them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# The checkout that this script stands in, also where flopcalc is not installed.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import FlopcalcError
from flopcalc.base.text_table import format_grid
from flopcalc.core.model.config import load_config
from flopcalc.hardware.devices import find_device

Row = dict[str, Any]
SCHEMA = 1
NAME = "diffusion_steps.json"
MODELS = ("sd3-medium", "flux.1-dev")
TINY: Row = {
    "_class_name": "SD3Transformer2DModel", "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
    "num_attention_heads": 2, "attention_head_dim": 12, "joint_attention_dim": 10, "caption_projection_dim": 24,
    "pooled_projection_dim": 6, "pos_embed_max_size": 8,
}  # fmt: skip
# name -> samples, and whether it trains
STEPS = {"sample": (1, False), "guided": (2, False), "lora": (1, True)}
LORA = {"r": 16, "targets": ["to_q", "to_k", "to_v", "to_out.0"]}


def make_step(model: Any, inputs: Row, trains: bool) -> Callable[[], None]:
    import torch

    def sample() -> None:
        with torch.no_grad():
            model(**inputs, return_dict=False)

    def train() -> None:
        model.zero_grad()
        model(**inputs, return_dict=False)[0].float().square().mean().backward()

    return train if trains else sample


def take_times(step: Callable[[], None], device: str, warmup: int, runs: int) -> list[float]:
    """Seconds of each run; the device is waited for."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for number in range(warmup + runs):
        wait()
        start = time.perf_counter()
        step()
        wait()
        if number >= warmup:
            times.append(time.perf_counter() - start)
    return times


def list_operators(step: Callable[[], None], device: str) -> list[Row]:
    """Every operator of one run that has time of its own on the device, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as seen:
        step()
    rows = []
    for event in seen.key_averages(group_by_input_shape=True):
        took = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if took > 0 and event.key.startswith("aten::"):
            rows.append(
                {"name": event.key, "shapes": str(event.input_shapes), "calls": event.count, "us": round(took, 1)}
            )
    return sorted(rows, key=lambda row: -row["us"])


def predict_step(name: str, device: str, size: int, batch: int, trains: bool) -> Row | None:
    """What was predicted of the same step, where the device is one that predictions know."""
    from flopcalc.prediction.step import predict_estimate

    recipe = {"lora": LORA, "recompute": "full"} if trains else None
    phase = "train" if trains else "forward"
    try:
        estimate = estimate_flops(
            name, images=[(size, size)], batch_size=batch, phase=phase, parts="denoiser", recipe=recipe
        )
        found = predict_estimate(estimate, device=device, optimizer="none" if trains else "adamw", advise=False)
    except FlopcalcError as error:
        return {"error": str(error)}
    return dict(found.step_time_s._asdict())


def measure(options: argparse.Namespace) -> list[Row]:
    """All steps; what is there is written after each."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    from lab.denoisers import build_denoiser, make_denoiser_inputs

    device = "cpu" if options.tiny else "cuda"
    place: Row = {"device": device, "dtype": torch.float32 if options.tiny else torch.bfloat16}
    config = TINY if options.tiny else load_config(options.model).config["transformer"]
    size = 64 if options.tiny else options.size
    torch.manual_seed(0)
    model = build_denoiser(config, **place)
    bound = bind(config)
    grid = bound.latents.make_grid(size, size)
    text = 7 if options.tiny else bind(options.model).pipeline.count_read(bind(options.model).pipeline.count_text())
    rows: list[Row] = []
    for name in options.steps.split(","):
        batch, trains = STEPS[name]
        if trains:
            model.requires_grad_(False)
            settings = LoraConfig(r=LORA["r"], lora_alpha=LORA["r"], target_modules=LORA["targets"])
            inject_adapter_in_model(settings, model)
            model.enable_gradient_checkpointing()
        model.train(trains)
        inputs = make_denoiser_inputs(config, batch, text, grid, **place)
        step = make_step(model, inputs, trains)
        times = take_times(step, device, options.warmup, options.runs)
        estimate = estimate_flops(model, batch=inputs, phase="train" if trains else "forward")
        seconds = statistics.median(times)
        row: Row = {
            "step": name, "model": "tiny" if options.tiny else options.model, "batch": batch, "size": size,
            "text": text,
            "seconds": seconds, "fastest": min(times), "slowest": max(times), "flops": estimate.total,
            "hardware_flops": estimate.total_under("hardware"), "flops_per_s": estimate.total / seconds,
            "predicted": None if options.tiny else predict_step(options.model, options.device_id, size, batch, trains),
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "operators": list_operators(step, device),
        }  # fmt: skip
        rows.append(row)
        write(rows, options)
        print(f"{name}: {seconds:.4f} s, {row['flops_per_s'] / 1e12:.1f} TFLOP/s", flush=True)
    return rows


def write(rows: list[Row], options: argparse.Namespace) -> None:
    import diffusers
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() and not options.tiny else "cpu"
    made_with = {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "device": where,
        "commit": os.environ.get("FLOPCALC_COMMIT", ""),
    }
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, NAME)
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump({"schema": SCHEMA, "made_with": made_with, "rows": rows}, file, indent=1)
    os.replace(f"{path}.part", path)


def predict_again(path: str, device: str) -> None:
    """Writes a file with what is predicted now."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    for row in found["rows"]:
        row["predicted"] = predict_step(row["model"], device, row["size"], *STEPS[row["step"]])
    with open(path, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)


def show(path: str) -> str:
    """The tables of a file."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    lines = []
    for row in found["rows"]:
        predicted = row["predicted"] or {}
        guess = (
            f"{predicted['mid']:.3f} ({predicted['low']:.3f} to {predicted['high']:.3f})" if "mid" in predicted else "-"
        )
        lines.append([row["step"], row["batch"], f"{row['seconds']:.3f}", guess, f"{row['flops_per_s'] / 1e12:.1f}"])
    tables = [format_grid(["step", "batch", "s", "predicted s", "TFLOP/s"], lines)]
    for row in found["rows"]:
        whole = sum(each["us"] for each in row["operators"]) or 1
        shown = [
            [each["name"], each["calls"], f"{each['us'] / 1000:.3f}", f"{100 * each['us'] / whole:.1f} %"]
            for each in row["operators"][:12]
        ]
        tables.append(f"{row['step']}\n" + format_grid(["operator", "calls", "ms", "share"], shown))
    return "\n\n".join(tables)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--show", metavar="FILE")
    parser.add_argument("--predict", metavar="FILE")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"of {', '.join(STEPS)}")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--size", type=int, default=1024, help="pixels along a side")
    parser.add_argument("--device-id", default="h200-sxm", help="the device that predictions are made for")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.show is not None:
        print(show(options.show))
        return 0
    if options.predict is not None:
        predict_again(options.predict, options.device_id)
        return 0
    if options.out is None:
        parser.error("--out DIR is missing")
    find_device(options.device_id)
    measure(options)
    print(show(os.path.join(options.out, NAME)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
