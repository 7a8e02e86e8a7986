"""What the tiny models after published code share: configs, towers' blocks, and images put before a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Json = dict[str, Any]


def make_config(keys: Mapping[str, Any], parent: Any = PretrainedConfig) -> Any:
    """A config object with inner ones; `parent`: transformers' config class whose keys and defaults it has."""
    keys = dict(keys)
    inner = {
        key: _make_inner(value)
        for key, value in keys.items()
        if isinstance(value, dict) and key.endswith(("_config", "_backbone"))
    }
    body = {"model_type": keys.pop("model_type", ""), "sub_configs": {key: type(each) for key, each in inner.items()}}
    config = type("RemoteConfig", (parent,), body)(**{key: keys[key] for key in keys if key not in inner})
    for key, each in inner.items():
        setattr(config, key, each)
    return config


def _make_inner(keys: Mapping[str, Any]) -> Any:
    known = dict(keys)
    if known.get("model_type") in CONFIG_MAPPING:
        return AutoConfig.for_model(known.pop("model_type"), **known)
    return make_config(known)


class Witness:
    """How `verify` makes the config of a class here."""

    config_base: Any = PretrainedConfig  # transformers' config class that the outer one extends

    @classmethod
    def make_config(cls, keys: Mapping[str, Any]) -> Any:
        return make_config(keys, cls.config_base)


