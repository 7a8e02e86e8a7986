"""Specs of diffusers' classes against what a counter sees of the classes themselves, row by row."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusion import (
    ADAPTERS,
    IMAGES,
    LATER_VAES,
    MORE,
    MORE_VAES,
    OTHER_VAES,
    TINY,
    TINY_TEXT,
    TINY_VAES,
    apply_recipe,
    build,
    count_step,
    find_differences,
    find_text_differences,
    find_vae_differences,
    make_inputs,
)

from flopcalc import estimate_flops
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.model.components import count_calls, read_pipeline
from flopcalc.core.spec.spec import find_spec
from flopcalc.measure.counters.flop_counter import count_flops

LORA: dict[str, Any] = {"lora": {"r": 2, "targets": ["to_q", "to_k", "to_v", "to_out.0"]}}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": LORA,
    "checkpointed": {"recompute": "full"},
    "lora, checkpointed": {**LORA, "recompute": "full"},
}
# Of classes that name them otherwise.
TARGETS = {
    "Kandinsky5Transformer3DModel": ["to_query", "to_key", "to_value"],
    "Cosmos3OmniTransformer": ["to_q", "to_k", "to_v", "to_out"],
    "Kandinsky6Transformer3DModel": ["to_query", "to_key", "to_value"],
    "HiDreamImageTransformer2DModel": ["to_q", "to_k_t", "to_v", "to_out"],
    "JoyImageEditTransformer3DModel": ["img_attn_qkv", "txt_attn_qkv"],
    "JoyImageEditPlusTransformer3DModel": ["img_attn_qkv", "txt_attn_qkv"],
    "PRXTransformer2DModel": ["img_qkv_proj", "to_out.0"],
}
FRAMES = (
    "Allegro", "AnyFlow", "Chrono", "CogVideoX", "ConsisID", "Cosmos", "EasyAnimate", "Helios", "HunyuanVideo",
    "I2VGenXL", "JoyImageEditTransformer", "Kandinsky5", "Kandinsky6", "LTX2Video", "LTXVideo", "Latte", "MiniMax",
    "Mochi", "MotifVideo", "SanaVideo", "SkyReels", "SparseControlNet", "UNet3D", "UNetMotion", "UNetSpatio", "Wan",
)  # fmt: skip
CONFIGS = {f"{name} {i}": (name, config) for name in TINY for i, config in enumerate((TINY[name], *MORE.get(name, [])))}
SPECS = {name: find_spec(name) for name in TINY}
CASES = [
    (case, recipe)
    for case, (name, _) in CONFIGS.items()
    for recipe in RECIPES
    if not (recipe.endswith("ed") and SPECS[name].unrecomputed)
]
LIGHT = [("FluxTransformer2DModel 0", "lora"), ("UNet2DConditionModel 0", "plain")]


def find_text(name: str, config: dict[str, Any], usual: int = 5) -> int:
    """The length of the text: some classes read none, others one length alone."""
    if name in ("DiTTransformer2DModel", "UNet2DModel"):
        return 0
    fixed = config.get("text_len", config.get("num_embeddings") if name == "PriorTransformer" else None)
    return fixed or (512 if config.get("image_dim") else usual)


def make_grid(name: str, size: int) -> tuple[int, int, int]:
    if name == "Kandinsky3UNet":  # three halvings
        size *= 4
    return 3 if name.startswith(FRAMES) else 1, size, size


@pytest.mark.parametrize(("case", "recipe"), mark_heavy(CASES, LIGHT))
def test_training_rows_are_equal(case: str, recipe: str) -> None:
    name, config = CONFIGS[case]
    text = find_text(name, config)
    grid = make_grid(name, 4)
    if config.get("patch_size_t", 1) == 2:  # frames in pairs
        grid = (4, *grid[1:])
    asked = RECIPES[recipe]
    if "lora" in asked and name in TARGETS:
        asked = {**asked, "lora": {**asked["lora"], "targets": TARGETS[name]}}
    batch = 1 if name == "Cosmos3OmniTransformer" else 2  # what a call takes
    assert find_differences(name, config, batch, text, grid, asked) == {}


@pytest.mark.parametrize("case", [case for case in CONFIGS if SPECS[CONFIGS[case][0]].unrecomputed])
def test_checkpointing_is_refused_where_diffusers_cannot(case: str) -> None:
    name, config = CONFIGS[case]
    with pytest.raises(FlopcalcError, match="gradient checkpointing in diffusers"):
        estimate_flops({"_class_name": name, **config}, images=[(64, 64)], recompute="full")
    model = build(name, config)

    def train() -> None:
        apply_recipe(model, RECIPES["checkpointed"])
        count_step(model, make_inputs(name, config, 1, find_text(name, config), make_grid(name, 4)), True)

    with pytest.raises((ValueError, TypeError), match=r"checkpointing|unexpected keyword"):
        train()


@pytest.mark.parametrize("name", mark_heavy(TINY))
def test_forward_rows_are_equal_at_a_size_that_is_no_square(name: str) -> None:
    frames, height, width = make_grid(name, 8)
    grid = (frames, height, width // 2)
    assert find_differences(name, TINY[name], 1, find_text(name, TINY[name], 7), grid, {}, "forward") == {}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_rows_are_equal(name: str) -> None:
    assert find_differences("T2IAdapter", ADAPTERS[name], 2, 0, (1, 8, 12), {}, "forward") == {}


@pytest.mark.parametrize("text", [600, 300, 255, 254, 128, 1])
def test_wan_with_an_image_and_any_length_of_text(text: int) -> None:
    """diffusers takes the last 512 tokens for text, whatever was given."""
    name, config = next(each for each in CONFIGS.values() if each[0].startswith("Wan") and each[1].get("image_dim"))
    assert find_differences(name, config, 1, text, make_grid(name, 4), {}, "forward") == {}


VAE_SIZES = [
    ("encode", (1, 1, 32, 32)),
    ("decode", (1, 1, 2, 2)),
    ("encode", (2, 9, 32, 64)),
    ("decode", (1, 5, 1, 2)),
    ("encode", (1, 29, 32, 32)),
    ("decode", (1, 9, 1, 1)),
]
VAE_CASES = [
    (name, side, size)
    for name in TINY_VAES
    for side, size in VAE_SIZES
    if name not in (*IMAGES, "AutoencoderKLLTXVideo") or size[1] in (1, 5, 9)
    if name not in IMAGES or size[1] == 1
]


@pytest.mark.parametrize(
    ("name", "side", "size"), mark_heavy(VAE_CASES, [("AutoencoderKLWan", "decode", (1, 5, 1, 2))])
)
def test_autoencoders_rows_are_equal(name: str, side: str, size: tuple[int, int, int, int]) -> None:
    assert find_vae_differences(name, TINY_VAES[name], side, size) == {}


LATER_SIZES = [
    ("encode", (2, 9, 64, 96)),
    ("decode", (1, 5, 2, 3)),
    ("encode", (2, 1, 64, 96)),
    ("decode", (1, 1, 2, 3)),
]
LATER_CASES = [
    (case, *size) for case in MORE_VAES for size in LATER_SIZES if size[1][1] == 1 or MORE_VAES[case][0] not in IMAGES
]


@pytest.mark.heavy
@pytest.mark.parametrize(("case", "side", "size"), LATER_CASES)
def test_later_autoencoders_rows_are_equal(case: str, side: str, size: tuple[int, int, int, int]) -> None:
    assert find_vae_differences(*MORE_VAES[case], side, size) == {}


SIZES_OF_LATER = [("encode", (1, 9, 64, 96)), ("decode", (1, 3, 2, 3))]
ONE_FRAME = (*IMAGES, "AutoencoderKLHunyuanImageRefiner")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "side", "size"),
    [
        (name, *size)
        for name in LATER_VAES
        for size in [*SIZES_OF_LATER, ("encode", (1, 1, 64, 96)), ("decode", (1, 1, 2, 3))]
        if size[1][1] == 1 or name not in ONE_FRAME
    ],
)
def test_autoencoders_of_networks_written_as_data_are_equal(
    name: str, side: str, size: tuple[int, int, int, int]
) -> None:
    assert find_vae_differences(name, LATER_VAES[name], side, size) == {}


@pytest.mark.parametrize(
    ("case", "side", "size"),
    mark_heavy(
        [(case, *call) for case in OTHER_VAES for call in OTHER_VAES[case][2]], [("KVAE", "decode", (2, 1, 2, 3))]
    ),
)
def test_autoencoders_at_sizes_of_their_own_are_equal(case: str, side: str, size: tuple[int, int, int, int]) -> None:
    name, config, _ = OTHER_VAES[case]
    device = "meta" if case.endswith("without data") else "cpu"
    assert find_vae_differences(name, config, side, size, device) == {}


@pytest.mark.parametrize("name", mark_heavy(TINY_TEXT, ["CLIPTextModelWithProjection"]))
def test_text_encoders_rows_are_equal(name: str) -> None:
    assert find_text_differences(name, TINY_TEXT[name], 2, 7) == {}


@pytest.mark.heavy
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 16.0])
def test_two_denoisers_share_the_steps_as_the_scheduler_spaces_them(shift: float) -> None:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=shift, prediction_type="flow_prediction")
    for boundary in (0.875, 0.9, 0.417):
        part = {"_class_name": "WanTransformer3DModel"}
        config = {
            "_class_name": "WanPipeline",
            "transformer": part,
            "transformer_2": part,
            "boundary_ratio": boundary,
            "scheduler": dict(scheduler.config),
        }
        pipeline = read_pipeline(config, "config")
        for steps in (1, 4, 27, 40, 50):
            scheduler.set_timesteps(steps)
            times = scheduler.timesteps.tolist()
            assert pipeline.count_first(steps, steps) == sum(time >= 1000 * boundary for time in times)


SCHEDULERS: dict[str, dict[str, Any]] = {
    "HeunDiscreteScheduler": {}, "KDPM2DiscreteScheduler": {}, "KDPM2AncestralDiscreteScheduler": {},
    "FlowMatchHeunDiscreteScheduler": {}, "PNDMScheduler": {"skip_prk_steps": True}, "PNDMScheduler, warmed": {},
    "DDIMScheduler": {}, "EulerDiscreteScheduler": {}, "DPMSolverMultistepScheduler": {}, "LCMScheduler": {},
    "DPMSolverSinglestepScheduler": {}, "UniPCMultistepScheduler": {}, "FlowMatchEulerDiscreteScheduler": {},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mark_heavy(SCHEDULERS))
def test_calls_of_the_model_are_the_schedulers_timesteps(name: str) -> None:
    import diffusers

    kind = getattr(diffusers, name.partition(",")[0])
    scheduler = kind(**SCHEDULERS[name])
    config = {**scheduler.config, "_class_name": kind.__name__}
    for steps in (1, 2, 3, 4, 5, 20, 50)[3 if "warmed" in name else 0 :]:
        scheduler.set_timesteps(steps)
        assert count_calls(config, steps) == (len(scheduler.timesteps), kind.order)


_QWEN = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50,
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("pipeline", "kind", "config", "length"),
    [
        ("Flux2KleinPipeline", "Qwen3ForCausalLM", _QWEN, 16),  # with its head, as the pipeline runs it
        ("ZImagePipeline", "Qwen3Model", _QWEN, 512),
        ("Lumina2Pipeline", "Gemma2Model", {**_QWEN, "model_type": "gemma2"}, 16),
    ],
)
def test_a_text_encoder_may_be_of_any_counted_type(
    pipeline: str, kind: str, config: dict[str, Any], length: int
) -> None:
    import transformers

    made = transformers.AutoConfig.for_model(**config)
    model = getattr(transformers, kind)._from_config(made, attn_implementation="eager").eval()

    def run() -> None:
        with torch.no_grad():
            model(torch.ones(1, length).long())

    name = {"Flux2KleinPipeline": "Flux2", "ZImagePipeline": "ZImage", "Lumina2Pipeline": "Lumina2"}[pipeline]
    denoiser = {**TINY[f"{name}Transformer2DModel"], "_class_name": f"{name}Transformer2DModel"}
    estimate = estimate_flops(
        {"_class_name": pipeline, "transformer": denoiser, "text_encoder": {**config, "_class_name": kind}},
        images=[(512, 512)], sampling_steps=1, guidance="off", parts="text", text=16, convention="full",
        attention_kernel="eager",
    )  # fmt: skip
    assert estimate.total == count_flops(model, run).forward


@pytest.mark.heavy
def test_a_live_pipeline_is_its_parts() -> None:
    """A whole pipeline, not called: its classes, sizes, formats and what trains are read from it."""
    from diffusers import DDIMScheduler, DiTPipeline

    denoiser = build("DiTTransformer2DModel", TINY["DiTTransformer2DModel"]).to(torch.bfloat16)
    vae = build("AutoencoderKL", TINY_VAES["AutoencoderKL"])
    apply_recipe(denoiser, LORA)
    pipeline = DiTPipeline(denoiser, vae, DDIMScheduler())
    named = {"transformer": (denoiser, "DiTTransformer2DModel"), "vae": (vae, "AutoencoderKL")}
    config = {name: {**part.config, "_class_name": kind} for name, (part, kind) in named.items()}
    recipe = {"lora": {**LORA["lora"], "dtype": "bf16"}}
    for asked in ({"sampling_steps": 3}, {"phase": "train"}):
        live = estimate_flops(pipeline, images=[(32, 32)], **asked)
        expected = estimate_flops({"_class_name": "DiTPipeline", **config}, images=[(32, 32)], recipe=recipe, **asked)
        assert (live.forward, live.backward) == (expected.forward, expected.backward)
        assert live.parameters == expected.parameters
    held = {each.format: each.parameters for each in live.weights}
    assert held["fp32"] == sum(each.numel() for each in vae.parameters())


@pytest.mark.heavy
def test_the_script_that_times_steps_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "diffusion_steps.py"))
    assert script["main"](["--out", str(tmp_path), "--tiny", "--runs", "1", "--warmup", "0"]) == 0
    rows = json.loads((tmp_path / "diffusion_steps.json").read_text())["rows"]
    assert [row["step"] for row in rows] == ["sample", "guided", "lora"]
    assert rows[1]["flops"] == 2 * rows[0]["flops"] < rows[2]["flops"] * 2
    assert all(row["operators"] for row in rows)
    assert "predicted s" in capsys.readouterr().out
