"""The door of the command line: click's options, made from the table of fields; what was written becomes a Setup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, cast

import click

from flopcalc.base.data import list_data_files
from flopcalc.base.errors import ConfigError, WorkloadError
from flopcalc.base.spelling import spell_option, use_spelling
from flopcalc.base.vocabulary import LAYOUT_RECOMPUTE, RECOMPUTE
from flopcalc.setup.fields import FIELDS, GROUPS, Command, Field, Group, list_fields

# What training frameworks and engines call our options, where the nearest spelling is another one.
_FOREIGN = {
    f"{word}{size}": option for size in ("", "_size", "_degree")
    for word, option in (
        ("tensor_parallel", "--tp"), ("pipeline_parallel", "--pp"), ("context_parallel", "--cp"),
        ("expert_parallel", "--ep"),
        ("data_parallel", "--dp"), ("tensor_model_parallel", "--tp"), ("pipeline_model_parallel", "--pp"),
        ("expert_model_parallel", "--ep"), ("sequence_length", "--seq"), ("max_length", "--seq"),
        ("seq_length", "--seq"), ("bs", "--batch"), ("bsz", "--batch"),
        ("micro_batch", "--batch"), ("per_device_train_batch", "--batch"), ("max_model_len", "--context"),
    )
}  # fmt: skip
# Fields that take lists; the last changes fastest.
LISTED = ("device", "gpus", "users", "rate", "concurrency", "batch", "seq")


class FieldOption(click.Option):
    """An option with its group in --help, and the words that a shell completes."""

    def __init__(self, *flags: Any, group: Group = "output", words: tuple[str, ...] = (), **settings: Any) -> None:
        super().__init__(*flags, **settings)
        self.group, self.words = group, words


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in list_data_files("presets") if name.startswith(incomplete.lower())]


def complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from flopcalc.hardware.devices import load_devices

    return [device.id for device in load_devices()[0] if device.id.startswith(incomplete.lower())]


def complete_quoted(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from flopcalc.core.estimate.published_conventions import load_quoted

    return [name for name in load_quoted().conventions if name.startswith(incomplete.lower())]


def complete_word(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [word for word in getattr(param, "words", ()) if word.startswith(incomplete)]


_COMPLETE = {"device": complete_device, "from": complete_quoted}


def make_option(command: Command, name: str, field: Field) -> click.Option:
    """The option of a field; its value is read later, as every door's is."""
    flags = [spell_option(name, ""), *([f"--{field.also}"] if field.also else []), name]
    default = f" (default {field.default})" if field.default else ""
    settings: dict[str, Any] = {"help": f"{field.help.removesuffix('.')}{default}."}
    if field.kind == "flag":
        settings["is_flag"] = True
    else:
        shown = field.metavar.removesuffix("…") if field.kind == "path" else field.metavar
        settings["metavar"] = shown or "|".join(field.words)
        settings["multiple"] = field.repeats
    if field.kind == "mtp":
        settings |= {"is_flag": False, "flag_value": "config"}
    tried = LAYOUT_RECOMPUTE if command == "plan" else RECOMPUTE
    words = tried if field.kind == "recomputes" else field.words
    return FieldOption(
        flags, group=field.group, words=words, shell_complete=_COMPLETE.get(name, complete_word), **settings
    )


def takes_setup(command: Command, *, has_model: bool = True) -> Callable[[Callable[..., object]], Callable[..., Any]]:
    """The options of a command's fields. It gets `model`, and `given`: the fields that were written."""

    def decorate(function: Callable[..., object]) -> Callable[..., Any]:
        fields = {name: field for name, field in list_fields(command).items() if field.in_doors}

        @wraps(function)
        def run(*arguments: object, **options: Any) -> Any:
            given = {name: options.pop(name) for name in fields}
            given = {name: value for name, value in given.items() if value not in (None, False, ())}
            if has_model:
                options["model"] = _choose_model(options.pop("first"), options["model"], given)
            return function(*arguments, given=given, **options)

        made = cast("Any", run)
        own = getattr(function, "__click_params__", [])
        found: list[click.Parameter] = [make_option(command, name, field) for name, field in fields.items()]
        if has_model:
            model = FieldOption(
                ["--model"],
                group="model",
                shell_complete=complete_model,
                metavar="M",
                help="Preset, config.json, its folder, or a hub id; may also be the first argument.",
            )
            first = click.Argument(["first"], required=False, shell_complete=complete_model, metavar="[MODEL]")
            found = [first, model, *found]
        made.__click_params__ = [*own, *reversed(found)]  # click reads them from the last to the first
        return cast("Callable[..., Any]", made)

    return decorate


def _choose_model(first: str | None, model: str | None, given: Mapping[str, Any]) -> str | None:
    if first is not None and model is not None:
        raise ConfigError(f"two models are given, {first!r} and --model {model!r}: give one")
    name = model if first is None else first
    if name is None and "launch" not in given:
        example = f"flopcalc {click.get_current_context().info_name} llama-3.1-8b"
        raise ConfigError(f"which model? Give its name first, as in {example} …; `flopcalc models` lists them")
    return name


def has_list(given: Mapping[str, Any], plot_file: str | None) -> bool:
    """Whether an option lists values; only a list can be drawn."""
    is_list = any("," in given.get(name, "") for name in LISTED)
    if plot_file is not None and not is_list:
        raise WorkloadError("--plot draws a curve over a list: give one, as in --seq 1k,2k,4k")
    return is_list


def explain_unknown(ctx: click.Context, flag: str) -> str | None:
    """Why a command has no such option: others have it, or it is what a framework calls one of ours."""
    name = flag.lstrip("-").replace("-", "_")
    name = next((each for each, field in FIELDS.items() if field.also == flag.lstrip("-")), name)
    if name in FIELDS and FIELDS[name].in_doors:
        from flopcalc.setup.setup import explain_refusal  # imported lazily: only errors need it

        with use_spelling(spell_option):
            return explain_refusal(str(ctx.info_name), name)
    group = ctx.parent.command if ctx.parent is not None else None
    if _FOREIGN.get(name) in [own for option in ctx.command.params for own in option.opts]:
        return f"no such option {flag}: here it is {_FOREIGN[name]}"
    if not isinstance(group, click.Group):
        return None
    commands = {each: group.get_command(ctx, each) for each in group.list_commands(ctx)}
    others = [each for each, own in commands.items() if own and any(flag in option.opts for option in own.params)]
    return f"{ctx.info_name} takes no {flag}: {', '.join(others)} {'do' if others[1:] else 'does'}" if others else None


def list_groups(command: click.Command, ctx: click.Context) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sections of --help: the groups of the table, each with its options; one where the table has none of them."""
    options = [each for each in command.get_params(ctx) if isinstance(each, click.Option)]
    has_fields = any(isinstance(each, FieldOption) for each in options)
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*GROUPS.values(), "Options")}
    for option in options:
        record = option.get_help_record(ctx)
        if record is not None:
            sections[GROUPS[getattr(option, "group", "output")] if has_fields else "Options"].append(record)
    return [(title, records) for title, records in sections.items() if records]
