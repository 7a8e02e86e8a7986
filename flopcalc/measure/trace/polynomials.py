"""Any torch module and an example batch in; exact polynomials of its FLOPs out, solved from a few traces and checked.

Nothing runs for real: floats live on meta, integers keep their values. The trace at a handful of small workloads gives
as many equations; the solution must then hold at fresh ones, else the module is refused.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flopcalc.base.errors import FlopcalcError, WorkloadError, format_value
from flopcalc.base.progress import show_progress
from flopcalc.base.units import check_items, check_size
from flopcalc.base.vocabulary import PHASES, Phase, check_word
from flopcalc.core.estimate.traced import (
    Polynomials,
    TracedEstimator,
    TracedModel,
    load_trace,
    make_key,
    read_versions,
    save_trace,
)
from flopcalc.core.formats.formats import FormatOptions
from flopcalc.core.model.config import Source
from flopcalc.core.model.live import strip
from flopcalc.core.recipe.recipe import Recipe, make_recipe
from flopcalc.measure.counters.flop_counter import OperatorCount, count_flops
from flopcalc.measure.hf.models import apply_recipe, build_model, count_parameters, floats_on_meta
from flopcalc.measure.trace.copies import copy_to_meta
from flopcalc.measure.trace.forms import (
    DEFAULT_CHUNK,
    FAR,
    LARGEST,
    LESS_FAR,
    NoPolynomialError,
    Point,
    Sizes,
    fit,
    list_forms,
)
from flopcalc.measure.trace.meta import Resizer, find_word, make_decode, make_step, on_meta, resize, unwrap

_HF = ("transformers.", "peft.")  # modules of these have a version: their traces can be kept


def _trace(
    module: Any, phase: Phase, resizer: Resizer | None, say: Callable[[str], None], sizes: Sizes, max_length: int = 0
) -> Polynomials:
    """Polynomials of one phase; NoPolynomialError when no form holds. `max_length` 0: as long as the module allows."""
    grids = resizer.list_grids() if resizer is not None and phase != "decode" else []
    kept: dict[str, dict[str, tuple[int, int, int]]] = {}

    def trace(point: Point) -> dict[str, tuple[int, int, int]]:
        key = repr(sorted(point.items()))
        if key not in kept:
            say(f"tracing {phase} at {', '.join(f'{name}={value}' for name, value in point.items())}")
            counted = _count_point(module, phase, resizer, point)
            for parameter in module.parameters():
                parameter.grad = parameter.grad if not getattr(parameter.grad, "is_meta", False) else None
            if counted.not_counted:
                names = ", ".join(counted.not_counted)
                raise NoPolynomialError(
                    f"the counter has no formula for {names}, and does not know it as no product: only a spec can "
                    "describe this"
                )
            kept[key] = counted.rows
        return kept[key]

    has_length = resizer is None or resizer.has_length
    longest = max_length
    if phase != "decode" and not grids and has_length and not max_length:
        longest = _find_longest(trace)
    tokens = resizer.count_tokens if resizer is not None else lambda _: 0
    forms = list_forms(phase, grids, tokens, sizes, longest, has_length)
    for form in forms:
        rows = fit(form, trace)
        if rows is not None:
            reached = max(point.get("c", 0) if phase == "decode" else point["n"] for point in form.candidates)
            # Eager attention forms every pair, so a window shows in a cache alone.
            limits = [sizes.chunk_limit, sizes.window_limit if phase == "decode" else 0, longest]
            limit = min((each for each in limits if each), default=0)
            return Polynomials(phase, bool(grids), form.monomials, rows, reached, limit)
    tried = "; ".join(", ".join(form.monomials) for form in forms)
    raise NoPolynomialError(
        f"the traced FLOPs of {type(module).__name__} are no polynomial in {tried}: only a spec can describe it"
    )


def _find_longest(trace: Callable[[Point], object]) -> int:
    """The longest of some lengths that the module takes, 0 for any; one with few positions refuses others."""
    for length in (FAR, *LESS_FAR):
        try:
            trace({"b": 2, "n": length})
        except NoPolynomialError:
            raise
        except FlopcalcError:
            if length == LESS_FAR[-1]:
                raise
        else:
            return 0 if length == FAR else length
    return 0


def _count_point(module: Any, phase: Phase, resizer: Resizer | None, point: Point) -> OperatorCount:
    """One counted step at a point; the module is as before when it ends, however it ends."""
    is_training = module.training
    try:
        with on_meta(module):
            for each in module.modules():  # a part that is kept in eval mode stays so
                each.training = phase == "train" and (each.training or not is_training)
            if phase == "decode":
                step = make_decode(module, point)
            else:
                assert resizer is not None
                step = make_step(module, resizer.make(point), phase)
            return count_flops(module, step)
    except FlopcalcError:
        raise
    except Exception as error:  # the module's own code: whatever it raises is why it cannot be traced
        reason = (str(error).splitlines() or [""])[0][:200]
        raise FlopcalcError(
            f"{type(module).__name__} could not be traced at {point}: {type(error).__name__}: {reason}; work that "
            f"depends on values cannot be traced{f'; axes were taken as dims={resizer.dims}' if resizer else ''}; "
            "bind(module, example_batch, dims={…}) in Python takes others: 'b' the batch, 'n' the length, None for an "
            "axis that is neither"
        ) from None


def _find_sizes(config: object) -> Sizes:
    """Sizes that a config calls a chunk or a window, smallest first, and the chunk that delta nets fix."""
    found: dict[str, set[int]] = {"chunk": {DEFAULT_CHUNK}, "block_size": set(), "window": set()}
    limits: dict[str, int] = {}
    for part in (config, getattr(config, "text_config", None)):
        for key, value in (vars(part) if part is not None and hasattr(part, "__dict__") else {}).items():
            for word, sizes in found.items():
                if word in key and type(value) is int and value > 1:
                    if value <= LARGEST:
                        sizes.add(value)
                    else:
                        limits[word] = min(limits.get(word, value), value)
    chunks = found["chunk"] | found["block_size"]
    limit = min((limits[word] for word in ("chunk", "block_size") if word in limits), default=0)
    return Sizes(tuple(sorted(chunks)), tuple(sorted(found["window"])), limit, limits.get("window", 0))


def _describe_module(module: torch.nn.Module) -> dict[str, Any]:
    """What decides a HF module's FLOPs: its config, its tree, its shapes, what trains, what is checkpointed."""
    config: object = getattr(module, "config", None)
    return {
        "class": type(module).__qualname__,
        "tree": repr(module),
        "parameters": [(n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()],
        "config": config.to_dict() if hasattr(config, "to_dict") else repr(config),
        "attention": getattr(config, "_attn_implementation", None),
        "modes": [(m.training, getattr(m, "gradient_checkpointing", False)) for m in module.modules()],
    }


def _describe_batch(batch: Mapping[str, object]) -> dict[str, Any]:
    """Shapes, and the values of integers: placeholders and masks decide what runs."""
    out: dict[str, object] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            out[name] = repr(value)
        else:
            values = None if value.is_floating_point() or value.is_meta else value.tolist()
            out[name] = (list(value.shape), str(value.dtype), values)
    return out


def trace_module(
    module: Any,
    example_batch: Mapping[str, Any],
    *,
    phases: Sequence[Phase] = ("train", "forward"),
    dims: Mapping[str, Sequence[str | None]] | None = None,
    compute: str | None = None,
    max_length: int | None = None,
) -> TracedEstimator:
    """The estimator of any torch module: `example_batch` holds its keyword arguments, at any small size.

    `compute` is the number format of its products; without it that of its parameters. No length beyond `max_length` is
    traced or counted. Axes that are neither batch nor length are traced anew where a batch has other sizes.
    """
    longest = check_size(max_length, "max_length", 8) if max_length is not None else 0
    if not isinstance(module, torch.nn.Module):
        raise WorkloadError(f"an example batch goes with a torch.nn.Module, not with {type(module).__name__}")
    if not isinstance(example_batch, Mapping):
        raise WorkloadError(f"example_batch is a mapping of the module's arguments, not {type(example_batch).__name__}")
    phases = tuple(check_word(phase, PHASES, "phase", WorkloadError) for phase in check_items(phases, "phases"))
    if not phases:
        raise WorkloadError(f"phases must be some of {', '.join(PHASES)}, not none")
    if dims is not None and not isinstance(dims, Mapping):
        raise WorkloadError(f"dims maps names of the batch to their axes, not {format_value(dims)}")
    config = getattr(module, "config", None)
    # Other code can change without its source showing it (a function, a closure): then nothing is kept.
    is_kept = all(type(each).__module__.startswith(("torch.", *_HF)) for each in module.modules())
    is_kept = is_kept and type(module).__module__.startswith(_HF)
    key = None
    if is_kept:
        identity = {"module": _describe_module(module), "batch": _describe_batch(example_batch), "dims": dims}
        key = make_key({**identity, "phases": phases, "max_length": longest, "axes": "sizes", **read_versions()})
    name = type(module).__name__
    model_type = str(getattr(config, "model_type", name))
    source = Source(name, {"model_type": model_type}, name, reference="traced", module=module)
    traced = load_trace(key) if key is not None else None
    if traced is None:
        resizer = Resizer(example_batch, dims, config)
        found = [_trace(module, phase, resizer, show_progress, _find_sizes(config), longest) for phase in phases]
        if resizer.pixels is not None:  # and the same model without images
            text = {n: v for n, v in example_batch.items() if n not in (resizer.pixels, "image_grid_thw")}
            plain = Resizer({**text, "input_ids": _remove_images(text["input_ids"], resizer)}, dims, config)
            found += [_trace(module, phase, plain, show_progress, _find_sizes(config), longest) for phase in phases]
        traced = _keep(module, name, model_type, found, resizer, key)
    first = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)

    def retrace(shapes: Mapping[str, tuple[int, ...]]) -> TracedEstimator:
        """On a copy: the module may be training."""
        example = {name: _resize_to(value, shapes.get(name, ())) for name, value in example_batch.items()}
        twin = copy_to_meta(module)
        return trace_module(twin, example, phases=phases, dims=dims, compute=compute, max_length=max_length)

    asked = FormatOptions(str(first) if compute is None and first is not None else compute)
    return TracedEstimator(traced, source, make_recipe(), asked, retrace)


