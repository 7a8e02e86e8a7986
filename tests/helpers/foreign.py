"""Tiny torch models written after published code that transformers does not hold; tests hold aliases' specs to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lab.witnesses.base import Attend, Norm, put

Json = dict[str, Any]


class Layout(NamedTuple):
    """What a family calls the modules of a decoder, and which have biases; the alias's `source` names the code."""

    embed: str
    layers: str
    final: str
    head: str
    norm: str
    # One projection ("qkv"), queries beside keys with values ("q", "kv"), or three: name -> what it makes.
    projections: dict[str, str]
    attention: str
    out: str
    second_norm: str
    gates: tuple[str, ...]  # one: gate and up side by side
    down: str
    biased: tuple[str, ...] = ()


LAYOUTS = {
    "internlm2": Layout(
        "model.tok_embeddings", "model.layers", "model.norm", "output", "attention_norm",
        {"attention.wqkv": "qkv"}, "attention", "attention.wo", "ffn_norm", ("feed_forward.w1", "feed_forward.w3"),
        "feed_forward.w2",
    ),
    "qwen": Layout(
        "transformer.wte", "transformer.h", "transformer.ln_f", "lm_head", "ln_1", {"attn.c_attn": "qkv"}, "attn",
        "attn.c_proj", "ln_2", ("mlp.w1", "mlp.w2"), "mlp.c_proj", ("attn.c_attn",),
    ),
    "chatglm": Layout(
        "transformer.embedding.word_embeddings", "transformer.encoder.layers", "transformer.encoder.final_layernorm",
        "transformer.output_layer", "input_layernorm", {"self_attention.query_key_value": "qkv"},
        "self_attention.core_attention", "self_attention.dense", "post_attention_layernorm", ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h", ("self_attention.query_key_value",),
    ),
    "baichuan": Layout(
        "model.embed_tokens", "model.layers", "model.norm", "lm_head", "input_layernorm", {"self_attn.W_pack": "qkv"},
        "self_attn", "self_attn.o_proj", "post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj",
    ),
    "telechat": Layout(
        "transformer.word_embeddings", "transformer.h", "transformer.ln_f", "lm_head", "input_layernorm",
        {"self_attention.query": "q", "self_attention.key_value": "kv"}, "self_attention", "self_attention.dense",
        "post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj",
        ("self_attention.dense", "mlp.down_proj"),
    ),
    "exaone": Layout(
        "transformer.wte", "transformer.h", "transformer.ln_f", "lm_head", "ln_1",
        {"attn.attention.q_proj": "q", "attn.attention.k_proj": "k", "attn.attention.v_proj": "v"}, "attn.attention",
        "attn.attention.out_proj", "ln_2", ("mlp.c_fc_0", "mlp.c_fc_1"), "mlp.c_proj",
    ),
}  # fmt: skip
LAYOUTS["llada"] = Layout(
    "model.transformer.wte", "model.transformer.blocks", "model.transformer.ln_f", "model.transformer.ff_out",
    "attn_norm", {"q_proj": "q", "k_proj": "k", "v_proj": "v"}, "attention", "attn_out", "ff_norm",
    ("ff_proj", "up_proj"), "ff_out",
)  # fmt: skip
LAYOUTS["telechat2"] = LAYOUTS["telechat"]
LAYOUTS["bailing_moe_linear"] = LAYOUTS["bailing_hybrid"] = LAYOUTS["baichuan"]._replace(
    embed="model.word_embeddings",
    projections={"attention.query_key_value": "qkv"},
    attention="attention",
    out="attention.dense",
)
LAYOUTS["llama"] = LAYOUTS["baichuan"]._replace(
    projections={"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"}
)
LAYOUTS["yuan"] = LAYOUTS["llama"]
LAYOUTS["qwen2"] = LAYOUTS["llama"]._replace(biased=tuple(LAYOUTS["llama"].projections))


