"""The options that say what is counted, shared by several commands, and the Estimate they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.estimate.utilization import Utilization, check_positive, describe_measured_mfu, find_peak, hfu, mfu
from flopcalc.core.model.config import Source, load_config
from flopcalc.core.recipe.recipe import Recipe, make_recipe
from flopcalc.core.workload.workload import Grid, make_workload
from flopcalc.data import list_data_files
from flopcalc.errors import DeviceError, WorkloadError
from flopcalc.hardware.devices import DTYPES, detect_device, find_device, load_devices, parse_dtype
from flopcalc.units import format_rate, parse_size, parse_sizes
from flopcalc.words import CLIPPING, CONVENTIONS, EXECUTIONS, KERNELS, PHASES, RECOMPUTE

MAX_IMAGES = 1_000_000  # per batch: they are listed one by one
Function = TypeVar("Function", bound=Callable[..., Any])


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in list_data_files("presets") if name.startswith(incomplete.lower())]


def complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [device.id for device in load_devices()[0] if device.id.startswith(incomplete.lower())]


model_option = click.option(
    "--model", required=True, shell_complete=complete_model, metavar="M",
    help="Preset, config.json, its folder, or a hub id in the local cache.",
)  # fmt: skip


def execution_option(default: str) -> Callable[[Function], Function]:
    """--execution, with what a command takes without it."""
    return click.option(
        "--execution",
        type=click.Choice(EXECUTIONS),
        help="How the step runs: eager (HF's code), compiled (torch.compile), graphs (compiled, as CUDA graphs), fused "
        f"(kernels of a training framework). Default: {default}.",
    )


trace_option = click.option(
    "--trace", is_flag=True, help="Count HF's own code instead of a spec, and keep the result (needs torch once)."
)
_WORKLOAD = (
    click.option("--spec", metavar="FILE", help="Add your own spec (TOML) for its model_type."),
    click.option("--download", is_flag=True, help="Fetch a hub id's config.json if it is not in the cache."),
    click.option("--batch", metavar="N", help="Samples per micro-batch (default 1)."),
    click.option("--seq", metavar="N", help="Length the language model sees per sample, visual tokens included."),
    click.option("--decoder-seq", metavar="N", help="Encoder-decoders: length of the decoder; --seq is the encoder's."),
    click.option("--text", metavar="N", help="Text tokens per sample; visual and audio tokens are added."),
    click.option("--lengths", metavar="N,N,…", help="One packed row of documents; without --seq and --batch."),
    click.option("--grad-accum", metavar="N", help="Micro-batches per step (default 1)."),
    click.option("--image", multiple=True, metavar="WxH", help="An image per sample, in pixels; repeatable."),
    click.option("--image-grid", multiple=True, metavar="T,H,W", help="An image per sample, in patches."),
    click.option("--video-grid", multiple=True, metavar="T,H,W", help="A video per sample, in patches."),
    click.option("--audio", multiple=True, metavar="SECONDS", help="A clip of audio per sample; repeatable."),
    click.option("--phase", type=click.Choice(PHASES), default="train", show_default=True),
    click.option("--context", metavar="C", help="decode: keys already cached (default 0)."),
    click.option("--logits", metavar="all|last|N", help="Positions that get logits (default: all; prefill: last)."),
)
_RECIPE = (
    click.option(
        "--freeze", multiple=True, metavar="PATTERN", help="Glob of module paths, or vision|audio|projector|language."
    ),
    click.option("--train-only", multiple=True, metavar="PATTERN", help="Only what matches trains."),
    click.option(
        "--lora", metavar="r=16,targets=q_proj+v_proj", help="LoRA as PEFT applies it; save=… trains modules beside it."
    ),
    click.option("--recompute", type=click.Choice(RECOMPUTE), default="none", show_default=True),
    click.option(
        "--clipping",
        type=click.Choice(CLIPPING),
        default="none",
        show_default=True,
        help="DP-SGD as Opacus runs it; counted under convention hardware.",
    ),
)
_COUNTING = (
    click.option("--convention", type=click.Choice(CONVENTIONS), default="model", show_default=True),
    click.option(
        "--attention-kernel",
        type=click.Choice(KERNELS),
        default="auto",
        show_default=True,
        help="For convention hardware.",
    ),
    click.option(
        "--device",
        shell_complete=complete_device,
        metavar="NAME",
        help="Device for peaks and kernels; auto = this machine's.",
    ),
)
_TIME = (
    click.option("--dtype", default="bf16", show_default=True, metavar="|".join(DTYPES[:4]) + "|…"),
    click.option("--peak", metavar="FLOPS_PER_S", help="Dense peak of one device, instead of the table's."),
    click.option("--num-devices", metavar="N", help="Devices that share the step (default 1)."),
    click.option("--step-time", metavar="SECONDS", help="Measured time of one step: gives MFU and HFU."),
)  # fmt: skip


def workload_options(function: Function) -> Function:
    """--seq, --freeze, --convention and their like."""
    for option in reversed(_WORKLOAD + _RECIPE + _COUNTING):
        function = option(function)
    return function


def time_options(function: Function) -> Function:
    """--step-time, --peak and their like."""
    for option in reversed(_TIME):
        function = option(function)
    return function


class Asked(NamedTuple):
    """What a command was asked to count."""

    estimate: Estimate
    notes: list[str]


def make_estimate(model: Any, options: Mapping[str, Any]) -> Asked:
    """The Estimate that a command's options ask for, and notes on what was assumed."""
    notes: list[str] = []
    device = _choose_device(options, notes)
    recipe = make_recipe(
        freeze=options["freeze"], train_only=options["train_only"], lora=options["lora"],
        recompute=options["recompute"], clipping=options["clipping"],
    )  # fmt: skip
    source = load_config(model, download=options["download"])
    if options.get("trace"):
        return Asked(_count(_find_traced(source, recipe, options), options, notes), notes)
    estimator = bind(
        source, recipe=recipe, convention=options["convention"], attention_kernel=options["attention_kernel"],
        device=device, dtype=parse_dtype(options.get("dtype", "bf16")), spec=options["spec"],
    )  # fmt: skip
    estimate = _count(estimator, options, notes)
    return Asked(estimate, notes)


