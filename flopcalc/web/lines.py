"""The lines that give the same numbers elsewhere: a set-up as a command and as Python."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from flopcalc.core.workload.workload import Workload
from flopcalc.units import parse_number, parse_size, parse_sizes
from flopcalc.web.setups import Counted, Setup, read_compute, read_size

_WORKLOAD = (
    "batch", "seq", "text", "lengths", "decoder_seq", "image", "image_grid", "video", "audio", "max_pixels",
    "grad_accum", "phase", "context", "logits", "sampling_steps", "guidance", "parts",
)  # fmt: skip
_TRAINED = ("freeze", "train_only", "lora")
_FORMATS = ("compute", "weights", "kv_cache", "autocast")
_SAMPLE = ("seq", "text", "decoder_seq", "image", "image_grid", "video", "audio", "max_pixels")
_DEGREES = ("dp", "tp", "pp", "virtual", "cp", "ep", "zero", "micro_batch")
_PLAIN = {"phase": "train", "recompute": "none", "clipping": "none", "convention": "model", "attention_kernel": "auto"}
_COUNTED = (
    "model_type",
    *_WORKLOAD,
    *_TRAINED,
    "recompute",
    "clipping",
    *_FORMATS,
    "convention",
    "attention_kernel",
    "device",
)
# What -> command, and the fields of a set-up that it takes.
_COMMANDS = {
    "flops": ("estimate", _COUNTED),
    "explain": ("explain", _COUNTED),
    "translate": ("translate", (*_COUNTED, "gpus", "from_", "mfu", "tflops", "tokens_per_second")),
    "time": ("predict", tuple(name for name in _COUNTED if name not in ("convention", "clipping"))),
    "plan": (
        "plan",
        ("tokens", "device", "gpus", "global_batch", *_DEGREES, "interconnect", "price", "model_type", *_SAMPLE,
         *_TRAINED, "compute", "weights", "autocast"),
    ),
}  # fmt: skip


def name_model(setup: Setup) -> str:
    """What the command line calls the model: a preset, a file, or the folder that was dropped."""
    names = [name for name, _ in setup.files]
    if not names:
        return setup.model
    if len(names) == 1:
        return names[0]
    return setup.model or "FOLDER"


def write_command(setup: Setup, what: str, op: str = "") -> str:
    """The flopcalc command of one view."""
    command, names = _COMMANDS["time" if what in ("memory", "roofline") else what]
    words = ["flopcalc", command, name_model(setup)]
    for name in names:
        value = getattr(setup, name)
        flag = f"--{name.rstrip('_').replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value and value != _PLAIN.get(name):
            for each in (value,) if isinstance(value, str) else value:
                words += [flag, each]
    if command in ("predict", "plan"):
        words += [word for name in ("optimizer", "execution") if getattr(setup, name)
                  for word in (f"--{name}", getattr(setup, name))]  # fmt: skip
    if command == "plan" and setup.plan_recompute:
        words += ["--recompute", setup.plan_recompute]
    if what == "memory":
        words.append("--memory")
    if what == "explain":
        words += ["--op", op]
    return shlex.join(words)


def write_python(setup: Setup, what: str, counted: Counted) -> str:
    """The same with the public functions; sizes that the command line works out are written as numbers."""
    load = counted.estimate.terms[0].load
    if what == "plan":
        return _join("plan", _write_plan(setup, load))
    sizes = _write_load(setup, load) if counted.estimate.pipeline is None else _write_sampling(setup)
    pieces = [repr(name_model(setup)), *sizes, *_write_recipe(setup)]
    if what in ("time", "memory", "roofline"):
        pieces += _say(setup, "model_type", "attention_kernel", "device", "optimizer", "execution", *_FORMATS)
        return _join("predict", pieces)
    if what == "translate":
        pieces += _say(setup, "model_type", "attention_kernel", *_FORMATS)
        pieces += [f"{name}={getattr(setup, name)!r}" for name in ("from_", "device") if getattr(setup, name)]
        pieces += [f"mfu={setup.mfu!r}"] if setup.mfu else []
        pieces += [f"{name}={parse_number(getattr(setup, name), name):g}" for name in ("tflops", "tokens_per_second")
                   if getattr(setup, name)]  # fmt: skip
        pieces += [f"gpus={parse_size(setup.gpus, '--gpus')}"] if setup.gpus else []
        return _join("translate", pieces)
    pieces += _say(setup, "model_type", "convention", "attention_kernel", "device", *_FORMATS)
    return f"{_join('estimate_flops', pieces)}.total"


def _join(function: str, pieces: Iterable[str]) -> str:
    return f"{function}({', '.join(pieces)})"


def _say(setup: Setup, *names: str) -> list[str]:
    """name='value' of what was said."""
    values = {name: getattr(setup, name) for name in names}
    if "compute" in values:
        values["compute"] = read_compute(setup)
    return [f"{name}={value!r}" for name, value in values.items() if value and value != _PLAIN.get(name)]


def _write_load(setup: Setup, load: Workload) -> list[str]:
    """Sizes of one micro-batch."""
    pieces = []
    if load.documents is not None:
        pieces.append(f"lengths={list(parse_sizes(setup.lengths, '--lengths'))}")
    else:
        pieces += [f"batch_size={load.rows}"] if load.rows > 1 else []
        pieces += [f"seq_len={load.seq}"] if load.seq and not (load.decoder is not None and not setup.seq) else []
    if load.decoder is not None:
        pieces.append(f"decoder_seq_len={load.decoder.seq}")
    many = f" * {load.rows}" if load.rows > 1 else ""
    if load.grids:
        if setup.max_pixels or setup.image_grid:
            pieces.append(f"image_grid_thw={list(load.grids)}")
        else:
            pieces.append(f"images={[read_size(text) for text in setup.image]}{many}")
    if load.videos:
        pieces.append(f"video_grid_thw={list(load.videos)}")
    if setup.audio:
        pieces.append(f"audio={[parse_number(text, '--audio') for text in setup.audio]}{many}")
    pieces += [f"phase={setup.phase!r}"] if setup.phase != "train" else []
    pieces += [f"context={parse_size(setup.context, '--context', 0)}"] if setup.context else []
    if setup.logits:
        logits: object = setup.logits if setup.logits in ("all", "last") else parse_size(setup.logits, "--logits")
        pieces.append(f"logits={logits!r}")
    pieces += [f"grad_accum={parse_size(setup.grad_accum, '--grad-accum')}"] if setup.grad_accum else []
    return pieces


def _write_sampling(setup: Setup) -> list[str]:
    """Sizes of a diffusion model's step or sampling."""
    pieces = [f"batch_size={parse_size(setup.batch, '--batch')}"] if setup.batch else []
    pieces += [f"images={[read_size(text) for text in setup.image]}"] if setup.image else []
    pieces += [f"videos={list(setup.video)}"] if setup.video else []
    pieces += [f"text={parse_size(setup.text, '--text')}"] if setup.text else []
    if setup.sampling_steps:
        pieces.append(f"sampling_steps={parse_size(setup.sampling_steps, '--sampling-steps')}")
    elif setup.phase != "train":
        pieces.append(f"phase={setup.phase!r}")
    pieces += [f"grad_accum={parse_size(setup.grad_accum, '--grad-accum')}"] if setup.grad_accum else []
    return pieces + _say(setup, "guidance", "parts")


