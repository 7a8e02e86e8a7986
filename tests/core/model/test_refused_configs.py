"""Configs that HF refuses are refused, and what it takes is taken: heads, widths and whole numbers of every family."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiers import LIGHT_TYPES, mark_heavy

from flopcalc import bind
from flopcalc.data import find_data_dir, list_data_files
from flopcalc.errors import ConfigError, FlopcalcError, WorkloadError

Json = dict[str, Any]
LLAMA: Json = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 100,
}  # fmt: skip
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
        ({**LLAMA, "num_key_value_heads": 64.5}, "num_key_value_heads must be a whole number, not 64.5"),
        ({**LLAMA, "hidden_size": 64.0}, "hidden_size must be a whole number, not 64.0"),
        ({**LLAMA, "max_position_embeddings": "2048"}, "max_position_embeddings must be a whole number, not '2048'"),
        ({**LLAMA, "vocab_size": None}, "missing key 'vocab_size': it is null, and must be a whole number"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        ({**LLAMA, "layer_types": ["full_attention", "full"]}, "layer_types holds 'full', which HF does not know"),
        ({**LLAMA, "model_type": "gemma4_text", "head_dim": 13, "global_head_dim": 8}, "head_dim must be even"),
        ({**LLAMA, "model_type": "minimax", "head_dim": 13}, "head_dim must be even"),
        ({**LLAMA, "model_type": "qwen2", "hidden_size": 36}, "head_dim must be even"),
        ({"model_type": "xlstm", "hidden_size": 66, "num_heads": 4}, "hidden_size must be a multiple of num_heads"),
        (
            {**VISION, "text_config": {**VISION["text_config"], "rope_parameters": {"mrope_section": [2, 1, 2]}}},
            "text_config: mrope_section must sum to half of the numbers that rotary embeddings turn",
        ),
        (
            {**VISION, "vision_config": {**VISION["vision_config"], "out_hidden_size": 128}},
            "vision_config.out_hidden_size must be text_config.hidden_size",
        ),
        (
            {**VISION, "vision_config": {**VISION["vision_config"], "depth": 2.5}},
            "vision_config: depth must be a whole number, not 2.5",
        ),
        ({**MOE, "n_group": 3}, "n_group must divide n_routed_experts"),
        ({**MOE, "topk_group": 5}, "topk_group may not exceed it"),
        ({**MOE, "num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads"),
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
        ({**LLAMA, "attention_dropout": "0.1"}, "attention_dropout must be a number, not '0.1'"),
        ({**LLAMA, "hidden_act": 5}, "hidden_act must be a word, not 5"),
        ({**LLAMA, "hidden_act": "sillu"}, "hidden_act holds 'sillu', which HF does not know. Did you mean silu"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "yarnn", "rope_theta": 1e4}},
            "rope_type holds 'yarnn', which HF does not know. Did you mean yarn",
        ),
        ({**MOE, "n_group": 0}, "n_group must divide n_routed_experts"),
        ({**MOE, "qk_rope_head_dim": 0}, "qk_rope_head_dim must be at least 1"),
        ({**BERT, "type_vocab_size": 0}, "type_vocab_size must be at least 1"),
        ({**GPTJ, "rotary_dim": 7}, "rotary_dim must be even, positive and at most the width of a head"),
        ({**JAMBA, "expert_layer_offset": 2}, "expert_layer_offset less than expert_layer_period"),
        ({**LLAMA, "model_type": "llama4_text", "no_rope_layers": [1]}, "no_rope_layers must have an entry for each"),
        (
            {**LLAMA, "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 9},
            "mamba_d_head * mamba_n_heads must be the width of the scan",
        ),
        ({**MOE, "n_shared_experts": -1}, "n_shared_experts must be at least 0, not -1"),
        ({**MOE, "topk_group": -1}, "topk_group may not exceed it"),
        ({**BERT, "hidden_dropout_prob": -1}, "hidden_dropout_prob must be from 0 to 1, not -1"),
        ({**LLAMA, "attention_dropout": 1.5}, "attention_dropout must be from 0 to 1, not 1.5"),
        ({**LLAMA, "rope_parameters": 5}, "rope_parameters must be an object, not 5"),
        ({**LLAMA, "rope_parameters": {"rope_type": None}}, "rope_type holds None, which HF does not know"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "of type linear need a number as factor, not None"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": None}}, "need a number as factor, not None"),
        ({**LLAMA, "rope_parameters": {"rope_theta": "x"}}, "of type default need a number as rope_theta, not 'x'"),
        (
            {**LLAMA, "model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": None}},
            "partial_rotary_factor of rotary embeddings is null",
        ),
        ({**LLAMA, "rope_theta": None}, "rope_theta is null, and rotary embeddings need a number"),
        (
            {**LLAMA, "model_type": "gemma4_text", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "must have a table for each kind of layer: full_attention, sliding_attention",
        ),
        ({**MOE, "n_group": None}, "n_group is null, and transformers' code needs a value"),
        ({**MOE, "head_dim": None}, "head_dim is null, and transformers' code needs a value"),
        ({**MOE, "head_dim": 16}, "head_dim must be qk_rope_head_dim"),
        ({**LLAMA, "model_type": "gemma2", "sliding_window": None}, "sliding_window is null"),
        ({**LLAMA, "model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ({**LLAMA, "model_type": "qwen3_moe", "head_dim": None}, "head_dim is null"),
        (
            {"model_type": "bart", "activation_function": None, "d_model": 64},
            "activation_function holds None, which HF does not know",
        ),
        (
            {**LLAMA, "model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
            "the new decoder architecture needs parallel_attn",
        ),
        ({**T5, "relative_attention_max_distance": 0}, "relative_attention_num_buckets must be at least 4"),
        ({**T5, "relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be at least 4"),
        ({**LLAMA, "model_type": "modernbert", "classifier_activation": "x"}, "classifier_activation holds 'x'"),
        (
            {**LLAMA, "model_type": "modernbert", "classifier_pooling": None},
            "classifier_pooling must be one of cls, mean, not None",
        ),
        ({**LLAMA, "model_type": "qwen3", "layer_types": [1, 2]}, "layer_types must be a list of words, not [1, 2]"),
        ({**SPARSE, "num_hidden_layers": 1}, "sparse_attention_freq must have an entry for each layer"),
        ({**SPARSE, "moe_layer_freq": [1]}, "moe_layer_freq must have an entry for each layer"),
        ({**SPARSE, "num_attention_heads": 5, "num_key_value_heads": 1}, "must be a multiple of the indexer's heads"),
        ({**SPARSE, "index_block_size": 0}, "index_block_size must be a whole number of at least 1"),
        ({**XLSTM, "embedding_dim": 66}, "embedding_dim must be hidden_size"),
        ({**LONGCAT, "qk_head_dim": 20}, "qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim"),
        ({**LONGCAT, "qk_nope_head_dim": -1}, "qk_nope_head_dim must be at least 0, not -1"),
        ({"model_type": "seamless_m4t", "conv_depthwise_kernel_size": 8}, "conv_depthwise_kernel_size must be odd"),
        ({**BERT, "model_type": "albert", "num_hidden_groups": 3}, "num_hidden_groups must be 1 to num_hidden_layers"),
        ({**SEGFORMER, "strides": [3]}, "strides must have an entry for each stage"),
        ({**LLAMA, "head_dim": 1}, "head_dim must be even"),
        ({**LLAMA, "model_type": "qwen2", "hidden_size": 4}, "head_dim must be even"),
        ({**LLAMA, "model_type": "phi", "partial_rotary_factor": 2}, "must be from 0 to 1, not 2"),
        (
            {**LLAMA, "model_type": "phi", "rope_parameters": {"partial_rotary_factor": "x"}},
            "(partial_rotary_factor) must be from 0 to 1, not 'x'",
        ),
        (
            {**LLAMA, "model_type": "gpt_neox", "hidden_size": 28, "rotary_pct": 1.0},
            "in pairs, may not exceed the head",
        ),
        (
            {**VISION, "text_config": {**VISION["text_config"], "rope_parameters": {"mrope_section": "x"}}},
            "text_config: mrope_section must sum to half of the numbers that rotary embeddings turn",
        ),
        ({**MAMBA, "mamba_n_groups": 3}, "the scan's heads must be a multiple of its groups"),
        ({**GPT_NEO, "attention_layers": ["global"]}, "attention_layers must have 2 entries, not 1 (num_layers is 2)"),
        ({**GPT_NEO, "attention_layers": ["global", "x"]}, "attention_layers must hold global and local alone"),
        ({**LONGFORMER, "attention_window": 7}, "attention_window must be even and above 0"),
        ({**LONGFORMER, "attention_window": [3, 5]}, "attention_window must be even and above 0"),
        ({**LONGFORMER, "attention_window": [4]}, "attention_window must have 2 entries, not 1"),
        ({"model_type": "dbrx", "attn_config": 5}, "attn_config must be an object, not 5"),
        ({"model_type": "mpt", "attn_config": []}, "attn_config must be an object, not []"),
        ({**VISION, "vision_config": "x"}, "vision_config must be an object, not 'x'"),
        (
            {**LLAMA, "model_type": "qwen3", "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "layers with sliding_attention need use_sliding_window",
        ),
        (
            {**LLAMA, "model_type": "gemma3n_text", "activation_sparsity_pattern": [0.5]},
            "activation_sparsity_pattern must be a list with an entry for each layer",
        ),
        ({**SEGFORMER, "num_labels": None}, "missing key 'num_labels': it is null"),
        ({**SEGFORMER, "strides": [3, 0]}, "strides must be at least 1, not [3, 0]"),
        ({**SEGFORMER, "depths": [1, -1]}, "depths must be at least 0, not [1, -1]"),
        ({"model_type": "resnet", "depths": [1, 0]}, "depths must be at least 1: a stage without layers"),
        ({"model_type": "vit", "image_size": [32]}, "image_size must have 2 entries, not 1"),
        # another name of a field, a field that must be positive, an inner config of a type that transformers lacks
        ({"model_type": "kimi_linear", "num_shared_experts": -1}, "num_shared_experts must be at least 0, not -1"),
        ({"model_type": "neomme", "num_hidden_layers": 0}, "num_hidden_layers must be at least 1, not 0"),
        ({"model_type": "kimi_vl", "text_config": {**MOE, "n_group": 3}}, "text_config: n_group must divide"),
        ({"model_type": "gpt2", "num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number, not 2.5"),
        ({"model_type": "yolos", "image_size": [512, 0]}, "image_size must be at least patch_size"),
        ({"model_type": "vivit", "tubelet_size": [2, 16, 16, 16]}, "tubelet_size must have 3 entries, not 4"),
        ({**T5, "dense_act_fn": "sillu"}, "dense_act_fn holds 'sillu', which HF does not know. Did you mean silu"),
        ({**T5, "dense_act_fn": None}, "dense_act_fn holds None, which HF does not know"),
        ({**SEGFORMER, "num_encoder_blocks": 1}, "hidden_sizes must end with the last stage's"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        # rope_scaling takes the place of rope_parameters as a whole
        (
            {**LLAMA, "rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "of type linear need a number as factor, not None",
        ),
        ({"model_type": "pvt", "depths": [1, 2], "num_encoder_blocks": 3}, "depths must have 3 entries, not 2"),
        (
            {"model_type": "siglip", "text_config": {}, "vision_config": {"hidden_size": 24}},
            "vision_config.hidden_size must be text_config.projection_size",
        ),
        (
            {"model_type": "llava", "text_config": LLAMA, "vision_feature_select_strategy": "all"},
            "vision_feature_select_strategy must be one of default, full, not 'all'",
        ),
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


def test_rules_name_known_classes() -> None:
    from flopcalc.core.model import config_rules

    folder = Path(find_data_dir())
    classes = json.loads((folder / config_rules.FILE).read_text(encoding="utf-8"))["classes"]
    rules = tomllib.loads((folder / config_rules.RULES).read_text(encoding="utf-8"))["rule"]
    assert {name for rule in rules for name in rule["types"]} - set(classes) == set()
    for name, refused in classes.items():  # each is found without parsing the others
        assert config_rules._find_class(name) == refused
        assert config_rules._find_rules(name) == [rule for rule in rules if name in rule["types"]]
    assert config_rules._find_class("words") is None
    assert config_rules._find_class('llama"') is None
    # `Formats.names_layers` counts on it: what a class keeps in float32 is the same in every layer.
    kept = {name for refused in classes.values() for names in refused.get("float32", {}).values() for name in names}
    assert "e_score_correction_bias" in kept
    assert not [name for name in kept if re.search(r"\\d|\[|\.\d", name)]


@pytest.mark.heavy
def test_rules_are_fresh() -> None:
    """model_specs/config_rules.json is what the installed transformers says."""
    pytest.importorskip("transformers")
    script = Path(__file__).parents[3] / "docs" / "make_config_rules.py"
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# --- against HF's own classes -------------------------------------------------------------------------------------
NAMES = ("head", "kv")


def list_sizes(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Every size of a config whose key speaks of heads."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from list_sizes(value, (*path, key))
        elif type(value) is int and value > 1 and any(name in key for name in NAMES) and "token" not in key:
            yield (*path, key), value


def put(config: Json, path: tuple[str, ...], value: Any) -> Json:
    changed = copy.deepcopy(config)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def is_taken_by_hf(config: Json, example: Any, estimator: Any, workload: Json) -> bool:
    """Whether HF's classes build the model and run it once, with the inputs of the unchanged config."""
    import torch

    from flopcalc.measure.hf.examples import make_inputs, takes
    from flopcalc.measure.hf.kernels import install
    from flopcalc.measure.hf.models import build_model

    architecture = example.choose_class(estimator.spec.architecture)
    try:
        model = build_model(config, example.attention, "eager", architecture=architecture).eval()
        install(example.kernels)
        extra = {**example.call, **({"use_cache": False} if takes(model, "use_cache") else {})}
        with torch.no_grad():
            model(**make_inputs(example, model.config, workload, estimator), **extra)
    except Exception:  # whatever HF's code raises
        return False
    return True


@pytest.mark.parametrize("model_type", mark_heavy(("llama", "bert", *LIGHT_TYPES[1:]), ("llama",)))
def test_as_hf(model_type: str) -> None:
    """One more, twice as many and a half of each size: refused by both, or by neither."""
    from flopcalc.measure.hf.examples import find_example, list_cases, make_estimator
    from flopcalc.measure.hf.verify import prepare

    prepare()
    example = find_example(model_type)
    config = example.configs[-1]
    estimator = make_estimator(example, config)
    loads = [load for load, recipe in list_cases(example, config) if not recipe and load.get("phase") == "train"]
    workload = next((load for load in loads if load.get("images")), loads[0])  # so that a tower runs, too
    assert is_taken_by_hf(config, example, estimator, workload)
    wrong = []
    for path, size in list_sizes(config):
        for value in (size + 1, 2 * size, size + 0.5):
            changed = put(config, path, value)
            try:
                make_estimator(example, changed)
                is_taken = True
            except FlopcalcError:
                is_taken = False
            if is_taken != is_taken_by_hf(changed, example, estimator, workload):
                wrong.append(f"{'.'.join(path)} {size} -> {value}: {'taken' if is_taken else 'refused'} here alone")
    assert not wrong, "\n".join(wrong)


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
