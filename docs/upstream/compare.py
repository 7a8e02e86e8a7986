"""Counters of other projects beside ours: today's number, the number with our patch, and flopcalc's.

python docs/upstream/compare.py [--write]   prints the tables of these pages, or writes them there

The functions below repeat the arithmetic of upstream's functions, at the commits that COMMITS names, so that tests run
without those projects. tests/test_upstream.py holds them to numbers that the real code printed.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(HERE))

from hf_mem_kv_cache import count_cached_values  # noqa: E402

from flopcalc import FlopcalcError, bind, estimate_flops, peak_flops_per_s  # noqa: E402
from flopcalc.server.served import read_model  # noqa: E402

COMMITS = {
    "vllm": "vllm-project/vllm@a014e35f38c80fb0652387740193ad2147fed6a3: vllm/v1/metrics/perf.py",
    "verl": "verl-project/verl@1dda039b9c6311889a9c9a26040677e1254814f9: verl/utils/flops_counter.py",
    "verl-omni": "verl-project/verl-omni@a1139bafffb5b9711f0a6b6edff8ecaa60bfff30: verl_omni/utils/mfu/qwen_image.py",
    "torchtitan": "pytorch/torchtitan@b5bcd76c66d0acb1a08b176d9639425bc55e0b2a: torchtitan/tools/utils.py",
    "hf-mem": "alvarobartt/hf-mem@e9946791d7798498a1775bfc826f02a0958cbd3d: src/hf_mem/safetensors/kv_cache.py",
}
Config = dict[str, Any]
GRIDS = [[1, 32, 48], [1, 64, 64]]  # two images, in patches
PATCHES = [height * width for _, height, width in GRIDS]
_PATTERNS = {"gemma3_text": 6}  # every N-th layer is a full one, where a config leaves N to its class


def load_config(preset: str) -> Config:
    """A preset's config, its language model's keys on top, with the layers' kinds."""
    with open(ROOT / "model_specs" / "presets" / f"{preset}.toml", "rb") as file:
        config: Config = tomllib.load(file)["config"]
    config = {"vocab_size": 262208, **config, **config.get("text_config", {})}
    every = _PATTERNS.get(config["model_type"], 1)
    kinds = [
        "full_attention" if i % every == every - 1 else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]
    config.setdefault("layer_types", kinds)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


def load_added(patch: str, name: str) -> Callable[..., Any]:
    """A function that a patch adds, run as it stands there."""
    for hunk in (HERE / patch).read_text(encoding="utf-8").split("\n@@ "):
        if f"\n+def {name}(" in hunk:
            names: dict[str, Any] = {}
            exec("\n".join(line[1:] for line in hunk.split("\n") if line.startswith("+") and line[:3] != "+++"), names)
            return names[name]  # type: ignore[no-any-return]
    raise ValueError(f"{patch} adds no function {name}")


def read_vision(config: Config) -> dict[str, int]:
    """The arguments of the patches' vit_flops."""
    vision = config["vision_config"]
    return {
        "dim": vision["hidden_size"], "depth": vision["depth"], "ffn": vision["intermediate_size"],
        "patch_values": vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        "merge": vision["spatial_merge_size"], "out": vision["out_hidden_size"],
        "mergers": 1 + len(vision["deepstack_visual_indexes"]),
    }  # fmt: skip


# --- vLLM: a prefill of one request on one GPU, logits of its last token


