"""Models and steps of the third blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No calibration, no fit of step times and no earlier blind test has timed one of them. Some presets lent their narrow
copies to the host's calibration (phi-3-medium, aya-23-8b, qwen1.5-moe-a2.7b, deepseek-v2-lite, qwen3-vl-2b,
paligemma-3b-448, gemma-3-12b); smollm3-3b ran as a host-bound step.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text

_ALL_OF_PHI = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_INTERNVL: Json = {
    "model_type": "internvl", "image_token_id": 90000, "tie_word_embeddings": False,
    "text_config": make_text("qwen2", 10, 1792, 6400, 14, 2, 96000),
    "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 896, "intermediate_size": 3584, "num_hidden_layers": 18,
        "num_attention_heads": 14, "image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True,
        "use_qk_norm": False, "norm_type": "layer_norm",
    },
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "qwen3-14b": Model("dense", "qwen3-14b", (Step(3, 1460), Step(1, 132, is_small=True)), (5, 0)),
    "yi-34b": Model("dense", "yi-34b", (Step(2, 1580), Step(2, 1340, "full")), (4, 0)),
    "phi-3-medium": Model("dense", "phi-3-medium", (Step(3, 1380), Step(1, 116, is_small=True)), (5, 0)),
    "stablelm-3b": Model("dense", "stablelm-3b", (Step(5, 1260), Step(1, 124, is_small=True)), (12, 0)),
    "aya-23-8b": Model("dense", "aya-23-8b", (Step(3, 1300), Step(1, 148, is_small=True)), (6, 0)),
    # experts
    "qwen1.5-moe-a2.7b": Model("experts", "qwen1.5-moe-a2.7b", (Step(5, 1300), Step(3, 1660)), (5, 0)),
    "deepseek-v2-lite": Model("experts", "deepseek-v2-lite", (Step(4, 1420), Step(3, 1740)), (5, 0)),
    "mixtral-1792": Model(
        "experts",
        make_text("mixtral", 5, 1792, 5376, 14, 7, 40000, num_local_experts=14, num_experts_per_tok=2,
                  sliding_window=None),
        (Step(5, 1260), Step(3, 1580)),
    ),
    "qwen3-moe-1280": Model(
        "experts",
        make_text("qwen3_moe", 6, 1280, 3840, 20, 4, 90000, head_dim=128, moe_intermediate_size=640, num_experts=80,
                  num_experts_per_tok=5, decoder_sparse_step=1, norm_topk_prob=True),
        (Step(6, 1300), Step(4, 1500)),
    ),
    "granitemoe-1792": Model(
        "experts",
        make_text("granitemoe", 8, 1792, 640, 14, 7, 49152, num_local_experts=36, num_experts_per_tok=6),
        (Step(6, 1220), Step(4, 1540)),
    ),
    # LoRA
    "lora-qwen3-14b": Model("lora", "qwen3-14b", (Step(3, 1420),), (5, 0), adapter=Adapter(16)),
    "lora-llama-3-8b": Model("lora", "llama-3-8b", (Step(3, 1380, "full"),), (8, 0), adapter=Adapter(128)),
    "lora-phi-3-mini": Model("lora", "phi-3-mini", (Step(4, 1460),), (10, 0), adapter=Adapter(32, _ALL_OF_PHI)),
    "lora-smollm3-3b": Model(
        "lora", "smollm3-3b", (Step(4, 1340),), (12, 0), adapter=Adapter(24, is_autocast=True)
    ),
    "lora-qwen2.5-3b": Model(
        "lora", "qwen2.5-3b", (Step(4, 1580), Step(1, 108, is_small=True)), (12, 0),
        adapter=Adapter(8, ("q_proj", "v_proj")),
    ),
    # vision-language
    "qwen3-vl-2b": Model("vision", "qwen3-vl-2b", (Step(5, 1220), Step(2, 860)), (12, 24), ((1, 40, 36),)),
    "qwen2-vl-72b": Model("vision", "qwen2-vl-72b", (Step(3, 1180), Step(1, 800)), (2, 20), ((1, 40, 36),)),
    "paligemma-3b-448": Model("vision", "paligemma-3b-448", (Step(3, 1420), Step(2, 1260)), (8, 24), ((1, 32, 32),)),
    "gemma-3-12b": Model("vision", "gemma-3-12b", (Step(3, 1180), Step(1, 740)), (5, 27), ((1, 64, 64),)),
    "internvl-1792": Model("vision", _INTERNVL, (Step(4, 1420), Step(2, 980)), grids=((2, 32, 32),)),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "qwen3-14b 1x1350": ("qwen3-14b", 0, 0, 1, 1350, []),
    "phi-3-medium 2x950": ("phi-3-medium", 0, 0, 2, 950, []),
    "yi-34b 1x1150": ("yi-34b", 0, 0, 1, 1150, []),
    "stablelm-3b 3x1050": ("stablelm-3b", 0, 0, 3, 1050, []),
    "aya-23-8b 2x800": ("aya-23-8b", 0, 0, 2, 800, []),
    "qwen1.5-moe-a2.7b 2x1450": ("qwen1.5-moe-a2.7b", 0, 0, 2, 1450, []),
    "deepseek-v2-lite 3x1250": ("deepseek-v2-lite", 0, 0, 3, 1250, []),
    "mixtral-1792 4x1150": ("mixtral-1792", 0, 0, 4, 1150, []),
    "granitemoe-1792 2x1700": ("granitemoe-1792", 0, 0, 2, 1700, []),
    "qwen2.5-vl-7b 2x900 image": ("qwen2.5-vl-7b", 3, 8, 2, 900, [[1, 34, 42]]),
    "paligemma-3b-448 2x1300 image": ("paligemma-3b-448", 0, 0, 2, 1300, [[1, 32, 32]]),
    "internvl-1792 3x1100 image": ("internvl-1792", 0, 0, 3, 1100, [[2, 32, 32]]),
}
