"""A config and its spec become a BoundModel: stages of operations, towers and positions, all sizes known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flopcalc.base.errors import ConfigError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.core.images.vision import Vision, bind_vision
from flopcalc.core.model.config import Source
from flopcalc.core.model.expand import expand
from flopcalc.core.model.heads import Head, check_head, expand_head, find_head, has_lm_head, list_classes
from flopcalc.core.model.mtp import choose_depth, expand_mtp
from flopcalc.core.model.ops import Stage, iterate
from flopcalc.core.spec.aliases import find_family, list_types
from flopcalc.core.spec.expressions import MissingNameError
from flopcalc.core.spec.spec import BoundDims, Spec, find_spec
from flopcalc.core.spec.spec import bind as bind_spec
from flopcalc.core.workload.sums import Expression, InDecoder, Pairs, Tokens
from flopcalc.core.workload.workload import Workload

if TYPE_CHECKING:
    from flopcalc.core.images.latents import Latents
    from flopcalc.core.model.audio import Audio


@frozen()
class BoundModel(Value):
    """A model under one config: what it consists of, and what it takes."""

    source: Source
    spec: Spec
    stages: tuple[Stage, ...]
    vision: Vision | None
    audio: Audio | None
    has_decoder: bool
    has_text_encoder: bool
    position_kind: str  # 'learned', 'rotary' or nothing
    position_limit: int  # 0: none is known
    extra: Mapping[str, Spec]  # the user's own specs
    latents: Latents | None = None  # of a denoiser
    is_part: bool = False  # of a pipeline
    head: Head = Head()
    mtp: int = 0  # layers of multi-token prediction that are counted
    renamed: tuple[str, str] | None = None  # with another head: the module of the body, in the spec and here

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__

    @property
    def has_logits(self) -> bool:
        """Whether it predicts words."""
        return self.head.kind in ("lm", "value")

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def has_text(self) -> bool:
        """Whether it reads text; a model of images or audio alone does not."""
        return self.has_text_encoder or self.has_decoder or self.vision is None

    @property
    def needs_text(self) -> bool:
        """Whether images alone are no workload; they are where a loss alone joins two towers, as in CLIP."""
        return self.has_text and self.spec.vision.get("text") != "optional"

    def count_visual_tokens(self, load: Workload) -> int:
        if self.vision is None:
            return 0
        count = self.vision.count_tokens
        videos = sum([count(grid, True) * many for grid, many in Counter(load.videos).items()]) if load.videos else 0
        return sum([count(grid) * many for grid, many in Counter(load.grids).items()]) + videos


def bind_model(source: Source, specs: Mapping[str, Spec] | None = None, *, is_part: bool = False) -> BoundModel:
    """The model that a config describes; `specs` are the user's own, by model type; a part of a pipeline may be a
    tower, which is no model by itself.
    """
    extra = dict(specs or {})
    spec = _find_spec(source, extra, is_part)
    if source.head and is_image_classifier(spec):
        source, spec = _set_image_head(source, spec)
    dims = bind_spec(spec, source.config, source.where, extra)
    stages, renamed = expand(dims), None
    # A denoiser, the parts of a pipeline and models of images alone have no head that another could replace.
    is_own = is_part and spec.name == spec.architecture  # written for one class
    has_head = not (is_own or spec.is_tower or spec.latents) and (has_lm_head(stages) or bool(spec.heads))
    if not has_head and (source.head or source.mtp):
        raise ConfigError(f"{source.where}: {spec.name!r} is no language model: it takes neither head nor mtp")
    head = find_head(source, spec) if has_head else Head()
    if head.kind != "lm":
        stages, renamed = expand_head(dims, head)
    depth = choose_depth(source)
    if depth:
        if head.kind != "lm":
            raise ConfigError(f"multi-token prediction needs the language model's head, not head {head}")
        stages += expand_mtp(source, stages, depth)
    audio = latents = None
    if spec.audio:
        from flopcalc.core.model.audio import bind_audio  # lazily: few models take audio

        audio = bind_audio(dims)
    if spec.latents:
        from flopcalc.core.images.latents import bind_latents  # lazily: few models are denoisers

        latents = bind_latents(dims)
    ops = [op for stage in stages for chain in stage.layers[:1] for op in iterate(chain)]
    return BoundModel(
        source=source,
        spec=spec,
        stages=stages,
        vision=bind_vision(dims),
        audio=audio,
        has_decoder=any(
            isinstance(op.rows, InDecoder) or (isinstance(op.rows, Expression) and op.rows.unit == "decoder")
            for op in ops
        ),
        has_text_encoder=any(
            isinstance(op.rows, (Tokens, Pairs)) or (isinstance(op.rows, Expression) and op.rows.unit == "sequence")
            for op in ops
        ),
        position_kind=spec.positions.get("kind", ""),
        position_limit=_read_limit(dims),
        latents=latents,
        is_part=is_part,
        head=head,
        renamed=renamed,
        mtp=depth,
        extra=extra,
    )


def is_image_classifier(spec: Spec) -> bool:
    """Whether a spec describes a classifier of images, whose body has a spec of its own."""
    return bool(spec.body) and "labels" in spec.dims and spec.vision.get("text") == "none"


def _set_image_head(source: Source, spec: Spec) -> tuple[Source, Spec]:
    """A classifier of images with the head that was asked for: no head, or another number of labels."""
    kind, _, number = check_head(source.head).partition(":")
    body = find_spec(spec.body)
    if kind == "none" and body is not None:
        return source.replace(head=""), body
    if kind != "sequence":
        raise ConfigError(f"{source.where}: {spec.name!r} classifies images: its head is none or sequence[:N]")
    if not number:
        return source.replace(head=""), spec
    config = {key: value for key, value in source.config.items() if key not in ("id2label", "label2id")}
    return source.replace(head="", config={**config, "num_labels": int(number)}), spec


def find_architecture(source: Source, spec: Spec | None = None) -> str:
    """The HF class: a live model's own, or the one that it extends and a spec knows; else the first in the config."""
    names = list_classes(source)
    known = (spec.architecture, *spec.variants, *spec.refused) if spec is not None else ()
    return next((name for name in names if name in known), names[0] if names else "")


