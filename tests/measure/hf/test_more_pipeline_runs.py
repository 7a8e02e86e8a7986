"""Sampling runs of further tiny pipelines, as in test_pipeline_runs."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusers import DDPMScheduler
from diffusion import LATER_VAES, MORE
from PIL import Image
from test_pipeline_runs import HALF_WAY, PARTLY, Case, count_both
from transformers import BatchFeature


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
RUNS = [(name, guided) for name in CASES for guided in (True, False) if CASES[name].scale or not guided]


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_further_run_is_counted_exactly(name: str, guided: bool) -> None:
    ours, theirs = count_both(CASES[name], guided)
    assert ours == theirs
