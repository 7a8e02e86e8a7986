"""`flopcalc add`: runs what shipping a spec takes, and prints what is left."""

from __future__ import annotations

import click

from flopcalc.base.data import describe_install
from flopcalc.base.errors import FlopcalcError
from flopcalc.base.text_table import format_text
from flopcalc.cli.command import Command
from flopcalc.cli.streams import show_json


@click.command(cls=Command)
@click.argument("types", nargs=-1, required=True, metavar="TYPE…")
@click.option("--check", is_flag=True, help="Write nothing; say what is done and what is missing.")
@click.option("--json", "as_json", is_flag=True)
def add(types: tuple[str, ...], check: bool, as_json: bool) -> None:
    """For contributors: compare a spec with HF's model, record traces and operators, and write the page.

    It needs a checkout, torch and transformers (the extra `measure`). Exit code 1 if a step failed, or if
    something other than a preset or a changelog line is missing.

    \b
      flopcalc add vit
      flopcalc add --check clip siglip
    """
    try:
        from lab.add import Step, ship
    except ImportError as error:
        if str(error.name).partition(".")[0] == "lab":
            raise FlopcalcError("add needs a checkout of flopcalc: an installed package has no lab/") from None
        raise FlopcalcError(f"add needs {error.name}: {describe_install('measure')}") from None
    found: dict[str, list[Step]] = {}
    for name in types:
        found[name] = []
        for step in ship(name, check=check):
            found[name].append(step)
            if not as_json:
                click.echo(format_text(step.text, f"{step.state:7}{name} {step.name}: ", " " * 7))
    left = [f"{name} {step.name}" for name, steps in found.items() for step in steps if step.state != "done"]
    if as_json:
        steps = {name: [step._asdict() for step in each] for name, each in found.items()}
        show_json({"schema": 1, "types": steps, "left": left})
    else:
        click.echo(format_text(f"left: {', '.join(left)}" if left else "nothing is left", "", "  "))
    if any(not each.endswith((" preset", " changelog")) for each in left):
        raise click.exceptions.Exit(1)