def _write_recipe(setup: Setup) -> list[str]:
    recipe: dict[str, object] = {
        name: list(getattr(setup, name)) for name in ("freeze", "train_only") if getattr(setup, name)
    }
    if setup.clipping != "none":
        recipe["clipping"] = setup.clipping
    pieces = [f"recipe={recipe!r}"] if recipe else []
    return pieces + _say(setup, "lora", "recompute")


def _write_plan(setup: Setup, sample: Workload) -> list[str]:
    pieces = [repr(name_model(setup)), f"tokens={setup.tokens!r}", f"device={setup.device!r}"]
    pieces.append(f"gpus={parse_size(setup.gpus, '--gpus')}")
    pieces.append(f"seq_len={sample.seq}")
    if setup.image:
        pieces.append(f"images={[read_size(text) for text in setup.image]}")
    pieces += [f"global_batch={parse_size(setup.global_batch, '--global-batch')}"] if setup.global_batch else []
    for name in _DEGREES:
        if getattr(setup, name):
            values = [parse_size(each.strip(), name, 0) for each in getattr(setup, name).split(",")]
            pieces.append(f"{name}={values[0] if len(values) == 1 else values}")
    if setup.plan_recompute:
        pieces.append(f"recompute={[word.strip() for word in setup.plan_recompute.split(',')]!r}")
    pieces += [f"price={parse_number(setup.price, '--price'):g}"] if setup.price else []
    recipe = {name: list(getattr(setup, name)) for name in ("freeze", "train_only") if getattr(setup, name)}
    pieces += [f"recipe={recipe!r}"] if recipe else []
    return pieces + _say(
        setup, "model_type", "interconnect", "lora", "compute", "weights", "autocast", "optimizer", "execution"
    )
