"""Number formats: bytes from their definitions, configs of every library, exclusions, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import ConfigError, RecipeError
from flopcalc.base.number_formats import load_computed, parse_compute
from flopcalc.base.vocabulary import DTYPES
from flopcalc.core.count.products import Weights
from flopcalc.core.formats.stored import StoredFormat, load_stored, parse_stored
from flopcalc.core.workload.workload import make_workload

MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
# q and o, k and v, gate and up and down: outputs and inputs of every linear of a layer.
LINEARS = [(256, 256)] * 2 + [(128, 256)] * 2 + [(512, 256)] * 2 + [(256, 512)]
NUMBERS = 2 * sum(n_out * n_in for n_out, n_in in LINEARS)
REST = 2 * 1024 * 256 + 5 * 256  # embedding, head, norms
MOE = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def sum_layers(count: Any) -> int:
    """A number of bytes over all linears of both layers."""
    return 2 * sum(count(n_out, n_in) for n_out, n_in in LINEARS)


def quantize(config: dict[str, Any], base: dict[str, Any] = MODEL) -> dict[str, Any]:
    return {**base, "quantization_config": config}


ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def compress(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HQQ = {"nbits": 3, "group_size": 64, "channel_wise": True, "optimize": True, "round_zero": False, "axis": 1}
# Config, format, bytes of numbers, bytes of scales and their like, what linear layers compute in.
CASES: list[tuple[str, dict[str, Any], str, int, int, str]] = [
    (
        "AWQ: half a byte; per 128 inputs and output fp16 scale and packed zero point",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "int4-g128", NUMBERS // 2, sum_layers(lambda o, i: o * i // 128 * 5 // 2), "bf16",
    ),
    (
        "GPTQ of 3 bits: the same, and the group of every input as int32",
        {"quant_method": "gptq", "bits": 3, "group_size": 64, "desc_act": True, "checkpoint_format": "gptq"},
        "int3-g64", NUMBERS * 3 // 8, sum_layers(lambda o, i: o * i // 64 * 19 // 8 + 4 * i), "bf16",
    ),
    (
        "nf4: an fp32 absmax per 64 numbers, a table of 16 fp32 values per weight",
        {**BNB, "bnb_4bit_compute_dtype": "bfloat16"},
        "nf4", NUMBERS // 2, sum_layers(lambda o, i: o * i // 64 * 4 + 64), "bf16",
    ),
    (
        "nf4 with double quantization: a byte per absmax, fp32 per 256 of them, table and mean",
        {**BNB, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float16"},
        "nf4-double", NUMBERS // 2, sum_layers(lambda o, i: o * i // 64 + 4 * -(-o * i // 64 // 256) + 68), "fp16",
    ),
    (
        "LLM.int8: an fp32 scale per output",
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "int8", NUMBERS, sum_layers(lambda o, _: 4 * o), "int8",
    ),
    (
        "fp8 in blocks of 128 x 128 with fp32 scales, as DeepSeek's",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "fp8-block", NUMBERS, sum_layers(lambda o, i: 4 * (o // 128) * (i // 128)), "fp8",
    ),
    (
        "compressed-tensors fp8 per channel: a 16-bit scale per output",
        compress({**ARGS, "strategy": "channel"}, {**ARGS, "strategy": "token", "dynamic": True}),
        "fp8", NUMBERS, sum_layers(lambda o, _: 2 * o), "fp8",
    ),
    (
        "modelopt nvfp4: a byte per 16 numbers, two fp32 scales per weight",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        "nvfp4", NUMBERS // 2, sum_layers(lambda o, i: o * i // 16 + 8), "nvfp4",
    ),
    (
        "torchao int4: 16-bit scale and zero point per group",
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig",
                                                               "_data": {"group_size": 32}}}},
        "int4-g32", NUMBERS // 2, sum_layers(lambda o, i: o * i // 32 * 4), "bf16",
    ),
    (
        "HQQ of 3 bits: ten numbers in 32 bits, 16-bit scale and zero point per group",
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": HQQ}, "skip_modules": ["lm_head"]},
        "int3-g64", sum_layers(lambda o, i: -(-o * i * 16 // 40)), sum_layers(lambda o, i: o * i // 64 * 4), "bf16",
    ),
    (
        "compressed-tensors int4 in groups, packed: 16-bit scales, packed zero points, the shape as two int64",
        compress({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
                 format="pack-quantized"),
        "int4-g64", NUMBERS // 2, sum_layers(lambda o, i: o * i // 64 * 5 // 2 + 16), "bf16",
    ),
    (
        "torchao's older strings",
        {"quant_method": "torchao", "quant_type": "int8_dynamic_activation_int8_weight", "quant_type_kwargs": {}},
        "w8a8", NUMBERS, sum_layers(lambda o, _: 2 * o), "int8",
    ),
    (
        "fbgemm: an fp32 scale per output, an upper bound per weight",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "fp8", NUMBERS, sum_layers(lambda o, _: 4 * o + 4), "fp8",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name", "numbers", "scales", "compute"),
    [case[1:] for case in CASES],
    ids=[case[0].partition(":")[0] for case in CASES],
)
def test_bytes_follow_the_definition(
    config: dict[str, Any], name: str, numbers: int, scales: int, compute: str
) -> None:
    estimate = estimate_flops(quantize(config), seq_len=16, phase="forward")
    assert {held.format: held for held in estimate.weights} == {
        name: Weights(name, NUMBERS, numbers, scales),
        "bf16": Weights("bf16", REST, 2 * REST),
    }
    linear = 2 * NUMBERS * 16  # the head and attention are computed in the model's own format
    assert estimate.by_dtype()[compute].forward == (estimate.total if compute == "bf16" else linear)
    assert estimate.total == estimate_flops(MODEL, seq_len=16, phase="forward").total


def test_llama_in_four_bits_and_in_bf16() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    config = bind("llama-3.1-8b").source.config
    for given, bytes_ in ((config, 16_060_522_496), (quantize(awq, config), 5_727_854_592)):
        assert sum(held.total_bytes for held in bind(given).count_weights()) == bytes_  # 15.0 and 5.3 GiB


def find_stored(config: dict[str, Any], base: dict[str, Any] = MODEL) -> dict[str, str]:
    """Module path -> the format of its weight, of those that are quantized."""
    rows = bind(quantize(config, base))(1, 16).terms[0].estimator.rows(bind(base)(1, 16).terms[0].load, "full")
    return {
        f"{block.path}.{row.op.name}".rstrip("."): row.numbers.weight.name
        for block, row, _ in rows
        if row.numbers.weight.is_quantized
    }


def test_exclusions() -> None:
    """Each library's own way to leave modules out."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64}
    every = find_stored(awq)
    assert len(every) == 7
    assert "lm_head" not in every
    assert "lm_head" not in find_stored({**awq, "modules_to_not_convert": ["mlp.gate"]})  # always left out
    assert len(find_stored({**awq, "modules_to_not_convert": ["mlp.gate"]})) == 7  # gate_proj is another module
    assert len(find_stored({**awq, "modules_to_not_convert": ["q_proj", "model.layers.*.mlp"]})) == 3
    fp8 = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    assert len(find_stored(fp8)) == 7
    assert len(find_stored({**fp8, "modules_to_not_convert": ["k_proj"]})) == 7  # k_proj is, and now the head is not
    tensors = compress({**ARGS, "strategy": "tensor"})
    assert len(find_stored({**tensors, "ignore": []})) == 8
    assert len(find_stored({**tensors, "ignore": ["lm_head", "re:.*self_attn.*"]})) == 3
    named = {**tensors["config_groups"]["group_0"], "targets": ["re:.*down_proj$"]}
    assert list(find_stored({**tensors, "config_groups": {"a": named}})) == ["model.layers.mlp.down_proj"]
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert len(find_stored({**modelopt, "exclude_modules": ["lm_head", "model.layers.0.*"]})) == 7
    layers = [
        len(block.layers or ())
        for block, _, _ in bind(quantize({**modelopt, "exclude_modules": ["lm_head", "model.layers.0.*"]})).rows(
            bind(MODEL)(1, 16).terms[0].load, "full"
        )
    ]
    assert set(layers) == {0, 1}  # two layers that differ are two blocks
    style = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    assert len(find_stored(style)) == 7
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    assert "lm_head" in find_stored({**gptq, "lm_head": True})
    dynamic = {"-:.*gate_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}}
    found = find_stored({**gptq, "dynamic": dynamic})
    assert (len(found), found["model.layers.mlp.down_proj"]) == (6, "int8-g32")


def test_experts() -> None:
    """Stacks of experts are quantized where the library does it."""
    assert "model.layers.mlp.experts" in find_stored({"quant_method": "fp8"}, MOE)
    assert list(find_stored({"quant_method": "mxfp4"}, MOE)) == ["model.layers.mlp.experts"]
    assert "model.layers.mlp.experts" not in find_stored({**BNB, "bnb_4bit_compute_dtype": "bfloat16"}, MOE)
    assert not any("gate" in path for path in find_stored({"quant_method": "fp8"}, MOE))  # the router
    notes = estimate_flops(quantize(BNB, MOE), seq_len=8, phase="forward").notes
    assert [note for note in notes if "experts" in note]
    assert [note for note in notes if "computes in float32" in note]


def test_towers_of_gptq_stay_as_they_are() -> None:
    config = bind("qwen2-vl-2b").source.config
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    found = bind(quantize(gptq, config)).rows(make_workload(1, 8), "full")
    groups = {block.group for block, row, _ in found if row.numbers.weight.is_quantized}
    assert groups == {"language"}
    by_hand = bind(config, weights="int4").count_weights()
    assert [held.parameters for held in by_hand] == [
        held.parameters for held in bind(quantize(gptq, config)).count_weights()
    ]
    listed = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"]}
    assert (
        bind(quantize(listed, config)).count_weights()[0].parameters
        == bind(quantize(gptq, config)).count_weights()[0].parameters
    )


def test_cache_and_gradients() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = compress({**ARGS, "strategy": "tensor"}, kv_cache_scheme=scheme)
    assert bind(quantize(config)).formats.kv_cache == "fp8"
    assert bind(quantize(config), kv_cache="bf16").formats.kv_cache == "bf16"
    # LLM.int8 computes gradients with the dequantized weight.
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    found = estimate_flops(quantize(eight), seq_len=8, lora="r=4,targets=q_proj", autocast=True).by_dtype()
    assert (found["int8"].forward, found["int8"].backward) == (2 * NUMBERS * 8, 0)


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({}, ["bf16"]),
        ({"dtype": "fp32"}, ["fp32"]),
        ({"compute": "fp16", "dtype": "fp32"}, ["fp16"]),
        ({"compute": "fp8"}, ["fp8", "bf16"]),
        ({"weights": "fp32"}, ["fp32"]),
        ({"weights": "fp32", "autocast": True}, ["bf16"]),
        ({"weights": "nf4-double"}, ["bf16"]),
        ({"weights": "fp8"}, ["fp8", "bf16"]),
        ({"weights": "fp8", "compute": "bf16"}, ["bf16"]),
        ({"lora": "r=4,targets=q_proj"}, ["bf16", "fp32"]),
        ({"lora": "r=4,targets=q_proj,dtype=bf16"}, ["bf16"]),
        ({"lora": "r=4,targets=q_proj", "autocast": True}, ["bf16"]),
        ({"lora": "r=4,targets=q_proj", "compute": "bf16"}, ["bf16"]),
        ({"lora": "r=4,targets=q_proj", "weights": "nf4"}, ["bf16", "fp32"]),
        ({"compute": "tf32"}, ["tf32"]),
    ],
)
def test_options(options: dict[str, Any], formats: list[str]) -> None:
    estimate = estimate_flops(MODEL, seq_len=16, **options)
    assert list(estimate.by_dtype()) == formats
    assert sum(flops.total for flops in estimate.by_dtype().values()) == estimate.total