def _resize_to(value: object, shape: tuple[int, ...]) -> Any:
    """A tensor of the example at other sizes; -1 leaves one as it is."""
    for axis, size in enumerate(shape):
        if isinstance(value, torch.Tensor) and size >= 0:
            value = resize(value, axis, size)
    return value


def _remove_images(ids: torch.Tensor, resizer: Resizer) -> torch.Tensor:
    ids = ids.cpu().clone()
    ids[ids == resizer._token()] = find_word(resizer.config, 3)
    return ids


def _keep(
    module: Any, name: str, model_type: str, found: list[Polynomials], resizer: Resizer | None, key: str | None
) -> TracedModel:
    total, trainable = count_parameters(module)
    visual: dict[str, object] = {}
    if resizer is not None and resizer.pixels is not None:
        visual = {"tokens": resizer.tokens, "merge": resizer.merge}
    parameters = {"total": total, "trainable": trainable}
    axes = resizer.describe_axes() if resizer is not None else {}
    traced = TracedModel(name, model_type, parameters, read_versions(), visual, tuple(found), axes)
    show_progress("")
    if key:
        problem = save_trace(key, traced)
        if problem:
            sys.stderr.write(f"flopcalc: {problem}\n")
    return traced


def trace_config(source: Source, recipe: Recipe, phase: Phase, has_images: bool, key: str) -> TracedModel:
    """HF's own model of a config is built without memory, traced, and kept under the key; a live model is copied.

    A live model keeps its class, what it trains and its adapters.
    """
    adapted = {name: value for name, value in recipe.to_dict().items() if value and value != "none"}
    try:
        with floats_on_meta():
            module = (
                apply_recipe(build_model(source.config, device="meta", architecture=_choose_class(source)), adapted)
                if source.module is None
                else copy_to_meta(strip(source.module))
            )
    except FlopcalcError:
        raise
    except Exception as error:  # HF's own code: whatever it raises is why there is no model
        raise FlopcalcError(
            f"{source.where}: transformers cannot build this model: {type(error).__name__}: {str(error)[:160]}"
        ) from None
    module.train(phase == "train")
    batch: dict[str, object] = {"input_ids": torch.full((2, 9), 3)}
    if has_images:
        batch |= _make_pixels(module)
    resizer = Resizer(batch, None, module.config)
    found = _trace(module, phase, None if phase == "decode" else resizer, show_progress, _find_sizes(module.config))
    model_type = str(source.config["model_type"])
    return _keep(module, source.name, model_type, [found], resizer if has_images else None, key)


