"""Sampling runs of tiny pipelines that run others, or a part in another way, as in test_pipeline_runs."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusers import DDPMWuerstchenScheduler, UnCLIPScheduler
from diffusion import TINY, TINY_VAES
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
