"""`flopcalc crosscheck`: one batch is run, and every witness of this machine is set beside the analytic count."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import click

from flopcalc._version import __version__
from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import make_estimate
from flopcalc.cli.options.workload import add_options, checkpointing_option, source_options
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.config import load_config
from flopcalc.data import describe_install
from flopcalc.errors import FlopcalcError
from flopcalc.grids import format_grid, wrap
from flopcalc.units import format_flops, format_parameters, parse_size
from flopcalc.words import RECOMPUTE

if TYPE_CHECKING:
    from flopcalc.measure.counters.witness import Crosscheck

_EXTRA = ("torch", "transformers", "peft", "fvcore")
# What make_estimate also wants, and a cross-check leaves alone.
_FIXED = {
    "spec": None, "lengths": None, "grad_accum": None, "context": None, "logits": None, "convention": "full",
    "attention_kernel": "eager", "device": None, "decoder_seq": None, "audio": (), "video": (), "max_pixels": None,
    "clipping": "none",
}  # fmt: skip
_PRODUCT = re.compile(r"attention|grouped|conv|mm\b|matmul|dot\b|einsum|mv\b")


@click.command(cls=Command)
@model_argument
@add_options(source_options[0], source_options[2])
@click.option("--batch", metavar="N", help="Samples (default 1).")
@click.option("--seq", metavar="N", help="Length per sample, visual tokens included.")
@click.option("--text", metavar="N", help="Text tokens per sample; visual tokens are added.")
@click.option("--image", multiple=True, metavar="WxH", help="An image per sample, in pixels; repeatable.")
@click.option("--image-grid", multiple=True, metavar="T,H,W", help="An image per sample, in patches.")
@click.option("--video-grid", multiple=True, metavar="T,H,W", help="A video per sample, in patches.")
@click.option("--phase", type=click.Choice(("train", "forward")), default="train", show_default=True)
@click.option(
    "--freeze",
    multiple=True,
    metavar="PATTERN",
    help="Freeze what matches: a glob, or vision|audio|projector|language.",
)
@click.option("--train-only", multiple=True, metavar="PATTERN", help="Train only what matches.")
@click.option("--lora", metavar="r=16,targets=q_proj+v_proj", help="LoRA as PEFT applies it.")
@click.option("--recompute", type=click.Choice(RECOMPUTE), default="none", show_default=True)
@checkpointing_option
@click.option("--layers", metavar="N", help="Cut language model and tower to N layers, so that a big model fits.")
@click.option("--device", type=click.Choice(("auto", "cuda", "cpu")), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(("bf16", "fp16", "fp32")), help="Default: bf16 on a GPU, fp32 on the CPU.")
@click.option("--attention", type=click.Choice(("eager", "sdpa")), default="eager", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def crosscheck(
    model: str, layers: str | None, device: str, dtype: str | None, attention: str, as_json: bool, **options: Any
) -> None:
    """Run one batch and compare every counter with the analytic count.

    The model is built with random weights; nothing is downloaded. Needs torch (the extra `measure`).
    Examples:

      flopcalc crosscheck qwen2.5-0.5b --seq 512

      flopcalc crosscheck llama-3.1-8b --layers 2 --seq 2048 --attention sdpa --device cuda
    """
    # Before torch is loaded: its profiler prints a line on stderr at every start and stop; errors still come through.
    os.environ.setdefault("KINETO_LOG_LEVEL", "4")
    source = load_config(model, download=options["download"], model_type=options.pop("model_type"))
    depth = None if layers is None else parse_size(layers, "--layers")
    try:
        from flopcalc.measure.counters import witness

        witness.check_kind(source)
        source = witness.cut_layers(source, depth)
        asked = make_estimate(source, {**_FIXED, **options})
        estimator, load, _ = asked.estimate.terms[0]
        found = witness.crosscheck(
            source, load, recipe=estimator.recipe, device=device, dtype=dtype, attention=attention
        )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        raise FlopcalcError(
            f"crosscheck runs the model, and {package} is not installed: {describe_install('measure')}"
        ) from None
    if as_json:
        click.echo(json.dumps(_to_dict(asked.estimate, found, asked.notes), indent=2, ensure_ascii=False))
    else:
        click.echo(_format(asked.estimate, found, asked.notes))


def _to_dict(estimate: Estimate, found: Crosscheck, notes: list[str]) -> dict[str, Any]:
    described = estimate.to_dict(1)
    return {
        "schema": 1,
        "version": __version__,
        "model": described["model"],
        "workload": described["workload"],
        "recipe": described["recipe"],
        "device": found.device,
        "dtype": found.dtype,
        "attention": found.attention,
        "attention_kernel": found.kernel,
        "layers": found.layers,
        "parameters": found.parameters,
        "witnesses": [row.to_dict() for row in found.rows],
        "notes": notes,
    }


def _format(estimate: Estimate, found: Crosscheck, notes: list[str]) -> str:
    estimator, load, _ = estimate.terms[0]
    depths = ", ".join(f"{key} {value}" for key, value in found.layers.items())
    lines = [
        *wrap(f"{estimator.source.name} ({format_parameters(found.parameters)} parameters; {depths})", rest="  "),
        *wrap(
            f"{load.phase}, {load.rows} × {load.seq} tokens; {found.dtype}, {found.attention} attention, on "
            f"{found.device}",
            rest="  ",
        ),
        "",
    ]
    cells: list[list[str]] = []
    for row in found.rows:
        counted = row.counted
        cost, note = f"{counted.seconds:.2f} s", counted.reason or ""
        skipped = _format_skipped(counted.not_counted)
        if counted.total is None:
            beside = "-" if counted.witness == "gpm" else row.expected_as  # a gauge is compared with nothing
            cells.append([counted.witness, "-", "-", beside, "-", cost, note])
            continue
        first = _format_ratio(counted.total, row.expected)
        cells.append([counted.witness, format_flops(counted.total), first, row.expected_as, skipped, cost, note])
        if counted.corrected is not None:
            ratio = _format_ratio(counted.corrected, row.expected)
            what = "without elementwise work, with what it skips"
            cells.append(["profiler, corrected", format_flops(counted.corrected), ratio, row.expected_as, "", "", what])
    headers = ["witness", "FLOPs", "ratio", "to analytic", "not counted", "cost", "note"]
    lines.append(format_grid(headers, cells, keys=1))
    totals = {row.expected_as: row.expected for row in found.rows}
    texts = [f"analytic, {name}: {format_flops(value)} = {value:,} FLOPs" for name, value in totals.items()]
    lines += ["", *(line for text in (*texts, *(f"note: {note}" for note in notes)) for line in wrap(text, rest="  "))]
    return "\n".join(lines)


def _format_ratio(counted: int, expected: int) -> str:
    if counted == expected:
        return "1 (exact)"
    return f"{counted / expected:.6f}" if expected else "-"


def _format_skipped(skipped: dict[str, int]) -> str:
    """Products by name; what is elementwise in a ledger as a number of kinds."""
    products = [f"{name.removeprefix('aten::')} × {calls}" for name, calls in skipped.items() if _PRODUCT.search(name)]
    others = len(skipped) - len(products)
    if others:
        products.append(f"{others} kinds without products")
    return "; ".join(products) or "none"
