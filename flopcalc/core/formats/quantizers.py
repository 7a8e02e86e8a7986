"""One reader per quantization library: the keys of its quantization_config in, rules for weights out.

Defaults are those of transformers 5 (utils/quantization_config.py, quantizers/) and of the libraries themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from flopcalc.base.errors import ConfigError, RecipeError, format_nearest, format_value
from flopcalc.base.number_formats import find_computed, parse_compute
from flopcalc.core.formats.compressed_tensors import read_cache, read_compressed
from flopcalc.core.formats.kept_float32 import list_unconverted
from flopcalc.core.formats.quantization import (
    ALL_KINDS,
    WITH_HEAD,
    Keys,
    Kind,
    Pattern,
    Quantization,
    QuantizationRule,
    exclude,
    find_config,
    make_grouped,
    make_stored,
    say_by_hand,
)
from flopcalc.core.formats.stored import StoredFormat
from flopcalc.core.spec.spec import find_spec

# Any number of bits is stored unpacked in int8, and is dequantized; activations are only rounded (torchao 0.18).
_INTX = {"format": "int8", "zero_bits": 8, "compute": ""}
_TYPES: dict[str, dict[str, Any]] = {
    "int4weightonly": {"format": "int4", "zero_bits": 16, "size": 128},
    "int8weightonly": {"format": "int8"},
    "int8dynamicactivationint8weight": {"format": "w8a8"},
    "intxweightonly": _INTX,
    "int8dynamicactivationintxweight": {**_INTX, "size": 32},
    "float8weightonly": {"format": "fp8", "compute": "", "outputs": 1},
    "float8dynamicactivationfloat8weight": {"format": "fp8"},
    "nvfp4dynamicactivationnvfp4weight": {"format": "nvfp4"},
    "nvfp4weightonly": {"format": "nvfp4", "compute": ""},
    "mxdynamicactivationmxweight": {"format": "mxfp8"},
}
# Fields of torchao's config classes, of 0.18 and of older releases.
_FIELDS = (
    "group_size", "granularity", "weight_granularity", "weight_dtype", "activation_dtype", "mapping_type",
    "weight_mapping_type", "act_mapping_type", "scale_dtype", "weight_scale_dtype", "layout", "use_hqq",
    "zero_point_domain", "preserve_zero", "set_inductor_config", "int4_packing_format", "int4_choose_qparams_algorithm",
    "int4_tile_packed_ntile", "intx_packing_format", "intx_choose_qparams_algorithm", "packing_format", "mm_config",
    "activation_value_lb", "activation_value_ub", "kernel_preference", "weight_only_decode", "reduce_range", "version",
    "alg_id", "block_size", "scaling_mode", "use_triton_kernel", "use_dynamic_per_tensor_scale", "step",
    "gemm_kernel_choice", "inner_k_tiles",
)  # fmt: skip


def read_torchao(keys: Keys) -> Quantization:
    """Rules of one type for all modules, or of one per module name."""
    found: object = keys.take("quant_type", (str, Mapping))
    arguments = keys.take("quant_type_kwargs", Mapping, {})
    keys.skip("untie_embedding_weights")
    embeds = keys.take("include_input_output_embeddings", bool, False)
    if isinstance(found, Mapping) and set(found) == {"default"}:
        found = found["default"]
    if isinstance(found, str):
        found = {"_type": found, "_data": arguments}
    if not isinstance(found, Mapping):
        keys.fail("quant_type", "is missing")
    rules = exclude(keys, "modules_to_not_convert")
    kinds: tuple[Kind, ...] = ("linear", "head")
    if embeds:
        rules = [rule for rule in rules if rule.kinds != ("head",)]
        kinds = ("linear", "head", "embed")
    inner = keys.enter("quant_type", found.get("_data") or {}, "quant_type").config
    several = next((inner[key] for key in ("module_fqn_to_config", "fqn_to_config") if key in inner), None)
    if several is None:
        return Quantization("torchao", (*rules, QuantizationRule(_read_type(keys, found), kinds)))
    last = []
    for name, entry in keys.enter("quant_type", several, "quant_type").config.items():
        stored = None if entry is None else _read_type(keys, entry)
        if name == "_default":
            last.append(QuantizationRule(stored, kinds))
        elif name.startswith("re:"):
            whole = name[3:].removesuffix("weight").removesuffix(".").removesuffix("\\")  # a parameter's, or a module's
            text = f"(?:{whole})$"
            rules.append(QuantizationRule(stored, ALL_KINDS, tuple(keys.compile("quant_type", [text], "regex"))))
        else:
            rules.append(QuantizationRule(stored, ALL_KINDS, (Pattern(name.removesuffix(".weight"), "name"),)))
    return Quantization("torchao", (*rules, *last))


def _read_type(keys: Keys, entry: object) -> StoredFormat:
    entry = keys.enter("quant_type", entry, "quant_type").config
    name, own = str(entry.get("_type")), keys.enter("quant_type", entry.get("_data") or {}, "quant_type")
    plain = name.removesuffix("Config").replace("_", "").lower()
    known = _TYPES.get(plain)
    if known is None:
        keys.fail("quant_type", f"is {format_value(name)}; known: {', '.join(_TYPES)}")
    own.skip(*_FIELDS)
    own.finish()
    data = own.config
    for key in ("layout", "int4_packing_format", "packing_format"):
        if "sparse" in str(data.get(key)).lower():
            own.fail(key, f"is {format_value(data[key])}: sparse weights are not read")
    if data.get("block_size", 32) != 32:
        own.fail("block_size", f"is {format_value(data['block_size'])}; known: 32")
    changes = {key: value for key, value in known.items() if key not in ("format", "size")}
    granularity = data.get("weight_granularity") or data.get("granularity")
    format_ = known["format"]
    if format_ == "mxfp8" and "float4" in str(data.get("weight_dtype")):
        is_cast = "float4" in str(data.get("activation_dtype"))
        return make_stored("mxfp4", "quantization_config.quant_type", compute="mxfp4" if is_cast else "mxfp8")
    if "PerRow" in str(granularity):
        changes["outputs"] = 1
    if format_ in ("int8", "w8a8") and "zero_bits" not in changes and entry.get("_version", 1) != 1:
        changes["scale_bits"] = 32
    size = data.get("group_size", known.get("size"))
    if isinstance(granularity, Mapping) and granularity.get("_type") == "PerGroup":
        size = (granularity.get("_data") or {}).get("group_size", size)
    elif isinstance(granularity, Mapping) and granularity.get("_type") == "PerAxis":
        size = None
    if size is None:
        return make_stored(format_, **changes)
    if type(size) is not int:
        keys.fail("quant_type", f"has group_size {format_value(size)}")
    return make_grouped(keys, format_, size, "quant_type.group_size", **changes)


# Methods whose quantizers in transformers leave out what `_keep_in_fp32_modules` lists.
_SKIP_FLOAT32 = ("awq", "bitsandbytes", "fbgemm_fp8", "fp8", "mxfp4", "mxfp8", "nvfp4", "torchao")
# Methods that convert torch.nn.Linear itself but no subclass, as the one in torch.nn.MultiheadAttention.
_EXACT = ("bitsandbytes", "fp8")
# Methods that do not convert transformers' Conv1D.
_LINEAR_ALONE = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "hqq", "mxfp8", "nvfp4", "torchao")


def read_quantization(config: Mapping[str, object], where: str) -> Quantization | None:
    """What a model's quantization_config says; None without one, and where it dequantizes all weights on loading."""
    found = find_config(config, where)
    if found is None:
        return None
    if "quantization" in found and "quant_method" not in found:  # as hf_quant_config.json has it
        inner = found["quantization"]
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{where}: quantization_config.quantization must be an object; {say_by_hand()}")
        found = {**inner, "quant_method": "modelopt"}
    method = found.get("quant_method")
    if method is None:
        method = _guess_method(found)
    name = getattr(method, "value", method)  # transformers' own enum
    if not name:
        raise ConfigError(f"{where}: quantization_config.quant_method is missing; {say_by_hand()}")
    reader = _READERS.get(str(name).lower().replace("_", "-"))
    if reader is None:
        near = format_nearest(str(name), _READERS)
        known = ", ".join(_READERS)
        raise ConfigError(
            f"{where}: quantization_config.quant_method {format_value(name)} cannot be read.{near} Known: {known}; "
            f"{say_by_hand()}"
        )
    keys = Keys(found, where)
    keys.skip("quant_method")
    is_dequantized = keys.take("dequantize", bool, False)
    result = reader(keys)
    result = _leave_out(result, config)
    if result.method == "bitsandbytes" and str(config.get("model_type")).startswith("llama4"):
        result = _split_experts(result)
    keys.finish()
    return None if is_dequantized else result


