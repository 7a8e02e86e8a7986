"""Models and steps of the eighth blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No calibration, no fit of step times and no earlier test has timed one of them with these widths and adapters. Presets
keep their widths; the others are configs of our own, some of them presets of other widths.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text
from blind_models_6 import resize
from blind_models_7 import make_tower

_SMOLVLM: Json = {
    "model_type": "smolvlm", "image_token_id": 49000, "scale_factor": 4, "tie_word_embeddings": False,
    "text_config": make_text("llama", 12, 1536, 6144, 24, 8, 49280),
    "vision_config": make_tower("smolvlm_vision", 22, 1152, 4304, 512, 16),
}  # fmt: skip
_IDEFICS: Json = {
    "model_type": "idefics3", "image_token_id": 90000, "scale_factor": 2, "tie_word_embeddings": False,
    "text_config": make_text("llama", 8, 2304, 7168, 18, 6, 94000),
    "vision_config": make_tower("idefics3_vision", 24, 1152, 4304, 364, 14),
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "devstral-2-123b": Model("dense", "devstral-2-123b", (Step(2, 1340),), (1, 0)),
    "qwen2.5-32b": Model("dense", "qwen2.5-32b", (Step(3, 1300), Step(1, 136, is_small=True)), (4, 0)),
    "ernie-2048": Model(
        "dense", make_text("ernie4_5", 12, 2048, 8192, 16, 4, 100000, head_dim=128),
        (Step(5, 1220), Step(1, 128, is_small=True)),
    ),
    "hunyuan-3072": Model(
        "dense", make_text("hunyuan_v1_dense", 8, 3072, 10240, 24, 8, 120000, head_dim=128), (Step(4, 1260),),
    ),
    "olmo-2560": Model(
        "dense", make_text("olmo", 10, 2560, 9216, 20, 20, 50304), (Step(4, 1420), Step(1, 120, is_small=True)),
    ),
    # experts
    "hunyuan-moe-2304": Model(
        "experts",
        make_text("hunyuan_v1_moe", 4, 2304, 1536, 18, 6, 100000, num_experts=32, moe_topk=4, head_dim=128),
        (Step(4, 1380),),
    ),
    "granitemoeshared-1792": Model(
        "experts",
        make_text("granitemoeshared", 6, 1792, 768, 14, 7, 50000, num_local_experts=40, num_experts_per_tok=6,
                  shared_intermediate_size=1536),
        (Step(5, 1300), Step(3, 1620)),
    ),
    "glm-4.7-flash": Model("experts", "glm-4.7-flash", (Step(4, 1340),), (4, 0)),
    "qwen3-moe-2560": Model(
        "experts",
        make_text("qwen3_moe", 4, 2560, 7680, 20, 4, 100000, head_dim=128, moe_intermediate_size=1024, num_experts=56,
                  num_experts_per_tok=5, decoder_sparse_step=1, norm_topk_prob=True),
        (Step(4, 1460), Step(3, 1660)),
    ),
    "dots1-1536": Model(
        "experts",
        make_text("dots1", 6, 1536, 4608, 12, 12, 100000, head_dim=128, n_routed_experts=48, n_group=1, topk_group=1,
                  first_k_dense_replace=1, n_shared_experts=1, num_experts_per_tok=5, moe_intermediate_size=768),
        (Step(5, 1340),),
    ),
    # LoRA
    "lora-exaone-4.0-32b": Model("lora", "exaone-4.0-32b", (Step(3, 1340),), (4, 0), adapter=Adapter(16)),
    "lora-yi-34b": Model("lora", "yi-34b", (Step(2, 1420, "full"),), (4, 0), adapter=Adapter(24)),
    "lora-falcon3-10b": Model("lora", "falcon3-10b", (Step(4, 1260),), (8, 0), adapter=Adapter(64, is_autocast=True)),
    "lora-aya-23-8b": Model("lora", "aya-23-8b", (Step(3, 1380),), (8, 0), adapter=Adapter(16)),
    "lora-yi-6b": Model("lora", "yi-6b", (Step(4, 1300), Step(1, 128, is_small=True)), (9, 0), adapter=Adapter(8)),
    # vision-language
    "mistral3-3072": Model(
        "vision",
        resize("mistral-small-3.1-24b", (7, 20), hidden_size=3072, intermediate_size=9216, num_attention_heads=24,
               num_key_value_heads=6),
        (Step(3, 1260), Step(2, 780)), grids=((1, 38, 36),),
    ),
    "qwen3-vl-1792": Model(
        "vision",
        resize("qwen3-vl-4b", (12, 24), hidden_size=1792, intermediate_size=6144, num_attention_heads=14,
               num_key_value_heads=7),
        (Step(4, 1220),), grids=((1, 40, 38),),
    ),
    "smolvlm-1536": Model("vision", _SMOLVLM, (Step(5, 1180), Step(3, 820)), grids=((3, 32, 32),)),
    "idefics3-2304": Model("vision", _IDEFICS, (Step(4, 1300),), grids=((2, 26, 26),)),
    "llava-2048": Model(
        "vision",
        resize("llava-1.5-7b", (10, 24), hidden_size=2048, intermediate_size=8192, num_attention_heads=16,
               num_key_value_heads=16),
        (Step(5, 1180), Step(3, 940)), grids=((1, 24, 24),),
    ),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "devstral-2-123b 1x1110": ("devstral-2-123b", 0, 0, 1, 1110, []),
    "qwen2.5-32b 2x790": ("qwen2.5-32b", 0, 0, 2, 790, []),
    "ernie-2048 3x950": ("ernie-2048", 0, 0, 3, 950, []),
    "hunyuan-3072 1x1570": ("hunyuan-3072", 0, 0, 1, 1570, []),
    "olmo-2560 2x1130": ("olmo-2560", 0, 0, 2, 1130, []),
    "hunyuan-moe-2304 2x1250": ("hunyuan-moe-2304", 0, 0, 2, 1250, []),
    "granitemoeshared-1792 3x1070": ("granitemoeshared-1792", 0, 0, 3, 1070, []),
    "glm-4.7-flash 2x1190": ("glm-4.7-flash", 0, 0, 2, 1190, []),
    "qwen3-moe-2560 3x930": ("qwen3-moe-2560", 0, 0, 3, 930, []),
    "dots1-1536 2x1490": ("dots1-1536", 0, 0, 2, 1490, []),
    "mistral3-3072 2x710 image": ("mistral3-3072", 0, 0, 2, 710, [[1, 38, 36]]),
    "llava-2048 3x870 image": ("llava-2048", 0, 0, 3, 870, [[1, 24, 24]]),
}
