"""Sampling runs of further tiny pipelines, as in test_pipeline_runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusers import DDPMScheduler
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
from diffusion import ADAPTERS, LATER_VAES, MORE, TINY, TINY_VAES, build
from PIL import Image
from test_pipeline_runs import (
    _CONTROL,
    _CONTROL_XL,
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
from lab.denoisers import LENT


class Tokenizer:
    """Ids of any prompt, padded to a length."""

    model_max_length = 77

    def tokenize(self, _prompt: str) -> list[str]:
        return []

    def __call__(self, prompt: Any, **options: Any) -> Any:
        many = 1 if isinstance(prompt, str) else len(prompt)
        ids = torch.ones(many, options.get("max_length", 5)).long()
        return BatchFeature({"input_ids": ids, "attention_mask": ids, "position_ids": ids})


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
    "animatediff, pag": _MOTION.change("AnimateDiffPAGPipeline"),
    "pia": _MOTION.change("PIAPipeline", images="image", config={"in_channels": 9}),
}
for name in ("text to video", "text to video, video"):
    CASES[name].config = TINY["UNet3DConditionModel"]
CASES["animatediff, sdxl"].config = MORE["UNetMotionModel"][0]
CASES["animatediff, video, controlnet"].more = {"strength": 0.5, "conditioning_frames": _FRAMES}


class ClipImage(torch.nn.Module):
    """Hands on an image's embedding of the width that the case's UNet reads."""

    config, device = SimpleNamespace(image_size=8), torch.device("cpu")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = torch.nn.Parameter(torch.zeros(width))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def forward(self, image: Any, return_uncond_vector: bool = False, **_options: Any) -> Any:
        made = torch.randn(len(image), len(self.width))
        if return_uncond_vector:  # PaintByExample's own
            return made[:, None], torch.randn(1, 1, len(self.width))
        return BatchFeature({"image_embeds": made})


class ImageProcessor:
    """Prepares no image."""

    crop_size: ClassVar[dict[str, int]] = {"width": 8, "height": 8}

    def __call__(self, **_options: Any) -> Any:
        return BatchFeature({"pixel_values": torch.zeros(1, 3, 8, 8)})


class Embedder(torch.nn.Module):
    """Hands on a text's embeddings."""

    config, device, dtype = SimpleNamespace(), torch.device("cpu"), torch.float32

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.width = width

    def forward(self, input_ids: Any, **_options: Any) -> Any:
        given = torch.randn(*input_ids.shape, self.width)
        return BatchFeature({"last_hidden_state": given, "text_embeds": torch.randn(len(input_ids), self.width)})


class Pair(Embedder):
    """The same in a tuple."""

    def forward(self, input_ids: Any, **_options: Any) -> Any:
        return (torch.randn(*input_ids.shape, 10),)