def _leave_out(found: Quantization, config: Mapping[str, object]) -> Quantization:
    """Modules that the quantizers of transformers pass over without being told."""
    rules: list[QuantizationRule] = []
    notes = found.notes
    if found.method in _SKIP_FLOAT32 and (names := list_unconverted(config)):
        rules.append(QuantizationRule(None, ALL_KINDS, tuple(Pattern(name, "hf") for name in names)))
    if found.method in _EXACT:
        rules.append(QuantizationRule(None, ("subclass",)))
    spec = find_spec(str(config.get("model_type")))
    if spec is not None and spec.has_conv1d and found.method in _LINEAR_ALONE:
        rules.append(QuantizationRule(None, ("linear",)))
        notes += (f"{found.method} converts torch.nn.Linear alone: this model's layers are Conv1D and stay plain",)
    return replace(found, rules=(*rules, *found.rules), notes=notes) if rules else found


def _split_experts(found: Quantization) -> Quantization:
    """transformers makes linears of Llama 4's experts before it quantizes (quantizers/base.py)."""
    rules = (*found.rules, QuantizationRule(found.rules[-1].stored, ("expert",)))
    return replace(found, rules=rules, notes=tuple(note for note in found.notes if "experts" not in note))


def _guess_method(found: Mapping[str, object]) -> str:
    """Older files do not name the method."""
    if any(found.get(key) for key in ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")):
        return "bitsandbytes"
    if "quant_algo" in found:
        return "modelopt"
    return "compressed-tensors" if "config_groups" in found else ""


# --- float formats ----------------------------------------------------------------------------------------------------
def _read_fp8(keys: Keys) -> Quantization:
    scheme = keys.choose("activation_scheme", ("dynamic", "static"), "dynamic")
    keys.choose("fmt", ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), "e4m3")
    # transformers takes blocks where nothing is said; AutoFP8 never writes the key, and has a scale per weight.
    is_whole = "weight_block_size" in keys.config or scheme == "static" or "ignored_layers" in keys.config
    block = keys.take("weight_block_size", (list, tuple), None if is_whole else [128, 128])
    scale_bits = {"float": 32, "ue8m0": 8}[keys.choose("scale_fmt", ("float", "ue8m0"), "float")]
    static = 32 if scheme == "static" else 0
    if block is None:
        stored = make_stored("fp8", tensor_bits=static)
    else:
        if len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
            keys.fail("weight_block_size", f"is {format_value(block)}; it is two sizes, as [128, 128]")
        stored = make_stored("fp8-block", outputs=block[0], inputs=block[1], scale_bits=scale_bits, tensor_bits=static)
    expert = stored
    if keys.choose("expert_dtype", ("fp8", "fp4"), "fp8") == "fp4":
        expert = make_stored("mxfp4", "the block", compute="fp8")
    rules = exclude(keys, "modules_to_not_convert", "ignored_layers")
    more = keys.take_names("modules_to_convert")
    if more:
        rules.append(QuantizationRule(stored, ("embed", "head"), tuple(keys.compile("modules_to_convert", more, "hf"))))
    rules += [QuantizationRule(expert, ("expert",)), QuantizationRule(stored, ("linear", "head"))]
    return Quantization("fp8", tuple(rules), read_cache(keys))


