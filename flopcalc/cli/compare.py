"""`flopcalc compare`: several models or workloads side by side."""

from __future__ import annotations

import json
from typing import Any

import click

from flopcalc.cli.command import Command, complete_model
from flopcalc.cli.options.counting import make_estimate
from flopcalc.cli.options.workload import trace_option, workload_options
from flopcalc.cli.pages import format_options, write_page
from flopcalc.errors import WorkloadError, format_nearest
from flopcalc.grids import format_grid
from flopcalc.units import format_flops, format_parameters
from flopcalc.words import CLIPPING, CONVENTIONS, KERNELS, PHASES, RECOMPUTE

_SETTABLE = (
    "batch", "seq", "decoder_seq", "text", "lengths", "grad_accum", "image", "image_grid", "video", "video_grid",
    "audio", "max_pixels", "phase", "context", "logits", "freeze", "train_only", "lora", "recompute", "clipping",
    "convention", "attention_kernel",
)  # fmt: skip
_CHOICES = {
    "phase": PHASES, "convention": CONVENTIONS, "attention_kernel": KERNELS, "recompute": RECOMPUTE,
    "clipping": CLIPPING,
}  # fmt: skip
_LENGTHS = ("seq", "text", "lengths")
_REPEATABLE = ("image", "image_grid", "video", "video_grid", "audio", "freeze", "train_only")


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True, shell_complete=complete_model, metavar="MODEL[@key=value;…] …")
@workload_options
@trace_option
@format_options("table", "json", "html")
def compare(models: tuple[str, ...], style: str, output: str | None, **options: Any) -> None:
    """Several models or workloads side by side.

    Options hold for all; MODEL@key=value;key=value changes them for one. Examples:

      flopcalc compare llama-3.1-8b qwen3-8b --seq 2048

      flopcalc compare qwen2-vl@seq=2048 'qwen2-vl@seq=4096;image=1024x768'
    """
    asked = [(text, make_estimate(*_read_column(text, options))) for text in models]
    columns = [(label, entry.estimate) for label, entry in asked]
    notes = {label: [*entry.estimate.notes, *entry.notes] for label, entry in asked}
    conventions = {estimate.convention for _, estimate in columns}
    if style in ("json", "html"):
        shown = [{"label": label, **entry.estimate.to_dict(1)} for label, entry in asked]
        for column, (_, entry) in zip(shown, asked, strict=True):
            column["notes"] += entry.notes
        if style == "html":
            _write_page(shown, output)
            return
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    rows = [[name, *(read(estimate) for _, estimate in columns)] for name, read in _ROWS]
    rows = [row for row in rows if row[0] not in _RARE or set(row[1:]) != {"-"}]
    parts = [estimate.by_component() for _, estimate in columns]
    for part in parts[0]:
        if any(sum(part_sums[part]) for part_sums in parts):
            rows.append(
                [part, *(format_flops(sum(part_sums[part])) if sum(part_sums[part]) else "-" for part_sums in parts)]
            )
    click.echo(format_grid(["", *(label for label, _ in columns)], rows))
    for label, found in notes.items():
        for note in found:
            click.echo(f"{label}: {note}")
    if len(conventions) > 1:
        click.echo("Different conventions stand side by side: do not compare them.")


def _write_page(columns: list[dict[str, Any]], output: str | None) -> None:
    from flopcalc.report.html.comparison import make_comparison_page

    write_page(make_comparison_page(columns), output)


_ROWS: list[tuple[str, Any]] = [
    ("model type", lambda e: e.terms[0][0].source.config["model_type"]),
    ("parameters", lambda e: format_parameters(e.parameters["total"])),
    ("active", lambda e: format_parameters(e.parameters["active"]) if "active" in e.parameters else "not known"),
    ("tokens", lambda e: f"{e.tokens:,}"),
    ("convention", lambda e: e.convention),
    ("forward", lambda e: format_flops(e.forward)),
    ("backward", lambda e: format_flops(e.backward) if e.backward else "-"),
    ("recompute", lambda e: format_flops(e.recompute) if e.recompute else "-"),
    ("clipping", lambda e: format_flops(e.clipping) if e.clipping else "-"),
    ("step", lambda e: format_flops(e.total)),
    ("per token", lambda e: format_flops(e.total // max(e.tokens, 1))),
]
_RARE = ("recompute", "clipping")  # rows only where some column has them


def _read_column(text: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
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
        if key in _LENGTHS and not chosen & set(_LENGTHS):
            own.update(dict.fromkeys(_LENGTHS))  # a column's own length replaces the one given for all
            own["batch"] = own["batch"] if key != "lengths" or "batch" in chosen else None
        chosen.add(key)
        own[key] = tuple(value.split("+")) if key in _REPEATABLE else value
    for key, known in _CHOICES.items():
        if own[key] not in known:
            raise WorkloadError(f"{text!r}: {key} {own[key]!r} unknown; known: {', '.join(known)}")
    return name, own
