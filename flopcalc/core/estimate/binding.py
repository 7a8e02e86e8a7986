"""A model's name, path, config or live module becomes a CountedEstimator, with a device's tables where one is named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flopcalc.base.errors import ConfigError, RecipeError, SpecError, WorkloadError, format_value
from flopcalc.base.files import read_path
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import KERNELS, Clipping, Convention, Kernel, check_flag, check_word
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.formats.formats import FormatOptions
from flopcalc.core.model.bound import BoundModel, bind_model
from flopcalc.core.model.components import is_pipeline
from flopcalc.core.model.config import load_config
from flopcalc.core.model.heads import check_head
from flopcalc.core.model.live import strip
from flopcalc.core.recipe.recipe import Recipe, make_recipe
from flopcalc.core.spec.spec import Spec, read_spec
from flopcalc.hardware.devices import find_device, parse_dtype
from flopcalc.hardware.routing import EVEN, Routing

if TYPE_CHECKING:
    from flopcalc.core.estimate.pipeline import PipelineEstimator


def bind_config(
    model: object,
    *,
    recipe: Recipe | Mapping[str, object] | None = None,
    convention: Convention = "model",
    attention_kernel: Kernel = "auto",
    device: str | None = None,
    dtype: str | None = None,
    formats: FormatOptions = FormatOptions(),  # noqa: B008
    spec: str | os.PathLike[str] | None = None,
    download: bool = False,
    clipping: Clipping | None = None,
    model_type: str | None = None,
    head: str | None = None,
    mtp: int | bool | None = None,
    routing: Routing | None = None,
) -> CountedEstimator | PipelineEstimator:
    """The estimator of a model that a spec describes; see flopcalc.bind for the arguments."""
    compute = dtype if formats.compute is None else formats.compute
    compute = None if compute is None else parse_dtype(compute)
    check_word(attention_kernel, KERNELS, "attention kernel")
    found = None if device is None else find_device(device)
    specs: dict[str, Spec] = {}
    # DDP and Opacus hide the config of what they wrap.
    if spec is not None:
        if not isinstance(spec, (str, os.PathLike)):
            raise SpecError(f"spec must be the path of a TOML file, not {format_value(spec)}")
        added = read_spec(read_path(spec, "spec", SpecError))
        specs[added.name] = added
    source = load_config(
        model if hasattr(model, "config") else strip(model, is_whole=True),
        download=check_flag(download, "download"),
        model_type=model_type,
        own=specs,
    )
    if head is not None:
        source = source.replace(head=check_head(head))
    if mtp is not None:
        source = source.replace(mtp=mtp)
    if source.weights and formats.weights is None:
        formats = formats.replace(weights=source.weights)
    if source.lora is not None:
        recipe = _add_adapter(recipe, source.lora)
    if recipe is not None:
        is_said = not isinstance(recipe, Mapping) or "recompute" in recipe or source.module is None
        recipe = read_recipe(recipe)
        if not is_said:
            from flopcalc.core.recipe.live import read_recompute

            recipe = recipe.replace(recompute=read_recompute(source.module))
    asked = formats.replace(compute=compute)
    if is_pipeline(source.config):
        from flopcalc.core.estimate.pipeline import FROZEN, bind_pipeline  # imported lazily: few models are pipelines

        if spec is not None:
            raise SpecError(f"a diffusion pipeline takes no {spell('spec')}: give its denoiser's config with one")
        if routing not in (None, EVEN):
            raise WorkloadError(f"a diffusion pipeline has no experts: leave {spell('routing')} out")

        def make(model: BoundModel, is_part: bool) -> CountedEstimator:
            trained = FROZEN if is_part else recipe
            return CountedEstimator(model, trained, convention, attention_kernel, found, clipping, asked=asked)

        return bind_pipeline(source, make)
    bound = bind_model(source, specs)
    estimator = CountedEstimator(
        bound, recipe, convention, attention_kernel, found, clipping, asked=asked, routing=routing or EVEN
    )
    if specs and bound.spec.name not in specs and not _uses_inner(source.config, specs):
        raise ConfigError(
            f"{spec} describes model_type {next(iter(specs))!r}, but {source.where} is {source.config['model_type']!r}"
        )
    if bound.latents is not None:
        from flopcalc.core.estimate.pipeline import PipelineEstimator

        return PipelineEstimator(estimator)
    return estimator


def _add_adapter(recipe: Recipe | Mapping[str, object] | None, lora: dict[str, object]) -> Recipe | Mapping[str, Any]:
    """A recipe with the adapter that a file has, unless it says itself what trains."""
    if recipe is None:
        return make_recipe(lora=lora)
    if isinstance(recipe, Recipe):
        is_free = recipe.lora is None and not recipe.train_only and recipe.trained is None
        return recipe.replace(lora=lora) if is_free else recipe
    return recipe if "lora" in recipe or "train_only" in recipe else {**recipe, "lora": lora}


def read_recipe(given: Recipe | Mapping[str, Any]) -> Recipe:
    """A Recipe, from one or from a mapping of its fields."""
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, Mapping):
        raise RecipeError(f"a recipe is a mapping or what make_recipe() gives, not {format_value(given)}")
    known = ("freeze", "train_only", "lora", "recompute", "clipping")
    for key in given:
        if key not in known:
            raise RecipeError(f"recipe: unknown key {format_value(key)}; known: {', '.join(known)}")
    return make_recipe(**given)


def _uses_inner(config: Mapping[str, object], specs: Mapping[str, Spec]) -> bool:
    return any(isinstance(value, Mapping) and value.get("model_type") in specs for value in config.values())