def put(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Hang a module at a dotted path, with plain modules in between."""
    *outer, last = path.split(".")
    for part in outer:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
    return module


def put_vector(root: nn.Module, path: str, d: int) -> None:
    """Hang a parameter of d numbers at a dotted path."""
    owner, _, name = path.rpartition(".")
    (put(root, owner, nn.Module()) if owner else root).register_parameter(name, nn.Parameter(torch.ones(d)))


class Norm(nn.Module):
    """A root mean square norm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attend(nn.Module):
    """Scores and values by plain products, every pair of them."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads before positions in, positions before heads out."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return torch.matmul(scores.softmax(-1), v).transpose(-3, -2).flatten(-2)


def run_experts(
    experts: nn.ModuleList, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """What each row's chosen experts make of it, weighted and added up, expert by expert."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        own, place = torch.where(chosen == number)
        if len(own):
            out = out.index_add(0, own, expert(rows[own]) * weights[own, place, None])
    return out


class Names(NamedTuple):
    """What a tower calls the modules of a block, and what they are."""

    norms: tuple[str, str] = ("norm1", "norm2")
    qkv: tuple[str, ...] = ("attn.qkv",)  # one projection, or three
    attention: str = "attn"  # the module that multiplies queries, keys and values; "": the block
    out: str = "attn.proj"
    up: tuple[str, ...] = ("mlp.fc1",)  # two: a gate and what it opens
    down: str = "mlp.fc2"
    bias: bool = True  # of every product
    norm: Any = nn.LayerNorm
    scales: tuple[str, ...] = ()  # a learned scale after each half
    qk_norms: tuple[str, ...] = ()  # norms over the head dim of queries and keys


class Block(GradientCheckpointingLayer):
    """A pre-norm block of a tower; patches of several images stand in one row, and attend within `lengths`."""

    def __init__(self, names: Names, d: int, ff: int, heads: int) -> None:
        super().__init__()
        self.names, self.heads = names, heads
        for path in names.norms:
            put(self, path, names.norm(d))
        if names.attention:
            put(self, names.attention, Attend())
        for path in names.qkv:
            put(self, path, nn.Linear(d, 3 * d // len(names.qkv), bias=names.bias))
        for path in names.qk_norms:
            put(self, path, names.norm(d // heads))
        put(self, names.out, nn.Linear(d, d, bias=names.bias))
        for path in names.up:
            put(self, path, nn.Linear(d, ff, bias=names.bias))
        put(self, names.down, nn.Linear(ff, d, bias=names.bias))
        for path in names.scales:
            put_vector(self, path, d)

    def forward(self, x: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        find, names = self.get_submodule, self.names
        x = x + self._scale(self.attend(find(names.norms[0])(x), lengths), 0)
        return x + self._scale(self.feed(find(names.norms[1])(x)), 1)

    def attend(self, read: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """Attention with its projections."""
        find, names = self.get_submodule, self.names
        made = torch.cat([find(path)(read) for path in names.qkv], -1).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for each in made)
        if names.qk_norms:
            q, k = (find(path)(each) for path, each in zip(names.qk_norms, (q, k), strict=True))
        core = find(names.attention) if names.attention else attend
        if lengths is None:
            attended = core(q, k, v)
        else:
            pieces = (each.split(list(lengths), -2) for each in (q, k, v))
            attended = torch.cat([core(*each) for each in zip(*pieces, strict=True)], -2)
        out: torch.Tensor = find(names.out)(attended)
        return out

    def feed(self, read: torch.Tensor) -> torch.Tensor:
        """The MLP."""
        up = [self.get_submodule(path)(read) for path in self.names.up]
        inner = nn.functional.silu(up[0]) * up[1] if len(up) > 1 else nn.functional.gelu(up[0])
        out: torch.Tensor = self.get_submodule(self.names.down)(inner)
        return out

    def _scale(self, x: torch.Tensor, half: int) -> torch.Tensor:
        return x * self.get_parameter(self.names.scales[half]) if self.names.scales else x


class PostBlock(Block):
    """The same with its norms behind attention and MLP."""

    def forward(self, x: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        find, names = self.get_submodule, self.names
        x = x + find(names.norms[0])(self.attend(x, lengths))
        made: torch.Tensor = x + find(names.norms[1])(self.feed(x))
        return made


class Sees(Witness):
    """A causal language model with images before it: features take the places of the image token."""

    image_token = "image_token_id"

    def see(self, **inputs: Any) -> torch.Tensor:
        """Features of all images, one row per place in the text."""
        raise NotImplementedError

    def embed(self, input_ids: torch.Tensor, inputs: Json, embeds: Any = None) -> Json:
        """What the language model reads: embeddings with the images' features in them."""
        if embeds is None:
            embeds = self.get_input_embeddings()(input_ids)
        if inputs.get("pixel_values") is not None:
            features = self.see(**inputs)
            if features.shape[-1] != embeds.shape[-1]:
                raise ValueError(f"features of {features.shape[-1]} numbers for words of {embeds.shape[-1]}")
            token = getattr(self.config, self.image_token)
            embeds = embeds.masked_scatter((input_ids == token).unsqueeze(-1), features.reshape(-1, embeds.shape[-1]))
        return {"inputs_embeds": embeds}


class Flat(Sees):
    """The same before one of transformers' classes, whose config is the outer one."""

    tensors: tuple[str, ...] = ("pixel_values", "image_grid_thw")  # what the tower takes

    def forward(self, input_ids: torch.Tensor, inputs_embeds: Any = None, **inputs: Any) -> Any:
        own = {key: inputs.pop(key, None) for key in self.tensors}
        return super().forward(**inputs, **self.embed(input_ids, own, inputs_embeds))


class RemoteModel(PreTrainedModel, GenerationMixin):
    """A published model that wraps transformers' language model as `language_model`."""

    config_class = PretrainedConfig
    supports_gradient_checkpointing = True
    language_at = "language_model"  # where the language model hangs
    text = "text_config"  # and its config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.build(config)
        self.hang(self.make_text(getattr(config, self.text)))
        self.post_init()

    def make_text(self, config: Any) -> Any:
        """The language model."""
        return AutoModelForCausalLM.from_config(config)

    def hang(self, text: Any) -> None:
        """The language model's place."""
        put(self, self.language_at, text)

    def build(self, config: Any) -> None:
        """The modules beside the language model."""

    def _init_weights(self, module: nn.Module) -> None:
        """Numbers do not matter here."""

    def get_input_embeddings(self) -> Any:
        return self.get_submodule(self.language_at).get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.get_submodule(self.language_at).get_output_embeddings()


def list_frames(grids: torch.Tensor) -> list[int]:
    """Patches of each frame of each image, (t, h, w) each."""
    frames: list[int] = (grids[:, 1] * grids[:, 2]).repeat_interleave(grids[:, 0]).tolist()
    return frames


SIGLIP = Names(
    ("layer_norm1", "layer_norm2"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn",
    "self_attn.out_proj",
)


class SiglipGrid(nn.Module):
    """SigLIP's layers over images of any size, as published code has them."""

    def __init__(self, config: Any, packed: int = 0, positions: int | None = None) -> None:
        super().__init__()
        d, patch = config.hidden_size, config.patch_size
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Conv2d(config.num_channels, d, patch, patch)
        count = (config.image_size // patch) ** 2 if positions is None else positions
        self.embeddings.position_embedding = nn.Embedding(count, d)
        if packed:
            self.embeddings.packing_position_embedding = nn.Embedding(packed, d)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(
            Block(SIGLIP, d, config.intermediate_size, config.num_attention_heads)
            for _ in range(config.num_hidden_layers)
        )
        self.post_layernorm = nn.LayerNorm(d)

    def forward(self, pixels: torch.Tensor, lengths: Sequence[Sequence[int]], normed: bool = True) -> torch.Tensor:
        """Patches (n, channels, side, side); `lengths`: of each layer's attention calls."""
        x = self.embeddings.patch_embedding(pixels).flatten(1)
        x = x + self.embeddings.position_embedding.weight.mean(0)  # resized to the image: no product
        for layer, own in zip(self.encoder.layers, lengths, strict=True):
            x = layer(x, own)
        return self.post_layernorm(x) if normed else x


class VisualTable(nn.Embedding):
    """vllm-project/vllm: vllm/model_executor/models/ovis.py, VisualEmbedding: mixtures over a table of words."""

    def forward(self, shares: torch.Tensor) -> torch.Tensor:
        return torch.matmul(shares, self.weight)


_TEXT = ("past_key_values", "use_cache", "position_ids")


class Chat(Sees, RemoteModel):
    """Images before a language model of transformers'."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, inputs_embeds: Any = None, **inputs: Any
    ) -> Any:
        own = {key: inputs.pop(key) for key in (*_TEXT, "labels", "logits_to_keep") if key in inputs}
        own |= self.embed(input_ids, inputs, inputs_embeds)
        return self.get_submodule(self.language_at)(attention_mask=attention_mask, **own)


class SplitChat(Sees, RemoteModel):
    """The same with the language model's head at the top, beside its body."""

    language_at = "model.language_model"

    def hang(self, text: Any) -> None:
        put(self, self.language_at, text.model)
        self.lm_head = text.lm_head

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        labels: Any = None,
        logits_to_keep: int = 0,
        **inputs: Any,
    ) -> Any:
        own = {key: inputs.pop(key) for key in _TEXT if key in inputs}
        body = self.get_submodule(self.language_at)
        out = body(attention_mask=attention_mask, **own, **self.embed(input_ids, inputs, inputs_embeds))
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)