def _read_block_format(name: str) -> Callable[[Keys], Quantization]:
    """Formats that transformers makes while it loads: mxfp8, nvfp4."""

    def read(keys: Keys) -> Quantization:
        rules = exclude(keys, "modules_to_not_convert")
        return Quantization(name, (*rules, QuantizationRule(make_stored(name), ("linear", "head"))))

    return read


def _read_fbgemm(keys: Keys) -> Quantization:
    keys.skip("activation_scale_ub")
    rules = exclude(keys, "modules_to_not_convert")
    return Quantization(
        "fbgemm_fp8", (*rules, QuantizationRule(make_stored("fp8", outputs=1, tensor_bits=32), ("linear", "head")))
    )


def _read_mxfp4(keys: Keys) -> Quantization:
    rules = exclude(keys, "modules_to_not_convert")
    return Quantization("mxfp4", (*rules, QuantizationRule(make_stored("mxfp4"), ("expert",))))


# --- integers, by weight alone ----------------------------------------------------------------------------------------
def _read_awq(keys: Keys) -> Quantization:
    bits = keys.choose(keys.pick("w_bit", "bits"), (4,), 4)
    size = keys.take(keys.pick("q_group_size", "group_size"), int, 128)
    keys.take("zero_point", bool, True)  # zero points are stored either way
    for key in ("version", "format"):
        keys.choose(key, ("gemm", "gemv", "gemv_fast", "llm-awq", "exllama", "ipex"), "gemm")
    keys.skip(
        "backend", "fuse_max_seq_len", "do_fuse", "modules_to_fuse", "exllama_config", "sym", "desc_act", "meta",
        "true_sequential", "damp_percent", "dataset", "tokenizer", "checkpoint_format", *_TRAINING,
    )  # fmt: skip
    rules = exclude(keys, "modules_to_not_convert", adds_head=True)
    return Quantization("awq", (*rules, QuantizationRule(make_grouped(keys, f"int{bits}", size))))


