"""A user's description of one sample (length or text, images, videos, audio) becomes the Workload of a batch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flopcalc.base.errors import WorkloadError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import find_field, spell
from flopcalc.base.units import check_items, parse_sizes, read_number, read_size, read_sizes
from flopcalc.base.vocabulary import Phase, PipelinePhase
from flopcalc.core.estimate.checks import ask_for_images
from flopcalc.core.estimate.model_counts import ModelCounts, Picture
from flopcalc.core.images.vision import Vision
from flopcalc.core.workload.workload import Grid, Media, Workload, make_workload, read_grids

_SIZE = r"-?\d+[xX]-?\d+"
MAX_IMAGES = 1_000_000  # per batch: they are listed one by one


class CallMedia(Media, total=False):
    """What a bound model takes beside sizes; `images` are files or (width, height) in pixels, `audio` seconds."""

    images: Iterable[Picture] | None
    videos: Iterable[object] | None
    max_pixels: int | None
    audio: Iterable[float] | None
    text: int | None
    # diffusion models alone
    sampling_steps: int | None
    guidance: bool | str | None
    parts: Iterable[str] | str | None
    strength: float | None
    images_per_prompt: int | None
    references: int | None


PLAIN = frozenset(Media.__annotations__)  # what make_workload takes as it is


@frozen()
class Inputs(Value):
    """One sample, and how many there are, by the fields of a setup; images in pixels or as files, grids in patches."""

    batch: int | None = None  # 1 where none is said
    seq: int | None = None  # length that the language model sees
    text: int | None = None  # length without visual and audio tokens, which are added
    lengths: tuple[int, ...] | None = None  # one packed row of documents
    decoder_seq: int | None = None
    image: tuple[Picture, ...] = ()
    image_grid: tuple[Grid, ...] = ()
    video: tuple[str, ...] = ()  # as parse_video reads them
    video_grid: tuple[Grid, ...] = ()
    max_pixels: int | None = None  # the processor's, instead of its config's
    audio: tuple[float, ...] = ()  # seconds
    clips: tuple[int, ...] | None = None  # the same in frames of the feature extractor; of the whole batch
    phase: PipelinePhase = "train"
    context: int | None = None
    logits: int | str | None = None
    sampling_steps: int | None = None  # these of diffusion models alone
    guidance: bool | str | None = None  # on or off
    parts: Iterable[str] | str | None = None
    strength: float | None = None
    images_per_prompt: int | None = None
    references: int | None = None
    of_batch: bool = False  # images, videos and audio are those of the whole batch, not of each sample


def read_call(given: Mapping[str, Any]) -> Inputs:
    """The arguments of a bound model's call, by keyword or option; images, videos and audio are of the whole batch."""
    found: dict[str, Any] = {}
    for keyword, value in given.items():
        field = find_field(keyword, value)
        if field not in SIZES:
            near = format_nearest(spell(field), [spell(each) for each in SIZES], 0.6)
            raise WorkloadError(
                f"a bound model takes no {spell(field)}.{near} A call says the sizes of one micro-batch; bind() takes "
                "what trains, formats and the device; estimate_flops() takes everything"
            )
        if value is None:
            continue
        if field in found:
            raise WorkloadError(f"{spell(field)} is given twice: give it once")
        found[field] = _READERS[field](value, field) if field in _READERS else value
    return Inputs(**found, of_batch=True)


def read_images(value: Any, field: str) -> tuple[Any, ...]:
    """'640x480' or (640, 480) is a size; any other text is the name of a file."""
    items = (value,) if isinstance(value, str) else check_items(() if value is None else value, spell(field))
    return tuple(_read_image(each, field) for each in items)


def _read_image(value: object, field: str) -> Any:
    if not isinstance(value, str) or os.path.isfile(value):
        return value
    if re.fullmatch(_SIZE, value) is None:
        raise WorkloadError(f"{spell(field)}: {format_value(value)} is neither WIDTHxHEIGHT nor a file")
    return parse_sizes(value.lower(), field, 2, "x")


def read_videos(value: Any, field: str) -> tuple[str, ...]:
    """Videos as parse_video reads them: texts, or (width, height, frames)."""
    items = (value,) if isinstance(value, str) else check_items(() if value is None else value, spell(field))
    return tuple(
        each if isinstance(each, str) else "x".join(map(str, check_items(each, spell(field)))) for each in items
    )


def read_seconds(value: Any, field: str) -> tuple[float, ...]:
    """One time, or several, as numbers or texts such as 500ms."""
    items = (value,) if isinstance(value, (str, int, float)) else check_items(value, spell(field))
    return tuple(read_number(each, field) for each in items)


