"""Tiny torch drafts after the code of EAGLE, EAGLE-3, Medusa and DFlash; tests hold the aliases' specs to them."""

from __future__ import annotations

import torch
from foreign import LAYOUTS, Attend, Json, Layer, Norm, Sizes, put
from torch import nn

NAMES = LAYOUTS["baichuan"]._replace(
    projections={"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"}
)


class Eagle(nn.Module):
    """Embedding and target's hidden state side by side, one linear layer, layers of Llama, the target's head."""

    def __init__(self, config: Json) -> None:
        super().__init__()
        sizes = Sizes.read(config)
        put(self, "model.embed_tokens", nn.Embedding(sizes.vocab, sizes.d))
        put(self, "model.fc", nn.Linear(2 * sizes.d, sizes.d, bias=config.get("bias", True)))
        layers = put(self, "model.layers", nn.ModuleList(Layer(NAMES, sizes) for _ in range(sizes.layers)))
        layers[0].input_layernorm = nn.Identity()  # type: ignore[index]
        self.lm_head = nn.Linear(sizes.d, sizes.vocab, bias=False)
        self.width = sizes.d

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        body = self.model
        x = body.fc(torch.cat([body.embed_tokens(ids), torch.ones(*ids.shape, self.width)], -1))
        for layer in body.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


class WideLayer(Layer):
    """EAGLE-3's first layer: its attention reads the embedding and the hidden state, each after a norm of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(NAMES, sizes)
        self.hidden_norm = Norm(sizes.d)
        for path, makes in NAMES.projections.items():
            put(self, path, nn.Linear(2 * sizes.d, self.widths[makes], bias=False))

    def see(self, embedded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        q, k, v = (each.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2) for each in self.project(read))
        x = x + self.self_attn.o_proj(self.self_attn(q, k, v))
        read = self.post_attention_layernorm(x)
        mlp = self.mlp
        made: torch.Tensor = x + mlp.down_proj(nn.functional.silu(mlp.gate_proj(read)) * mlp.up_proj(read))
        return made


class Eagle3(nn.Module):
    """Three hidden states of the target, one linear layer, a wide layer, and a head over the draft's vocabulary."""

    def __init__(self, config: Json) -> None:
        super().__init__()
        sizes = Sizes.read(config)
        self.target = config.get("target_hidden_size", sizes.d)
        put(self, "model.embed_tokens", nn.Embedding(sizes.vocab, sizes.d))
        put(self, "model.fc", nn.Linear(3 * self.target, sizes.d, bias=False))
        layers = [WideLayer(sizes), *(Layer(NAMES, sizes) for _ in range(sizes.layers - 1))]
        put(self, "model.layers", nn.ModuleList(layers))
        put(self, "model.norm", Norm(sizes.d))
        self.lm_head = nn.Linear(sizes.d, config.get("drafted", sizes.vocab), bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        body = self.model
        x = body.layers[0].see(body.embed_tokens(ids), body.fc(torch.ones(*ids.shape, 3 * self.target)))
        for layer in body.layers[1:]:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(body.norm(x))
        return logits


class Medusa(nn.Module):
    """Some residual layers and a head for each position ahead, all on the target's last hidden states."""

    def __init__(self, config: Json) -> None:
        super().__init__()
        self.width, many = config["hidden_size"], config["num_hidden_layers"]
        self.blocks, self.lm_heads = nn.ModuleList(), nn.ModuleList()
        for _ in range(many):
            block = nn.Module()
            block.layers = nn.ModuleList(
                nn.Linear(self.width, self.width, bias=config.get("medusa_fc_bias", True))
                for _ in range(config["depth"])
            )
            self.blocks.append(block)
            self.lm_heads.append(nn.Linear(self.width, config["vocab_size"], bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = []
        for block, head in zip(self.blocks, self.lm_heads, strict=True):
            x = torch.ones(*ids.shape, self.width)
            for layer in block.layers:  # type: ignore[union-attr]
                x = x + nn.functional.silu(layer(x))
            made.append(head(x))
        return torch.stack(made)


class BlockLayer(nn.Module):
    """DFlash's layer: a block's queries see the block both ways, and keys and values made of the text's features."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.sizes = sizes
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.input_layernorm, self.post_attention_layernorm = Norm(sizes.d), Norm(sizes.d)
        self.self_attn = Attend()
        for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            put(self, f"self_attn.{name}", nn.Linear(sizes.d, width, bias=bias))
        put(self, "self_attn.o_proj", nn.Linear(q, sizes.d, bias=bias))
        put(self, "self_attn.q_norm", Norm(sizes.head_dim))
        put(self, "self_attn.k_norm", Norm(sizes.head_dim))
        for name in ("gate_proj", "up_proj"):
            put(self, f"mlp.{name}", nn.Linear(sizes.d, sizes.ff, bias=False))
        put(self, "mlp.down_proj", nn.Linear(sizes.ff, sizes.d, bias=False))

    def forward(self, x: torch.Tensor, features: torch.Tensor, cache: list[torch.Tensor] | None) -> torch.Tensor:
        """`cache` holds the keys and values of the text, not those of blocks."""
        at, mlp = self.self_attn, self.mlp
        read = self.input_layernorm(x)

        def split(made: torch.Tensor) -> torch.Tensor:
            return made.unflatten(-1, (-1, self.sizes.head_dim))

        q = at.q_norm(split(at.q_proj(read)))
        k = at.k_norm(split(torch.cat([at.k_proj(features), at.k_proj(read)], 1)))
        v = split(torch.cat([at.v_proj(features), at.v_proj(read)], 1))
        if cache:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        if cache is not None:
            cache[:] = k[:, : -x.shape[1]], v[:, : -x.shape[1]]
        x = x + at.o_proj(at(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))
        read = self.post_attention_layernorm(x)
        made: torch.Tensor = x + mlp.down_proj(nn.functional.silu(mlp.gate_proj(read)) * mlp.up_proj(read))
        return made


class TargetHead(nn.Module):
    """The target's head: no parameter of the draft's."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.ones(width, vocab))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.matrix)


class DFlash(nn.Module):
    """Features of the target through one linear layer and a norm, layers over one block, the target's head."""

    def __init__(self, config: Json) -> None:
        super().__init__()
        sizes = Sizes.read(config)
        self.block, self.width = config["block"], sizes.d
        self.read = config["features"] * config.get("target_hidden_size", sizes.d)
        self.fc = nn.Linear(self.read, sizes.d, bias=False)
        self.hidden_norm, self.norm = Norm(sizes.d), Norm(sizes.d)
        bias = config.get("attention_bias", False)
        self.layers = nn.ModuleList(BlockLayer(sizes, bias) for _ in range(sizes.layers))
        self.lm_head = TargetHead(sizes.d, sizes.vocab)

    def forward(self, ids: torch.Tensor, caches: list[list[torch.Tensor]] | None = None) -> torch.Tensor:
        """One block behind a text, of which `ids` are the tokens since the last call."""
        features = self.hidden_norm(self.fc(torch.ones(*ids.shape, self.read)))
        x = torch.ones(len(ids), self.block, self.width)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = layer(x, features, cache)
        logits: torch.Tensor = self.lm_head(self.norm(x)[:, 1:])
        return logits


DRAFTS: dict[str, type[nn.Module]] = {
    "eagle": Eagle,
    "eagle3": Eagle3,
    "eagle3_speculator": Eagle3,
    "medusa": Medusa,
    "dflash": DFlash,
}
