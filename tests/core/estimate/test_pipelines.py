"""Diffusion pipelines: what is asked of them, their parts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from presets import PIPELINES

from flopcalc import bind, estimate_flops, plan, predict
from flopcalc.base.errors import ConfigError, FlopcalcError, RecipeError, WorkloadError
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.workload import Workload

# Parameters of the denoiser, as diffusers' class of the published config has them.
DENOISERS = {
    "cogvideox-2b": 1_693_783_872, "cogvideox-5b": 5_570_283_072, "dit-xl-2-256": 749_826_464,
    "dit-xl-2-512": 749_826_464, "flux.1-dev": 11_901_408_320, "flux.1-schnell": 11_891_178_560,
    "hunyuanvideo": 12_821_012_544, "ltx-video": 1_923_385_472, "pixart-alpha": 611_349_152,
    "pixart-sigma": 610_856_096, "qwen-image": 20_430_401_088, "sd-1.5": 859_520_964, "sd3-medium": 2_028_328_000,
    "sd3.5-large": 8_056_627_520, "sdxl": 2_567_463_684, "sdxl-base": 2_567_463_684, "wan2.1-1.3b": 1_418_996_800,
    "wan2.1-14b": 14_288_491_584,
}  # fmt: skip


@pytest.mark.heavy
def test_presets_have_the_published_parameters() -> None:
    found = {name: bind(name).denoiser.parameters()["total"] for name in PIPELINES}
    assert found == DENOISERS


def test_sampling_is_steps_of_the_denoiser_and_one_run_of_the_others() -> None:
    estimate = estimate_flops("flux.1-dev", images=[(1024, 1024)], sampling_steps=28)
    assert estimate.total == 2_098_100_413_476_864
    assert estimate.pipeline is not None
    assert [(part.name, part.kind, part.runs) for part in estimate.pipeline.parts] == [
        ("transformer", "denoiser", 28),
        ("text_encoder", "text_encoder", 1),
        ("text_encoder_2", "text_encoder", 1),
        ("vae", "vae", 1),
    ]
    assert sum(part.flops.total for part in estimate.pipeline.parts) == estimate.total
    shown = estimate.to_dict()
    assert shown["workload"]["phase"] == "sample"
    assert {key: value for key, value in shown["pipeline"].items() if key != "parts"} == {
        "width": 1024, "height": 1024, "frames": 1, "text": 512, "sampling_steps": 28, "guidance": False,
    }  # fmt: skip
    assert sum(row["forward"] for row in shown["components"]) == estimate.total
    one = estimate_flops("flux.1-dev", images=[(1024, 1024)], sampling_steps=1, parts="denoiser")
    assert estimate.pipeline.parts[0].flops.total == 28 * one.total


@pytest.mark.parametrize(
    ("name", "default", "runs"),
    [
        ("flux.1-schnell", False, {"transformer": 2, "text_encoder": 1}),
        ("sd-1.5", True, {"unet": 1, "text_encoder": 2}),
        ("sdxl-base", True, {"unet": 1, "text_encoder": 1, "text_encoder_2": 1, "vae": 1}),
        ("qwen-image", False, {"transformer": 2, "vae": 1}),
    ],
)
def test_guidance_is_the_pipelines_own(name: str, default: bool, runs: dict[str, int]) -> None:
    steps = 1 if default else 2
    estimate = estimate_flops(name, images=[(512, 512)], sampling_steps=steps)
    assert estimate.pipeline is not None
    assert estimate.pipeline.guidance is default
    found = {part.name: part.runs for part in estimate.pipeline.parts}
    assert {key: found[key] for key in runs} == runs
    both = [
        estimate_flops(name, images=[(512, 512)], sampling_steps=1, guidance=word, parts="denoiser")
        for word in ("on", "off")
    ]
    assert both[0].total == 2 * both[1].total


def test_a_training_step_is_the_denoisers_with_frozen_parts() -> None:
    whole = estimate_flops("sd-1.5", images=[(512, 512)], batch_size=2, grad_accum=3)
    denoiser = estimate_flops("sd-1.5", images=[(512, 512)], batch_size=2, grad_accum=3, parts=["denoiser"])
    others = estimate_flops("sd-1.5", images=[(512, 512)], batch_size=2, grad_accum=3, parts="text,vae")
    assert whole.total == denoiser.total + others.total
    assert whole.backward == denoiser.backward > 0 == others.backward
    assert others.parameters["trainable"] == 0
    assert {row.path.split(".")[0] for row in others.by_module()} == {"text_encoder", "vae"}


def test_dit_has_its_published_count() -> None:
    """Peebles and Xie, table 1: 118.6 Gflops of multiply-accumulates, with one embedding of time and class."""
    estimate = estimate_flops("dit-xl-2-256", images=[(256, 256)], phase="forward", parts="transformer")
    repeated = sum(row.forward for row in estimate.by_module() if "timestep_embedder" in row.path) * 28 // 29
    assert round((estimate.total - repeated) / 2e9, 1) == 118.6


def test_wan_reads_the_published_sequence() -> None:
    """NVIDIA-NeMo/Megatron-Bridge trains Wan 2.1 14B on sequences of 37,440: 832x480x93."""
    grid = bind("wan2.1-14b").latents.make_grid(832, 480, 93)
    assert grid[0] * (grid[1] // 2) * (grid[2] // 2) == 37_440


def test_wan_agrees_with_maxdiffusions_formula() -> None:
    """AI-Hypercomputer/maxdiffusion, BaseWanTrainer: blocks alone, and three projections of the text for two."""
    asked: dict[str, Any] = {"videos": [(1280, 720, 81)], "phase": "forward", "parts": "denoiser"}
    estimate = estimate_flops("wan2.1-14b", **asked)
    blocks = sum(row.forward for row in estimate.by_module() if row.path.startswith("blocks."))
    rows, text, width, wide = 21 * 45 * 80, 512, 5120, 13824
    projections = 2 * width**2 * (6 * rows + 3 * text)
    theirs = 40 * (projections + 4 * width * rows * (rows + text) + 4 * rows * width * wide)
    assert blocks == theirs - 40 * 2 * text * width**2
    # AI-Hypercomputer/tpu-recipes, training/ironwood: 32 videos on 64 chips of two cores, 24.58 s, 209.55 TFLOP/s
    rate = 3 * estimate.total * 32 / 128 / 24.58 / 1e12
    assert rate == pytest.approx(209.55, rel=0.055)


def test_a_folder_is_read(tmp_path: Path) -> None:
    source = load_config("sdxl-base")
    parts = {key: value for key, value in source.config.items() if isinstance(value, dict)}
    index: dict[str, Any] = {"_class_name": "StableDiffusionXLPipeline", "force_zeros_for_empty_prompt": True}
    for name, config in parts.items():
        library = "transformers" if name.startswith("text") else "diffusers"
        index[name] = [library, config["_class_name"]]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    index["scheduler"] = ["diffusers", "EulerDiscreteScheduler"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    asked: dict[str, Any] = {"images": [(1024, 1024)], "sampling_steps": 4}
    expected = estimate_flops("sdxl-base", **asked)
    assert estimate_flops(tmp_path, **asked).total == expected.total
    assert estimate_flops(tmp_path / "model_index.json", **asked).total == expected.total
    (tmp_path / "model_index.json").unlink()
    assert expected.pipeline is not None
    alone = expected.pipeline.parts[0].flops.total
    for path in (tmp_path, tmp_path / "unet", tmp_path / "unet" / "config.json"):
        assert estimate_flops(path, **asked, guidance="on").total == alone


def test_a_modular_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("flux.1-dev").config
    folder, kept = tmp_path / "flux", tmp_path / "hub/models--me--parts/snapshots/a/inner"
    index: dict[str, Any] = {"_class_name": "FluxModularPipeline", "_blocks_class_name": "FluxAutoBlocks"}
    for name, part in config.items():
        if isinstance(part, dict):
            said = {"pretrained_model_name_or_path": "me/parts", "subfolder": "inner" if name == "vae" else name}
            index[name] = [None, None, {**said, "type_hint": ["diffusers", part["_class_name"]]}]
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(part))
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    kept.mkdir(parents=True)
    (folder / "vae").rename(folder / "inner")
    asked: dict[str, Any] = {"images": [(256, 256)], "sampling_steps": 4}
    expected = estimate_flops({**config, "_class_name": "FluxModularPipeline"}, **asked)
    note = "counted with FluxAutoBlocks, the default blocks of FluxModularPipeline; other blocks change the run"
    for path in (folder, folder / "modular_model_index.json"):
        found = estimate_flops(path, **asked)
        assert found.total == expected.total == estimate_flops("flux.1-dev", **asked).total
        assert note in found.notes
    (folder / "inner/config.json").rename(kept / "config.json")
    short = estimate_flops(folder, **asked)
    assert short.total < expected.total
    assert "vae is not counted: there is no inner/config.json of me/parts" in short.notes
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert estimate_flops(folder, **asked).total == expected.total
    index["_blocks_class_name"] = "MyBlocks"
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    assert any("not with MyBlocks, which its index names" in each for each in estimate_flops(folder, **asked).notes)
    (folder / "transformer/config.json").unlink()
    with pytest.raises(ConfigError, match=r"needs its transformer's config \(transformer/config.json of me/parts\)"):
        estimate_flops(folder, **asked)


def test_a_size_may_be_given_for_each_sample() -> None:
    one, each = (estimate_flops("flux.1-dev", batch_size=2, images=[(64, 64)] * many) for many in (1, 2))
    assert one.total == each.total


def test_old_names_of_classes_are_known() -> None:
    config = {**load_config("dit-xl-2-256").config["transformer"], "_class_name": "Transformer2DModel"}
    assert bind(config).spec.name == "DiTTransformer2DModel"


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("flux.1-dev", {"images": [(1000, 1024)], "sampling_steps": 1}, "must be multiples of 16"),
        ("sd3-medium", {"images": [(1000, 1000)], "sampling_steps": 1}, "must be multiples of 16"),
        ("wan2.1-1.3b", {"videos": [(840, 480, 9)], "sampling_steps": 1}, "must be multiples of 16"),
        ("dit-xl-2-256", {"images": [(256, 512)]}, "256x512: this model takes square images alone"),
        ("sd3-medium", {"images": [(1024, 3088)]}, "has positions for at most 3072 pixels a side"),
        ("flux.1-dev", {"images": [(64, 64)], "guidance": "on"}, "guidance belongs to phase sample"),
        ("flux.1-dev", {"images": [(64, 64)], "guidance": "yes", "sampling_steps": 1}, "guidance must be on or off"),
        ("flux.1-dev", {"videos": [(64, 64, 9)], "sampling_steps": 1}, "takes no videos"),
        ("flux.1-dev", {"images": [(64, 64)], "parts": "unet"}, "has no part 'unet'"),
        ("flux.1-dev", {"images": [(64, 64)] * 2}, "images: all 1 samples of a diffusion model have one size"),
        ("flux.1-dev", {"images": [(64, 64)], "clips": [5]}, "clips: flux.1-dev is a diffusion model"),
        ("flux.1-dev", {"images": [(64, 64)], "seq_len": 8}, "a diffusion model; give images or videos, text"),
        ("flux.1-dev", {"images": [(64, 64)], "phase": "decode"}, "its phases are train, forward and sample"),
        ("flux.1-dev", {"images": [(64, 64)], "sampling_steps": 0}, "sampling_steps"),
        ("dit-xl-2-256", {"images": [(64, 64)], "text": 7}, "reads no text"),
        ("wan2.1-1.3b", {"videos": [(64, 64, 8)], "sampling_steps": 1}, "one frame, and then a multiple of 4"),
        ("wan2.1-1.3b", {"videos": ["64x64"], "sampling_steps": 1}, "is not (width, height, frames)"),
        ("llama-3.1-8b", {"seq_len": 8, "sampling_steps": 4}, "sampling_steps belongs to diffusion models"),
        ("llama-3.1-8b", {"seq_len": 8, "phase": "sample"}, "no phase sample"),
        (
            "flux.1-dev",
            {"images": [(64, 64)], "strength": 0.5, "sampling_steps": 2},
            'flux.1-dev runs all of its steps; model_type="FluxImg2ImgPipeline" takes it',
        ),
        ("flux.1-dev", {"images": [(64, 64)], "references": 1}, "reads no given images as tokens"),
        ("flux.1-dev", {"images": [(64, 64)], "images_per_prompt": 2}, "images_per_prompt belongs to phase sample"),
        ("llama-3.1-8b", {"seq_len": 8, "strength": 0.5}, "strength belongs to diffusion models"),
        ({"_class_name": "FluxTransformer2DModel"}, {}, "how large are the images"),
        ({"_class_name": "FluxTransformer2DModel"}, {"images": [(64, 64)], "phase": "sample"}, "(sampling_steps=N)"),
        ({"_class_name": "AutoencoderKL"}, {"images": [(64, 64)]}, "part of other models"),
        ({"_class_name": "VQDiffusionPipeline"}, {}, "pipeline 'VQDiffusionPipeline' is not described"),
        ({"_class_name": "FluxPipeline"}, {}, "needs its transformer's config"),
        (
            {"_class_name": "AnimateDiffPipeline", "unet": {"_class_name": "UNet2DConditionModel"}},
            {"videos": [(64, 64, 4)], "sampling_steps": 1},
            "missing key 'unet.motion_num_attention_heads', needed for its unet",
        ),
        (
            {"_class_name": "QwenImageEditPipeline", "transformer": {"_class_name": "QwenImageTransformer2DModel"}},
            {"images": [(64, 64)], "sampling_steps": 1},
            "its text encoder reads the given image too. Say with text how many",
        ),
        ({"num_layers": 2, "_use_default_values": []}, {"images": [(64, 64)]}, "without its class"),
    ],
)
def test_what_cannot_be_asked_is_refused(model: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(FlopcalcError) as caught:
        estimate_flops(model, **sizes)
    assert message in str(caught.value)


def change_pipeline(preset: str, name: str, transformer: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A preset's pipeline as another one, with keys of its denoiser changed."""
    config = load_config(preset).config
    return {**config, "_class_name": name, "transformer": {**config["transformer"], **transformer}, **others}