def count_vllm(
    config: Config, tokens: int, *, is_patched: bool = False, patches: Sequence[int] = (), mtp: int = 0
) -> int:
    width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    pairs = [tokens * tokens] * layers
    if is_patched:
        attended = load_added("vllm-attention.patch", "attended_pairs")
        window = {"sliding_attention": config.get("sliding_window")}
        pairs = [attended(tokens, tokens, window.get(kind)) for kind in config["layer_types"]]
    if "kv_lora_rank" in config:
        rank, rope, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
        key, query = config["qk_nope_head_dim"] + rope, config["q_lora_rank"]
        linear = width * query + query * heads * key + width * (rank + rope)
        linear += rank * heads * (config["qk_nope_head_dim"] + value) + heads * value * width
        scores = heads * (key + value)
    else:
        size = config["head_dim"]
        linear = width * (heads + 2 * config["num_key_value_heads"]) * size + heads * size * width
        scores = 2 * heads * size
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or 0
    routed = layers - config.get("first_k_dense_replace", 0) if experts else 0
    expert = 3 * width * config.get("moe_intermediate_size", config["intermediate_size"])
    sparse = expert * (config.get("num_experts_per_tok", 0) + config.get("n_shared_experts", 0))
    if is_patched:
        sparse += width * experts
    dense = 3 * width * config["intermediate_size"]
    total = 2 * tokens * (layers * linear + routed * sparse + (layers - routed) * dense)
    total += 2 * scores * sum(pairs) + 2 * width * config["vocab_size"]
    if is_patched and mtp:  # one block on all tokens, two hidden states into one, logits of one token
        total += (
            2 * tokens * (linear + sparse + 2 * width * width)
            + 2 * scores * pairs[0]
            + 2 * width * config["vocab_size"]
        )
    if is_patched and patches:
        total += load_added("vllm-vision-mtp.patch", "vit_flops")(list(patches), **read_vision(config))
    return total


# --- verl: a training step


def count_verl(config: Config, lengths: Sequence[int], *, is_patched: bool = False, patches: Sequence[int] = ()) -> int:
    width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    tokens = sum(lengths)
    size = width // heads if "vision_config" in config and not is_patched else config["head_dim"]
    linear = width * (2 * heads + 2 * config["num_key_value_heads"]) * size
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    mlp = 3 * width * config["intermediate_size"]
    if experts:
        expert = config.get("moe_intermediate_size", config["intermediate_size"])
        mlp = 3 * width * expert * config["num_experts_per_tok"] + width * experts
    weights = layers * (linear + mlp) + (1 if is_patched else 2) * config["vocab_size"] * width
    squares = 0
    for kind in config["layer_types"]:
        window = config.get("sliding_window") if kind == "sliding_attention" else None
        for length in lengths:
            kept = min(length, window or length)
            squares += kept * (2 * length - kept) if is_patched else length * kept
    total = 6 * weights * tokens + 6 * squares * size * heads
    if patches:
        vision = read_vision(config)
        dim, depth, merge = vision["dim"], vision["depth"], vision["merge"] ** 2
        merger = vision["mergers"] * (vision["out"] + dim * merge) * dim * merge // (merge if is_patched else 1)
        block = depth * (4 * dim * dim + 2 * dim * vision["ffn"])
        total += 6 * (vision["patch_values"] * dim + block + merger) * sum(patches)
        total += 12 * sum(count * count for count in patches) * dim * depth
    return total  # type: ignore[no-any-return]


# --- verl-omni: one training step of Qwen-Image, without LoRA: it has no number for LoRA, and none for other pipelines


def count_verl_omni(config: Config, latents: Sequence[int], prompts: Sequence[int]) -> int:
    heads, layers = config["num_attention_heads"], config["num_layers"]
    dim = heads * config["attention_head_dim"]
    out = config["patch_size"] ** 2 * config["out_channels"] * dim
    image = layers * 12 * dim * dim + config["in_channels"] * dim + out
    text = layers * 12 * dim * dim + config["joint_attention_dim"] * dim
    squares = sum((a + b) ** 2 for a, b in zip(latents, prompts, strict=True))
    linear = image * sum(latents) + text * sum(prompts) + layers * 12 * dim * dim * len(latents)
    return 6 * linear + 12 * layers * dim * squares  # type: ignore[no-any-return]


# --- torchtitan: bf16 peaks by name, in TFLOP/s, in the order of its comparisons

_PEAKS = (
    ("A100", 312.0), ("A6000", 154.85), ("H100 NVL", 835.0), ("H100 PCIe", 756.0), ("H100", 989.0), ("H200", 989.0),
    ("H20", 148.0), ("GB200", 2500.0), ("GB300", 2500.0), ("B300", 2250.0), ("B200", 2250.0), ("MI355X", 2500.0),
    ("MI300X", 1300.0), ("MI325X", 1300.0), ("MI250X", 191.5), ("l40s", 362.0),
)  # fmt: skip
_PATCHED_PEAKS = (
    ("A100", 312.0), ("A800", 312.0), *_PEAKS[1:4], ("H100", 989.0), ("H800", 989.0), *_PEAKS[5:12], ("MI350X", 2300.0),
    *_PEAKS[12:15], ("L40S", 362.0),
)  # fmt: skip
DEVICES = (
    "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "NVIDIA A800-SXM4-80GB", "NVIDIA H800", "NVIDIA L40S",
    "NVIDIA L4", "NVIDIA A40", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090", "NVIDIA RTX 6000 Ada Generation",
    "AMD Instinct MI300X", "AMD Instinct MI350X",
)  # fmt: skip


