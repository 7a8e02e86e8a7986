"""Models and steps of the sixth blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No calibration, no fit and no earlier test has timed one of them. Presets keep their widths; the others are configs of
our own, some of them presets of other widths.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text

from flopcalc.core.model.config import load_config

_ALL_OF_PHI = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def resize(preset: str, layers: tuple[int, int], **text: object) -> Json:
    """A preset's config with other widths of its text, and fewer layers (text, vision)."""
    config = dict(load_config(preset).config)
    vision = dict(config["vision_config"])
    part = {**config.get("text_config", config), **text, "num_hidden_layers": layers[0]}
    if isinstance(part.get("layer_types"), list):
        part["layer_types"] = part["layer_types"][: layers[0]]
    vision["depth" if "depth" in vision else "num_hidden_layers"] = layers[1]
    config = {**config, "text_config": part} if "text_config" in config else part
    for width in ("out_hidden_size", "projection_dim", *(("hidden_size",) if "embed_dim" in vision else ())):
        for each in (config, vision):
            if width in each:
                each[width] = text["hidden_size"]
    return {**config, "vision_config": vision}


_INTERNVL: Json = {
    "model_type": "internvl", "image_token_id": 90000, "tie_word_embeddings": False,
    "text_config": make_text("qwen2", 8, 2560, 8192, 20, 4, 94000),
    "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 22,
        "num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True,
        "use_qk_norm": False, "norm_type": "layer_norm",
    },
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "llama-2-70b": Model("dense", "llama-2-70b", (Step(2, 1500), Step(1, 128, is_small=True)), (3, 0)),
    "gpt-neox-20b": Model("dense", "gpt-neox-20b", (Step(3, 1340), Step(1, 120, is_small=True)), (5, 0)),
    "olmo-3-32b": Model("dense", "olmo-3-32b", (Step(3, 1300), Step(2, 1420, "full")), (4, 0)),
    "qwen1.5-32b": Model("dense", "qwen1.5-32b", (Step(3, 1380), Step(1, 144, is_small=True)), (3, 0)),
    "smollm2-1.7b": Model("dense", "smollm2-1.7b", (Step(6, 1260), Step(1, 136, is_small=True)), (14, 0)),
    # experts
    "qwen3-moe-2304": Model(
        "experts",
        make_text("qwen3_moe", 4, 2304, 6912, 18, 6, 100000, head_dim=128, moe_intermediate_size=768, num_experts=72,
                  num_experts_per_tok=6, decoder_sparse_step=1, norm_topk_prob=True),
        (Step(5, 1340), Step(3, 1780)),
    ),
    "qwen2-moe-2304": Model(
        "experts",
        make_text("qwen2_moe", 4, 2304, 6144, 18, 18, 90000, moe_intermediate_size=1280, num_experts=40,
                  num_experts_per_tok=4, shared_expert_intermediate_size=5120, decoder_sparse_step=1),
        (Step(4, 1500), Step(3, 1700)),
    ),
    "mixtral-2304": Model(
        "experts",
        make_text("mixtral", 4, 2304, 6144, 18, 6, 36000, num_local_experts=12, num_experts_per_tok=2,
                  sliding_window=None),
        (Step(5, 1300), Step(3, 1620)),
    ),
    "deepseek-v2-2304": Model(
        "experts",
        make_text("deepseek_v2", 4, 2304, 8192, 18, 18, 80000, moe_intermediate_size=1024, n_routed_experts=44,
                  n_shared_experts=2, num_experts_per_tok=5, first_k_dense_replace=1, q_lora_rank=None,
                  kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        (Step(4, 1460), Step(3, 1660)),
    ),
    "granitemoe-2048": Model(
        "experts",
        make_text("granitemoe", 7, 2048, 768, 16, 8, 49152, num_local_experts=32, num_experts_per_tok=6),
        (Step(5, 1380), Step(4, 1500)),
    ),
    # LoRA
    "lora-llama-2-70b": Model("lora", "llama-2-70b", (Step(2, 1380),), (3, 0), adapter=Adapter(16)),
    "lora-qwen2.5-32b": Model("lora", "qwen2.5-32b", (Step(3, 1260, "full"),), (4, 0), adapter=Adapter(32)),
    "lora-phi-3.5-mini": Model(
        "lora", "phi-3.5-mini", (Step(4, 1380),), (9, 0), adapter=Adapter(12, _ALL_OF_PHI)
    ),
    "lora-olmo-3-32b": Model("lora", "olmo-3-32b", (Step(3, 1420),), (3, 0), adapter=Adapter(24)),
    "lora-smollm2-1.7b": Model(
        "lora", "smollm2-1.7b", (Step(6, 1220), Step(1, 112, is_small=True)), (14, 0),
        adapter=Adapter(16, is_autocast=True),
    ),
    # vision-language
    "qwen3-vl-2304": Model(
        "vision",
        resize("qwen3-vl-4b", (9, 24), hidden_size=2304, intermediate_size=8192, num_attention_heads=18,
                num_key_value_heads=6),
        (Step(4, 1260), Step(2, 820)), grids=((1, 38, 40),),
    ),
    "qwen2-vl-2304": Model(
        "vision",
        resize("qwen2-vl-7b", (8, 20), hidden_size=2304, intermediate_size=9216, num_attention_heads=18,
                num_key_value_heads=2),
        (Step(4, 1300), Step(2, 840)), grids=((1, 36, 36),),
    ),
    "gemma-3-1920": Model(
        "vision",
        resize("gemma-3-4b", (8, 20), hidden_size=1920, intermediate_size=7680, num_attention_heads=8,
                num_key_value_heads=4),
        (Step(4, 1180), Step(2, 780)), grids=((1, 64, 64),),
    ),
    "internvl-2560": Model("vision", _INTERNVL, (Step(4, 1340), Step(3, 1100)), grids=((2, 32, 32),)),
    "llava-3072": Model(
        "vision",
        resize("llava-1.5-7b", (7, 24), hidden_size=3072, intermediate_size=8192, num_attention_heads=24,
                num_key_value_heads=8),
        (Step(4, 1220), Step(3, 900)), grids=((1, 24, 24),),
    ),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "llama-2-70b 1x1050": ("llama-2-70b", 0, 0, 1, 1050, []),
    "gpt-neox-20b 2x810": ("gpt-neox-20b", 0, 0, 2, 810, []),
    "olmo-3-32b 1x1230": ("olmo-3-32b", 0, 0, 1, 1230, []),
    "qwen1.5-32b 2x690": ("qwen1.5-32b", 0, 0, 2, 690, []),
    "smollm2-1.7b 3x1170": ("smollm2-1.7b", 0, 0, 3, 1170, []),
    "qwen3-moe-2304 2x1350": ("qwen3-moe-2304", 0, 0, 2, 1350, []),
    "qwen2-moe-2304 3x1010": ("qwen2-moe-2304", 0, 0, 3, 1010, []),
    "mixtral-2304 4x950": ("mixtral-2304", 0, 0, 4, 950, []),
    "deepseek-v2-2304 1x1570": ("deepseek-v2-2304", 0, 0, 1, 1570, []),
    "granitemoe-2048 3x890": ("granitemoe-2048", 0, 0, 3, 890, []),
    "qwen2-vl-2304 2x870 image": ("qwen2-vl-2304", 0, 0, 2, 870, [[1, 36, 36]]),
    "llava-3072 2x930 image": ("llava-3072", 0, 0, 2, 930, [[1, 24, 24]]),
}
