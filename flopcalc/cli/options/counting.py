"""What a command's options ask to count becomes an Estimate."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.estimate.estimator import Estimator, Samples
from flopcalc.core.estimate.inputs import Inputs, make_load
from flopcalc.core.model.config import Source, load_config
from flopcalc.core.recipe.recipe import Recipe, make_recipe
from flopcalc.data import get_stem
from flopcalc.errors import DeviceError, RecipeError, WorkloadError, format_value
from flopcalc.hardware.devices import detect_device, find_detected, find_device, parse_dtype
from flopcalc.units import describe_suffixes, parse_number, parse_size, parse_sizes

_SIZE = r"-?\d+[xX]-?\d+"
_UNTRACED = (
    "convention", "attention_kernel", "spec", "image", "video", "video_grid", "max_pixels", "lengths", "decoder_seq",
    "audio", "clipping", "weights", "kv_cache", "autocast", "head",
    "mtp",
)  # fmt: skip


class Asked(NamedTuple):
    """What a command was asked to count."""

    estimate: Estimate
    notes: list[str]


def make_estimate(model: Any, options: Mapping[str, Any]) -> Asked:
    """The Estimate that a command's options ask for, and notes on what was assumed."""
    notes = spell_out(options)
    device = _choose_device(options, notes)
    recipe = make_recipe(
        freeze=options["freeze"], train_only=options["train_only"], lora=options["lora"],
        recompute=read_recompute(options), clipping=options["clipping"],
    )  # fmt: skip
    spec = options.get("spec")
    source = load_config(
        model, download=options["download"], model_type=options.get("model_type"), own=(get_stem(spec),) if spec else ()
    )
    if options.get("trace"):
        return Asked(_count(_find_traced(source, recipe, options), options, notes), notes)
    estimator = bind(
        source, recipe=recipe, convention=options["convention"], attention_kernel=options["attention_kernel"],
        device=device, spec=options["spec"], head=options.get("head"),
        mtp=read_mtp(options.get("mtp")), **read_formats(options),
    )  # fmt: skip
    estimate = _count(estimator, options, notes)
    return Asked(estimate, notes)


def read_formats(options: Mapping[str, object]) -> dict[str, Any]:
    """What the options say about number formats; --dtype is --compute in short."""
    compute = options.get("compute")
    if compute is None and "dtype" in options and is_given("dtype"):
        compute = parse_dtype(options["dtype"])
    return {
        "compute": compute, "weights": options.get("weights"), "kv_cache": options.get("kv_cache"),
        "autocast": options.get("autocast") or None,
    }  # fmt: skip


def spell_out(options: Mapping[str, object]) -> list[str]:
    """What every value with a suffix stands for, as one note."""
    found: dict[str, str] = {}
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, str):
            found[flag] = value
        elif isinstance(value, tuple):  # a repeatable option
            found[flag] = ",".join(str(each) for each in value)
    described = describe_suffixes(found)
    return ["; ".join(described)] if described else []


def is_given(name: str) -> bool:
    """Whether an option of the running command was written by the user."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def read_recompute(options: Mapping[str, object]) -> str:
    """--recompute, or full where --gradient-checkpointing asks for it."""
    recompute = str(options["recompute"])
    if not options.get("gradient_checkpointing") or recompute != "none":
        return recompute
    if is_given("recompute"):
        raise RecipeError("--gradient-checkpointing contradicts --recompute none: give one of them")
    return "full"


def read_mtp(text: str | None) -> int | bool | None:
    """--mtp alone asks for the config's layers, --mtp N for N of them."""
    return True if text == "config" else read_number(text, "--mtp", minimum=0)


def read_number(text: str | None, what: str, minimum: int = 1) -> int | None:
    return None if text is None else parse_size(text, what, minimum)


def _find_traced(source: Source, recipe: Recipe, options: Mapping[str, Any]) -> Estimator:
    """The traced estimator that --trace asks for; options that a trace cannot answer are refused."""
    for name in _UNTRACED:
        if name in options and is_given(name) and not (name == "convention" and options[name] == "full"):
            raise WorkloadError(f"--trace counts what HF's code executes: it takes no --{name.replace('_', '-')}")
    from flopcalc.api import find_traced

    compute = read_formats(options)["compute"]
    return find_traced(source, recipe, options["phase"], bool(options["image_grid"]), compute)


