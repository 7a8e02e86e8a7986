"""For hf-mem, src/hf_mem/safetensors/kv_cache.py: values in the KV cache by kind of layer (see hf-mem.md)."""

from __future__ import annotations

from typing import Any


def count_cached_values(config: dict[str, Any], max_model_len: int) -> int:
    """Values that one sequence keeps in the KV cache, layer by layer."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = 2 * kv_heads * head_dim
    if config.get("kv_lora_rank"):  # MLA keeps one latent vector and one rotary key per token, shared by all heads
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]

    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types")
    if kinds is None:
        # Every N-th layer is a full one. The others are linear ones (Qwen3-Next) or have a window (Gemma, whose configs
        # may leave N to their class). Without N all layers have the window, if there is one (Mistral).
        every = config.get("full_attention_interval") or config.get("sliding_window_pattern")
        every = every or {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}.get(config.get("model_type", ""))
        other = "linear_attention" if config.get("full_attention_interval") else "sliding_attention"
        kinds = [
            "full_attention" if every and layer % every == every - 1 else other
            for layer in range(config["num_hidden_layers"])
        ]

    tokens = {
        "sliding_attention": min(window or max_model_len, max_model_len),
        **dict.fromkeys(("linear_attention", "mamba", "conv"), 0),  # a state of fixed size, and no keys or values
    }
    return width * sum(tokens.get(kind, max_model_len) for kind in kinds)
