"""Sampling runs of tiny pipelines whose encoder reads the given image or writes first, as in test_pipeline_runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusers.pipelines.joyimage.image_processor import JoyImageEditImageProcessor
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_inpaint, pipeline_qwenimage_layered
from diffusion import TINY
from PIL import Image
from test_more_pipeline_runs import _FIBO, Tokenizer
from test_more_pipeline_runs import CASES as MORE_CASES
from test_pipeline_runs import _CONTROL, EULER, FLOW, HEIGHT, PLAIN, TEXT, WIDTH, Case, count_both
from test_pipeline_runs import CASES as FIRST
from transformers import BatchFeature


class Seeing(torch.nn.Module):
    """Hands on a text's embeddings, of an image too."""

    config, device, dtype = SimpleNamespace(), torch.device("cpu"), torch.float32
    text_model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=TEXT))

    def forward(self, *_ids: Any, **_options: Any) -> Any:
        return (torch.randn(1, TEXT, 10),)


class Queries(Seeing):
    """Hands on tokens of an image, as BLIP's QFormer does."""

    config = SimpleNamespace(num_query_tokens=3)

    def forward(self, **_options: Any) -> Any:
        return torch.randn(1, 3, 10)


class Prepared(dict[str, Any]):
    """Prepares no image, for BLIP."""

    def preprocess(self, *_images: Any, **options: Any) -> Any:
        size = options.get("size", {"height": 8, "width": 8})
        return {"pixel_values": torch.zeros(1, 3, size["height"], size["width"])}

    def postprocess(self, image: Any, **_options: Any) -> Any:
        return image


class Processor:
    """Prepares texts and images, here none."""

    image_processor = None


class Ids(Tokenizer):
    """Ids of a prompt of a fixed length, in a list."""

    def __call__(self, _prompt: Any, **_options: Any) -> Any:
        return BatchFeature({"input_ids": [1] * TEXT})


