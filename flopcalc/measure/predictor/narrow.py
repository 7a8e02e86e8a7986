"""Make a config narrow: the same model code with few heads and layers, and little work for a device.

The host's work for a layer does not depend on its widths, so a narrow model shows it within milliseconds.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

MARK = "-narrow-"  # in the name of a narrow model, between its preset and its layers
_HEADS = 4
_DIM = 128  # of a head, if the config leaves it to its class
_SIZES = {
    "intermediate_size": 768, "ffn_dim": 768, "n_inner": 768, "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 896, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "n_group": 4, "topk_group": 2, "q_lora_rank": 128, "kv_lora_rank": 128, "first_k_dense_replace": 1,
}  # fmt: skip
_MARKED = ("deepstack_visual_indexes", "fullatt_block_indexes")  # lists of a tower's layers: the last of each quarter
_WIDTHS = ("hidden_size", "n_embd", "embed_dim", "word_embed_proj_dim")
_COUNTS = ("num_attention_heads", "n_head", "num_heads")
_DEPTHS = ("num_hidden_layers", "n_layer", "depth")


def is_narrow(name: str) -> bool:
    """Whether a case's model is a narrow one."""
    return MARK in name


def narrow(config: Json, layers: int) -> Json:
    """The same model with four heads of their published width; its tower too, with twice as many layers."""
    if "vision_config" not in config:
        return _narrow_part(config, layers)
    tower = _narrow_part(config["vision_config"], 2 * layers)
    has_part = isinstance(config.get("text_config"), dict)
    text = _narrow_part(config["text_config"] if has_part else config, layers)
    made = {**config, "text_config": text} if has_part else text
    width = text["hidden_size"]
    if "embed_dim" in tower:  # qwen2_vl, whose tower names the text's width hidden_size
        tower["hidden_size"] = width
    for part in (tower, made):
        part |= {key: width for key in ("out_hidden_size", "projection_dim") if key in part}
    if has_part and "hidden_size" in made:  # a copy of the text's
        made["hidden_size"] = width
    return {**made, "vision_config": tower}


def _narrow_part(config: Json, layers: int) -> Json:
    if not any(key in config for key in _COUNTS):
        keys = _HEADS // 2 if _groups_keys(config) else _HEADS
        return {**config, "hidden_size": _HEADS * _DIM, "num_attention_heads": _HEADS, "num_key_value_heads": keys,
                "num_hidden_layers": layers, "intermediate_size": _SIZES["intermediate_size"]}  # fmt: skip
    heads = next(config[key] for key in _COUNTS if key in config)
    width = next(config[key] for key in ("embed_dim", *_WIDTHS) if key in config)
    dim = config.get("head_dim") or width // heads
    made = {**config, **{key: value for key, value in _SIZES.items() if config.get(key) is not None}}
    made |= {key: [layers * i // 4 - 1 for i in range(1, 1 + len(config[key]))] for key in _MARKED if key in config}
    made |= {key: _HEADS * dim for key in _WIDTHS if key in config}
    made |= {key: _HEADS for key in _COUNTS if key in config}
    made |= {key: layers for key in _DEPTHS if key in config}
    if "num_key_value_heads" in config:
        keys = config["num_key_value_heads"]
        made["num_key_value_heads"] = _HEADS if keys in (None, heads) else 1 if keys == 1 else _HEADS // 2
    for key in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            made[key] = config[key][:layers]
    return made


def _groups_keys(config: Json) -> bool:
    """Whether the class of a config that names no heads has fewer key heads than heads."""
    from transformers import AutoConfig

    made = AutoConfig.for_model(config.get("model_type", "llama"))
    heads = getattr(made, "num_attention_heads", None)
    return getattr(made, "num_key_value_heads", heads) != heads
