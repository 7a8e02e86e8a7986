"""A decoder in a framework's own words becomes the HF config that has the same products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flopcalc.base.errors import ConfigError


class Mla(NamedTuple):
    """Multi-head latent attention."""

    q_rank: int | None  # None: one product makes the queries
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v: int


class Experts(NamedTuple):
    """A mixture of experts; `layers` are those that have one."""

    many: int
    top_k: int
    size: int  # width of one expert
    layers: Sequence[int]
    shared: int = 0  # width of all shared experts together
    has_gate: bool = False  # a gate scales the shared expert


class Decoder(NamedTuple):
    """What a decoder's products are made of."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    size: int  # width of a dense MLP
    is_gated: bool = True  # three products in an MLP, not two
    experts: Experts | None = None
    mla: Mla | None = None
    windows: Sequence[int | None] = ()  # of each layer; None: full
    is_tied: bool = False  # the head's weight is the embedding's


def make_config(decoder: Decoder, name: str) -> dict[str, Any]:
    """The HF config of a decoder; an error that names what no HF config describes."""
    config: dict[str, object] = {
        "hidden_size": decoder.hidden, "num_hidden_layers": decoder.layers, "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads, "head_dim": decoder.head_dim, "vocab_size": decoder.vocab,
        "intermediate_size": decoder.size, "tie_word_embeddings": decoder.is_tied, "max_position_embeddings": 1 << 24,
    }  # fmt: skip
    experts = decoder.experts
    if any(decoder.windows):
        return {**config, **_describe_windows(decoder, name)}
    if decoder.mla is not None:
        return {**config, **_describe_latent(decoder, decoder.mla, name)}
    if experts is None:
        return {**config, "model_type": "llama" if decoder.is_gated else "nemotron"}
    if not decoder.is_gated:
        raise ConfigError(f"{name}: experts without a gated MLP are not described by any spec; give model=")
    routed = {
        "num_experts": experts.many,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(decoder.layers) if i not in experts.layers],
    }
    if not experts.shared:
        return {**config, **routed, "model_type": "qwen3_moe"}
    if experts.has_gate:
        return {**config, **routed, "model_type": "qwen2_moe", "shared_expert_intermediate_size": experts.shared}
    return {**config, **_describe_shared(decoder, experts, name), "model_type": "glm4_moe"}


def _describe_shared(decoder: Decoder, experts: Experts, name: str) -> dict[str, Any]:
    """Experts as DeepSeek and GLM write them: dense layers first, shared experts as wide as routed ones."""
    dense = decoder.layers - len(experts.layers)
    if list(experts.layers) != list(range(dense, decoder.layers)):
        raise ConfigError(f"{name}: dense layers among layers with shared experts are not described; give model=")
    shared, rest = divmod(experts.shared, experts.size)
    if rest:
        raise ConfigError(
            f"{name}: shared experts of width {experts.shared} are no multiple of the routed ones' {experts.size}; "
            "give model="
        )
    return {
        "n_routed_experts": experts.many,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": shared,
        "moe_intermediate_size": experts.size,
        "first_k_dense_replace": dense,
        "mlp_only_layers": [],
    }


def _describe_latent(decoder: Decoder, mla: Mla, name: str) -> dict[str, Any]:
    if not decoder.is_gated:
        raise ConfigError(f"{name}: latent attention without a gated MLP is not described by any spec; give model=")
    experts = decoder.experts or Experts(1, 1, 1, ())  # no layer has them
    if experts.has_gate:
        raise ConfigError(f"{name}: latent attention with a gated shared expert is not described; give model=")
    return {
        **_describe_shared(decoder, experts, name), "model_type": "deepseek_v3", "num_key_value_heads": decoder.heads,
        "q_lora_rank": mla.q_rank, "kv_lora_rank": mla.kv_rank, "qk_nope_head_dim": mla.qk_nope,
        "qk_rope_head_dim": mla.qk_rope, "v_head_dim": mla.v, "head_dim": mla.qk_rope,
    }  # fmt: skip


def _describe_windows(decoder: Decoder, name: str) -> dict[str, Any]:
    """Layers that slide, with experts in every one: gpt-oss."""
    experts, sizes = decoder.experts, {window for window in decoder.windows if window}
    is_known = experts is not None and len(experts.layers) == decoder.layers and not experts.shared
    if experts is None or not is_known or decoder.mla is not None or len(sizes) > 1:
        raise ConfigError(f"{name}: sliding windows in this model are not described; give model=")
    return {
        "model_type": "gpt_oss",
        "intermediate_size": experts.size,
        "num_local_experts": experts.many,
        "num_experts_per_tok": experts.top_k,
        "sliding_window": sizes.pop(),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in decoder.windows],
    }