def test_the_config_says_it() -> None:
    for key in ("dtype", "torch_dtype"):
        formats = bind({**MODEL, key: "float16"}).formats
        assert (formats.model, formats.source) == ("fp16", f"the config's {key}")
    assert bind({**MODEL, "torch_dtype": "float16"}, dtype="bf16").formats.model == "bf16"
    assert "assumed" in bind(MODEL).formats.source
    with pytest.raises(ConfigError, match="dtype 'float7' unknown"):
        bind({**MODEL, "dtype": "float7"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 4, "group_size": 64}, "quant_method is missing"),
        ({"quant_method": "magic"}, r"quant_method 'magic' cannot be read.*weights=FORMAT"),
        ({"quant_method": "awq", "bits": 3}, r"quantization_config.bits is 3; known: 4.*weights=FORMAT"),
        ({"quant_method": "awq", "grou_size": 128}, r"grou_size is not known. Did you mean .*group_size"),
        ({"quant_method": "awq", "group_size": 96}, r"group_size 96 does not divide the 256 inputs of .*q_proj"),
        ({"quant_method": "awq", "group_size": 0}, r"group_size is 0"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit and load_in_8bit"),
        ({**BNB, "bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type is 'nf5'; known: nf4, fp4"),
        ({**BNB, "bnb_4bit_compute_dtype": "float5"}, "bnb_4bit_compute_dtype is 'float5'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "gptq"}, "quantization_config.bits is None"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "dynamic holds .* which is no pattern"),
        ({"quant_method": "awq", "modules_to_not_convert": ["(.+)+X"]}, r"holds '.*X', a pattern that may take for"),
        ({"quant_method": "awq", "modules_to_not_convert": [".*a" * 6]}, "a pattern that may take for ever to match"),
        ({"quant_method": "awq", "modules_to_not_convert": ["a" * 1001]}, "a pattern that may take for ever to match"),
        ({"quant_method": "awq", "modules_to_not_convert": ["a"] * 20001}, "holds more than 20,000 names"),
        ({"quant_method": "modelopt", "quant_algo": "FP5"}, "quant_algo is 'FP5'"),
        ({"quant_method": "torchao", "quant_type": "autoquant"}, "quant_type is 'autoquant'"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}},
            "g.weights is missing",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 36}, "group_size 36 does not divide"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": "maybe"}, "sym is 'maybe'"),
        ({}, "quant_method is missing"),
        ({"quant_method": "hqq", "quant_config": {}}, "quant_config is missing"),
        (compress({**ARGS, "strategy": "group"}), "strategy group needs one"),
        ("int4", "quantization_config must be an object"),
    ],
)
def test_bad_configs_are_one_line(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        bind({**MODEL, "quantization_config": config})(1, 16)
    assert "\n" not in str(caught.value)
    assert "weights=FORMAT says the format by hand" in str(caught.value)
    assert bind({**MODEL, "quantization_config": config}, weights="bf16")(1, 16).total  # said by hand


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int5"}, "weights 'int5' unknown"),
        ({"weights": "fp8-g32"}, "fp8 has no groups of that size"),
        ({"weights": "int4-g96"}, "weights 96 does not divide the 256 inputs"),
        ({"compute": "bf17"}, "dtype 'bf17' unknown"),
        ({"kv_cache": "x"}, "kv_cache 'x' unknown"),
        ({"compute": "bf16", "autocast": True}, "both say what products are computed in"),
        ({"autocast": "fp8"}, "autocast is to bf16 or fp16"),
        ({"lora": "r=4,targets=q_proj,dtype=fp8"}, "lora dtype fp8"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=words):
        bind(MODEL, **options)(1, 16)


def test_the_file_is_whole() -> None:
    """Every word of the vocabulary is data; what formats fall back to and compute in are words of it."""
    (computed, aliases), stored = load_computed(), load_stored()
    assert set(computed) == set(DTYPES)
    for entry in computed.values():
        assert entry.stored in computed
        assert entry.fallback is None or entry.fallback in computed
    for format_ in stored.values():
        assert format_.is_quantized
        assert not format_.compute or format_.compute in computed
    assert all(parse_compute(alias.upper(), "x") == name for alias, name in aliases.items())
    assert parse_stored("torch.float32", "x") == StoredFormat("fp32", 32)
    assert parse_stored("nf4-g128", "x").flat == 128


@pytest.mark.parametrize(
    ("name", "numbers", "size"),  # bytes of one block: GGML_QUANT_SIZES of llama.cpp
    [
        ("q4_0", 32, 18),
        ("q4_1", 32, 20),
        ("q5_0", 32, 22),
        ("q5_1", 32, 24),
        ("q8_0", 32, 34),
        ("q2_k", 256, 84),
        ("q3_k", 256, 110),
        ("q4_k", 256, 144),
        ("q5_k", 256, 176),
        ("q6_k", 256, 210),
        ("q8_k", 256, 292),
        ("iq1_s", 256, 50),
        ("iq1_m", 256, 56),
        ("iq2_xxs", 256, 66),
        ("iq2_xs", 256, 74),
        ("iq2_s", 256, 82),
        ("iq3_xxs", 256, 98),
        ("iq3_s", 256, 110),
        ("iq4_nl", 32, 18),
        ("iq4_xs", 256, 136),
        ("tq1_0", 256, 54),
        ("tq2_0", 256, 66),
        ("mxfp4", 32, 17),
    ],
)
def test_blocks_of_gguf(name: str, numbers: int, size: int) -> None:
    assert sum(parse_stored(name, "x").count_bytes(3, 2 * numbers)) == 6 * size


def test_contradicting_parts() -> None:
    one, two = {"quant_method": "awq", "bits": 4}, {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ConfigError, match=r"quantization_config and text_config.quantization_config contradict"):
        bind({**MODEL, "quantization_config": one, "text_config": {"quantization_config": two}})


# --- live models ------------------------------------------------------------------------------------------------------
def test_live_models_say_it_themselves() -> None:
    """Formats are those of the parameters; bitsandbytes is known by the names of its classes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{key: value for key, value in MODEL.items() if key != "model_type"})
    model = transformers.LlamaForCausalLM(config)
    assert list(bind(model)(1, 8).by_dtype()) == ["fp32"]
    assert list(bind(model, autocast=True)(1, 8).by_dtype()) == ["bf16"]
    model = model.to(torch.bfloat16)
    model.model.norm.float()
    assert bind(model)(1, 8).weights == [
        Weights("bf16", NUMBERS + REST - 256, 2 * (NUMBERS + REST - 256)),
        Weights("fp32", 256, 1024),
    ]

    class Params4bit(torch.nn.Parameter):
        quant_type, compress_statistics, blocksize = "nf4", True, 64

    class Linear4bit(torch.nn.Module):
        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__()
            packed = torch.zeros(n_in * n_out // 2, 1, dtype=torch.uint8)
            self.weight = Params4bit(packed, requires_grad=False)
            self.weight.quant_state = type("QuantState", (), {"shape": (n_out, n_in)})()
            self.compute_dtype = torch.float16

    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and path != "lm_head":
            model.set_submodule(path, Linear4bit(module.in_features, module.out_features))
    found = bind(model)(1, 8, phase="forward")
    assert [(held.format, held.parameters) for held in found.weights] == [("bf16", REST), ("nf4-double", NUMBERS)]
    assert found.by_dtype()["fp16"].forward == 2 * NUMBERS * 8
    assert found.total == estimate_flops(MODEL, seq_len=8, phase="forward").total


def test_live_fp8_modules() -> None:
    """transformers' own: weights in blocks, whose scales are parameters but no weights of the model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class FP8Linear(torch.nn.Module):
        block_size = (128, 128)

        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__()
            empty = torch.zeros(n_out, n_in).to(torch.float8_e4m3fn)
            self.weight = torch.nn.Parameter(empty, requires_grad=False)
            self.weight_scale_inv = torch.nn.Parameter(torch.ones(n_out // 128, n_in // 128), requires_grad=False)

    config = transformers.LlamaConfig(**{key: value for key, value in MODEL.items() if key != "model_type"})
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and path != "lm_head":
            model.set_submodule(path, FP8Linear(module.in_features, module.out_features))
    found = {held.format: held for held in bind(model).count_weights()}
    assert found["fp8-block"] == Weights("fp8-block", NUMBERS, NUMBERS, sum_layers(lambda o, i: 4 * o * i // 128**2))
    assert list(bind(model)(1, 8).by_dtype()) == ["fp8", "bf16"]


@pytest.mark.parametrize(
    "text", [r"model\.layers\.(0|1)\..*", "model.layers.*.mlp.*.gate.*", r"(a[(+]b)+", r"(?:\d)+", "a|b"]
)
def test_patterns_that_end(text: str) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": [text]}
    assert bind({**MODEL, "quantization_config": config})(1, 16).total > 0
