"""The recipe of a live model: what trains, its adapters and its gradient checkpointing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flopcalc.base.errors import ConfigError, RecipeError
from flopcalc.base.number_formats import PLAIN, parse_compute
from flopcalc.base.vocabulary import Recompute
from flopcalc.core.formats.formats import LiveFormats
from flopcalc.core.formats.stored import StoredFormat, load_stored, make_plain
from flopcalc.core.model.live import WRAPPED, find_shape, iterate_parameters
from flopcalc.core.recipe.recipe import Adapter, Recipe

_SCALES = ("_scale_inv", ".activation_scale")  # parameters of transformers' fp8 modules that are no weights
_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # those that stand around layers too
_WRAPPERS = (*(f"{name}." for name in WRAPPED), "base_model.model.")


def read_recipe(model: Any, recompute: Recompute | None = None) -> tuple[Recipe, dict[str, int], dict[str, str]]:
    """The recipe of a live model from requires_grad and PEFT adapters, and its parameters' sizes by plain name.

    A tensor with several names has all of them, and the last value maps each to the first.
    """
    trained: set[str] = set()
    adapters: dict[str, dict[str, Adapter]] = {}  # adapted module -> name of an adapter -> itself
    sizes: dict[str, int] = {}
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    fused = _find_fused(model)
    active = _find_active(model)
    for full_name, parameter, tensor in iterate_parameters(model):
        path, dot, rest = full_name.partition(".lora_")
        if dot:
            # lora_A is (r, in) for a linear, (r, in, …) for a convolution, (r, vocab) for an embedding, and
            # (experts · r, in) for a stack of experts; its module is the one before it.
            side, _, name = rest.removeprefix("embedding_").partition(".")
            adapted, experts = fused.get(path, (plain_name(path), 1))
            name = name.removesuffix(".weight")
            is_active = path not in active or name in active[path]
            own = adapters.setdefault(adapted, {}).setdefault(name, Adapter(0, is_active=is_active))
            if side == "A":
                adapters[adapted][name] = own.replace(
                    rank=int(find_shape(parameter)[0]) // experts, a=parameter.requires_grad
                )
            elif side == "B":
                adapters[adapted][name] = own.replace(b=parameter.requires_grad)
            if parameter.requires_grad:
                trained.add(f"{adapted}.lora_{side}")
            continue
        name = plain_name(full_name)
        if name.endswith(_SCALES):
            continue
        if ".modules_to_save." in name:
            path, _, rest = name.partition(".modules_to_save.")
            if parameter.requires_grad:
                trained.add(f"{path}.{rest.partition('.')[2]} saved")
            continue
        sizes[name] = _count_elements(parameter)
        names[name] = first.setdefault(tensor, name)
        if parameter.requires_grad:
            trained.add(name)
    if recompute is None:
        recompute = read_recompute(model)
    held = tuple((path, tuple(adapters[path].values())) for path in sorted(adapters))
    recipe = Recipe(recompute=recompute, trained=frozenset(trained), adapters=held)
    return recipe, sizes, names


def _count_elements(parameter: Any) -> int:
    """Elements of a parameter; bitsandbytes packs two of them into one, and keeps the true shape separately."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(getattr(state, "shape", None) or find_shape(parameter))


def read_formats(model: Any, *, are_said: bool = False) -> LiveFormats:
    """The formats of a live model's parameters; bitsandbytes and torchao are known by the names of their classes.

    `are_said`: the user says how linear layers are stored, so a kind of tensor that is not known is no error.
    """
    found: dict[str, StoredFormat] = {}
    sizes: dict[str, int] = {}
    adapter = ""
    modules = dict(model.named_modules())
    for full_name, parameter, _ in iterate_parameters(model):
        if full_name.endswith(_SCALES):
            continue
        if ".lora_" in full_name:
            adapter = parse_compute(parameter.dtype, full_name, ConfigError)
            continue
        name = plain_name(full_name)
        stored = _find_stored(modules.get(full_name.rpartition(".")[0]), parameter, full_name, are_said)
        found[name] = stored
        if not stored.is_quantized:
            sizes[stored.name] = sizes.get(stored.name, 0) + math.prod(find_shape(parameter))
    plain = max(sizes, key=lambda name: sizes[name], default=PLAIN)
    own = make_plain(plain)
    return LiveFormats(plain, {name: stored for name, stored in found.items() if stored != own}, adapter)