def test_latents_are_padded_where_tokens_span_frames() -> None:
    """CogVideoX 1.5: 81 frames are 21 latents, which its pipeline makes 22; the VAE decodes 21."""
    config = change_pipeline("cogvideox-5b", "CogVideoXPipeline", {"patch_size_t": 2})
    asked: dict[str, Any] = {"videos": [(720, 480, 81)], "sampling_steps": 1, "guidance": "off"}
    estimate = estimate_flops(config, **asked)
    assert bind(config).latents.make_grid(720, 480, 81) == (22, 60, 90)
    longer = estimate_flops(config, **{**asked, "videos": [(720, 480, 85)]})
    assert estimate.pipeline is not None
    assert longer.pipeline is not None
    parts, others = estimate.pipeline.parts, longer.pipeline.parts
    assert parts[0].flops == others[0].flops
    assert parts[-1].flops.total < others[-1].flops.total


def test_a_vae_encodes_the_image_that_a_video_starts_from() -> None:
    asked: dict[str, Any] = {"videos": [(832, 480, 81)], "sampling_steps": 2, "parts": "vae"}
    plain = estimate_flops("wan2.1-14b", **asked).total
    config = change_pipeline("wan2.1-14b", "WanImageToVideoPipeline", {"in_channels": 36})
    encoded = estimate_flops("wan2.1-14b", videos=[(832, 480, 81)], parts="vae").total
    assert estimate_flops(config, **asked).total == plain + encoded
    started = {**config, "expand_timesteps": True}
    assert plain < estimate_flops(started, **asked).total < plain + encoded / 10