class Sizes(NamedTuple):
    """The sizes of a tiny decoder, read from the mapped config."""

    d: int
    ff: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @classmethod
    def read(cls, config: Json) -> Sizes:
        d, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("linear_head_dim", config.get("head_dim", d // heads))
        return cls(
            d,
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads", heads),
            head_dim,
            config["vocab_size"],
            config.get("tie_word_embeddings", False),
        )


class Layer(nn.Module):
    """A pre-norm layer under a family's names."""

    def __init__(self, names: Layout, sizes: Sizes) -> None:
        super().__init__()
        self.names, self.sizes = names, sizes
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.widths = {"q": q, "k": kv, "v": kv}

        def linear(path: str, width: int, out: int) -> None:
            put(self, path, nn.Linear(width, out, bias=path in names.biased))

        put(self, names.norm, Norm(sizes.d))
        put(self, names.attention, Attend())
        for path, makes in names.projections.items():
            linear(path, sizes.d, sum(self.widths[each] for each in makes))
        linear(names.out, q, sizes.d)
        put(self, names.second_norm, Norm(sizes.d))
        for path in names.gates:
            linear(path, sizes.d, sizes.ff * 2 // len(names.gates))
        linear(names.down, sizes.ff, sizes.d)

    def project(self, read: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values."""
        return [
            piece
            for path, makes in self.names.projections.items()
            for piece in self.get_submodule(path)(read).split([self.widths[each] for each in makes], -1)
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        find, names, sizes = self.get_submodule, self.names, self.sizes
        read = find(names.norm)(x)
        q, k, v = (each.unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2) for each in self.project(read))
        x = x + find(names.out)(find(names.attention)(q, k, v))
        read = find(names.second_norm)(x)
        gates = [piece for path in names.gates for piece in find(path)(read).split(sizes.ff, -1)]
        return x + find(names.down)(nn.functional.silu(gates[0]) * gates[1])


class Decoder(nn.Module):
    """A causal language model under a family's names."""

    def __init__(self, names: Layout, sizes: Sizes, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.names = names
        put(self, names.embed, nn.Embedding(sizes.vocab, sizes.d))
        put(self, names.layers, nn.ModuleList(layer(names, sizes) for _ in range(sizes.layers)))
        put(self, names.final, Norm(sizes.d))
        head = nn.Linear(sizes.d, sizes.vocab, bias=False)
        if sizes.tied:
            head.weight = self.get_submodule(names.embed).weight
        put(self, names.head, head)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.get_submodule(self.names.embed)(ids)
        return embedded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.get_submodule(self.names.layers):  # type: ignore[attr-defined]
            x = layer(x)
        logits: torch.Tensor = self.get_submodule(self.names.head)(self.get_submodule(self.names.final)(x))
        return logits


def make_decoder(name: str, config: Json) -> Decoder:
    """The tiny model of an alias, after its mapped config."""
    decoder = Decoder(LAYOUTS[name], Sizes.read(config), YuanLayer if name == "yuan" else Layer)
    if "layer_group_size" in config:
        layers = decoder.get_submodule(LAYOUTS[name].layers)
        for i in range(len(layers)):  # type: ignore[arg-type]
            if (i + 1) % config["layer_group_size"]:
                layers[i] = LightningLayer(Sizes.read(config), config["use_qk_norm"])  # type: ignore[index]
    return decoder


# --- Ling's lightning attention --------------------------------------------------------------------------------------
class Lightning(nn.Module):
    """bailing_linear_attn.py, and fla's chunk_simple_gla: scores within a chunk, a state from chunk to chunk."""

    def __init__(self, sizes: Sizes, norms: bool) -> None:
        super().__init__()
        inner = sizes.heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.query_key_value = nn.Linear(sizes.d, 3 * inner, bias=False)
        if norms:
            self.query_layernorm, self.key_layernorm = Norm(sizes.head_dim), Norm(sizes.head_dim)
        self.g_proj = nn.Linear(sizes.d, inner, bias=False)
        self.g_norm = Norm(inner)
        self.dense = nn.Linear(inner, sizes.d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.query_key_value(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in made)
        if hasattr(self, "query_layernorm"):
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        state = torch.zeros(*q.shape[:2], self.head_dim, self.head_dim)
        pieces = []
        for q_chunk, k_chunk, v_chunk in zip(q.split(64, 2), k.split(64, 2), v.split(64, 2), strict=True):
            scores = torch.matmul(q_chunk, k_chunk.transpose(-1, -2)) * 0.5
            pieces.append(torch.matmul(scores, v_chunk) + torch.matmul(q_chunk * 0.5, state))
            state = state * 0.5 + torch.matmul((k_chunk * 0.5).transpose(-1, -2), v_chunk)
        attended = self.g_norm(torch.cat(pieces, 2).transpose(1, 2).flatten(2))
        out: torch.Tensor = self.dense(attended * torch.sigmoid(self.g_proj(x)))
        return out


class LightningLayer(nn.Module):
    """bailing_moe_linear.py: a dense layer with lightning attention."""

    def __init__(self, sizes: Sizes, norms: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(sizes.d), Norm(sizes.d)
        self.attention = Lightning(sizes, norms)
        for path in ("mlp.gate_proj", "mlp.up_proj"):
            put(self, path, nn.Linear(sizes.d, sizes.ff, bias=False))
        put(self, "mlp.down_proj", nn.Linear(sizes.ff, sizes.d, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x))
        read = self.post_attention_layernorm(x)
        made: torch.Tensor = x + self.mlp.down_proj(
            nn.functional.silu(self.mlp.gate_proj(read)) * self.mlp.up_proj(read)
        )
        return made


# --- Yuan 2 ----------------------------------------------------------------------------------------------------------
class Filtering(nn.Module):
    """yuan_hf_model.py, LocalizedFiltering: two convolutions over two positions each, padded in front."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d, d // 2, (2, 1), padding=(1, 0))
        self.conv2 = nn.Conv2d(d // 2, d, (2, 1), padding=(1, 0))
        self.output_layernorm = Norm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x.transpose(1, 2).unsqueeze(-1)
        for conv in (self.conv1, self.conv2):
            made = conv(made)[:, :, : x.shape[1]]
        filtered: torch.Tensor = self.output_layernorm(made.squeeze(-1).transpose(1, 2) + x)
        return filtered


class YuanLayer(Layer):
    """yuan_hf_model.py: queries and keys read the filtered states, values the plain ones."""

    def __init__(self, names: Layout, sizes: Sizes) -> None:
        super().__init__(names, sizes)
        put(self, "self_attn.lf_gate", Filtering(sizes.d))

    def project(self, read: torch.Tensor) -> list[torch.Tensor]:
        find = self.get_submodule
        value = find("self_attn.v_proj")(read)
        read = find("self_attn.lf_gate")(read)
        return [find("self_attn.q_proj")(read), find("self_attn.k_proj")(read), value]


# --- GLM-4V ----------------------------------------------------------------------------------------------------------
class EvaLayer(nn.Module):
    """visual.py, TransformerLayer: norms behind attention and MLP."""

    def __init__(self, tower: Json) -> None:
        super().__init__()
        d, ff = tower["hidden_size"], tower["intermediate_size"]
        self.attention = EvaAttention(d, tower["num_heads"])
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.input_layernorm(self.attention(x))
        made: torch.Tensor = x + self.post_attention_layernorm(self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(x))))
        return made


class EvaAttention(nn.Module):
    """visual.py, Attention."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.query_key_value(x).chunk(3, -1)
        )
        weights = torch.matmul(q, k.transpose(-1, -2)).softmax(-1)
        out: torch.Tensor = self.dense(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return out


class Glm4v(Decoder):
    """visual.py, EVA2CLIPModel, in front of modeling_chatglm.py's decoder."""

    def __init__(self, config: Json) -> None:
        sizes, tower = Sizes.read(config), config["tower"]
        super().__init__(LAYOUTS["chatglm"], sizes)
        width, patch = tower["hidden_size"], tower["patch_size"]
        vision = self.transformer.vision = nn.Module()
        vision.patch_embedding = nn.Module()
        vision.patch_embedding.proj = nn.Conv2d(3, width, patch, patch)
        vision.patch_embedding.cls_embedding = nn.Parameter(torch.ones(1, width))
        vision.patch_embedding.position_embedding = nn.Embedding(tower["num_positions"], width)
        vision.transformer = nn.Module()
        vision.transformer.layers = nn.ModuleList(EvaLayer(tower) for _ in range(tower["num_hidden_layers"]))
        vision.conv = nn.Conv2d(width, sizes.d, 2, 2)
        project = vision.linear_proj = nn.Module()
        project.linear_proj, project.norm1 = nn.Linear(sizes.d, sizes.d, bias=False), nn.LayerNorm(sizes.d)
        for name in ("gate_proj", "dense_h_to_4h"):
            project.add_module(name, nn.Linear(sizes.d, sizes.ff, bias=False))
        project.dense_4h_to_h = nn.Linear(sizes.ff, sizes.d, bias=False)
        vision.boi, vision.eoi = (nn.Parameter(torch.ones(1, 1, sizes.d)) for _ in range(2))

    def see(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Logits of a text that begins with an image."""
        vision = self.transformer.vision
        x = vision.patch_embedding.proj(pixels)
        side = x.shape[-1]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([vision.patch_embedding.cls_embedding.expand(len(x), 1, -1), x], 1)
        x = x + vision.patch_embedding.position_embedding.weight.unsqueeze(0)
        for layer in vision.transformer.layers:
            x = layer(x)
        x = vision.conv(x[:, 1:].transpose(1, 2).unflatten(2, (side, side))).flatten(2).transpose(1, 2)
        project = vision.linear_proj
        x = nn.functional.gelu(project.norm1(project.linear_proj(x)))
        x = project.dense_4h_to_h(nn.functional.silu(project.gate_proj(x)) * project.dense_h_to_4h(x))
        ends = (each.expand(len(x), -1, -1) for each in (vision.boi, vision.eoi))
        first, last = ends
        x = torch.cat([first, x, last], 1)
        return self(torch.cat([x, self.embed(ids)[:, x.shape[1] :]], 1))


# --- Qwen-VL ---------------------------------------------------------------------------------------------------------
class ClipBlock(nn.Module):
    """visual.py, VisualAttentionBlock."""

    def __init__(self, d: int, ff: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = ClipAttention(d, heads)
        self.mlp = nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        made: torch.Tensor = x + self.mlp.c_proj(nn.functional.gelu(self.mlp.c_fc(self.ln_2(x))))
        return made


class ClipAttention(nn.Module):
    """visual.py, VisualAttention."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.in_proj(x).chunk(3, -1))
        weights = torch.matmul(q, k.transpose(-1, -2)).softmax(-1)
        out: torch.Tensor = self.out_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return out


class Pool(nn.Module):
    """visual.py, Resampler: torch's own attention of learned queries."""

    def __init__(self, queries: int, d: int, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(queries, d))
        self.pos_embed = nn.Parameter(torch.ones(queries, d), requires_grad=False)
        self.kv_proj = nn.Linear(width, d, bias=False)
        self.attn = nn.MultiheadAttention(d, 4)
        self.ln_q, self.ln_kv = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln_kv(self.kv_proj(x)).transpose(0, 1)
        q = (self.ln_q(self.query) + self.pos_embed).unsqueeze(1).expand(-1, x.shape[1], -1)
        out: torch.Tensor = self.attn(q, x + 1.0, x)[0].transpose(0, 1)
        return out


class VisionTransformer(nn.Module):
    """visual.py, VisionTransformer."""

    def __init__(self, tower: Json) -> None:
        super().__init__()
        width, d = tower["width"], tower["output_dim"]
        self.conv1 = nn.Conv2d(3, width, tower["patch_size"], tower["patch_size"], bias=False)
        self.positional_embedding = nn.Parameter(torch.ones(256, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(d)
        self.transformer = nn.Module()
        inner = int(width * tower["mlp_ratio"])
        self.transformer.resblocks = nn.ModuleList(
            ClipBlock(width, inner, tower["heads"]) for _ in range(tower["layers"])
        )
        self.attn_pool = Pool(tower["n_queries"], d, width)
        self.proj = nn.Parameter(torch.ones(d, d))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = self.ln_pre(x + self.positional_embedding[: x.shape[1]])
        for block in self.transformer.resblocks:
            x = block(x)
        return torch.matmul(self.ln_post(self.attn_pool(x)), self.proj)


class QwenVL(Decoder):
    """modeling_qwen.py with visual.py in front."""

    def __init__(self, config: Json) -> None:
        super().__init__(LAYOUTS["qwen"], Sizes.read(config))
        self.transformer.visual = VisionTransformer(config["tower"])

    def see(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Logits of a text that begins with an image."""
        x = self.transformer.visual(pixels)
        return self(torch.cat([x, self.embed(ids)[:, x.shape[1] :]], 1))


# --- InternVL chat ---------------------------------------------------------------------------------------------------
class VisionAttention(nn.Module):
    """modeling_intern_vit.py: one projection, norms over all heads of queries and keys if the config asks for them."""

    def __init__(self, config: Json) -> None:
        super().__init__()
        d, heads = config["hidden_size"], config["num_attention_heads"]
        self.head_dim = d // heads
        inner = (heads + config.get("dummy_heads", 0)) * self.head_dim
        self.qkv = nn.Linear(d, 3 * inner, bias=config["attention_bias"])
        self.proj = nn.Linear(inner, d)
        if config["use_qk_norm"]:
            self.q_norm, self.k_norm = Norm(inner), Norm(inner)
        self.core = Attend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        heads = [each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (q, k, v)]
        q, k, v = heads
        scores = torch.matmul(q, k.transpose(-1, -2))
        attended: torch.Tensor = self.proj(torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2))
        return attended


class VisionLayer(nn.Module):
    """modeling_intern_vit.py: a learned scale after each half."""

    def __init__(self, config: Json) -> None:
        super().__init__()
        d = config["hidden_size"]
        norm = nn.LayerNorm if config["norm_type"] == "layer_norm" else Norm
        self.norm1, self.norm2 = norm(d), norm(d)
        self.attn = VisionAttention(config)
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = (
            nn.Linear(d, config["intermediate_size"]),
            nn.Linear(config["intermediate_size"], d),
        )
        self.ls1, self.ls2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x)) * self.ls1
        made: torch.Tensor = x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x)))) * self.ls2
        return made


class ChatModel(nn.Module):
    """modeling_internvl_chat.py: tower, four features side by side, projector, language model."""

    def __init__(self, config: Json, text: str, wide: bool) -> None:
        super().__init__()
        tower = config["vision_config"]
        d, patch = tower["hidden_size"], tower["patch_size"]
        self.side = tower["image_size"] // patch
        self.vision_model = nn.Module()
        embeddings = self.vision_model.embeddings = nn.Module()
        embeddings.patch_embedding = nn.Conv2d(3, d, patch, patch)
        embeddings.class_embedding = nn.Parameter(torch.ones(1, 1, d))
        embeddings.position_embedding = nn.Parameter(torch.ones(1, self.side**2 + 1, d))
        self.vision_model.encoder = nn.Module()
        self.vision_model.encoder.layers = nn.ModuleList(VisionLayer(tower) for _ in range(tower["num_hidden_layers"]))
        sizes = Sizes.read(config["text_config"])._replace(tied=config["tie_word_embeddings"])
        middle = sizes.ff if wide else sizes.d
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(4 * d),
            nn.Linear(4 * d, middle, bias=not wide),
            nn.GELU(),
            nn.Linear(middle, sizes.d, bias=not wide),
        )
        self.language_model = Decoder(LAYOUTS[text], sizes)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        embeddings = self.vision_model.embeddings
        x = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([embeddings.class_embedding.expand(len(x), -1, -1), x], 1) + embeddings.position_embedding
        for layer in self.vision_model.encoder.layers:
            x = layer(x)
        x = x[:, 1:].unflatten(1, (self.side, self.side)).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        features = self.mlp1(x.transpose(2, 3).flatten(3).flatten(1, 2))
        embedded = self.language_model.embed(ids).clone()
        count = features.shape[0] * features.shape[1] // len(ids)
        embedded[:, :count] = features.reshape(len(ids), count, -1)
        logits: torch.Tensor = self.language_model(embedded)
        return logits
