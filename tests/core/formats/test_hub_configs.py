"""quantization_config as hub repositories publish it, on small models: what each stores how, and in which format."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.errors import ConfigError
from flopcalc.core.model.ops import iterate, join
from tests.core.formats.test_formats import ARGS, LINEARS, MODEL, NUMBERS, compress, find_stored, quantize, sum_layers

TABLE = 1024 * 256  # numbers of the embedding, and of the head
DTYPE = {"_type": "torch.dtype"}
PER_GROUP = {"_type": "PerGroup", "_data": {"group_size": 32}, "_version": 1}
MX = "MXDynamicActivationMXWeightConfig"
INTX = {"weight_dtype": {**DTYPE, "_data": "int4"}, "weight_granularity": PER_GROUP}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}


def use_torchao(name: str, version: int = 1, **data: Any) -> dict[str, Any]:
    kind = {"_type": name, "_data": data, "_version": version}
    return {"quant_method": "torchao", "quant_type": {"default": kind}, "modules_to_not_convert": None}


# Config; format, numbers, bytes with scales of what is quantized; what its products are computed in; the cache.
CASES: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]], str, str]] = {
    "MiniMax-M2 says float8_e4m3fn": (
        {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        [("fp8-block", NUMBERS, NUMBERS + sum_layers(lambda o, i: 4 * (o // 128) * (i // 128)))], "fp8", "bf16",
    ),
    "AutoFP8 has a scale per weight and one for activations": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static",
         "quant_method": "fp8"},
        [("fp8", NUMBERS, NUMBERS + 2 * len(LINEARS) * 8)], "fp8", "fp8",
    ),
    "AWQ of transformers 4 with exllama kernels": (
        {"backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
         "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "exllama",
         "zero_point": True},
        [("int4-g128", NUMBERS, NUMBERS // 2 + NUMBERS // 128 * 5 // 2)], "bf16", "bf16",
    ),
    "GPTQModel with its head": (
        {"bits": 4, "checkpoint_format": "gptq", "desc_act": True, "dynamic": None, "group_size": 32, "lm_head": True,
         "hyb_act": False, "meta": {"quantizer": ["gptqmodel:1.1.0"]}, "pack_dtype": "int32", "quant_method": "gptq"},
        [("int4-g32", NUMBERS + TABLE, (NUMBERS + TABLE) // 2 + (NUMBERS + TABLE) // 32 * 5 // 2
          + sum_layers(lambda _, i: 4 * i) + 4 * 256)], "bf16", "bf16",
    ),
    "modelopt in config.json, with groups and a cache": (
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
         "ignore": ["lm_head"], "quant_algo": "NVFP4", "quant_method": "modelopt",
         "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "producer": {"name": "modelopt"}},
        [("nvfp4", NUMBERS, NUMBERS // 2 + NUMBERS // 16 + 2 * len(LINEARS) * 8)], "nvfp4", "fp8",
    ),
    "compressed-tensors fp8, activations with one stored scale": (
        compress({**ARGS, "strategy": "tensor"}, {**ARGS, "strategy": "tensor"}),
        [("fp8", NUMBERS, NUMBERS + 2 * len(LINEARS) * 4)], "fp8", "bf16",
    ),
    "modelopt of the cache alone": (
        {"quant_algo": None, "kv_cache_quant_algo": "FP8", "quant_method": "modelopt"}, [], "bf16", "fp8",
    ),
    "torchao mxfp8": (
        use_torchao(MX, weight_dtype={**DTYPE, "_data": "float8_e4m3fn"}),
        [("mxfp8", NUMBERS, NUMBERS + NUMBERS // 32)], "mxfp8", "bf16",
    ),
    "torchao mxfp4": (
        use_torchao(MX, weight_dtype={**DTYPE, "_data": "float4_e2m1fn_x2"},
                    activation_dtype={**DTYPE, "_data": "float4_e2m1fn_x2"}),
        [("mxfp4", NUMBERS, NUMBERS // 2 + NUMBERS // 32)], "mxfp4", "bf16",
    ),
    "torchao int8 of version 2: float32 scales": (
        use_torchao("Int8WeightOnlyConfig", 2, group_size=None),
        [("int8", NUMBERS, NUMBERS + sum_layers(lambda o, _: 4 * o))], "bf16", "bf16",
    ),
    "torchao 8da4w lies in int8, is dequantized; embeddings otherwise": (
        {**use_torchao("ModuleFqnToConfig", module_fqn_to_config={
            "_default": {"_type": "Int8DynamicActivationIntxWeightConfig", "_data": INTX, "_version": 2},
            "model.embed_tokens": {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": {
                "granularity": {"_type": "PerAxis", "_data": {"axis": 0}}, "weight_dtype": {**DTYPE, "_data": "int8"}}},
            "re:lm_head\\.weight": None,
        }), "include_input_output_embeddings": True, "untie_embedding_weights": True},
        [("int8-g32", NUMBERS, NUMBERS + NUMBERS // 32 * 3), ("int8", TABLE, TABLE + 1024 * 3)], "bf16", "bf16",
    ),
    "auto-round: regular expressions": (
        {**ROUND, "packing_format": "auto_round:auto_awq", "extra_config": {
            ".*self_attn.*": {"bits": 16, "data_type": "fp"}, "model.layers.1.mlp.down_proj": {"bits": 16}}},
        [("int4-g128", 5 * 512 * 256, 5 * 512 * 256 // 2 + 5 * 512 * 2 * 5 // 2)], "bf16", "bf16",
    ),
    "auto-round by its older name, with a list": (
        {**ROUND, "quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq",
         "modules_to_not_convert": ["model.layers.*.mlp"]},
        [("int4-g128", 2 * 3 * 256 * 256, 3 * 256 * 256 + 3 * 256 * 2 * 5)], "bf16", "bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "stored", "compute", "cache"), CASES.values(), ids=CASES)
def test_published_configs(
    config: dict[str, Any], stored: list[tuple[str, int, int]], compute: str, cache: str
) -> None:
    model = bind(quantize(config))
    found = [(held.format, held.parameters, held.total_bytes) for held in model.count_weights()]
    assert sorted(held for held in found if held[0] != "bf16") == sorted(stored)
    assert next(iter(model(1, 16, phase="forward").by_dtype())) == compute
    assert model.formats.kv_cache == cache


MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize("more", [{}, {"quantization_config": MLX}])
def test_mlx(more: dict[str, Any]) -> None:
    """MLX's key: a 16-bit scale and offset per group; embedding and head too."""
    numbers = NUMBERS + 2 * TABLE
    held = {each.format: each for each in bind({**MODEL, "quantization": MLX, **more}).count_weights()}
    assert (held["int4-g64"].parameters, held["int4-g64"].total_bytes) == (numbers, numbers // 2 + numbers // 64 * 4)
    mixed = {**MLX, "lm_head": False, "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 6}}
    held = {each.format: each for each in bind({**MODEL, "quantization": mixed}).count_weights()}
    assert held["int6-g32"].total_bytes == 512 * 256 * 6 // 8 + 512 * 256 // 32 * 4
    assert held["int4-g64"].parameters == numbers - TABLE - 512 * 256
    for bad, words in (({"bits": 7}, "bits is 7"), ({**MLX, "mode": "mxfp4"}, "mxfp4 has 32"), ({**MLX, "x": 1}, "x ")):
        with pytest.raises(ConfigError, match=words):
            bind({**MODEL, "quantization": bad})


def test_a_missing_algorithm_is_no_bf16() -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}
    with pytest.raises(ConfigError, match=r"quantization_config.quant_algo is missing; weights=FORMAT"):
        bind(quantize({"quant_method": "modelopt", "config_groups": groups}))


EXPERTS = {
    "model_type": "deepseek_v3", "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "vocab_size": 512,
}  # fmt: skip


def test_experts_alone() -> None:
    """Kimi-K2-Thinking: regular expressions leave attention, dense and shared layers as they are."""
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    weights = {**ARGS, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config = compress(weights, format="pack-quantized", ignore=ignored)
    assert find_stored(config, EXPERTS) == {"model.layers.mlp.experts": "int4-g32"}


def test_llama_4_has_linears_for_experts() -> None:
    """transformers splits its stacks before bitsandbytes quantizes them."""
    base = {
        "model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 128, "intermediate_size_mlp": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    }  # fmt: skip
    found = find_stored({"quant_method": "bitsandbytes", "load_in_8bit": True}, base)
    assert "model.layers.feed_forward.experts" in found


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 128, "n_positions": 64}
BNB_8BIT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
AWQ_64 = {"quant_method": "awq", "bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        AWQ_64,
        {"quant_method": "fp8"},
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
        compress({**ARGS, "strategy": "channel"}),
    ],
    ids=["awq", "fp8", "torchao", "compressed-tensors"],
)
def test_conv1d_is_no_linear(config: dict[str, Any]) -> None:
    """GPT-2's layers are transformers' Conv1D, which bitsandbytes converts and the others do not."""
    assert len(find_stored(BNB_8BIT, GPT2)) == 4
    assert find_stored(config, GPT2) == {}
    assert any("Conv1D" in note for note in bind(quantize(config, GPT2))(1, 16, phase="forward").notes)


def test_subclasses_of_linear() -> None:
    """The output of torch's MultiheadAttention is a subclass of Linear: some libraries ask for the class itself."""
    tower = {"model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
             "num_attention_heads": 4, "image_size": 32, "patch_size": 16, "num_channels": 3}  # fmt: skip

    def find(config: dict[str, Any]) -> set[str]:
        model = bind(quantize(config, tower))
        return {
            op.name
            for stage in model.stages
            for op in iterate(stage.layers[0])
            if model.formats.resolve(op, join(stage.path, op.name), stage.group).weight.is_quantized
        }

    assert find(AWQ_64) - find(BNB_8BIT) == {"attention.out_proj"}
    assert find({"quant_method": "fp8"}) == find(BNB_8BIT)
