"""Models and steps of the tenth blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No calibration, no fit of step times and no earlier test has timed one of them with these widths and adapters. Presets
keep their widths; the others are configs of our own, some of them presets of other widths.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text
from blind_models_6 import resize
from blind_models_7 import make_tower

_IDEFICS: Json = {
    "model_type": "idefics3", "image_token_id": 90000, "scale_factor": 2, "tie_word_embeddings": False,
    "text_config": make_text("llama", 8, 2560, 8192, 20, 5, 94000),
    "vision_config": make_tower("idefics3_vision", 22, 1152, 4304, 364, 14),
}  # fmt: skip
# The first run on the GPU refused this one: its usual token for padding lies outside the vocabulary.
_SMOLLM = make_text("smollm3", 9, 2560, 8704, 20, 4, 100000, pad_token_id=0, bos_token_id=1, eos_token_id=2)

MODELS: dict[str, Model] = {
    # dense
    "llama-2816": Model(
        "dense", make_text("llama", 10, 2816, 9216, 22, 11, 80000), (Step(4, 1300), Step(1, 128, is_small=True)),
    ),
    "granite-2560": Model("dense", make_text("granite", 9, 2560, 8704, 20, 5, 49152), (Step(5, 1220),)),
    "mistral-2304": Model(
        "dense", make_text("mistral", 12, 2304, 8192, 18, 6, 64000), (Step(5, 1260), Step(1, 136, is_small=True)),
    ),
    "qwen3-3072": Model(
        "dense", make_text("qwen3", 8, 3072, 9728, 24, 8, 130000, head_dim=128), (Step(4, 1180), Step(3, 1260, "full")),
    ),
    "smollm3-2560": Model("dense", _SMOLLM, (Step(4, 1340), Step(1, 120, is_small=True))),
    # experts
    "granitemoe-2304": Model(
        "experts",
        make_text("granitemoe", 5, 2304, 1024, 18, 6, 50000, num_local_experts=40, num_experts_per_tok=6),
        (Step(6, 1260), Step(4, 1580)),
    ),
    "qwen3-moe-2816": Model(
        "experts",
        make_text("qwen3_moe", 4, 2816, 8192, 22, 2, 100000, head_dim=128, moe_intermediate_size=896, num_experts=56,
                  num_experts_per_tok=5, decoder_sparse_step=1, norm_topk_prob=True),
        (Step(5, 1300),),
    ),
    "olmoe-2560": Model(
        "experts", make_text("olmoe", 4, 2560, 1152, 20, 20, 50304, num_experts=48, num_experts_per_tok=6),
        (Step(6, 1340), Step(4, 1700)),
    ),
    "deepseek-v2-2048": Model(
        "experts",
        make_text("deepseek_v2", 5, 2048, 6144, 16, 16, 90000, n_routed_experts=48, n_group=1, topk_group=1,
                  topk_method="greedy", num_experts_per_tok=5, n_shared_experts=1, moe_intermediate_size=1024,
                  first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
                  qk_rope_head_dim=64, v_head_dim=128),
        (Step(6, 1260),),
    ),
    "qwen2-moe-1536": Model(
        "experts",
        make_text("qwen2_moe", 6, 1536, 5120, 12, 12, 100000, moe_intermediate_size=896, num_experts=40,
                  num_experts_per_tok=5, shared_expert_intermediate_size=3584, decoder_sparse_step=1),
        (Step(7, 1220), Step(5, 1540)),
    ),
    # LoRA
    "lora-qwen2.5-14b": Model("lora", "qwen2.5-14b", (Step(3, 1420),), (6, 0), adapter=Adapter(16)),
    "lora-qwen3-3072": Model(
        "lora", make_text("qwen3", 8, 3072, 9728, 24, 8, 130000, head_dim=128), (Step(4, 1220),), adapter=Adapter(32),
    ),
    "lora-llama-2816": Model(
        "lora", make_text("llama", 10, 2816, 9216, 22, 11, 80000), (Step(4, 1380),),
        adapter=Adapter(64, is_autocast=True),
    ),
    "lora-mistral-2304": Model(
        "lora", make_text("mistral", 12, 2304, 8192, 18, 6, 64000), (Step(5, 1220, "full"),), adapter=Adapter(8),
    ),
    "lora-smollm3-2560": Model(
        "lora", _SMOLLM, (Step(4, 1300), Step(1, 112, is_small=True)), adapter=Adapter(24),
    ),
    # vision-language
    "mistral3-2304": Model(
        "vision",
        resize("mistral-small-3.1-24b", (10, 20), hidden_size=2304, intermediate_size=8192, num_attention_heads=18,
               num_key_value_heads=6),
        (Step(4, 1300),), grids=((1, 40, 38),),
    ),
    "qwen3-vl-2816": Model(
        "vision",
        resize("qwen3-vl-4b", (9, 22), hidden_size=2816, intermediate_size=9216, num_attention_heads=22,
               num_key_value_heads=11),
        (Step(5, 1340),), grids=((1, 40, 42),),
    ),
    "gemma-3-1536": Model(
        "vision",
        resize("gemma-3-4b", (14, 22), hidden_size=1536, intermediate_size=6144, num_attention_heads=6,
               num_key_value_heads=2),
        (Step(4, 1220), Step(2, 980)), grids=((1, 64, 64),),
    ),
    "llava-1792": Model(
        "vision",
        resize("llava-1.5-7b", (12, 24), hidden_size=1792, intermediate_size=7168, num_attention_heads=14,
               num_key_value_heads=14),
        (Step(9, 1220),), grids=((1, 24, 24),),
    ),
    "idefics3-2560": Model("vision", _IDEFICS, (Step(6, 1260), Step(5, 980)), grids=((2, 26, 26),)),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "llama-2816 3x1070": ("llama-2816", 0, 0, 3, 1070, []),
    "granite-2560 3x990": ("granite-2560", 0, 0, 3, 990, []),
    "mistral-2304 2x1470": ("mistral-2304", 0, 0, 2, 1470, []),
    "qwen3-3072 1x1730": ("qwen3-3072", 0, 0, 1, 1730, []),
    "smollm3-2560 2x1210": ("smollm3-2560", 0, 0, 2, 1210, []),
    "granitemoe-2304 3x1110": ("granitemoe-2304", 0, 0, 3, 1110, []),
    "qwen3-moe-2816 2x1370": ("qwen3-moe-2816", 0, 0, 2, 1370, []),
    "olmoe-2560 2x1570": ("olmoe-2560", 0, 0, 2, 1570, []),
    "deepseek-v2-2048 3x1150": ("deepseek-v2-2048", 0, 0, 3, 1150, []),
    "mistral3-2304 2x810 image": ("mistral3-2304", 0, 0, 2, 810, [[1, 40, 38]]),
    "qwen3-vl-2816 2x990 image": ("qwen3-vl-2816", 0, 0, 2, 990, [[1, 40, 42]]),
    "llava-1792 4x830 image": ("llava-1792", 0, 0, 4, 830, [[1, 24, 24]]),
}
