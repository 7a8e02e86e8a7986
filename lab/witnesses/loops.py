"""IQuest-Coder's loop: a language model whose layers run several times, later passes over keys of the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lab.witnesses.base import attend
from lab.witnesses.text import Attention, GatedMlp, TextLayer, TextModel


class LoopGate(nn.Module):
    """modeling_iquestloopcoder.py, LoopGateProjection: one number for each head, of its own queries."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(heads, head_dim)), nn.Parameter(torch.zeros(heads))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        made = torch.matmul(q.transpose(0, 1).flatten(1, 2), self.weight.unsqueeze(-1))  # heads, samples' places, 1
        return (made.view(q.shape[1], q.shape[0], -1).permute(1, 2, 0) + self.bias).sigmoid()


class LoopAttention(Attention):
    """modeling_iquestloopcoder.py, IQuestLoopCoderAttention: later passes mix keys of the first and a window's own."""

    def forward(self, x: torch.Tensor, cache: Any, at: int = 0, first: Any = None, gate: Any = None) -> Any:
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.project(x))
        if cache is not None:
            k, v = cache.update(k, v, at)
        if first is None:
            return self.o_proj(attend(q, k, v)), k, v
        assert self.window is not None
        near = attend(q, k[:, :, -self.window :], v[:, :, -self.window :])  # cut for all queries, as there
        share = gate(q).repeat_interleave(self.head_dim, -1)
        return self.o_proj(attend(q, *first) * share + near * (1 - share))


class LoopLayer(TextLayer):
    """modeling_iquestloopcoder.py, IQuestLoopCoderDecoderLayer; the first pass returns its keys and values too.

    There later passes find them in the cache, which transformers takes away from checkpointed layers.
    """

    def build(self, config: Any, layer: int) -> None:
        d, heads, window = config.hidden_size, config.num_attention_heads, config.loop_window_size
        kv_heads = config.num_key_value_heads or heads
        self.self_attn = LoopAttention(d, heads, kv_heads, config.head_dim, layer, window=window)
        self.mlp = GatedMlp(d, config.intermediate_size)

    def forward(self, x: torch.Tensor, cache: Any, at: int, k: Any = None, v: Any = None, gate: Any = None) -> Any:
        read = self.input_layernorm(x)
        if gate is None:
            made, k, v = self.self_attn(read, cache, at)
            return self._end(x + made), k, v
        return self._end(x + self.self_attn(read, cache, at, (k, v), gate))

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed(self.post_attention_layernorm(x))


class IQuestLoopCoderForCausalLM(TextModel):
    """IQuestLab/IQuest-Coder-V1-40B-Loop-Instruct: modeling_iquestloopcoder.py; the layers run loop_num times."""

    layer = LoopLayer

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        heads, head_dim = config.num_attention_heads, config.head_dim
        self.model.gate_projections = nn.ModuleList(LoopGate(heads, head_dim) for _ in self.model.layers)

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        first = []
        for at, layer in enumerate(self.model.layers):
            x, *made = layer(x, cache, at)
            first.append(made)
        for number in range(1, self.config.loop_num):
            for at, (layer, gate) in enumerate(zip(self.model.layers, self.model.gate_projections, strict=True)):
                x = layer(x, cache, number * len(first) + at, *first[at], gate)
        out: torch.Tensor = self.model.norm(x)
        return out
