"""Values that no count can be made of are refused in one line; whatever no count reads is taken."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.data import find_data_dir, list_data_files
from flopcalc.base.errors import ConfigError, WorkloadError

Json = dict[str, Any]
LLAMA: Json = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
BERT: Json = {**LLAMA, "model_type": "bert"}
VISION: Json = {
    "model_type": "qwen2_5_vl",
    "text_config": {**LLAMA, "model_type": "qwen2_5_vl_text", "num_key_value_heads": 2,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "vision_config": {"model_type": "qwen2_5_vl_vision", "depth": 2, "hidden_size": 32, "num_heads": 4,
                      "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 2},
}  # fmt: skip
MOE: Json = {
    **LLAMA, "model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip

SPARSE: Json = {
    **LLAMA, "model_type": "minimax_m3_vl_text", "head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sparse_attention_config": {"sparse_attention_freq": [0, 1], "sparse_num_index_heads": 2},
}  # fmt: skip
XLSTM: Json = {"model_type": "xlstm", "hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
LONGCAT: Json = {
    **LLAMA, "model_type": "longcat_flash", "num_layers": 2, "ffn_hidden_size": 64, "n_routed_experts": 4,
    "zero_expert_num": 2, "moe_topk": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "head_dim": 8,
}  # fmt: skip
SEGFORMER: Json = {
    "model_type": "segformer", "num_encoder_blocks": 2, "depths": [1, 2], "sr_ratios": [2, 1], "hidden_sizes": [6, 8],
    "patch_sizes": [5, 3], "strides": [3, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
T5: Json = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 100,
}
GPTJ: Json = {"model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100}
MAMBA: Json = {
    **LLAMA, "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2,
}  # fmt: skip
GPT_NEO: Json = {"model_type": "gpt_neo", "hidden_size": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 100}
LONGFORMER: Json = {**BERT, "model_type": "longformer", "attention_window": 8}
GEMMA4: Json = {
    **LLAMA, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
}  # fmt: skip
JAMBA: Json = {**LLAMA, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {**LLAMA, "num_key_value_heads": 64.5},
            "kv_heads = kv must be a whole number, not 64.5 (num_attention_heads is 4, num_key_value_heads is 64.5)",
        ),
        ({**LLAMA, "hidden_size": 64.0}, "dim = d must be a whole number, not 64.0 (hidden_size is 64.0)"),
        (
            {**LLAMA, "max_position_embeddings": "2048"},
            "max_position_embeddings must be a positive whole number, not '2048'",
        ),
        ({**LLAMA, "vocab_size": None}, "missing key 'vocab_size', which 'llama' needs"),
        ({**LLAMA, "model_type": "gemma4_text", "head_dim": 13, "global_head_dim": 8}, "head_dim must be even"),
        ({**LLAMA, "model_type": "minimax", "head_dim": 13}, "head_dim must be even"),
        ({**LLAMA, "model_type": "qwen2", "hidden_size": 36}, "head_dim must be even"),
        (
            {**VISION, "vision_config": {**VISION["vision_config"], "depth": 2.5}},
            "vision_config: model.visual.blocks repeat = depth must be a whole number, not 2.5 (depth is 2.5)",
        ),
        ({**LLAMA, "num_key_value_heads": 3}, "4 attention heads cannot share 3 heads of keys and values"),
        ({**LLAMA, "num_key_value_heads": 8}, "4 attention heads cannot share 8 heads of keys and values"),
        ({**LLAMA, "hidden_size": 65}, "hidden_size must be a multiple of num_attention_heads (hidden_size is 65"),
        ({**LLAMA, "num_attention_heads": 7}, "(hidden_size is 64, num_attention_heads is 7)"),
        ({**LLAMA, "num_attention_heads": 7, "head_dim": 16}, "hidden_size must be a multiple of num_attention_heads"),
        ({**LLAMA, "head_dim": 11}, "head_dim must be even"),
        ({**LLAMA, "hidden_size": 36}, "head_dim must be even"),
        ({**BERT, "hidden_size": 65}, "attention hands on 64 numbers, but attention.output.dense reads 65"),
        ({**BERT, "num_attention_heads": 7}, "attention hands on 63 numbers, but attention.output.dense reads 64"),
        ({**LLAMA, "model_type": "mistral", "num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({**LLAMA, "tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({**LLAMA, "model_type": "llama4_text", "no_rope_layers": [1]}, "index 1 outside a list of 1"),
        ({**MOE, "n_shared_experts": -1}, "n_shared_experts must be at least 0, not -1"),
        (
            {**LLAMA, "model_type": "qwen3", "layer_types": [1, 2]},
            "layer_types holds a kind of attention that this spec does not describe (layer_types is [1, 2])",
        ),
        ({**SPARSE, "moe_layer_freq": [1]}, "'moe_layer_freq[i] != 0': index 1 outside a list of 1"),
        ({**LONGCAT, "qk_nope_head_dim": -1}, "qk_nope_head_dim must be at least 0, not -1"),
        ({**LLAMA, "head_dim": 1}, "head_dim must be even"),
        ({**LLAMA, "model_type": "qwen2", "hidden_size": 4}, "head_dim must be even"),
        (
            {**LLAMA, "model_type": "phi", "rope_parameters": {"partial_rotary_factor": "x"}},
            "'x' in 'floor(hd * share)' is not a number (rope_parameters.partial_rotary_factor is 'x'",
        ),
        ({**LONGFORMER, "attention_window": [4]}, "at cannot take [[4], 1]"),
        ({**VISION, "vision_config": "x"}, "'vision_config' must be an object, not 'x'"),
        ({"model_type": "vit", "image_size": [32]}, "at cannot take [[32], 1] (image_size is [32])"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size must be a multiple of num_attention_heads (hidden_size is '64'"),
    ],
)
def test_refused(config: Json, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(config)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        VISION,
        {**VISION, "vision_config": {**VISION["vision_config"], "out_hidden_size": 128}},  # HF runs text alone
        # What no count reads is nobody's business.
        {**LLAMA, "hidden_act": 5, "attention_dropout": "0.1", "layer_types": ["full_attention"], "rope_parameters": 5},
        {**MAMBA, "time_step_limit": [0.0, float("inf")]},
        MOE,
        MAMBA,
        GPT_NEO,
        LONGFORMER,
        {**LONGFORMER, "attention_window": [4, 8]},
        {**LLAMA, "num_key_value_heads": 1},
        {**LLAMA, "layer_types": ["full_attention", "full_attention"]},
        {**LLAMA, "rms_norm_eps": 1, "rope_scaling": {"type": "linear", "factor": 2}},
        {**GPTJ, "rotary_dim": 16},
        JAMBA,
        SPARSE,
        {**LLAMA, "max_position_embeddings": 0},
        {**LLAMA, "max_position_embeddings": -1},
        {**LLAMA, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {**LLAMA, "model_type": "gemma2", "sliding_window": None, "layer_types": ["full_attention"] * 2},
        {
            **SPARSE,
            "sparse_attention_config": {"sparse_attention_freq": [0, 0]},
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
        },
        LONGCAT,
        T5,
        {**XLSTM, "chunk_size": 7, "max_inference_chunksize": 10},
        {**SEGFORMER, "hidden_sizes": [7, 9], "depths": [1, 2, 3]},
        {**SEGFORMER, "sr_ratios": [0, -1]},
        {**SEGFORMER, "num_encoder_blocks": 1, "hidden_sizes": [6, 6]},
        {**SEGFORMER, "num_encoder_blocks": 1, "architectures": ["SegformerModel"]},
        {"model_type": "efficientnet", "kernel_sizes": [3, 4, 5, 2, 5, 5, 6]},
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear"}},
        {**LLAMA, "rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        # A share of a head is rounded up to pairs.
        {**LLAMA, "model_type": "glm", "head_dim": 13},
        {**LLAMA, "head_dim": 32},
        # These classes do not ask for a multiple: the heads just have another width in all.
        {**LLAMA, "model_type": "mistral", "hidden_size": 66, "num_key_value_heads": 2},
        {**LLAMA, "model_type": "qwen2", "hidden_size": 66, "num_key_value_heads": 4},
    ],
)
def test_taken(config: Json) -> None:
    assert bind(config).parameters()["total"] > 0


def test_least_side_of_swin() -> None:
    """HF's table of biases is one window's at every stage; the last of two stages has half of the patches."""
    config = {"model_type": "swin", "depths": [1, 1], "num_heads": [1, 2], "window_size": 5}
    assert bind(config)(1, image_grid_thw=[[1, 9, 9]]).total > 0
    with pytest.raises(WorkloadError, match="height and width must be at least 9 patches"):
        bind(config)(1, image_grid_thw=[[1, 8, 12]])
    small = {"image_size": 32, "patch_size": 4}
    assert bind({**config, "model_type": "swinv2", **small})(1, image_grid_thw=[[1, 8, 8]]).total > 0


def test_bias_without_shared_experts() -> None:
    """Shared experts without a width keep the bias of their last product: one layer has experts here."""
    config = {**MOE, "model_type": "deepseek_v2", "n_shared_experts": 0}
    dense, expert = 128 + 128 + 64, 64
    added = bind({**config, "mlp_bias": True}).parameters()["total"] - bind(config).parameters()["total"]
    assert added == dense + expert


def test_head_dim_of_cohere2() -> None:
    """transformers 5.22's Cohere2Attention takes it, as Cohere's does."""
    config = {**LLAMA, "model_type": "cohere2", "head_dim": 32}
    assert bind(config).parameters() != bind({**config, "head_dim": 16}).parameters()
    assert bind({**config, "head_dim": 16}).parameters() == bind({**LLAMA, "model_type": "cohere2"}).parameters()


def test_heads_of_moonshine() -> None:
    """transformers 5.22's encoder writes its heads into the config, which the decoder then reads."""
    config = {"model_type": "moonshine", "hidden_size": 36, "intermediate_size": 50, "vocab_size": 89}
    heads = {"encoder_num_attention_heads": 3, "decoder_num_attention_heads": 7}
    assert (
        bind({**config, **heads}).parameters()
        == bind({**config, **heads, "decoder_num_attention_heads": 3}).parameters()
    )


