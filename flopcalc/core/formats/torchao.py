"""torchao's part of a quantization_config: its config classes as JSON, or the strings of older releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopcalc.base.errors import format_value
from flopcalc.core.formats.quantization import (
    ALL_KINDS,
    Keys,
    Kind,
    Pattern,
    Quantization,
    QuantizationRule,
    exclude,
    make_grouped,
    make_stored,
)
from flopcalc.core.formats.stored import StoredFormat

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
