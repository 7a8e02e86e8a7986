"""Moondream 3: an image whole and as crops that overlap, before a language model with a prefix that sees itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lab.witnesses.base import Block, Names, Sees, attend
from lab.witnesses.text import ExpertLinear, TextModel

# vllm-project/vllm: vllm/transformers_utils/configs/moondream3.py: what a config may leave out.
_TEXT = {"dim": 2048, "ff_dim": 8192, "n_layers": 24, "vocab_size": 51200, "n_heads": 32, "n_kv_heads": 32, "moe": {}}
_MOE = {"start_layer": 4, "n_experts": 64, "n_experts_per_tok": 8, "expert_inner_dim": 1024}
_VISION = {
    "enc_dim": 1152, "enc_patch_size": 14, "enc_n_layers": 27, "enc_ff_dim": 4304, "enc_n_heads": 16,
    "proj_inner_dim": 8192, "crop_size": 378, "overlap_margin": 4,
}  # fmt: skip
_TURNED = 32  # numbers of a head that rotary embeddings turn
Sizes = Mapping[str, Any]


class Moondream3Tau(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/moondream3.py, Moondream3Attention: scales made of the products."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(heads))
        self.wq, self.wv = (nn.Parameter(torch.ones(heads, 3 * d)) for _ in range(2))

    def forward(self, made: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = 0.5 + torch.sigmoid(torch.log(at + 1.0)[:, None] * self.alpha)
        read = nn.functional.gelu(made)
        q, v = (torch.tanh(nn.functional.linear(read, weight)) + place for weight in (self.wq, self.wv))
        return q, v


class Moondream3Attention(nn.Module):
    """The same class: one projection, scaled queries and values, a part of each head turned."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        d, self.heads, self.layer = sizes["dim"], sizes["n_heads"], layer
        self.head_dim = d // self.heads
        if self.head_dim < _TURNED:
            raise ValueError(f"rotary embeddings turn {_TURNED} numbers of a head, which has {self.head_dim}")
        self.widths = [each * self.head_dim for each in (self.heads, sizes["n_kv_heads"], sizes["n_kv_heads"])]
        self.qkv, self.proj = nn.Linear(d, sum(self.widths)), nn.Linear(d, d)
        self.tau = Moondream3Tau(d, self.heads)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        made = self.qkv(x)
        start = 0 if cache is None else cache.get_seq_length(self.layer)
        at = torch.arange(start, start + x.shape[1])
        scales = self.tau(made, at)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in made.split(self.widths, -1))
        q, v = (each * scale.transpose(1, 2)[..., None] for each, scale in zip((q, v), scales, strict=True))
        q, k = (turn(each, at) for each in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        out: torch.Tensor = self.proj(attend(q, k, v))
        return out


def turn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings of the first numbers of each head, halves apart."""
    first, second, rest = x.split([_TURNED // 2, _TURNED // 2, x.shape[-1] - _TURNED], -1)
    angle = at[:, None] * torch.ones(_TURNED // 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class Moondream3Experts(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/moondream3.py, Moondream3TextMoE; named as the weights it loads."""

    def __init__(self, d: int, sizes: Sizes) -> None:
        super().__init__()
        experts, ff, self.top_k = sizes["n_experts"], sizes["expert_inner_dim"], sizes["n_experts_per_tok"]
        self.router = nn.Linear(d, experts)
        self.fc1, self.fc2 = ExpertLinear(experts, d, 2 * ff), ExpertLinear(experts, ff, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        scores, chosen = self.router(flat).topk(self.top_k, -1)
        weights = scores.softmax(-1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            gate, opened = self.fc1(flat[rows], number).chunk(2, -1)
            inner = nn.functional.gelu(gate) * (opened + 1)
            out = out.index_add(0, rows, self.fc2(inner, number) * weights[rows, place, None])
        return out.view_as(x)


class Mlp(nn.Module):
    """Two products."""

    def __init__(self, width: int, ff: int, out: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, ff), nn.Linear(ff, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


class Moondream3Layer(GradientCheckpointingLayer):
    """The same file's Moondream3DecoderLayer: attention and MLP read one norm."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        d, moe = sizes["dim"], {**_MOE, **sizes["moe"]}
        self.ln, self.attn = nn.LayerNorm(d), Moondream3Attention(sizes, layer)
        self.mlp: nn.Module = Moondream3Experts(d, moe) if layer >= moe["start_layer"] else Mlp(d, sizes["ff_dim"], d)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        read = self.ln(x)
        made: torch.Tensor = x + self.attn(read, cache) + self.mlp(read)
        return made


class Moondream3Vision(nn.Module):
    """The same file's Moondream3VisionEncoder and Moondream3VisionProjection; named as the weights it loads."""

    def __init__(self, sizes: Sizes, d: int) -> None:
        super().__init__()
        width, self.patch = sizes["enc_dim"], sizes["enc_patch_size"]
        self.side, self.pooled = sizes["crop_size"] // self.patch, sizes["enc_n_layers"]
        self.margin = sizes["overlap_margin"]
        if 2 * self.margin >= self.side:
            raise ValueError(f"margins of {self.margin} patches leave nothing of a crop of {self.side}")
        self.patch_emb = nn.Linear(3 * self.patch**2, width)
        self.pos_emb = nn.Parameter(torch.ones(1, self.side**2, width))
        self.blocks = nn.ModuleList(
            Block(Names(("ln1", "ln2")), width, sizes["enc_ff_dim"], sizes["enc_n_heads"])
            for _ in range(sizes["enc_n_layers"])
        )
        self.post_ln = nn.LayerNorm(width)
        self.proj_mlp = Mlp(2 * width, sizes["proj_inner_dim"], d)

    def forward(self, pixels: torch.Tensor, tilings: torch.Tensor) -> torch.Tensor:
        """Crops of all images; `tilings`: rows and columns of each image's crops, behind its whole."""
        x = pixels.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        x = self.patch_emb(x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        x = self.post_ln(x)
        made, first = [], 0
        for rows, columns in tilings.tolist():
            crops = x[first + 1 : first + 1 + rows * columns].unflatten(1, (self.side, self.side))
            joined = self.join(crops.unflatten(0, (rows, columns))).permute(2, 0, 1)
            joined = nn.functional.adaptive_avg_pool2d(joined, self.pooled).flatten(1).transpose(0, 1)
            made.append(torch.cat([x[first], joined], -1))
            first += 1 + rows * columns
        out: torch.Tensor = self.proj_mlp(torch.stack(made))
        return out

    def join(self, crops: torch.Tensor) -> torch.Tensor:
        """Crops (rows, columns, side, side, width) side by side, without their inner margins."""
        lines = [torch.cat([self.trim(each, i, len(line), 1) for i, each in enumerate(line)], 1) for line in crops]
        return torch.cat([self.trim(each, i, len(lines), 0) for i, each in enumerate(lines)], 0)

    def trim(self, crop: torch.Tensor, place: int, count: int, axis: int) -> torch.Tensor:
        start = self.margin if place else 0
        end = self.side - (self.margin if place < count - 1 else 0)
        return crop.narrow(axis, start, end - start)


class Moondream3ForCausalLM(Sees, TextModel):
    """vllm-project/vllm: vllm/model_executor/models/moondream3.py; named as the weights it loads."""

    image_token = "image_token_id"

    def __init__(self, config: Any) -> None:
        super(TextModel, self).__init__(config)
        keys = config.config
        sizes = {**_TEXT, **keys.get("text", {})}
        d, words = sizes["dim"], sizes["vocab_size"]
        self.model = nn.Module()
        text = self.model.text = nn.Module()
        text.wte = nn.Embedding(words, d)
        text.blocks = nn.ModuleList(Moondream3Layer(sizes, i) for i in range(sizes["n_layers"]))
        text.post_ln, text.lm_head = nn.LayerNorm(d), nn.Linear(d, words)
        self.model.vision = Moondream3Vision({**_VISION, **keys.get("vision", {})}, d)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.text.wte

    def get_output_embeddings(self) -> Any:
        return self.model.text.lm_head

    @property
    def lm_head(self) -> Any:
        return self.model.text.lm_head

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer in self.model.text.blocks:
            x = layer(x, cache)
        out: torch.Tensor = self.model.text.post_ln(x)
        return out

    def forward(
        self, input_ids: torch.Tensor, pixel_values: Any = None, tilings: Any = None, inputs_embeds: Any = None,
        use_cache: bool | None = None, **inputs: Any,
    ) -> Any:  # fmt: skip
        own = {} if pixel_values is None else {"pixel_values": pixel_values, "tilings": tilings}
        return super().forward(use_cache=use_cache, **inputs, **self.embed(input_ids, own, inputs_embeds))

    def see(self, pixel_values: torch.Tensor, tilings: torch.Tensor) -> torch.Tensor:
        return self.model.vision(pixel_values, tilings)
