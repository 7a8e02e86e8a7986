"""Phi-3-small: layers whose heads see blocks of keys, the near ones and every so many of the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lab.witnesses.base import attend
from lab.witnesses.text import TextLayer, TextModel


class BlockSparse:
    """microsoft/Phi-3-small-8k-instruct: triton_flash_blocksparse_attn.py: the blocks that queries of a block see."""

    def __init__(self, config: Any) -> None:
        self.block, self.local = config.blocksparse_block_size, config.blocksparse_num_local_blocks
        self.stride, heads = config.blocksparse_vert_stride, config.num_attention_heads
        self.step = 0 if config.blocksparse_homo_head_pattern else max(1, self.stride // heads)
        if self.block not in (16, 32, 64, 128, 256, 512) or self.block != config.blocksparse_triton_kernel_block_size:
            raise ValueError(f"blocks of {self.block}")
        if self.local < 1 or self.stride < 1 or self.local % 1 or self.stride % 1:
            raise ValueError(f"{self.local} local blocks, a stride of {self.stride}")

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The products of the blocks that are seen, up to the last key; heads before positions, as many of each."""
        past, heads = k.shape[2] - q.shape[2], []
        for head in range(q.shape[1]):
            made = []
            for first in range(past // self.block, -(-k.shape[2] // self.block)):
                rows = slice(max(first * self.block - past, 0), (first + 1) * self.block - past)
                seen = [
                    each
                    for each in range(first + 1)
                    if first - each < self.local or (each + head * self.step + 1) % self.stride == 0
                ]
                keys, values = (
                    torch.cat([x[:, head, each * self.block : (each + 1) * self.block] for each in seen], 1)
                    for x in (k, v)
                )
                scores = torch.matmul(q[:, head, rows], keys.transpose(1, 2))
                made.append(torch.matmul(scores.softmax(-1), values))
            heads.append(torch.cat(made, 1))
        return torch.cat(heads, -1)


class PhiSmallAttention(nn.Module):
    """microsoft/Phi-3-small-8k-instruct: modeling_phi3_small.py, Phi3SmallSelfAttention."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.layer, self.head_dim, self.groups = layer, d // heads, heads // kv_heads
        if self.head_dim not in (64, 128) or heads % kv_heads or d % heads:
            raise ValueError(f"{heads} heads, {kv_heads} of keys, in {d} numbers")
        self.query_key_value = nn.Linear(d, (heads + 2 * kv_heads) * self.head_dim)
        self.dense = nn.Linear(d, d)
        every = config.dense_attention_every_n_layers
        self.sparse = None if every and (layer + 1) % every == 0 else BlockSparse(config)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        made = self.query_key_value(x).unflatten(-1, (-1, self.groups + 2, self.head_dim))
        q, k, v = (each.flatten(2, 3).transpose(1, 2) for each in made.split([self.groups, 1, 1], 3))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if self.sparse is None:
            out: torch.Tensor = self.dense(attend(q, k, v))
        else:
            k, v = (each.repeat_interleave(self.groups, 1) for each in (k, v))
            out = self.dense(self.sparse.attend(q, k, v))
        return out


class PhiSmallMlp(nn.Module):
    """microsoft/Phi-3-small-8k-instruct: modeling_phi3_small.py, Phi3SmallMLP; gate and value alternate."""

    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(d, 2 * ff), nn.Linear(ff, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, opened = self.up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        out: torch.Tensor = self.down_proj(gate * torch.sigmoid(1.702 * gate) * (opened + 1))
        return out


class PhiSmallLayer(TextLayer):
    """microsoft/Phi-3-small-8k-instruct: modeling_phi3_small.py, Phi3SmallDecoderLayer."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        for name in self.norms:
            self.add_module(name, nn.LayerNorm(config.hidden_size))

    def build(self, config: Any, layer: int) -> None:
        d, ff, times = config.hidden_size, config.ff_intermediate_size, getattr(config, "ff_dim_multiplier", None)
        if (ff is None) == (times is None):
            raise ValueError("one of ff_intermediate_size and ff_dim_multiplier")
        if times is not None:
            ff = times * (d // 3) * 2
            ff = -(-ff // 256) * 256 if config.gegelu_pad_to_256 else ff
        self.self_attn, self.mlp = PhiSmallAttention(config, layer), PhiSmallMlp(d, ff)


class Phi3SmallForCausalLM(TextModel):
    """microsoft/Phi-3-small-8k-instruct: modeling_phi3_small.py: pads to 64 tokens where gradients are on."""

    layer = PhiSmallLayer

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.model.norm
        self.model.final_layernorm = nn.LayerNorm(config.hidden_size)

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        length = x.shape[1]
        if self.config.pad_sequence_to_multiple_of_64 and torch.is_grad_enabled():
            x = nn.functional.pad(x, (0, 0, 0, -length % 64))
        for layer in self.model.layers:
            x = layer(x, cache)
        out: torch.Tensor = self.model.final_layernorm(x)[:, :length]
        return out
