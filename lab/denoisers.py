"""Diffusers' denoisers with random weights, and what their forward takes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from flopcalc.core.spec.spec import find_spec

Json = dict[str, Any]
LENT = ("in_channels", "cap_feat_dim", "axes_dims", "axes_lens")  # what a ControlNet takes from its transformer
_NOT_GIVEN = ("reads_mask", "searches", "model_type", "expand_timesteps", "one_face")  # what no class takes
# A mask is a choice there.
_UNMASKED = (
    "ControlNetModel", "ControlNetUnionModel", "Krea2Transformer2DModel", "LatteTransformer3DModel",
    "PixArtTransformer2DModel", "SparseControlNetModel", "UNet2DConditionModel", "UNet3DConditionModel",
    "UNetMotionModel",
)  # fmt: skip
# Keys that hold the width of the text's embeddings; the first that a config sets.
_TEXT_WIDTHS = (
    "encoder_hid_dim", "joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels", "cap_feat_dim",
    "in_text_dim", "cross_attention_dim", "text_in_dim", "context_in_dim", "text_hidden_dim", "hidden_size",
    "embedding_dim", "clip_text_in_channels", "clip_embd", "c_cond", "clip_text_pooled_in_channels", "llm_features_dim",
)  # fmt: skip


class _Sizes:
    """Sizes of a call by name (letters of the latents, n for the text, keys of the config), and tensors of them."""

    def __init__(self, sizes: Mapping[str, Any], place: Json) -> None:
        self._sizes, self._place = sizes, place

    def __getitem__(self, name: str) -> Any:
        return self._sizes.get(name)

    def noise(self, *axes: str | int) -> torch.Tensor:
        return torch.randn(*self._find(axes), **self._place)

    def ones(self, *axes: str | int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.ones(*self._find(axes), dtype=dtype, device=self._place["device"])

    def zeros(self, *axes: str | int) -> torch.Tensor:
        return self.ones(*axes) * 0

    def places(self, many: int) -> torch.Tensor:
        return torch.arange(many, device=self._place["device"])

    def _find(self, axes: tuple[str | int, ...]) -> list[int]:
        return [self._sizes[axis] if isinstance(axis, str) else axis for axis in axes]


def _give_dit(s: _Sizes) -> Json:
    return {
        "encoder_hidden_states_t5": s.noise("b", "text_len_t5", "cross_attention_dim_t5"),
        "text_embedding_mask": s.ones("b", "n"),
        "text_embedding_mask_t5": s.ones("b", "text_len_t5"),
        "image_meta_size": s.noise("b", 6),
        "style": s.zeros("b"),
    }


def _give_control(s: _Sizes) -> Json:
    return {"controlnet_cond": s.noise("b", "in_channels", "h", "w")}


def _give_sound(s: _Sizes) -> Json:
    frames = round(((s["t"] - 1) * 8 + 1) / 24 * 25)
    return {
        "audio_hidden_states": s.noise("b", frames, "audio_in_channels"),
        "audio_encoder_hidden_states": s.noise("b", "n", "caption_channels"),
        "audio_num_frames": frames,
        "sigma": s.noise("b"),
        "audio_timestep": s.noise("b"),
        "encoder_attention_mask": None,
        **({"timestep": s.noise("b", "p")} if s["expand_timesteps"] else {}),
    }


def _give_sequence(s: _Sizes) -> Json:
    """One sequence of text, audio and video, as MiniMax-H3 reads it."""
    sound = 2 * round(((s["t"] - 2) // 5 * 17 + 5) / 24 * 40)
    heard = s["n"] + sound  # where the video begins
    whole = s.places(heard + s["p"] // 4)
    return {
        "hidden_states": s.noise("b", s["p"] // 4, 4 * s["in_channels"]),
        "audio_hidden_states": s.noise("b", sound, "audio_in_channels"),
        "timestep": s.noise(2),
        "timestep_indices": s.zeros(len(whole)),
        "token_tags": s.zeros(len(whole)),
        "position_ids": s.zeros(len(whole), 3),
        "text_indices": whole[: s["n"]],
        "audio_indices": whole[s["n"] : heard],
        "video_indices": whole[heard:],
    }


def _give_patches(s: _Sizes) -> Json:
    """One text and one video, as Cosmos 3 reads them."""
    shape = (s["t"], -(-s["h"] // 2), -(-s["w"] // 2))
    text, patches = s["n"], shape[0] * shape[1] * shape[2]
    places = text + s.places(patches)
    return {
        "input_ids": s.zeros("n"),
        "text_indexes": s.places(text),
        "position_ids": s.zeros(3, text + patches),
        "und_len": text,
        "sequence_length": text + patches,
        "vision_tokens": [s.noise(1, "latent_channel", "t", "h", "w")],
        "vision_token_shapes": [shape],
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": places,
        "vision_timesteps": s.noise(patches),
        "vision_noisy_frame_indexes": [s.places(shape[0])],
    }


# Further arguments of a class's forward.
_FURTHER: dict[str, Callable[[_Sizes], Json]] = {
    "HunyuanDiT2DModel": _give_dit,
    "HunyuanDiT2DControlNetModel": lambda s: {**_give_dit(s), **_give_control(s)},
    "SD3ControlNetModel": _give_control,
    "SanaControlNetModel": _give_control,
    "ErnieImageTransformer2DModel": lambda s: {"text_lens": s.ones("b") * s["n"]},
    "Krea2Transformer2DModel": lambda s: {
        "encoder_hidden_states": s.noise("b", "n", "num_text_layers", "text_hidden_dim"),
        "position_ids": s.zeros(s["n"] + s["p"], 3),
    },
    "BriaFiboTransformer2DModel": lambda s: {
        "text_encoder_layers": [
            s.noise("b", "n", "text_encoder_dim") for _ in range(s["num_layers"] + s["num_single_layers"])
        ],
    },
    "LuminaNextDiT2DModel": lambda s: {
        "encoder_mask": s.ones("b", "n"),
        "image_rotary_emb": torch.polar(*[
            s.ones("h", "w", s["hidden_size"] // s["num_attention_heads"] // 2, dtype=torch.float32)
        ] * 2),
        "cross_attention_kwargs": {},
    },
    "HunyuanImageTransformer2DModel": lambda s: {
        "encoder_hidden_states_2": s.noise("b", 128, "text_embed_2_dim") if s["text_embed_2_dim"] else None,
        "encoder_attention_mask_2": s.ones("b", 128),
        "timestep_r": s.noise("b") if s["use_meanflow"] else None,
    },
    "JoyImageEditPlusTransformer3DModel": lambda s: {"shape_list": [[(s["t"], s["h"], s["w"])]] * s["b"]},
    "GlmImageTransformer2DModel": lambda s: {
        "prior_token_id": s.zeros("b", s["p"] // s["patch_size"] ** 2),
        "prior_token_drop": s.zeros("b").bool(),
    },
    "CosmosTransformer3DModel": lambda s: {
        "padding_mask": s.noise(1, 1, 16, 16),
        "encoder_hidden_states": s.noise(
            "b", "n", "crossattn_proj_in_channels" if s["use_crossattn_projection"] else "text_embed_dim"
        ),
        **({"timestep": s.noise("b", 1, "t", 1, 1)} if s["expand_timesteps"] else {}),
    },
    "CosmosControlNetModel": lambda s: {
        "latents": s.noise("b", s["latent_channels"] - 2, "t", "h", "w"),
        "controls_latents": s.noise("b", 4, "t", "h", "w"),
        "condition_mask": s.noise("b", 1, "t", "h", "w"),
        "padding_mask": s.noise(1, 1, 16, 16),
        "encoder_hidden_states": s.noise(
            "b", "n", "crossattn_proj_in_channels" if s["use_crossattn_projection"] else "text_embed_dim"
        ),
        **({"timestep": s.noise("b", 1, "t", 1, 1)} if s["expand_timesteps"] else {}),
    },
    "AnyFlowTransformer3DModel": lambda s: {"timestep": s.noise("b", "t"), "r_timestep": s.noise("b", "t")},
    "HiDreamImageTransformer2DModel": lambda s: {
        "timesteps": s.noise("b"),
        "encoder_hidden_states_t5": s.noise("b", "n", s["caption_channels"][0]),
        "encoder_hidden_states_llama3": [s.noise("b", "n", s["caption_channels"][1]) for _ in s["llama_layers"]],
        "pooled_embeds": s.noise("b", "text_emb_dim"),
    },
    "HunyuanVideoFramepackTransformer3DModel": lambda s: {
        "image_embeds": s.noise("b", 729, "image_proj_dim"),
        "indices_latents": s.ones("t"),
        "latents_clean": s.noise("b", "in_channels", 2, "h", "w"),
        "indices_latents_clean": s.ones(2),
        "latents_history_2x": s.noise("b", "in_channels", 2, "h", "w"),
        "indices_latents_history_2x": s.ones(2),
        "latents_history_4x": s.noise("b", "in_channels", 16, "h", "w"),
        "indices_latents_history_4x": s.ones(16),
    },
    "ConsisIDTransformer3DModel": lambda s: {
        "id_cond": s.noise(1 if s["one_face"] else "b", "LFE_id_dim"),
        "id_vit_hidden": [
            s.noise(1 if s["one_face"] else "b", 577, "LFE_vit_dim") for _ in range(s["LFE_num_scale"] or 0)
        ],
    },
    "BriaFibo2Transformer2DModel": lambda s: {
        "encoder_hidden_states": s.noise("b", 1 + len(s["injection_layer_ids"]), "n", "cap_feat_dim"),
        "encoder_attention_mask": None,
    },
    "HeliosTransformer3DModel": lambda s: {
        "indices_hidden_states": s.ones("b", "t"),
        "latents_history_short": s.noise("b", "c", 2, "h", "w"),
        "indices_latents_history_short": s.ones("b", 2),
        "latents_history_mid": s.noise("b", "c", 2, "h", "w"),
        "indices_latents_history_mid": s.ones("b", 2),
        "latents_history_long": s.noise("b", "c", 16, "h", "w"),
        "indices_latents_history_long": s.ones("b", 16),
    },
    "WanAnimateTransformer3DModel": lambda s: {
        "pose_hidden_states": s.noise("b", "latent_channels", s["t"] - 1, "h", "w"),
        "face_pixel_values": s.noise("b", 3, (s["t"] - 2) * 4 + 1, "motion_encoder_size", "motion_encoder_size"),
    },
    "Ideogram4Transformer2DModel": lambda s: {
        "hidden_states": s.noise("b", s["n"] + s["p"], "c"),
        "encoder_hidden_states": s.noise("b", s["n"] + s["p"], "llm_features_dim"),
        "position_ids": s.zeros("b", s["n"] + s["p"], 3),
        "segment_ids": s.ones("b", s["n"] + s["p"]),
        "indicator": torch.cat([3 * s.ones("b", "n"), 2 * s.ones("b", "p")], dim=1),
    },
    "MiniMaxH3Transformer3DModel": _give_sequence,
    "Cosmos3OmniTransformer": _give_patches,
    "Kandinsky6Transformer3DModel": lambda s: {
        "audio_hidden_states": s.noise("b", -(-((s["t"] - 1) * 4 + 1) * 44100 // 24 // 1024), "in_audio_dim"),
        "encoder_attention_mask": None,
    },
    "DreamLiteUNetModel": lambda s: {"added_cond_kwargs": {"time_ids": s.noise("b", 2)}},
    "Flux3Transformer2DModel": lambda s: {"target_timestep": s.noise("b")} if s["flow_map"] else {},
    "LTX2VideoTransformer3DModel": _give_sound,
    "QwenImage21Transformer2DModel": lambda s: {
        "img_shapes": [[(s["t"], s["h"], s["w"])]] * s["b"],
        "img_mask": torch.cat([s.zeros(1, "n"), s.ones(1, s["p"] // 4)], dim=1).bool(),
    },
    "UNetControlNetXSModel": lambda s: {"controlnet_cond": s.noise("b", 3, 8 * s["h"], 8 * s["w"])},
    "UNetMotionModel": lambda s: {"encoder_hidden_states": s.noise(s["b"] * s["t"], "n", "cross_attention_dim")},
    "SparseControlNetModel": lambda s: {
        "encoder_hidden_states": s.noise(s["b"] * s["t"], "n", "cross_attention_dim"),
        "controlnet_cond": s.noise(1, s["conditioning_channels"] or 4, "t", "h", "w"),
        "conditioning_mask": s.noise(1, 1, "t", "h", "w"),
    },
    "UNetSpatioTemporalConditionModel": lambda s: {"added_time_ids": s.noise("b", 3)},
    "I2VGenXLUNet": lambda s: {
        "fps": s.ones("b"),
        "image_latents": s.noise("b", 4, "t", "h", "w"),
        "image_embeddings": s.noise("b", "cross_attention_dim"),
    },
    "T2IAdapter": lambda s: {"x": s.noise("b", "in_channels", 8 * s["h"], 8 * s["w"])},
    "ControlNetUnionModel": lambda s: {
        "controlnet_cond": [s.noise("b", 3, 8 * s["h"], 8 * s["w"])],
        "control_type": s.noise("b", "num_control_type"),
        "control_type_idx": [0],
    },
    "StableCascadeUNet": lambda s: {
        "sample": s.noise(
            "b", "in_channels", *(s[side] * (1 if s["effnet_in_channels"] else 3) for side in ("h", "w"))
        ),
        "timestep_ratio": s.noise("b"),
        "clip_text_pooled": s.noise("b", 1, "clip_text_pooled_in_channels"),
        **(
            {"clip_text": None, "effnet": s.noise("b", "effnet_in_channels", 3, 3)}
            if s["effnet_in_channels"]
            else {"clip_img": s.noise("b", 1, "clip_image_in_channels")}
        ),
    },
    "WuerstchenPrior": lambda s: {
        "x": s.noise("b", "c_in", 3 * s["h"], 3 * s["w"]),
        "r": s.noise("b"),
        "c": s.noise("b", "n", "c_cond"),
    },
    "WuerstchenDiffNeXt": lambda s: {
        "x": s.noise("b", "c_in", "h", "w"),
        "r": s.noise("b"),
        "effnet": s.noise("b", "effnet_embd", 3, 3),
        "clip": s.noise("b", "n", "clip_embd"),
    },
    "UVit2DModel": lambda s: {
        "input_ids": s.zeros("b", "h", "w"),
        "encoder_hidden_states": s.noise("b", "n", "encoder_hidden_size"),
        "pooled_text_emb": s.noise("b", "cond_embed_dim"),
        "micro_conds": s.noise("b", s["micro_cond_embed_dim"] // s["micro_cond_encode_dim"]),
    },
    "PriorTransformer": lambda s: {"proj_embedding": s.noise("b", "embedding_dim")},
    "OmniGenTransformer2DModel": lambda s: {
        "input_ids": s.zeros("b", "n"),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": None,
        "position_ids": s.zeros("b", s["n"] + 1 + s["p"] // s["patch_size"] ** 2),
    },
}  # fmt: skip


def _stand_in_for_torchvision() -> None:
    """What Cosmos calls of torchvision, where it is not installed: a mask is resized."""
    from diffusers.models.controlnets import controlnet_cosmos
    from diffusers.models.transformers import transformer_cosmos

    def resize(image: torch.Tensor, size: list[int], **_kwargs: object) -> torch.Tensor:
        return torch.nn.functional.interpolate(image, size)

    modes = SimpleNamespace(NEAREST=None)
    stand_in = SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=modes)
    for module in (transformer_cosmos, controlnet_cosmos):
        if not hasattr(module, "transforms"):
            setattr(module, "transforms", stand_in)  # noqa: B010


def _load_adapter(unet: Any, wide: Any) -> None:
    """An IP-Adapter, as diffusers' load_ip_adapter makes it of a file."""
    reads = unet.config.cross_attention_dim
    weights: dict[str, Any] = {}
    for number, name in enumerate(each for each in unet.attn_processors if "attn2" in each):
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        weights |= {f"{2 * number + 1}.{key}.weight": torch.randn(width, reads) for key in ("to_k_ip", "to_v_ip")}
    made = {"proj.weight": torch.randn(4 * reads, wide), "proj.bias": torch.zeros(4 * reads)}
    norm = {"norm.weight": torch.ones(reads), "norm.bias": torch.zeros(reads)}
    unet._load_ip_adapter_weights([{"image_proj": {**made, **norm}, "ip_adapter": weights}], low_cpu_mem_usage=False)


