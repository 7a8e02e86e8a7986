"""Whole sampling runs of tiny diffusers pipelines under a counter: how often each part runs, and on what sizes."""

from __future__ import annotations

import inspect
from copy import copy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusion import LATER_VAES, MORE, TINY, TINY_TEXT, TINY_VAES, build
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BatchFeature

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


class SafetyChecker(torch.nn.Module):
    """Lets all texts and videos pass, where Cosmos asks for one."""

    device = torch.device("cpu")

    def check_text_safety(self, _text: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


class ImageEncoder(torch.nn.Module):
    """Hands on states of the shape that CLIP's vision tower gives; it also prepares the image for itself."""

    device = torch.device("cpu")

    def forward(self, image: Any = None, **_options: Any) -> Any:
        if image is None:
            return BatchFeature({"image": torch.zeros(1)})
        return SimpleNamespace(hidden_states=[torch.randn(1, 257, 7)] * 3)


class Case:
    """A pipeline's class, its denoiser, VAE and scheduler, and what its call takes beside sizes."""

    def __init__(
        self, name: str, denoiser: str, changes: dict[str, Any], vae: str, vae_changes: dict[str, Any],
        scheduler: str, options: dict[str, Any] | None = None, *, config: dict[str, Any] | None = None,
        frames: int = 0, text: int = TEXT, pooled: bool = False, mask: str = "", scale: str = "guidance_scale",
        size: tuple[int, int] = (WIDTH, HEIGHT), more: dict[str, Any] | None = None, images: str = "", video: str = "",
        asked: dict[str, Any] | None = None, sized: bool = True, steps: int = STEPS,
    ) -> None:  # fmt: skip
        self.name, self.denoiser, self.scheduler, self.options = name, denoiser, scheduler, options or {}
        self.config = {**(TINY[denoiser] if config is None else config), **changes}
        vaes = {**TINY_VAES, **LATER_VAES, "AutoencoderKL": KL}
        self.vae, self.vae_config = vae, {**vaes[vae], **vae_changes}
        self.frames, self.text, self.pooled, self.mask, self.scale = frames, text, pooled, mask, scale
        self.size, self.more, self.images, self.video = size, more or {}, images.split(), video
        self.asked, self.sized, self.steps, self.two, self.small = asked or {}, sized, steps, "", ""
        self.beside: dict[str, Any] = {}  # a ControlNet's config
        self.length, self.set = "num_frames", {}  # what its call names the frames; what its pipeline holds
        self.module = ""  # where its class is, if diffusers itself has a stand-in for it
        self.others: dict[str, tuple[str, dict[str, Any]]] = {}  # further parts that are counted: class and config

    def change(self, name: str, **changes: Any) -> Case:
        """A sibling: the same with another pipeline's class, and what its call takes in addition."""
        found = copy(self)
        config, more = changes.pop("config", {}), changes.pop("more", {})
        found.images = changes.pop("images", "").split()
        for key, value in {**changes, "name": name}.items():
            setattr(found, key, value)
        found.config, found.more = {**self.config, **config}, {**self.more, **more}
        return found

    @property
    def kind(self) -> str:
        """What a ControlNet's class begins with."""
        kinds = {
            "Flux": "Flux", "QwenImage": "QwenImage", "StableDiffusion3": "SD3", "Sana": "Sana",
            "HunyuanDiT": "HunyuanDiT2D", "ZImage": "ZImage",
        }  # fmt: skip
        return next((kind for start, kind in kinds.items() if self.name.startswith(start)), "")

    def make_call(self, guided: bool) -> dict[str, Any]:
        found: dict[str, Any] = {**self.more}
        kind = torch.float if self.name.startswith("Chroma") else torch.long  # of masks
        if self.text:
            sides = ("", "negative_") if guided or self.scale in ("always", "qwen") else ("",)
            for side in sides:
                found[f"{side}prompt_embeds"] = torch.randn(1, self.text, 10)
                if self.scale == "zero":  # a list of samples
                    found[f"{side}prompt_embeds"] = list(found[f"{side}prompt_embeds"])
                if self.scale == "qwen":  # Kandinsky 5: embeddings of two encoders, and where the samples begin
                    found[f"{side}prompt_embeds_qwen"] = found.pop(f"{side}prompt_embeds")
                    found[f"{side}prompt_embeds_clip"] = torch.randn(1, 6)
                    found[f"{side}prompt_cu_seqlens"] = torch.tensor([0, self.text], dtype=torch.int32)
                if self.pooled:
                    found[f"{side}pooled_prompt_embeds"] = torch.randn(1, 6)
                if self.mask:
                    found[f"{side}{self.mask}"] = torch.ones(1, self.text).to(kind)
            found |= {"width": self.size[0], "height": self.size[1]} if self.sized else {}
        picture = Image.new("RGB", self.size)
        for key in self.images:
            found[key] = picture.convert("L") if "mask" in key else picture
        if self.small:
            found[self.small] = picture.resize((self.size[0] // 4, self.size[1] // 4))
        if self.two:
            found[self.two] = [picture] * 2
        if self.video:
            found[self.video] = [picture] * self.frames
        elif self.frames:
            found[self.length] = self.frames
        if self.scale and self.scale != "guider":
            key = "guidance_scale" if self.scale in ("always", "zero", "qwen") else self.scale
            found[key] = 4.0 if guided else 1.0 - (self.scale == "zero")
            if any(name.startswith("prior") for name in self.others):
                found["prior_guidance_scale"] = found[key]
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
_SD, _SDXL, _SD3, _FLUX, _QWEN = (CASES[name] for name in ("sd", "sdxl", "sd3", "flux", "qwen-image"))
_COG, _WAN, _LTX, _HUNYUAN = (CASES[name] for name in ("cogvideox", "wan", "ltx-video", "hunyuanvideo"))
PARTLY: dict[str, Any] = {"more": {"strength": 0.5}, "asked": {"strength": 0.5}, "steps": 5}  # 2 or 3 of 5 steps
HALF_WAY = {**PARTLY, "images": "image"}
NINE, TWICE_OF_FLUX = {"in_channels": 9}, {"in_channels": 16, "out_channels": 8}
CASES |= {
    "sd, heun": _SD.change("StableDiffusionPipeline", scheduler="HeunDiscreteScheduler"),
    "sd, pndm": _SD.change("StableDiffusionPipeline", scheduler="PNDMScheduler", options={"skip_prk_steps": True}),
    "sd, pndm, long": _SD.change("StableDiffusionPipeline", scheduler="PNDMScheduler", steps=5),
    "sd, lcm": _SD.change(
        "LatentConsistencyModelPipeline", scheduler="LCMScheduler", config={"time_cond_proj_dim": 6}, scale=""
    ),
    "lcm, image": _SD.change(
        "LatentConsistencyModelImg2ImgPipeline",
        scheduler="LCMScheduler",
        config={"time_cond_proj_dim": 6},
        scale="",
        images="image",
        sized=False,
    ),
    "sd, image": _SD.change("StableDiffusionImg2ImgPipeline", sized=False, **HALF_WAY),
    "sd, image, heun": _SD.change(
        "StableDiffusionImg2ImgPipeline", sized=False, scheduler="HeunDiscreteScheduler", **HALF_WAY
    ),
    "sd, inpaint": _SD.change("StableDiffusionInpaintPipeline", images="image mask_image"),
    "sd, inpaint, 9": _SD.change("StableDiffusionInpaintPipeline", images="image mask_image", config=NINE),
    "sd, inpaint, 9, partly": _SD.change(
        "StableDiffusionInpaintPipeline", config=NINE, **{**PARTLY, "images": "image mask_image"}
    ),
    "sd, instruct": _SD.change(
        "StableDiffusionInstructPix2PixPipeline", images="image", config={"in_channels": 8}, sized=False
    ),
    "sdxl, image": _SDXL.change("StableDiffusionXLImg2ImgPipeline", sized=False, **HALF_WAY),
    "sdxl, inpaint": _SDXL.change(
        "StableDiffusionXLInpaintPipeline", images="image mask_image", asked={"strength": 0.9999}
    ),
    "sdxl, instruct": _SDXL.change(
        "StableDiffusionXLInstructPix2PixPipeline", images="image", config={"in_channels": 8}
    ),
    "sd3, image": _SD3.change("StableDiffusion3Img2ImgPipeline", **HALF_WAY),
    "sd3, inpaint": _SD3.change(
        "StableDiffusion3InpaintPipeline",
        config={"in_channels": 16, "out_channels": 16},
        vae_config={**KL, "latent_channels": 16},
        **{**PARTLY, "images": "image mask_image"},
    ),
    "flux, image": _FLUX.change("FluxImg2ImgPipeline", **HALF_WAY),
    "flux, inpaint": _FLUX.change("FluxInpaintPipeline", **{**PARTLY, "images": "image mask_image"}),
    "flux, fill": _FLUX.change(
        "FluxFillPipeline", images="image mask_image", scale="", config={"in_channels": 8 + 8 + 256, "out_channels": 8}
    ),
    "flux, control": _FLUX.change("FluxControlPipeline", images="control_image", scale="", config=TWICE_OF_FLUX),
    "flux, control, image": _FLUX.change(
        "FluxControlImg2ImgPipeline", scale="", config=TWICE_OF_FLUX, **{**PARTLY, "images": "image control_image"}
    ),
    "flux, control, inpaint": _FLUX.change(
        "FluxControlInpaintPipeline",
        scale="",
        config={"in_channels": 16, "out_channels": 8},
        **{**PARTLY, "images": "image control_image mask_image"},
    ),
    "flux, kontext": _FLUX.change(
        "FluxKontextPipeline", images="image", more={"_auto_resize": False, "max_area": WIDTH * HEIGHT}
    ),
    "flux, kontext, inpaint": _FLUX.change(
        "FluxKontextInpaintPipeline",
        images="image mask_image",
        more={"_auto_resize": False, "max_area": WIDTH * HEIGHT},
    ),
    "qwen-image, image": _QWEN.change("QwenImageImg2ImgPipeline", **HALF_WAY),
    "qwen-image, inpaint": _QWEN.change("QwenImageInpaintPipeline", **{**PARTLY, "images": "image mask_image"}),
    "cogvideox, image": _COG.change("CogVideoXImageToVideoPipeline", images="image", config={"in_channels": 4}),
    "cogvideox, video": _COG.change("CogVideoXVideoToVideoPipeline", **{**PARTLY, "images": "", "video": "video"}),
    "cogvideox, control": _COG.change("CogVideoXFunControlPipeline", video="control_video", config={"in_channels": 4}),
    "wan, video": _WAN.change("WanVideoToVideoPipeline", **{**PARTLY, "images": "", "video": "video"}),
    "wan, edit": _WAN.change("LucyEditPipeline", video="video", config={"in_channels": 4}),
    "ltx-video, image": _LTX.change("LTXImageToVideoPipeline", images="image"),
    "ltx-video, condition": _LTX.change("LTXConditionPipeline", images="image"),
    "hunyuanvideo, skyreels": _HUNYUAN.change(
        "HunyuanSkyreelsImageToVideoPipeline", images="image", config={"in_channels": 4}, scale="true_cfg_scale"
    ),
}
_FLUX2 = Case(
    "Flux2Pipeline",
    "Flux2Transformer2DModel",
    {},
    "AutoencoderKLFlux2",
    {},
    EULER,
    {"use_dynamic_shifting": True},
    scale="",
    asked={"references": 0},
)
_CHROMA = Case(
    "ChromaPipeline",
    "ChromaTransformer2DModel",
    {},
    "AutoencoderKL",
    {"latent_channels": 2},
    EULER,
    mask=MASK,
    scale="always",
)
_SANA = Case(
    "SanaPipeline",
    "SanaTransformer2DModel",
    {},
    "AutoencoderDC",
    {},
    "DPMSolverMultistepScheduler",
    mask=MASK,
    scale="always",
    more={"use_resolution_binning": False},
)
_ZIMAGE = Case("ZImagePipeline", "ZImageTransformer2DModel", {}, scheduler=EULER, scale="zero", **KL_CASES)
_COGVIEW = Case("CogView4Pipeline", "CogView4Transformer2DModel", {}, scheduler=EULER, scale="always", **KL_CASES)
_CONTROL = {**TINY["ControlNetModel"], "conditioning_embedding_out_channels": [6, 10, 14, 4]}
_CONTROL_XL = {
    "conditioning_embedding_out_channels": [6, 10, 14, 4],
    **{
        key: value
        for key, value in MORE["UNet2DConditionModel"][0].items()
        if key not in ("sample_size", "up_block_types")
    },
}
CASES |= {
    "sd, upscale": _SD.change(
        "StableDiffusionUpscalePipeline",
        sized=False,
        small="image",
        config={"in_channels": 7, "num_class_embeds": 1000},
        vae_config={
            **KL,
            "block_out_channels": [4, 8, 8],
            "down_block_types": ["DownEncoderBlock2D"] * 3,
            "up_block_types": ["UpDecoderBlock2D"] * 3,
        },
    ),
    "sd, controlnet": _SD.change("StableDiffusionControlNetPipeline", images="image", beside=_CONTROL),
    "sd, controlnet, image": _SD.change(
        "StableDiffusionControlNetImg2ImgPipeline", beside=_CONTROL, **{**PARTLY, "images": "image control_image"}
    ),
    "sd, controlnet, inpaint": _SD.change(
        "StableDiffusionControlNetInpaintPipeline", beside=_CONTROL, images="image mask_image control_image"
    ),
    "sdxl, controlnet": _SDXL.change("StableDiffusionXLControlNetPipeline", images="image", beside=_CONTROL_XL),
    "sdxl, controlnet, image": _SDXL.change(
        "StableDiffusionXLControlNetImg2ImgPipeline", beside=_CONTROL_XL, **{**PARTLY, "images": "image control_image"}
    ),
    "sdxl, controlnet, inpaint": _SDXL.change(
        "StableDiffusionXLControlNetInpaintPipeline",
        beside=_CONTROL_XL,
        images="image mask_image control_image",
        asked={"strength": 0.9999},
    ),
    "flux, controlnet": _FLUX.change(
        "FluxControlNetPipeline", images="control_image", beside=TINY["FluxControlNetModel"]
    ),
    "flux, controlnet, image": _FLUX.change(
        "FluxControlNetImg2ImgPipeline",
        beside=TINY["FluxControlNetModel"],
        scale="",
        **{**PARTLY, "images": "image control_image"},
    ),
    "flux, controlnet, inpaint": _FLUX.change(
        "FluxControlNetInpaintPipeline",
        beside=TINY["FluxControlNetModel"],
        scale="",
        **{**PARTLY, "images": "image mask_image control_image"},
    ),
    "qwen-image, controlnet": _QWEN.change(
        "QwenImageControlNetPipeline",
        images="control_image",
        beside={**TINY["QwenImageControlNetModel"], "extra_condition_channels": 0},
    ),
    "flux2": _FLUX2,
    "flux2, two images": _FLUX2.change(
        "Flux2Pipeline", size=(256, 256), images="", two="image", asked={"references": 2}
    ),
    "flux2, klein": _FLUX2.change("Flux2KleinPipeline", scale="always", asked={}, config={"guidance_embeds": False}),
    "chroma": _CHROMA,
    "chroma, image": _CHROMA.change("ChromaImg2ImgPipeline", **HALF_WAY),
    "auraflow": Case(
        "AuraFlowPipeline", "AuraFlowTransformer2DModel", {}, scheduler=EULER, mask=MASK, scale="always", **KL_CASES
    ),
    "lumina2": Case(
        "Lumina2Pipeline", "Lumina2Transformer2DModel", {}, scheduler=EULER, mask=MASK, scale="always", **KL_CASES
    ),
    "sana": _SANA.change("SanaPipeline", more={"negative_prompt": None}),
    "sana, sprint": _SANA.change(
        "SanaSprintPipeline", scheduler="SCMScheduler", config={"guidance_embeds": True}, scale="", steps=2
    ),
    "sana, sprint, image": _SANA.change(
        "SanaSprintImg2ImgPipeline",
        scheduler="SCMScheduler",
        config={"guidance_embeds": True},
        scale="",
        images="image",
        steps=2,
        more={"strength": 0.5},
        asked={"strength": 0.5},
    ),
    "wan, vace": _WAN.change(
        "WanVACEPipeline",
        denoiser="WanVACETransformer3DModel",
        config={"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 2 * 2 + 64},
    ),
    "skyreels": _WAN.change("SkyReelsV2Pipeline", denoiser="SkyReelsV2Transformer3DModel"),
    "bria": Case(
        "BriaPipeline",
        "BriaTransformer2DModel",
        {},
        "AutoencoderKL",
        {"latent_channels": 2},
        EULER,
        scale="always",
        text=128,
    ),
    "ovis": Case(
        "OvisImagePipeline",
        "OvisImageTransformer2DModel",
        {},
        "AutoencoderKL",
        {"latent_channels": 2},
        EULER,
        scale="always",
        more={"negative_prompt": None},
    ),
    "cogview3": Case(
        "CogView3PlusPipeline",
        "CogView3PlusTransformer2DModel",
        {"pos_embed_max_size": 16},
        scheduler="CogVideoXDDIMScheduler",
        scale="always",
        **KL_CASES,
    ),
    "kandinsky5": Case(
        "Kandinsky5T2VPipeline",
        "Kandinsky5Transformer3DModel",
        {"in_visual_dim": 2, "visual_cond": True},
        "AutoencoderKLHunyuanVideo",
        {},
        EULER,
        frames=13,
        scale="qwen",
    ),
    "kandinsky5, image": Case(
        "Kandinsky5T2IPipeline",
        "Kandinsky5Transformer3DModel",
        {"out_visual_dim": 4, "num_visual_blocks": 1},
        "AutoencoderKL",
        {"mid_block_add_attention": False},
        EULER,
        scale="qwen",
        size=(768, 1280),
        steps=1,
    ),
    "z-image": _ZIMAGE,
    "z-image, image": _ZIMAGE.change("ZImageImg2ImgPipeline", **HALF_WAY),
    "z-image, inpaint": _ZIMAGE.change("ZImageInpaintPipeline", images="image mask_image"),
    "cogview4": _COGVIEW,
    "cogview4, control": _COGVIEW.change("CogView4ControlPipeline", images="control_image", config={"in_channels": 8}),
}
_DIT = Case(
    "HunyuanDiTPipeline",
    "HunyuanDiT2DModel",
    {"text_len": TEXT},
    scheduler="DDIMScheduler",
    mask=MASK,
    scale="always",
    more={
        "use_resolution_binning": False,
        **{f"{side}prompt_embeds_2": torch.randn(1, 6, 16) for side in ("", "negative_")},
        **{f"{side}prompt_attention_mask_2": torch.ones(1, 6).long() for side in ("", "negative_")},
    },
    **KL_CASES,
)
_COSMOS = Case(
    "Cosmos2TextToImagePipeline",
    "CosmosTransformer3DModel",
    {**TWO, "max_size": [8, 32, 32]},
    "AutoencoderKLWan",
    PLAIN,
    EULER,
    scale="always",
)
_COSMOS.set = {"safety_checker": SafetyChecker()}
_PICTURED = {"in_channels": 8, "out_channels": 2, "image_dim": 7, "added_kv_proj_dim": 24}
_MARIGOLD = _SD.change(
    "MarigoldDepthPipeline", text=0, sized=False, images="image", config={"in_channels": 8}, scale=""
)
_MARIGOLD.set = {"empty_text_embedding": torch.zeros(1, 2, 10)}
_MARIGOLD.more = {"processing_resolution": 0}
CASES |= {
    "hunyuan-dit": _DIT,
    "hunyuan-dit, controlnet": _DIT.change(
        "HunyuanDiTControlNetPipeline",
        images="control_image",
        beside={**TINY["HunyuanDiT2DControlNetModel"], "text_len": TEXT, "transformer_num_layers": 4},
    ),
    "sd3, controlnet": _SD3.change(
        "StableDiffusion3ControlNetPipeline", images="control_image", beside=TINY["SD3ControlNetModel"]
    ),
    "sd3, controlnet, inpaint": _SD3.change(
        "StableDiffusion3ControlNetInpaintingPipeline",
        images="control_image control_mask",
        beside={**TINY["SD3ControlNetModel"], "extra_conditioning_channels": 1},
    ),
    "sana, controlnet": _SANA.change(
        "SanaControlNetPipeline",
        images="control_image",
        beside=TINY["SanaControlNetModel"],
        more={"negative_prompt": None},
    ),
    "lumina": Case(
        "LuminaPipeline", "LuminaNextDiT2DModel", {}, scheduler=EULER, mask=MASK, scale="always", **KL_CASES
    ),
    "cosmos2": _COSMOS,
    "cosmos2, video": _COSMOS.change(
        "Cosmos2VideoToWorldPipeline", config={"in_channels": 3}, frames=13, images="image"
    ),
    "skyreels, image": _WAN.change(
        "SkyReelsV2ImageToVideoPipeline",
        denoiser="SkyReelsV2Transformer3DModel",
        config=_PICTURED,
        images="image",
        text=512,
        asked={"text": 512},
        set={"image_encoder": ImageEncoder(), "image_processor": ImageEncoder()},
    ),
    "kandinsky5, image to video": CASES["kandinsky5"].change("Kandinsky5I2VPipeline", images="image"),
    "qwen-image, controlnet, inpaint": _QWEN.change(
        "QwenImageControlNetInpaintPipeline",
        images="control_image control_mask",
        beside=TINY["QwenImageControlNetModel"],
    ),
    "sd, depth": _SD.change(
        "StableDiffusionDepth2ImgPipeline",
        sized=False,
        config={"in_channels": 5},
        **{**HALF_WAY, "more": {"strength": 0.5, "depth_map": torch.randn(1, 96, 64)}},
    ),
    "marigold, depth": _MARIGOLD,
    "marigold, normals": _MARIGOLD.change("MarigoldNormalsPipeline", images="image"),
}
_LATTE = Case(
    "LattePipeline",
    "LatteTransformer3DModel",
    {},
    scheduler="DDIMScheduler",
    frames=3,
    scale="always",
    more={"mask_feature": False, "negative_prompt": None},
    **KL_CASES,
)
_LATTE.length = "video_length"
_KREA = Case(
    "Krea2Pipeline", "Krea2Transformer2DModel", {}, "AutoencoderKLQwenImage", PLAIN, EULER, scale="zero", text=0
)
_KREA.more = {
    "width": WIDTH,
    "height": HEIGHT,
    **{f"{side}prompt_embeds": torch.randn(1, TEXT, 3, 16) for side in ("", "negative_")},
    **{f"{side}prompt_embeds_mask": torch.ones(1, TEXT).bool() for side in ("", "negative_")},
}
_KREA.asked = {"text": TEXT}
_HIDREAM = Case(
    "HiDreamImagePipeline",
    "HiDreamImageTransformer2DModel",
    {},
    scheduler=EULER,
    scale="always",
    text=0,
    size=(832, 1248),
    steps=1,
    **KL_CASES,
)
_HIDREAM.config = {
    **_HIDREAM.config,
    "max_resolution": [128, 128],
    "num_layers": 1,
    "num_single_layers": 1,
    "llama_layers": [0, 1],
}
_HIDREAM.more = {
    "width": 832,
    "height": 1248,
    **{f"{side}prompt_embeds_t5": torch.randn(1, TEXT, 10) for side in ("", "negative_")},
    **{f"{side}prompt_embeds_llama3": torch.randn(2, 1, TEXT, 14) for side in ("", "negative_")},
    **{f"{side}pooled_prompt_embeds": torch.randn(1, 6) for side in ("", "negative_")},
}
_HIDREAM.asked = {"text": TEXT}
_ERNIE = Case(
    "ErnieImagePipeline",
    "ErnieImageTransformer2DModel",
    {"out_channels": 8},
    "AutoencoderKLFlux2",
    {},
    EULER,
    scale="always",
    text=0,
)
_ERNIE.more = {
    "width": WIDTH,
    "height": HEIGHT,
    **{f"{side}prompt_embeds": [torch.randn(TEXT, 10)] for side in ("", "negative_")},
}
_ERNIE.asked = {"text": TEXT}
_DDPM = Case("DDPMPipeline", "UNet2DModel", {}, scheduler="DDPMScheduler", text=0, scale="", size=(16, 16), **KL_CASES)
CASES |= {
    "ernie": _ERNIE,
    "nucleus": Case(
        "NucleusMoEImagePipeline",
        "NucleusMoEImageTransformer2DModel",
        {},
        "AutoencoderKLQwenImage",
        PLAIN,
        EULER,
        {"use_dynamic_shifting": True},
        mask="prompt_embeds_mask",
        scale="always",
    ),
    "anyflow": _WAN.change(
        "AnyFlowPipeline",
        denoiser="AnyFlowTransformer3DModel",
        scheduler="FlowMapEulerDiscreteScheduler",
        options={},
        scale="guidance_scale",
    ),
    "ddpm": _DDPM,
    "ddim": _DDPM.change("DDIMPipeline", scheduler="DDIMScheduler"),
    "consistency": _DDPM.change("ConsistencyModelPipeline", scheduler="CMStochasticIterativeScheduler"),
    "latte": _LATTE,
    "krea2": _KREA,
    "hidream": _HIDREAM,
    "prx": Case(
        "PRXPipeline",
        "PRXTransformer2DModel",
        {},
        scheduler=EULER,
        scale="always",
        more={
            "use_resolution_binning": False,
            **{f"{side}prompt_attention_mask": torch.ones(1, TEXT).bool() for side in ("", "negative_")},
        },
        **KL_CASES,
    ),
}
_PIXART = CASES["pixart"]
_AGAIN = {**PARTLY, "images": "image control_image"}
CASES |= {
    "sd, pag": _SD.change("StableDiffusionPAGPipeline"),
    "sd, pag, image": _SD.change("StableDiffusionPAGImg2ImgPipeline", sized=False, **HALF_WAY),
    "sd, pag, inpaint": _SD.change(
        "StableDiffusionPAGInpaintPipeline", images="image mask_image", asked={"strength": 0.9999}
    ),
    "sd, pag, controlnet": _SD.change("StableDiffusionControlNetPAGPipeline", images="image", beside=_CONTROL),
    "sd, pag, controlnet, inpaint": _SD.change(
        "StableDiffusionControlNetPAGInpaintPipeline", beside=_CONTROL, images="image mask_image control_image"
    ),
    "sdxl, pag": _SDXL.change("StableDiffusionXLPAGPipeline"),
    "sdxl, pag, image": _SDXL.change("StableDiffusionXLPAGImg2ImgPipeline", sized=False, **HALF_WAY),
    "sdxl, pag, inpaint": _SDXL.change(
        "StableDiffusionXLPAGInpaintPipeline", images="image mask_image", asked={"strength": 0.9999}
    ),
    "sdxl, pag, controlnet": _SDXL.change("StableDiffusionXLControlNetPAGPipeline", images="image", beside=_CONTROL_XL),
    "sdxl, pag, controlnet, image": _SDXL.change(
        "StableDiffusionXLControlNetPAGImg2ImgPipeline", beside=_CONTROL_XL, **_AGAIN
    ),
    "sd3, pag": _SD3.change("StableDiffusion3PAGPipeline"),
    "sd3, pag, image": _SD3.change("StableDiffusion3PAGImg2ImgPipeline", **HALF_WAY),
    "pixart, pag": _PIXART.change("PixArtSigmaPAGPipeline"),
    "sana, pag": _SANA.change("SanaPAGPipeline", more={"negative_prompt": None}),
    "hunyuan-dit, pag": _DIT.change("HunyuanDiTPAGPipeline"),
}
NEEDS_GUIDANCE = ("hunyuan-dit, pag",)  # what does not run without it in diffusers
RUNS = [
    (name, guided)
    for name in CASES
    for guided in (True, False)
    if (CASES[name].scale or not guided) and (guided or name not in NEEDS_GUIDANCE)
]


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_run_is_counted_exactly(name: str, guided: bool) -> None:
    ours, theirs = count_both(CASES[name], guided)
    assert ours == theirs


_DENOISERS = ("unet", "transformer", "decoder", "prior", "latent_upsampler")


def count_both(case: Case, guided: bool) -> tuple[dict[str, int], dict[str, int]]:
    """FLOPs of a run's parts: ours, and those that a counter sees."""
    import diffusers
    import transformers

    denoiser, vae = (build(*each).eval() for each in ((case.denoiser, case.config), (case.vae, case.vae_config)))
    kind = getattr(import_module(f"diffusers.pipelines.{case.module}") if case.module else diffusers, case.name)
    names = inspect.signature(kind.__init__).parameters
    parts: dict[str, Any] = {
        next(key for key in _DENOISERS if key in names): denoiser,
        **{key: vae for key in ("vae", "movq", "vqvae", "vqgan") if key in names},
    }
    if case.beside and "adapter" in names:
        parts["adapter"] = build("T2IAdapter", case.beside).eval()
    elif case.beside and "unconditional_transformer" in names:
        parts["unconditional_transformer"] = build(case.denoiser, case.beside).eval()
    elif case.beside:
        name = "ControlNetUnionModel" if "Union" in case.name else f"{case.kind}ControlNetModel"
        name = "SparseControlNetModel" if "Sparse" in case.name else name
        parts["controlnet"] = build(name, case.beside).eval()
    parts |= {name: build(*other).eval() for name, other in case.others.items()}
    watched = torch.nn.ModuleDict(parts)
    needed = inspect.signature(kind.__init__).parameters
    if "scheduler" in needed:
        parts["scheduler"] = getattr(diffusers, case.scheduler)(**case.options)
    given = {
        each.name: None for each in needed.values() if each.name != "self" and each.default is inspect.Parameter.empty
    }
    if case.name.startswith(("StableDiffusionXL", "AnimateDiffSDXL")):  # its width is read
        config = transformers.CLIPTextConfig(**TINY_TEXT["CLIPTextModelWithProjection"])
        given["text_encoder_2"] = transformers.CLIPTextModelWithProjection(config)
    if "low_res_scheduler" in given:
        given["low_res_scheduler"] = diffusers.DDPMScheduler()
    if case.scale == "guider":
        given["guider"] = diffusers.ClassifierFreeGuidance(enabled=guided)
    pipeline = kind(**{**given, **parts, **{key: part for key, part in case.set.items() if key in needed}})
    for key, value in case.set.items():
        setattr(pipeline, key, value)
    pipeline.set_progress_bar_config(disable=True)
    call = case.make_call(guided)
    if "num_inference_steps" in inspect.signature(kind.__call__).parameters:
        call["num_inference_steps"] = case.steps

    if "num_inference_steps" in inspect.signature(kind.__call__).parameters:
        call["num_inference_steps"] = case.steps

    def run() -> None:
        with torch.no_grad():
            pipeline(output_type="np", **call)

    with sdpa_kernel(SDPBackend.MATH):
        counted = count_flops(watched, run)
    theirs = dict.fromkeys(watched, 0)
    for path, row in counted.rows.items():
        if not path and ("SAG" in case.name or "Pyramid" in case.name):  # it blurs an image; noise of its own
            continue
        theirs[path.partition(".")[0]] += sum(row)
    if case.kind == "ZImage" and case.beside:  # some modules are the transformer's too
        theirs["transformer"] += theirs.pop("controlnet")
    sizes: dict[str, Any] = {"videos": [(*case.size, case.frames)]} if case.frames else {"images": [case.size]}
    if case.text:
        sizes["text"] = TEXT
    config = {name: {**part.config, "_class_name": type(part).__name__} for name, part in parts.items()}
    estimate = estimate_flops(
        {"_class_name": case.name, **config},
        **{**sizes, **case.asked},
        sampling_steps=case.steps,
        guidance="on" if guided else "off",
        convention="full",
        attention_kernel="eager",
    )
    ours: dict[str, int] = {}
    for part in estimate.pipeline.parts:
        name = part.name.partition(",")[0]
        name = name if name in theirs else "transformer"
        ours[name] = ours.get(name, 0) + part.flops.total
    return ours, theirs
