"""Models and steps of the seventh blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No calibration, no fit of step times and no earlier test has timed one of them. All types but those of LoRA were never
timed on a GPU before, except by small steps of narrow models (host_types.py). Presets keep their widths; the others are
configs of our own.
"""

from __future__ import annotations

from blind_models import Adapter, Json, Model, Step, make_text


def make_tower(kind: str, layers: int, width: int, inner: int, image: int, patch: int, **rest: object) -> Json:
    return {"model_type": kind, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": 16, "image_size": image, "patch_size": patch, **rest}  # fmt: skip


_SMOLVLM: Json = {
    "model_type": "smolvlm", "image_token_id": 49000, "scale_factor": 4, "tie_word_embeddings": False,
    "text_config": make_text("llama", 10, 2048, 8192, 32, 32, 49280),
    "vision_config": make_tower("smolvlm_vision", 20, 1152, 4304, 512, 16),
}  # fmt: skip
_IDEFICS: Json = {
    "model_type": "idefics3", "image_token_id": 90000, "scale_factor": 2, "tie_word_embeddings": False,
    "text_config": make_text("llama", 6, 3072, 8192, 24, 8, 94000),
    "vision_config": make_tower("idefics3_vision", 20, 1152, 4304, 364, 14),
}  # fmt: skip
_AYA: Json = {
    "model_type": "aya_vision", "image_token_index": 90000, "downsample_factor": 2, "tie_word_embeddings": True,
    "text_config": make_text("cohere2", 8, 2560, 8192, 20, 4, 94000, sliding_window=4096, head_dim=128,
                             logit_scale=0.25, bos_token_id=5, eos_token_id=6, pad_token_id=0),
    "vision_config": make_tower("siglip_vision_model", 24, 1152, 4304, 364, 14, vision_use_head=False),
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "command-r7b": Model("dense", "command-r7b", (Step(3, 1260), Step(1, 120, is_small=True)), (8, 0)),
    "exaone-4.0-32b": Model("dense", "exaone-4.0-32b", (Step(3, 1380), Step(1, 136, is_small=True)), (4, 0)),
    "seed-oss-36b": Model("dense", "seed-oss-36b", (Step(3, 1180), Step(2, 1340, "full")), (4, 0)),
    "nemotron-3584": Model(
        "dense",
        make_text("nemotron", 8, 3584, 14336, 28, 4, 128000, hidden_act="relu2", partial_rotary_factor=0.5),
        (Step(4, 1220), Step(1, 128, is_small=True)),
    ),
    "arcee-2560": Model(
        "dense", make_text("arcee", 12, 2560, 18432, 20, 4, 128000, hidden_act="relu2"),
        (Step(4, 1300), Step(1, 144, is_small=True)),
    ),
    # experts
    "glm-4.5-air": Model("experts", "glm-4.5-air", (Step(3, 1420), Step(2, 1660)), (3, 0)),
    "phi-3.5-moe": Model("experts", "phi-3.5-moe", (Step(3, 1300), Step(2, 1580)), (3, 0)),
    "minimax-m2": Model("experts", "minimax-m2", (Step(4, 1340), Step(3, 1620)), (2, 0)),
    "dots1-2048": Model(
        "experts",
        make_text("dots1", 5, 2048, 5632, 16, 16, 100000, head_dim=128, n_routed_experts=64, n_group=1, topk_group=1,
                  first_k_dense_replace=1, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=896),
        (Step(4, 1380), Step(3, 1740)),
    ),
    "ernie-moe-2560": Model(
        "experts",
        make_text("ernie4_5_moe", 5, 2560, 8192, 20, 4, 100000, moe_num_experts=48, moe_k=6, moe_intermediate_size=1536,
                  moe_num_shared_experts=2, moe_layer_start_index=1),
        (Step(4, 1420), Step(3, 1540)),
    ),
    # LoRA
    "lora-command-r7b": Model("lora", "command-r7b", (Step(3, 1300),), (8, 0), adapter=Adapter(16)),
    "lora-seed-oss-36b": Model("lora", "seed-oss-36b", (Step(3, 1220, "full"),), (4, 0), adapter=Adapter(32)),
    "lora-qwen2.5-72b": Model("lora", "qwen2.5-72b", (Step(2, 1460),), (3, 0), adapter=Adapter(16, is_autocast=True)),
    "lora-mistral-small-24b": Model("lora", "mistral-small-24b", (Step(3, 1340),), (5, 0), adapter=Adapter(64)),
    "lora-codellama-7b": Model(
        "lora", "codellama-7b", (Step(4, 1260), Step(1, 120, is_small=True)), (8, 0), adapter=Adapter(8),
    ),
    # vision-language
    "mistral-small-3.1-24b": Model(
        "vision", "mistral-small-3.1-24b", (Step(3, 1180), Step(2, 760)), (4, 20), ((1, 36, 40),),
    ),
    "qwen3-vl-30b-a3b": Model("vision", "qwen3-vl-30b-a3b", (Step(4, 1260), Step(2, 840)), (4, 27), ((1, 40, 40),)),
    "smolvlm-2048": Model("vision", _SMOLVLM, (Step(5, 1140), Step(3, 740)), grids=((3, 32, 32),)),
    "idefics3-3072": Model("vision", _IDEFICS, (Step(4, 1220), Step(2, 880)), grids=((2, 26, 26),)),
    "aya-vision-2560": Model("vision", _AYA, (Step(4, 1260), Step(3, 900)), grids=((2, 26, 26),)),
}  # fmt: skip

# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "command-r7b 2x930": ("command-r7b", 0, 0, 2, 930, []),
    "exaone-4.0-32b 1x1270": ("exaone-4.0-32b", 0, 0, 1, 1270, []),
    "seed-oss-36b 2x710": ("seed-oss-36b", 0, 0, 2, 710, []),
    "nemotron-3584 3x850": ("nemotron-3584", 0, 0, 3, 850, []),
    "arcee-2560 1x1490": ("arcee-2560", 0, 0, 1, 1490, []),
    "glm-4.5-air 2x1150": ("glm-4.5-air", 0, 0, 2, 1150, []),
    "phi-3.5-moe 1x1310": ("phi-3.5-moe", 0, 0, 1, 1310, []),
    "minimax-m2 3x1030": ("minimax-m2", 0, 0, 3, 1030, []),
    "dots1-2048 2x1430": ("dots1-2048", 0, 0, 2, 1430, []),
    "ernie-moe-2560 3x970": ("ernie-moe-2560", 0, 0, 3, 970, []),
    "mistral-small-3.1-24b 2x690 image": ("mistral-small-3.1-24b", 0, 0, 2, 690, [[1, 36, 40]]),
    "smolvlm-2048 2x810 image": ("smolvlm-2048", 0, 0, 2, 810, [[3, 32, 32]]),
}