_LONGCAT = Case(
    "LongCatImagePipeline", "LongCatImageTransformer2DModel", {"in_channels": 64}, "AutoencoderKL",
    {"latent_channels": 16}, EULER, scale="always", text=0, asked={"text": TEXT},
    more={"enable_prompt_rewrite": False, "prompt": "words", "width": 64, "height": 96},
)  # fmt: skip
_LONGCAT.set = {
    "_encode_prompt": lambda prompts, *_images: torch.randn(len(prompts), TEXT, 10),
    "text_processor": Processor(),
}
_HUNYUAN = FIRST["hunyuanvideo"].change(
    "HunyuanVideoImageToVideoPipeline", images="image", scale="true_cfg_scale",
    config={"in_channels": 5, "image_condition_type": "latent_concat"},
)  # fmt: skip
_BLIP = FIRST["sd"].change(
    "BlipDiffusionPipeline", text=0, asked={"text": TEXT}, images="reference_image",
    config={
        "block_out_channels": [8, 16, 16, 16],
        "down_block_types": ["CrossAttnDownBlock2D"] + ["DownBlock2D"] * 3,
        "up_block_types": ["UpBlock2D"] * 3 + ["CrossAttnUpBlock2D"],
    },
    more={
        "prompt": "words", "source_subject_category": "dog", "target_subject_category": "dog", "width": 64,
        "height": 96,
    },
    set={"text_encoder": Seeing(), "qformer": Queries(), "tokenizer": Tokenizer(), "image_processor": Prepared()},
)  # fmt: skip
CASES = {
    "qwen-image, edit, inpaint": FIRST["qwen-image"].change(
        "QwenImageEditInpaintPipeline",
        images="image mask_image", steps=5, more={"strength": 0.5}, asked={"references": 1, "strength": 0.5},
    ),
    "qwen-image, layered": FIRST["qwen-image"].change(
        "QwenImageLayeredPipeline", images="image", sized=False, asked={},
        more={"prompt": "words"}, set={"text_encoder": Seeing()},
    ),
    "longcat": _LONGCAT,
    "longcat, edit": _LONGCAT.change(
        "LongCatImageEditPipeline", images="image", asked={"references": 1, "text": TEXT}
    ),
    "joyimage, edit": Case(
        "JoyImageEditPipeline", "JoyImageEditTransformer3DModel", {"in_channels": 2, "out_channels": 2},
        "AutoencoderKLWan", PLAIN, EULER, scale="always", images="image", asked={"references": 1},
        mask="prompt_embeds_mask",
    ),
    "hunyuanvideo, image": _HUNYUAN,
    "hunyuanvideo, image, replaced": _HUNYUAN.change(
        "HunyuanVideoImageToVideoPipeline", images="image",
        config={"in_channels": 2, "image_condition_type": "token_replace", "guidance_embeds": False},
    ),
    "bria, fibo, edit": _FIBO.change(
        "BriaFiboEditPipeline", images="image", more={"prompt": '{"edit_instruction": "words"}'},
        asked={"references": 1, "text": TEXT},
    ),
    "motif video, image": MORE_CASES["motif video"].change(
        "MotifVideoImage2VideoPipeline", images="image", more={"prompt": None}
    ),
    "glm-image": Case(
        "GlmImagePipeline", "GlmImageTransformer2DModel", {"out_channels": 4}, "AutoencoderKL",
        {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}, EULER, scale="always",
        more={"prior_token_ids": torch.ones(1, 24).long()},
    ),
    "omnigen": Case(
        "OmniGenPipeline", "OmniGenTransformer2DModel", {"pos_embed_max_size": 16}, "AutoencoderKL", {}, EULER, text=0,
        more={"prompt": "words", "width": 64, "height": 96}, asked={"text": TEXT}, scale="",
    ),
    "blip": _BLIP,
    "blip, controlnet": _BLIP.change(
        "BlipDiffusionControlNetPipeline", images="reference_image condtioning_image",
        beside={**_CONTROL, **{key: _BLIP.config[key] for key in ("block_out_channels", "down_block_types")}},
    ),
}  # fmt: skip
_COSMOS = Case(
    "Cosmos3OmniPipeline", "Cosmos3OmniTransformer", {"latent_channel": 2, "patch_latent_dim": 8}, "AutoencoderKLWan",
    PLAIN, "UniPCMultistepScheduler", FLOW, frames=13, scale="always", text=0, asked={"text": TEXT},
    more={"prompt": "words", "width": 64, "height": 96},
)  # fmt: skip
_COSMOS.set = {
    "enable_safety_checker": False, "text_tokenizer": MagicMock(),
    "tokenize_prompt": lambda *_prompts, **_options: ([1] * TEXT, [1] * TEXT),
}  # fmt: skip
_WAN = FIRST["wan"].change(
    "SkyReelsV2DiffusionForcingPipeline", denoiser="SkyReelsV2Transformer3DModel", config={"inject_sample_info": True}
)
CASES |= {
    "cosmos 3": _COSMOS,
    "skyreels, forced": _WAN.change(_WAN.name, more={"prompt": None}),
    "skyreels, forced, image": _WAN.change("SkyReelsV2DiffusionForcingImageToVideoPipeline", images="image"),
}
_PLUS = CASES["joyimage, edit"].change("JoyImageEditPlusPipeline", text=0, asked={"references": 1, "text": TEXT})
_PLUS.denoiser = "JoyImageEditPlusTransformer3DModel"
_PLUS.config = {**TINY[_PLUS.denoiser], "in_channels": 2, "out_channels": 2}
_PLUS.more = {"prompt": "words", "images": [Image.new("RGB", (WIDTH, HEIGHT))], "width": WIDTH, "height": HEIGHT}
_PLUS.set = {
    "encode_prompt_multiple_images": lambda **_options: (torch.randn(1, TEXT, 10), torch.ones(1, TEXT).long()),
}  # fmt: skip
CASES["joyimage, edit, plus"] = _PLUS
_QWEN21 = Case(
    "QwenImage21Pipeline", "QwenImage21Transformer2DModel", {"in_channels": 2, "out_channels": 2},
    "AutoencoderKLQwenImage21",
    {**PLAIN, "dim_mult": [1, 1, 2, 2, 2], "temperal_downsample": [False, True, True, False]},
    EULER, {"use_dynamic_shifting": True}, scale="true_cfg_scale", text=0,
    more={"prompt": "words", "negative_prompt": "words", "width": 64, "height": 96}, asked={"text": TEXT},
)  # fmt: skip
_QWEN21.set = {
    "processor": MagicMock(),
    "encode_prompt": lambda **_options: (
        torch.randn(1, TEXT, 10), torch.ones(1, TEXT).long(), torch.zeros(1, TEXT).bool(),
    ),
}  # fmt: skip
CASES["qwen-image 2.1"] = _QWEN21
CASES["longcat, edit"].more = {"prompt": "words"}
CASES["omnigen"].set = {"tokenizer": Ids()}
ALWAYS_GUIDED = ("omnigen",)
RUNS = [
    (name, guided)
    for name in CASES
    for guided in (True, False)
    if (CASES[name].scale or not guided or name in ALWAYS_GUIDED) and (guided or name not in ALWAYS_GUIDED)
]


def keep_sizes(patch: pytest.MonkeyPatch) -> None:
    """Let pipelines keep the size of the given image, which they scale to a million pixels, and use no torchvision."""
    patch.setattr(pipeline_qwenimage_edit_inpaint, "calculate_dimensions", lambda *_sizes: (WIDTH, HEIGHT, None))
    for module in (pipeline_qwenimage_layered, pipeline_longcat_image_edit):
        patch.setattr(module, "calculate_dimensions", lambda *_sizes: (WIDTH, HEIGHT))
    patch.setattr(JoyImageEditImageProcessor, "get_default_height_width", lambda *_sizes: (HEIGHT, WIDTH))
    patch.setattr(processor_omnigen, "transforms", MagicMock(), raising=False)
    kind = processor_omnigen.OmniGenMultiModalProcessor
    patch.setattr(pipeline_omnigen, "OmniGenMultiModalProcessor", kind, raising=False)


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_run_is_counted_exactly(name: str, guided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_sizes(monkeypatch)
    ours, theirs = count_both(CASES[name], guided)
    assert ours == theirs
