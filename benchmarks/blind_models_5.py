"""Models and steps of the fifth blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No calibration, no fit and no earlier test has timed one of them; some share a family, and a few a layer's widths, with
models of those. It tests the optimizer's time and the rows of random routers as they are modelled since the fourth.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text

_INTERNVL: Json = {
    "model_type": "internvl", "image_token_id": 90000, "tie_word_embeddings": False,
    "text_config": make_text("qwen2", 8, 2304, 7680, 18, 6, 98000),
    "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 16,
        "num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True,
        "use_qk_norm": False, "norm_type": "layer_norm",
    },
}  # fmt: skip
_LLAVA: Json = {
    "model_type": "llava", "image_token_index": 60000, "image_seq_length": 576, "tie_word_embeddings": False,
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
    "text_config": make_text("llama", 9, 2560, 9216, 20, 5, 64000),
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768,
    },
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "command-r-35b": Model("dense", "command-r-35b", (Step(2, 1340), Step(1, 136, is_small=True)), (2, 0)),
    "qwen3-32b": Model("dense", "qwen3-32b", (Step(3, 1240), Step(1, 128, is_small=True)), (4, 0)),
    "olmo-2-32b": Model("dense", "olmo-2-32b", (Step(3, 1420), Step(2, 1180, "full")), (4, 0)),
    "pythia-12b": Model("dense", "pythia-12b", (Step(3, 1540), Step(1, 112, is_small=True)), (6, 0)),
    "qwen1.5-4b": Model("dense", "qwen1.5-4b", (Step(5, 1300), Step(1, 144, is_small=True)), (12, 0)),
    # experts
    "qwen3-235b-a22b": Model("experts", "qwen3-235b-a22b", (Step(4, 1420), Step(3, 1740)), (2, 0)),
    "mixtral-8x22b": Model("experts", "mixtral-8x22b", (Step(3, 1460), Step(2, 1740)), (2, 0)),
    "olmoe-2304": Model(
        "experts", make_text("olmoe", 4, 2304, 1024, 18, 18, 50304, num_experts=56, num_experts_per_tok=7),
        (Step(4, 1580), Step(3, 1860)),
    ),
    "granitemoe-1536": Model(
        "experts",
        make_text("granitemoe", 9, 1536, 768, 12, 4, 49152, num_local_experts=28, num_experts_per_tok=5),
        (Step(6, 1260), Step(4, 1620)),
    ),
    "deepseek-v3-2048": Model(
        "experts",
        make_text("deepseek_v3", 4, 2048, 8192, 16, 16, 90000, moe_intermediate_size=1024, n_routed_experts=40,
                  n_shared_experts=1, num_experts_per_tok=5, n_group=4, topk_group=2, first_k_dense_replace=1,
                  q_lora_rank=1024, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        (Step(4, 1540), Step(3, 1820)),
    ),
    # LoRA
    "lora-codellama-13b": Model("lora", "codellama-13b", (Step(3, 1460, "full"),), (5, 0), adapter=Adapter(16)),
    "lora-qwen2-7b": Model("lora", "qwen2-7b", (Step(4, 1300),), (7, 0), adapter=Adapter(48)),
    "lora-qwen3-32b": Model("lora", "qwen3-32b", (Step(3, 1340),), (4, 0), adapter=Adapter(8)),
    "lora-llama-3.3-70b": Model(
        "lora", "llama-3.3-70b", (Step(2, 1420),), (3, 0), adapter=Adapter(32, is_autocast=True)
    ),
    "lora-mistral-7b-v0.3": Model(
        "lora", "mistral-7b-v0.3", (Step(4, 1420), Step(1, 120, is_small=True)), (8, 0),
        adapter=Adapter(16, ("q_proj", "k_proj", "v_proj", "o_proj")),
    ),
    # vision-language
    "qwen3-vl-32b": Model("vision", "qwen3-vl-32b", (Step(3, 1260), Step(1, 780)), (4, 27), ((1, 36, 40),)),
    "gemma-3-27b": Model("vision", "gemma-3-27b", (Step(3, 1140), Step(2, 700)), (4, 27), ((1, 64, 64),)),
    "qwen2.5-vl-72b": Model("vision", "qwen2.5-vl-72b", (Step(3, 1300), Step(2, 860)), (2, 8), ((1, 32, 40),)),
    "internvl-2304": Model("vision", _INTERNVL, (Step(4, 1380), Step(2, 900)), grids=((2, 32, 32),)),
    "llava-2560": Model("vision", _LLAVA, (Step(5, 1260), Step(2, 920)), grids=((1, 24, 24),)),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "command-r-35b 1x1150": ("command-r-35b", 0, 0, 1, 1150, []),
    "qwen3-32b 1x1270": ("qwen3-32b", 0, 0, 1, 1270, []),
    "olmo-2-32b 1x1390": ("olmo-2-32b", 0, 0, 1, 1390, []),
    "pythia-12b 2x870": ("pythia-12b", 0, 0, 2, 870, []),
    "qwen1.5-4b 3x930": ("qwen1.5-4b", 0, 0, 3, 930, []),
    "qwen3-235b-a22b 1x1450": ("qwen3-235b-a22b", 0, 0, 1, 1450, []),
    "mixtral-8x22b 2x1150": ("mixtral-8x22b", 0, 0, 2, 1150, []),
    "olmoe-2304 3x1050": ("olmoe-2304", 0, 0, 3, 1050, []),
    "granitemoe-1536 2x1350": ("granitemoe-1536", 0, 0, 2, 1350, []),
    "deepseek-v3-2048 2x1250": ("deepseek-v3-2048", 0, 0, 2, 1250, []),
    "qwen3-vl-32b 1x1050 image": ("qwen3-vl-32b", 0, 0, 1, 1050, [[1, 36, 40]]),
    "internvl-2304 2x950 image": ("internvl-2304", 0, 0, 2, 950, [[2, 32, 32]]),
}
