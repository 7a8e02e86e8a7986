"""A set-up: what the page's form holds, in the words of the command line; it becomes an Estimate as there."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.estimate.estimator import Estimator, Samples
from flopcalc.core.estimate.inputs import Inputs, make_load
from flopcalc.core.model.config import Source, load_config
from flopcalc.core.recipe.recipe import make_recipe
from flopcalc.errors import ConfigError, FlopcalcError, WorkloadError, format_nearest, format_value
from flopcalc.files import MAX_JSON_BYTES
from flopcalc.hardware.devices import parse_dtype
from flopcalc.units import describe_suffixes, parse_number, parse_size, parse_sizes

_FILE = re.compile(r"(?:[\w.-]+/)?[\w.-]+\.json", re.ASCII)
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.json)", re.ASCII)  # of a preset; nothing else of this machine is read
_MOST_FILES = 40
_MOST_BOUND = 8
_SIZE = re.compile(r"-?\d+x-?\d+", re.IGNORECASE)
# Sizes of a step that may have a suffix.
SPELLED = (
    "batch",
    "seq",
    "lengths",
    "grad_accum",
    "decoder_seq",
    "text",
    "max_pixels",
    "context",
    "logits",
    "sampling_steps",
)
_bound: dict[tuple[Hashable, ...], Estimator] = {}


@dataclass(frozen=True)
class Setup:
    """One calculation. Texts are written as on the command line; an empty one means that nothing is said."""

    model: str = ""
    files: tuple[tuple[str, str], ...] = ()  # a config.json and what lies beside it: name -> text
    model_type: str = ""
    # the workload
    batch: str = ""
    seq: str = ""
    text: str = ""
    lengths: str = ""
    decoder_seq: str = ""
    image: tuple[str, ...] = ()  # 640x480
    image_grid: tuple[str, ...] = ()
    video: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    max_pixels: str = ""
    grad_accum: str = ""
    phase: str = "train"
    context: str = ""
    logits: str = ""
    sampling_steps: str = ""  # these of diffusion models alone
    guidance: str = ""
    parts: str = ""
    # the recipe
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    lora: str = ""
    recompute: str = "none"
    clipping: str = "none"
    # how it is counted, and on what it runs
    convention: str = "model"
    attention_kernel: str = "auto"
    compute: str = ""
    weights: str = ""
    kv_cache: str = ""
    autocast: bool = False
    device: str = ""
    optimizer: str = ""
    execution: str = ""
    # a run on many devices
    gpus: str = ""
    tokens: str = ""
    global_batch: str = ""
    interconnect: str = ""
    price: str = ""
    dp: str = ""
    tp: str = ""
    pp: str = ""
    virtual: str = ""
    cp: str = ""
    ep: str = ""
    zero: str = ""
    micro_batch: str = ""
    plan_recompute: str = ""
    # a performance that somebody quotes
    from_: str = ""
    mfu: str = ""
    tflops: str = ""
    tokens_per_second: str = ""


_KINDS = {field.name: type(field.default) for field in fields(Setup)}


def make_setup(given: object) -> Setup:
    """A set-up from the page's JSON; unknown keys and values of another kind are errors."""
    if not isinstance(given, Mapping):
        raise FlopcalcError(f"a set-up is an object, not {format_value(given)}")
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = "from_" if key == "from" else key
        if name not in _KINDS:
            raise FlopcalcError(f"a set-up has no {format_value(key)}.{format_nearest(str(key), _KINDS)}")
        values[name] = _read_files(value) if name == "files" else _read_value(name, value)
    return Setup(**values)


def _read_value(name: str, value: object) -> Any:
    kind = _KINDS[name]
    if kind is tuple and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(each.strip() for each in value if each.strip())
    if kind is str and isinstance(value, str):
        return value.strip()
    if kind is bool and isinstance(value, bool):
        return value
    wanted = {tuple: "a list of texts", str: "a text", bool: "true or false"}[kind]
    raise FlopcalcError(f"{name} is {wanted}, not {format_value(value)}")