SIZES = tuple(name for name in Inputs.__annotations__ if name != "of_batch")  # fields of a setup
# How those of a bound model's call are read that the workload does not read itself.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(
        ("batch", "seq", "text", "decoder_seq", "max_pixels", "sampling_steps", "images_per_prompt"), read_size
    ),
    **dict.fromkeys(("image_grid", "video_grid"), lambda value, field: read_grids(value, spell(field))),
    "lengths": read_sizes,
    "image": read_images,
    "video": read_videos,
    "audio": read_seconds,
    "strength": read_number,
    "references": lambda value, field: read_size(value, field, 0),
}


def check_no_sampling(name: str, phase: PipelinePhase, **asked: object) -> Phase:
    """Refuse arguments that only diffusion models take, and narrow the phase."""
    for field, value in asked.items():
        if value is not None:
            raise WorkloadError(f"{spell(field)} belongs to diffusion models: {name} is none")
    if isinstance(phase, str) and phase == "sample":
        raise WorkloadError(f"{name} is no diffusion model: there is no phase sample")
    return phase


def make_load(estimator: ModelCounts, inputs: Inputs) -> tuple[Workload, list[str]]:
    """The workload of a batch of such samples, and notes on what was assumed."""
    batch = inputs.batch or 1
    phase = check_no_sampling(
        estimator.source.name,
        inputs.phase,
        sampling_steps=inputs.sampling_steps,
        guidance=inputs.guidance,
        parts=inputs.parts,
        strength=inputs.strength,
        images_per_prompt=inputs.images_per_prompt,
        references=inputs.references,
    )
    images, videos, notes = _cut_images(estimator, inputs)
    is_text = estimator.vision is None or estimator.has_text_encoder or estimator.has_decoder
    if not is_text and not (images or videos):
        raise ask_for_images(estimator.source.name, estimator.vision)
    if not is_text:
        name = estimator.source.name
        for field in ("seq", "text", "lengths", "logits"):
            if getattr(inputs, field) is not None:
                raise WorkloadError(f"{name} takes images alone: leave {spell(field)} out")
        if phase == "decode":
            raise WorkloadError(f"{name} takes images alone: there is no phase {phase}; forward is one pass")
    if phase == "decode" and (images or videos):
        raise WorkloadError(f"decode does no vision work: leave images out, their tokens are in {spell('context')}")
    clips = [*check_items(inputs.clips or (), "clips"), *(estimator.count_frames(inputs.audio) if inputs.audio else ())]
    if phase == "decode" and clips and not estimator.has_decoder:
        raise WorkloadError(
            f"decode does no audio work: leave {spell('audio')} out, its tokens are in {spell('context')}"
        )
    decoder_seq = inputs.decoder_seq
    if phase == "decode" and decoder_seq is None and estimator.has_decoder:
        decoder_seq = 1
    seq = _find_length(estimator, inputs, images, videos, clips)
    copies = 1 if inputs.of_batch else batch
    for what, many in (("clips", len(clips)), ("images", len(images + videos))):
        if copies * many > MAX_IMAGES:
            raise WorkloadError(f"{copies * many} {what}: more than {MAX_IMAGES} in one batch is a mistake")
    load = make_workload(
        batch, seq, lengths=inputs.lengths, image_grid_thw=images * copies or None,
        video_grid_thw=videos * copies or None, phase=phase, context=inputs.context, logits=inputs.logits,
        decoder_seq_len=decoder_seq, clips=clips * copies or None,
    )  # fmt: skip
    return load, notes


def _cut_images(estimator: ModelCounts, inputs: Inputs) -> tuple[list[Grid], list[Grid], list[str]]:
    """Grids of all images and videos of a sample."""
    vision = estimator.vision
    if estimator.origin == "trace":
        if inputs.image or inputs.video or inputs.video_grid:
            raise WorkloadError(
                f"{estimator.source.name} is traced: give its images in patches, {spell('image_grid', 'T,H,W')}"
            )
        if inputs.image_grid and inputs.text is not None:
            raise WorkloadError(
                f"{estimator.source.name} is traced: give {spell('seq')}, the length with visual tokens, instead of "
                f"{spell('text')}"
            )
        return list(inputs.image_grid), [], []
    if not (inputs.image or inputs.image_grid or inputs.video or inputs.video_grid):
        if inputs.max_pixels is not None:
            raise WorkloadError(f"{spell('max_pixels')} needs {spell('image')} or {spell('video')}")
        return [], [], []
    if vision is None and (inputs.video or inputs.video_grid):
        is_text = "" if estimator.audio is not None else "is a text model: it "
        raise WorkloadError(f"{estimator.source.name} {is_text}takes no videos")
    samples = inputs.batch or 1 if inputs.of_batch else 1
    images, notes = estimator.cut_images(inputs.image, samples, max_pixels=inputs.max_pixels)
    assert vision is not None  # a text model's images were refused
    for grid in inputs.image_grid:
        vision.check_tiles(grid, spell("image_grid"))
        images.append(vision.check_grid(grid, spell("image_grid")))
    for field, given in (("video", inputs.video), ("video_grid", inputs.video_grid)):
        if given and not vision.takes_videos:
            raise WorkloadError(f"{spell(field)}: {estimator.source.name} takes no videos")
    videos, found = _cut_videos(estimator, vision, inputs)
    videos += [vision.check_grid(grid, spell("video_grid")) for grid in inputs.video_grid]
    return images, videos, [*notes, *found]


