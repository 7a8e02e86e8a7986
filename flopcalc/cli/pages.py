"""Where a result goes: --format with its words, and -o FILE for the page of --format html."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.files import write_whole

FORMATS = ("table", "json", "csv", "markdown", "html")  # of commands that count


def format_options(*formats: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--format, --json and -o; the command gets them as `style` and `output`."""

    def add(function: Callable[..., object]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: object, style: str | None, as_json: bool, output: str | None, **options: object) -> Any:
            if as_json and style not in (None, "json"):
                raise WorkloadError(f"--json contradicts --format {style}")
            chosen = "json" if as_json else style or "table"
            if output is not None and chosen != "html":
                raise WorkloadError("-o writes the page of --format html: give both, or redirect the text (> FILE)")
            return function(*arguments, style=chosen, output=output, **options)

        file = click.option("-o", "--output", metavar="FILE", help="File for the page of --format html.")
        shorter = click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
        return click.option("--format", "style", type=click.Choice(formats), help="Default table.")(shorter(file(run)))

    return add


def write_page(page: str, output: str | None) -> None:
    """To stdout, or whole or not at all into a file, whose path goes to stderr."""
    if output is None or output == "-":
        click.echo(page, nl=False)
        return
    if os.path.isdir(output):
        raise FlopcalcError(f"{output}: is a folder: give the name of a file, such as {os.path.join(output, 'x.html')}")
    try:
        write_whole(output, page)
    except OSError as error:
        raise FlopcalcError(f"{output}: cannot be written: {error.strerror or error}") from None
    click.echo(f"written: {output}", err=True)
