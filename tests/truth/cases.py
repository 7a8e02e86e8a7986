"""Per family: the configs and the (workload, recipe) pairs whose truth is recorded; record.py runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flopcalc.core.model.config import load_preset
from flopcalc.data import list_data_files

Json = dict[str, Any]
Case = tuple[Json, Json]  # workload, recipe


@dataclass(frozen=True)
class Names:
    """What a family calls the modules that recipes speak of."""

    attention: list[str]  # LoRA targets
    mlp: list[str]  # LoRA targets
    embeddings: list[str]
    first_layer: str
    head: str = "lm_head"
    norms: str = "*norm*"
    tower: list[str] = field(default_factory=list)  # the tower less its projector
    projector: list[str] = field(default_factory=list)
    language: list[str] = field(default_factory=list)  # with embeddings and head
    vision_lora: list[str] = field(default_factory=list)
    patches: str = "patch_embed.proj"  # a convolution that LoRA can wrap


@dataclass(frozen=True)
class Model:
    name: str
    config: Json
    names: Names
    cases: list[Case]
    published: bool = False


# --- Cases --------------------------------------------------------------------------------------------------


def _recipes(names: Names) -> Iterator[Json]:
    """What may train, with and without recomputation."""
    attention = {"lora": {"r": 4, "targets": names.attention}}
    every = {"lora": {"r": 3, "targets": "all-linear"}}
    mlp = {"lora": {"r": 5, "targets": names.mlp}}
    frozen = {"freeze": names.embeddings}
    yield from ({}, attention, every, mlp)
    yield {"lora": {"r": 2, "targets": names.attention[-1:], "save": [names.head]}}
    yield {"train_only": [names.head]}
    yield {"freeze": [names.first_layer]}
    yield frozen
    yield {"freeze": [*names.embeddings, names.first_layer]}
    yield {"train_only": [names.norms]}
    tables = {"lora": {"r": 2, "targets": [names.embeddings[0].rpartition(".")[2], names.head]}}
    yield tables
    yield {**attention, "freeze": [names.first_layer]}
    for recompute in ("full", "full-reentrant"):
        for base in ({}, attention, every, mlp, tables, frozen, {"freeze": [*names.embeddings, names.first_layer]}):
            yield {**base, "recompute": recompute}


def _text_cases(names: Names, packed: bool = True) -> list[Case]:
    train = {"batch": 2, "seq": 13, "phase": "train"}
    cases: list[Case] = [(train, recipe) for recipe in _recipes(names)]
    cases += [
        ({"batch": 1, "seq": 19, "phase": "train"}, {}),
        ({"batch": 3, "seq": 4, "phase": "train"}, {}),
        ({"batch": 2, "seq": 13, "phase": "forward"}, {}),
        ({"batch": 2, "seq": 13, "phase": "forward", "logits": "last"}, {}),
        ({"batch": 2, "seq": 13, "phase": "forward", "logits": 3}, {}),
        ({"batch": 2, "seq": 13, "phase": "prefill"}, {}),
        ({"batch": 2, "seq": 3, "phase": "decode", "context": 11}, {}),
        ({"batch": 1, "seq": 5, "phase": "decode", "context": 2}, {}),
        ({"seq": 14, "phase": "forward", "mask": [6, 11]}, {}),
        ({"seq": 14, "phase": "train", "mask": [6, 11]}, {}),
    ]
    if packed:
        cases.append(({"phase": "forward", "lengths": [5, 9]}, {}))
        cases.append(({"phase": "train", "lengths": [3, 1, 8]}, {}))
    return cases


def _vision_cases(names: Names, image: Json, two: Json, decode: Json, video: Json | None = None) -> list[Case]:
    """`image`, `two`, `video`: workloads without a phase."""
    train = {**image, "phase": "train"}
    recipes = list(_recipes(names))
    recipes += [
        {"freeze": names.tower},
        {"freeze": [*names.tower, *names.projector]},
        {"train_only": names.projector},
        {"train_only": names.tower},
        {"freeze": names.language},
        {"lora": {"r": 4, "targets": names.vision_lora}},
        {"lora": {"r": 4, "targets": [names.patches]}},
        {"lora": {"r": 3, "targets": "all-linear"}, "freeze": names.tower},
    ]
    for recompute in ("full", "full-reentrant"):
        recipes += [
            {"freeze": [*names.tower, *names.projector], "recompute": recompute},
            {"train_only": names.projector, "recompute": recompute},
            {"lora": {"r": 4, "targets": names.vision_lora}, "recompute": recompute},
        ]
    cases: list[Case] = [(train, recipe) for recipe in recipes]
    cases += [
        ({**two, "phase": "train"}, {}),
        ({**two, "phase": "train"}, {"recompute": "full"}),
        ({**two, "phase": "forward"}, {}),
        ({**image, "phase": "forward"}, {}),
        ({**image, "phase": "forward", "logits": "last"}, {}),
        ({**image, "phase": "prefill"}, {}),
        ({**decode, "phase": "decode"}, {}),
        ({"batch": 2, "seq": 3, "phase": "decode", "context": 11}, {}),
        ({"batch": 2, "seq": 11, "phase": "train"}, {}),
        ({"batch": 2, "seq": 11, "phase": "forward"}, {}),
        ({"batch": 2, "seq": 11, "phase": "train"}, {"recompute": "full"}),
        ({"seq": 14, "phase": "forward", "mask": [6, 11]}, {}),
    ]
    if video:
        cases += [({**video, "phase": "train"}, {}), ({**video, "phase": "forward"}, {})]
        cases.append(({**image, "seq": image["seq"] + video["seq"], "videos": video["videos"], "phase": "train"}, {}))
    return cases


def _published_cases(names: Names, workload: Json) -> list[Case]:
    train = {**workload, "phase": "train"}
    recipes: list[Json] = [
        {},
        {"lora": {"r": 16, "targets": names.attention}},
        {"lora": {"r": 8, "targets": "all-linear"}},
        {"lora": {"r": 8, "targets": names.mlp}},
        {"train_only": [names.head]},
        {"recompute": "full"},
    ]
    if names.tower:
        recipes += [{"freeze": names.tower}, {"train_only": names.projector}]
    cases: list[Case] = [(train, recipe) for recipe in recipes]
    return [*cases, ({**workload, "phase": "forward"}, {}), ({**workload, "phase": "forward", "logits": "last"}, {})]


# --- Names --------------------------------------------------------------------------------------------------

_SWIGLU = ["gate_proj", "up_proj", "down_proj"]
_LLAMA = Names(["q_proj", "v_proj"], _SWIGLU, ["model.embed_tokens"], "model.layers.0")
_PHI3 = Names(["qkv_proj"], ["gate_up_proj", "down_proj"], ["model.embed_tokens"], "model.layers.0")
_GPT2 = Names(
    ["c_attn"], ["c_fc", "mlp.c_proj"], ["transformer.wte", "transformer.wpe"], "transformer.h.0", norms="*ln_*"
)
_NEOX = Names(["query_key_value"], ["dense_h_to_4h", "dense_4h_to_h"], ["gpt_neox.embed_in"], "gpt_neox.layers.0")
_NO_DENSE = Names(["q_proj", "v_proj"], ["k_proj", "o_proj"], ["model.embed_tokens"], "model.layers.0")
_MLA = Names(["q_b_proj", "kv_b_proj"], _SWIGLU, ["model.embed_tokens"], "model.layers.0")
_MLA_PLAIN_Q = Names(["q_proj", "kv_a_proj_with_mqa"], _SWIGLU, ["model.embed_tokens"], "model.layers.0")
_QWEN_VL = Names(
    ["q_proj", "v_proj"],
    _SWIGLU,
    ["model.language_model.embed_tokens"],
    "model.language_model.layers.0",
    tower=["model.visual.patch_embed", "model.visual.blocks"],
    projector=["model.visual.merger"],
    language=["model.language_model", "lm_head"],
    vision_lora=["attn.qkv", "attn.proj"],
)
_QWEN3_VL = Names(
    ["q_proj", "v_proj"],
    _SWIGLU,
    ["model.language_model.embed_tokens"],
    "model.language_model.layers.0",
    tower=["model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"],
    projector=["model.visual.merger", "model.visual.deepstack_merger_list"],
    language=["model.language_model", "lm_head"],
    vision_lora=["attn.qkv", "linear_fc1"],
)
_LLAVA = Names(
    ["q_proj", "v_proj"],
    _SWIGLU,
    ["model.language_model.embed_tokens"],
    "model.language_model.layers.0",
    tower=["model.vision_tower"],
    projector=["model.multi_modal_projector"],
    language=["model.language_model", "lm_head"],
    vision_lora=["out_proj", "fc1"],
    patches="patch_embedding",
)

# --- Configs ------------------------------------------------------------------------------------------------


def _c(model_type: str, layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int, **rest: Any) -> Json:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **rest,
    }


def _text(name: str, config: Json, names: Names, packed: bool = True) -> Model:
    return Model(name, config, names, _text_cases(names, packed))


def _big(preset: str, names: Names, **workload: Any) -> Model:
    """A published size: the dims of a preset, and the rotary sections that HF needs to run it (they cost nothing)."""
    config = load_preset(list_data_files("presets")[preset]).config
    if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        config = {**config, "rope_scaling": _mrope(16, 24, 24)}
    elif config["model_type"] == "qwen3_vl":
        config = {**config, "text_config": {**config["text_config"], "rope_scaling": _mrope_interleaved(24, 20, 20)}}
    return Model(preset, config, names, _published_cases(names, {"batch": 1, "seq": 67, **workload}), published=True)


_TOKENS = {"image_token_id": 97, "video_token_id": 98, "vision_start_token_id": 95, "vision_end_token_id": 96}


def _qwen_vl(model_type: str, text: Json, vision: Json, **rest: Any) -> Json:
    text = {**text, "model_type": f"{model_type}_text"}
    return {"model_type": model_type, "text_config": text, "vision_config": vision, **_TOKENS, **rest}


def _mrope(*sections: int) -> Json:
    return {"type": "mrope", "mrope_section": list(sections)}


def _mrope_interleaved(*sections: int) -> Json:
    return {"rope_type": "default", "mrope_interleaved": True, "mrope_section": list(sections)}


def _clip(layers: int, hidden: int, inner: int, heads: int, image: int, patch: int) -> Json:
    return {
        "model_type": "clip_vision_model",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
        "projection_dim": hidden,
    }


_MIX = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_QWEN2_VL_IMAGES = (
    {"batch": 2, "seq": 17, "images": [[1, 4, 6]]},
    {"batch": 1, "seq": 29, "images": [[1, 4, 6], [1, 2, 10]]},
    {"batch": 2, "seq": 3, "context": 17, "images": [[1, 4, 6]]},
    {"batch": 1, "seq": 19, "videos": [[3, 4, 4]]},
)
_QWEN25_VL_IMAGES = (
    {"batch": 2, "seq": 21, "images": [[1, 6, 10]]},
    {"batch": 1, "seq": 43, "images": [[1, 6, 10], [1, 8, 10]]},
    {"batch": 2, "seq": 3, "context": 21, "images": [[1, 6, 10]]},
    {"batch": 1, "seq": 37, "videos": [[2, 6, 10]]},
)


def _llava_images(side: int) -> tuple[Json, Json, Json]:
    grid, tokens = [1, side, side], side * side
    return (
        {"batch": 2, "seq": tokens + 6, "images": [grid]},
        {"batch": 1, "seq": 2 * tokens + 5, "images": [grid, grid]},
        {"batch": 2, "seq": 3, "context": tokens + 6, "images": [grid]},
    )


def _vlm(name: str, config: Json, names: Names, workloads: tuple[Json, ...]) -> Model:
    return Model(name, config, names, _vision_cases(names, *workloads))


FAMILIES: dict[str, list[Model]] = {
    "llama": [
        _text("tiny-a", _c("llama", 3, 24, 41, 4, 2, 101, head_dim=10), _LLAMA),
        _text(
            "tiny-b",
            _c("llama", 4, 36, 50, 6, 3, 89, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
            _LLAMA,
        ),
        _big("llama-3.1-8b", _LLAMA),
    ],
    "mistral": [
        _text("tiny-a", _c("mistral", 3, 24, 42, 4, 1, 97, head_dim=8, sliding_window=5), _LLAMA),
        _text("tiny-b", _c("mistral", 4, 30, 38, 3, 3, 103, sliding_window=None, tie_word_embeddings=True), _LLAMA),
        _big("mistral-7b-v0.1", _LLAMA),
    ],
    "qwen2": [
        _text(
            "tiny-a",
            _c("qwen2", 4, 24, 42, 4, 2, 97, use_sliding_window=True, sliding_window=5, max_window_layers=2),
            _LLAMA,
        ),
        _text("tiny-b", _c("qwen2", 3, 30, 38, 5, 5, 103, tie_word_embeddings=True), _LLAMA),
        _big("qwen2-7b", _LLAMA),
    ],
    "qwen3": [
        _text("tiny-a", _c("qwen3", 3, 24, 42, 4, 2, 97, head_dim=10, attention_bias=True), _LLAMA),
        _text(
            "tiny-b",
            _c(
                "qwen3",
                4,
                30,
                38,
                3,
                1,
                103,
                head_dim=8,
                tie_word_embeddings=True,
                use_sliding_window=True,
                sliding_window=5,
                layer_types=_MIX,
            ),
            _LLAMA,
        ),
        _big("qwen3-8b", _LLAMA),
    ],
    "gemma2": [
        _text("tiny-a", _c("gemma2", 4, 24, 42, 4, 2, 97, head_dim=8, sliding_window=5), _LLAMA),
        _text(
            "tiny-b",
            _c(
                "gemma2",
                3,
                30,
                38,
                3,
                3,
                103,
                head_dim=12,
                sliding_window=7,
                attention_bias=True,
                tie_word_embeddings=False,
            ),
            _LLAMA,
        ),
        _big("gemma-2-2b", _LLAMA),
    ],
    "gemma3_text": [
        _text(
            "tiny-a",
            _c("gemma3_text", 5, 24, 42, 4, 2, 97, head_dim=8, sliding_window=5, sliding_window_pattern=3),
            _LLAMA,
        ),
        _text(
            "tiny-b",
            _c(
                "gemma3_text",
                4,
                30,
                38,
                3,
                1,
                103,
                head_dim=12,
                sliding_window=4,
                layer_types=_MIX,
                attention_bias=True,
                tie_word_embeddings=False,
            ),
            _LLAMA,
        ),
        _big("gemma-3-1b", _LLAMA),
    ],
    "phi3": [
        _text("tiny-a", _c("phi3", 3, 24, 42, 4, 2, 97, sliding_window=5, pad_token_id=0, eos_token_id=1), _PHI3),
        _text(
            "tiny-b",
            _c("phi3", 4, 30, 38, 3, 3, 103, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True, resid_pdrop=0.1),
            _PHI3,
        ),
        _big("phi-3-mini", _PHI3),
    ],
    "gpt2": [
        _text(
            "tiny-a",
            {"model_type": "gpt2", "n_layer": 3, "n_embd": 24, "n_head": 4, "n_positions": 40, "vocab_size": 97},
            _GPT2,
        ),
        _text(
            "tiny-b",
            {
                "model_type": "gpt2",
                "n_layer": 4,
                "n_embd": 30,
                "n_head": 3,
                "n_positions": 32,
                "vocab_size": 103,
                "n_inner": 50,
                "tie_word_embeddings": False,
                "resid_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "embd_pdrop": 0.0,
            },
            _GPT2,
        ),
        _big("gpt2", _GPT2),
    ],
    "gpt_neox": [
        _text(
            "tiny-a",
            {
                "model_type": "gpt_neox",
                "num_hidden_layers": 3,
                "hidden_size": 32,
                "intermediate_size": 50,
                "num_attention_heads": 4,
                "vocab_size": 97,
            },
            _NEOX,
        ),
        _text(
            "tiny-b",
            {
                "model_type": "gpt_neox",
                "num_hidden_layers": 4,
                "hidden_size": 24,
                "intermediate_size": 70,
                "num_attention_heads": 3,
                "vocab_size": 103,
                "use_parallel_residual": False,
                "attention_bias": False,
                "rotary_pct": 0.5,
                "tie_word_embeddings": True,
                "hidden_dropout": 0.1,
            },
            _NEOX,
        ),
        _big("gpt-neox-20b", _NEOX),
    ],
    # grouped_mm, HF's default for experts, wants rows of a multiple of 16 bytes: widths are multiples of 4.
    "mixtral": [
        _text(
            "tiny-a",
            _c("mixtral", 3, 24, 44, 4, 2, 97, num_local_experts=5, num_experts_per_tok=2, sliding_window=5),
            _NO_DENSE,
        ),
        _text(
            "tiny-b",
            _c(
                "mixtral",
                4,
                36,
                28,
                3,
                1,
                103,
                head_dim=8,
                num_local_experts=4,
                num_experts_per_tok=3,
                tie_word_embeddings=True,
            ),
            _NO_DENSE,
        ),
        _big("mixtral-8x7b", _NO_DENSE),
    ],
    "qwen3_moe": [
        _text(
            "tiny-a",
            _c(
                "qwen3_moe",
                5,
                24,
                44,
                4,
                2,
                97,
                head_dim=10,
                num_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=12,
                decoder_sparse_step=2,
                mlp_only_layers=[3],
            ),
            _NO_DENSE,
        ),
        _text(
            "tiny-b",
            _c(
                "qwen3_moe",
                3,
                36,
                28,
                3,
                1,
                103,
                head_dim=8,
                num_experts=5,
                num_experts_per_tok=4,
                moe_intermediate_size=20,
                norm_topk_prob=True,
                attention_bias=True,
                tie_word_embeddings=True,
            ),
            _NO_DENSE,
        ),
        _big("qwen3-30b-a3b", _NO_DENSE),
    ],
    "deepseek_v3": [
        _text(
            "tiny-a",
            _c(
                "deepseek_v3",
                4,
                24,
                44,
                4,
                4,
                97,
                moe_intermediate_size=12,
                n_routed_experts=8,
                n_shared_experts=2,
                num_experts_per_tok=3,
                n_group=4,
                topk_group=2,
                first_k_dense_replace=1,
                q_lora_rank=10,
                kv_lora_rank=12,
                qk_nope_head_dim=6,
                qk_rope_head_dim=4,
                v_head_dim=7,
            ),
            _MLA,
        ),
        _text(
            "tiny-b",
            _c(
                "deepseek_v3",
                5,
                36,
                28,
                3,
                3,
                103,
                moe_intermediate_size=20,
                n_routed_experts=6,
                n_shared_experts=1,
                num_experts_per_tok=2,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=2,
                q_lora_rank=None,
                kv_lora_rank=9,
                qk_nope_head_dim=4,
                qk_rope_head_dim=6,
                v_head_dim=8,
                attention_bias=True,
            ),
            _MLA_PLAIN_Q,
        ),
        _big("deepseek-v3", _MLA),
    ],
    "qwen2_vl": [
        _vlm(
            "tiny-a",
            _qwen_vl(
                "qwen2_vl",
                _c("", 3, 24, 42, 3, 1, 101, rope_scaling=_mrope(1, 1, 2)),
                {"depth": 3, "embed_dim": 32, "hidden_size": 24, "mlp_ratio": 3, "num_heads": 4, "patch_size": 4},
            ),
            _QWEN_VL,
            _QWEN2_VL_IMAGES,
        ),
        _vlm(
            "tiny-b",
            _qwen_vl(
                "qwen2_vl",
                _c("", 4, 32, 38, 4, 2, 105, rope_scaling=_mrope(2, 1, 1)),
                {
                    "depth": 4,
                    "embed_dim": 16,
                    "hidden_size": 32,
                    "mlp_ratio": 4,
                    "num_heads": 2,
                    "patch_size": 2,
                    "temporal_patch_size": 1,
                    "in_channels": 1,
                },
                tie_word_embeddings=True,
            ),
            _QWEN_VL,
            _QWEN2_VL_IMAGES,
        ),
        _big("qwen2-vl-7b", _QWEN_VL, images=[[1, 8, 12]]),
    ],
    "qwen2_5_vl": [
        _vlm(
            "tiny-a",
            _qwen_vl(
                "qwen2_5_vl",
                _c("", 3, 24, 42, 3, 1, 101, rope_scaling=_mrope(1, 1, 2)),
                {
                    "depth": 4,
                    "hidden_size": 32,
                    "intermediate_size": 50,
                    "num_heads": 4,
                    "patch_size": 4,
                    "window_size": 16,
                    "fullatt_block_indexes": [1, 2],
                    "out_hidden_size": 24,
                },
            ),
            _QWEN_VL,
            _QWEN25_VL_IMAGES,
        ),
        _vlm(
            "tiny-b",
            _qwen_vl(
                "qwen2_5_vl",
                _c("", 4, 32, 38, 4, 2, 105, rope_scaling=_mrope(2, 1, 1)),
                {
                    "depth": 3,
                    "hidden_size": 16,
                    "intermediate_size": 30,
                    "num_heads": 2,
                    "patch_size": 2,
                    "window_size": 12,
                    "fullatt_block_indexes": [1],
                    "out_hidden_size": 32,
                    "temporal_patch_size": 1,
                },
                tie_word_embeddings=True,
            ),
            _QWEN_VL,
            _QWEN25_VL_IMAGES,
        ),
        _big("qwen2.5-vl-7b", _QWEN_VL, seq=97, images=[[1, 12, 22]]),
    ],
    "qwen3_vl": [
        _vlm(
            "tiny-a",
            _qwen_vl(
                "qwen3_vl",
                _c("", 4, 24, 42, 3, 1, 101, head_dim=12, rope_scaling=_mrope_interleaved(2, 2, 2)),
                {
                    "depth": 4,
                    "hidden_size": 32,
                    "intermediate_size": 50,
                    "num_heads": 4,
                    "patch_size": 4,
                    "out_hidden_size": 24,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0, 2],
                },
            ),
            _QWEN3_VL,
            _QWEN2_VL_IMAGES,
        ),
        _vlm(
            "tiny-b",
            _qwen_vl(
                "qwen3_vl",
                _c("", 3, 32, 38, 4, 2, 105, head_dim=8, attention_bias=True, rope_scaling=_mrope_interleaved(2, 1, 1)),
                {
                    "depth": 3,
                    "hidden_size": 16,
                    "intermediate_size": 30,
                    "num_heads": 2,
                    "patch_size": 2,
                    "out_hidden_size": 32,
                    "num_position_embeddings": 25,
                    "deepstack_visual_indexes": [1],
                    "temporal_patch_size": 1,
                },
                tie_word_embeddings=True,
            ),
            _QWEN3_VL,
            _QWEN2_VL_IMAGES,
        ),
        _big("qwen3-vl-8b", _QWEN3_VL, images=[[1, 8, 12]]),
    ],
    "llava": [
        _vlm(
            "tiny-a",
            {
                "model_type": "llava",
                "text_config": _c("llama", 3, 24, 42, 4, 2, 101),
                "vision_config": _clip(4, 32, 50, 4, 12, 4),
                "image_token_index": 97,
                "vision_feature_layer": -2,
            },
            _LLAVA,
            _llava_images(3),
        ),
        _vlm(
            "tiny-b",
            {
                "model_type": "llava",
                "text_config": _c("llama", 4, 30, 38, 3, 1, 105, tie_word_embeddings=True),
                "vision_config": _clip(3, 20, 36, 2, 8, 2),
                "image_token_index": 97,
                "vision_feature_layer": -1,
                "multimodal_projector_bias": False,
            },
            _LLAVA,
            _llava_images(4),
        ),
        _big("llava-1.5-7b", _LLAVA, seq=601, images=[[1, 24, 24]]),
    ],
}
