"""What a model cannot take is refused in words: images, audio, lengths, phases, and live models unlike their spec."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flopcalc.base.data import find_data_dir, find_version, load_toml
from flopcalc.base.errors import ConfigError, RecipeError, WorkloadError
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import Phase
from flopcalc.core.images.vision import Vision
from flopcalc.core.model.bound import BoundModel
from flopcalc.core.model.heads import find_ending, is_same_class
from flopcalc.core.model.live import unwrap
from flopcalc.core.model.ops import Attend, iterate, list_parameters, list_routed
from flopcalc.core.recipe.recipe import Recipe, check_clipping
from flopcalc.core.recipe.resolver import Resolver, check_clipped
from flopcalc.core.workload.sums import Pairs
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.routing import Routing

if TYPE_CHECKING:
    from flopcalc.core.estimate.former import Rules


def check_workload(model: BoundModel, load: Workload) -> Workload:
    """The workload with grids that the model's tower takes, or an error that says what does not fit."""
    if model.is_part:  # of a pipeline, which made the workload
        return load
    if model.latents is not None:
        return _check_latents(model, load)
    if not model.has_text:
        _check_vision(model, load)
    elif not load.seq and load.decoder is None and model.needs_text:
        raise WorkloadError(f"{spell('seq')} is missing: the length that the language model sees per sample")
    if model.spec.phases and load.phase not in model.spec.phases:
        raise WorkloadError(
            f"{model.name}: phase {load.phase} is not described: use {spell('phase')} {' or '.join(model.spec.phases)}"
        )
    if load.phase in ("prefill", "decode"):
        _check_decodes(model, load.phase)
    if not model.has_logits and load.logits != ("last" if load.phase == "prefill" else "all"):
        raise WorkloadError(f"{model.name} with head {model.head} makes no logits over a vocabulary: leave logits out")
    if load.grids or load.videos:
        load = _check_images(model, load)
    if model.head.kind == "sequence" and model.has_decoder and model.has_text_encoder:
        load = _mirror(model, load)
    if model.has_decoder or load.decoder is not None:
        _check_decoder(model, load)
    if load.clips:
        _check_audio(model, load)
    if model.position_limit and model.position_kind == "learned":
        for side in (load, load.decoder):
            if side is not None and side.longest > model.position_limit:
                raise WorkloadError(
                    f"length {side.longest} is beyond the {model.position_limit} positions that {model.name} learned"
                )
    return load


def _check_latents(model: BoundModel, load: Workload) -> Workload:
    """A denoiser takes one image or video per sample, all of one size, and text where it reads any."""
    name = model.name
    if load.phase in ("prefill", "decode") or load.documents is not None or load.clips or load.decoder is not None:
        raise WorkloadError(
            f"{name} is a denoiser: it takes images or videos and text, in phase train, forward or sample"
        )
    if len(load.all_grids) != load.rows or len(set(load.all_grids)) > 1:
        raise WorkloadError(
            f"{name} is a denoiser: give one {spell('image', 'WxH')} (or {spell('video', 'WxHxFRAMES')}) per sample"
        )
    if model.latents is not None and not model.latents.text_key and load.seq:
        raise WorkloadError(f"{name} reads no text: leave {spell('text')} out")
    if model.latents is not None and model.latents.text_key and not load.seq:
        raise WorkloadError(f"{name} reads text: give its length ({spell('text', 'N')})")
    return load


def ask_for_images(name: str, vision: Vision | None) -> WorkloadError:
    """What to say where a model of images or videos alone was given none."""
    if vision is not None and vision.frames:
        return WorkloadError(f"{name} takes videos: give {spell('video', 'WxHxFRAMES')}")
    return WorkloadError(f"{name} takes images: give {spell('image', 'WxH')}")


def _check_vision(model: BoundModel, load: Workload) -> None:
    """A model of images alone takes nothing else."""
    name = model.name
    if not load.all_grids:
        raise ask_for_images(name, model.vision)
    if load.seq:
        raise WorkloadError(f"{name} takes images alone: leave {spell('seq')} out")
    if load.logits != "all" and load.phase not in ("prefill", "decode"):
        raise WorkloadError(f"{name} takes images alone: leave {spell('logits')} out")
    if load.phase in ("prefill", "decode"):
        raise WorkloadError(f"{name} takes images alone: there is no phase {load.phase}; forward is one pass")
    if len(load.all_grids) < load.rows:
        raise WorkloadError(f"{load.rows} samples need an image each: {len(load.all_grids)} given")