def _find_traced(source: Source, recipe: Recipe, options: Mapping[str, Any]) -> Estimator:
    """The traced estimator that --trace asks for; options that a trace cannot answer are refused."""
    context = click.get_current_context()
    for name in (
        "convention", "attention_kernel", "spec", "image", "video_grid", "lengths", "decoder_seq", "audio", "clipping",
    ):  # fmt: skip
        is_given = name in options and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_given and not (name == "convention" and options[name] == "full"):
            raise WorkloadError(f"--trace counts what HF's code executes: it takes no --{name.replace('_', '-')}")
    from flopcalc.api import find_traced

    return find_traced(source, recipe, options["phase"], bool(options["image_grid"]))


def _choose_device(options: Mapping[str, Any], notes: list[str]) -> str | None:
    """The id of the device asked for; None without one, or for this machine's own if it is not in the table."""
    name = options["device"]
    if name is None:
        return None
    if name == "auto":
        found = detect_device()
        try:
            known = find_device(found) if found is not None else None
        except DeviceError:
            known = None
    else:
        try:
            known = find_device(name, needs_all="peak" not in options)
        except DeviceError:
            if options.get("peak") is None:
                raise
            known = None  # a device that is not in the table: its peak is given by hand
    if known is None:
        return None
    if known.sdpa is None and options["attention_kernel"] == "auto" and options["convention"] == "hardware":
        notes.append(f"which kernel SDPA picks on {known.name} is not known: flash taken")
    return known.id


