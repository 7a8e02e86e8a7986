"""Sampling runs of further tiny pipelines, as in test_pipeline_runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusers import DDPMScheduler
from diffusion import LATER_VAES, MORE, TINY, build
from PIL import Image
from test_pipeline_runs import (
    _CONTROL,
    EULER,
    HALF_WAY,
    KL,
    KL_CASES,
    MASK,
    PARTLY,
    PLAIN,
    TEXT,
    TWO,
    Case,
    count_both,
)
from test_pipeline_runs import CASES as FIRST
from transformers import BatchFeature

from flopcalc import estimate_flops


class Tokenizer:
    """Ids of any prompt, padded to a length."""

    model_max_length = 77

    def __call__(self, prompt: Any, **options: Any) -> Any:
        many = 1 if isinstance(prompt, str) else len(prompt)
        ids = torch.ones(many, options.get("max_length", 5)).long()
        return BatchFeature({"input_ids": ids, "attention_mask": ids})


class TextEncoder(torch.nn.Module):
    """Hands on embeddings of the shapes that Kandinsky's multilingual CLIP gives: of the prompt, and of its tokens."""

    device, dtype = torch.device("cpu"), torch.float32

    def forward(self, input_ids: Any, **_options: Any) -> tuple[Any, Any]:
        return torch.randn(len(input_ids), 10), torch.randn(*input_ids.shape, 14)


