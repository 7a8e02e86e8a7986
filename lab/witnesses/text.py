"""Published language models whose layers transformers does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, DynamicCache, PretrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashForCausalLM
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from lab.witnesses.base import Norm, Witness, attend, put


class Attention(nn.Module):
    """Grouped attention over what the cache holds; one fused projection or three, norms of queries and keys."""

    def __init__(
        self, d: int, heads: int, kv_heads: int, head_dim: int, layer: int, fused: str = "", norms: bool = False,
        window: int | None = None, out: str = "o_proj",
    ) -> None:  # fmt: skip
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary embeddings turn pairs of numbers, not {head_dim}")
        self.window = window  # keys that are left of a cache when one token is decoded
        self.heads, self.kv_heads, self.head_dim, self.layer = heads, kv_heads, head_dim, layer
        self.fused, self.out = fused, out
        q, kv = heads * head_dim, kv_heads * head_dim
        if fused:
            self.add_module(fused, nn.Linear(d, q + 2 * kv, bias=False))
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, width, bias=False) for width in (q, kv, kv))
        self.add_module(out, nn.Linear(q, d, bias=False))
        if norms:
            self.q_norm, self.k_norm = Norm(head_dim), Norm(head_dim)

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, heads side by side."""
        if not self.fused:
            return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        kv = self.kv_heads * self.head_dim
        return list(self.get_submodule(self.fused)(x).split([self.heads * self.head_dim, kv, kv], -1))

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.project(x))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if self.window is not None and q.shape[2] == 1:
            k, v = k[:, :, -self.window :], v[:, :, -self.window :]
        out: torch.Tensor = self.get_submodule(self.out)(attend(q, k, v))
        return out