def _mirror(model: BoundModel, load: Workload) -> Workload:
    """An encoder-decoder that classifies hands its decoder the encoder's tokens."""
    if load.phase == "decode" or (load.decoder is not None and load.decoder.seq == load.seq):
        return load
    if load.decoder is not None:
        raise WorkloadError(
            f"{model.name} classifies what its encoder reads, so its decoder reads the same {load.seq} tokens, not "
            f"{load.decoder.seq}: leave {spell('decoder_seq')} out"
        )
    own = load.replace(grids=(), videos=(), clips=())
    return load.replace(decoder=own)


def _check_images(model: BoundModel, load: Workload) -> Workload:
    vision = model.vision
    if vision is None:
        what = "images" if load.grids else "videos"
        is_text = "" if model.audio is not None else "is a text model: it "
        raise WorkloadError(f"{model.name} {is_text}takes no {what}")
    if load.videos and not vision.takes_videos:
        raise WorkloadError(f"{model.name} takes no videos")
    samples = len(load.documents) if load.documents else load.rows
    if vision.images and len(load.all_grids) > vision.images * samples:
        kind = "images" if not load.videos else "images and videos" if load.grids else "videos"
        raise WorkloadError(f"{model.name}: {len(load.all_grids)} {kind}: a sample has at most {vision.images}")
    if vision.kind != "grid":
        load = load.replace(grids=tuple([vision.check_grid(grid, "image grid") for grid in load.grids]))
        for grid in load.videos if vision.frames else ():
            vision.check_grid(grid, "video grid")
    else:
        merge, least = vision.merge, vision.least
        for grid in load.grids + load.videos:
            if grid[1] % merge or grid[2] % merge or not grid[0] or grid[1] < least or grid[2] < least:
                vision.check_grid(grid, "grid")
    visual, tokens = model.count_visual_tokens(load), load.tokens
    if visual > tokens and model.has_text:
        raise WorkloadError(
            f"{visual} visual tokens do not fit in {tokens} tokens: {spell('seq')} counts them in "
            f"({spell('text')} adds them instead)"
        )
    return load


def _check_decodes(model: BoundModel, phase: Phase) -> None:
    """An encoder reads the whole text at once: it has no cache to fill or to read."""
    if model.has_decoder:
        return
    if not model.needs_text:
        raise WorkloadError(f"{model.name} is an encoder: it does not decode, so there is no phase {phase}")
    masks = {
        op.rows.mask if isinstance(op.rows, Pairs) else None
        for stage in model.stages
        for chain in stage.kinds
        for op in iterate(chain)
        if isinstance(op, Attend) and stage.stream == "language"
    }
    if model.spec.architecture.endswith("ForMaskedLM") or masks == {"full"}:
        raise WorkloadError(
            f"{model.name} is an encoder: it does not decode, so there is no phase {phase}; "
            "forward is one pass over the text, train a whole step"
        )


def _check_decoder(model: BoundModel, load: Workload) -> None:
    name = model.name
    if not model.has_decoder:
        raise WorkloadError(f"{name} is no encoder-decoder: it takes no {spell('decoder_seq')}")
    if load.decoder is None:
        raise WorkloadError(f"{name} has a decoder: give its length too ({spell('decoder_seq', 'N')})")
    if model.has_text_encoder and not load.seq:
        raise WorkloadError(f"{name} is an encoder-decoder: give the encoder's length too ({spell('seq', 'N')})")
    if not model.has_text_encoder and load.seq:
        raise WorkloadError(
            f"{name} has no encoder of text: leave {spell('seq')} out, its length is {spell('decoder_seq')}"
        )
    if not model.has_text_encoder and model.audio is not None and len(load.clips) != load.rows:
        raise WorkloadError(
            f"{name} takes one clip of audio per sample, not {len(load.clips)} for {load.rows}: "
            f"{spell('audio', 'SECONDS')}"
        )


def _check_audio(model: BoundModel, load: Workload) -> None:
    if model.audio is None:
        raise WorkloadError(f"{model.name} takes no audio")
    most = model.audio.most
    if most and max(load.clips) > most:
        longest, rate = max(load.clips), model.audio.rate
        raise WorkloadError(
            f"{model.name} takes clips of at most {float(most / rate):g} s ({most} frames), "
            f"not {float(longest / rate):g} s ({longest} frames)"
        )
    tokens = sum(map(model.audio.count_tokens, load.clips))
    if load.decoder is None and tokens > load.tokens:
        raise WorkloadError(
            f"{tokens} audio tokens do not fit in {load.tokens} tokens: {spell('seq')} counts them in "
            f"({spell('text')} adds them)"
        )