def _find_class(name: str) -> Any:
    import diffusers

    if hasattr(diffusers, name):
        return getattr(diffusers, name)
    from diffusers.pipelines import ltx, ltx2
    from diffusers.pipelines.deprecated import wuerstchen

    places: Json = {"LTX2LatentUpsamplerModel": ltx2, "LTXLatentUpsamplerModel": ltx}
    return getattr(places.get(name, wuerstchen), name)


def build_denoiser(config: Mapping[str, object], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The diffusers class that a config names, made on the device."""
    import diffusers

    name = str(config["_class_name"])
    given = {key: value for key, value in config.items() if not key.startswith("_") and key not in _NOT_GIVEN}
    reads = given.pop("ip_image_dim", 0) and given.pop("encoder_hid_dim_type") and config["ip_image_dim"]
    lent = {key: given.pop(key) for key in LENT if name == "ZImageControlNetModel" and key in given}
    if name.startswith("Cosmos"):
        _stand_in_for_torchvision()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings(), torch.device(device):
            warnings.simplefilter("ignore")
            made = _find_class(name)(**given)
            if reads:
                _load_adapter(made, reads)
            if lent:  # some of its transformer's modules are its own too; its __init__ forgets the attribute
                made.gradient_checkpointing = False
                sizes = {key: given[key] for key in ("dim", "n_refiner_layers", "n_heads", "n_kv_heads")}
                whole: Any = diffusers.ZImageTransformer2DModel
                made.from_transformer(made, whole(n_layers=1, **lent, **sizes))
            return made
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
    latents = find_latents(name)
    taken = inspect.signature(_find_class(name).forward).parameters
    sizes = {"b": batch, "c": _find_channels(config), "t": t, "h": h, "w": w, "n": t * h * w}
    sizes |= (
        dict(zip(("pt", "ph", "pw"), config.get("patch_size", ()), strict=False)) if "pt" in latents["axes"] else {}
    )
    given: Json = {latents["input"]: torch.randn(*(sizes[axis] for axis in latents["axes"].split()), **place)}
    if "timestep" in taken:
        given["timestep"] = torch.ones(batch, **place)
    if (
        name == "DiTTransformer2DModel"
        or config.get("num_class_embeds")
        or config.get("class_embed_type") == "timestep"
    ):
        given["class_labels"] = torch.ones(batch, dtype=torch.long, device=device)
    if config.get("class_embed_type") == "projection":
        given["class_labels"] = torch.randn(batch, config["projection_class_embeddings_input_dim"], **place)
    if latents.get("text"):
        given[latents["text"]] = torch.randn(batch, text, _find_text_width(config), **place)
    if name in ("FluxControlNetModel", "QwenImageControlNetModel"):
        channels = config["in_channels"] + config.get("extra_condition_channels", 0)
        given["controlnet_cond"] = torch.randn(batch, t * h * w, channels, **place)
    if config.get("num_mode"):
        given["controlnet_mode"] = torch.zeros(batch, 1, dtype=torch.long, device=device)
    if name == "ControlNetModel":
        pixels = 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)
        given["controlnet_cond"] = torch.randn(batch, 3, h * pixels, w * pixels, **place)
    if config.get("time_cond_proj_dim"):
        given["timestep_cond"] = torch.randn(batch, config["time_cond_proj_dim"], **place)
    if config.get("addition_embed_type") == "text_time":
        pooled = int(config["projection_class_embeddings_input_dim"]) - 6 * int(config["addition_time_embed_dim"])
        given["added_cond_kwargs"] = {
            "text_embeds": torch.randn(batch, pooled, **place),
            "time_ids": torch.ones(batch, 6, **place),
        }
    if config.get("ip_image_dim"):
        given["added_cond_kwargs"] = {"image_embeds": [torch.randn(batch, 1, config["ip_image_dim"], **place)]}
    kind = config.get("addition_embed_type")
    if kind in ("text_image", "image", "image_hint"):
        wide = config["cross_attention_dim" if kind == "text_image" else "encoder_hid_dim"]
        given["added_cond_kwargs"] = {key: torch.randn(batch, wide, **place) for key in ("image_embeds", "text_embeds")}
    if kind == "image_hint":  # four of the channels
        given["added_cond_kwargs"]["hint"] = torch.randn(batch, 3, 8 * h, 8 * w, **place)
        given["sample"] = given["sample"][:, 4:]
    width = config.get("pooled_projection_dim") or config.get("in_text_dim2")
    if width and "pooled_projections" in taken:
        given["pooled_projections"] = torch.randn(batch, width, **place)
    if "visual_rope_pos" in taken:
        given["visual_rope_pos"] = [torch.arange(size // side) for size, side in zip(grid, (1, 2, 2), strict=True)]
        if "text_rope_pos" in taken:
            given["text_rope_pos"] = torch.arange(text)
    if channels := config.get("vace_in_channels"):
        given["control_hidden_states"] = torch.randn(batch, channels, *grid, **place)
    if name == "HunyuanVideo15Transformer3DModel":
        given["encoder_hidden_states_2"] = torch.randn(batch, 256, config["text_embed_2_dim"], **place)
        given["encoder_attention_mask_2"] = torch.ones(batch, 256, dtype=torch.long, device=device)
        given["image_embeds"] = torch.randn(batch, 729, config["image_embed_dim"], **place)
    if config.get("inject_sample_info"):
        given["fps"] = [1] * batch
    if config.get("guidance_embeds", name == "HunyuanVideoTransformer3DModel"):  # else as the class does
        given["guidance"] = torch.ones(batch, **place)
    if config.get("ofs_embed_dim"):
        given["ofs"] = torch.ones(1, **place)
    if config.get("image_dim"):
        two = config.get("pos_embed_seq_len")  # the first image and the last
        shape = (2 * batch, two // 2) if two else (batch, 257)
        given["encoder_hidden_states_image"] = torch.randn(*shape, config["image_dim"], **place)
    if config.get("expand_timesteps"):
        patch = 1
        for side in (
            config.get("patch_size", (1,)) if name in ("SanaVideoTransformer3DModel", "WanTransformer3DModel") else ()
        ):
            patch *= side
        given["timestep"] = torch.ones(batch, t * h * w // patch, **place)
    if "txt_ids" in taken:
        axes = len(config.get("axes_dims_rope", (0, 0, 0)))
        given |= {"img_ids": torch.zeros(t * h * w, axes, **place), "txt_ids": torch.zeros(text, axes, **place)}
    if "img_shapes" in taken:
        given["img_shapes"] = [[(t, h, w)]] * batch
    for key in ("encoder_attention_mask", "encoder_hidden_states_mask"):
        if key in taken and name not in _UNMASKED:
            given[key] = torch.ones(batch, text, dtype=torch.long, device=device)
    if "num_frames" in taken:
        given |= {"num_frames": t, "height": h, "width": w}
    given |= {
        key: torch.ones(batch, 2, **place) for key in ("original_size", "target_size", "crop_coords") if key in taken
    }
    if name in _FURTHER:
        given |= _FURTHER[name](_Sizes({**config, **sizes, "n": text, "p": t * h * w}, place))
    if name.startswith("ZImage"):  # a list of samples each
        given = {"x": list(given["x"]), "cap_feats": list(given["cap_feats"]), "t": torch.ones(batch, **place)}
    if name == "ZImageControlNetModel":
        given["control_context"] = list(torch.randn(batch, config["control_in_dim"], *grid, **place))
    if name == "PixArtTransformer2DModel":
        given["added_cond_kwargs"] = {
            "resolution": torch.ones(batch, 2, **place),
            "aspect_ratio": torch.ones(batch, 1, **place),
        }
    return given


def _find_channels(config: Mapping[str, Any]) -> int:
    if "in_visual_dim" in config:  # of Kandinsky 5: with a given image and its mask
        is_given = int(config.get("visual_cond", False))
        return int(config["in_visual_dim"]) * (1 + is_given) + is_given
    return int(config.get("in_channels", config.get("embedding_dim", 4)))


def find_latents(name: str) -> Mapping[str, str]:
    """What a denoiser's spec says of its input."""
    spec = find_spec(name)
    assert spec is not None  # else there is nothing to compare it with
    return spec.latents


def _find_text_width(config: Mapping[str, Any]) -> int:
    found = next(config[key] for key in _TEXT_WIDTHS if config.get(key) is not None)
    return int(found[0] if isinstance(found, (list, tuple)) else found)
