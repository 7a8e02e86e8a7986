"""What all commands share: options in groups, and one that takes a single value is given once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from flopcalc.base.errors import FlopcalcError, WorkloadError, format_nearest
from flopcalc.base.spelling import spell_option, use_spelling
from flopcalc.cli.options import explain_unknown, list_groups


class Command(click.Command):
    """A command that refuses an option given twice, where click would take the last one in silence."""

    def make_parser(self, ctx: click.Context) -> Any:
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            values, rest, order = parse(args=args)
            if not ctx.resilient_parsing:  # while a shell completes a line, nothing is wrong yet
                _check_once(order)
            return values, rest, order

        parser.parse_args = parse_once
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            why = explain_unknown(ctx, error.option_name)
            raise (WorkloadError(why) if why else error) from None

    def invoke(self, ctx: click.Context) -> Any:
        with use_spelling(spell_option):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, records in list_groups(self, ctx):
            with formatter.section(title):
                formatter.write_dl(records)


def _check_once(order: list[click.Parameter]) -> None:
    seen = set()
    for parameter in order:
        takes_one = isinstance(parameter, click.Option) and not (parameter.multiple or parameter.is_flag)
        if takes_one and parameter in seen:
            raise WorkloadError(f"{parameter.opts[0]} is given twice: give it once")
        seen.add(parameter)


class CommandGroup(click.Group):
    """A group whose commands are of this kind, and that shows its help where none is given."""

    command_class = Command
    elsewhere: Mapping[str, str] = {}  # what is no command -> where it is found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in (known := self.list_commands(ctx)):
            near = self.elsewhere.get(args[0].lower()) or format_nearest(args[0], known, 0.6)
            shown = f" `{ctx.command_path} show {args[0]}` shows a file." if "show" in known and not near else ""
            raise FlopcalcError(f"no command {args[0]!r}.{near}{shown} Try {ctx.command_path} --help")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # alike in every version of click
            click.echo(ctx.get_help())
            ctx.exit(0)
        return super().parse_args(ctx, args)
