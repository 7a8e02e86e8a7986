"""The Hugging Face model inside torch.compile, DDP, FSDP, Opacus, PEFT and their like, and its whole parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from flopcalc.base.frozen import Value, frozen

# Modules that hold the one that they wrap, by the name that it has in them.
WRAPPED = ("_orig_mod", "module", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def strip(model: object, is_whole: bool = False) -> Any:
    """The model inside torch.compile, DDP, Opacus and their like; PEFT's wrapper stays, for its adapters are read."""
    inside = getattr(model, "_modules", {})
    inner = next((inside[name] for name in WRAPPED if inside.get(name) is not None), None)
    # What FullyShardedDataParallel holds flat is missing inside of it: `is_whole` stays outside.
    is_kept = inner is None or (is_whole and _find_flat(model) is not None)
    return model if is_kept else strip(inner, is_whole)


def unwrap(model: object) -> Any:
    """The HF model inside those and PEFT."""
    model = strip(model)
    return unwrap(model.get_base_model()) if hasattr(model, "get_base_model") else model


@frozen()
class FlatPart(Value):
    """A parameter that FullyShardedDataParallel keeps as a part of a flat one, of which a rank has a shard."""

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool
    owner: object  # the same for all names of one tensor

    def numel(self) -> int:
        return math.prod(self.shape)


def iterate_parameters(model: Any) -> Iterator[tuple[str, Any, object]]:
    """Every name of every parameter, the whole parameter, and what is one object for all names of one tensor."""
    flat = [(path, each) for path, each in model.named_modules() if _find_flat(each) is not None]
    if not flat:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield name, parameter, id(parameter)
        return
    managed: set[str] = set()
    for path, module in flat:
        whole = _find_flat(module)
        params = getattr(whole, "_params", None) or [whole] * len(whole._fqns)
        start = f"{path}." if path else ""
        modules = {id(inner): inner_path for inner_path, inner in module.named_modules()}
        first = {}
        for name, shape, parameter, info in zip(whole._fqns, whole._shapes, params, whole._param_infos, strict=False):
            own = first[id(info.module), info.param_name] = FlatPart(
                tuple(shape), whole.dtype, parameter.requires_grad, (id(whole), name)
            )
            managed.add(f"{start}{modules[id(info.module)]}.{info.param_name}")
            yield start + name, own, own.owner
        for shared in whole._shared_param_infos:
            own = first[id(shared.prim_module), shared.prim_param_name]
            name = f"{start}{modules[id(shared.module)]}.{shared.param_name}"
            managed.add(name)
            yield name, own, own.owner
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.endswith("_flat_param") and name not in managed:  # left out of the flat ones
            yield name, parameter, id(parameter)


def _find_flat(module: Any) -> Any:
    """What a FullyShardedDataParallel keeps its parameters in; None of another module, and of one without its own."""
    return getattr(getattr(module, "_handle", None), "flat_param", None)


def find_shape(parameter: Any) -> tuple[int, ...]:
    """The whole shape; DeepSpeed's ZeRO 3 leaves an empty tensor that keeps it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_sharded(model: Any) -> bool:
    """Whether a rank has only a part of its parameters: DTensors, FullyShardedDataParallel's flat ones, or ZeRO 3's."""
    return any(type(each).__name__ == "DTensor" or hasattr(each, "ds_shape") for each in model.parameters()) or any(
        _find_flat(each) is not None for each in model.modules()
    )
