"""Tiny torch drafts written after the code of EAGLE, EAGLE-3 and Medusa; tests hold the aliases' specs to them."""

from __future__ import annotations

import torch
from foreign import LAYOUTS, Json, Layer, Norm, Sizes, put
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


DRAFTS: dict[str, type[nn.Module]] = {"eagle": Eagle, "eagle3": Eagle3, "eagle3_speculator": Eagle3, "medusa": Medusa}