def test_a_preset_is_counted_as_its_pipeline_of_given_images() -> None:
    asked: dict[str, Any] = {"images": [(512, 512)], "sampling_steps": 10, "parts": "denoiser"}
    given = estimate_flops("sdxl", **asked, strength=0.6, model_type="StableDiffusionXLImg2ImgPipeline")
    whole = estimate_flops("sdxl", **asked, guidance=given.pipeline.guidance if given.pipeline else None)
    assert 10 * given.total == 6 * whole.total


def test_strength_leaves_steps_out() -> None:
    """FluxImg2ImgPipeline starts at int(28 - 28 * 0.6) = 11; StableDiffusionImg2ImgPipeline at 50 - int(50 * 0.8)."""
    asked: dict[str, Any] = {"images": [(512, 512)], "parts": "denoiser"}
    for preset, name, steps, own in (
        ("flux.1-dev", "FluxImg2ImgPipeline", 28, 17),
        ("sd-1.5", "StableDiffusionImg2ImgPipeline", 50, 40),
    ):
        config = {**load_config(preset).config, "_class_name": name}
        estimate = estimate_flops(config, **asked, guidance="off", sampling_steps=steps)
        assert list(list_runs(estimate).values()) == [own]
        assert any("runs of the denoiser are left" in note for note in estimate.notes)
        whole = estimate_flops(config, **asked, guidance="off", sampling_steps=steps, strength=1)
        assert list(list_runs(whole).values()) == [steps]
    with pytest.raises(WorkloadError, match="strength must be at most 1, not 2"):
        estimate_flops(config, **asked, sampling_steps=4, strength=2)


