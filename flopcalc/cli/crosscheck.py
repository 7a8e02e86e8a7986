"""`flopcalc crosscheck`: run one batch and compare every counter on this machine with the analytic count."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from flopcalc._version import __version__
from flopcalc.api import count
from flopcalc.base.data import describe_install
from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import format_flops, format_parameters, parse_size
from flopcalc.cli.command import Command
from flopcalc.cli.options import takes_setup
from flopcalc.cli.streams import show_json
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.config import load_config
from flopcalc.setup.setup import make_setup

if TYPE_CHECKING:
    from flopcalc.measure.counters.witness import Crosscheck

_EXTRA = ("torch", "transformers", "peft", "fvcore")
_PRODUCT = re.compile(r"attention|grouped|conv|mm\b|matmul|dot\b|einsum|mv\b")


@click.command(cls=Command)
@takes_setup("crosscheck")
@click.option("--layers", metavar="N", help="Cut language model and tower to N layers, so that a big model fits.")
@click.option("--device", type=click.Choice(("auto", "cuda", "cpu")), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(("bf16", "fp16", "fp32")), help="Default: bf16 on a GPU, fp32 on the CPU.")
@click.option("--attention", type=click.Choice(("eager", "sdpa")), default="eager", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def crosscheck(
    model: str, layers: str | None, device: str, dtype: str | None, attention: str, as_json: bool, given: dict[str, Any]
) -> None:
    """Run one batch and compare every counter with the analytic count.

    The model is built with random weights; nothing is downloaded. Needs torch (the extra `measure`).
    Examples:

      flopcalc crosscheck qwen2.5-0.5b --seq 512

      flopcalc crosscheck llama-3.1-8b --layers 2 --seq 2048 --attention sdpa --device cuda
    """
    # Before torch is loaded: its profiler prints a line on stderr at every start and stop; errors still come through.
    os.environ.setdefault("KINETO_LOG_LEVEL", "4")
    if given.get("phase", "train") not in ("train", "forward"):
        raise WorkloadError(f"crosscheck runs phases train and forward, not {given['phase']}")
    source = load_config(model, download=given.get("download", False), model_type=given.pop("model_type", None))
    depth = None if layers is None else parse_size(layers, "layers")
    try:
        from flopcalc.measure.counters import witness

        witness.check_kind(source)
        source = witness.cut_layers(source, depth)
        asked = count(make_setup("crosscheck", source, given).replace(attention_kernel="eager"), "full")
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
        show_json(_to_dict(asked.estimate, found, asked.notes))
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