# Of making the weights, not of storing them.
_TRAINING = (
    "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id",
    "max_input_length", "cache_block_outputs", "use_cuda_fp16", "use_exllama", "disable_exllama", "act_group_aware",
    "static_groups", "model_name_or_path", "model_file_base_name", "pack_dtype", "hyb_act", "is_marlin_format",
    "method", "failsafe", "gptaq", "foem", "hessian", "gc_mode", "offload_to_disk", "offload_to_disk_path", "rotation",
    "vram_strategy", "adapter", "mock_quantization", "pack_impl", "auto_forward_data_parallel",
)  # fmt: skip


def _read_gptq(keys: Keys) -> Quantization:
    bits = keys.choose("bits", (2, 3, 4, 8), None)
    size = keys.take("group_size", int, 128)
    for key in ("sym", "desc_act", "true_sequential"):
        keys.take(key, bool)
    keys.skip(
        "tokenizer", "dataset", "damp_percent", "damp_auto_increment", "meta",
        "backend", "exllama_config", "v2", "mse", "quantizer", *_TRAINING,
    )  # fmt: skip
    for key in ("format", "checkpoint_format"):
        keys.choose(key, ("gptq", "gptq_v2"), "gptq")
    stored = _make_gptq(keys, bits, size)
    rules: list[QuantizationRule] = []
    for text, changes in (keys.take("dynamic", Mapping) or {}).items():
        patterns = tuple(keys.compile("dynamic", [text[2:] if text[:2] in ("-:", "+:") else text], "regex"))
        if text.startswith("-:"):
            rules.append(QuantizationRule(None, WITH_HEAD, patterns))
            continue
        own = keys.enter("dynamic", changes, f"dynamic[{text!r}]")
        own.skip("desc_act", "sym", "damp_percent", "mse", "act_group_aware", "static_groups")
        some = _make_gptq(own, own.choose("bits", (2, 3, 4, 8), bits), own.take("group_size", int, size))
        own.finish()
        rules.append(QuantizationRule(some, WITH_HEAD, patterns))
    inside = keys.take("modules_in_block_to_quantize", (list, tuple))
    excluded = exclude(keys, "modules_to_not_convert")
    has_head = keys.take("lm_head", bool, False)
    kinds: tuple[Kind, ...] = WITH_HEAD if has_head else ("linear", "expert")
    rules += [rule for rule in excluded if not (has_head and rule.kinds == ("head",))]
    if inside is None:
        return Quantization("gptq", (*rules, QuantizationRule(stored, kinds, is_language=True)))
    names = [name for entry in inside for name in (entry if isinstance(entry, (list, tuple)) else (entry,))]
    if not all(isinstance(name, str) for name in names):
        keys.fail("modules_in_block_to_quantize", f"is {format_value(inside)}; it is names, or lists of names")
    patterns = tuple(keys.compile("modules_in_block_to_quantize", names, "name"))
    return Quantization("gptq", (*rules, QuantizationRule(stored, kinds, patterns, is_language=True)))


def _make_gptq(keys: Keys, bits: int, size: int) -> StoredFormat:
    """Packed numbers and zero points, fp16 scales, and the group of every input."""
    name = f"int{bits}"
    return make_grouped(keys, name, size, bits=bits, scale_bits=16, zero_bits=bits, index_bits=32)


