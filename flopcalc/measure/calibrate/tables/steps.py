"""Table steps: whole training steps of text and vision-language models with fused AdamW in bf16: time, MFU, energy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flopcalc.base.vocabulary import FusedKernel, PickedKernel
from flopcalc.measure.calibrate.tables import Bench, Json, counts, get_device, round_digits, summarize
from flopcalc.measure.jobs.runner import Job

_STEPS = 8
_QWEN_ROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def _text(
    model_type: str, layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int, **rest: object
) -> Json:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "max_position_embeddings": 32768, **rest,
    }  # fmt: skip


# Published dims of Qwen2.5-0.5B, Llama-3.2-1B and Qwen2-VL-2B; heads are tied as they are there.
MODELS: dict[str, Json] = {
    "qwen2-0.5b": _text("qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "llama-1b": _text("llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "qwen2-vl-2b": {
        "model_type": "qwen2_vl",
        "text_config": _text("qwen2_vl_text", 28, 1536, 8960, 12, 2, 151936, rope_scaling=_QWEN_ROPE),
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16},
        "tie_word_embeddings": True,
        **_TOKENS,
    },
    "llama-8b-width": _text("llama", 4, 4096, 14336, 32, 8, 128256, head_dim=128),
}
_QUICK = ("qwen2-0.5b", "llama-1b", "qwen2-vl-2b")
_IMAGE = [[1, 36, 52]]
_SIZES = ((1, 1024), (4, 2048), (1, 4096), (8, 1024))


def plan(suite: str) -> list[Job]:
    """One job per model."""
    wanted: dict[str, list[tuple[str, list[list[int]], int, int, str, str]]]
    if suite == "test":
        text: list[Any] = [("llama", [], 2, 48, "sdpa", "none"), ("llama", [], 1, 48, "eager", "full")]
        image: list[Any] = [("llava", [[1, 3, 3]], 2, 24, "sdpa", "none")]
        wanted = {"llama": text, "llava": image}
    else:
        wanted = {}
        for model in MODELS if suite == "full" else _QUICK:
            grids = _IMAGE if "vl" in model else []
            sizes = _SIZES if suite == "full" else _SIZES[:3]
            rows = [(model, grids, batch, seq, "sdpa", "none") for batch, seq in sizes]
            rows.append((model, grids, 4, 2048, "sdpa", "full"))
            if suite == "full" or model == "llama-1b":
                rows.append((model, grids, 4, 1024, "eager", "none"))
            if grids:
                rows.append((model, grids * 2, 2, 2048, "sdpa", "none"))
            wanted[model] = rows
    jobs = []
    for model, entries in wanted.items():
        rows_by_id: dict[str, Json] = {}
        for _, grids, batch, seq, attention, recompute in entries:
            images = counts.format_images(grids)
            rows_by_id[f"{model}/{batch}x{seq}/{images or 'text'}/{attention}/{recompute}"] = {
                "batch": batch,
                "seq": seq,
                "grids": grids,
                "attention": attention,
                "recompute": recompute,
            }
        args = {"device": get_device(suite), "suite": suite, "model": model}
        jobs.append(
            Job(f"steps-{model}", f"{__name__}:start", args, rows_by_id, 180, expected_s=14 + 3.0 * len(rows_by_id))
        )
    return jobs


def start(args: Json) -> Callable[[Json], Json]:
    bench = Bench(args["device"])
    name = args["model"]
    config = counts.get_config(name, "test") if args["suite"] == "test" else MODELS[name]
    model = counts.build(bench, config)
    optimizer = bench.torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    steps = 2 if args["suite"] == "test" else _STEPS
    return lambda row: measure(bench, model, optimizer, name, config, row, steps)


def measure(bench: Bench, model: object, optimizer: Any, name: str, config: Json, row: Json, steps: int) -> Json:
    """Forward, backward and optimizer, several times without pause; the first two steps are not taken."""
    torch = bench.torch
    bench.free()
    grids = row["grids"]
    # SDPA as HF dispatches it: nothing is forced, so the device's own choice of kernel is what is counted.
    kernel: PickedKernel = "eager" if row["attention"] == "eager" else _find_kernel(bench)
    counts.prepare(model, kernel, row["recompute"], "train")
    pass_ = counts.make_step(
        bench, model, counts.make_inputs(bench, model, grids, row), {"kernel": "", "phase": "train"}
    )

    def step() -> None:
        pass_()
        optimizer.step()

    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    step()
    step()
    taken, energy_j, clock, power = _time_steps(bench, step, steps)
    seconds, spread = summarize(taken)
    load = {**row, "phase": "train", "kernel": kernel}
    analytic = counts.count_analytic(config, grids, load)
    peak = _find_peak(bench)
    return {
        "model": name,
        "batch": row["batch"],
        "seq": row["seq"],
        "images": counts.format_images(grids),
        "attention": row["attention"],
        "recompute": row["recompute"],
        "seconds": round_digits(seconds),
        "spread": round_digits(spread, 3),
        "model_flops": analytic["model"],
        "hardware_flops": analytic["hardware"],
        "parameters": analytic["parameters"],
        "mfu": round_digits(analytic["model"] / seconds / peak, 4) if peak else None,
        "hfu": round_digits(analytic["hardware"] / seconds / peak, 4) if peak else None,
        "tokens_per_s": round_digits(row["batch"] * row["seq"] / seconds),
        "energy_j": round_digits(energy_j, 4),
        "power_w": power,
        "sm_clock_mhz": clock,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if bench.is_gpu else None,
    }


def _time_steps(
    bench: Bench, step: Callable[[], object], steps: int
) -> tuple[list[float], float | None, int | None, float | None]:
    """Seconds of each step, energy of one, and the clock and power near the end."""
    import time

    if not bench.is_gpu:
        taken = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        return taken, None, None, None
    torch = bench.torch
    gauge = bench.gauge
    assert gauge is not None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    before_j = gauge.read_energy_j()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    clock, power = gauge.read_clock_mhz(), gauge.read_power_w()
    torch.cuda.synchronize()
    after_j = gauge.read_energy_j()
    taken = [marks[i].elapsed_time(marks[i + 1]) / 1000 for i in range(steps)]
    energy_j = (after_j - before_j) / steps if before_j is not None and after_j is not None else None
    return taken, energy_j, clock, power


def _find_kernel(bench: Bench) -> FusedKernel:
    from flopcalc.hardware.devices import find_detected, find_sdpa

    return find_sdpa(find_detected(bench.torch.cuda.get_device_name()) if bench.is_gpu else None, "bf16")


def _find_peak(bench: Bench) -> float | None:
    from flopcalc.hardware.devices import find_detected

    found = find_detected(bench.torch.cuda.get_device_name()) if bench.is_gpu else None
    return found.peak_tflops["bf16"] * 1e12 if found is not None and "bf16" in found.peak_tflops else None