def _find_stored(module: object, parameter: Any, name: str, are_said: bool) -> StoredFormat:
    kind, holder = type(parameter).__name__, type(module).__name__
    if kind == "Params4bit":
        return _read_4bit(module, parameter, name)
    if holder == "Linear8bitLt" and kind == "Int8Params" and not getattr(parameter, "has_fp16_weights", False):
        return replace(load_stored()["int8"], compute="int8", gradient="model", scale_bits=32)
    if holder.startswith("FP8"):  # transformers' fp8 modules
        block = getattr(module, "block_size", None)
        stored = load_stored()["fp8" if block is None else "fp8-block"]
        return stored if block is None else replace(stored, outputs=int(block[0]), inputs=int(block[1]))
    known = _name_torchao(parameter, kind)
    if known:
        return _read_torchao(parameter, known)
    is_plain = kind in ("Parameter", "Tensor", "Buffer", "DTensor", "Int8Params")
    if not is_plain and not are_said and hasattr(parameter, "__tensor_flatten__"):
        raise ConfigError(f"{name} is a {kind}, whose number format is not known: weights=FORMAT says it by hand")
    return make_plain(parse_compute(parameter.dtype, name, ConfigError))


# torchao's tensor subclasses; its others are refused by name.
_TORCHAO = {
    "Int4Tensor": "int4", "Int4PlainInt32Tensor": "int4", "Float8Tensor": "fp8", "NVFP4Tensor": "nvfp4",
    "Int8Tensor": "int8", "IntxUnpackedToInt8Tensor": "int8", "NF4Tensor": "nf4-double",
}  # fmt: skip
_ACTIVATIONS = (
    "act_quant_kwargs",
    "activation_quantization",
    "activation_dtype",
)  # where torchao says how they are cast
_COMPUTED = {"int8": "int8", "fp8": "fp8"}  # with activations cast too; other formats say it themselves


def _name_torchao(parameter: object, kind: str) -> str:
    """The stored format of one of torchao's tensors; empty for other tensors."""
    if kind == "MXTensor":
        elements = str(getattr(parameter, "elem_dtype", ""))
        return "mxfp8" if "float8" in elements else "mxfp4" if "float4" in elements else ""
    return _TORCHAO.get(kind, "")


def _read_torchao(parameter: Any, known: str) -> StoredFormat:
    """A torchao tensor's block and scales; its product is computed narrow only where activations are cast as well."""
    stored = load_stored()[known]
    if known == "nf4-double":
        return replace(stored, flat=int(parameter.block_size))
    # int4 is dequantized, and so are weights unpacked to int8: their activations are only rounded.
    is_plain = known == "int4" or type(parameter).__name__ == "IntxUnpackedToInt8Tensor"
    is_cast = any(getattr(parameter, name, None) is not None for name in _ACTIVATIONS) and not is_plain
    compute = _COMPUTED.get(known, stored.compute or known) if is_cast else ""
    block = getattr(parameter, "block_size", None)
    outputs, inputs = (1, block) if isinstance(block, int) else tuple(block or ())[-2:] or (0, 0)
    scale, zero = getattr(parameter, "scale", None), getattr(parameter, "zero_point", None)
    return replace(
        stored,
        compute=compute,
        outputs=int(outputs),
        inputs=int(inputs),
        scale_bits=stored.scale_bits if scale is None else 8 * scale.element_size(),
        zero_bits=0 if zero is None else 8 * zero.element_size(),
        rounds=True,
    )