def _read_auto_round(keys: Keys) -> Quantization:
    packing = str(keys.take("packing_format", str, "auto_round:auto_gptq"))
    if not packing.endswith(("gptq", "awq")):
        keys.fail("packing_format", f"is {format_value(packing)}; known: auto_round:auto_gptq, auto_round:auto_awq")
    bits, size = keys.choose("bits", (2, 3, 4, 8), 4), keys.take("group_size", int, 128)
    _check_auto_round(keys)
    cache = {"": "", "fp8": "fp8", "float8_e4m3fn": "fp8"}
    kv_cache = cache[keys.choose("static_kv_dtype", cache, "")]
    keys.take("sym", bool)
    keys.skip(
        "backend", "autoround_version", "auto_round_version", "iters", "nsamples", "lr", "minmax_lr", "seqlen",
        "batch_size", "low_gpu_mem_usage", "gradient_accumulate_steps", "enable_minmax_tuning", "to_quant_block_names",
        "block_name_to_quantize", "enable_quanted_input", "amp", "train_bs", "dataset", "provider",
        "enable_norm_bias_tuning", "quant_block_list", "enable_alg_ext", "supported_types", "regex_config",
    )  # fmt: skip
    has_head = keys.take("quant_lm_head", bool, False)
    is_awq = packing.endswith("awq")
    make: Callable[[Keys, int, int], StoredFormat] = _make_gptq
    if is_awq:
        make = lambda own, each, many: make_grouped(own, f"int{each}", many)  # noqa: E731
    rules = []
    for name, changes in (keys.take("extra_config", Mapping) or {}).items():
        own = keys.enter("extra_config", changes, f"extra_config[{name!r}]")
        each = own.choose("bits", (2, 3, 4, 8, 16, 32), bits)
        _check_auto_round(own, is_plain=each >= 16)
        some = None if each >= 16 else make(own, each, own.take("group_size", int, size))
        own.skip("group_size", "sym", "in_blocks", "fixed_by_user")
        own.finish()
        # A name, or a regular expression for whole names.
        patterns = (Pattern(name, "name"), *keys.compile("extra_config", [f"(?:{name})$"], "regex"))
        rules.append(QuantizationRule(some, WITH_HEAD, patterns))
    rules += [rule for rule in exclude(keys, "modules_to_not_convert") if not (has_head and rule.kinds == ("head",))]
    stored = make(keys, bits, size)
    kinds = WITH_HEAD if has_head else ("linear", "expert")
    return Quantization("auto-round", (*rules, QuantizationRule(stored, kinds, is_language=True)), kv_cache)


def _check_auto_round(keys: Keys, is_plain: bool = False) -> None:
    """Weights are integers with plain scales, and activations are not quantized."""
    if not is_plain:
        keys.choose("data_type", ("int",), "int")
    for key in ("act_bits", "super_bits", "super_group_size"):
        bits = keys.take(key, int)
        if bits is not None and (key != "act_bits" or bits < 16):
            keys.fail(key, f"is {bits}: quantized {'activations' if key == 'act_bits' else 'scales'} are not read")
    for key in ("rotation_config", "rotation_configs", "static_attention_dtype"):
        if keys.take(key, (str, Mapping, list)):
            keys.fail(key, f"is {format_value(keys.config[key])}, which is not read here")
    keys.skip(
        "data_type",
        "scale_dtype",
        "act_group_size",
        "act_sym",
        "act_dynamic",
        "act_data_type",
        "static_kv_granularity",
        "static_attention_granularity",
    )


_BITS = {bits: (f"load_in_{bits}bit", f"_load_in_{bits}bit") for bits in (4, 8)}


