"""--launch FILE: options from a training framework's launch file; those on the command line win."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from flopcalc.cli.options.counting import is_given

launch_option = click.option(
    "--launch", multiple=True, metavar="FILE",
    help="A launch file: axolotl, LLaMA-Factory, ms-swift, TRL or accelerate YAML, torchtitan TOML, HF "
    "TrainingArguments JSON; repeatable. Other options win over it.",
)  # fmt: skip


class Launched(NamedTuple):
    """A command's model and options with what launch files add."""

    model: Any
    options: dict[str, Any]
    notes: list[str]
    report: dict[str, Any] | None  # for JSON; None without --launch


def read_launch_options(command: str, model: object, options: dict[str, object]) -> Launched:
    """The options of a command, with those of its launch files where none is given."""
    options = dict(options)
    files = options.pop("launch")
    if not files:
        return Launched(model, options, [], None)
    from flopcalc.integrations.launch import apply_launch  # only where used: other runs start without it

    given = {name for name in options if is_given(name)} | ({"model"} if model is not None else set())
    applied = apply_launch(files, command, given, model)
    for name, value in applied.options.items():
        if name == "model":
            model = value
        elif name != "gpus" or command == "plan" or options["device"] is not None or options["peak"] is not None:
            options[name] = value if isinstance(value, (tuple, dict)) else str(value)
    return Launched(model, options, applied.notes, applied.report)