def check_routing(model: BoundModel, routing: Routing) -> None:
    """A routing belongs to models with experts; rows are those of its layers and of each layer's experts."""
    routed = list_routed(model.stages)
    if not routed:
        raise WorkloadError(f"{model.name} has no experts that a router chooses: leave {spell('routing')} out")
    if len(routing.rows) not in (0, 1, len(routed)):
        raise WorkloadError(
            f"{spell('routing')} has rows for {len(routing.rows)} layers; {model.name} has {len(routed)} with experts: "
            "give one list for each of these, or one for all"
        )
    rows = routing.rows if len(routing.rows) != 1 else routing.rows * len(routed)
    for (path, layer), experts, own in zip(routed, routed.values(), rows, strict=False):
        if len(own) != experts:
            raise WorkloadError(f"{spell('routing')} has rows for {len(own)} experts; {path}.{layer} has {experts}")


def find_clipping(spec_name: str) -> str:
    """How a model type's per-sample work was proven by a count, 'linear' or 'functorch'; empty if it was not."""
    tables = load_toml(os.path.join(find_data_dir(), "clipping.toml"))
    return next((how for how in ("linear", "functorch") if spec_name in tables[how]), "")


def check_clipping_recipe(model: BoundModel, recipe: Recipe, resolver: Resolver) -> None:
    """What Opacus cannot clip, and what no count has proven, is refused."""
    clipping, name = recipe.clipping, model.name
    check_clipping(clipping, recipe.recompute)
    if model.vision is not None or model.audio is not None or model.has_decoder:
        what = "an encoder and a decoder" if model.has_decoder else "a tower, whose rows are not samples"
        raise RecipeError(f"clipping {clipping}: {name} has {what}; clipping is counted for plain text models")
    check_clipped(model.stages, resolver, clipping)
    if not find_clipping(model.spec.name):
        raise RecipeError(
            f"clipping {clipping}: no count of an Opacus step has proven it for model_type {model.spec.name!r}; "
            "it is for llama, qwen2, gpt_neox and what else model_specs/clipping.toml lists"
        )


def check_live(
    model: BoundModel, recipe: Recipe, sizes: dict[str, int], names: dict[str, str]
) -> tuple[BoundModel, Recipe, Rules]:
    """The model and its recipe, laid out as the live model is; its parameters must be the spec's, by name and size.

    A model without a head whose weight is the embedding's has the same parameters, so its class is asked too; own and
    remote classes may have any name.
    """
    spec = model.spec
    classes = type(unwrap(model.source.module)).__mro__
    is_known = any(is_same_class(each.__name__, spec.architecture) for each in classes)
    if model.head.kind != "lm":
        is_known = any(find_ending(each.__name__) == model.head.table for each in classes)
    is_hf = any(each.__module__.startswith("transformers.models.") for each in classes)
    if not is_known and is_hf:
        raise ConfigError(
            f"{classes[0].__name__} is another class than {spec.architecture}, which spec {spec.name!r} "
            "describes: give that model, or its config; bind(model, example_batch) counts any module by a trace"
        )
    problem = _find_difference(model, sizes, names)
    if not problem:
        return model, recipe, ()
    from flopcalc.core.estimate.former import LiveParameters, join_live  # only for models of other releases

    joined, recipe, live, rules = join_live(model, recipe, LiveParameters(sizes, names))
    if _find_difference(joined, *live):
        release = f" of transformers {find_version('transformers')}" if is_hf else ""
        raise ConfigError(
            f"{model.name}{release} {problem}: spec {spec.name!r} describes {spec.architecture} ({spec.source}); "
            "bind(model, example_batch) counts any module by a trace"
        )
    return joined, recipe, rules


def _find_difference(model: BoundModel, sizes: Mapping[str, int], names: Mapping[str, str]) -> str:
    """How a live model's parameters differ from the spec's, where a shared tensor has one of its names alone."""
    expected = list_parameters(model.stages)
    tensors = Counter(names.get(name, name) for name in expected)
    extra = sorted(name for name, size in sizes.items() if size and names[name] not in tensors)  # some are empty
    missing = sorted(name for name in expected if name not in sizes or tensors[names[name]] > 1)
    resized = sorted(name for name, size in sizes.items() if expected.get(name, size) != size)
    if not (extra or missing or resized):
        return ""
    what = "has parameters that the spec lacks" if extra else "lacks parameters of the spec"
    what = what if extra or missing else "has parameters of another size than its config says"
    return f"{what} ({', '.join((extra or missing or resized)[:3])})"