class GatedMlp(nn.Module):
    """A gate, what it opens, and back."""

    def __init__(self, d: int, ff: int, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> None:
        super().__init__()
        self.names = names
        *up, down = names
        for name in up:
            self.add_module(name, nn.Linear(d, ff * 2 // len(up), bias=False))
        self.add_module(down, nn.Linear(ff, d, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *up, down = (self.get_submodule(name) for name in self.names)
        gate, opened = (each for part in up for each in part(x).chunk(2 // len(up), -1))
        out: torch.Tensor = down(nn.functional.silu(gate) * opened)
        return out


class TextLayer(GradientCheckpointingLayer):
    """Two halves with a norm before each, and perhaps one behind."""

    norms = ("input_layernorm", "post_attention_layernorm")
    behind: tuple[str, ...] = ()
    attention = "self_attn"

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        for name in (*self.norms, *self.behind):
            self.add_module(name, Norm(config.hidden_size))
        self.build(config, layer)

    def build(self, config: Any, layer: int) -> None:
        """Attention and MLP."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        find = self.get_submodule
        made = find(self.attention)(find(self.norms[0])(x), cache)
        x = x + (find(self.behind[0])(made) if self.behind else made)
        made = self.feed(find(self.norms[1])(x))
        return x + (find(self.behind[1])(made) if self.behind else made)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x)
        return out


class TextModel(Witness, PreTrainedModel, GenerationMixin):
    """A causal language model of layers of its own."""

    config_class = PretrainedConfig
    supports_gradient_checkpointing = True
    layer: Any = TextLayer
    layers = "model.layers"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        put(self, self.layers, nn.ModuleList(self.layer(config, i) for i in range(config.num_hidden_layers)))
        self.model.norm = Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if getattr(config, "tie_word_embeddings", False):
            self.lm_head.weight = self.model.embed_tokens.weight
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Numbers do not matter here."""

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def make_cache(self) -> Any:
        """An empty cache."""
        return DynamicCache()

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        """The layers and the last norm."""
        for layer in self.get_submodule(self.layers):
            x = layer(x, cache)
        out: torch.Tensor = self.model.norm(x)
        return out

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.lm_head(x)
        return logits

    def forward(
        self,
        input_ids: Any = None,
        inputs_embeds: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> Any:
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self.make_cache() if use_cache and past_key_values is None else past_key_values
        logits = self.score(self.run(embeds, cache)[:, -logits_to_keep:])
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


# --- Nemotron-NAS (DeciLM) --------------------------------------------------------------------------------------------
class DeciLayer(TextLayer):
    """vllm-project/vllm: vllm/model_executor/models/nemotron_nas.py, DeciLMDecoderLayer: halves may be left out."""

    def __init__(self, config: Any, layer: int) -> None:
        super(TextLayer, self).__init__()
        d, block, heads = config.hidden_size, config.block_configs[layer], config.num_attention_heads
        if not block["attention"]["no_op"]:
            self.input_layernorm = Norm(d)
            kv_heads = heads // block["attention"]["n_heads_in_group"]
            self.self_attn = Attention(d, heads, kv_heads, d // heads, layer)
        if not block["ffn"]["no_op"]:
            self.post_attention_layernorm = Norm(d)
            self.mlp = GatedMlp(d, -(-int(2 * block["ffn"]["ffn_mult"] * d / 3) // 256) * 256)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if hasattr(self, "self_attn"):
            x = x + self.self_attn(self.input_layernorm(x), cache)
        if hasattr(self, "mlp"):
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class DeciLMForCausalLM(TextModel):
    """vllm-project/vllm: vllm/model_executor/models/nemotron_nas.py."""

    layer = DeciLayer


# --- Rnj-1 ------------------------------------------------------------------------------------------------------------
class RnjLayer(TextLayer):
    """vllm-project/vllm: vllm/model_executor/models/rnj1.py: Gemma 3's layer; chunks are a mask."""

    norms = ("input_layernorm", "pre_feedforward_layernorm")
    behind = ("post_attention_layernorm", "post_feedforward_layernorm")

    def build(self, config: Any, layer: int) -> None:
        d, heads = config.hidden_size, config.num_attention_heads
        self.is_chunked = config.layer_types[layer] == "chunked_attention"  # read for each layer, as there
        self.self_attn = Attention(d, heads, config.num_key_value_heads, config.head_dim, layer, norms=True)
        self.mlp = GatedMlp(d, config.intermediate_size)


class Rnj1ForCausalLM(TextModel):
    """vllm-project/vllm: vllm/model_executor/models/rnj1.py."""

    layer = RnjLayer


# --- PLaMo 3 ----------------------------------------------------------------------------------------------------------
class PlamoLayer(TextLayer):
    """vllm-project/vllm: vllm/model_executor/models/plamo3.py, Plamo3DecoderLayer."""

    norms, behind = ("pre_mixer_norm", "pre_mlp_norm"), ("post_mixer_norm", "post_mlp_norm")
    attention = "mixer"

    def build(self, config: Any, layer: int) -> None:
        d, heads = config.hidden_size, config.num_attention_heads
        windows = getattr(config, "interleaved_sliding_window", [None] * config.num_hidden_layers)
        self.mixer = Attention(
            d, heads, config.num_key_value_heads, config.head_dim, layer, "qkv_proj", True, windows[layer]
        )
        self.mlp = GatedMlp(d, config.intermediate_size, ("gate_up_proj", "down_proj"))


class Plamo3ForCausalLM(TextModel):
    """vllm-project/vllm: vllm/model_executor/models/plamo3.py."""

    layer = PlamoLayer
    layers = "model.layers.layers"


# --- Arctic -----------------------------------------------------------------------------------------------------------
class ArcticExperts(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/arctic.py, ArcticMoE."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, self.top_k = config.hidden_size, config.num_experts_per_tok
        self.gate = nn.Linear(d, config.num_local_experts, bias=False)
        self.ws = nn.Parameter(torch.ones(config.num_local_experts, 2 * config.intermediate_size, d))
        self.w2s = nn.Parameter(torch.ones(config.num_local_experts, d, config.intermediate_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            gate, up = nn.functional.linear(flat[rows], self.ws[number]).chunk(2, -1)
            made = nn.functional.linear(nn.functional.silu(gate) * up, self.w2s[number])
            out = out.index_add(0, rows, made * weights[rows, place, None])
        return out.view_as(x)


class ArcticLayer(TextLayer):
    """vllm-project/vllm: vllm/model_executor/models/arctic.py: experts read the layer's input, beside a dense MLP."""

    def build(self, config: Any, layer: int) -> None:
        d, heads = config.hidden_size, config.num_attention_heads
        self.self_attn = Attention(d, heads, config.num_key_value_heads, d // heads, layer)
        sparse = (layer + 1) % config.moe_layer_frequency == 0
        self.residual = config.parallel_attn_mlp_res and sparse
        names = ("w1", "w3", "w2")
        if sparse:
            self.block_sparse_moe: nn.Module = ArcticExperts(config)
        else:
            self.block_sparse_moe = nn.Module()
            self.block_sparse_moe.mlp = GatedMlp(d, config.intermediate_size, names)
        if self.residual:
            self.residual_layernorm, self.residual_mlp = Norm(d), GatedMlp(d, d, names)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        attended = x + self.self_attn(self.input_layernorm(x), cache)
        moe = getattr(self.block_sparse_moe, "mlp", self.block_sparse_moe)
        if not self.residual:
            made: torch.Tensor = attended + moe(self.post_attention_layernorm(attended))
            return made
        dense = self.residual_mlp(self.residual_layernorm(attended))
        return attended + dense + moe(self.post_attention_layernorm(x))


class ArcticForCausalLM(TextModel):
    """vllm-project/vllm: vllm/model_executor/models/arctic.py."""

    layer = ArcticLayer


# --- Step-3 -----------------------------------------------------------------------------------------------------------
class FactorAttention(Attention):
    """vllm-project/vllm: vllm/model_executor/models/step3_text.py: queries through a narrow shared width."""

    def __init__(self, config: Any, layer: int) -> None:
        d, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        super().__init__(d, heads, 1, head_dim, layer)
        self.q_proj = nn.Linear(d, config.share_q_dim, bias=False)
        self.inter_norm = Norm(config.share_q_dim)
        self.wq = nn.Linear(config.share_q_dim, heads * head_dim, bias=False)

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.wq(self.inter_norm(self.q_proj(x))), self.k_proj(x), self.v_proj(x)]


class ExpertLinear(nn.Module):
    """One product of all experts; the weight holds them one behind the other."""

    def __init__(self, experts: int, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, out, width))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[expert])


class StepExperts(nn.Module):
    """vllm-project/vllm: vllm/model_executor/models/step3_text.py, FusedMoEBlock; named as the weights it loads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, ff, experts = config.hidden_size, config.moe_intermediate_size, config.moe_num_experts
        self.top_k = config.moe_top_k
        self.gate = nn.Linear(d, experts, bias=False)
        self.gate_proj, self.up_proj = ExpertLinear(experts, d, ff), ExpertLinear(experts, d, ff)
        self.down_proj = ExpertLinear(experts, ff, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            inner = nn.functional.silu(self.gate_proj(flat[rows], number)) * self.up_proj(flat[rows], number)
            out = out.index_add(0, rows, self.down_proj(inner, number) * weights[rows, place, None])
        return out.view_as(x)


class StepLayer(TextLayer):
    """vllm-project/vllm: vllm/model_executor/models/step3_text.py, Step3TextDecoderLayer."""

    def build(self, config: Any, layer: int) -> None:
        d = config.hidden_size
        self.self_attn = FactorAttention(config, layer)
        if layer in [int(each) for each in config.moe_layers_enum.split(",")]:
            self.moe, self.share_expert = StepExperts(config), GatedMlp(d, config.share_expert_dim)
        else:
            self.mlp = GatedMlp(d, config.intermediate_size)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x) if hasattr(self, "mlp") else self.share_expert(x) + self.moe(x)
        return out


class Step3TextForCausalLM(TextModel):
    """vllm-project/vllm: vllm/model_executor/models/step3_text.py."""

    layer = StepLayer


class Step3p5ForCausalLM(TextModel):
    """vllm-project/vllm: vllm/model_executor/models/step3p5.py: Step-3.7's text model of transformers, with a head."""

    config_base = Step3p7TextConfig

    def __init__(self, config: Any) -> None:
        super(TextModel, self).__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.post_init()

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        out: torch.Tensor = self.model(inputs_embeds=x, past_key_values=cache, use_cache=cache is not None)[0]
        return out

    def make_cache(self) -> Any:
        return DynamicCache(config=self.config)  # sliding layers keep a window


# --- OpenELM ----------------------------------------------------------------------------------------------------------
class OpenELMAttention(Attention):
    """apple/OpenELM: modeling_openelm.py, OpenELMMultiHeadCausalAttention."""

    def __init__(self, config: Any, layer: int) -> None:
        heads, kv_heads = config.num_query_heads[layer], config.num_kv_heads[layer]
        super().__init__(
            config.model_dim,
            heads,
            kv_heads,
            config.head_dim,
            layer,
            "qkv_proj",
            config.normalize_qk_projections,
            out="out_proj",
        )


class OpenELMLayer(GradientCheckpointingLayer):
    """The same file's OpenELMDecoderLayer."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        d, step = config.model_dim, config.ffn_dim_divisor
        want = config.ffn_multipliers[layer] * d
        ff = max(step, int(want + step / 2) // step * step)
        ff += step if ff < 0.9 * want else 0
        self.glu = config.ffn_with_glu
        self.attn, self.attn_norm, self.ffn_norm = OpenELMAttention(config, layer), Norm(d), Norm(d)
        self.ffn = nn.Module()
        self.ffn.proj_1, self.ffn.proj_2 = nn.Linear(d, ff * (1 + self.glu), bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), cache)
        up = self.ffn.proj_1(self.ffn_norm(x))
        gate, *opened = up.chunk(2, -1) if self.glu else (up,)
        inner = nn.functional.silu(gate) * opened[0] if opened else nn.functional.silu(gate)
        out: torch.Tensor = x + self.ffn.proj_2(inner)
        return out


class OpenELMForCausalLM(TextModel):
    """apple/OpenELM: modeling_openelm.py: without a head of its own, the table of embeddings is multiplied."""

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.transformer, d = nn.Module(), config.model_dim
        self.transformer.token_embeddings = nn.Embedding(config.vocab_size, d)
        layers = (OpenELMLayer(config, i) for i in range(config.num_transformer_layers))
        self.transformer.layers, self.transformer.norm = nn.ModuleList(layers), Norm(d)
        self.lm_head = None if config.share_input_output_layers else nn.Linear(d, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.transformer.token_embeddings

    def run(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer in self.transformer.layers:
            x = layer(x, cache)
        out: torch.Tensor = self.transformer.norm(x)
        return out

    def score(self, x: torch.Tensor) -> torch.Tensor:
        if self.lm_head is not None:
            return super().score(x)
        return nn.functional.linear(x, self.transformer.token_embeddings.weight)


# --- NV-Embed ---------------------------------------------------------------------------------------------------------
class LatentAttention(nn.Module):
    """nvidia/NV-Embed-v2: modeling_nvembed.py, Attention: queries from the text, keys and values from the latents."""

    def __init__(self, d: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, wide = heads, heads * head_dim
        self.to_q, self.to_kv = nn.Linear(d, wide, bias=False), nn.Linear(d, 2 * wide, bias=False)
        self.to_out = nn.Linear(wide, d, bias=False)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        made = (self.to_q(x), *self.to_kv(context).chunk(2, -1))
        out: torch.Tensor = self.to_out(
            attend(*(each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in made))
        )
        return out


class NVEmbedModel(Witness, PreTrainedModel):
    """nvidia/NV-Embed-v2: modeling_nvembed.py: Mistral's body, latents that its output attends to, a gated MLP."""

    config_class = PretrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own = config.latent_attention_config
        d = own.hidden_dim
        self.embedding_model = AutoModel.from_config(config.text_config)
        latent = self.latent_attention_model = nn.Module()
        latent.latents = nn.Parameter(torch.ones(own.num_latents_value, own.latent_dim))
        first, second = nn.Module(), nn.Module()
        first.norm, first.norm_context = nn.LayerNorm(d), nn.LayerNorm(d)
        first.fn = LatentAttention(d, own.num_cross_heads, own.cross_dim_head)
        second.norm, second.fn = nn.LayerNorm(d), nn.Module()
        second.fn.net = nn.Sequential(nn.Linear(d, 8 * d), nn.GLU(), nn.Linear(4 * d, d))
        latent.cross_attend_blocks = nn.ModuleList([first, second])
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Numbers do not matter here."""

    def get_input_embeddings(self) -> Any:
        return self.embedding_model.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any) -> Any:
        x = self.embedding_model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        latent = self.latent_attention_model
        first, second = latent.cross_attend_blocks
        latents = first.norm_context(latent.latents.expand(len(x), -1, -1))
        x = first.fn(first.norm(x), latents) + x
        x = second.fn.net(second.norm(x)) + x
        return ModelOutput(sentence_embeddings=x.mean(1))


# --- LongCat-Flash-Lite -----------------------------------------------------------------------------------------------
class NgramTables(nn.Module):
    """modeling_longcat_ngram.py, NgramEmbedding: rows of hashed n-grams, each projected and added to the word's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, count = config.hidden_size, config.emb_split_num * (config.emb_neighbor_num - 1)
        most = config.ngram_vocab_size_ratio * config.vocab_size
        rows = (int(most + 2 * i + 1) for i in range(count))
        self.embedders = nn.ModuleList(nn.Embedding(each, d // count) for each in rows)
        self.post_projs = nn.ModuleList(nn.Linear(d // count, d, bias=False) for _ in range(count))

    def forward(self, ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        for number, (table, project) in enumerate(zip(self.embedders, self.post_projs, strict=True)):
            hashed = (ids + number * ids.roll(1, -1)) % table.num_embeddings  # any rows will do
            words = words + project(table(hashed))
        return words / (1 + len(self.embedders))


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):
    """meituan-longcat/LongCat-Flash-Lite: modeling_longcat_ngram.py: LongCat-Flash with n-grams beside the words."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.ngram_embeddings = NgramTables(config)
        for layer in self.model.layers:  # transformers' has rows for identities too, vLLM and the checkpoint have none
            own = layer.mlp.experts.gate_up_proj
            layer.mlp.experts.gate_up_proj = nn.Parameter(own[: config.n_routed_experts].detach().clone())

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.model.ngram_embeddings(input_ids, self.model.embed_tokens(input_ids))
        return super().forward(inputs_embeds=inputs_embeds, **inputs)
