"""`flopcalc predict`: how long one step takes on a device, what bounds it, whether it fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flopcalc.cli.command import Command, model_argument
from flopcalc.cli.options.counting import Asked, is_given, make_estimate, read_formats, read_recompute
from flopcalc.cli.options.launch import launch_option, read_launch_options
from flopcalc.cli.options.time import read_rate
from flopcalc.cli.options.workload import dtype_option, execution_option, has_list, workload_options
from flopcalc.cli.pages import format_options, write_page
from flopcalc.errors import DeviceError, WorkloadError
from flopcalc.hardware.devices import DTYPES
from flopcalc.units import parse_size
from flopcalc.words import OPTIMIZERS

if TYPE_CHECKING:
    from flopcalc.prediction.step import Prediction


@click.command(cls=Command)
@model_argument
@launch_option
@workload_options
@dtype_option("|".join(DTYPES[:4]) + "|…")
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    metavar="adamw|adamw-8bit|…",
    default="adamw",
    show_default=True,
    help="adamw: torch's fused one; adamw-foreach; adamw-master: with fp32 gradients, master weights and states; "
    "adamw-8bit, adamw-fp8: states of one byte; adamw-offload: states on the host; none.",
)
@execution_option("eager")
@click.option("--compile", "compiled", is_flag=True, help="Same as --execution compiled.")
@click.option("--host-factor", metavar="F", help="Your CPU's slowdown relative to the calibrated host (default 1).")
@click.option(
    "--transformers",
    metavar="VERSION",
    help="Version of transformers that you run (default 5.17). It matters for experts: 5.6 to 5.17 mask routed rows.",
)
@click.option("--memory", is_flag=True, help="Show what fills the memory, and the largest batch that fits.")
@click.option("--top", metavar="N", help="Number of modules to list (default 8).")
@format_options("table", "json", "html")
@click.option("--timeline", metavar="FILE", help="Write the step as a trace for Perfetto: CPU, GPU, waits.")
@click.option(
    "--plot", "plot_file", metavar="FILE", help="Plot tokens per second over a list of values: .png, .svg or .pdf."
)
def predict(
    model: str, memory: bool, top: str | None, style: str, output: str | None,
    plot_file: str | None, timeline: str | None, **options: object,
) -> None:  # fmt: skip
    """Time and memory of one step of HF's model on a GPU, and what limits it.

    Lists in --seq, --batch and --device give a row for each combination. Examples:

      flopcalc predict llama-3.1-8b --seq 2048 --batch 4 --device h200

      flopcalc predict llama-3.1-8b --seq 2k --batch 1,2,4 --device h100-sxm,h200
    """
    if options["device"] is None:
        raise DeviceError("on which device? Give --device NAME; `flopcalc devices` lists them")
    if is_given("convention"):
        raise WorkloadError("predict shows MFU and HFU, each under its own convention: leave --convention out")
    model, options, said, report = read_launch_options("predict", model, options)
    options |= {"recompute": read_recompute(options), "gradient_checkpointing": False}
    if top is not None and style == "html":
        raise WorkloadError("the page of --format html lists every module: leave --top out")
    count = parse_size(top, "--top") if top is not None else 8
    if timeline is not None and has_list(options, plot_file):
        raise WorkloadError("--timeline is of one step: give one of --seq, --batch and --device each")
    if has_list(options, plot_file):
        _show_list(model, options, memory, style, output, plot_file, said)
        return
    predicted = _predict(model, options, memory, said, timeline is not None)._replace(launch=report)
    if timeline is not None:
        from flopcalc.prediction.perfetto import save_trace

        save_trace(predicted.found, timeline)
    if style == "json":
        click.echo(json.dumps(predicted.to_dict(), indent=2, ensure_ascii=False))
    elif style == "html":
        from flopcalc.report.html.prediction import make_prediction_page

        write_page(make_prediction_page(predicted.to_dict()), output)
    else:
        from flopcalc.report.prediction import format_prediction

        memory_device = predicted.device if predicted.has_memory else None
        click.echo(
            format_prediction(
                predicted.found, predicted.notes, count, memory_device, kept=predicted.kept, largest=predicted.largest
            )
        )


class Predicted(NamedTuple):
    """One result."""

    asked: Asked
    found: Prediction
    notes: list[str]
    device: str
    has_memory: bool  # asked for
    kept: dict[str, int] | None  # bytes of activations with and without recomputation
    largest: int | None  # batch that fits
    launch: dict[str, Any] | None = None  # what launch files said

    def to_dict(self) -> dict[str, Any]:
        shown = {**self.found.to_dict(), "notes": self.notes}
        if self.launch is not None:
            shown["launch"] = self.launch
        if self.has_memory:
            shown["memory_bytes"]["activations_by_recompute"] = self.kept
            shown["memory_bytes"]["largest_batch"] = self.largest
        return shown


def _predict(
    model: str, options: dict[str, Any], memory: bool, said: Sequence[str] = (), has_events: bool = False
) -> Predicted:  # fmt: skip
    from flopcalc.prediction.choices import choose_execution
    from flopcalc.prediction.step import find_largest_batch, predict_estimate

    device = _find_name(options["device"])
    settings: dict[str, Any] = {
        "device": device, "dtype": read_formats(options)["compute"], "optimizer": options["optimizer"],
        "attention_kernel": options["attention_kernel"],
        "execution": choose_execution(options["execution"], options["compiled"]),
    }  # fmt: skip
    options = {**options, "device": device, "convention": "hardware"}
    asked = make_estimate(model, options)
    if memory and asked.estimate.terms[0].estimator.is_diffusion:
        raise WorkloadError("--memory: the memory of diffusion models is not predicted")
    found = predict_estimate(
        asked.estimate, host_factor=read_rate(options["host_factor"], "--host-factor") or 1.0,
        transformers=options["transformers"], timeline=has_events, **settings,
    )  # fmt: skip
    kept = _compare_recompute(model, options, asked, found, settings) if memory else None
    largest = find_largest_batch(asked.estimate, **settings) if memory else None
    notes = [*said, *_list_notes(asked, found, options["optimizer"])]
    return Predicted(asked, found, notes, device, memory, kept, largest)


def _show_list(
    model: str, options: dict[str, object], memory: bool, style: str, output: str | None, plot_file: str | None,
    said: Sequence[str],
) -> None:  # fmt: skip
    from flopcalc.cli import lists
    from flopcalc.prediction.floors import format_rate
    from flopcalc.report.prediction import make_cells

    rows = lists.expand(options)
    results = [_predict(model, row.options, memory, said) for row in rows]
    if plot_file is not None:
        lists.draw(plot_file, rows, [each.found.tokens_per_s for each in results], "tokens/s")
    if style == "json":
        lists.show_json(rows, [each.to_dict() for each in results])
        return
    load = results[0].asked.estimate.terms[0].load
    title = f"{results[0].asked.estimate.terms[0].estimator.source.name}: one {load.phase} step"
    notes = [each.notes for each in results]
    cells = [make_cells(each.found, each.largest) for each in results]
    if style == "html":
        bars = [(each.found.tokens_per_s, format_rate(each.found.tokens_per_s)) for each in results]
        page = lists.make_page(rows, cells, notes, title=title, label="Tokens per second", bars=bars)
        write_page(page, output)
        return
    lists.show_table(rows, cells, notes, title=title)
    if plot_file is not None:
        click.echo(f"written: {plot_file}")


def _list_notes(asked: Asked, found: Prediction, optimizer: str) -> list[str]:
    """What a reader should know of the prediction, of the workload and of options that change nothing, each once."""
    notes = [*found.notes, *asked.notes]
    phase = asked.estimate.terms[0][1].phase
    if phase != "train" and optimizer != "none" and is_given("optimizer"):
        notes.append(f"phase {phase} has no optimizer's step, so --optimizer {optimizer} changes nothing")
    return list(dict.fromkeys(notes))


def _compare_recompute(
    model: str, options: dict[str, Any], asked: Asked, found: Prediction, settings: dict[str, Any]
) -> dict[str, int] | None:
    """Bytes of activations that autograd keeps without recomputation and with it; None where nothing trains."""
    from flopcalc.prediction.step import predict_estimate

    if options["phase"] != "train" or not asked.estimate.parameters["trainable"]:
        return None
    kept = {}
    for word in ("none", "full"):
        other = found
        if word != options["recompute"]:
            changed = make_estimate(model, {**options, "recompute": word}).estimate
            other = predict_estimate(changed, advise=False, **settings)
        assert other.memory is not None
        kept[word] = other.memory.activations
    return kept


def _find_name(name: str) -> str:
    """The device as it was named; auto is this machine's own."""
    from flopcalc.hardware.devices import detect_device, find_detected

    if name != "auto":
        return name
    found = detect_device()
    if found is None or find_detected(found) is None:
        shown = "no GPU" if found is None else f"{found}, which is not in the table"
        raise DeviceError(f"--device auto: this machine shows {shown}; name a GPU, `flopcalc devices` lists them")
    return found
