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
    UPSAMPLERS,
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
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.components import count_calls, read_pipeline
from flopcalc.core.model.config import load_config
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.core.spec.spec import find_spec
from flopcalc.core.workload.workload import Workload
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


@pytest.mark.parametrize("phase", ["forward", "train"])
@pytest.mark.parametrize("changes", [{}, {"dims": 2}])
@pytest.mark.parametrize("name", UPSAMPLERS)
def test_rows_of_what_enlarges_latents_are_equal(name: str, changes: dict[str, Any], phase: str) -> None:
    assert find_differences(name, {**UPSAMPLERS[name], **changes}, 2, 0, (3, 4, 6), {}, phase) == {}


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


_ANIMATED = {
    "text_len": 7, "in_dim": 9, "dim": 24, "ffn_dim": 20, "freq_dim": 16, "text_dim": 10, "out_dim": 4, "num_heads": 2,
    "num_layers": 2,
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", ["plain", "lora"])
@pytest.mark.parametrize("pictured", [True, False])
def test_frames_that_attend_to_a_given_video_are_what_their_mask_lets_through(
    recipe: str, pictured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No counter sees flex attention: all pairs run as products, whose rows shrink to the pairs of its own mask."""
    from diffusers.models.transformers import transformer_wan_animate_2 as module
    from torch.nn.attention.flex_attention import create_mask

    masks: list[torch.Tensor] = []
    plain = module.dispatch_attention_fn

    def attend(*operands: torch.Tensor, attn_mask: torch.Tensor | None = None, **more: object) -> torch.Tensor:
        if attn_mask is None:
            return plain(*operands, attn_mask=None, **{**more, "backend": None})
        query, key, value = (each.transpose(1, 2) for each in operands)
        masks.append(attn_mask)
        scores = torch.where(attn_mask, query @ key.transpose(2, 3), float("-inf")).softmax(-1).nan_to_num()
        return (scores @ value).transpose(1, 2)

    def make_mask(rule: Any, Q_LEN: int, KV_LEN: int, device: Any, **_more: object) -> torch.Tensor:
        return create_mask(rule, 1, 1, Q_LEN, KV_LEN, device=str(device))

    monkeypatch.setattr(module, "dispatch_attention_fn", attend)
    monkeypatch.setattr(module, "create_block_mask", make_mask)
    name, config = "WanAnimate2Transformer3DModel", {**_ANIMATED, "use_img_emb": pictured}
    model = build(name, config)
    apply_recipe(model, RECIPES[recipe])
    batch, t, h, w = 2, 3, 4, 8
    cache = module.WanAnimate2KVCache(2)
    for layer in cache.layer_caches:
        layer.store(*torch.randn(2, batch, (t - 1) * h * w // 4, 2, 12))
    inputs = {
        "hidden_states": [torch.randn(4, t, h, w)] * batch,
        "condition_latents": [torch.randn(5, t, h, w)] * batch,
        "timestep": torch.ones(batch),
        "encoder_hidden_states": [torch.randn(5, 10)] * batch,
        "encoder_hidden_states_image": torch.randn(batch, 257, 1280) if pictured else None,
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "seq_len": t * h * w // 4,
        "reference_grid_sizes": torch.tensor([[t - 1, h // 2, w // 2]] * batch),
        "origin_len": 4 * (t - 2) + 1,
        "origin_area": [8 * h, 8 * w],
    }
    counted = count_step(model, inputs, True)
    assert counted.not_counted == {}
    bound = bind_model(load_config({"_class_name": name, **config}))
    estimator = CountedEstimator(bound, make_recipe(**RECIPES[recipe]), "full", "eager")
    estimate = estimator.estimate(Workload(batch, 5, grids=((t, h, w),) * batch))
    ours = {row.path: (row.forward, row.backward, row.recompute) for row in estimate.by_module(per_layer=True)}
    theirs = {
        path: tuple(
            each * int(masks[0].sum()) // masks[0].numel() if path.endswith("self_attn") else each for each in row
        )
        for path, row in counted.rows.items()
    }
    assert {path: row for path, row in ours.items() if any(row)} == {
        path: row for path, row in theirs.items() if any(row)
    }
    assert estimate.parameters["total"] == sum(each.numel() for each in model.parameters())
    with pytest.raises(FlopcalcError, match="gradient checkpointing in diffusers"):
        estimate_flops({"_class_name": name, **config}, videos=[(64, 64, 9)], recompute="full")
    apply_recipe(model, {"recompute": "full"})
    with pytest.raises(TypeError, match="unexpected keyword"):
        count_step(model, inputs, True)


_NEAR = {
    "latent_channels": 6, "patch_size": 2, "decoder_head_dim": 8, "decoder_stage_channels": [32, 16, 8, 8, 8],
    "decoder_stage_depths": [1, 2, 1, 1, 2], "decoder_t_emb_dim": 14, "decoder_stage5_kernel": [3, 5, 3],
    "decoder_stage_kernels": [[3, 3, 5], [3, 5, 3], [5, 3, 3], [3, 5, 5]],
    "decoder_upsample_channel_reductions": [2, 2, 1, 1], "decoder_num_inference_steps": 2,
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("size", [(1, 2, 3, 5), (2, 2, 4, 5)])
def test_attention_to_a_window_of_places_is_what_its_mask_lets_through(
    size: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No counter sees flex attention: its mask is made in full, and its pairs are counted one by one."""
    from diffusers.models.autoencoders import ltx2_diffusion_decoder as module
    from torch.nn.attention import flex_attention as flex

    counts: list[int] = []

    def attend(query: torch.Tensor, *_: torch.Tensor, attn_mask: torch.Tensor, **_more: object) -> torch.Tensor:
        batch, _places, heads, wide = query.shape
        counts.append(4 * batch * heads * wide * int(attn_mask.sum()))
        return query

    def make_mask(rule: Any, Q_LEN: int, KV_LEN: int, device: Any, **_more: object) -> torch.Tensor:
        return flex.create_mask(rule, 1, 1, Q_LEN, KV_LEN, device=str(device))

    monkeypatch.setattr(module, "dispatch_attention_fn", attend)
    monkeypatch.setattr(flex, "create_block_mask", make_mask)
    name = "LTX2VideoDiffusionDecoderModel"
    model = build(name, _NEAR)
    batch, t, h, w = size

    def run() -> None:
        with torch.no_grad():
            model.decode(torch.randn(batch, 6, t, h, w))

    counted = count_flops(model, run)
    assert counted.not_counted == {}
    load = Workload(batch, 0, phase="forward", videos=((t, h, w),) * batch)
    bound = bind_model(load_config({"_class_name": name, **_NEAR}), is_part=True)
    estimate = CountedEstimator(bound, None, "full", "eager").estimate(load)
    ours = {row.path: row.forward for row in estimate.by_module(per_layer=True) if row.forward}
    attention = {path: flops for path, flops in ours.items() if path.endswith(".attn")}
    assert {path: ours[path] for path in ours.keys() - attention.keys()} == {
        path: row[0] for path, row in counted.rows.items() if row[0]
    }
    stages = [value for path, value in attention.items() if "det_stages" in path]
    denoised = [value // 2 for path, value in attention.items() if "diff_blocks" in path]
    assert counts == [*stages, *denoised, *denoised]
    assert estimate.parameters["total"] == sum(each.numel() for each in model.parameters())


@pytest.mark.heavy
@pytest.mark.parametrize("side", ["encode", "decode"])
def test_a_search_for_the_nearest_codes_is_a_product(side: str) -> None:
    """cdist hides its product from a counter of operators; torch's profiler sees it."""
    config = {**TINY_VAES["VQModel"], "searches": side}
    model = build("VQModel", config)
    latents = torch.randn(2, config["latent_channels"], 4, 6)
    with torch.no_grad(), torch.profiler.profile(with_flops=True, record_shapes=True) as profiled:
        model.quantize(latents)
    products = [each for each in profiled.key_averages(group_by_input_shape=True) if each.key == "aten::mm"]
    sizes = ((1, 4, 6),) * 2 if side == "decode" else ((1, 16, 24),) * 2
    load = Workload(2, 0, phase="forward", **{"videos" if side == "decode" else "grids": sizes})
    bound = bind_model(load_config({"_class_name": "VQModel", **config}), is_part=True)
    rows = CountedEstimator(bound, None, "full", "eager").estimate(load).by_module(per_layer=True)
    assert sum(row.forward for row in rows if row.path == "quantize") == sum(each.flops for each in products)


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