def test_a_scheduler_may_run_the_denoiser_more_than_once_a_step() -> None:
    asked: dict[str, Any] = {"images": [(512, 512)], "parts": "denoiser", "guidance": "off", "sampling_steps": 10}
    config = load_config("sd-1.5").config
    for name, options, runs in (
        ("PNDMScheduler", {"skip_prk_steps": True}, 11),
        ("PNDMScheduler", {}, 19),
        ("HeunDiscreteScheduler", {}, 19),
        ("DDIMScheduler", {}, 10),
    ):
        estimate = estimate_flops({**config, "scheduler": {"_class_name": name, **options}}, **asked)
        assert list_runs(estimate) == {"unet": runs}
        assert (f"{name} runs the denoiser {runs} times in 10 steps" in estimate.notes) is (runs > 10)


def test_a_prompt_is_encoded_once_for_all_of_its_images() -> None:
    asked: dict[str, Any] = {"images": [(512, 512)], "sampling_steps": 2}
    one, many = (estimate_flops("sd-1.5", **asked, images_per_prompt=count) for count in (1, 3))
    parts = {
        each.name: (each.flops.total, other.flops.total)
        for each, other in zip(one.pipeline.parts, many.pipeline.parts, strict=True)
    }
    assert parts["text_encoder"][0] == parts["text_encoder"][1]
    assert all(3 * parts[name][0] == parts[name][1] for name in ("unet", "vae"))


