"""What all commands share: the model may stand first, and an option that takes one value is given once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from flopcalc.data import list_data_files
from flopcalc.errors import ConfigError, WorkloadError


class Command(click.Command):
    """A command that refuses an option given twice, where click would take the last one in silence."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # while a shell completes a line, nothing is wrong yet
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            seen = set()
            for parameter in order:
                takes_one = isinstance(parameter, click.Option) and not (parameter.multiple or parameter.is_flag)
                if takes_one and parameter in seen:
                    raise WorkloadError(f"{parameter.opts[0]} is given twice: give it once")
                seen.add(parameter)
        return super().parse_args(ctx, args)


class Group(click.Group):
    """A group whose commands are of this kind, and that shows its help where none is given."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # alike in every version of click
            click.echo(ctx.get_help())
            ctx.exit(0)
        return super().parse_args(ctx, args)


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in list_data_files("presets") if name.startswith(incomplete.lower())]


def model_argument(function: Callable[..., object]) -> Callable[..., Any]:
    """MODEL or --model M; the command gets it as `model`."""

    @wraps(function)
    def run(*arguments: object, first: str | None, model: str | None, **options: object) -> Any:
        if first is not None and model is not None:
            raise ConfigError(f"two models are given, {first!r} and --model {model!r}: give one")
        name = model if first is None else first
        if name is None and not options.get("launch"):
            example = f"flopcalc {click.get_current_context().info_name} llama-3.1-8b"
            raise ConfigError(f"which model? Give its name first, as in {example} …; `flopcalc models` lists them")
        return function(*arguments, model=name, **options)

    option = click.option(
        "--model", shell_complete=complete_model, metavar="M",
        help="Preset, config.json, its folder, or a hub id; may also be the first argument.",
    )  # fmt: skip
    return click.argument("first", required=False, shell_complete=complete_model, metavar="[MODEL]")(option(run))