def _count(estimator: Estimator, options: Mapping[str, Any], notes: list[str]) -> Estimate:
    phase = options["phase"]
    batch = _read_number(options["batch"], "--batch") or 1
    images, videos = _read_images(estimator, options, notes)
    accumulate = _read_number(options["grad_accum"], "--grad-accum") or 1
    if accumulate > 1 and phase != "train":
        raise WorkloadError(f"--grad-accum belongs to phase train, not {phase}")
    if phase == "decode" and (images or videos):
        raise WorkloadError("decode does no vision work: leave images out, their tokens are in --context")
    context = _read_number(options["context"], "--context", minimum=0)
    if context is not None and phase != "decode":
        raise WorkloadError(f"--context belongs to phase decode, not {phase}")
    clips = estimator.count_frames(_read_seconds(text) for text in options["audio"]) if options["audio"] else []
    if phase == "decode" and clips and not estimator.has_decoder:
        raise WorkloadError("decode does no audio work: leave --audio out, its tokens are in --context")
    decoder_seq = _read_number(options["decoder_seq"], "--decoder-seq")
    if phase == "decode" and decoder_seq is None and estimator.has_decoder:
        decoder_seq = 1
    seq = _read_length(estimator, options, images, videos, clips, phase)
    lengths = parse_sizes(options["lengths"], "--lengths") if options["lengths"] is not None else None
    logits = options["logits"]
    if logits not in (None, "all", "last"):
        logits = parse_size(logits, "--logits (all, last or a number)")
    if batch * len(clips) > MAX_IMAGES:
        raise WorkloadError(f"{batch * len(clips)} clips: more than {MAX_IMAGES} in one batch is a mistake")
    if batch * len(images + videos) > MAX_IMAGES:
        raise WorkloadError(f"{batch * len(images + videos)} images: more than {MAX_IMAGES} in one batch is a mistake")
    load = make_workload(
        batch, seq, lengths=lengths, image_grid_thw=images * batch or None, video_grid_thw=videos * batch or None,
        phase=phase, context=context, logits=logits, decoder_seq_len=decoder_seq, clips=clips * batch or None,
    )  # fmt: skip
    estimate = estimator.estimate(load)
    return estimate * accumulate if accumulate > 1 else estimate


def _read_number(text: str | None, what: str, minimum: int = 1) -> int | None:
    return None if text is None else parse_size(text, what, minimum)


def _read_images(estimator: Estimator, options: Mapping[str, Any], notes: list[str]) -> tuple[list[Grid], list[Grid]]:
    vision = estimator.vision
    given = [*options["image"], *options["image_grid"], *options["video_grid"]]
    if estimator.origin == "trace":
        grids = [parse_sizes(text, "--image-grid", 3) for text in options["image_grid"]]
        return [(t, h, w) for t, h, w in grids], []
    if given and vision is None:
        what = "takes no images" if estimator.audio is not None else "is a text model: it takes no images"
        raise WorkloadError(f"{estimator.source.name} {what}")
    images: list[Grid] = []
    videos: list[Grid] = []
    for text in options["image"]:
        assert vision is not None
        width, height = parse_sizes(text.lower(), "--image", 2, "x")
        made, found = vision.grids_of_pixels(width, height, estimator.source.preprocessor, len(options["image"]))
        notes += [note for note in found if note not in notes]
        images += made
    for key, found_grids in (("image_grid", images), ("video_grid", videos)):
        for text in options[key]:
            assert vision is not None
            flag = f"--{key.replace('_', '-')}"
            if key == "video_grid" and not vision.takes_videos:
                raise WorkloadError(f"{flag}: {estimator.source.name} takes no videos")
            t, h, w = parse_sizes(text, flag, 3)
            if key == "image_grid":
                vision.check_tiles((t, h, w), flag)
            found_grids.append(vision.check_grid((t, h, w), flag))
    return images, videos


def _read_seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise WorkloadError(f"--audio: {text!r} is not a number of seconds") from None