def _read_files(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or len(value) > _MOST_FILES:
        raise ConfigError(f"files is an object of at most {_MOST_FILES} names and texts")
    for name, text in value.items():
        if not isinstance(name, str) or _FILE.fullmatch(name) is None or ".." in name:
            raise ConfigError(f"{format_value(name)}: not the name of a JSON file")
        if not isinstance(text, str) or len(text) > MAX_JSON_BYTES:
            raise ConfigError(f"{name}: larger than {MAX_JSON_BYTES} bytes, the most that is read")
    return tuple(sorted(value.items()))


class Counted(NamedTuple):
    """A set-up's Estimate, and notes on what was assumed beside the estimate's own."""

    estimate: Estimate
    notes: list[str]

    @property
    def all_notes(self) -> list[str]:
        return list(dict.fromkeys([*self.estimate.notes, *self.notes]))


def count(setup: Setup, *, convention: str = "", spelled: Sequence[str] = SPELLED) -> Counted:
    """FLOPs of one step, exactly as `flopcalc estimate` counts them; a note spells out suffixes of some fields."""
    notes = _spell_out(setup, spelled)
    estimator = bind_setup(setup, convention)
    accumulate = _read_number(setup.grad_accum, "--grad-accum") or 1
    inputs = read_inputs(setup)
    if accumulate > 1 and inputs.phase != "train":
        raise WorkloadError(f"--grad-accum belongs to phase train, not {inputs.phase}")
    if isinstance(estimator, Samples):
        from flopcalc.core.estimate.pipeline import read_inputs as read_sampling  # of diffusion models alone

        return Counted(estimator.ask(read_sampling(estimator, inputs)) * accumulate, notes)
    load, found = make_load(estimator, inputs)
    return Counted(estimator.estimate(load) * accumulate, notes + found)


def bind_setup(setup: Setup, convention: str = "") -> Estimator:
    """The estimator of a set-up; the last few are kept, so that a slider asks one that is already bound."""
    device = setup.device or None
    key = (
        setup.model, setup.files, setup.model_type, setup.freeze, setup.train_only, setup.lora, setup.recompute,
        setup.clipping,
        convention or setup.convention, setup.attention_kernel, setup.compute, setup.weights, setup.kv_cache,
        setup.autocast, device,
    )  # fmt: skip
    found = _bound.pop(key, None)
    if found is None:
        found = bind(
            load_model(setup),
            recipe=make_recipe(
                freeze=setup.freeze, train_only=setup.train_only, lora=setup.lora or None, recompute=setup.recompute,
                clipping=setup.clipping,
            ),
            convention=convention or setup.convention, attention_kernel=setup.attention_kernel, device=device,
            compute=read_compute(setup), weights=setup.weights or None, kv_cache=setup.kv_cache or None,
            autocast=setup.autocast or None,
        )  # fmt: skip
    _bound[key] = found  # the newest stands last
    if len(_bound) > _MOST_BOUND:
        del _bound[next(iter(_bound))]
    return found


def read_compute(setup: Setup) -> str | None:
    """The number format of products that was asked for."""
    return parse_dtype(setup.compute) if setup.compute else None


def load_model(setup: Setup) -> Source:
    """A preset, or the files of a set-up as if they lay in a folder; errors name them as the command line does."""
    if not setup.files:
        if not setup.model:
            raise ConfigError("which model? Choose a preset, or give a config.json")
        if _HUB_ID.fullmatch(setup.model) is None and ("/" in setup.model or setup.model.endswith(".json")):
            raise ConfigError(f"{setup.model[:200]!r}: no preset; drop its config.json, or ask the hub")
        return load_config(setup.model, model_type=setup.model_type or None)
    from tempfile import TemporaryDirectory  # few set-ups bring files, and start-up is counted

    with TemporaryDirectory() as folder:
        for name, text in setup.files:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        names = dict(setup.files)
        # One file is read by its own name, as `flopcalc estimate my.json` would; several are a folder.
        single = next(iter(names)) if len(names) == 1 else "config.json" if "config.json" in names else ""
        try:
            path = os.path.join(folder, single) if single else folder
            source = load_config(path, model_type=setup.model_type or None)
        except FlopcalcError as error:
            raise type(error)(_shorten(str(error), folder)) from None
    name = setup.model or source.name
    return source.replace(name=name, where=_shorten(source.where, folder), reference=_shorten(source.reference, folder))


def _shorten(text: str, folder: str) -> str:
    return text.replace(folder + os.sep, "").replace(folder, "the folder")


def read_inputs(setup: Setup) -> Inputs:
    """What the set-up says of one sample."""
    logits: int | str | None = setup.logits or None
    if isinstance(logits, str) and logits not in ("all", "last"):
        logits = parse_size(logits, "--logits (all, last or a number)")
    grids = (parse_sizes(text, "--image-grid", 3) for text in setup.image_grid)
    return Inputs(
        batch=_read_number(setup.batch, "--batch"),
        seq=_read_number(setup.seq, "--seq"),
        text=_read_number(setup.text, "--text"),
        lengths=parse_sizes(setup.lengths, "--lengths") if setup.lengths else None,
        decoder_seq=_read_number(setup.decoder_seq, "--decoder-seq"),
        images=tuple(read_size(text) for text in setup.image),
        image_grids=tuple((t, h, w) for t, h, w in grids),
        videos=setup.video,
        max_pixels=_read_number(setup.max_pixels, "--max-pixels"),
        audio=tuple(parse_number(text, "--audio") for text in setup.audio),
        phase=_read_phase(setup),
        context=_read_number(setup.context, "--context", 0),
        logits=logits,
        sampling_steps=_read_number(setup.sampling_steps, "--sampling-steps"),
        guidance=setup.guidance or None,
        parts=setup.parts or None,
    )


def _read_phase(setup: Setup) -> str:
    """The phase; sampling steps mean phase sample, and the form's first phase is train."""
    if not setup.sampling_steps:
        return setup.phase
    if setup.phase not in ("train", "sample"):
        raise WorkloadError(f"--sampling-steps belongs to phase sample, not {setup.phase}")
    return "sample"


def read_size(text: str) -> tuple[int, int]:
    """'640x480' -> (640, 480)."""
    if _SIZE.fullmatch(text) is None:
        raise WorkloadError(f"--image: {format_value(text)} is not WIDTHxHEIGHT")
    width, height = parse_sizes(text.lower(), "--image", 2, "x")
    return width, height


def _read_number(text: str, what: str, minimum: int = 1) -> int | None:
    return parse_size(text, what, minimum) if text else None


def _spell_out(setup: Setup, names: Sequence[str]) -> list[str]:
    """What every value with a suffix stands for, as one note."""
    found = {f"--{name.replace('_', '-')}": getattr(setup, name) for name in names if getattr(setup, name)}
    described = describe_suffixes(found)
    return ["; ".join(described)] if described else []
