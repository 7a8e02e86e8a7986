"""Megatron's words for a decoder: fields of a model provider, or arguments of pretrain_gpt.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from flopcalc.base.errors import ConfigError
from flopcalc.setup.native import Decoder, Experts, Mla, make_config

# Fields of megatron-core's TransformerConfig and MLATransformerConfig, and of megatron-bridge's models/gpt_provider.py.
_UNMAPPED = ("hybrid_override_pattern", "hybrid_layer_pattern", "mtp_num_layers", "window_size", "moe_latent_size")
# Defaults of arguments in megatron/training/arguments.py that differ from those of the fields.
_DEFAULTS = {
    "make_vocab_size_divisible_by": 128, "moe_router_topk": 2, "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def map_arguments(given: Mapping[str, Any], tensor_parallel: int = 1) -> dict[str, Any]:
    """The HF config of pretrain_gpt.py's arguments, by their names with underscores."""
    hidden, padded = given["hidden_size"], given.get("padded_vocab_size")
    fields = {
        **_DEFAULTS,
        "ffn_hidden_size": hidden * 8 // 3 // 64 * 64 if given.get("gated_linear_unit") else 4 * hidden,
        **given,
        "share_embeddings_and_output_weights": not given.get("untied"),
        "tensor_model_parallel_size": tensor_parallel,
        "num_query_groups": given.get("num_query_groups") if given.get("group_query_attention") else None,
        "vocab_size": padded or given.get("vocab_size"),
        "should_pad_vocab": not padded,
    }
    if isinstance(pattern := fields.get("moe_layer_freq"), str):  # ([0]*3+[1]*58)
        pieces = re.findall(r"\[([01, ]+)\](?:\*(\d+))?", pattern)
        fields["moe_layer_freq"] = [int(n) for each, times in pieces for n in each.split(",") * int(times or 1)]
    return map_config(SimpleNamespace(**fields), "these arguments of Megatron")


def map_config(model: Any, name: str = "") -> dict[str, Any]:
    """The HF config with the same products as a Megatron model provider, or another TransformerConfig."""
    name = name or type(model).__name__
    if getattr(model, "is_hybrid_model", False):
        raise ConfigError(f"{name} is a hybrid model, which is not mapped; give model=")
    for field in _UNMAPPED:
        if getattr(model, field, None):
            raise ConfigError(f"{name}: {field}={getattr(model, field)!r} is not mapped; give model=")
    if getattr(model, "vision_config", None) is not None:
        raise ConfigError(f"{name} has a vision tower, which is not mapped; give model=")
    heads = model.num_attention_heads
    mla = None
    if getattr(model, "multi_latent_attention", False):
        mla = Mla(model.q_lora_rank, model.kv_lora_rank, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim)
    decoder = Decoder(
        hidden=model.hidden_size,
        layers=model.num_layers,
        heads=heads,
        kv_heads=getattr(model, "num_query_groups", None) or heads,
        head_dim=getattr(model, "kv_channels", None) or model.hidden_size // heads,
        vocab=_pad_vocabulary(model),
        size=getattr(model, "ffn_hidden_size", None) or 4 * model.hidden_size,
        is_gated=bool(getattr(model, "gated_linear_unit", False)),
        experts=_read_experts(model),
        mla=mla,
        is_tied=bool(getattr(model, "share_embeddings_and_output_weights", False)),
    )
    return make_config(decoder, name)


def _read_experts(model: Any) -> Experts | None:
    count = getattr(model, "num_moe_experts", None)
    if not count:
        return None
    frequency = getattr(model, "moe_layer_freq", 1)
    pattern = [int(i % frequency == 0) for i in range(model.num_layers)] if isinstance(frequency, int) else frequency
    if len(pattern) != model.num_layers:
        raise ConfigError(f"moe_layer_freq has {len(pattern)} entries for {model.num_layers} layers")
    return Experts(
        count,
        getattr(model, "moe_router_topk", None) or 1,
        getattr(model, "moe_ffn_hidden_size", None) or model.ffn_hidden_size,
        [index for index, is_sparse in enumerate(pattern) if is_sparse],
        getattr(model, "moe_shared_expert_intermediate_size", None) or 0,
        bool(getattr(model, "moe_shared_expert_gate", False)),
    )


def _pad_vocabulary(model: Any) -> int:
    """The head's width: Megatron pads it to a multiple of that many rows for each tensor-parallel rank."""
    multiple = getattr(model, "make_vocab_size_divisible_by", 1) * getattr(model, "tensor_model_parallel_size", 1)
    if getattr(model, "should_pad_vocab", True):
        return -(-int(model.vocab_size) // multiple) * multiple
    return int(model.vocab_size)
