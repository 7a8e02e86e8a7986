"""`flopcalc sweep run | single | test | summarize`: many training configurations, one process each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flopcalc.base.files import format_json
from flopcalc.cli.command import CommandGroup
from flopcalc.cli.options import complete_model
from flopcalc.cli.pages import write_page

if TYPE_CHECKING:
    from flopcalc.measure.sweep.matrix import Configuration

Function = TypeVar("Function", bound=Callable[..., Any])
# Spelled out here and not read from flopcalc.measure: --help must stay quick.
_TRAINERS = "StandardTrainer, DPSGDTrainer, DPGhostClippingTrainer, DPFastGradientClippingTrainer"
_SIZES = "tiny|small|medium|1b"
# What `sweep test` measures: every trainer, small enough for any CPU.
_TEST: dict[str, Any] = {
    "batch_sizes": (2,), "seq_lens": (32,), "models": ("tiny",), "device": "cpu", "steps": 2, "warmup": 1,
    "timeout_s": 110.0,
}  # fmt: skip

_SETTINGS = (
    click.option(
        "--dtype", metavar="auto|bf16|fp32|fp64", help="Number format of weights; auto: bf16 on a GPU, fp32 on the CPU."
    ),
    click.option("--device", metavar="auto|cpu|cuda", help="auto: a GPU if there is one."),
    click.option("--attention", metavar="sdpa|eager", help="HF's attention code (default sdpa)."),
    click.option("--steps", type=int, metavar="N", help="Timed steps (default 10)."),
    click.option("--warmup", type=int, metavar="N", help="Steps before the timed ones (default 3)."),
    click.option("--learning-rate", type=float, metavar="X", help="Default 0.001."),
    click.option("--max-grad-norm", type=float, metavar="X", help="DP: per-sample norm to clip to (default 1)."),
    click.option("--noise-multiplier", type=float, metavar="X", help="DP: noise relative to that norm (default 1)."),
    click.option("--seed", type=int, metavar="N", help="Seed of weights, data and noise (default 0)."),
    click.option(
        "--timeout",
        "timeout_s",
        type=float,
        metavar="S",
        help="Limit in seconds, for building and for measuring (default 1800).",
    ),
)
_PLACES = (
    click.option("--logs-dir", default="logs", show_default=True, metavar="DIR", help="Logs, journal, results.jsonl."),
    click.option("--runs-dir", default="runs", show_default=True, metavar="DIR", help="TensorBoard runs."),
    click.option("--retry", type=click.Choice(["failed"]), help="Run failed configurations again."),
    click.option("--fresh", is_flag=True, help="Ignore what is in --logs-dir and start again."),
    click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object."),
)
_LAUNCHER = (
    click.option(
        "--launcher", default="local", show_default=True, metavar="local|ray|slurm", help="Where processes run."
    ),
    click.option("--slots", type=int, metavar="N", help="Processes at a time (default: free GPUs, else 1)."),
    click.option("--cpus", type=int, metavar="N", help="ray, slurm: cores of one configuration."),
    click.option("--gpus", type=int, metavar="N", help="ray, slurm: GPUs of one configuration."),
    click.option("--ray-address", metavar="A", help="auto (a running cluster), local (starts one), or host:port."),
    click.option("--slurm-folder", metavar="DIR", help="Folder for submitit's files (default: LOGS/slurm)."),
    click.option("--slurm-partition", metavar="P"),
    click.option("--slurm-minutes", type=int, metavar="N", help="Time limit of one configuration's job."),
    click.option("--slurm-cluster", metavar="slurm|local", help="local: try it without Slurm."),
)
_MODELS = (
    click.option("--model-size", metavar=_SIZES, help="Sizes of the sweep's own models; several with commas."),
    click.option(
        "--model",
        multiple=True,
        shell_complete=complete_model,
        metavar="M",
        help="A preset or a config.json; repeatable.",
    ),
    click.option("--model-type", "--as", metavar="TYPE", help="Read every --model as this model type."),
)


def _with(*groups: Sequence[Callable[[Function], Function]]) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return add


@click.group(cls=CommandGroup)
def sweep() -> None:
    """Train many configurations for a few steps and compare them.

    Every configuration runs in a fresh process. Its time, memory, FLOPs, MFU and loss are one row; a failure is a row
    too. The same command again runs only what is missing.
    """


@sweep.command()
@click.argument("config", required=False)
@click.option("--trainers", metavar="A,B", help=f"Some of {_TRAINERS} (default: all).")
@click.option("--batch-sizes", metavar="N,N", help="Samples per step.")
@click.option("--seq-lens", metavar="N,N", help="Tokens per sample.")
@_with(_MODELS, _SETTINGS, _PLACES, _LAUNCHER)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    config: str | None,
    trainers: str | None,
    batch_sizes: str | None,
    seq_lens: str | None,
    model_size: str | None,
    model: tuple[str, ...],
    **options: object,
) -> None:
    """Run all combinations of trainers, batch sizes, lengths and models.

    CONFIG is a .yaml, .json or .toml file with the lists trainers, batch_sizes, seq_lens and models, and settings such
    as steps and dtype. Options on the command line win over it.
    """
    from flopcalc.base.units import parse_sizes
    from flopcalc.measure.sweep.matrix import load_matrix

    lists: dict[str, object] = {"models": _read_models(model_size, model)}
    lists["trainers"] = _split(trainers)
    lists["batch_sizes"] = parse_sizes(batch_sizes, "--batch-sizes") if batch_sizes is not None else None
    lists["seq_lens"] = parse_sizes(seq_lens, "--seq-lens") if seq_lens is not None else None
    given = {name: value for name, value in lists.items() if value is not None} | _take_settings(options)
    ctx.exit(_run(load_matrix({} if config is None else config, **given), options))


@sweep.command()
@click.option("--trainer", required=True, metavar="NAME", help=f"One of {_TRAINERS}.")
@click.option("--batch-size", required=True, type=int, metavar="N", help="Samples per step.")
@click.option("--seq-len", required=True, type=int, metavar="N", help="Tokens per sample.")
@_with(_MODELS, _SETTINGS, _PLACES, _LAUNCHER)
@click.pass_context
def single(
    ctx: click.Context,
    /,
    trainer: str,
    batch_size: int,
    seq_len: int,
    model_size: str | None,
    model: tuple[str, ...],
    **options: Any,
) -> None:
    """Run one configuration; its row joins those in --logs-dir."""
    from flopcalc.measure.sweep.matrix import SweepError, make_matrix

    models = _read_models(model_size, model) or ()
    if len(models) != 1:
        raise SweepError("single takes one model: --model-size 1b, or --model with a preset or a config.json")
    lists: Mapping[str, Any] = {"trainers": (trainer,), "batch_sizes": (batch_size,), "seq_lens": (seq_len,)}
    ctx.exit(_run(make_matrix(**lists, models=models, **_take_settings(options)), options))


@sweep.command()
@click.option(
    "--logs-dir", metavar="DIR", help="Keep logs and runs here (default: a folder that stays only if one fails)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_context
def test(ctx: click.Context, logs_dir: str | None, as_json: bool) -> None:
    """Try all trainers on a tiny model on the CPU, in under two minutes."""
    import os
    import shutil
    import tempfile

    from flopcalc.measure.sweep.matrix import SweepError, make_matrix
    from flopcalc.measure.sweep.run import load_results

    configurations = make_matrix(**_TEST)
    kept = load_results(logs_dir, must_exist=False) if logs_dir else []
    if {row["id"] for row in kept} - {configuration.id for configuration in configurations}:
        raise SweepError(f"{logs_dir} holds a sweep, which a test would forget: choose another --logs-dir")
    folder = logs_dir or tempfile.mkdtemp(prefix="flopcalc-sweep-")
    options = {
        "logs_dir": folder,
        "runs_dir": os.path.join(folder, "runs"),
        "fresh": True,
        "as_json": as_json,
        "slots": min(len(configurations), os.cpu_count() or 1),  # it tries, it does not time
    }
    code = 2
    try:
        code = _run(configurations, options, can_go_on=False)
    finally:
        if logs_dir is None and code != 1:  # a failure is kept, to be looked at
            shutil.rmtree(folder)
    if logs_dir is not None or code == 1:
        click.echo(f"logs: {folder}", err=True)
    ctx.exit(code)


@sweep.command()
@click.argument("folder", required=False, metavar="[DIR]")
@click.option("--logs-dir", metavar="DIR", help="Folder of the results, as DIR (default: logs).")
@click.option(
    "-o", "--output", metavar="FILE", help="Also write the summary as JSON; with --format html, write only the page."
)
@click.option("--format", "style", type=click.Choice(("table", "json", "markdown", "html")), help="Default table.")
@click.option("--markdown", is_flag=True, help="Same as --format markdown.")
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
@click.option("--plot", "plot_file", metavar="FILE", help="Plot time, memory and FLOPs: .png, .svg or .pdf.")
def summarize(
    folder: str | None,
    logs_dir: str | None,
    output: str | None,
    style: str | None,
    markdown: bool,
    as_json: bool,
    plot_file: str | None,
) -> None:
    """Summarize the sweep in DIR: totals, cost of each trainer, failures."""
    from flopcalc.measure.sweep import summary
    from flopcalc.measure.sweep.run import load_results
    from flopcalc.report.sweep import format_summary, make_page

    given = [(word, f"--{word}") for word, is_given in (("json", as_json), ("markdown", markdown)) if is_given]
    given += [(style, f"--format {style}")] if style else []
    if len({word for word, _ in given}) > 1:
        raise click.UsageError(f"{' and '.join(flag for _, flag in given)} are two forms: choose one")
    chosen = given[0][0] if given else "table"
    if folder is not None and logs_dir is not None:
        raise click.UsageError(f"the folder is given twice, {folder} and --logs-dir {logs_dir}: give it once")
    found = summary.summarize(load_results(folder or logs_dir or "logs"))
    if output is not None and chosen != "html":
        _write(output, format_json(found) + "\n")
    if plot_file is not None:
        summary.plot(found, plot_file)
    if chosen == "json":
        click.echo(format_json(found))
    elif chosen == "html":
        write_page(make_page(found), output)
    else:
        click.echo(format_summary(found, "github" if chosen == "markdown" else "simple"))


# --- what the commands share ------------------------------------------------------------------------------------------
def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(piece.strip() for piece in text.split(",") if piece.strip())


def _read_models(sizes: str | None, models: tuple[str, ...]) -> tuple[str, ...] | None:
    from flopcalc.base.errors import format_nearest
    from flopcalc.measure.sweep.matrix import MODEL_SIZES, SweepError

    named = _split(sizes) or ()
    for name in named:
        if name not in MODEL_SIZES:
            near = format_nearest(name, MODEL_SIZES)
            known = ", ".join(MODEL_SIZES)
            raise SweepError(f"--model-size {name!r} unknown.{near} Known: {known}; --model takes presets and paths")
    return (*named, *models) or None


def _take_settings(options: Mapping[str, object]) -> dict[str, Any]:
    from flopcalc.measure.sweep.matrix import SETTINGS

    return {name: value for name in SETTINGS if (value := options[name]) is not None}


def _run(configurations: Sequence[Configuration], options: Mapping[str, Any], can_go_on: bool = True) -> int:
    """Exit code: 0 all ok, 1 some failed, 130 stopped before the last one."""
    from flopcalc.api import bind
    from flopcalc.measure.jobs.launchers import make_launcher
    from flopcalc.measure.jobs.progress import Progress
    from flopcalc.measure.sweep.matrix import find_model
    from flopcalc.measure.sweep.run import check_libraries, run_sweep
    from flopcalc.measure.sweep.summary import summarize as summarize_rows
    from flopcalc.report.sweep import format_summary

    if options["fresh"] and options.get("retry"):
        raise click.UsageError("--fresh runs everything again, --retry failed only what failed: choose one")
    launcher_name = options.get("launcher", "local")
    if launcher_name == "local":
        check_libraries(configurations)
    names = (
        "slots",
        "cpus",
        "gpus",
        "ray_address",
        "slurm_folder",
        "slurm_partition",
        "slurm_minutes",
        "slurm_cluster",
    )
    launcher = make_launcher(
        launcher_name, device=configurations[0].device, **{name: options.get(name) for name in names}
    )
    for model in dict.fromkeys(configuration.model for configuration in configurations):
        click.echo(f"{model}: {bind(find_model(model)).parameters()['total']:,} parameters", err=True)
    swept = run_sweep(
        configurations,
        options["logs_dir"],
        runs_dir=options["runs_dir"],
        launcher=launcher,
        fresh=options["fresh"],
        retry_failed=options.get("retry") == "failed",
        progress=Progress(sys.stderr, lists_results=True),
    )
    found = summarize_rows(swept.rows)
    click.echo(format_json(found) if options["as_json"] else format_summary(found))
    if swept.stopped:
        same = "the same command without --fresh" if options["fresh"] else "the same command"
        click.echo(f"stopped: {same} goes on" if can_go_on else "stopped", err=True)
        return 130
    return 1 if swept.failed else 0


def _write(path: str, text: str) -> None:
    from flopcalc.measure.sweep.matrix import SweepError

    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SweepError(f"{path}: cannot be written: {error.strerror or error}") from None