def find_peak(name: str, *, is_patched: bool = False) -> float | None:
    """The peak by name; an unknown GPU is an A100, or has none with the patch."""
    for part, peak in _PATCHED_PEAKS if is_patched else _PEAKS:
        if part in name:
            return peak
    return None if is_patched else 312.0


# --- hf-mem: numbers in the KV cache of one sequence


def count_hf_mem(config: Config, tokens: int) -> int:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    kinds = config.get("layer_types")
    full = layers if kinds is None else sum(kind == "full_attention" for kind in kinds)
    if "sliding_window_pattern" in config:
        full = layers // config["sliding_window_pattern"]
    kept = full * tokens + (layers - full) * min(config.get("sliding_window") or tokens, tokens)
    return 2 * kept * config.get("num_key_value_heads", heads) * size  # type: ignore[no-any-return]


def count_cached(preset: str, tokens: int) -> int:
    """Ours: the numbers that an engine's cache holds for one sequence; states of linear layers are apart."""
    kept = (layers for layers in read_model(bind(preset)).cached if layers.kind != "state")
    return sum(
        each.layers * each.width * (min(tokens, each.window) if each.kind == "window" else tokens) for each in kept
    )


def load_published(preset: str) -> Config:
    """The keys of a published config.json that a cache's size depends on, without what its class would add."""
    with open(ROOT / "model_specs" / "presets" / f"{preset}.toml", "rb") as file:
        config: Config = tomllib.load(file)["config"]
    return {**config, **config.get("text_config", {})}


# --- the tables


def format_row(case: str, theirs: int, patched: int, ours: int) -> str:
    return f"| {case} | {theirs:,} | {theirs / ours:.4f} | {patched / ours:.4f} | {ours:,} |"


def make_vllm() -> Iterable[str]:
    yield from (
        "| prefill of 16,384 tokens | vLLM | ÷ flopcalc | patched ÷ flopcalc | flopcalc |",
        "|---|---|---|---|---|",
    )
    for preset in ("llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b", "deepseek-v3"):
        config, ours = load_config(preset), estimate_flops(preset, seq_len=16384, phase="forward", logits="last").total
        yield format_row(preset, count_vllm(config, 16384), count_vllm(config, 16384, is_patched=True), ours)
    config = load_config("deepseek-v3")
    ours = estimate_flops("deepseek-v3", seq_len=16384, phase="forward", logits="last", mtp=1).total
    yield format_row(
        "deepseek-v3, one MTP draft", count_vllm(config, 16384), count_vllm(config, 16384, is_patched=True, mtp=1), ours
    )
    config = load_config("qwen3-vl-8b")
    ours = estimate_flops("qwen3-vl-8b", seq_len=16384, phase="forward", logits="last", image_grid_thw=GRIDS).total
    patched = count_vllm(config, 16384, is_patched=True, patches=PATCHES)
    yield format_row("qwen3-vl-8b, two images", count_vllm(config, 16384), patched, ours)


def make_verl() -> Iterable[str]:
    yield from (
        "| 4 sequences of 4,096 tokens | verl | ÷ flopcalc | patched ÷ flopcalc | flopcalc |",
        "|---|---|---|---|---|",
    )
    lengths = [4096] * 4
    for preset in (
        "llama-3.1-8b",
        "qwen3-8b",
        "qwen3-30b-a3b",
        "gemma-3-1b",
        "gpt-oss-20b",
        "qwen3-vl-8b",
        "qwen3-vl-4b",
    ):
        config = load_config(preset)
        patches, images = (PATCHES, {"image_grid_thw": GRIDS}) if "vision_config" in config else ((), {})
        ours = estimate_flops(preset, lengths=lengths, **images).total  # type: ignore[arg-type]
        patched = count_verl(config, lengths, is_patched=True, patches=patches)
        case = f"{preset}, two images" if patches else preset
        yield format_row(case, count_verl(config, lengths, patches=patches), patched, ours)