def _read_bitsandbytes(keys: Keys) -> Quantization:
    asked = {key: keys.take(key, bool, False) for key in (*_BITS[4], *_BITS[8])}
    four, eight = (any(asked[key] for key in names) for names in _BITS.values())
    if four == eight:
        keys.fail("load_in_4bit", f"and load_in_8bit are both {str(four).lower()}")
    if keys.take("llm_int8_has_fp16_weight", bool, False) and eight:
        keys.fail("llm_int8_has_fp16_weight", "is true: 16-bit weights beside int8 products are not read")
    keys.take("llm_int8_threshold", (int, float))
    kind = keys.choose("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    is_double = keys.take("bnb_4bit_use_double_quant", bool, False)
    compute = keys.config.get("bnb_4bit_compute_dtype")
    keys.skip("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "llm_int8_enable_fp32_cpu_offload")
    notes = ["bitsandbytes converts torch.nn.Linear alone: stacks of experts stay in the model's own format"]
    if four:
        stored = make_stored("nf4-double" if is_double else "nf4", name=f"{kind}-double" if is_double else kind)
        try:
            found = find_computed(parse_compute("fp32" if compute is None else compute, "dtype"))
        except RecipeError:
            keys.fail("bnb_4bit_compute_dtype", f"is {format_value(compute)}, which is no format")
        if not found.is_everywhere:
            keys.fail("bnb_4bit_compute_dtype", f"is {format_value(compute)}; known: bfloat16, float16, float32")
        stored = replace(stored, compute=found.name)
        if compute is None:
            notes.append("bnb_4bit_compute_dtype is not set: bitsandbytes computes in float32 then")
    else:
        # int8 products forward, the dequantized weight backward; a float32 scale per output.
        stored = make_stored("int8", compute="int8", gradient="model", scale_bits=32)
    rules = exclude(keys, "llm_int8_skip_modules")
    return Quantization("bitsandbytes", (*rules, QuantizationRule(stored, ("linear", "head"))), notes=tuple(notes))


def _read_hqq(keys: Keys) -> Quantization:
    found = keys.take("quant_config", Mapping)
    skipped = keys.take_names("skip_modules")
    rules = [
        QuantizationRule(
            None, ALL_KINDS, tuple(keys.compile("skip_modules", ("lm_head",) if skipped is None else skipped, "hf"))
        )
    ]
    if not found:
        keys.fail("quant_config", "is missing")
    layers = {"": found} if "weight_quant_params" in found else dict(found)
    for tag, entry in layers.items():
        own = keys.enter("quant_config", entry, "quant_config" if not tag else f"quant_config[{tag!r}]")
        for key in ("scale_quant_params", "zero_quant_params"):
            if own.take(key, Mapping) is not None:
                own.fail(key, "is set: quantized scales are not read")
        own.skip("offload_meta")
        weights = Keys(own.take("weight_quant_params", Mapping, {}), keys.where, f"{own.name}.weight_quant_params")
        own.finish()
        bits = weights.choose("nbits", (8, 4, 3, 2, 1), 4)
        size = weights.take("group_size", int)
        if size is not None and size < 1:
            weights.fail("group_size", f"is {size}; it is a number of weights")
        weights.choose("axis", (0, 1), 1)
        weights.skip("channel_wise", "optimize", "round_zero", "view_as_float")
        weights.finish()
        # Ten numbers of 3 bits to 32; scale and zero point in 16 bits each.
        packed = Fraction(16, 5) if bits == 3 else bits
        name = f"int{bits}-g{size}" if size else f"int{bits}"
        stored = StoredFormat(
            name, packed, outputs=0 if size else 1, flat=size or 0, scale_bits=16, zero_bits=16,
            key=f"{weights.name}.group_size",
        )  # fmt: skip
        rules.append(QuantizationRule(stored, ("linear", "head"), (Pattern(tag, "name"),) if tag else ()))
    return Quantization("hqq", tuple(rules))


def _read_mlx(keys: Keys) -> Quantization:
    """MLX's own key `quantization`: groups of inputs with a scale and an offset, embeddings too."""
    rules = []
    for name, entry in keys.config.items():
        if not isinstance(entry, (Mapping, bool)):
            continue
        keys.skip(name)
        own = Keys(entry if isinstance(entry, Mapping) else {}, keys.where, f"{keys.name}[{name!r}]")
        some = None if entry is False else _read_mlx_layer(own if entry is not True else keys)
        own.finish()
        rules.append(QuantizationRule(some, ALL_KINDS, (Pattern(name, "name"),)))
    stored = _read_mlx_layer(keys)
    return Quantization("mlx", (*rules, QuantizationRule(stored, ("linear", "expert", "head", "embed"))))


def _read_mlx_layer(keys: Keys) -> StoredFormat:
    mode = keys.choose("mode", ("affine", "mxfp4", "mxfp8", "nvfp4"), "affine")
    bits, size = keys.take("bits", int), keys.take("group_size", int)
    if mode != "affine":
        stored = make_stored(mode, f"{keys.name}.group_size", compute="", tensor_bits=0)
        if (bits or stored.bits, size or stored.inputs) != (stored.bits, stored.inputs):
            keys.fail("group_size", f"and bits are {size} and {bits}; {mode} has {stored.inputs} and {stored.bits}")
        return stored
    if bits not in (2, 3, 4, 5, 6, 8):
        keys.fail("bits", f"is {format_value(bits)}; known: 2, 3, 4, 5, 6, 8")
    size = keys.choose("group_size", (32, 64, 128), 64)  # of MLX's kernels
    stored = make_grouped(keys, "int4", size, bits=bits, zero_bits=16)
    return replace(stored, name=f"int{bits}-g{stored.inputs}")


# --- modelopt ---------------------------------------------------------------------------------------------------------
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "FP8": {"format": "fp8", "tensor_bits": 32},
    "FP8_PER_CHANNEL_PER_TOKEN": {"format": "fp8", "outputs": 1},
    "FP8_PB_REAL": {"format": "fp8-block"},
    "FP8_PB_WO": {"format": "fp8-block", "compute": ""},
    "NVFP4": {"format": "nvfp4", "tensor_bits": 64, "size": 16},
    "NVFP4_AWQ": {"format": "nvfp4", "tensor_bits": 64, "size": 16},
    "W4A16_AWQ": {"format": "int4", "zero_bits": 0, "size": 128},
    "INT4_AWQ": {"format": "int4", "zero_bits": 0, "size": 128},
    "W4A8_AWQ": {"format": "int4", "zero_bits": 0, "size": 128, "compute": "fp8"},
    "W8A16": {"format": "int8"},
    "W8A8_SQ_PER_CHANNEL": {"format": "w8a8"},
    "MXFP8": {"format": "mxfp8"},
}


def _read_modelopt(keys: Keys) -> Quantization:
    keys.skip("producer", "config_groups", "quant_type")
    excluded = [found for key in ("ignore", "exclude_modules") if (found := keys.take_names(key)) is not None]
    patterns = [Pattern(name, "glob") for names in excluded for name in names]
    patterns += [Pattern(f"*{pattern.text}", "glob") for pattern in patterns if not pattern.text.startswith("*")]
    rules = [QuantizationRule(None, ALL_KINDS, tuple(patterns))] if patterns else [QuantizationRule(None, ("head",))]
    layers = keys.take("quantized_layers", Mapping) or {}
    for name, entry in layers.items():
        own = keys.enter("quantized_layers", entry, f"quantized_layers[{name!r}]")
        rules.append(QuantizationRule(_read_algorithm(own), WITH_HEAD, (Pattern(name, "name"),)))
        own.finish()
    if not layers:
        rules.append(QuantizationRule(_read_algorithm(keys), WITH_HEAD))
    else:
        keys.choose("quant_algo", ("mixed_precision",), "mixed_precision")
        keys.skip("has_zero_point", "pre_quant_scale")
    return Quantization("modelopt", tuple(rules), read_cache(keys))


def _read_algorithm(keys: Keys) -> StoredFormat | None:
    if "quant_algo" not in keys.config:
        keys.fail("quant_algo", "is missing")
    name = keys.take("quant_algo", str)
    size = keys.take("group_size", int)
    keys.take("pre_quant_scale", bool)
    if keys.take("has_zero_point", bool, False):
        keys.fail("has_zero_point", "is true: zero points are not read")
    if name is None or name.lower() == "none":
        return None
    found = _ALGORITHMS.get(name.upper())
    if found is None:
        keys.fail("quant_algo", f"is {format_value(name)}; known: {', '.join(_ALGORITHMS)}")
    changes = {key: value for key, value in found.items() if key not in ("format", "size")}
    if found["format"] == "int4":
        return make_grouped(keys, "int4", found["size"] if size is None else size, **changes)
    if size not in (None, found.get("size", size)):
        keys.fail("group_size", f"is {size}; {name} has groups of {found['size']}")
    return make_stored(found["format"], f"{keys.name}.group_size", **changes)


_READERS: dict[str, Callable[[Keys], Quantization]] = {
    "fp8": _read_fp8,
    "fbgemm-fp8": _read_fbgemm,
    "mxfp4": _read_mxfp4,
    "mxfp8": _read_block_format("mxfp8"),
    "nvfp4": _read_block_format("nvfp4"),
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "bitsandbytes": _read_bitsandbytes,
    "hqq": _read_hqq,
    "compressed-tensors": read_compressed,
    "modelopt": _read_modelopt,
    "modelopt-fp4": _read_modelopt,
    "torchao": read_torchao,
    "mlx": _read_mlx,
}