def _cut_videos(estimator: ModelCounts, vision: Vision, inputs: Inputs) -> tuple[list[Grid], list[str]]:
    """Grids of the videos that are given in seconds or frames."""
    if not inputs.video:
        return [], []
    from flopcalc.core.images.videos import cut_video, parse_video  # imported lazily: few inputs have videos

    preprocessor = estimator.source.video_preprocessor
    grids: list[Grid] = []
    notes: list[str] = []
    for text in inputs.video:
        video = parse_video(text)
        made, found = cut_video(video, vision, estimator.spec.name, preprocessor, inputs.max_pixels)
        grids += made
        notes += [note for note in found if note not in notes]
    return grids, notes


def _find_length(
    estimator: ModelCounts, inputs: Inputs, images: Sequence[Grid], videos: Sequence[Grid], clips: Sequence[int]
) -> int | None:
    """Positions of the language model; None where documents or a decoder's length say it."""
    sizes = {"seq": inputs.seq, "text": inputs.text, "lengths": inputs.lengths}
    given = [spell(field) for field, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise WorkloadError(f"{' and '.join(given)} contradict each other: give one")
    if inputs.lengths is not None:
        if estimator.has_decoder:
            asked = _ask_sizes(estimator)
            raise WorkloadError(
                f"{estimator.source.name} is an encoder-decoder: it takes no packed {spell('lengths')}; {asked}"
            )
        return None
    if estimator.has_decoder and not given and (inputs.phase == "decode" or inputs.decoder_seq is not None):
        return None
    filled = 0 if estimator.has_decoder else _count_filled(estimator, inputs, images, videos, clips)
    if inputs.text is not None:
        return inputs.text + filled
    if inputs.seq is not None:
        if filled > inputs.seq:
            kinds = (("images", images), ("videos", videos), ("audio", clips))
            sources = " and ".join(word for word, values in kinds if values)
            verb = "takes" if sources == "audio" else "take"
            raise WorkloadError(
                f"the {sources} {verb} {filled} tokens, more than {spell('seq', inputs.seq)}, which includes them; "
                f"raise {spell('seq')}, or give {spell('text')}, which adds them"
            )
        return inputs.seq
    if estimator.has_decoder:
        raise WorkloadError(f"{estimator.source.name} is an encoder-decoder: {_ask_sizes(estimator)}")
    if inputs.phase == "decode":
        return 1
    if not estimator.needs_text:
        return None
    ways = f"{spell('seq', 'N')}, {spell('text', 'N')} or {spell('lengths', 'N,N,…')}"
    raise WorkloadError(f"how long are the sequences? Give {ways}")


def _count_filled(
    estimator: ModelCounts, inputs: Inputs, images: Sequence[Grid], videos: Sequence[Grid], clips: Sequence[int]
) -> int:
    """Positions of one sample of a decoder-only model that images, videos and audio fill."""
    filled: list[int] = []
    if estimator.vision is not None:
        filled += [estimator.vision.count_tokens(grid) for grid in images]
        filled += [estimator.vision.count_tokens(grid, True) for grid in videos]
    filled += map(estimator.audio.count_tokens, clips) if estimator.audio else ()
    samples = inputs.batch or 1 if inputs.of_batch else 1
    each, rest = divmod(len(filled), samples)
    if samples == 1 or not filled:
        return sum(filled)
    if inputs.text is None:
        return -(-sum(filled) // samples)  # the longest sample needs at least this
    if rest or len({sum(filled[at : at + each]) for at in range(0, len(filled), each)}) > 1:
        raise WorkloadError(
            f"{spell('text')} needs the same images in each of {samples} samples: give {spell('seq')}, the whole length"
        )
    return sum(filled) // samples


def _ask_sizes(estimator: ModelCounts) -> str:
    """What an encoder-decoder needs to know."""
    decoder = f"{spell('decoder_seq', 'N')} for its decoder"
    if estimator.has_text_encoder:
        return f"give {spell('seq', 'N')} for its encoder and {decoder}"
    what = spell("audio", "SECONDS") if estimator.audio is not None else spell("image", "WxH")
    return f"give {what} for its encoder and {decoder}"