def test_reference_images_are_tokens_of_the_denoiser() -> None:
    config = {**load_config("flux.1-dev").config, "_class_name": "FluxKontextPipeline"}
    asked: dict[str, Any] = {"images": [(1024, 1024)], "sampling_steps": 1}
    plain = estimate_flops("flux.1-dev", **asked)
    none, one, two = (estimate_flops(config, **asked, references=count) for count in (0, 1, 2))
    assert none.total == plain.total
    assert estimate_flops(config, **asked).total == one.total < two.total
    assert "given images are counted at the size of the output" in one.notes


def list_runs(estimate: Any) -> dict[str, int]:
    return {part.name: part.runs for part in estimate.pipeline.parts}


def test_two_denoisers_share_the_steps() -> None:
    """Wan 2.2: 40 guided steps, of which the second transformer runs those with little noise; both are weights."""
    asked: dict[str, Any] = {"videos": [(832, 480, 81)], "sampling_steps": 40}
    plain = estimate_flops("wan2.1-14b", **asked)
    assert plain.pipeline is not None
    second = load_config("wan2.1-14b").config["transformer"]
    config = change_pipeline("wan2.1-14b", "WanPipeline", {}, transformer_2=second, boundary_ratio=0.875)
    estimate = estimate_flops(config, **asked)
    # flow_shift s moves t to s·t / (1 + (s - 1)·t), which is 0.875 at t = 0.7 (s = 3) or 0.875 (s = 1)
    assert list_runs(estimate) == {"transformer": 26, "transformer_2": 54, "text_encoder": 2, "vae": 1}
    assert estimate.total == plain.total
    assert estimate.parameters["total"] == plain.parameters["total"] + 14_288_491_584
    assert "transformer_2 runs the steps below boundary_ratio 0.875, as a flow_shift of 3 spaces them" in estimate.notes
    assert {row.path.split(".")[0] for row in estimate.by_module()} >= {"blocks", "transformer_2"}
    linear = estimate_flops({**config, "scheduler": {"flow_shift": 1.0}}, **asked)
    assert list_runs(linear)["transformer"] == 12
    alone = estimate_flops({**config, "boundary_ratio": None}, **asked)
    assert list_runs(alone)["transformer"] == 80
    assert "transformer_2 does not run: the pipeline has no boundary_ratio" in alone.notes
    assert estimate_flops(config, **asked, parts="denoiser").total == plain.pipeline.parts[0].flops.total
    assert list_runs(estimate_flops(config, videos=[(832, 480, 81)])) == {"transformer": 1, "text_encoder": 1, "vae": 1}
    with pytest.raises(ConfigError, match="boundary_ratio must lie between 0 and 1, not 7"):
        estimate_flops({**config, "boundary_ratio": 7}, **asked)


