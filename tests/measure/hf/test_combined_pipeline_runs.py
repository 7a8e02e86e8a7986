"""Sampling runs of tiny pipelines that run others, or a part in another way, as in test_pipeline_runs."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusers import DDPMWuerstchenScheduler, UnCLIPScheduler
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from diffusion import TINY, TINY_VAES, UPSAMPLERS
from PIL import Image
from test_more_pipeline_runs import CASES as MORE_CASES
from test_more_pipeline_runs import ClipImage, Embedder, Pair, Tokenizer
from test_pipeline_runs import CASES as FIRST
from test_pipeline_runs import PARTLY, TEXT, Case, count_both

_SD, _DDPM, _AMUSED = FIRST["sd"], FIRST["ddpm"], MORE_CASES["amused"]
_CASCADE = MORE_CASES["cascade, prior"]
_SHARED = {"tokenizer": Tokenizer(), "text_encoder": Pair()}
_CODES: dict[str, Any] = {"vae": "VQModel", "vae_config": TINY_VAES["VQModel"], "scheduler": "DDIMScheduler"}


def add_prior(name: str, kind: str, width: int, part: str = "prior_prior") -> Case:
    """A pipeline's case with the prior that makes the image's embedding, of a width, before it."""
    found = MORE_CASES[name].change(kind, images=" ".join(MORE_CASES[name].images))
    found.more = {key: value for key, value in found.more.items() if not key.endswith("image_embeds")}
    found.more["prompt"] = "words"
    sizes = {"num_embeddings": 77, "embedding_dim": width, "clip_embed_dim": width}
    found.others = {part: ("PriorTransformer", {**TINY["PriorTransformer"], **sizes})}
    found.set = {
        **found.set, "prior_image_encoder": ClipImage(width), "prior_text_encoder": Embedder(width),
        "prior_tokenizer": Tokenizer(), "prior_scheduler": UnCLIPScheduler(),
    }  # fmt: skip
    return found


CASES = {
    f"{name}, combined": add_prior(name, kind, 14 if "2.2" in name else 10)
    for name, kind in {
        "kandinsky 2.2": "KandinskyV22CombinedPipeline",
        "kandinsky 2.2, image": "KandinskyV22Img2ImgCombinedPipeline",
        "kandinsky 2.2, inpaint": "KandinskyV22InpaintCombinedPipeline",
        "kandinsky 2.1": "KandinskyCombinedPipeline",
        "kandinsky 2.1, image": "KandinskyImg2ImgCombinedPipeline",
        "kandinsky 2.1, inpaint": "KandinskyInpaintCombinedPipeline",
    }.items()
}
CASES |= {
    "sd, sag": _SD.change("StableDiffusionSAGPipeline", size=(128, 192)),
    "cycle": _SD.change(
        "CycleDiffusionPipeline", text=0, sized=False, steps=5, images="image", set=_SHARED,
        more={"prompt": "words", "source_prompt": "words", "strength": 0.5}, asked={"strength": 0.5, "text": 77},
    ),
    "diffedit": _SD.change(
        "StableDiffusionDiffEditPipeline", sized=False, steps=5, asked={"strength": 0.5},
        more={
            "inpaint_strength": 0.5, "mask_image": torch.ones(1, 1, 12, 8),
            "image_latents": torch.randn(1, 2, 4, 12, 8),
        },
    ),
    "karras": _DDPM.change(
        "KarrasVePipeline", scheduler="KarrasVeScheduler", config={"in_channels": 3, "out_channels": 3}
    ),
    "ldm": _DDPM.change("LDMPipeline", config={"in_channels": 4, "out_channels": 4}, size=(64, 64), **_CODES),
    "ldm, large": _DDPM.change(
        "LDMSuperResolutionPipeline", config={"in_channels": 8, "out_channels": 4}, size=(128, 256),
        more={"image": torch.randn(1, 4, 64, 32)}, **_CODES,
    ),
    "ldm, text": _SD.change(
        "LDMTextToImagePipeline", text=0, set={"tokenizer": Tokenizer(), "bert": Pair()},
        more={"prompt": "words", "width": 64, "height": 96}, asked={"text": 77},
        **{**_CODES, "vae_config": MORE_CASES["kandinsky 2.2"].vae_config},
    ),
    "amused, image": _AMUSED.change("AmusedImg2ImgPipeline", **{**PARTLY, "images": "image"}),
    "amused, inpaint": _AMUSED.change("AmusedInpaintPipeline", **{**PARTLY, "images": "image mask_image"}),
    "cascade, combined": _CASCADE.change(
        "StableCascadeCombinedPipeline", vae="PaellaVQModel", vae_config=MORE_CASES["cascade"].vae_config,
        scale="decoder_guidance_scale",
    ),
    "sd, unclip, combined": add_prior("sd, unclip", "StableUnCLIPPipeline", 3, "prior"),
}  # fmt: skip
for key in ("width", "height"):
    for name in ("amused, image", "amused, inpaint"):
        CASES[name].more = {option: value for option, value in CASES[name].more.items() if option != key}
        CASES[name].asked = {"text": TEXT, "strength": 0.5}
_W = MORE_CASES["cascade, prior"].change("WuerstchenPriorPipeline", denoiser="WuerstchenPrior")
_W.config, _W.more = TINY["WuerstchenPrior"], {}
_W_DECODER = {
    "denoiser": "WuerstchenDiffNeXt", "vae": "PaellaVQModel", "sized": False, "text": 0, "asked": {"text": 77},
    "vae_config": {**TINY_VAES["PaellaVQModel"], "latent_channels": 4},
}  # fmt: skip
_KARLO_DECODER = {
    "block_out_channels": [8, 16], "layers_per_block": 1, "cross_attention_dim": 10, "in_channels": 3,
    "out_channels": 6, "down_block_types": ["ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"], "sample_size": 64,
    "up_block_types": ["SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"], "attention_head_dim": 4,
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn", "class_embed_type": "identity", "norm_num_groups": 4,
    "resnet_time_scale_shift": "scale_shift",
}  # fmt: skip
_LARGER = ("UNet2DModel", {**TINY["UNet2DModel"], "in_channels": 6, "out_channels": 3, "sample_size": 32})


class TextProjection(torch.nn.Module):
    """Hands on states of a text with four tokens of an image, and what is added to the embedding of the time."""

    clip_extra_context_tokens, device = 4, torch.device("cpu")

    def forward(self, text_encoder_hidden_states: Any, **_options: Any) -> Any:
        batch, length, width = text_encoder_hidden_states.shape
        return torch.randn(batch, length + 4, width), torch.randn(batch, 32)


_KARLO = _SD.change(
    "UnCLIPPipeline", text=0, size=(64, 64), scale="decoder_guidance_scale",
    more={"prompt": "words", "decoder_num_inference_steps": 3},
)  # fmt: skip
_KARLO.config = _KARLO_DECODER
_KARLO.others = {
    "prior": ("PriorTransformer", {**TINY["PriorTransformer"], "num_embeddings": 77}),
    "super_res_first": _LARGER, "super_res_last": _LARGER,
}  # fmt: skip
_KARLO.set = {
    "tokenizer": Tokenizer(), "text_encoder": Embedder(), "text_proj": TextProjection(),
    **{f"{part}_scheduler": UnCLIPScheduler() for part in ("prior", "super_res")},
    "decoder_scheduler": UnCLIPScheduler(variance_type="learned_range"),
}  # fmt: skip
_LTX = FIRST["ltx-video"].change(
    "LTXLatentUpsamplePipeline", denoiser="LTXLatentUpsamplerModel", text=0, steps=1, frames=9, video="video", scale="",
    more={"width": 64, "height": 96},
)  # fmt: skip
_LTX.config = UPSAMPLERS["LTXLatentUpsamplerModel"]
_LTX2 = MORE_CASES["ltx-2, condition"].change("LTX2InContextPipeline")
_REFERENCE = LTX2ReferenceCondition(frames=[Image.new("RGB", (64, 96))] * 9)
_HDR = LTX2HDRReferenceCondition(frames=[Image.new("RGB", (64, 96))] * 9)
_LTX2.more = {"reference_conditions": _REFERENCE, "audio_guidance_scale": 1.0}
CASES |= {
    "wuerstchen, prior": _W,
    "wuerstchen": _W.change(
        "WuerstchenDecoderPipeline", set={"text_encoder": Embedder(), "tokenizer": Tokenizer()},
        more={"prompt": "words", "image_embeddings": torch.randn(1, 4, 9, 6)}, **_W_DECODER,
    ),
    "wuerstchen, combined": _W.change(
        "WuerstchenCombinedPipeline", scale="decoder_guidance_scale", more={"prompt": "words"},
        set={
            "prior_text_encoder": Embedder(), "prior_tokenizer": Tokenizer(), "text_encoder": Embedder(),
            "tokenizer": Tokenizer(), "prior_scheduler": DDPMWuerstchenScheduler(),
        },
        **_W_DECODER,
    ),
    "karlo": _KARLO,
    "karlo, image": _KARLO.change("UnCLIPImageVariationPipeline"),
    "ltx-video, larger": _LTX,
    "ltx-2, larger": _LTX.change(
        "LTX2LatentUpsamplePipeline", denoiser="LTX2LatentUpsamplerModel", vae="AutoencoderKLLTX2Video",
        vae_config=_LTX2.vae_config,
    ),
    "ltx-2, in context": _LTX2,
    "ltx-2, hdr": _LTX2.change("LTX2HDRPipeline"),
}  # fmt: skip
CASES["ltx-2, hdr"].more = {"reference_conditions": _HDR}
for name in ("wuerstchen", "wuerstchen, combined"):
    CASES[name].config = {**TINY["WuerstchenDiffNeXt"], "c_in": 4, "c_out": 4}
CASES["wuerstchen, combined"].others = {"prior_prior": ("WuerstchenPrior", TINY["WuerstchenPrior"])}
CASES["wuerstchen, combined"].more |= {"width": 256, "height": 384}
CASES["ltx-2, larger"].config = UPSAMPLERS["LTX2LatentUpsamplerModel"]
CASES["karlo, image"].others = {key: other for key, other in _KARLO.others.items() if key != "prior"}
CASES["karlo, image"].set = {**_KARLO.set, "image_encoder": ClipImage(10), "feature_extractor": None}
CASES["karlo, image"].more = {"image": torch.zeros(1, 3, 8, 8), "decoder_num_inference_steps": 3}
CASES["cascade, combined"].config = {**MORE_CASES["cascade"].config, "effnet_in_channels": 4}
CASES["cascade, combined"].others = {"prior_prior": ("StableCascadeUNet", _CASCADE.config)}
CASES["cascade, combined"].set = {"prior_text_encoder": Embedder(), "prior_scheduler": DDPMWuerstchenScheduler()}
CASES["sd, unclip, combined"].text, CASES["sd, unclip, combined"].asked = 0, {"text": 77}
CASES["sd, unclip, combined"].set |= _SHARED
CASES["sd, unclip, combined"].more |= {"width": 64, "height": 96}
RUNS = [(name, guided) for name in CASES for guided in (True, False) if CASES[name].scale or not guided]


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_run_is_counted_exactly(name: str, guided: bool) -> None:
    ours, theirs = count_both(CASES[name], guided)
    assert ours == theirs