_UNET = "UNet2DConditionModel"
_SIMPLE = {config.get("addition_embed_type"): config for config in MORE[_UNET] if "mid_block_type" in config}
_EMBEDS = {"image_embeds": torch.randn(1, 14), "negative_image_embeds": torch.randn(1, 14)}
_SIZE = {"width": 128, "height": 192}
_22 = Case(
    "KandinskyV22Pipeline", _UNET, {"out_channels": 8}, "VQModel", {"block_out_channels": [32, 32, 32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 3 + ["AttnDownEncoderBlock2D"],
    "up_block_types": ["AttnUpDecoderBlock2D"] + ["UpDecoderBlock2D"] * 3}, "DDPMScheduler",
    config=_SIMPLE["image"], text=0, size=(128, 192), more={**_EMBEDS, **_SIZE},
)  # fmt: skip
_HINT = {"hint": torch.randn(1, 3, 192, 128)}
_21_EMBEDS = {"image_embeds": torch.randn(1, 10), "negative_image_embeds": torch.randn(1, 10), "prompt": "words"}
_21 = _22.change("KandinskyPipeline", config=_SIMPLE["text_image"], more=_21_EMBEDS, asked={"text": 77})
_21.config = {**_SIMPLE["text_image"], "out_channels": 8}
_21.set = {"tokenizer": Tokenizer(), "text_encoder": TextEncoder()}
_HALF = {"more": {"strength": 0.5}, "asked": {"strength": 0.5}, "steps": 5, "images": "image"}
_IF = Case(
    "IFPipeline", _UNET, {"in_channels": 3, "out_channels": 6, "encoder_hid_dim": 10, "class_embed_type": None,
    "addition_embed_type_num_heads": 5}, "AutoencoderKL", {}, "DDPMScheduler", {"variance_type": "learned_range"},
    config={**_SIMPLE["text"], "sample_size": 64},
)  # fmt: skip
_IF.set = {"image_noising_scheduler": DDPMScheduler()}
_LARGE = {"in_channels": 6, "class_embed_type": "timestep"}
_SMALL = Image.new("RGB", (16, 24))
CASES = {
    "kandinsky 2.2": _22,
    "kandinsky 2.2, image": _22.change("KandinskyV22Img2ImgPipeline", **_HALF),
    "kandinsky 2.2, inpaint": _22.change(
        "KandinskyV22InpaintPipeline", images="image mask_image", config={"in_channels": 9}
    ),
    "kandinsky 2.2, hint": _22.change("KandinskyV22ControlnetPipeline", more=_HINT),
    "kandinsky 2.2, hint, image": _22.change(
        "KandinskyV22ControlnetImg2ImgPipeline", **{**_HALF, "more": {"hint": _HINT["hint"].mT, "strength": 0.5}}
    ),
    "kandinsky 2.1": _21,
    "kandinsky 2.1, image": _21.change(
        "KandinskyImg2ImgPipeline",
        scheduler="DDIMScheduler",
        size=(128, 128),
        **{**_HALF, "asked": {"text": 77, "strength": 0.5}, "more": {"strength": 0.5, "height": 128}},
    ),
    "kandinsky 2.1, inpaint": _21.change(
        "KandinskyInpaintPipeline", images="image mask_image", config={"in_channels": 9}
    ),
    "if": _IF,
    "if, image": _IF.change("IFImg2ImgPipeline", sized=False, **HALF_WAY),
    "if, inpaint": _IF.change("IFInpaintingPipeline", sized=False, **{**PARTLY, "images": "image mask_image"}),
    "if, large": _IF.change("IFSuperResolutionPipeline", config=_LARGE, more={"image": _SMALL}),
    "if, image, large": _IF.change(
        "IFImg2ImgSuperResolutionPipeline",
        config=_LARGE,
        sized=False,
        **{**HALF_WAY, "more": {"strength": 0.5, "original_image": Image.new("RGB", (64, 96)), "image": _SMALL}},
    ),
    "if, inpaint, large": _IF.change(
        "IFInpaintingSuperResolutionPipeline",
        config=_LARGE,
        sized=False,
        **{**PARTLY, "more": {"strength": 0.5, "original_image": Image.new("RGB", (64, 96)), "image": _SMALL}},
        images="mask_image",
    ),
}
for name in ("kandinsky 2.2, hint", "kandinsky 2.2, hint, image"):
    CASES[name].config = {**_SIMPLE["image_hint"], "out_channels": 8}
for name in ("if, image, large",):
    CASES[name].images = []
CASES |= {
    "easyanimate": Case(
        "EasyAnimatePipeline", "EasyAnimateTransformer3DModel", {"in_channels": 2, "out_channels": 2},
        "AutoencoderKLMagvit", LATER_VAES["AutoencoderKLMagvit"], "FlowMatchEulerDiscreteScheduler", frames=9,
        mask="prompt_attention_mask", scale="always",
    ),
}  # fmt: skip
_SIDES = ("", "negative_")
_SANA = Case(
    "SanaVideoPipeline", "SanaVideoTransformer3DModel", TWO, "AutoencoderKLWan", PLAIN, "DPMSolverMultistepScheduler",
    frames=13, mask=MASK, scale="always", more={"use_resolution_binning": False, "negative_prompt": None},
)  # fmt: skip
_SANA.length = "frames"
_HUNYUAN = Case(
    "HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel",
    {"in_channels": 5, "out_channels": 2, "patch_size": 1},
    "AutoencoderKLHunyuanVideo15", {}, EULER, frames=9, mask="prompt_embeds_mask", scale="guider",
    more={
        **{f"{side}prompt_embeds_2": torch.randn(1, 256, 6) for side in _SIDES},
        **{f"{side}prompt_embeds_mask_2": torch.ones(1, 256).long() for side in _SIDES},
    },
)  # fmt: skip


class SigLip(torch.nn.Module):
    """Hands on states of the shape that SigLIP's vision tower gives."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, **_options: Any) -> Any:
        return SimpleNamespace(last_hidden_state=torch.randn(1, 729, 14))


class SigLipProcessor:
    """Prepares no image."""

    def preprocess(self, **_options: Any) -> Any:
        return BatchFeature({"pixel_values": torch.zeros(1)})


class LanguageModel(torch.nn.Module):
    """Hands on hidden states of the width that Bria's Fibo reads."""

    device, dtype = torch.device("cpu"), torch.float32

    def forward(self, input_ids: Any, **_options: Any) -> Any:
        return SimpleNamespace(hidden_states=[torch.randn(*input_ids.shape, 5)] * 3)


class Words(Tokenizer):
    """Ids of a prompt of a fixed length."""

    def __call__(self, prompt: Any, **_options: Any) -> Any:
        return super().__call__(prompt, max_length=TEXT)


_FIBO = Case(
    "BriaFiboPipeline", "BriaFiboTransformer2DModel", {"in_channels": 2, "text_encoder_dim": 5}, "AutoencoderKLWan",
    {"patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True, **PLAIN}, EULER, scale="always",
    text=0, more={"prompt": "words", "width": 64, "height": 96}, asked={"text": TEXT},
)  # fmt: skip
_FIBO.set = {"text_encoder": LanguageModel(), "tokenizer": Words()}
CASES |= {
    "pndm": FIRST["ddpm"].change("PNDMPipeline", scheduler="PNDMScheduler", steps=5),
    "sd, with depth": FIRST["sd"].change("StableDiffusionLDM3DPipeline", vae_config={**KL, "out_channels": 6}),
    "prx, pixels": Case(
        "PRXPixelPipeline", "PRXTransformer2DModel",
        {"in_channels": 3, "bottleneck_size": 6, "resolution_embeds": True},
        scheduler=EULER, scale="always", size=(16, 24),
        more={
            "use_resolution_binning": False,
            **{f"{side}prompt_attention_mask": torch.ones(1, TEXT).bool() for side in _SIDES},
        },
        **KL_CASES,
    ),
    "flux2, klein, inpaint": FIRST["flux2, klein"].change(
        "Flux2KleinInpaintPipeline", sized=False, **{**PARTLY, "images": "image mask_image"}
    ),
    "sana, video": _SANA,
    "sana, image to video": _SANA.change("SanaImageToVideoPipeline", images="image"),
    "hunyuanvideo 1.5": _HUNYUAN,
    "hunyuanvideo 1.5, image": _HUNYUAN.change(
        "HunyuanVideo15ImageToVideoPipeline", images="image", config={"target_size": 80}, sized=False, size=(64, 96),
        set={"image_encoder": SigLip(), "feature_extractor": SigLipProcessor()},
    ),
    "hunyuan-image": Case(
        "HunyuanImagePipeline", "HunyuanImageTransformer2DModel", {"out_channels": 4}, "AutoencoderKLHunyuanImage",
        {"scaling_factor": 1.0},
        EULER, mask="prompt_embeds_mask", scale="guider",
        more={
            **{f"{side}prompt_embeds_2": torch.randn(1, 128, 14) for side in _SIDES},
            **{f"{side}prompt_embeds_mask_2": torch.ones(1, 128).long() for side in _SIDES},
        },
    ),
    "cosmos 2.5": FIRST["cosmos2"].change("Cosmos2_5_PredictBasePipeline", config={"in_channels": 3}, frames=13),
    "bria, fibo": _FIBO,
}  # fmt: skip
_MOTION = Case("AnimateDiffPipeline", "UNetMotionModel", {}, scheduler="DDIMScheduler", frames=3, **KL_CASES)
_FRAMES = [Image.new("RGB", (64, 96))] * 3
CASES |= {
    "animatediff": _MOTION,
    "animatediff, video": _MOTION.change("AnimateDiffVideoToVideoPipeline", **{**PARTLY, "video": "video"}),
    "animatediff, controlnet": _MOTION.change(
        "AnimateDiffControlNetPipeline", more={"conditioning_frames": _FRAMES}, beside=_CONTROL
    ),
    "animatediff, video, controlnet": _MOTION.change(
        "AnimateDiffVideoToVideoControlNetPipeline", **{**PARTLY, "video": "video"}, beside=_CONTROL
    ),
    "animatediff, sdxl": _MOTION.change("AnimateDiffSDXLPipeline", pooled=True),
    "text to video": _MOTION.change("TextToVideoSDPipeline", denoiser="UNet3DConditionModel"),
    "text to video, video": _MOTION.change(
        "VideoToVideoSDPipeline", denoiser="UNet3DConditionModel", sized=False, **{**PARTLY, "video": "video"}
    ),
    "pia": _MOTION.change("PIAPipeline", images="image", config={"in_channels": 9}),
}
for name in ("text to video", "text to video, video"):
    CASES[name].config = TINY["UNet3DConditionModel"]
CASES["animatediff, sdxl"].config = MORE["UNetMotionModel"][0]
CASES["animatediff, video, controlnet"].more = {"strength": 0.5, "conditioning_frames": _FRAMES}


class Pair(torch.nn.Module):
    """Hands on a text's embeddings in a tuple."""

    device, dtype = torch.device("cpu"), torch.float32

    def forward(self, input_ids: Any, **_options: Any) -> Any:
        return (torch.randn(*input_ids.shape, 10),)


_SD = FIRST["sd"]
CASES |= {
    "alt": _SD.change("AltDiffusionPipeline"),
    "alt, image": _SD.change("AltDiffusionImg2ImgPipeline", sized=False, **HALF_WAY),
    "sd, model editing": _SD.change("StableDiffusionModelEditingPipeline"),
    "sd, semantic": _SD.change(
        "SemanticStableDiffusionPipeline",
        text=0,
        more={"prompt": "words", **_SIZE},
        asked={"text": 77},
        set={"tokenizer": Tokenizer(), "text_encoder": Pair()},
        size=(128, 192),
    ),
    "marigold, intrinsics": FIRST["marigold, depth"].change(
        "MarigoldIntrinsicsPipeline", images="image", config={"in_channels": 12, "out_channels": 8}
    ),
}
RUNS = [(name, guided) for name in CASES for guided in (True, False) if CASES[name].scale or not guided]


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_further_run_is_counted_exactly(name: str, guided: bool) -> None:
    ours, theirs = count_both(CASES[name], guided)
    assert ours == theirs


@pytest.mark.heavy
def test_a_unet_of_images_with_a_motion_adapter_is_one_of_videos() -> None:
    from diffusers import MotionAdapter, UNetMotionModel

    unet = build("UNet2DConditionModel", {**MORE["UNet2DConditionModel"][0], "sample_size": 8})
    adapter = MotionAdapter(
        block_out_channels=(8, 16, 16), motion_layers_per_block=2, motion_num_attention_heads=4,
        motion_norm_num_groups=4,
        motion_transformer_layers_per_block=1, motion_transformer_layers_per_mid_block=2, conv_in_channels=9,
    )  # fmt: skip
    whole = UNetMotionModel.from_unet2d(unet, adapter)
    parts = {"unet": unet, "motion_adapter": adapter}
    config = {name: {**part.config, "_class_name": type(part).__name__} for name, part in parts.items()}
    asked = {"videos": [(64, 96, 4)], "sampling_steps": 2}
    found = estimate_flops({"_class_name": "AnimateDiffPipeline", **config}, **asked)
    config = {"unet": {**whole.config, "_class_name": "UNetMotionModel"}}
    expected = estimate_flops({"_class_name": "AnimateDiffPipeline", **config}, **asked)
    assert found.total == expected.total
    assert found.parameters["total"] == sum(each.numel() for each in whole.parameters())