def _choose_class(source: Source) -> str:
    """The HF class of a config: the one that it names, else its type's in the mappings that are tried in turn."""
    import transformers
    from transformers.models.auto import modeling_auto

    named = source.config.get("architectures")
    if isinstance(named, (list, tuple)) and named and hasattr(transformers, str(named[0])):
        return str(named[0])
    model_type = source.config["model_type"]
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    ):
        if model_type in mapping:
            return str(mapping[model_type])
    if model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise FlopcalcError(f"{source.where}: {model_type!r} is an encoder-decoder: two lengths cannot be traced")
    raise FlopcalcError(
        f"{source.where}: transformers {transformers.__version__} knows no language model of type {model_type!r}; give "
        'its class in "architectures", or trace the module itself: bind(module, example_batch)'
    )


def _make_pixels(module: Any) -> dict[str, Any]:
    """An image in one of the two usual forms: rows of patches with a grid, or squares of one size."""
    config = module.config
    vision = getattr(config, "vision_config", None)
    token = next((getattr(config, k) for k in ("image_token_id", "image_token_index") if hasattr(config, k)), None)
    if vision is None or token is None:
        raise WorkloadError(
            "this config names no vision_config and image token: give bind(module, example_batch) a batch"
        )
    merge, temporal = getattr(vision, "spatial_merge_size", None), getattr(vision, "temporal_patch_size", None)
    if merge and temporal:
        grid = (1, 2 * merge, 2 * merge)
        width = getattr(vision, "in_channels", 3) * temporal * vision.patch_size**2
        rows, tokens = 2 * math.prod(grid), math.prod(grid) // merge**2
        ids = torch.full((2, tokens + 5), 3)
        ids[:, 1 : 1 + tokens] = token
        pixels = torch.empty((rows, width), device="meta")
        types = (ids == token).long()
        batch = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * 2)}
        takes = inspect.signature(unwrap(module).forward).parameters
        return batch | ({"mm_token_type_ids": types} if "mm_token_type_ids" in takes else {})
    side = getattr(vision, "image_size", None)
    if not isinstance(side, int):
        raise WorkloadError(
            "this config's images have neither a grid nor one size: give bind(module, example_batch) a batch"
        )
    pixels = torch.empty((2, getattr(vision, "num_channels", 3), side, side), device="meta")
    with floats_on_meta(), torch.no_grad():
        features = unwrap(module).get_image_features(pixel_values=pixels)
    leaf = next(leaf for leaf in torch.utils._pytree.tree_leaves(getattr(features, "pooler_output", features)))
    tokens = int(leaf.shape[-2] if leaf.dim() > 2 else leaf.shape[0] // (2 if leaf.shape[0] % 2 == 0 else 1))
    ids = torch.full((2, tokens + 5), 3)
    ids[:, 1 : 1 + tokens] = token
    return {"input_ids": ids, "pixel_values": pixels}