def test_an_image_encoder_runs_once() -> None:
    """Wan 2.1's CLIP ViT-H/14: patches of 224x224 and a class token, through 32 layers."""
    tower = {
        "_class_name": "CLIPVisionModel", "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
        "num_attention_heads": 16, "image_size": 224, "patch_size": 14,
    }  # fmt: skip
    config = change_pipeline("wan2.1-14b", "WanImageToVideoPipeline", {"in_channels": 36}, image_encoder=tower)
    estimate = estimate_flops(config, videos=[(832, 480, 81)], sampling_steps=4, batch_size=3, parts="image_encoder")
    rows, width = 257, 1280
    layer = 2 * rows * (4 * width**2 + 2 * width * 5120) + 4 * rows**2 * width
    assert estimate.total == 3 * (32 * layer + 2 * 256 * 3 * 14**2 * width)
    assert [row["name"] for row in estimate.to_dict()["components"] if row["forward"]] == ["vision"]
    other = {**config, "image_encoder": {"_class_name": "Dinov2Model"}}
    with pytest.raises(ConfigError, match="image_encoder"):
        bind(other)
    config["safety_checker"] = {"_class_name": "StableDiffusionSafetyChecker"}
    notes = estimate_flops(config, videos=[(832, 480, 81)], sampling_steps=4).notes
    assert "safety_checker (StableDiffusionSafetyChecker) is not counted" in notes


def test_binned_sizes_are_said() -> None:
    asked: dict[str, Any] = {"sampling_steps": 2, "parts": "vae"}
    said = [
        any("use_resolution_binning" in note for note in estimate_flops(name, images=[size], **asked).notes)
        for name, size in (("pixart-alpha", (512, 512)), ("pixart-sigma", (1024, 1024)), ("sd-1.5", (256, 256)))
    ]
    assert said == [True, False, False]


def test_a_time_for_every_token_costs_its_embedding() -> None:
    asked: dict[str, Any] = {"videos": [(832, 480, 81)], "phase": "forward", "parts": "denoiser"}
    config = change_pipeline("wan2.1-1.3b", "WanPipeline", {})
    one, each = (estimate_flops({**config, "expand_timesteps": value}, **asked) for value in (False, True))
    embedding = 2 * (256 * 1536 + 1536 * 1536 + 6 * 1536 * 1536)
    assert each.total - one.total == (21 * 30 * 52 - 1) * embedding
    sizes = {"hidden_states": (1, 16, 3, 4, 4), "encoder_hidden_states": (1, 5, 9), "timestep": (1, 12)}
    batch = {key: SimpleNamespace(shape=shape) for key, shape in sizes.items()}
    with pytest.raises(WorkloadError, match="expand_timesteps = true"):
        bind(config).estimate_batch(batch)


def test_sizes_that_a_batch_does_not_say_are_refused() -> None:
    estimator = bind({"_class_name": "Flux3Transformer2DModel", "num_layers": 1, "num_single_layers": 1})
    sizes = {"hidden_states": (1, 16, 128), "encoder_hidden_states": (1, 5, 9)}
    batch = {key: SimpleNamespace(shape=shape) for key, shape in sizes.items()}
    assert estimator.estimate_batch(batch).total > 0
    with pytest.raises(WorkloadError, match="image_cond_hidden_states is not read from a batch"):
        estimator.estimate_batch({**batch, "image_cond_hidden_states": SimpleNamespace(shape=(1, 16, 128))})