_SD = FIRST["sd"]
_SEEN = {"image_encoder": ClipImage(10), "feature_extractor": ImageProcessor()}
_PRIOR = Case(
    "KandinskyPriorPipeline", "PriorTransformer", {"num_embeddings": 77}, "AutoencoderKL", {}, "UnCLIPScheduler",
    text=0, size=(1, 1), more={"prompt": "words"}, asked={"text": 77},
)  # fmt: skip
_PRIOR.set = {"text_encoder": Embedder(), "tokenizer": Tokenizer(), "image_encoder": ClipImage(10)}
CASES |= {
    "svd": Case(
        "StableVideoDiffusionPipeline", "UNetSpatioTemporalConditionModel", {"in_channels": 8, "out_channels": 4},
        "AutoencoderKLTemporalDecoder", {}, "EulerDiscreteScheduler", frames=3, text=0, scale="max_guidance_scale",
        more={"width": 64, "height": 96, "image": torch.rand(1, 3, 96, 64)}, asked={"text": 1},
    ),
    "sd, image variation": _SD.change(
        "StableDiffusionImageVariationPipeline", text=0, more=_SIZE, images="image", set=_SEEN, asked={"text": 1}
    ),
    "sd, paint by example": _SD.change(
        "PaintByExamplePipeline", text=0, images="image mask_image example_image", set=_SEEN, asked={"text": 1},
        config={"in_channels": 9},
    ),
    "sd, unclip": _SD.change(
        "StableUnCLIPImg2ImgPipeline", more={"image_embeds": torch.randn(1, 3)},
        config={"class_embed_type": "projection", "projection_class_embeddings_input_dim": 6},
    ),
    "alt": _SD.change("AltDiffusionPipeline"),
    "alt, image": _SD.change("AltDiffusionImg2ImgPipeline", sized=False, **HALF_WAY),
    "sd, model editing": _SD.change("StableDiffusionModelEditingPipeline"),
    "sd, semantic": _SD.change(
        "SemanticStableDiffusionPipeline", text=0, more={"prompt": "words", **_SIZE}, asked={"text": 77},
        set={"tokenizer": Tokenizer(), "text_encoder": Pair()}, size=(128, 192),
    ),
    "marigold, intrinsics": FIRST["marigold, depth"].change(
        "MarigoldIntrinsicsPipeline", images="image", config={"in_channels": 12, "out_channels": 8}
    ),
    "kandinsky 2.1, prior": _PRIOR,
    "kandinsky 2.2, prior": _PRIOR.change("KandinskyV22PriorPipeline"),
}  # fmt: skip
_3 = _22.change("Kandinsky3Pipeline", text=0, asked={"text": TEXT})
_3.denoiser, _3.config = "Kandinsky3UNet", {**TINY["Kandinsky3UNet"], "encoder_hid_dim": 10}
_3.more = {
    **_SIZE,
    **{f"{side}prompt_embeds": torch.randn(1, TEXT, 10) for side in _SIDES},
    **{f"{side}attention_mask": torch.ones(1, TEXT).long() for side in _SIDES},
}
CASES |= {
    "kandinsky 3": _3,
    "kandinsky 3, image": _3.change("Kandinsky3Img2ImgPipeline", **{**_HALF, "asked": {"text": TEXT, "strength": 0.5}}),
}
for key in _SIZE:
    del CASES["kandinsky 3, image"].more[key]


class Connectors(torch.nn.Module):
    """Hands on embeddings of a prompt, for video and for audio."""

    device = torch.device("cpu")

    def forward(self, prompt_embeds: Any, mask: Any, **_options: Any) -> Any:
        made = torch.randn(*prompt_embeds.shape[:2], 14)
        return made, made, mask


class Sound(torch.nn.Module):
    """Makes a spectrogram and a sound of latents of audio."""

    mel_compression_ratio = temporal_compression_ratio = 4
    config = SimpleNamespace(sample_rate=16000, mel_hop_length=160, mel_bins=20, latent_channels=2)
    latents_mean, latents_std, dtype, device = torch.zeros(1), torch.ones(1), torch.float32, torch.device("cpu")

    def decode(self, latents: Any, **_options: Any) -> Any:
        return (latents,)

    def forward(self, spectrogram: Any) -> Any:
        return spectrogram


