"""Models and steps of the blind test in blind_steps.py: five each of dense, experts, LoRA and vision-language.

No fit and no earlier test has seen one of these sizes. Presets keep their widths and lose layers; the others are
configs of our own, between published sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Json = dict[str, Any]
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapter(NamedTuple):
    """A LoRA of PEFT."""

    rank: int
    targets: tuple[str, ...] = _ALL
    is_autocast: bool = False


class Step(NamedTuple):
    """One training step; a small one is timed between runs of the probe."""

    batch: int
    seq: int
    recompute: str = "none"
    is_small: bool = False


class Model(NamedTuple):
    """A preset with fewer layers (text, vision) or a config, and its steps."""

    kind: str  # dense, experts, lora, vision
    source: str | Json
    steps: tuple[Step, ...]
    layers: tuple[int, int] = (0, 0)
    grids: tuple[tuple[int, int, int], ...] = ()  # images of each sample, in patches
    adapter: Adapter | None = None


def make_text(kind: str, layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int, **rest: Any) -> Json:
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, **rest,
    }  # fmt: skip


_INTERNVL: Json = {
    "model_type": "internvl", "image_token_id": 90000, "tie_word_embeddings": False,
    "text_config": make_text("qwen2", 10, 2048, 7168, 16, 4, 92000),
    "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20,
        "num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True,
        "use_qk_norm": False, "norm_type": "layer_norm",
    },
}  # fmt: skip

MODELS: dict[str, Model] = {
    # dense
    "olmo-3-7b": Model("dense", "olmo-3-7b", (Step(3, 1720), Step(1, 112, is_small=True)), (6, 0)),
    "phi-4-mini": Model("dense", "phi-4-mini", (Step(4, 1240), Step(1, 120, is_small=True)), (10, 0)),
    "granite-2304": Model(
        "dense", make_text("granite", 14, 2304, 6912, 18, 6, 49152), (Step(5, 1460), Step(1, 136, is_small=True))
    ),
    "glm4-3072": Model(
        "dense", make_text("glm4", 8, 3072, 10240, 24, 4, 96000, head_dim=128, attention_bias=True),
        (Step(4, 1560), Step(2, 1560, "full")),
    ),
    "qwen3-1792": Model(
        "dense", make_text("qwen3", 16, 1792, 5376, 14, 7, 120000, head_dim=128),
        (Step(6, 1180), Step(1, 128, is_small=True)),
    ),
    # experts
    "granite-3.0-3b-a800m": Model("experts", "granite-3.0-3b-a800m", (Step(6, 1240), Step(4, 1460)), (10, 0)),
    "qwen2-moe-1792": Model(
        "experts",
        make_text("qwen2_moe", 5, 1792, 4864, 14, 14, 100000, moe_intermediate_size=1152, num_experts=48,
              num_experts_per_tok=4, shared_expert_intermediate_size=4608, decoder_sparse_step=1),
        (Step(4, 1720), Step(3, 2260)),
    ),
    "deepseek-v3-1536": Model(
        "experts",
        make_text("deepseek_v3", 5, 1536, 6144, 12, 12, 96000, moe_intermediate_size=768, n_routed_experts=48,
              n_shared_experts=1, num_experts_per_tok=6, n_group=4, topk_group=2, first_k_dense_replace=1,
              q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        (Step(5, 1460), Step(3, 1720, "full")),
    ),
    "olmoe-1280": Model(
        "experts", make_text("olmoe", 7, 1280, 640, 10, 10, 50304, num_experts=40, num_experts_per_tok=5),
        (Step(7, 1180), Step(4, 1720)),
    ),
    "mixtral-2560": Model(
        "experts",
        make_text("mixtral", 4, 2560, 6400, 20, 5, 32000, num_local_experts=12, num_experts_per_tok=3,
              sliding_window=None),
        (Step(4, 1460), Step(3, 1240)),
    ),
    # LoRA
    "lora-llama-3.2-3b": Model(
        "lora", "llama-3.2-3b", (Step(4, 1720), Step(4, 1720, "full")), (14, 0), adapter=Adapter(32)
    ),
    "lora-mistral-nemo-12b": Model(
        "lora", "mistral-nemo-12b", (Step(3, 1460),), (6, 0), adapter=Adapter(8, ("q_proj", "v_proj"))
    ),
    "lora-qwen2.5-7b": Model(
        "lora", "qwen2.5-7b", (Step(4, 1240, "full"), Step(1, 96, is_small=True)), (8, 0), adapter=Adapter(64)
    ),
    "lora-gemma-7b": Model(
        "lora", "gemma-7b", (Step(3, 1560),), (7, 0), adapter=Adapter(16, is_autocast=True)
    ),
    "lora-qwen3-8b": Model(
        "lora", "qwen3-8b", (Step(4, 1180),), (8, 0), adapter=Adapter(24, ("q_proj", "k_proj", "v_proj", "o_proj"))
    ),
    # vision-language
    "qwen2-vl-7b": Model(
        "vision", "qwen2-vl-7b", (Step(4, 1240), Step(1, 760)), (6, 24), ((1, 44, 32),)
    ),
    "qwen3-vl-4b": Model("vision", "qwen3-vl-4b", (Step(4, 1340), Step(2, 900)), (10, 24), ((1, 40, 44),)),
    "gemma-3-4b": Model("vision", "gemma-3-4b", (Step(3, 1560), Step(2, 620)), (9, 27), ((1, 64, 64),)),
    "internvl-2048": Model("vision", _INTERNVL, (Step(4, 1500), Step(2, 840)), grids=((2, 32, 32),)),
    "llava-1.5-13b": Model("vision", "llava-1.5-13b", (Step(4, 1120), Step(2, 740)), (4, 24), ((1, 24, 24),)),
}  # fmt: skip


def take_turns(models: dict[str, Model]) -> list[str]:
    """Order of a run: the kinds take turns, so that a run that is cut short has some of each."""
    kinds = [[name for name, model in models.items() if model.kind == kind]
             for kind in ("dense", "experts", "lora", "vision")]  # fmt: skip
    return [name for turn in zip(*kinds, strict=True) for name in turn]


# Steps whose executed FLOPs are counted: model above or preset, layers (text, vision), batch, length, patches.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "granite-2304 3x1150": ("granite-2304", 0, 0, 3, 1150, []),
    "qwen3-1792 1x1330": ("qwen3-1792", 0, 0, 1, 1330, []),
    "qwen2.5-1.5b 2x1700": ("qwen2.5-1.5b", 7, 0, 2, 1700, []),
    "llama-3.1-8b 1x1250": ("llama-3.1-8b", 2, 0, 1, 1250, []),
    "phi-3-mini 2x950": ("phi-3-mini", 4, 0, 2, 950, []),
    "gpt2-large 4x650": ("gpt2-large", 8, 0, 4, 650, []),
    "olmoe-1280 2x1450": ("olmoe-1280", 0, 0, 2, 1450, []),
    "mixtral-2560 2x1100": ("mixtral-2560", 0, 0, 2, 1100, []),
    "qwen2-moe-1792 3x900": ("qwen2-moe-1792", 0, 0, 3, 900, []),
    "deepseek-v3-1536 1x1700": ("deepseek-v3-1536", 0, 0, 1, 1700, []),
    "qwen2.5-vl-3b 2x800 image": ("qwen2.5-vl-3b", 5, 8, 2, 800, [[1, 30, 44]]),
    "gemma-3-4b 1x900 image": ("gemma-3-4b", 4, 8, 1, 900, [[1, 64, 64]]),
}

# Decoding: preset and layers.
DECODED = (("qwen2.5-1.5b", 28), ("mistral-7b", 8))
