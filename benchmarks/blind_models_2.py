"""Models and steps of the second blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No fit, no recording and no earlier test has seen one of them.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text

_ALL_OF_PHI = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_INTERNVL: Json = {
    "model_type": "internvl", "image_token_id": 90000, "tie_word_embeddings": False,
    "text_config": make_text("qwen2", 12, 1536, 6144, 12, 2, 100000),
    "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 1152, "intermediate_size": 4608, "num_hidden_layers": 18,
        "num_attention_heads": 18, "image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True,
        "use_qk_norm": False, "norm_type": "layer_norm",
    },
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "qwen2.5-14b": Model("dense", "qwen2.5-14b", (Step(3, 1620), Step(1, 144, is_small=True)), (5, 0)),
    "llama-2-13b": Model("dense", "llama-2-13b", (Step(4, 1380), Step(1, 104, is_small=True)), (5, 0)),
    "phi-4": Model("dense", "phi-4", (Step(3, 1540), Step(2, 1540, "full")), (5, 0)),
    "qwen3-4b": Model("dense", "qwen3-4b", (Step(5, 1180), Step(1, 152, is_small=True)), (9, 0)),
    "starcoder2-3b": Model("dense", "starcoder2-3b", (Step(6, 1220), Step(1, 120, is_small=True)), (10, 0)),
    # experts
    "granite-3.1-1b-a400m": Model("experts", "granite-3.1-1b-a400m", (Step(7, 1260), Step(4, 1780)), (12, 0)),
    "qwen3-moe-1792": Model(
        "experts",
        make_text("qwen3_moe", 5, 1792, 5376, 14, 2, 110000, head_dim=128, moe_intermediate_size=896, num_experts=56,
                  num_experts_per_tok=7, decoder_sparse_step=1, norm_topk_prob=True),
        (Step(5, 1380), Step(3, 1940)),
    ),
    "deepseek-v2-1792": Model(
        "experts",
        make_text("deepseek_v2", 5, 1792, 7168, 14, 14, 90000, moe_intermediate_size=896, n_routed_experts=36,
                  n_shared_experts=2, num_experts_per_tok=5, first_k_dense_replace=1, q_lora_rank=None,
                  kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        (Step(5, 1380), Step(4, 1540)),
    ),
    "olmoe-1792": Model(
        "experts", make_text("olmoe", 6, 1792, 896, 14, 14, 50304, num_experts=48, num_experts_per_tok=6),
        (Step(6, 1340), Step(4, 1620)),
    ),
    "mixtral-3072": Model(
        "experts",
        make_text("mixtral", 3, 3072, 7680, 24, 6, 32000, num_local_experts=10, num_experts_per_tok=2,
                  sliding_window=None),
        (Step(5, 1380), Step(3, 1140)),
    ),
    # LoRA
    "lora-qwen2.5-14b": Model("lora", "qwen2.5-14b", (Step(3, 1540),), (5, 0), adapter=Adapter(16)),
    "lora-llama-2-7b": Model(
        "lora", "llama-2-7b", (Step(4, 1620), Step(1, 112, is_small=True)), (10, 0),
        adapter=Adapter(8, ("q_proj", "v_proj")),
    ),
    "lora-phi-4": Model("lora", "phi-4", (Step(3, 1380),), (5, 0), adapter=Adapter(32, _ALL_OF_PHI)),
    "lora-olmo-2-13b": Model("lora", "olmo-2-13b", (Step(3, 1540, "full"),), (6, 0), adapter=Adapter(16)),
    "lora-llama-3.1-70b": Model(
        "lora", "llama-3.1-70b", (Step(2, 1620),), (2, 0), adapter=Adapter(64, is_autocast=True)
    ),
    # vision-language
    "qwen2.5-vl-32b": Model("vision", "qwen2.5-vl-32b", (Step(3, 1240), Step(1, 820)), (3, 16), ((1, 36, 48),)),
    "qwen3-vl-8b": Model("vision", "qwen3-vl-8b", (Step(4, 1180), Step(2, 780)), (6, 27), ((1, 44, 36),)),
    "paligemma-3b-224": Model("vision", "paligemma-3b-224", (Step(6, 1080), Step(3, 560)), (10, 24), ((1, 16, 16),)),
    "bakllava-7b": Model("vision", "bakllava-7b", (Step(4, 1340), Step(2, 860)), (6, 24), ((1, 24, 24),)),
    "internvl-1536": Model("vision", _INTERNVL, (Step(4, 1660), Step(2, 920)), grids=((2, 32, 32),)),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "qwen2.5-3b 2x1250": ("qwen2.5-3b", 6, 0, 2, 1250, []),
    "llama-2-7b 3x850": ("llama-2-7b", 3, 0, 3, 850, []),
    "qwen3-4b 1x1450": ("qwen3-4b", 0, 0, 1, 1450, []),
    "olmo-2-13b 2x650": ("olmo-2-13b", 3, 0, 2, 650, []),
    "pythia-2.8b 3x750": ("pythia-2.8b", 5, 0, 3, 750, []),
    "starcoder2-3b 2x1350": ("starcoder2-3b", 0, 0, 2, 1350, []),
    "qwen3-moe-1792 4x1300": ("qwen3-moe-1792", 0, 0, 4, 1300, []),
    "granite-3.1-1b-a400m 3x1100": ("granite-3.1-1b-a400m", 0, 0, 3, 1100, []),
    "mixtral-3072 2x1250": ("mixtral-3072", 0, 0, 2, 1250, []),
    "qwen3-vl-8b 2x1000 image": ("qwen3-vl-8b", 4, 27, 2, 1000, [[1, 38, 42]]),
    "bakllava-7b 2x900 image": ("bakllava-7b", 3, 8, 2, 900, [[1, 24, 24]]),
    "paligemma-3b-224 3x700 image": ("paligemma-3b-224", 5, 8, 3, 700, [[1, 16, 16]]),
}
