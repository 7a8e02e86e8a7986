"""`flopcalc plan`: the layouts of a training run on many devices, their time and money, and why others lose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import make_estimate, read_formats
from flopcalc.cli.options.launch import launch_option, read_launch_options
from flopcalc.cli.options.time import read_rate
from flopcalc.cli.options.workload import (
    add_options,
    checkpointing_option,
    complete_device,
    dtype_option,
    execution_option,
    has_list,
    input_options,
    mtp_option,
    number_options,
    source_options,
    trained_options,
)
from flopcalc.cli.pages import format_options, write_page
from flopcalc.core.model.config import load_config
from flopcalc.errors import RecipeError, WorkloadError, format_value
from flopcalc.units import format_tokens, parse_size, parse_sizes
from flopcalc.words import OPTIMIZERS

if TYPE_CHECKING:
    from flopcalc.planning.plan import Plan

_DEGREES = ("dp", "tp", "pp", "virtual", "cp", "ep", "zero", "micro_batch")
_HELP = {
    "dp": "Data-parallel replicas.",
    "tp": "Tensor parallel: GPUs that share each layer.",
    "pp": "Pipeline stages.",
    "virtual": "Chunks of layers per stage (interleaved pipeline).",
    "cp": "Context parallel: GPUs that share a sequence.",
    "ep": "Expert parallel: GPUs that share a layer's experts.",
    "zero": "ZeRO stage 0 to 3; 3 is FSDP.",
    "micro_batch": "Sequences that a replica processes at once.",
}
# What estimate's options are for, and a plan decides or does not know.
_UNUSED: dict[str, Any] = {
    "batch": None, "grad_accum": None, "lengths": None, "phase": "train", "context": None, "logits": None,
    "recompute": "none", "gradient_checkpointing": False, "clipping": "none", "convention": "model",
    "attention_kernel": "auto",
}  # fmt: skip


def _degree_options(function: Any) -> Any:
    for name in reversed(_DEGREES):
        flag = f"--{name.replace('_', '-')}"
        function = click.option(flag, metavar="N[,N…]", help=f"{_HELP[name]} One value, or several to try.")(function)
    return function


@click.command(cls=Command)
@model_argument
@launch_option
@click.option("--tokens", required=True, metavar="N|2T|300B", help="Tokens of the whole run.")
@click.option("--device", required=True, shell_complete=complete_device, metavar="NAME", help="GPU to plan for.")
@click.option("--gpus", "--num-devices", "gpus", metavar="N", help="GPUs of the run  [required]")
@click.option("--seq", metavar="N", help="Tokens per sequence (default 4096); 8k is 8,192.")
@click.option(
    "--global-batch", metavar="N|auto", help="Sequences per step (default: about 4M tokens); auto: search it."
)
@_degree_options
@click.option(
    "--recompute",
    metavar="none|full|…",
    help="Gradient checkpointing: none, light (norms, activations), selective (attention), offload, half (every second "
    "layer) or full; several with commas.",
)
@checkpointing_option
@click.option(
    "--expert-imbalance", metavar="R", help="Rows on the busiest rank of experts, relative to the mean (default 1)."
)
@click.option(
    "--overlap",
    default="all",
    show_default=True,
    metavar="all|none",
    help="none: communication is never hidden behind computation.",
)
@click.option("--interconnect", metavar="NAME", help="Network between the GPUs (default: the GPU's usual one).")
@click.option("--price", metavar="USD", help="Price of one GPU-hour (default: a dated price, if known).")
@dtype_option("bf16|fp16|fp8|mxfp8|nvfp4")
@execution_option("fused")
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    metavar="adamw|adamw-8bit|…",
    default="adamw-master",
    show_default=True,
    help="As for `flopcalc predict`.",
)
@add_options(*source_options, mtp_option, *input_options, *trained_options, *number_options[:2], number_options[3])
@click.option("--top", default="5", show_default=True, metavar="N", help="Number of layouts to show.")
@format_options("table", "json", "html")
@click.option("--plot", "plot_file", metavar="FILE", help="Plot time over memory of all layouts (needs matplotlib).")
@click.option("--timeline", metavar="FILE", help="Write the best layout's schedule as a trace for Perfetto.")
def plan(
    model: str, style: str, output: str | None, plot_file: str | None, timeline: str | None, **options: object
) -> None:
    """The best layouts of a training run on many GPUs.

    Searches data, tensor, pipeline, context and expert parallelism, ZeRO, micro-batch and gradient checkpointing. Shows
    the fastest layouts that fit in memory, and why the others lose. Layout options with several values narrow the
    search. Lists in --device, --gpus and --seq give the best layout of each combination.
    """
    model, options, said, report = read_launch_options("plan", model, options)
    if options["gpus"] is None:
        context = click.get_current_context()
        raise click.MissingParameter(
            ctx=context, param=next(each for each in context.command.params if each.name == "gpus")
        )
    if has_list(options, None):
        if plot_file is not None or timeline is not None:
            raise WorkloadError("--plot and --timeline are of one plan: give single values with them")
        _show_list(model, options, style, output, said)
        return
    found = _plan(model, options, said)
    if timeline is not None:
        from flopcalc.planning.schedule import save_trace

        save_trace(found, timeline)
    if plot_file is not None:
        found.plot(plot_file)
    if style == "json":
        shown = {**found.to_dict(), **({"launch": report} if report is not None else {})}
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False, allow_nan=False))
        return
    if style == "html":
        from flopcalc.report.html.plan import make_plan_page

        points = [(point.step_time_s, point.memory_bytes) for point in found.points]
        write_page(make_plan_page(found.to_dict(), points), output)
        return
    from flopcalc.report.plan import format_plan

    click.echo(format_plan(found))
    for path in (plot_file, timeline):
        if path is not None:
            click.echo(f"written: {path}")


def _plan(model: str, options: dict[str, Any], said: Sequence[str] = ()) -> Plan:
    from flopcalc.planning import plan as planning  # only where used: estimate starts without it

    options, notes = dict(options), []
    if "_class_name" in load_config(model, download=options["download"], model_type=options["model_type"]).config:
        raise WorkloadError(f"{model} is a diffusion model: plans are of language models")
    has_length = options["seq"] is not None or options["text"] is not None
    if not has_length:
        options["seq"] = str(planning.DEFAULT_SEQ)
        notes.append(f"no length given: sequences of {planning.DEFAULT_SEQ} tokens assumed")
    try:
        asked = make_estimate(model, options | _UNUSED)
    except WorkloadError as error:
        raise error if has_length else WorkloadError(f"{error}{planning.NO_LENGTH}") from None
    estimator, sample, _ = asked.estimate.terms[0]
    degrees: dict[str, Any] = {name: _read_degree(name, options[name]) for name in _DEGREES}
    batch = options["global_batch"]
    found = planning.plan(
        estimator,
        tokens=options["tokens"],
        device=options["device"],
        gpus=parse_size(options["gpus"], "--gpus"),
        global_batch=batch if batch in (None, planning.AUTO) else read_batch(batch),
        interconnect=options["interconnect"],
        price=read_rate(options["price"], "--price"),
        overlap=options["overlap"],
        expert_imbalance=1.0 if options["expert_imbalance"] is None else read_imbalance(options["expert_imbalance"]),
        dtype=read_formats(options)["compute"],
        execution=options["execution"] or "fused",
        optimizer=options["optimizer"],
        recompute=_read_recompute(options),
        top=parse_size(options["top"], "--top"),
        workload=sample,
        **degrees,
    )
    return found._replace(notes=(*said, *asked.notes, *notes, *found.notes))


def _show_list(
    model: str, options: dict[str, object], style: str, output: str | None, said: Sequence[str]
) -> None:  # fmt: skip
    from flopcalc.cli import lists
    from flopcalc.report.plan import make_cells, shorten

    rows = lists.expand(options)
    results = [_plan(model, row.options, said) for row in rows]
    if style == "json":
        lists.show_json(rows, [each.to_dict() for each in results])
        return
    title = f"{results[0].model}: {format_tokens(results[0].tokens)}, {results[0].dtype}"
    notes = [each.notes for each in results]
    cells = [make_cells(each) for each in results]
    if style == "html":
        days = [each.best[0].days for each in results]
        bars = [(value, f"{shorten(value)} days") for value in days]
        page = lists.make_page(rows, cells, notes, title=title, label="Days, in the best layout", bars=bars)
        write_page(page, output)
        return
    lists.show_table(rows, cells, notes, title=title)


def read_batch(text: str) -> int:
    if text.isalpha():
        raise WorkloadError(f"--global-batch is a whole number or auto, not {format_value(text)}")
    return parse_size(text, "--global-batch")


def read_imbalance(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise WorkloadError(f"--expert-imbalance is a number such as 1.2, not {text!r}") from None


def _read_degree(name: str, text: str | None) -> tuple[int, ...] | None:
    flag = f"--{name.replace('_', '-')}"
    if text is None:
        return None
    if name == "zero":
        return tuple(parse_size(piece.strip(), flag, 0) for piece in text.split(","))
    return parse_sizes(text, flag)


def _read_recompute(options: dict[str, Any]) -> list[str] | None:
    words = options["recompute"]
    if options["gradient_checkpointing"]:
        if words is not None:
            raise RecipeError("--gradient-checkpointing is --recompute full: give one of them")
        return ["full"]
    return None if words is None else [word.strip() for word in words.split(",")]