TIED = "tie_word_embeddings"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**LLAMA, "model_type": "falcon"}, "bias"),
        ({**LLAMA, "model_type": "ernie4_5", "intermediate_size": 64}, "use_bias"),
        ({"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text"}, "vision_config": {}}, TIED),
    ],
)
def test_null_means_false(config: Json, key: str) -> None:
    """Where a class takes null for true or false, its code asks whether it is true."""
    assert bind({**config, key: None}).parameters() == bind({**config, key: False}).parameters()
    assert bind({**config, key: None}).parameters() != bind({**config, key: True}).parameters()


@pytest.mark.parametrize(
    ("config", "key", "value", "default"),
    [
        ({**T5, "feed_forward_proj": "gated-gelu"}, "is_gated_act", False, True),
        (GEMMA4, "per_layer_config", {}, {"1": {"head_dim": 32}}),
    ],
)
def test_null_is_a_value(config: Json, key: str, value: Any, default: Any) -> None:
    """Where a class keeps a given null, and would compute a value for a key that is left out."""
    assert bind({**config, key: None}).parameters() == bind({**config, key: value}).parameters()
    assert bind({**config, key: None}).parameters() != bind(config).parameters()
    assert bind(config).parameters() == bind({**config, key: default}).parameters()


@pytest.mark.heavy
@pytest.mark.parametrize("name", list_data_files("presets"))
def test_every_preset_is_taken(name: str) -> None:
    assert bind(name).parameters()["total"] > 0


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mplugowl3", {"hidden_size": "abc"}, "hidden_size must be a multiple of num_attention_heads (hidden_size is"),
        ("mplugowl3", {"num_attention_heads": 0}, "hidden_size must be a multiple of num_attention_heads"),
        ("cogvlm2_video", {"num_attention_heads": []}, "head_dim must be even"),
        ("yuan_m32", {"attention_projection_size": "abc"}, "must be a multiple of num_attention_heads"),
        ("maskformer", {"decoder_config": {"decoder_attention_heads": 0}}, "decoder_attention_heads is 0"),
    ],
)
def test_checks_that_cannot_compute_speak_in_words(name: str, changes: Json, words: str) -> None:
    """Types whose config class transformers does not have, and zeros that divide: no raw expressions."""
    with open(Path(find_data_dir()) / "examples" / f"{name}.toml", "rb") as file:
        config = {"model_type": name, **tomllib.load(file)["configs"][0]}
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        bind(config)
    assert not re.search(r" in '|divides|compares|==", str(caught.value))


@pytest.mark.parametrize("head", ["DPTModel", "DPTForDepthEstimation", "DPTForSemanticSegmentation"])
def test_a_dpt_that_names_its_backbone_is_not_counted_as_a_vit(head: str) -> None:
    """HF downloads such a backbone's config: what it is cannot be read here."""
    config = {"model_type": "dpt", "architectures": [head]}
    bind({**config, "backbone": None})
    with pytest.raises(ConfigError, match="backbone: one that is named beside backbone_config is not described"):
        bind({**config, "backbone": "facebook/dinov2-base"})