def make_verl_omni() -> Iterable[str]:
    yield from ("| one sample, 64 text tokens | verl-omni | ÷ flopcalc | flopcalc |", "|---|---|---|---|")
    lora = "r=64,targets=to_q+to_k+to_v+to_out.0"
    config = load_published("qwen-image")["transformer"]
    for case, preset, options in (
        ("Qwen-Image, 1024 × 1024", "qwen-image", {}),
        ("Qwen-Image, LoRA on attention", "qwen-image", {"lora": lora}),
        ("SD 3 medium, 1024 × 1024", "sd3-medium", {}),
        ("FLUX.1-dev, 1024 × 1024", "flux.1-dev", {}),
    ):
        denoiser = {**load_published(preset)["transformer"]}
        ours = estimate_flops(denoiser, images=[(1024, 1024)], text=64, **options).total  # type: ignore[arg-type]
        theirs = count_verl_omni(config, [4096], [64]) if preset == "qwen-image" else 0
        yield f"| {case} | {theirs:,} | {theirs / ours:.4f} | {ours:,} |"


def make_peaks() -> Iterable[str]:
    yield from ("| device | torchtitan, TFLOP/s | patched | flopcalc |", "|---|---|---|---|")
    for name in DEVICES:
        patched = find_peak(name, is_patched=True)
        ours = peak_flops_per_s(name, "bf16") / 1e12
        yield f"| {name} | {find_peak(name):g} | {'none' if patched is None else f'{patched:g}'} | {ours:g} |"


def make_vision() -> Iterable[str]:
    yield from ("| training step, two images | torchtitan | patched | flopcalc |", "|---|---|---|---|")
    for preset in ("qwen3.5-4b", "qwen3.5-27b"):
        parts = estimate_flops(preset, seq_len=4096, image_grid_thw=GRIDS).by_component()
        ours = sum(parts["vision"][:3]) + sum(parts["projector"][:3])
        patched = load_added("torchtitan-vision.patch", "vit_flops")(PATCHES, **read_vision(load_config(preset)))
        yield f"| {preset}, vision tower | 0 | {patched:,} | {ours:,} |"


def make_hf_mem() -> Iterable[str]:
    yield from (
        "| one sequence of 32,768 tokens | hf-mem, MiB in bf16 | ÷ flopcalc | patched ÷ flopcalc | flopcalc, MiB |",
        "|---|---|---|---|---|",
    )
    for preset in ("llama-3.1-8b", "deepseek-v3", "gemma-3-27b", "gpt-oss-20b", "mistral-7b", "qwen3-next-80b-a3b"):
        config, ours = load_published(preset), count_cached(preset, 32768)
        theirs, patched = count_hf_mem(config, 32768), count_cached_values(config, 32768)
        mib = (1 << 20) // 2
        yield f"| {preset} | {theirs / mib:,.0f} | {theirs / ours:.4f} | {patched / ours:.4f} | {ours / mib:,.0f} |"


TABLES: dict[str, list[Callable[[], Iterable[str]]]] = {
    "vllm": [make_vllm],
    "verl": [make_verl],
    "verl-omni": [make_verl_omni],
    "torchtitan": [make_peaks, make_vision],
    "hf-mem": [make_hf_mem],
}


def make_block(page: str) -> str:
    """What stands between a page's marks."""
    tables = ["\n".join(table()) for table in TABLES[page]]
    return "\n\n".join([f"Upstream's number at `{COMMITS[page]}`:", *tables])


def write_page(text: str, block: str) -> str:
    head, mark, rest = text.partition("<!-- numbers: python docs/upstream/compare.py --write -->\n")
    _, end, tail = rest.partition("<!-- end of numbers -->")
    if not (mark and end):
        raise FlopcalcError("the page has no marks for its numbers")
    return f"{head}{mark}\n{block}\n\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    is_written = parser.parse_args().write
    for page in TABLES:
        block = make_block(page)
        if is_written:
            path = HERE / f"{page}.md"
            path.write_text(write_page(path.read_text(encoding="utf-8"), block), encoding="utf-8")
        else:
            print(f"{block}\n")


if __name__ == "__main__":
    main()
