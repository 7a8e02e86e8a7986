"""What all commands share: options in groups, and one that takes a single value is given once."""

from __future__ import annotations

from typing import Any

import click

from flopcalc.base.errors import WorkloadError
from flopcalc.base.spelling import spell_option, use_spelling
from flopcalc.cli.options import explain_unknown, list_groups


class Command(click.Command):
    """A command that refuses an option given twice, where click would take the last one in silence."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # while a shell completes a line, nothing is wrong yet
            try:
                _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            except click.NoSuchOption:
                order = []  # said below
            seen = set()
            for parameter in order:
                takes_one = isinstance(parameter, click.Option) and not (parameter.multiple or parameter.is_flag)
                if takes_one and parameter in seen:
                    raise WorkloadError(f"{parameter.opts[0]} is given twice: give it once")
                seen.add(parameter)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            why = explain_unknown(ctx.info_name, error.option_name)
            raise (WorkloadError(why) if why else error) from None

    def invoke(self, ctx: click.Context) -> Any:
        with use_spelling(spell_option):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, records in list_groups(self, ctx):
            with formatter.section(title):
                formatter.write_dl(records)


class CommandGroup(click.Group):
    """A group whose commands are of this kind, and that shows its help where none is given."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # alike in every version of click
            click.echo(ctx.get_help())
            ctx.exit(0)
        return super().parse_args(ctx, args)
