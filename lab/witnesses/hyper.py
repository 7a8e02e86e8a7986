"""mPLUG-Owl3: a language model some of whose layers attend to the patches of images beside the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, SiglipVisionModel
from transformers.modeling_utils import PreTrainedModel

from lab.witnesses.base import RemoteModel, Witness, attend
from lab.witnesses.text import Attention, GatedMlp, TextLayer, TextModel

FUSED = 378  # pixels of the release whose image keys stand before the text's


class HyperAttention(Attention):
    """modeling_hyper_qwen2.py, HyperQwen2Attention; images are taken to stand before every token."""

    def __init__(self, config: Any, layer: int) -> None:
        d, heads = config.hidden_size, config.num_attention_heads
        kv_heads, head_dim = config.num_key_value_heads or heads, d // heads
        if head_dim * heads != d:
            raise ValueError(f"hidden_size {d} is no multiple of num_attention_heads {heads}")
        super().__init__(d, heads, kv_heads, head_dim, layer)
        widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, width) for width in widths)
        self.hyper = layer + 1 in config.hyper_layers
        self.is_fused = config.vision_config.image_size == FUSED
        if self.hyper:
            self.v_kv_proj = nn.Linear(d, 2 * kv_heads * head_dim)
            if not self.is_fused:
                self.gate_proj = nn.Sequential(nn.Linear(head_dim, head_dim), nn.Sigmoid())

    def forward(self, x: torch.Tensor, cache: Any, seen: Any = None) -> torch.Tensor:
        """`seen`: rows of every tile of all samples, as many tiles for each."""
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.project(x))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if seen is None:
            attended = attend(q, k, v)
        else:
            made = self.v_kv_proj(seen).reshape(len(x), -1, self.kv_heads, 2, self.head_dim).transpose(1, 2)
            keys, values = made.unbind(-2)
            if self.is_fused:
                attended = attend(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
            else:
                attended = attend(q, k, v)
                share = self.gate_proj(attended.unflatten(-1, (-1, self.head_dim))).flatten(-2)
                attended = attended * (1 - share) + attend(q, keys, values) * share
        out: torch.Tensor = self.o_proj(attended)
        return out


class HyperLayer(TextLayer):
    """modeling_hyper_qwen2.py, HyperQwen2DecoderLayer: images pass the layer's first norm too."""

    def build(self, config: Any, layer: int) -> None:
        self.self_attn = HyperAttention(config, layer)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, cache: Any = None, seen: Any = None) -> torch.Tensor:
        own = self.input_layernorm(seen) if seen is not None and self.self_attn.hyper else None
        x = x + self.self_attn(self.input_layernorm(x), cache, own)
        return x + self.feed(self.post_attention_layernorm(x))


class HyperQwen2ForCausalLM(TextModel):
    """modeling_hyper_qwen2.py, HyperQwen2ForCausalLM."""

    layer = HyperLayer
    seen: Any = None

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer in self.model.layers:
            x = layer(x, cache, self.seen)
        out: torch.Tensor = self.model.norm(x)
        return out


class mPLUGOwl3Model(Witness, RemoteModel):
    """mPLUG/mPLUG-Owl3-7B-240728: modeling_mplugowl3.py; PaddlePaddle/PaddleMIX: paddlemix/models/mPLUGOwl3 (241101).

    The first sees in inference_mode, where its projector could not train: here under no_grad.
    """

    config_base = Qwen2Config

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.vision_model = SiglipVisionModel(config.vision_config)
        width, d = config.vision_config.hidden_size, config.hidden_size
        self.is_fused = config.vision_config.image_size == FUSED
        self.vision2text_model: nn.Module = (
            nn.Sequential(nn.Linear(width, d), nn.GELU(), nn.Linear(d, d)) if self.is_fused else nn.Linear(width, d)
        )
        self.language_model = HyperQwen2ForCausalLM(config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, pixel_values: Any = None, **inputs: Any) -> Any:
        self.language_model.seen = None
        if pixel_values is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_fused):
                states = self.vision_model(pixel_values, output_hidden_states=True).hidden_states
            self.language_model.seen = self.vision2text_model(states[-2])
        return self.language_model(input_ids, **inputs)
