"""Diffusers' denoisers with random weights, and what their forward takes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

Json = dict[str, Any]
_NOT_GIVEN = ("model_type", "expand_timesteps")  # what no class takes
# Keys that hold the width of the text's embeddings; the first that a config sets.
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels", "cross_attention_dim")


def build_denoiser(config: Mapping[str, object], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The diffusers class that a config names, made on the device."""
    import diffusers

    given = {key: value for key, value in config.items() if not key.startswith("_") and key not in _NOT_GIVEN}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings(), torch.device(device):
            warnings.simplefilter("ignore")
            return getattr(diffusers, str(config["_class_name"]))(**given)
    finally:
        torch.set_default_dtype(before)


def make_denoiser_inputs(
    config: Mapping[str, Any],
    batch: int,
    text: int,
    grid: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Json:
    """Random arguments of a denoiser's forward, for latents (t, h, w) as a Workload holds them."""
    name = str(config["_class_name"])
    place: Json = {"dtype": dtype, "device": device}
    t, h, w = grid
    channels = config.get("in_channels", 4)
    given: Json = {"timestep": torch.ones(batch, **place)}
    if name == "DiTTransformer2DModel":
        labels = torch.zeros(batch, dtype=torch.long, device=device)
        return {**given, "hidden_states": torch.randn(batch, channels, h, w, **place), "class_labels": labels}
    given["encoder_hidden_states"] = torch.randn(batch, text, _find_text_width(config), **place)
    if name == "UNet2DConditionModel":
        given["sample"] = torch.randn(batch, channels, h, w, **place)
        if config.get("addition_embed_type") == "text_time":
            ids = 6 * int(config["addition_time_embed_dim"])
            pooled = int(config["projection_class_embeddings_input_dim"]) - ids
            given["added_cond_kwargs"] = {
                "text_embeds": torch.randn(batch, pooled, **place),
                "time_ids": torch.ones(batch, 6, **place),
            }
        return given
    if config.get("pooled_projection_dim"):
        given["pooled_projections"] = torch.randn(batch, config["pooled_projection_dim"], **place)
    if config.get("guidance_embeds", name == "HunyuanVideoTransformer3DModel"):  # else as the class does
        given["guidance"] = torch.ones(batch, **place)
    if name in ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "LTXVideoTransformer3DModel"):
        given["hidden_states"] = torch.randn(batch, t * h * w, channels, **place)
    elif name == "CogVideoXTransformer3DModel":
        given["hidden_states"] = torch.randn(batch, t, channels, h, w, **place)
        if config.get("ofs_embed_dim"):
            given["ofs"] = torch.ones(1, **place)
    elif name in ("WanTransformer3DModel", "HunyuanVideoTransformer3DModel"):
        given["hidden_states"] = torch.randn(batch, channels, t, h, w, **place)
        if config.get("image_dim"):
            two = config.get("pos_embed_seq_len")  # the first image and the last
            shape = (2 * batch, two // 2) if two else (batch, 257)
            given["encoder_hidden_states_image"] = torch.randn(*shape, config["image_dim"], **place)
    else:
        given["hidden_states"] = torch.randn(batch, channels, h, w, **place)
    if config.get("expand_timesteps"):
        patch = 1
        for side in config.get("patch_size", (1,)) if name == "WanTransformer3DModel" else ():
            patch *= side
        given["timestep"] = torch.ones(batch, t * h * w // patch, **place)
    if name == "FluxTransformer2DModel":
        given |= {"img_ids": torch.zeros(t * h * w, 3, **place), "txt_ids": torch.zeros(text, 3, **place)}
    elif name == "QwenImageTransformer2DModel":
        given |= {
            "encoder_hidden_states_mask": torch.ones(batch, text, device=device),
            "img_shapes": [[(t, h, w)]] * batch,
        }
    elif name == "HunyuanVideoTransformer3DModel":
        given["encoder_attention_mask"] = torch.ones(batch, text, device=device)
    elif name == "LTXVideoTransformer3DModel":
        given["encoder_attention_mask"] = torch.ones(batch, text, device=device)
        given |= {"num_frames": t, "height": h, "width": w}
    elif name == "PixArtTransformer2DModel":
        given["added_cond_kwargs"] = {
            "resolution": torch.ones(batch, 2, **place),
            "aspect_ratio": torch.ones(batch, 1, **place),
        }
    return given


def _find_text_width(config: Mapping[str, Any]) -> int:
    found = next(config[key] for key in _TEXT_WIDTHS if config.get(key) is not None)
    return int(found[0] if isinstance(found, (list, tuple)) else found)
