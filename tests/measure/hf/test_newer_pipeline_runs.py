"""Sampling runs of tiny pipelines with sections, faces, sound or a second transformer, as in test_pipeline_runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import torch
from diffusion import TINY
from PIL import Image
from test_pipeline_runs import CASES as FIRST
from test_pipeline_runs import EULER, FLOW, PLAIN, TEXT, TWO, Case, ImageEncoder, count_both

from flopcalc import estimate_flops

_SIDES = ("", "negative_")
_SIZE = {"width": 64, "height": 96}


class Sound(torch.nn.Module):
    """Makes a spectrogram and a sound of latents of audio."""

    latent_hop_length, dtype, device = 1024, torch.float32, torch.device("cpu")
    config = SimpleNamespace(sample_rate=44100, scaling_factor=1.0)

    def decode(self, latents: Any, **_options: Any) -> Any:
        return (latents,)

    def forward(self, spectrogram: Any, **_options: Any) -> Any:
        return (spectrogram,)


class Dtype(torch.nn.Module):
    """A text encoder that is asked for its format alone."""

    device, dtype = torch.device("cpu"), torch.float32


class Template:
    """A processor whose template has one token of its own."""

    @property
    def tokenizer(self) -> Template:
        return self

    def encode(self, _text: str) -> list[int]:
        return [7]

    def apply_chat_template(self, _messages: Any, **_options: Any) -> list[list[int]]:
        return [[1]]


def encode_packed(grid_h: int, grid_w: int, max_sequence_length: int, **_options: Any) -> tuple[Any, ...]:
    """As Ideogram 4 encodes a prompt: features and positions, samples and kinds of every place."""
    places = max_sequence_length + grid_h * grid_w
    kinds = torch.cat([torch.full((1, max_sequence_length), 3), torch.full((1, grid_h * grid_w), 2)], dim=1)
    return torch.randn(1, places, 10), torch.zeros(1, places, 3).long(), torch.ones(1, places).long(), kinds


def encode_prompts(prompts: list[str], **_options: Any) -> tuple[Any, Any]:
    """As DreamLite encodes prompts: embeddings and a mask."""
    return torch.randn(len(prompts), TEXT, 10), torch.ones(len(prompts), TEXT).long()


_EMBEDS = {f"{side}prompt_embeds": torch.randn(1, 2, TEXT, 10) for side in _SIDES}
CASES = {
    "consisid": FIRST["cogvideox"].change(
        "ConsisIDPipeline", denoiser="ConsisIDTransformer3DModel", images="image",
        more={"id_cond": torch.randn(1, 14), "id_vit_hidden": [torch.randn(1, 577, 18)] * 2},
        module="consisid.pipeline_consisid",  # hidden where OpenCV is not installed: it needs it for key points
    ),
    "bria fibo 2": Case(
        "BriaFibo2Pipeline", "BriaFibo2Transformer2DModel", {"in_channels": 2}, "AutoencoderKLFlux2", {}, EULER,
        scale="always", text=0, asked={"text": TEXT}, more={**_SIZE, **_EMBEDS},
    ),
    "kandinsky 6": Case(
        "Kandinsky6TI2VAPipeline", "Kandinsky6Transformer3DModel", {"in_visual_dim": 2, "out_audio_dim": 6},
        "AutoencoderKLHunyuanVideo", {}, EULER, frames=25, pooled=True, scale="always",
    ),
    "helios": Case(
        "HeliosPipeline", "HeliosTransformer3DModel", TWO, "AutoencoderKLWan", PLAIN, EULER, frames=50, scale="always",
        size=(32, 48), steps=2,
    ),
    "wan animate": Case(
        "WanAnimatePipeline", "WanAnimateTransformer3DModel",
        {"in_channels": 8, "latent_channels": 2, "out_channels": 2}, "AutoencoderKLWan", PLAIN,
        "UniPCMultistepScheduler", FLOW, frames=78, text=512, scale="", size=(16, 32), steps=1, images="image",
        video="pose_video", more={"face_video": [Image.new("RGB", (16, 16))] * 78}, asked={"text": 512},
    ),
    "ideogram 4": Case(
        "Ideogram4Pipeline", "Ideogram4Transformer2DModel", {}, "AutoencoderKLFlux2", {}, EULER, scale="", text=0,
        asked={"text": TEXT},
        more={**_SIZE, "prompt": "words", "max_sequence_length": TEXT, "guidance_schedule": (4.0,) * 3},
    ),
    "dreamlite": Case(
        "DreamLitePipeline", "DreamLiteUNetModel", {"in_channels": 2, "out_channels": 2}, "AutoencoderTiny", {},
        EULER, {"use_dynamic_shifting": True}, text=0, asked={"text": TEXT}, more={**_SIZE, "prompt": "words"},
    ),
}  # fmt: skip
_FACES = {"in_channels": 4, "out_channels": 2, "attention_head_dim": 16, "LFE_output_dim": 21}
CASES["consisid"].config = {**TINY["ConsisIDTransformer3DModel"], **_FACES, "max_text_seq_length": TEXT}
CASES["kandinsky 6"].set = {"audio_vae": Sound(), "vocoder": Sound()}
CASES["wan animate"].set = {"image_encoder": ImageEncoder(), "image_processor": ImageEncoder()}
CASES["ideogram 4"].set = {"encode_prompt": encode_packed}
CASES["ideogram 4"].beside = TINY["Ideogram4Transformer2DModel"]
CASES["dreamlite"].set = {"encode_prompt": encode_prompts, "text_encoder": Dtype()}
CASES["dreamlite, mobile"] = CASES["dreamlite"].change("DreamLiteMobilePipeline", scale="")
CASES["helios, pyramid"] = CASES["helios"].change(
    "HeliosPyramidPipeline", more={"pyramid_num_inference_steps_list": [2, 2, 2]}, size=(64, 128),
    scheduler="HeliosScheduler", options={"stages": 3},
)  # fmt: skip
CASES["qwen-image 2.1"] = Case(
    "QwenImage21Pipeline", "QwenImage21Transformer2DModel", TWO, "AutoencoderKLQwenImage21",
    {"dim_mult": [1] * 5, "temperal_downsample": [False] * 4, **PLAIN}, EULER, {"use_dynamic_shifting": True},
    mask="prompt_embeds_mask", scale="true_cfg_scale",
)  # fmt: skip
CASES["qwen-image 2.1"].set = {"processor": Template()}
ALWAYS_GUIDED = ("dreamlite",)
RUNS = [
    (name, guided)
    for name in CASES
    for guided in (True, False)
    if (CASES[name].scale or not guided) and (guided or name not in ALWAYS_GUIDED)
]


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS))
def test_a_run_is_counted_exactly(name: str, guided: bool) -> None:
    ours, theirs = count_both(CASES[name], guided)
    assert ours == theirs


def test_a_training_step_is_one_section() -> None:
    config = {
        "_class_name": "HeliosPipeline",
        "transformer": {"_class_name": "HeliosTransformer3DModel", **TINY["HeliosTransformer3DModel"]},
    }
    assert estimate_flops(config).total == estimate_flops(config, videos=[(640, 384, 33)]).total
    run = {"sampling_steps": 1, "guidance": "off"}
    two, one = (estimate_flops(config, videos=[(640, 384, frames)], **run).total for frames in (34, 5))
    assert two == 2 * one