def find_variant(spec: Spec, named: str) -> str | None:
    """The spec to take instead, if a class has one of its own: that of a text model's body is the text model's."""
    text = f"{named.removesuffix('TextModel')}ForCausalLM" if named.endswith("TextModel") else named
    return spec.variants.get(named) or spec.variants.get(text)


def _find_spec(source: Source, specs: dict[str, Spec], is_part: bool) -> Spec:
    model_type: str = source.config["model_type"]
    spec = specs.get(model_type) or find_family(model_type, source.config)
    named = find_architecture(source, spec)
    if spec is not None and named in spec.refused:
        raise ConfigError(
            f"{source.where}: {named} is not described: {spec.refused[named]}. A config that names "
            f"{spec.architecture} in architectures is counted"
        )
    variant = find_variant(spec, named) if spec is not None else None
    if variant is not None:
        spec = specs.get(variant) or find_spec(variant)
    if spec is None:
        raise ConfigError(
            f"{source.where}: model_type {format_value(model_type)} has no spec.{_suggest(source)} `flopcalc models` "
            f"lists what is supported; {spell('trace', True)} counts it from HF's own code if transformers has it; "
            f"{spell('spec', 'FILE')} adds your own"
        )
    if spec.is_tower and "input" not in spec.latents and not is_part:
        raise ConfigError(f"{source.where}: {model_type!r} is a part of other models, not one by itself")
    return spec


def _suggest(source: Source) -> str:
    """' Its keys …': the nearest known family of a foreign config, by class or keys; else names like its type's."""
    from flopcalc.core.model.classes import suggest_type  # only where a config is refused

    found = suggest_type(source.config)
    if found is not None:
        return f" The nearest family is {found}: {spell('model_type', found)} counts it so."
    inner = source.config.get("text_config")
    if isinstance(inner, dict) and find_family(str(inner.get("model_type")), inner) is not None:
        name = inner["model_type"]
        return f" Its text_config is a {name}: save that object as a config.json of its own to count it alone."
    return format_nearest(source.config["model_type"], list_types())


def _read_limit(dims: BoundDims) -> int:
    text = dims.spec.positions.get("limit")
    if text is None:
        return 0
    try:
        value: object = dims.evaluate(text)
    except MissingNameError:
        return 0
    if isinstance(value, int) and value < 1 and dims.spec.positions["kind"] == "rotary":
        return 0  # angles need no table: HF runs such a config at any length
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{dims.where}: {text} must be a positive whole number, not {format_value(value)}")
    return value
