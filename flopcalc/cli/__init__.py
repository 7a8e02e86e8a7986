"""The command line: `flopcalc COMMAND …`; commands are loaded when called, errors are one line and exit code 2."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib import import_module

import click

from flopcalc._version import __version__
from flopcalc.base.errors import FlopcalcError
from flopcalc.cli.command import CommandGroup
from flopcalc.cli.streams import drop_output, prepare_streams

# Command -> module that defines it, and its line in --help (so that help need not load them all).
_COMMANDS = {
    "estimate": ("flopcalc.cli.estimate", "FLOPs of one step of a model, by component."),
    "compare": ("flopcalc.cli.compare", "Several models or workloads side by side."),
    "translate": ("flopcalc.cli.translate", "Convert a quoted MFU between conventions, or find its convention."),
    "predict": ("flopcalc.cli.predict", "Time and memory of one step on a GPU, and what limits it."),
    "plan": ("flopcalc.cli.plan", "The best layouts of a training run on many GPUs, with time and cost."),
    "serving": ("flopcalc.cli.serving", "What fits, latency, tokens per second and cost of a serving engine."),
    "explain": ("flopcalc.cli.explain", "The formula of an operation, with its numbers."),
    "models": ("flopcalc.cli.catalogue", "Supported model families and presets."),
    "devices": ("flopcalc.cli.catalogue", "Known GPUs and other devices, with their dense peaks."),
    "schema": ("flopcalc.cli.schema", "The JSON schema of a setup: every option and Python keyword."),
    "crosscheck": ("flopcalc.cli.crosscheck", "Run one batch and compare every counter with the analytic count."),
    "verify": ("flopcalc.cli.verify", "Build HF's model and compare every row with the analytic count."),
    "add": ("flopcalc.cli.add", "For contributors: add the spec of a model type."),
    "calibrate": ("flopcalc.cli.calibrate", "Measure this machine's GPU and keep the results as tables."),
    "calibration": ("flopcalc.cli.calibration", "Show, list and compare measured tables."),
    "sweep": ("flopcalc.cli.sweep", "Train many configurations for a few steps and compare them."),
    "web": ("flopcalc.cli.web", "The exact calculator as a page in the browser."),
    "monitor": ("flopcalc.cli.monitor", "Summarize or plot the log of a training monitor."),
}


_MFU = (
    " `flopcalc estimate MODEL --seq N --device GPU --step-time TIME` prints it, "
    "`flopcalc translate` converts a quoted one, `flopcalc monitor show LOG` shows that of a run."
)
_ELSEWHERE = {"mfu": _MFU, "hfu": _MFU, "memory": " `flopcalc predict MODEL --seq N --device GPU --memory` prints it."}


class _Commands(CommandGroup):
    elsewhere = _ELSEWHERE

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(_COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        from flopcalc.base.data import find_commit

        commit = find_commit()
        click.echo(f"flopcalc, version {__version__}" + (f" (commit {commit})" if commit else ""))
        context.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version, in a checkout with its commit, and exit.",
)  # fmt: skip
def _group() -> None:
    """Exact FLOPs and MFU of language, vision-language and diffusion models, without running anything."""


_ANSWER_BY_CODE = ("add", "calibrate", "verify")  # 1 where something differs or is left


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command; every expected error is one line on stderr and exit code 2."""
    prepare_streams()
    gc.set_threshold(50_000)  # a short command makes no garbage worth a search
    atexit.register(gc.freeze)  # to search for garbage before the process ends takes a tenth of a short command
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(given)
        sys.stdout.flush()
    except FlopcalcError as error:
        _fail(str(error))
    except click.ClickException as error:
        _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # the reader went away (… | head): not an error, unless the exit code is the answer
        drop_output()
        sys.exit(1 if given[:1] and given[0] in _ANSWER_BY_CODE else 0)
    except OSError as error:
        drop_output()
        _fail(f"output failed: {error.strerror}")
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run a command; its exit code. Click's own main() would end with 1 where a reader went away."""
    if "_FLOPCALC_COMPLETE" in os.environ:  # a shell asks for completions
        _group.main(args=arguments, prog_name="flopcalc")
    try:
        with _group.make_context("flopcalc", list(arguments)) as context:
            code = _group.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return code if isinstance(code, int) else 0


def _fail(message: str) -> None:
    line = " ".join(message.split())
    try:
        click.echo(f"flopcalc: {line}", err=True)
    except OSError:  # nobody is left to read a message
        drop_output()
    sys.exit(2)
