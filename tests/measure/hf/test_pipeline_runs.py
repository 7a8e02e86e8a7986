"""Whole sampling runs of tiny diffusers pipelines under a counter: how often each part runs, and on what sizes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusion import MORE, TINY, TINY_TEXT, TINY_VAES, build
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopcalc import estimate_flops
from flopcalc.measure.counters.flop_counter import count_flops

KL = {
    "block_out_channels": [4, 8, 8, 8], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "shift_factor": 0.1,
}  # fmt: skip
PLAIN = {"latents_mean": [0.0, 0.0], "latents_std": [1.0, 1.0]}
TWO = {"in_channels": 2, "out_channels": 2}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0, "solver_order": 1}
WIDTH, HEIGHT, TEXT, STEPS = 64, 96, 11, 3


class Case:
    """A pipeline's class, its denoiser, VAE and scheduler, and what its call takes beside sizes."""

    def __init__(
        self, name: str, denoiser: str, changes: dict[str, Any], vae: str, vae_changes: dict[str, Any],
        scheduler: str, options: dict[str, Any] | None = None, *, config: dict[str, Any] | None = None,
        frames: int = 0, text: int = TEXT, pooled: bool = False, mask: str = "", scale: str = "guidance_scale",
        size: tuple[int, int] = (WIDTH, HEIGHT), more: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.denoiser, self.scheduler, self.options = name, denoiser, scheduler, options or {}
        self.config = {**(TINY[denoiser] if config is None else config), **changes}
        self.vae, self.vae_config = vae, {**(KL if vae == "AutoencoderKL" else TINY_VAES[vae]), **vae_changes}
        self.frames, self.text, self.pooled, self.mask, self.scale = frames, text, pooled, mask, scale
        self.size, self.more = size, more or {}

    def make_call(self, guided: bool) -> dict[str, Any]:
        found: dict[str, Any] = {**self.more}
        if self.text:
            sides = ("", "negative_") if guided or self.scale == "always" else ("",)
            for side in sides:
                found[f"{side}prompt_embeds"] = torch.randn(1, self.text, 10)
                if self.pooled:
                    found[f"{side}pooled_prompt_embeds"] = torch.randn(1, 6)
                if self.mask:
                    found[f"{side}{self.mask}"] = torch.ones(1, self.text).long()
            found |= {"width": self.size[0], "height": self.size[1]}
        if self.frames:
            found["num_frames"] = self.frames
        if self.scale:
            found["guidance_scale" if self.scale == "always" else self.scale] = 4.0 if guided else 1.0
        return found


KL_CASES = {"vae": "AutoencoderKL", "vae_changes": {}}
EULER = "FlowMatchEulerDiscreteScheduler"
MASK = "prompt_attention_mask"
CASES: dict[str, Case] = {
    "sd": Case("StableDiffusionPipeline", "UNet2DConditionModel", {}, scheduler="DDIMScheduler", **KL_CASES),
    "sd, odd latents": Case(
        "StableDiffusionPipeline", "UNet2DConditionModel", {}, scheduler="DDIMScheduler", size=(40, 56), **KL_CASES
    ),
    "sdxl": Case(
        "StableDiffusionXLPipeline", "UNet2DConditionModel", {}, scheduler="DDIMScheduler", pooled=True,
        config=MORE["UNet2DConditionModel"][0], **KL_CASES,
    ),
    "sd3": Case(  # 77 tokens of CLIP come before those of T5
        "StableDiffusion3Pipeline", "SD3Transformer2DModel", {}, scheduler=EULER, pooled=True, text=77 + TEXT,
        **KL_CASES,
    ),
    "flux": Case(
        "FluxPipeline", "FluxTransformer2DModel", {}, "AutoencoderKL", {"latent_channels": 2}, EULER, pooled=True,
        scale="true_cfg_scale",
    ),
    "qwen-image": Case(
        "QwenImagePipeline", "QwenImageTransformer2DModel", {}, "AutoencoderKLQwenImage", PLAIN, EULER,
        {"use_dynamic_shifting": True}, mask="prompt_embeds_mask", scale="true_cfg_scale",
    ),
    "pixart": Case(
        "PixArtSigmaPipeline", "PixArtTransformer2DModel", {"use_additional_conditions": False},
        scheduler="DDIMScheduler", mask=MASK, scale="always",
        more={"use_resolution_binning": False, "negative_prompt": None}, **KL_CASES,
    ),
    "dit": Case(
        "DiTPipeline", "DiTTransformer2DModel", {"num_embeds_ada_norm": 1000}, scheduler="DDIMScheduler", text=0,
        size=(64, 64), more={"class_labels": [1]}, **KL_CASES,
    ),
    "wan": Case(
        "WanPipeline", "WanTransformer3DModel", TWO, "AutoencoderKLWan", PLAIN, "UniPCMultistepScheduler", FLOW,
        frames=13, scale="always",
    ),
    "hunyuanvideo": Case(
        "HunyuanVideoPipeline", "HunyuanVideoTransformer3DModel", TWO, "AutoencoderKLHunyuanVideo", {}, EULER,
        frames=25, pooled=True, mask=MASK, scale="",
    ),
    "ltx-video": Case(
        "LTXPipeline", "LTXVideoTransformer3DModel", {"in_channels": 6, "out_channels": 6}, "AutoencoderKLLTXVideo",
        {}, EULER, frames=17, mask=MASK, scale="always",
    ),
    "cogvideox": Case(
        "CogVideoXPipeline", "CogVideoXTransformer3DModel",
        {**TWO, "attention_head_dim": 16, "max_text_seq_length": TEXT}, "AutoencoderKLCogVideoX", {},
        "CogVideoXDDIMScheduler", frames=13, scale="always", more={"max_sequence_length": TEXT},
    ),
}  # fmt: skip
RUNS = [(name, guided) for name in CASES for guided in (True, False) if CASES[name].scale or not guided]


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_run_is_counted_exactly(name: str, guided: bool) -> None:
    import diffusers
    import transformers

    case = CASES[name]
    denoiser, vae = (build(*each).eval() for each in ((case.denoiser, case.config), (case.vae, case.vae_config)))
    key = "unet" if case.denoiser.startswith("UNet") else "transformer"
    kind = getattr(diffusers, case.name)
    parts: dict[str, Any] = {key: denoiser, "vae": vae}
    parts["scheduler"] = getattr(diffusers, case.scheduler)(**case.options)
    needed = inspect.signature(kind.__init__).parameters.values()
    given = {each.name: None for each in needed if each.name != "self" and each.default is inspect.Parameter.empty}
    if name == "sdxl":  # its width is read
        config = transformers.CLIPTextConfig(**TINY_TEXT["CLIPTextModelWithProjection"])
        given["text_encoder_2"] = transformers.CLIPTextModelWithProjection(config)
    pipeline = kind(**{**given, **parts})
    pipeline.set_progress_bar_config(disable=True)
    call = case.make_call(guided)

    def run() -> None:
        with torch.no_grad():
            pipeline(num_inference_steps=STEPS, output_type="np", **call)

    with sdpa_kernel(SDPBackend.MATH):
        counted = count_flops(torch.nn.ModuleDict({key: denoiser, "vae": vae}), run)
    theirs = dict.fromkeys((key, "vae"), 0)
    for path, row in counted.rows.items():
        theirs[path.partition(".")[0]] += sum(row)
    sizes: dict[str, Any] = {"videos": [(*case.size, case.frames)]} if case.frames else {"images": [case.size]}
    if case.text:
        sizes["text"] = TEXT
    config = {part: {**parts[part].config, "_class_name": type(parts[part]).__name__} for part in (key, "vae")}
    estimate = estimate_flops(
        {"_class_name": case.name, **config},
        **sizes,
        sampling_steps=STEPS,
        guidance="on" if guided else "off",
        convention="full",
        attention_kernel="eager",
    )
    assert {part.name: part.flops.total for part in estimate.pipeline.parts} == theirs