def _choose_device(options: Mapping[str, Any], notes: list[str]) -> str | None:
    """The device asked for; None without one, or for this machine's own if it is not in the table."""
    name = options["device"]
    if name is None:
        return None
    if name == "auto":
        name = detect_device()
        known = find_detected(name) if name is not None else None
    else:
        try:
            known = find_device(name)
        except DeviceError:
            if options.get("peak") is None:
                raise
            known = None  # a device that is not in the table: its peak is given by hand
    if known is None:
        return None
    if known.sdpa is None and options["attention_kernel"] == "auto" and options["convention"] == "hardware":
        notes.append(f"which kernel SDPA picks on {known.name} is not known: flash assumed")
    return str(name)


def _count(estimator: Estimator, options: Mapping[str, Any], notes: list[str]) -> Estimate:
    accumulate = read_number(options["grad_accum"], "--grad-accum") or 1
    phase = _read_phase(options)
    if accumulate > 1 and phase != "train":
        raise WorkloadError(f"--grad-accum belongs to phase train, not {phase}")
    inputs = _read_inputs(options, notes)
    if isinstance(estimator, Samples):
        from flopcalc.core.estimate.pipeline import read_inputs  # of diffusion models alone: start-up is counted

        return estimator.ask(read_inputs(estimator, inputs)) * accumulate
    load, found = make_load(estimator, inputs)
    notes += found
    estimate = estimator.estimate(load)
    return estimate * accumulate if accumulate > 1 else estimate


def _read_inputs(options: Mapping[str, Any], notes: list[str]) -> Inputs:
    logits = options["logits"]
    if logits not in (None, "all", "last"):
        logits = parse_size(logits, "--logits (all, last or a number)")
    image_grids = (parse_sizes(text, "--image-grid", 3) for text in options["image_grid"])
    video_grids = (parse_sizes(text, "--video-grid", 3) for text in options["video_grid"])
    return Inputs(
        batch=read_number(options["batch"], "--batch"),
        seq=read_number(options["seq"], "--seq"),
        text=read_number(options["text"], "--text"),
        lengths=parse_sizes(options["lengths"], "--lengths") if options["lengths"] is not None else None,
        decoder_seq=read_number(options["decoder_seq"], "--decoder-seq"),
        images=tuple(_read_image(text, notes) for text in options["image"]),
        image_grids=tuple((t, h, w) for t, h, w in image_grids),
        videos=tuple(options["video"]),
        video_grids=tuple((t, h, w) for t, h, w in video_grids),
        max_pixels=read_number(options["max_pixels"], "--max-pixels"),
        audio=tuple(parse_number(text, "--audio") for text in options["audio"]),
        phase=_read_phase(options),
        sampling_steps=read_number(options.get("sampling_steps"), "--sampling-steps"),
        guidance=options.get("guidance"),
        parts=options.get("parts"),
        context=read_number(options["context"], "--context", minimum=0),
        logits=logits,
    )


def _read_phase(options: Mapping[str, object]) -> str:
    """--phase; sampling steps are asked for in phase sample alone."""
    if options.get("sampling_steps") is None:
        return str(options["phase"])
    if options["phase"] != "sample" and is_given("phase"):
        raise WorkloadError(f"--sampling-steps belongs to phase sample, not {options['phase']}")
    return "sample"


def _read_image(text: str, notes: list[str]) -> tuple[int, int]:
    """'640x480' is a size; anything else is the name of a file, whose size a note says."""
    if os.path.isfile(text):
        from flopcalc.core.model.pictures import read_picture_size

        width, height = read_picture_size(text)
        notes.append(f"--image {text} = {width}x{height} pixels")
        return width, height
    if re.fullmatch(_SIZE, text) is None:
        raise WorkloadError(f"--image: {format_value(text)} is neither WIDTHxHEIGHT nor a file")
    width, height = parse_sizes(text.lower(), "--image", 2, "x")
    return width, height