def _read_4bit(module: object, parameter: object, name: str) -> StoredFormat:
    """bitsandbytes' nf4 and fp4, with or without double quantization."""
    word = str(getattr(parameter, "quant_type", "fp4"))
    is_double = bool(getattr(parameter, "compress_statistics", False))
    stored = load_stored()["nf4-double" if is_double else "nf4"]
    size = int(getattr(parameter, "blocksize", 0) or 64)
    dtype = getattr(module, "compute_dtype", None)
    compute = "" if dtype is None else parse_compute(dtype, f"{name}'s compute_dtype", ConfigError)
    return replace(stored, name=f"{word}-double" if is_double else word, flat=size, compute=compute)


def _find_active(model: Any) -> dict[str, frozenset[str]]:
    """The active adapters of each module that has some; an adapter that is not counted is refused by name."""
    found: dict[str, frozenset[str]] = {}
    is_any = False
    for path, module in model.named_modules():
        adapters = getattr(module, "lora_A", None)
        if adapters is None or not hasattr(module, "active_adapters"):
            continue
        names = {*adapters, *getattr(module, "lora_embedding_A", ())}
        active = found[path] = frozenset(names & set(module.active_adapters))
        is_any = is_any or bool(active)
        problem = None
        if getattr(module, "merged", False):
            problem = "has its adapter merged"
        elif getattr(module, "disable_adapters", False):
            problem = "has its adapter switched off"
        elif len(active) > 1 and hasattr(module, "parameter_name"):
            problem = f"folds {len(active)} active adapters into a bare parameter"
        elif any(name in active for name in getattr(module, "lora_variant", ())):
            problem = "uses DoRA or another variant of LoRA"
        elif any(value for name, value in getattr(module, "lora_bias", {}).items() if name in active):
            problem = "uses a LoRA bias"
        if problem:
            raise RecipeError(f"{path} {problem}: only active, plain LoRA adapters are counted")
    if found and not is_any:
        raise RecipeError(f"{next(iter(found))} has its adapter switched off, and so has every other module")
    return found


def _find_fused(model: Any) -> dict[str, tuple[str, int]]:
    """PEFT's wrappers of bare parameters: the wrapper's own path -> the parameter it adapts, and its experts."""
    found = {}
    for path, module in model.named_modules():
        name = getattr(module, "parameter_name", None)
        if isinstance(name, str) and hasattr(module, "lora_A"):
            found[path] = (f"{plain_name(path)}.{name}", int(getattr(module, "num_experts", 1)))
    return found


def plain_name(name: str) -> str:
    """A parameter's or module's name without what DDP, torch.compile and PEFT wrap around it."""
    for wrapper in _WRAPPERS * 2:
        name = name.removeprefix(wrapper)
    for wrapper in (*_INSIDE, "original_module"):
        name = name.replace(f".{wrapper}.", ".")
    while ".base_layer" in name:
        name = name.replace(".base_layer", "")
    return name


def list_wrapped(model: Any) -> dict[str, bool]:
    """Modules in torch's or fairscale's checkpoint_wrapper, by plain name, and whether it is a reentrant one."""
    return {
        plain_name(f"{path}.")[:-1]: is_fairscale or "NO_" not in str(getattr(module, "checkpoint_impl", "NO_"))
        for path, module in model.named_modules()
        for patched in [getattr(vars(module).get("forward"), "func", None)]
        for is_fairscale in [getattr(patched, "__name__", "") == "_checkpointed_forward"]
        if is_fairscale or "_checkpoint_wrapped_module" in module._modules
    }


def has_input_hook(model: Any) -> bool:
    """Whether HF makes the embedding's output require a gradient; before transformers 5 some checkpointing does not."""
    return any(vars(each).get(f"_require_grads_hook{s}") for each in model.modules() for s in ("", "s"))


def read_recompute(model: Any) -> Recompute:
    """Which gradient checkpointing a live model is set to."""
    wrapped = list_wrapped(model) if hasattr(model, "named_modules") else {}
    if wrapped:
        return "full-reentrant" if any(wrapped.values()) else "full"
    if not getattr(model, "is_gradient_checkpointing", False):
        return "none"
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None:
            return "full-reentrant" if getattr(function, "keywords", {}).get("use_reentrant") else "full"
    return "full"
