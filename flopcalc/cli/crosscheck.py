"""`flopcalc crosscheck`: run one batch and compare every counter on this machine with the analytic count."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from flopcalc._version import __version__
from flopcalc.api import count
from flopcalc.base.data import describe_install
from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.units import parse_size
from flopcalc.cli.command import Command
from flopcalc.cli.options import FieldOption, takes_setup
from flopcalc.cli.streams import show_json
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.config import load_config
from flopcalc.report.crosscheck import format_crosscheck
from flopcalc.setup.setup import make_setup

if TYPE_CHECKING:
    from flopcalc.measure.counters.witness import Crosscheck

_option = partial(click.option, cls=FieldOption)
_EXTRA = ("torch", "transformers", "peft", "fvcore")


@click.command(cls=Command)
@takes_setup("crosscheck")
@_option("--layers", group="model", metavar="N", help="Cut language model and tower to N layers: a big model fits.")
@_option("--device", group="hardware", type=click.Choice(("auto", "cuda", "cpu")), default="auto",
         help="What runs the batch (default auto).")  # fmt: skip
@_option("--dtype", group="formats", type=click.Choice(("bf16", "fp16", "fp32")),
         help="Number format of the model (default: bf16 on a GPU, fp32 on the CPU).")  # fmt: skip
@_option("--attention", group="hardware", type=click.Choice(("eager", "sdpa")), default="eager",
         help="HF's attention code (default eager).")  # fmt: skip
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
    shown = _to_dict(asked.estimate, found, asked.notes)
    if as_json:
        show_json(shown)
    else:
        click.echo(format_crosscheck(shown))


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
