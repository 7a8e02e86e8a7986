"""Models and steps of the ninth blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No calibration, no fit of step times and no earlier test has timed one of them with these widths and adapters. Presets
keep their widths; the others are configs of our own, some of them presets of other widths. Steps with experts and with
images have more tokens than in earlier tests, so that the GPU bounds them on a slow host too.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text
from blind_models_6 import resize
from blind_models_7 import make_tower

_SMOLVLM: Json = {
    "model_type": "smolvlm", "image_token_id": 49000, "scale_factor": 4, "tie_word_embeddings": False,
    "text_config": make_text("llama", 10, 2304, 7680, 18, 6, 49280),
    "vision_config": make_tower("smolvlm_vision", 18, 1152, 4304, 512, 16),
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "open-llama-3b": Model("dense", "open-llama-3b", (Step(4, 1340), Step(1, 128, is_small=True)), (9, 0)),
    "pythia-6.9b": Model("dense", "pythia-6.9b", (Step(3, 1460),), (8, 0)),
    "qwen1.5-1.8b": Model("dense", "qwen1.5-1.8b", (Step(5, 1180), Step(1, 136, is_small=True)), (12, 0)),
    "olmo2-3072": Model(
        "dense", make_text("olmo2", 8, 3072, 9216, 24, 24, 100352), (Step(4, 1300), Step(3, 1180, "full")),
    ),
    "cohere-2560": Model(
        "dense", make_text("cohere", 8, 2560, 8192, 20, 5, 128000, logit_scale=0.0625),
        (Step(4, 1220), Step(1, 120, is_small=True)),
    ),
    # experts
    "olmoe-1536": Model(
        "experts",
        make_text("olmoe", 6, 1536, 768, 12, 12, 50304, num_experts=48, num_experts_per_tok=6),
        (Step(7, 1340), Step(5, 1660)),
    ),
    "qwen2-moe-2560": Model(
        "experts",
        make_text("qwen2_moe", 4, 2560, 7168, 20, 20, 100000, moe_intermediate_size=1152, num_experts=48,
                  num_experts_per_tok=4, shared_expert_intermediate_size=4608, decoder_sparse_step=1),
        (Step(6, 1300),),
    ),
    "mixtral-2048": Model(
        "experts", make_text("mixtral", 6, 2048, 5632, 16, 4, 32000, num_local_experts=8, num_experts_per_tok=2),
        (Step(6, 1380), Step(5, 1540)),
    ),
    "deepseek-v3-1792": Model(
        "experts",
        make_text("deepseek_v3", 5, 1792, 5120, 14, 14, 100000, n_routed_experts=48, n_group=1, topk_group=1,
                  num_experts_per_tok=5, n_shared_experts=1, moe_intermediate_size=896, first_k_dense_replace=1,
                  q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        (Step(6, 1340),),
    ),
    "qwen3-moe-1536": Model(
        "experts",
        make_text("qwen3_moe", 5, 1536, 6144, 12, 4, 100000, head_dim=128, moe_intermediate_size=768, num_experts=64,
                  num_experts_per_tok=6, decoder_sparse_step=1, norm_topk_prob=True),
        (Step(7, 1260), Step(5, 1620)),
    ),
    # LoRA
    "lora-mistral-large": Model("lora", "mistral-large", (Step(2, 1340),), (2, 0), adapter=Adapter(16)),
    "lora-qwen3-2304": Model(
        "lora", make_text("qwen3", 10, 2304, 7680, 18, 6, 120000, head_dim=128), (Step(4, 1380),), adapter=Adapter(32),
    ),
    "lora-llama-3584": Model(
        "lora", make_text("llama", 7, 3584, 11264, 28, 7, 64000), (Step(4, 1220),),
        adapter=Adapter(64, is_autocast=True),
    ),
    "lora-olmo2-3072": Model(
        "lora", make_text("olmo2", 8, 3072, 9216, 24, 24, 100352), (Step(4, 1260, "full"),), adapter=Adapter(24),
    ),
    "lora-open-llama-3b": Model(
        "lora", "open-llama-3b", (Step(5, 1300), Step(1, 112, is_small=True)), (10, 0), adapter=Adapter(8),
    ),
    # vision-language
    "mistral3-2560": Model(
        "vision",
        resize("mistral-small-3.1-24b", (9, 20), hidden_size=2560, intermediate_size=8704, num_attention_heads=20,
               num_key_value_heads=5),
        (Step(4, 1260),), grids=((1, 38, 40),),
    ),
    "qwen2-vl-1792": Model(
        "vision",
        resize("qwen2-vl-7b", (12, 20), hidden_size=1792, intermediate_size=6656, num_attention_heads=14,
               num_key_value_heads=7),
        (Step(6, 1240),), grids=((1, 40, 40),),
    ),
    "gemma-3-2304": Model(
        "vision",
        resize("gemma-3-4b", (12, 22), hidden_size=2304, intermediate_size=9216, num_attention_heads=9,
               num_key_value_heads=3),
        (Step(3, 1260), Step(2, 900)), grids=((1, 64, 64),),
    ),
    "llava-2816": Model(
        "vision",
        resize("llava-1.5-7b", (8, 24), hidden_size=2816, intermediate_size=8704, num_attention_heads=22,
               num_key_value_heads=22),
        (Step(7, 1240),), grids=((1, 24, 24),),
    ),
    "smolvlm-2304": Model("vision", _SMOLVLM, (Step(6, 1180), Step(4, 860)), grids=((3, 32, 32),)),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "open-llama-3b 3x1130": ("open-llama-3b", 0, 0, 3, 1130, []),
    "pythia-6.9b 2x1190": ("pythia-6.9b", 0, 0, 2, 1190, []),
    "qwen1.5-1.8b 3x1010": ("qwen1.5-1.8b", 0, 0, 3, 1010, []),
    "olmo2-3072 1x1870": ("olmo2-3072", 0, 0, 1, 1870, []),
    "cohere-2560 2x1350": ("cohere-2560", 0, 0, 2, 1350, []),
    "olmoe-1536 3x1270": ("olmoe-1536", 0, 0, 3, 1270, []),
    "qwen2-moe-2560 2x1710": ("qwen2-moe-2560", 0, 0, 2, 1710, []),
    "deepseek-v3-1792 3x1090": ("deepseek-v3-1792", 0, 0, 3, 1090, []),
    "qwen3-moe-1536 2x1530": ("qwen3-moe-1536", 0, 0, 2, 1530, []),
    "mistral3-2560 2x790 image": ("mistral3-2560", 0, 0, 2, 790, [[1, 38, 40]]),
    "qwen2-vl-1792 3x770 image": ("qwen2-vl-1792", 0, 0, 3, 770, [[1, 40, 40]]),
    "llava-2816 3x910 image": ("llava-2816", 0, 0, 3, 910, [[1, 24, 24]]),
}
