"""Bad quantization_configs of every method: each is one line that names the key."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.errors import ConfigError
from tests.core.formats.test_formats import ARGS, BNB, MODEL, compress

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def use_hqq(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}


def use_torchao(name: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": data}}}


# Method: blocks, each with the key that its error names.
CASES: dict[str, list[tuple[Any, str]]] = {
    "fp8": [
        ({"quant_method": "fp8", "fmt": "e3m4"}, "quantization_config.fmt is 'e3m4'"),
        ({"quant_method": "fp8", "activation_scheme": "lazy"}, "activation_scheme is 'lazy'"),
        ({"quant_method": "fp8", "weight_block_size": [128, "128"]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128"),
        ({"quant_method": "fp8", "scale_fmt": "bf16"}, "scale_fmt is 'bf16'"),
        ({"quant_method": "fp8", "expert_dtype": "fp6"}, "expert_dtype is 'fp6'"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "modules_to_not_convert holds 3"),
        ({"quant_method": "fp8", "ignored_layers": ["a"], "modules_to_not_convert": ["b"]}, "contradict each other"),
        ({"quant_method": "fp8", "dequantize": "yes"}, "dequantize is 'yes'"),
    ],
    "fbgemm_fp8": [({"quant_method": "fbgemm_fp8", "bits": 8}, "bits is not known")],
    "mxfp4": [({"quant_method": "mxfp4", "group_size": 32}, "group_size is not known")],
    "nvfp4": [({"quant_method": "nvfp4", "modules_to_not_convert": {}}, "modules_to_not_convert is {}")],
    "awq": [
        ({"quant_method": "awq", "bits": 5}, "bits is 5; known: 4"),
        ({"quant_method": "awq", "bits": 4, "w_bit": 8}, "w_bit and bits contradict"),
        ({"quant_method": "awq", "group_size": 128, "q_group_size": 64}, "q_group_size and group_size contradict"),
        ({"quant_method": "awq", "group_size": "128"}, "group_size is '128'"),
        ({"quant_method": "awq", "group_size": 128.0}, "group_size is 128.0"),
        ({"quant_method": "awq", "version": "gemx"}, "version is 'gemx'"),
        ({"quant_method": "awq", "zero_point": 1}, "zero_point is 1"),
    ],
    "gptq": [
        ({**GPTQ, "bits": 5}, "bits is 5"), ({**GPTQ, "bits": "4"}, "bits is '4'"),
        ({**GPTQ, "group_size": True}, "group_size is True"), ({**GPTQ, "group_size": -2}, "group_size is -2"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "desc_act": "often"}, "desc_act is 'often'"), ({**GPTQ, "lm_head": "yes"}, "lm_head is 'yes'"),
        ({**GPTQ, "dynamic": {"+:.*q_proj": 5}}, "dynamic holds 5, which is no object"),
        ({**GPTQ, "dynamic": {"+:.*q_proj": {"bits": 5}}}, r"dynamic\['\+:\.\*q_proj'\].bits is 5"),
        ({**GPTQ, "dynamic": {".*q_proj": {"bit": 8}}}, r"bit is not known"),
        ({**GPTQ, "modules_in_block_to_quantize": [["q_proj", 3]]}, "modules_in_block_to_quantize is"),
    ],
    "auto-round": [
        ({**ROUND, "bits": 5}, "bits is 5"), ({**ROUND, "packing_format": "gguf"}, "packing_format is 'gguf'"),
        ({**ROUND, "data_type": "mx_fp"}, "data_type is 'mx_fp'"), ({**ROUND, "act_bits": 8}, "act_bits is 8"),
        ({**ROUND, "super_bits": 6}, "super_bits is 6"), ({**ROUND, "static_kv_dtype": "fp4"}, "static_kv_dtype is"),
        ({**ROUND, "extra_config": {"q_proj": 8}}, "extra_config holds 8"),
        ({**ROUND, "extra_config": {"q_proj": {"bitz": 8}}}, "bitz is not known"),
        ({**ROUND, "extra_config": {"q_proj": {"bits": 5}}}, r"extra_config\['q_proj'\].bits is 5"),
        ({**ROUND, "rotation_configs": [{"type": "hadamard"}]}, "rotation_configs is"),
    ],
    "bitsandbytes": [
        ({"quant_method": "bitsandbytes"}, "load_in_4bit and load_in_8bit are both false"),
        ({**BNB, "load_in_4bit": 1}, "load_in_4bit is 1"),
        ({**BNB, "bnb_4bit_compute_dtype": "int8"}, "bnb_4bit_compute_dtype is 'int8'; known"),
        ({**BNB, "bnb_4bit_use_double_quant": "no"}, "bnb_4bit_use_double_quant is 'no'"),
        ({**BNB, "llm_int8_threshold": "six"}, "llm_int8_threshold is 'six'"),
        ({**BNB, "llm_int8_skip_module": ["q_proj"]}, "llm_int8_skip_module is not known. Did you mean"),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_has_fp16_weight": True},
            "llm_int8_has_fp16_weight is true",
        ),
    ],
    "hqq": [
        (use_hqq(nbits=5), "weight_quant_params.nbits is 5"), (use_hqq(nbits=4, group_size=-8), "group_size is -8"),
        (use_hqq(nbits=4, group_size=48), "group_size 48 does not divide"), (use_hqq(nbits=4, axis=2), "axis is 2"),
        (use_hqq(nbit=4), "nbit is not known"),
        ({"quant_method": "hqq", "quant_config": {"self_attn.q_proj": 4}}, "quant_config holds 4"),
    ],
    "compressed-tensors": [
        (compress({**ARGS, "num_bits": 9}), "weights.num_bits is 9"),
        (compress({**ARGS, **FLOAT, "num_bits": 5}), "weights.num_bits is 5"),
        (compress({**ARGS, "strategy": "channel", "group_size": 64}), "group_size is 64, but strategy is channel"),
        (compress({**ARGS, "strategy": "group", "group_size": 96}), "group_size 96 does not divide"),
        (compress({**ARGS, "strategy": "token"}), "strategy is 'token', which weights do not have"),
        (compress({**ARGS, "strategy": "rows"}), "strategy is 'rows'"),
        (compress({**ARGS, "strategy": "tensor", "block_structure": [64, 64]}), "block_structure is"),
        (compress({**FLOAT, "num_bits": 4, "group_size": 64, "strategy": "group"}, format=""), "mxfp4 has groups of"),
        (
            compress({**FLOAT, "num_bits": 4, "group_size": 32, "strategy": "tensor_group"}, format=""),
            "nvfp4 has groups of 16",
        ),
        (compress({**ARGS, "actorder": "random"}), "actorder is 'random'"),
        (compress({**ARGS, "num_bit": 4}), "num_bit is not known"),
        (compress(FLOAT, format="pack-quantized"), "type is float, which format pack-quantized does not hold"),
        (compress(FLOAT, format="zip"), "format is 'zip'"), (compress(FLOAT, format="marlin-24"), "sparse weights"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {
                "a": {"targets": ["Linear"], "weights": FLOAT},
                "b": {"targets": ["Linear"], "weights": {**FLOAT, "strategy": "channel"}}}},
            "b.targets holds 'Linear', which another group has too",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 4}}, "config_groups holds 4"),
    ],
    "modelopt": [
        ({"quant_method": "modelopt"}, "quant_algo is missing"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": True}, "has_zero_point is true"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP7"}, "kv_cache_quant_algo is"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"q_proj": "FP8"}},
            "quantized_layers holds 'FP8'",
        ),
    ],
    "torchao": [
        (use_torchao("Int4WeightOnlyConfig", group_sizes=64), "quant_type.group_sizes is not known"),
        (use_torchao("Int4WeightOnlyConfig", group_size=96), "group_size 96 does not divide"),
        (use_torchao("Int4WeightOnlyConfig", group_size="64"), "group_size '64'"),
        (use_torchao("Int4WeightOnlyConfig", layout={"_type": "MarlinSparseLayout"}), "layout is"),
        (use_torchao("MXDynamicActivationMXWeightConfig", block_size=16), "block_size is 16"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": 3}}},
         "quant_type holds 3"),
        ({"quant_method": "torchao", "quant_type": {"_type": "FqnToConfig", "_data": {"fqn_to_config": [1]}}},
         r"quant_type holds \[1\]"),
        ({"quant_method": "torchao", "quant_type": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"q": 1}}}},
         "quant_type holds 1"),
        ({"quant_method": "torchao", "quant_type": "int5_weight_only"}, "quant_type is 'int5_weight_only'"),
    ],
    "mlx": [
        ({"quant_method": "mlx", "bits": 7, "group_size": 64}, "bits is 7"),
        ({"quant_method": "mlx", "bits": 4, "group_size": 48}, "group_size is 48; known: 32, 64, 128"),
        ({"quant_method": "mlx", "bits": 4, "mode": "mxfp4", "group_size": 64}, "group_size and bits are 64 and 4"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("method", CASES)
def test_one_line_names_the_key(method: str) -> None:
    for block, words in CASES[method]:
        with pytest.raises(ConfigError, match=words) as caught:
            bind({**MODEL, "quantization_config": block})(1, 16)
        assert "\n" not in str(caught.value)
        assert "weights=FORMAT says the format by hand" in str(caught.value)
