"""What a user says of one sample (length or text, images, videos, audio) becomes the Workload of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from flopcalc.core.estimate.checks import ask_for_images
from flopcalc.core.estimate.estimator import Estimator, Picture, check_no_sampling
from flopcalc.core.model.vision import Vision
from flopcalc.core.workload.workload import Grid, Workload, make_workload
from flopcalc.errors import WorkloadError
from flopcalc.values import Value, frozen

MAX_IMAGES = 1_000_000  # per batch: they are listed one by one


@frozen()
class Inputs(Value):
    """One sample, and how many there are; images in pixels or as files, grids as (t, h, w) in patches."""

    batch: int | None = None  # 1 where none is said
    seq: int | None = None  # length that the language model sees
    text: int | None = None  # length without visual and audio tokens, which are added
    lengths: tuple[int, ...] | None = None  # one packed row of documents
    decoder_seq: int | None = None
    images: tuple[Picture, ...] = ()
    image_grids: tuple[Grid, ...] = ()
    videos: tuple[str, ...] = ()  # as parse_video reads them
    video_grids: tuple[Grid, ...] = ()
    max_pixels: int | None = None  # the processor's, instead of its config's
    audio: tuple[float, ...] = ()  # seconds
    phase: str = "train"
    context: int | None = None
    logits: int | str | None = None
    sampling_steps: int | None = None  # these of diffusion models alone
    guidance: str | None = None  # on or off
    parts: str | None = None


def make_load(estimator: Estimator, inputs: Inputs) -> tuple[Workload, list[str]]:
    """The workload of a batch of such samples, and notes on what was assumed."""
    batch, phase = inputs.batch or 1, inputs.phase
    check_no_sampling(
        estimator.source.name, phase, sampling_steps=inputs.sampling_steps, guidance=inputs.guidance, parts=inputs.parts
    )
    images, videos, notes = _cut_images(estimator, inputs)
    is_text = estimator.vision is None or estimator.has_text_encoder or estimator.has_decoder
    if not is_text and not (images or videos):
        raise ask_for_images(estimator.source.name, estimator.vision)
    if phase == "decode" and not is_text:
        name = estimator.source.name
        raise WorkloadError(f"{name} takes images alone: there is no phase {phase}; forward is one pass")
    if phase == "decode" and (images or videos):
        raise WorkloadError("decode does no vision work: leave images out, their tokens are in --context")
    clips = estimator.count_frames(inputs.audio) if inputs.audio else []
    if phase == "decode" and clips and not estimator.has_decoder:
        raise WorkloadError("decode does no audio work: leave --audio out, its tokens are in --context")
    decoder_seq = inputs.decoder_seq
    if phase == "decode" and decoder_seq is None and estimator.has_decoder:
        decoder_seq = 1
    seq = _find_length(estimator, inputs, images, videos, clips)
    for what, many in (("clips", len(clips)), ("images", len(images + videos))):
        if batch * many > MAX_IMAGES:
            raise WorkloadError(f"{batch * many} {what}: more than {MAX_IMAGES} in one batch is a mistake")
    load = make_workload(
        batch, seq, lengths=inputs.lengths, image_grid_thw=images * batch or None,
        video_grid_thw=videos * batch or None, phase=phase, context=inputs.context, logits=inputs.logits,
        decoder_seq_len=decoder_seq, clips=clips * batch or None,
    )  # fmt: skip
    return load, notes


def _cut_images(estimator: Estimator, inputs: Inputs) -> tuple[list[Grid], list[Grid], list[str]]:
    """Grids of all images and videos of a sample."""
    vision = estimator.vision
    if estimator.origin == "trace":
        return list(inputs.image_grids), [], []
    if not (inputs.images or inputs.image_grids or inputs.videos or inputs.video_grids):
        if inputs.max_pixels is not None:
            raise WorkloadError("--max-pixels needs an --image or a --video")
        return [], [], []
    images, notes = estimator.cut_images(inputs.images, max_pixels=inputs.max_pixels)
    assert vision is not None  # a text model's images were refused
    for grid in inputs.image_grids:
        vision.check_tiles(grid, "--image-grid")
        images.append(vision.check_grid(grid, "--image-grid"))
    for flag, given in (("--video", inputs.videos), ("--video-grid", inputs.video_grids)):
        if given and not vision.takes_videos:
            raise WorkloadError(f"{flag}: {estimator.source.name} takes no videos")
    videos, found = _cut_videos(estimator, vision, inputs)
    videos += [vision.check_grid(grid, "--video-grid") for grid in inputs.video_grids]
    return images, videos, [*notes, *found]


def _cut_videos(estimator: Estimator, vision: Vision, inputs: Inputs) -> tuple[list[Grid], list[str]]:
    """Grids of the videos that are given in seconds or frames."""
    if not inputs.videos:
        return [], []
    from flopcalc.core.model.videos import cut_video, parse_video  # only where videos are given: start-up is counted

    preprocessor = estimator.source.video_preprocessor
    grids: list[Grid] = []
    notes: list[str] = []
    for text in inputs.videos:
        video = parse_video(text, "--video")
        made, found = cut_video(video, vision, estimator.spec.name, preprocessor, inputs.max_pixels)
        grids += made
        notes += [note for note in found if note not in notes]
    return grids, notes


def _find_length(
    estimator: Estimator, inputs: Inputs, images: Sequence[Grid], videos: Sequence[Grid], clips: Sequence[int]
) -> int | None:
    """Positions of the language model; None where documents or a decoder's length say it."""
    sizes = {"--seq": inputs.seq, "--text": inputs.text, "--lengths": inputs.lengths}
    given = [flag for flag, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise WorkloadError(f"{' and '.join(given)} contradict each other: give one")
    if inputs.lengths is not None:
        if estimator.has_decoder:
            asked = _ask_sizes(estimator)
            raise WorkloadError(f"{estimator.source.name} is an encoder-decoder: it takes no packed --lengths; {asked}")
        if inputs.batch is not None:
            raise WorkloadError("--lengths describes one packed row: --batch contradicts it")
        return None
    if estimator.has_decoder and not given and (inputs.phase == "decode" or inputs.decoder_seq is not None):
        return None
    filled = 0 if estimator.has_decoder else _count_filled(estimator, images, videos, clips)
    if inputs.text is not None:
        return inputs.text + filled
    if inputs.seq is not None:
        if filled > inputs.seq:
            kinds = (("images", images), ("videos", videos), ("audio", clips))
            sources = " and ".join(word for word, values in kinds if values)
            verb = "takes" if sources == "audio" else "take"
            raise WorkloadError(
                f"the {sources} {verb} {filled} tokens, more than --seq {inputs.seq}, which includes them; "
                "raise --seq, or give --text, which adds them"
            )
        return inputs.seq
    if estimator.has_decoder:
        raise WorkloadError(f"{estimator.source.name} is an encoder-decoder: {_ask_sizes(estimator)}")
    if inputs.phase == "decode":
        return 1
    if not estimator.needs_text:
        return None
    raise WorkloadError("how long are the sequences? Give --seq N, --text N or --lengths N,N,…")


def _count_filled(
    estimator: Estimator, images: Sequence[Grid], videos: Sequence[Grid], clips: Sequence[int]
) -> int:  # fmt: skip
    """Positions of a decoder-only model that images, videos and audio fill."""
    filled = 0
    if estimator.vision is not None:
        filled += sum(estimator.vision.count_tokens(grid) for grid in images)
        filled += sum(estimator.vision.count_tokens(grid, True) for grid in videos)
    return filled + (sum(map(estimator.audio.count_tokens, clips)) if estimator.audio else 0)


def _ask_sizes(estimator: Estimator) -> str:
    """What an encoder-decoder is to be told, in options."""
    if estimator.has_text_encoder:
        return "give --seq N for its encoder and --decoder-seq N for its decoder"
    what = "--audio SECONDS" if estimator.audio is not None else "--image WxH"
    return f"give {what} for its encoder and --decoder-seq N for its decoder"
