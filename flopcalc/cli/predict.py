"""`flopcalc predict`: how long one step takes on a device, what bounds it, whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flopcalc.api import count, list_step_options, predict_counted
from flopcalc.base.errors import WorkloadError
from flopcalc.base.units import parse_size
from flopcalc.cli.command import Command
from flopcalc.cli.options import has_list, takes_setup
from flopcalc.cli.pages import format_options, write_page
from flopcalc.cli.streams import show_json
from flopcalc.setup.counting import SetupEstimate
from flopcalc.setup.setup import Setup, make_setup

if TYPE_CHECKING:
    from flopcalc.prediction.step import Prediction


@click.command(cls=Command)
@takes_setup("predict")
@click.option("--memory", is_flag=True, help="Show what fills the memory, and the largest batch that fits.")
@click.option("--top", metavar="N", help="Number of modules to list (default 8).")
@format_options("table", "json", "html")
@click.option("--timeline", metavar="FILE", help="Write the step as a trace for Perfetto: CPU, GPU, waits.")
@click.option(
    "--plot", "plot_file", metavar="FILE", help="Plot tokens per second over a list of values: .png, .svg or .pdf."
)
def predict(
    model: str,
    memory: bool,
    top: str | None,
    style: str,
    output: str | None,
    plot_file: str | None,
    timeline: str | None,
    given: dict[str, Any],
) -> None:
    """Time and memory of one step of HF's model on a GPU, and what limits it.

    Lists in --seq, --batch and --device give a row for each combination. Examples:

      flopcalc predict llama-3.1-8b --seq 2048 --batch 4 --device h200

      flopcalc predict llama-3.1-8b --seq 2k --batch 1,2,4 --device h100-sxm,h200
    """
    if top is not None and style == "html":
        raise WorkloadError("the page of --format html lists every module: leave --top out")
    count = parse_size(top, "top") if top is not None else 8
    if timeline is not None and has_list(given, plot_file):
        raise WorkloadError("--timeline is of one step: give one of --seq, --batch and --device each")
    if has_list(given, plot_file):
        _show_list(model, given, memory, style, output, plot_file)
        return
    predicted = _predict(model, given, memory, timeline is not None)
    if timeline is not None:
        from flopcalc.report.perfetto import save_trace

        save_trace(predicted.found, timeline)
    if style == "json":
        show_json(predicted.to_dict())
    elif style == "html":
        from flopcalc.report.html.prediction import make_prediction_page

        write_page(make_prediction_page(predicted.to_dict()), output)
    else:
        from flopcalc.report.prediction import format_prediction

        memory_device = predicted.device if predicted.has_memory else None
        click.echo(
            format_prediction(predicted.found, count, memory_device, kept=predicted.kept, largest=predicted.largest)
        )


class PredictResult(NamedTuple):
    """One result."""

    counted: SetupEstimate
    found: Prediction
    device: str
    has_memory: bool  # asked for
    kept: dict[str, int] | None  # bytes of activations with and without recomputation
    largest: int | None  # batch that fits
    launch: dict[str, Any] | None = None  # what launch files said

    def to_dict(self) -> dict[str, Any]:
        shown = self.found.to_dict()
        if self.launch is not None:
            shown["launch"] = self.launch
        if self.has_memory:
            shown["memory_bytes"]["activations_by_recompute"] = self.kept
            shown["memory_bytes"]["largest_batch"] = self.largest
        return shown


def _predict(model: str, given: dict[str, Any], memory: bool, has_events: bool = False) -> PredictResult:
    from flopcalc.prediction.step import find_largest_batch

    setup = make_setup("predict", model, given)
    setup = setup.replace(values={**setup.values, "timeline": has_events})
    counted = count(setup, "hardware")
    settings = list_step_options(setup, counted.estimate)
    memory = memory and not counted.estimate.terms[0].estimator.is_diffusion  # whose note says what is known
    found = predict_counted(counted, setup)
    kept = _compare_recompute(setup, counted, found, settings) if memory else None
    largest = find_largest_batch(counted.estimate, **settings) if memory else None
    return PredictResult(counted, found, settings["device"], memory, kept, largest, setup.launch)


def _show_list(
    model: str, given: dict[str, Any], memory: bool, style: str, output: str | None, plot_file: str | None
) -> None:
    from flopcalc.cli import lists
    from flopcalc.prediction.roofline import format_rate
    from flopcalc.report.prediction import make_cells

    rows = lists.expand(given)
    results = [_predict(model, row.options, memory) for row in rows]
    unit = results[0].found.rate[1]
    load = results[0].counted.estimate.terms[0].load
    title = f"{results[0].counted.estimate.terms[0].estimator.source.name}: one {load.phase} step"
    if plot_file is not None:
        points = [(each.found.rate[0], each.found.fits is not False) for each in results]
        lists.draw(plot_file, rows, points, f"{unit}/s", title)
    lists.show(
        rows,
        (each.to_dict() for each in results),
        [make_cells(each.found, each.largest) for each in results],
        [each.found.notes for each in results],
        title=title,
        style=style,
        output=output,
        label=f"{unit.capitalize()} per second",
        bars=[(each.found.rate[0], format_rate(each.found.rate[0])) for each in results],
        plot_file=plot_file,
    )


def _compare_recompute(
    setup: Setup, counted: SetupEstimate, found: Prediction, settings: dict[str, Any]
) -> dict[str, int] | None:
    """Bytes of activations that autograd keeps without recomputation and with it; None where nothing trains."""
    from flopcalc.prediction.step import predict_estimate

    estimate = counted.estimate
    if not estimate.terms[0].estimator.trains(estimate.terms[0].load):
        return None
    kept = {}
    for word in ("none", "full"):
        other = found
        if word != estimate.terms[0].estimator.recipe.recompute:
            recipe = {**(setup.recipe or {}), "recompute": word}  # type: ignore[dict-item]  # options make a mapping
            changed = count(setup.replace(recipe=recipe), "hardware").estimate
            other = predict_estimate(changed, advise=False, **settings)
        assert other.memory is not None
        kept[word] = other.memory.activations
    return kept
