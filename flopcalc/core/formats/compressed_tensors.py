"""compressed-tensors' part of a quantization_config: groups of modules, and how their weights and inputs are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flopcalc.base.errors import format_value
from flopcalc.base.units import is_digits
from flopcalc.core.formats.quantization import (
    ALL_KINDS,
    WITH_HEAD,
    Keys,
    Kind,
    Pattern,
    Quantization,
    QuantizationRule,
    make_stored,
)
from flopcalc.core.formats.stored import StoredFormat

# Formats of the library's CompressionFormat (0.13), and the kind of numbers that each holds.
_FORMATS = {
    "": ("int", "float"), "dense": ("int", "float"), "naive-quantized": ("int", "float"),
    "mixed-precision": ("int", "float"), "int-quantized": ("int",), "pack-quantized": ("int",), "marlin-24": ("int",),
    "float-quantized": ("float",), "nvfp4-pack-quantized": ("float",), "mxfp4-pack-quantized": ("float",),
    "mxfp6-pack-quantized": ("float",), "mxfp8-quantized": ("float",),
}  # fmt: skip
_SPARSE = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")
_WITH_GROUPS = ("group", "tensor_group")


def read_compressed(keys: Keys) -> Quantization:
    """Rules of the groups: names before classes, and what is ignored before both."""
    format_ = _read_format(keys)
    keys.skip(
        "quantization_status",
        "global_compression_ratio",
        "version",
        "run_compressed",
        "use_optimized_inference",
        "producer",
    )
    turned = keys.take("transform_config", Mapping) or {}
    notes = ("transform_config: rotations that run with the model are not counted",) if turned else ()
    sparse = keys.take("sparsity_config", Mapping) or {}
    if sparse.get("format", "dense") not in ("dense", None):
        keys.fail("sparsity_config", f"has format {format_value(sparse.get('format'))}: sparse weights are not read")
    rules: list[QuantizationRule] = []
    ignored = keys.take_names("ignore") or ()
    if ignored:
        rules += _match_targets(keys, "ignore", ignored, None)
    named: list[QuantizationRule] = []
    classes: list[QuantizationRule] = []
    groups = keys.take("config_groups", Mapping) or {}
    for label, group in groups.items():
        own = keys.enter("config_groups", group, f"config_groups.{label}")
        targets = own.take_names("targets")
        if not targets:
            own.fail("targets", "is missing")
        own.skip("output_activations")
        stored = _read_scheme(own, _read_format(own) or format_)
        own.finish()
        for rule in _match_targets(own, "targets", targets, stored):
            if any(rule.kinds == other.kinds and other.stored != stored for other in classes if not rule.patterns):
                own.fail("targets", f"holds {format_value(targets[0])}, which another group has too")
            (named if rule.patterns else classes).append(rule)
    cache = read_cache(keys)
    if not groups and not cache:
        keys.fail("config_groups", "is missing")
    return Quantization("compressed-tensors", (*rules, *named, *classes), cache, notes)


def _read_format(keys: Keys) -> str:
    text: str = keys.choose("format", (*_FORMATS, *_SPARSE), "")
    if text in _SPARSE:
        keys.fail("format", f"is {format_value(text)}: sparse weights are not read")
    return text


_CLASSES: dict[str, tuple[Kind, ...]] = {"Linear": WITH_HEAD, "Embedding": ("embed",)}


def _match_targets(keys: Keys, key: str, names: tuple[str, ...], stored: StoredFormat | None) -> list[QuantizationRule]:
    """Names, classes and regular expressions ('re:…') of modules."""
    rules = [QuantizationRule(stored, _CLASSES[name]) for name in names if name in _CLASSES]
    patterns = keys.compile(key, [name[3:] for name in names if name.startswith("re:")], "regex")
    patterns += [Pattern(name, "name") for name in names if name not in _CLASSES and not name.startswith("re:")]
    if patterns:
        rules.append(QuantizationRule(stored, WITH_HEAD if stored is not None else ALL_KINDS, tuple(patterns)))
    return rules


def _read_scheme(keys: Keys, format_: str) -> StoredFormat | None:
    """One group's weights, and its activations, which say what the product is computed in."""
    weights, inputs = (keys.take(key, Mapping) for key in ("weights", "input_activations"))
    if weights is None and inputs is None:
        keys.fail("weights", "is missing, and input_activations too")
    if weights is None:
        return None
    own = Keys(weights, keys.where, f"{keys.name}.weights")
    kind, bits, strategy, size, block, symmetric, index = _read_args(own)
    if strategy in ("token", "attn_head"):
        own.fail("strategy", f"is {format_value(strategy)}, which weights do not have")
    if kind not in _FORMATS[format_]:
        own.fail("type", f"is {kind}, which format {format_} does not hold")
    if format_ == "dense":
        return None  # weights as they are, and fake-quantized in the model's own format
    changes: dict[str, Any] = {"compute": ""}
    if inputs is not None:
        changes["compute"] = _name_compute(Keys(inputs, keys.where, f"{keys.name}.input_activations"))
    key = f"{keys.name}.weights.group_size"
    if kind == "float" and (bits in (4, 6) or "mxfp8" in format_):
        return _make_small_float(own, format_, bits, strategy, size, changes | {"key": key}, inputs is not None)
    if bits not in (range(2, 9) if kind == "int" else (8,)):
        own.fail("num_bits", f"is {bits}; known: 2 to 8 with type int, 4, 6 and 8 with type float")
    name = f"{'fp' if kind == 'float' else 'int'}{bits}"
    is_packed = kind == "int" and "pack" in format_
    has_static_inputs = inputs is not None and not inputs.get("dynamic", False)  # with one scale of 16 bits
    stored = StoredFormat(
        name,
        bits if is_packed else 8,
        scale_bits=16,
        zero_bits=0 if symmetric else bits if is_packed else 8,
        tensor_bits=128 * is_packed + 16 * has_static_inputs,
        index_bits=index,
        key=key,
        **changes,
    )
    if strategy == "block":
        return replace(stored, name=f"{name}-block", outputs=block[0], inputs=block[1], rounds=True)
    if strategy == "group":
        return replace(stored, name=f"{name}-g{size}", outputs=1, inputs=size)
    return replace(stored, outputs=1) if strategy == "channel" else stored


