"""Yuan2.0-M32: filtered queries and keys, and experts that are chosen by attention between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig

from lab.witnesses.base import Norm, attend, run_experts
from lab.witnesses.text import TextLayer, TextModel


class Memory(DynamicCache):
    """A cache that keeps the last two states that each layer's filter read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, torch.Tensor] = {}


class Filtering(nn.Module):
    """yuan_moe_hf_model.py, LocalizedFiltering: two convolutions over two positions each."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d, d // 2, (2, 1), padding=(1, 0))
        self.conv2 = nn.Conv2d(d // 2, d, (2, 1), padding=(1, 0))
        self.output_layernorm = Norm(d)

    def forward(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        read = (x if before is None else torch.cat([before, x], 1)).transpose(1, 2).unsqueeze(-1)
        if before is None:
            made = self.conv2(self.conv1(read)[:, :, : x.shape[1]])[:, :, : x.shape[1]]
        else:
            made = self.conv2(self.conv1(read)[:, :, 1:-1])[:, :, 1:-1]
        out: torch.Tensor = self.output_layernorm(made.squeeze(-1).transpose(1, 2) + x)
        return out


class FilteredAttention(nn.Module):
    """yuan_moe_hf_model.py, YuanAttention: queries and keys read the filtered states, values the plain ones."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, heads = config.hidden_size, config.num_attention_heads
        inner = getattr(config, "attention_projection_size", None) or d
        self.layer, self.head_dim = layer, inner // heads
        rotated = 2 * -(-(d // heads) // 2)
        if rotated > self.head_dim or inner % heads:
            raise ValueError(f"{heads} heads in {inner} numbers, {rotated} of each turned")
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, d, bias=False)
        self.lf_gate = Filtering(d)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        before = None
        if cache is not None:
            before = cache.states.get(self.layer)
            seen = nn.functional.pad(x, (0, 0, 2, 0)) if before is None else torch.cat([before, x], 1)
            cache.states[self.layer] = seen[:, -2:]
        filtered = self.lf_gate(x, before)
        made = (self.q_proj(filtered), self.k_proj(filtered), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in made)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        out: torch.Tensor = self.o_proj(attend(q, k, v))
        return out


class AttentionRouter(nn.Module):
    """yuan_moe_hf_model.py, ParallelAttention_router: every expert of a token attends to all of them."""

    def __init__(self, d: int, experts: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d, experts, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).float().unsqueeze(-1) for each in (self.query, self.key, self.value))
        return torch.matmul(torch.matmul(q, k.transpose(-1, -2)).softmax(-1), v).squeeze(-1)


class YuanExpert(nn.Module):
    """yuan_moe_hf_model.py, YuanExpertMLP."""

    def __init__(self, d: int, ff: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.w1, self.w2 = nn.Linear(d, ff * (2 if gated else 1), bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.w1(x)
        if self.gated:
            gate, opened = x.chunk(2, -1)
            x = nn.functional.silu(gate) * opened
        else:
            x = nn.functional.silu(x)
        out: torch.Tensor = self.w2(x)
        return out


class YuanExperts(nn.Module):
    """yuan_moe_hf_model.py, YuanMoeLayer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        own, d = config.moe_config, config.hidden_size
        experts, self.top_k = own.moe_num_experts, own.moe_top_k
        self.gate = AttentionRouter(d, experts)
        sizes = (d, own.ffn_hidden_size, own.gated_linear_unit)
        self.experts = nn.ModuleList(YuanExpert(*sizes) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(x).flatten(0, 1).softmax(-1).topk(self.top_k, -1)
        return run_experts(self.experts, flat, weights, chosen).view_as(x)


class YuanLayer(TextLayer):
    """yuan_moe_hf_model.py, YuanDecoderLayer."""

    def build(self, config: Any, layer: int) -> None:
        self.self_attn = FilteredAttention(config, layer)
        self.mlp = YuanExperts(config)


class YuanConfig(PretrainedConfig):
    """configuration_yuan.py: one table for both ends, unless a config says otherwise."""

    tie_word_embeddings: bool = True


class YuanForCausalLM(TextModel):
    """IEIT-Yuan/Yuan2.0-M32: 3rd_party/AutoGPTQ/auto_gptq/modeling/yuan_moe_hf_model.py."""

    config_base = YuanConfig
    layer = YuanLayer

    def make_cache(self) -> Any:
        return Memory()
