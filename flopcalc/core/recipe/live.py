"""The recipe of a live model: what trains, its adapters and its gradient checkpointing."""

from __future__ import annotations

from typing import Any

from flopcalc.core.recipe.recipe import Recipe
from flopcalc.errors import RecipeError
from flopcalc.words import Recompute

_WRAPPERS = ("_orig_mod.", "module.", "_module.", "base_model.model.")


def read_recipe(model: Any, recompute: Recompute | None = None) -> tuple[Recipe, dict[str, int], dict[str, str]]:
    """The recipe of a live model from requires_grad and PEFT adapters, and its parameters' sizes by plain name.

    A tensor with several names has all of them, and the last value maps each to the first.
    """
    trained: set[str] = set()
    ranks: dict[str, int] = {}
    sizes: dict[str, int] = {}
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    fused = _find_fused(model)
    _check_adapters(model)
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        path, dot, rest = full_name.partition(".lora_")
        if dot:
            # lora_A is (r, in) for a linear, (r, in, …) for a convolution, (r, vocab) for an embedding, and
            # (experts · r, in) for a stack of experts; its module is the one before it.
            side = rest.removeprefix("embedding_")[:1]
            adapted, experts = fused.get(path, (_plain_name(path), 1))
            if side == "A":
                ranks[adapted] = int(parameter.shape[0]) // experts
            if parameter.requires_grad:
                trained.add(f"{adapted}.lora_{side}")
            continue
        name = _plain_name(full_name)
        if ".modules_to_save." in name:
            path, _, rest = name.partition(".modules_to_save.")
            if parameter.requires_grad:
                trained.add(f"{path}.{rest.partition('.')[2]} saved")
            continue
        sizes[name] = int(parameter.numel())
        names[name] = first.setdefault(id(parameter), name)
        if parameter.requires_grad:
            trained.add(name)
    if recompute is None:
        recompute = read_recompute(model)
    recipe = Recipe(recompute=recompute, trained=frozenset(trained), adapters=tuple(sorted(ranks.items())))
    return recipe, sizes, names


def _check_adapters(model: Any) -> None:
    """One plain, active LoRA adapter per module is what the count describes; anything else is refused by name."""
    for path, module in model.named_modules():
        adapters = getattr(module, "lora_A", None)
        if adapters is None or not hasattr(module, "active_adapters"):
            continue
        names = {*adapters, *getattr(module, "lora_embedding_A", ())}
        problem = None
        if len(names) > 1:
            problem = f"has {len(names)} adapters"
        elif getattr(module, "merged", False):
            problem = "has its adapter merged"
        elif getattr(module, "disable_adapters", False) or not names & set(module.active_adapters):
            problem = "has its adapter switched off"
        elif any(getattr(module, "use_dora", {}).values()) or any(getattr(module, "lora_bias", {}).values()):
            problem = "uses DoRA or a LoRA bias"
        if problem:
            raise RecipeError(f"{path} {problem}: only one active, plain LoRA adapter per module is counted")


def _find_fused(model: Any) -> dict[str, tuple[str, int]]:
    """PEFT's wrappers of bare parameters: the wrapper's own path -> the parameter it adapts, and its experts."""
    found = {}
    for path, module in model.named_modules():
        name = getattr(module, "parameter_name", None)
        if isinstance(name, str) and hasattr(module, "lora_A"):
            found[path] = (f"{_plain_name(path)}.{name}", int(getattr(module, "num_experts", 1)))
    return found


def _plain_name(name: str) -> str:
    """A parameter's or module's name without what DDP, torch.compile and PEFT wrap around it."""
    for wrapper in _WRAPPERS * 2:
        name = name.removeprefix(wrapper)
    name = name.replace("._orig_mod.", ".").replace(".original_module.", ".")
    while ".base_layer" in name:
        name = name.replace(".base_layer", "")
    return name


def read_recompute(model: Any) -> Recompute:
    """Which gradient checkpointing a live model is set to."""
    if not getattr(model, "is_gradient_checkpointing", False):
        return "none"
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None:
            return "full-reentrant" if getattr(function, "keywords", {}).get("use_reentrant") else "full"
    return "full"