def _make_small_float(
    keys: Keys, format_: str, bits: int, strategy: str, size: int, changes: dict[str, Any], is_cast: bool
) -> StoredFormat:
    """nvfp4 in groups of 16, or an MX format in groups of 32."""
    is_nvidia = bits == 4 and (strategy == "tensor_group" or size == 16 or "nvfp4" in format_)
    name = "nvfp4" if is_nvidia else f"mxfp{bits}"
    if is_nvidia:
        changes = {**changes, "tensor_bits": 64 if is_cast else 32}
    stored = make_stored(name, changes.pop("key"), **changes)
    if name not in format_ and any(word in format_ for word in ("nvfp", "mxfp", "float-")):
        keys.fail("num_bits", f"is {bits} in groups of {size}, which format {format_} does not hold")
    if size not in (0, stored.inputs):
        keys.fail("group_size", f"is {size}; {name} has groups of {stored.inputs}")
    return stored


def _read_args(keys: Keys) -> tuple[str, int, str, int, tuple[int, int], bool, int]:
    """Type, bits, strategy, group size, block, symmetry and the bits of an input's index."""
    kind = keys.choose("type", ("int", "float"), "int")
    bits = keys.take("num_bits", int, 8)
    size = keys.take("group_size", int, 0)
    default = "group" if size > 0 else "channel" if size == -1 else "tensor"
    strategy = keys.choose(
        "strategy", ("tensor", "channel", "group", "block", "tensor_group", "token", "attn_head"), default
    )
    if size < -1 or ("group_size" in keys.config and keys.config["group_size"] == 0):
        keys.fail("group_size", f"is {size}; it is a number of inputs, or -1 for all")
    if size > 0 and strategy not in _WITH_GROUPS:
        keys.fail("group_size", f"is {size}, but strategy is {strategy}")
    block = keys.take("block_structure", (list, tuple, str))
    if block is not None and strategy != "block":
        keys.fail("block_structure", f"is {format_value(block)}, but strategy is {strategy}")
    block = (128, 128) if block is None else block
    if isinstance(block, str):
        block = [int(each) if is_digits(each) else 0 for each in block.lower().split("x")]
    if len(block) != 2 or any(type(each) is not int or each < 1 for each in block):
        keys.fail("block_structure", f"is {format_value(block)}; it is two sizes, as [128, 128]")
    if strategy == "group" and size < 1:
        keys.fail("group_size", f"is {size}; strategy group needs one")
    order = keys.choose("actorder", ("", "group", "dynamic", "static", "weight", True, False), "")
    keys.choose("dynamic", (True, False, "local"), False)
    keys.skip("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx")
    symmetric = keys.take("symmetric", bool, True)
    keys.finish()
    index = 32 if order is True or order in ("group", "dynamic") else 0
    return kind, bits, strategy, max(size, 0), (block[0], block[1]), symmetric, index


def _name_compute(keys: Keys) -> str:
    """The format that activations are brought to, which is the product's."""
    kind, bits, strategy, size, *_ = _read_args(keys)
    names = {("float", 8): "fp8", ("float", 6): "fp6", ("int", 8): "int8", ("int", 4): "int4", ("float", 4): "nvfp4"}
    if (kind, bits) not in names:
        keys.fail("num_bits", f"is {bits} with type {kind}")
    if size == 32 and kind == "float":
        return "mxfp8" if bits == 8 else "mxfp4"
    del strategy
    return names[kind, bits]


def read_cache(keys: Keys) -> str:
    """The format of cached keys and values; empty: the model's own."""
    scheme = keys.take("kv_cache_scheme", (Mapping, str))
    algorithm = keys.take("kv_cache_quant_algo", str)
    if algorithm is not None and algorithm.lower() != "none":
        if algorithm.lower() not in ("fp8", "nvfp4", "int8"):
            keys.fail("kv_cache_quant_algo", f"is {format_value(algorithm)}; known: FP8, NVFP4, INT8")
        return str(algorithm).lower()
    if scheme is None:
        return ""
    if isinstance(scheme, str):
        return "fp8"  # AutoFP8: static or dynamic scales
    return _name_compute(Keys(scheme, keys.where, f"{keys.name}.kv_cache_scheme"))