def test_a_denoiser_takes_latents_of_one_size() -> None:
    estimator = bind({"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1})
    with pytest.raises(WorkloadError, match=r'one images=\["WxH"\]'):
        estimator.estimate(Workload(2, 8, grids=((1, 4, 4), (1, 4, 8))))
    with pytest.raises(WorkloadError, match="reads text"):
        estimator.estimate(Workload(1, 0, grids=((1, 4, 4),)))


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not described"):
        bind({"_class_name": "UNet2DConditionModel", "down_block_types": ["AttnDownBlock2D"] * 4})


def test_a_prediction_is_marked_as_of_operators_that_were_not_recorded() -> None:
    found = predict("dit-xl-2-256", device="h200", images=[(256, 256)], sampling_steps=2)
    assert 0 < found.step_time_s.low < found.step_time_s.mid < found.step_time_s.high
    assert "operators of DiTTransformer2DModel were not recorded: those of llama are used" in found.notes
    assert found.memory is None


def test_plans_and_reentrant_checkpointing_are_refused() -> None:
    with pytest.raises(WorkloadError, match="plans are of language models"):
        plan("sd-1.5", tokens="1T", device="h100-sxm", gpus=8)
    with pytest.raises(RecipeError, match="not reentrant"):
        bind("sd-1.5", recompute="full-reentrant")


@pytest.mark.parametrize(
    ("name", "guidance", "runs"),
    [("sdxl-base", "on", 2), ("sd3-medium", "on", 2), ("sd3-medium", "off", 2), ("qwen-image", "on", 4)],
)
def test_passes_that_are_one_call_are_one_run_of_twice_the_batch(name: str, guidance: str, runs: int) -> None:
    found = estimate_flops(name, images=[(512, 512)], sampling_steps=2, guidance=guidance, batch_size=3)
    assert found.pipeline is not None
    assert found.pipeline.parts[0].runs == runs
    assert (found.to_dict()["workload"]["batch"], found.to_dict()["workload"]["images"], found.global_batch) == (
        3,
        3,
        3,
    )
    text = estimate_flops(name, images=[(512, 512)], sampling_steps=2, guidance=guidance, batch_size=3, parts="text")
    assert (text.to_dict()["workload"]["batch"], text.global_batch) == (3, 3)


def test_a_pipeline_that_runs_another_one() -> None:
    prior = {"_class_name": "PriorTransformer", "num_embeddings": 77, "num_layers": 2}
    encoder = {"_class_name": "CLIPTextModelWithProjection", "hidden_size": 768, "intermediate_size": 3072}
    unet = {"_class_name": "UNet2DConditionModel", "sample_size": 64}
    config = {"_class_name": "StableUnCLIPPipeline", "unet": unet, "prior": prior, "prior_text_encoder": encoder}
    run = {"images": [(512, 512)], "sampling_steps": 4}
    whole = estimate_flops(config, **run)
    assert [(part.name, part.runs) for part in whole.pipeline.parts] == [
        ("unet", 4), ("prior", 50), ("prior_text_encoder", 2),
    ]  # fmt: skip
    assert whole.notes[:1] == ["prior runs 25 steps"]
    by_part = {name: estimate_flops(config, **run, parts=name).total for name in ("unet", "prior", "text")}
    assert sum(by_part.values()) == whole.total
    assert by_part["unet"] + by_part["prior"] == estimate_flops(config, **run, parts="denoiser").total
    alone = {"_class_name": "KandinskyPriorPipeline", "prior": prior}
    assert by_part["prior"] == estimate_flops(alone, sampling_steps=25).total
    assert bind(config).parameters()["total"] > sum(bind(part).parameters()["total"] for part in (unet, prior))
    assert (
        estimate_flops(config, images=[(512, 512)]).total == estimate_flops(unet, images=[(512, 512)]).total
    )  # a step
    with pytest.raises(FlopcalcError, match="needs its prior's config"):
        estimate_flops({key: part for key, part in config.items() if key != "prior"}, **run)
