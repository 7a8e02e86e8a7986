"""`flopcalc compare`: several models or workloads side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from flopcalc.cli.command import Command, complete_model
from flopcalc.cli.estimate import EXACT
from flopcalc.cli.options.counting import make_estimate
from flopcalc.cli.options.time import make_shares, time_options
from flopcalc.cli.options.workload import trace_option, workload_options
from flopcalc.cli.pages import FORMATS, format_options, write_page
from flopcalc.errors import WorkloadError, format_nearest
from flopcalc.report.comparison import Column, format_comparison
from flopcalc.words import CLIPPING, CONVENTIONS, KERNELS, PHASES, RECOMPUTE

_SETTABLE = (
    "batch", "seq", "decoder_seq", "text", "lengths", "grad_accum", "image", "image_grid", "video", "video_grid",
    "audio", "max_pixels", "phase", "context", "logits", "freeze", "train_only", "lora", "recompute", "clipping",
    "convention", "attention_kernel", "device", "dtype", "peak", "gpus", "step_time", "tokens_per_second",
    "compute", "weights", "kv_cache", "head", "mtp", "model_type",
)  # fmt: skip
_CHOICES = {
    "phase": PHASES, "convention": CONVENTIONS, "attention_kernel": KERNELS, "recompute": RECOMPUTE,
    "clipping": CLIPPING,
}  # fmt: skip
_LENGTHS = ("seq", "text", "lengths")
_TIMES = ("step_time", "tokens_per_second")
_REPEATABLE = ("image", "image_grid", "video", "video_grid", "audio", "freeze", "train_only")


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True, shell_complete=complete_model, metavar="MODEL[@key=value;…] …")
@workload_options
@trace_option
@time_options
@format_options(*FORMATS)
def compare(models: tuple[str, ...], style: str, output: str | None, **options: object) -> None:
    """Several models or workloads side by side.

    Options apply to all columns. MODEL@key=value;key=value changes them for one. Examples:

      flopcalc compare llama-3.1-8b qwen3-8b --seq 2048

      flopcalc compare qwen2-vl@seq=2048 'qwen2-vl@seq=4096;image=1024x768'

      flopcalc compare gpt2@step_time=30ms gpt2-xl@step_time=350ms --seq 1024 --device h200
    """
    columns = [_count(text, options) for text in models]
    if style == "json":
        click.echo(json.dumps([column.to_dict() for column in columns], indent=2, ensure_ascii=False))
    elif style == "html":
        from flopcalc.report.html.comparison import make_comparison_page

        write_page(make_comparison_page([column.to_dict() for column in columns]), output)
    elif style == "csv":
        from flopcalc.report.estimate import format_lines

        click.echo(format_lines([*_EXACT], ([read(column) for read in _EXACT.values()] for column in columns)))
    else:
        click.echo(format_comparison(columns, is_markdown=style == "markdown"))


def _count(text: str, options: dict[str, object]) -> Column:
    name, own = _read_column(text, options)
    asked = make_estimate(name, own)
    model_share, hardware_share, notes = make_shares(asked.estimate, own)
    return Column(text, asked.estimate, model_share, hardware_share, asked.notes + notes)


_EXACT: dict[str, Callable[[Column], Any]] = {
    "label": lambda each: each.label,
    "model_type": lambda each: each.estimate.terms[0][0].source.config["model_type"],
    "parameters": lambda each: each.estimate.parameters["total"],
    **EXACT,
}


def _read_column(text: str, options: dict[str, object]) -> tuple[str, dict[str, Any]]:
    """'name@seq=2048;batch=2' -> the name, and the options with those changed."""
    name, at, settings = text.partition("@")
    own = dict(options)
    chosen: set[str] = set()
    for piece in settings.split(";") if at else []:
        key, equals, value = piece.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in _SETTABLE:
            near = format_nearest(key, _SETTABLE)
            raise WorkloadError(f"{text!r}: {piece!r} is not key=value of a workload option.{near}")
        if key in chosen:
            raise WorkloadError(f"{text!r}: {key} is given twice: give it once")
        if key in _LENGTHS and not chosen & set(_LENGTHS):
            own.update(dict.fromkeys(_LENGTHS))  # a column's own length replaces the one given for all
            own["batch"] = own["batch"] if key != "lengths" or "batch" in chosen else None
        if key in _TIMES and not chosen & set(_TIMES):
            own.update(dict.fromkeys(_TIMES))  # and so does its own time
        chosen.add(key)
        own[key] = tuple(value.split("+")) if key in _REPEATABLE else value
    for key, known in _CHOICES.items():
        if own[key] not in known:
            raise WorkloadError(f"{text!r}: {key} {own[key]!r} unknown; known: {', '.join(known)}")
    return name, own