_LTX2 = Case(
    "LTX2Pipeline", "LTX2VideoTransformer3DModel",
    {"in_channels": 6, "audio_out_channels": 10, "perturbed_attn": True, "num_layers": 29},
    "AutoencoderKLLTX2Video", {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
    EULER, frames=9, mask="prompt_attention_mask", scale="always", more={"audio_guidance_scale": 1.0},
)  # fmt: skip
_LTX2.set = {"connectors": Connectors(), "audio_vae": Sound(), "vocoder": Sound()}
CASES |= {
    "ltx-2": _LTX2,
    "ltx-2, unperturbed": _LTX2.change("LTX2Pipeline", config={"num_layers": 2, "perturbed_attn": False}),
    "ltx-2, image": _LTX2.change(
        "LTX2ImageToVideoPipeline", images="image", config={"num_layers": 2, "perturbed_attn": False},
        more={"image_crf": 0},
    ),
    "ltx-2, condition": _LTX2.change(
        "LTX2ConditionPipeline", config={"num_layers": 2, "perturbed_attn": False},
        more={"conditions": LTX2VideoCondition(frames=Image.new("RGB", (64, 96)), index=0, crf=0)},
    ),
}  # fmt: skip
CASES["svd"].set = _SEEN
CASES["sd, unclip"].set = {
    "image_encoder": ClipImage(3), "image_normalizer": StableUnCLIPImageNormalizer(embedding_dim=3),
    "image_noising_scheduler": DDPMScheduler(),
}  # fmt: skip
CASES |= {
    "sd, adapter": _SD.change(
        "StableDiffusionAdapterPipeline", images="image", beside=ADAPTERS["full"]
    ),
    "sd, light adapter": _SD.change(
        "StableDiffusionAdapterPipeline", images="image", beside=ADAPTERS["light"]
    ),
    "sdxl, adapter": FIRST["sdxl"].change(
        "StableDiffusionXLAdapterPipeline", images="image", beside={**ADAPTERS["xl"], "channels": [8, 16, 16, 16]}
    ),
}  # fmt: skip
_THREE = {"in_channels": 3, "out_channels": 3}
CASES |= {
    "score sde": FIRST["ddpm"].change("ScoreSdeVePipeline", scheduler="ScoreSdeVeScheduler", config=_THREE),
    "repaint": FIRST["ddpm"].change(
        "RePaintPipeline", scheduler="RePaintScheduler", steps=12, config=_THREE, images="image mask_image",
        size=(32, 64),
    ),
    "kandinsky 2.2, prior, image": _PRIOR.change(
        "KandinskyV22PriorEmb2EmbPipeline", more={"strength": 0.5, "image": torch.zeros(1, 3, 8, 8)},
        asked={"text": 77, "strength": 0.5}, steps=5,
    ),
}  # fmt: skip
CASES["hunyuan-image, refiner"] = Case(
    "HunyuanImageRefinerPipeline", "HunyuanImageTransformer2DModel",
    {
        "in_channels": 8, "out_channels": 4, "patch_size": [1, 1, 1], "rope_axes_dim": [4, 4, 4],
        "text_embed_2_dim": None, "guidance_embeds": True,
    },
    "AutoencoderKLHunyuanImageRefiner", {"scaling_factor": 1.0}, EULER, mask="prompt_embeds_mask", scale="guider",
    images="image",
)  # fmt: skip


class ChatGlm(Embedder):
    """Hands on states, of which the last are pooled; the first axis is the length."""

    def forward(self, input_ids: Any, **_options: Any) -> Any:
        return SimpleNamespace(hidden_states=[torch.randn(*input_ids.T.shape, width) for width in (10, 6)])


# Diffusers hides them where sentencepiece is not installed, which their tokenizer needs.
_KOLORS = FIRST["sdxl"].change(
    "KolorsPipeline", config={"encoder_hid_dim": 10, "encoder_hid_dim_type": "text_proj"},
    module="kolors.pipeline_kolors",
)  # fmt: skip
CASES |= {
    "kolors": _KOLORS,
    "kolors, image": _KOLORS.change(
        "KolorsImg2ImgPipeline", sized=False, module="kolors.pipeline_kolors_img2img", text=0,
        set={"text_encoder": ChatGlm(), "tokenizer": Tokenizer()},
        **{**HALF_WAY, "more": {"strength": 0.5, "prompt": "words"}, "asked": {"strength": 0.5, "text": 256}},
    ),
    "kolors, pag": _KOLORS.change("KolorsPAGPipeline", module="pag.pipeline_pag_kolors"),
}  # fmt: skip
_EDITED = {"images": "image", "size": (1024, 1024), "steps": 1, "asked": {"references": 1}}
CASES |= {
    "qwen-image, edit": FIRST["qwen-image"].change("QwenImageEditPipeline", **_EDITED),
    "qwen-image, edit plus": FIRST["qwen-image"].change("QwenImageEditPlusPipeline", **_EDITED),
    "kandinsky5, image to image": FIRST["kandinsky5, image"].change(
        "Kandinsky5I2IPipeline", images="image", config={"in_visual_dim": 4, "visual_cond": True}
    ),
}
CASES["motif video"] = Case(
    "MotifVideoPipeline", "MotifVideoTransformer3DModel", {"enable_text_cross_attention_dual": True},
    "AutoencoderKLWan", PLAIN, EULER, frames=13, mask="prompt_attention_mask", scale="guider",
)  # fmt: skip
_UNION = {
    **_CONTROL_XL, "conditioning_embedding_out_channels": [6, 10, 14, 4], "num_control_type": 3, "num_trans_channel": 8,
    "num_trans_head": 2, "num_proj_channel": 8,
}  # fmt: skip
_UNITED: dict[str, Any] = {"beside": _UNION}
CASES |= {
    "sdxl, union": FIRST["sdxl"].change(
        "StableDiffusionXLControlNetUnionPipeline", images="control_image", more={"control_mode": 0}, **_UNITED
    ),
    "sdxl, union, image": FIRST["sdxl"].change(
        "StableDiffusionXLControlNetUnionImg2ImgPipeline", **_UNITED,
        **{**PARTLY, "images": "image control_image", "more": {"strength": 0.5, "control_mode": 0}},
    ),
    "sdxl, union, inpaint": FIRST["sdxl"].change(
        "StableDiffusionXLControlNetUnionInpaintPipeline", images="image mask_image control_image",
        more={"control_mode": 0}, asked={"strength": 0.9999}, **_UNITED,
    ),
}  # fmt: skip
CASES["mochi"] = Case(
    "MochiPipeline", "MochiTransformer3DModel", TWO, "AutoencoderKLMochi",
    {
        "encoder_block_out_channels": [32] * 4, "decoder_block_out_channels": [32] * 4, "layers_per_block": [1] * 5,
        "temporal_expansions": [1, 2, 3], "spatial_expansions": [2, 2, 2], "add_attention_block": [False] + [True] * 4,
        "latents_mean": None, "latents_std": None,
    },
    EULER, frames=13, text=0, scale="always", asked={"text": TEXT},
    more={
        **{f"{side}prompt_embeds": torch.randn(1, TEXT, 16) for side in _SIDES},
        **{f"{side}prompt_attention_mask": torch.ones(1, TEXT).bool() for side in _SIDES}, "width": 64, "height": 96,
    },
)  # fmt: skip
CASES["image to video"] = _MOTION.change("I2VGenXLPipeline", denoiser="I2VGenXLUNet", images="image", set=_SEEN)
CASES["image to video"].config = TINY["I2VGenXLUNet"]
CASES["sd, image variation"].size = (128, 192)
_CASCADE = Case(
    "StableCascadePriorPipeline", "StableCascadeUNet", {}, "AutoencoderKL", {}, "DDPMWuerstchenScheduler",
    size=(256, 384), more={f"{side}prompt_embeds_pooled": torch.randn(1, 1, 6) for side in _SIDES},
)  # fmt: skip
_CODES = {"encoder_hidden_states": torch.randn(1, TEXT, 10), "prompt_embeds": torch.randn(1, 6)}
_WORLD = FIRST["cosmos2"].change(
    "CosmosTextToWorldPipeline", scheduler="EDMEulerScheduler", frames=17, size=(64, 96), vae="AutoencoderKLCosmos",
    vae_config={**LATER_VAES["AutoencoderKLCosmos"], "latents_mean": None, "latents_std": None},
)  # fmt: skip
CASES |= {
    "cascade, prior": _CASCADE,
    "cascade": _CASCADE.change(
        "StableCascadeDecoderPipeline", sized=False, vae="PaellaVQModel", vae_config=TINY_VAES["PaellaVQModel"],
        more={"image_embeddings": torch.randn(1, 5, 9, 6)},
    ),
    "amused": Case(
        "AmusedPipeline", "UVit2DModel", {}, "VQModel", {"lookup_from_codebook": True, "norm_type": "group"},
        "AmusedScheduler", {"mask_token_id": 30}, text=0, asked={"text": TEXT}, more={"width": 64, "height": 96,
        **_CODES, **{f"negative_{key}": value for key, value in _CODES.items()}},
    ),
    "cosmos": _WORLD,
    "cosmos, video": _WORLD.change("CosmosVideoToWorldPipeline", config={"in_channels": 3}, images="image"),
}  # fmt: skip
_Z: dict[str, Any] = {"beside": {key: value for key, value in TINY["ZImageControlNetModel"].items() if key not in LENT}}
CASES |= {
    "z-image, controlnet": FIRST["z-image"].change("ZImageControlNetPipeline", images="control_image", **_Z),
    "z-image, controlnet, inpaint": FIRST["z-image"].change(
        "ZImageControlNetInpaintPipeline", images="control_image image mask_image", **_Z
    ),
    "animatediff, sparse": _MOTION.change(
        "AnimateDiffSparseControlNetPipeline", more={"conditioning_frames": _FRAMES[:1]},
        beside=TINY["SparseControlNetModel"],
    ),
}  # fmt: skip
CASES["z-image, controlnet, inpaint"].beside = {**_Z["beside"], "control_in_dim": 9}
_CASCADE.set = {"text_encoder": Embedder()}
CASES["cascade"].config = {**MORE["StableCascadeUNet"][0], "in_channels": 4, "out_channels": 4}
CASES["cascade"].vae_config = {**TINY_VAES["PaellaVQModel"], "latent_channels": 4}
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
