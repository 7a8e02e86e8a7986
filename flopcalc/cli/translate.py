"""`flopcalc translate`: one quoted performance under every convention, or the convention that a printed rate is in."""

from __future__ import annotations

import json
from typing import Any

import click

from flopcalc.api import translate as translate_performance
from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import make_estimate, read_number
from flopcalc.cli.options.time import read_peak, read_rate
from flopcalc.cli.options.workload import quoted_workload_options, trace_option
from flopcalc.core.estimate.quoted import load_quoted
from flopcalc.errors import WorkloadError
from flopcalc.hardware.devices import DTYPES, parse_dtype

FORMATS = ("table", "json", "csv", "markdown")


def complete_quoted(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in load_quoted().conventions if name.startswith(incomplete.lower())]


@click.command(cls=Command)
@model_argument
@quoted_workload_options
@trace_option
@click.option(
    "--from", "from_", metavar="CONVENTION", shell_complete=complete_quoted, help="Convention of the quoted number."
)
@click.option("--mfu", metavar="SHARE", help="The quoted MFU, such as 45%; may be above 100 %.")
@click.option("--tflops", metavar="N", help="The quoted rate of one GPU in TFLOP/s.")
@click.option("--tokens-per-second", metavar="N", help="Tokens per second of all GPUs, such as 9k.")
@click.option("--gpus", "--num-devices", "gpus", metavar="N", help="GPUs that share the step (default 1).")
@click.option("--dtype", default="bf16", show_default=True, metavar="|".join(DTYPES[:4]) + "|…")
@click.option(
    "--peak",
    metavar="FLOPS_PER_S",
    help="Dense peak of one device, instead of the table's: 989T, or bf16=989T,fp8=1979T, of which --dtype's holds.",
)
@click.option(
    "--mtp", metavar="N", help="Layers of multi-token prediction that were trained (default: as in each convention)."
)
@click.option("--format", "style", type=click.Choice(FORMATS), help="Default table.")
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
def translate(
    model: str,
    from_: str | None,
    mfu: str | None,
    tflops: str | None,
    tokens_per_second: str | None,
    gpus: str | None,
    dtype: str,
    peak: str | None,
    mtp: str | None,
    style: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert a quoted MFU or rate into every convention that people quote.

    Without --from, give --tokens-per-second and the printed --tflops or --mfu: this finds the conventions that agree.
    Examples:

      flopcalc translate llama-3.1-8b --seq 4096 --mfu 45% --from 6nd --device h100-sxm

      flopcalc translate deepseek-v3 --seq 4096 --tokens-per-second 6288 --tflops 1635
    """
    if as_json and style not in (None, "json"):
        raise WorkloadError(f"--json contradicts --format {style}")
    style = "json" if as_json else style or "table"
    asked = make_estimate(model, {**options, "dtype": dtype, "peak": peak})
    found = translate_performance(
        asked.estimate,
        from_=from_,
        mfu=mfu,
        tflops=read_rate(tflops, "--tflops"),
        tokens_per_second=read_rate(tokens_per_second, "--tokens-per-second"),
        gpus=read_number(gpus, "--gpus") or 1,
        device=options["device"],
        dtype=parse_dtype(dtype),
        peak=read_peak(peak),
        mtp=read_number(mtp, "--mtp", 0),
    )
    found = found._replace(notes=(*found.notes, *asked.notes))
    if style == "json":
        click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    from flopcalc.report.translation import format_translation, format_translation_csv

    if style == "csv":
        click.echo(format_translation_csv(found))
    else:
        click.echo(format_translation(found, "github" if style == "markdown" else "simple"))