def _read_length(
    estimator: Estimator,
    options: Mapping[str, Any],
    images: list[Grid],
    videos: list[Grid],
    clips: list[int],
    phase: str,
) -> int | None:
    seq, text, lengths = options["seq"], options["text"], options["lengths"]
    given = [flag for flag, value in (("--seq", seq), ("--text", text), ("--lengths", lengths)) if value is not None]
    if len(given) > 1:
        raise WorkloadError(f"{' and '.join(given)} contradict each other: give one")
    if lengths is not None and estimator.has_decoder:
        raise WorkloadError(
            f"{estimator.source.name} is an encoder-decoder: it takes no packed --lengths; {_ask_sizes(estimator)}"
        )
    if lengths is not None:
        if options["batch"] is not None:
            raise WorkloadError("--lengths describes one packed row: --batch contradicts it")
        return None
    visual = 0
    if estimator.vision is not None:
        visual += sum(estimator.vision.count_tokens(grid) for grid in images)
        visual += sum(estimator.vision.count_tokens(grid, True) for grid in videos)
    if estimator.has_decoder:
        # Images and audio fill positions of a decoder-only model alone; an encoder of audio has no length in tokens.
        visual = 0
        if not given and not (phase != "decode" and options["decoder_seq"] is None):
            return None
    elif estimator.audio:
        visual += sum(map(estimator.audio.count_tokens, clips))
    if text is not None:
        return parse_size(text, "--text") + visual
    if seq is not None:
        length = parse_size(seq, "--seq")
        if visual > length:
            sources = " and ".join(
                word for word, given in (("images", images), ("videos", videos), ("audio", clips)) if given
            )
            verb = "fills" if sources == "audio" else "fill"
            raise WorkloadError(
                f"the {sources} {verb} {visual} tokens, more than --seq {length}, which counts them in; "
                "raise --seq, or give --text to have them added"
            )
        return length
    if phase == "decode" and not estimator.has_decoder:
        return 1
    if estimator.has_decoder:
        raise WorkloadError(f"{estimator.source.name} is an encoder-decoder: {_ask_sizes(estimator)}")
    raise WorkloadError("how long are the sequences? Give --seq N, --text N or --lengths N,N,…")


def _ask_sizes(estimator: Estimator) -> str:
    """What an encoder-decoder is to be told, in options."""
    if estimator.has_text_encoder:
        return "give --seq N for its encoder and --decoder-seq N for its decoder"
    what = "--audio SECONDS" if estimator.audio is not None else "--image WxH"
    return f"give {what} for its encoder and --decoder-seq N for its decoder"


def make_shares(
    estimate: Estimate, options: Mapping[str, Any]
) -> tuple[Utilization | None, Utilization | None, list[str]]:
    """MFU and HFU where a step time is given, and notes; without one, the least time that the peak allows."""
    peak = read_float(options["peak"], "--peak")
    step_time = read_float(options["step_time"], "--step-time")
    devices = _read_number(options["num_devices"], "--num-devices") or 1
    device = options["device"]
    dtype = parse_dtype(options["dtype"])
    if step_time is None:
        if device is None and peak is None:
            if options["num_devices"]:
                raise WorkloadError("--num-devices needs a --device or a --peak")
            return None, None, []
        try:
            name, rate, note = find_peak(device, dtype, peak)
        except DeviceError as error:  # a dtype without a peak: no reason to refuse the count
            return None, None, [str(error)]
        if rate is None:
            return None, None, [note] if note else []
        convention = "full" if estimate.convention == "full" else "model"
        least = estimate.total_under(convention) / (rate * devices)
        where = f" of {devices} × {name}" if name else ""
        bound = f"at the {dtype} peak{where} ({format_rate(rate)} each) this takes at least {least:.4g} s"
        notes = [f"{bound}; --step-time gives the MFU"]
        measured = describe_measured_mfu(name, estimate) if name is not None and dtype == "bf16" else None
        return None, None, notes + ([measured] if measured else [])
    arguments: dict[str, Any] = {"device": device, "dtype": dtype, "peak": peak, "num_devices": devices}
    model_share = mfu(estimate, step_time, **arguments)
    hardware_share = hfu(estimate, step_time, **arguments)
    found = [share.note for share in (model_share, hardware_share) if share.note]
    return model_share, hardware_share, list(dict.fromkeys(found))


def read_float(text: str | None, what: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise WorkloadError(f"{what}: {text!r} is not a number") from None
    return check_positive(value, what)
