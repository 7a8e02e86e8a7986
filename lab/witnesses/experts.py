"""CogVLM: language layers that hold weights of their own for the positions of images, and its model of videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lab.witnesses.base import Names, Norm, PostBlock, Sees, attend
from lab.witnesses.text import Attention, GatedMlp, TextLayer, TextModel


class CogAttention(nn.Module):
    """InternLM/lmdeploy: lmdeploy/pytorch/models/cogvlm.py, VisionExpertAttention."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, heads = config.hidden_size, config.num_attention_heads
        kv_heads = getattr(config, "num_multi_query_heads", None)
        self.layer, self.head_dim = layer, d // heads
        kv = (kv_heads or heads) * self.head_dim
        self.widths = [d, kv, kv]
        self.vision_expert_query_key_value = nn.Linear(d, d + 2 * kv, bias=kv_heads is not None)
        self.language_expert_query_key_value = nn.Linear(d, d + 2 * kv, bias=False)
        self.vision_expert_dense, self.language_expert_dense = (nn.Linear(d, d, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, seen: torch.Tensor, cache: Any) -> torch.Tensor:
        made = split(x, seen, self.vision_expert_query_key_value, self.language_expert_query_key_value)
        pieces = made.split(self.widths, -1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in pieces)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        return split(attend(q, k, v), seen, self.vision_expert_dense, self.language_expert_dense)


def split(x: torch.Tensor, seen: torch.Tensor, vision: nn.Module, language: nn.Module) -> torch.Tensor:
    """Positions of images through one module, the others through the other."""
    first, second = vision(x[seen]), language(x[~seen])
    out = torch.zeros(*x.shape[:2], second.shape[-1])
    out[seen], out[~seen] = first, second
    return out


class CogLayer(nn.Module):
    """InternLM/lmdeploy: lmdeploy/pytorch/models/cogvlm.py, CogVLMDecoderLayer."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, ff = config.hidden_size, config.intermediate_size
        self.input_layernorm, self.post_attention_layernorm = Norm(d), Norm(d)
        self.self_attn = CogAttention(config, layer)
        self.mlp = nn.Module()
        self.mlp.vision_mlp, self.mlp.language_mlp = GatedMlp(d, ff), GatedMlp(d, ff)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, cache: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), seen, cache)
        return x + split(self.post_attention_layernorm(x), seen, self.mlp.vision_mlp, self.mlp.language_mlp)


class EvaClip(nn.Module):
    """InternLM/lmdeploy: lmdeploy/pytorch/models/cogvlm.py, EVA2CLIPModel; `folds`: a convolution, in CogVLM2 alone."""

    def __init__(self, config: Any, folds: bool) -> None:
        super().__init__()
        tower, d, ff = config.vision_config, config.hidden_size, config.intermediate_size
        width, patch = tower.hidden_size, tower.patch_size
        names = Names(
            ("input_layernorm", "post_attention_layernorm"),
            ("attention.query_key_value",),
            "attention",
            "attention.dense",
        )
        self.patch_embedding = nn.Module()
        self.patch_embedding.proj = nn.Conv2d(tower.in_channels, width, patch, patch)
        self.patch_embedding.cls_embedding = nn.Parameter(torch.ones(1, width))
        self.patch_embedding.position_embedding = nn.Embedding(tower.num_positions, width)
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            PostBlock(names, width, tower.intermediate_size, tower.num_heads) for _ in range(tower.num_hidden_layers)
        )
        self.conv = nn.Conv2d(width, width, 2, 2) if folds else None
        project = self.linear_proj = nn.Module()
        project.linear_proj, project.norm1 = nn.Linear(width, d, bias=False), nn.LayerNorm(d)
        project.gate_proj, project.dense_h_to_4h = (nn.Linear(d, ff, bias=False) for _ in range(2))
        project.dense_4h_to_h = nn.Linear(ff, d, bias=False)
        self.boi, self.eoi = (nn.Parameter(torch.ones(1, 1, d)) for _ in range(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embedding.proj(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.patch_embedding.cls_embedding.expand(len(x), 1, -1), x], 1)
        x = x + self.patch_embedding.position_embedding.weight[None]
        for layer in self.transformer.layers:
            x = layer(x)
        x = x[:, 1:]
        if self.conv is not None:
            side = round(x.shape[1] ** 0.5)
            x = self.conv(x.transpose(1, 2).unflatten(2, (side, side))).flatten(2).transpose(1, 2)
        project = self.linear_proj
        x = nn.functional.gelu(project.norm1(project.linear_proj(x)))
        x = project.dense_4h_to_h(nn.functional.silu(project.gate_proj(x)) * project.dense_h_to_4h(x))
        first, last = (each.expand(len(x), -1, -1) for each in (self.boi, self.eoi))
        return torch.cat([first, x, last], 1)


class CogVLMForCausalLM(Sees, TextModel):
    """InternLM/lmdeploy: lmdeploy/pytorch/models/cogvlm.py; mindspore-lab/mindnlp's port says which positions count."""

    layer = CogLayer
    supports_gradient_checkpointing = False
    image_token = "image_token_id"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.vision = EvaClip(config, config.vision_config.num_positions != 1226)

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer in self.model.layers:
            x = layer(x, self.seen, cache)
        out: torch.Tensor = self.model.norm(x)
        return out

    def forward(self, input_ids: torch.Tensor, images: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        own = {} if images is None else {"pixel_values": images}
        is_image = input_ids == self.config.image_token_id
        self.seen = is_image.clone()
        self.seen[:, :-1] &= is_image[:, 1:]  # an image's last position counts as text
        self.seen[:, -1] = False
        return super().forward(**inputs, **self.embed(input_ids, own, inputs_embeds))

    def see(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model.vision(pixel_values)


class CogVideoLayer(TextLayer):
    """zai-org/cogvlm2-llama3-caption: modeling_cogvlm.py, CogVLMDecoderLayer: the language's weights alone."""

    def build(self, config: Any, layer: int) -> None:
        d, heads = config.hidden_size, config.num_attention_heads
        if d % heads:
            raise ValueError(f"hidden_size {d} is no multiple of num_attention_heads {heads}")
        self.self_attn = Attention(
            d,
            heads,
            config.num_multi_query_heads,
            d // heads,
            layer,
            fused="language_expert_query_key_value",
            out="language_expert_dense",
        )
        self.mlp = nn.Module()
        self.mlp.language_mlp = GatedMlp(d, config.intermediate_size)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp.language_mlp(x)
        return out


class CogVLMVideoForCausalLM(Sees, TextModel):
    """zai-org/cogvlm2-llama3-caption: modeling_cogvlm.py, here with the frames of every sample's video."""

    layer = CogVideoLayer
    supports_gradient_checkpointing = False
    image_token = "image_token_id"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.vision = EvaClip(config, folds=True)

    def forward(self, input_ids: torch.Tensor, images: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        own = {} if images is None else {"pixel_values": images}
        return super().forward(**inputs, **self.embed(input_ids, own, inputs_embeds))

    def see(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model.vision(pixel_values)
