"""The commands as click knows them go in; docs/cli.md comes out.

python docs/make_cli.py            write it
python docs/make_cli.py --check    exit 1 if it is stale
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from flopcalc.cli import _COMMANDS, _group
from flopcalc.setup.fields import GROUPS

PAGE = Path(__file__).resolve().parent / "cli.md"
HEAD = """# Commands and options

Made by `python docs/make_cli.py` from the commands themselves; `flopcalc COMMAND --help` prints the same. Examples,
JSON and exit codes: [reference.md](reference.md). `python -m flopcalc` is the same as `flopcalc`.
"""


def list_commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command under a group, groups first, with its full name."""
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        assert isinstance(command, click.Group)
        inner = command.get_command(context, name)
        assert inner is not None
        below = click.Context(inner, info_name=name, parent=context)
        yield below.command_path, inner, below
        yield from list_commands(inner, below)


def escape(text: str) -> str:
    """Text for a table's cell: one line, and no sign that Markdown reads."""
    line = re.sub(r"\[([^\]]*)\]$", r"(\1)", " ".join(text.split()))  # click's default, in brackets
    return line.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("[", "\\[").replace("]", "\\]")


def format_option(option: click.Option, context: click.Context) -> str:
    """A row: all names and the value, then the help text with its default."""
    record = option.get_help_record(context)
    assert record is not None
    names = ", ".join((*option.opts, *option.secondary_opts))
    value = "" if option.is_flag or option.count else option.make_metavar(context)
    code = f"{names} {value}".strip().replace("|", "\\|")
    return f"| `{code}` | {escape(record[1])} |"


def format_help(text: str) -> list[str]:
    """Paragraphs of a help text; examples, which are indented, become a block of commands."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).replace("\b", "").split("\n\n"):
        inner = [line for line in paragraph.split("\n") if line.strip()]
        if inner and all(line.startswith("  ") for line in inner):
            if lines and lines[-1] == "```":
                lines.pop()
            else:
                lines += ["", "```sh"]
            lines += [*(line.strip() for line in inner), "```"]
        elif inner:
            lines += ["", *(line.strip() for line in inner)]
    return lines


def format_command(path: str, command: click.Command, context: click.Context) -> list[str]:
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines = ["", f"{'#' * (1 + path.count(' '))} {path}", "", "```text", usage, "```", *format_help(command.help or "")]
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    groups = {group: [each for each in options if getattr(each, "group", "output") == group] for group in GROUPS}
    groups = {group: found for group, found in groups.items() if found}
    for group, found in groups.items():
        head = GROUPS[group] if len(groups) > 1 else "option"
        lines += ["", f"| {head} | meaning |", "|---|---|", *(format_option(each, context) for each in found)]
    return lines


def make_page() -> str:
    context = click.Context(_group, info_name="flopcalc")
    lines = [HEAD, "| command | does |", "|---|---|"]
    for name, (_, text) in _COMMANDS.items():
        lines.append(f"| [`flopcalc {name}`](#flopcalc-{name}) | {text} |")
    for path, command, below in list_commands(_group, context):
        lines += format_command(path, command, below)
    return "\n".join(lines) + "\n"


def main() -> int:
    page = make_page()
    if "--check" not in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print("docs/cli.md is stale: run python docs/make_cli.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
