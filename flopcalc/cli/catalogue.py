"""`flopcalc models` and `flopcalc devices`: what is known, all of it or one thing in full, with its sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flopcalc.base.errors import ConfigError, format_value
from flopcalc.cli.command import Command
from flopcalc.cli.options import complete_device, complete_model
from flopcalc.cli.streams import show_json
from flopcalc.report import catalogue as report

if TYPE_CHECKING:
    from flopcalc.core.model.names import LaunchIds
    from flopcalc.hardware.devices import Device


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_model, metavar="[NAME]")
@click.option(
    "--coverage",
    is_flag=True,
    help="Every model type in transformers and public registries: its spec, or why there is none. Then the model ids "
    "in published launch files and of the hub's tasks, with the preset of each. With NAME diffusers: its classes and "
    "pipelines.",
)
@click.option("--json", "as_json", is_flag=True, help="All of it, with sources.")
def models(name: str | None, coverage: bool, as_json: bool) -> None:
    """Supported model families and presets.

    NAME lists those with NAME in their name. A preset's own name, or the only one found, is shown in full. Examples:

      flopcalc models qwen

      flopcalc models qwen2-vl-7b
    """
    if coverage:
        _show_coverage(name, as_json)
        return
    from flopcalc.cli.supported import describe_whole, load_catalogue

    known = found = load_catalogue()
    if name is not None:
        found = known.find(name)
        if len(found.presets) == 1:
            found = found._replace(presets=[describe_whole(found.presets[0])])
    if as_json:
        show_json(found._asdict())
    elif name is not None and len(found.presets) == 1:
        click.echo(report.format_preset(found.presets[0], found.families, known.list_like(name)))
    elif len(found.families) == 1 and not found.presets:
        click.echo(report.format_family(found.families[0]))
    else:
        click.echo(report.format_models(found.families, found.presets))


def _show_coverage(name: str | None, as_json: bool) -> None:
    from flopcalc.core.model.names import load_launch_ids
    from flopcalc.core.spec.coverage import DIFFUSERS, load_coverage
    from flopcalc.core.spec.registries import load_registries

    is_diffusion = name == "diffusers"
    found = load_coverage(*([DIFFUSERS] if is_diffusion else []))
    registries = [] if is_diffusion else load_registries()
    launched = [] if is_diffusion else load_launch_ids()
    if name is not None and not is_diffusion:
        registries = [
            registry._replace(items=items)
            for registry in registries
            if (
                items := tuple(
                    item
                    for item in registry.items
                    if any(name.lower() in each.lower() for each in (item.name, *item.architectures, *item.ids))
                )
            )
        ]
        kept = [
            mapping._replace(entries=tuple(entry for entry in mapping.entries if name.lower() in entry.model_type))
            for mapping in found.mappings
        ]
        found = found._replace(mappings=tuple(mapping for mapping in kept if mapping.entries))
        launched = [named for each in launched if (named := _keep_named(each, name.lower())).presets]
        if not found.mappings and not registries and not launched:
            raise ConfigError(f"no model type of {found.release} has {format_value(name)} in its name")
    if as_json:
        mappings = [
            {
                "auto_class": mapping.auto_class,
                "supported": mapping.supported,
                "apart": mapping.apart,
                "types": [entry._asdict() for entry in mapping.entries],
            }
            for mapping in found.mappings
        ]
        shown = {
            "release": found.release,
            "mappings": mappings,
            "registries": [each.to_dict() for each in registries],
            "launch_ids": [each._asdict() for each in launched],
        }
        show_json(shown)
        return
    click.echo(report.format_coverage(found, registries, launched))


def _keep_named(found: LaunchIds, text: str) -> LaunchIds:
    return found._replace(presets={name: each for name, each in found.presets.items() if text in name.lower()})


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_device, metavar="[NAME]")
@click.option("--json", "as_json", is_flag=True, help="All of it, with sources.")
def devices(name: str | None, as_json: bool) -> None:
    """Known GPUs and other devices, with their dense peaks.

    NAME lists those with NAME in their name. If there is only one, it is shown in full. Examples:

      flopcalc devices a100

      flopcalc devices b200
    """
    from dataclasses import asdict

    from flopcalc.hardware.devices import find_device, load_devices, match_devices

    known, ambiguous, defaults = load_devices()
    shown = list(known)
    if name is not None:
        shown = match_devices(name) or [find_device(name)]  # which says what is like it
        ids = {device.id for device in shown}
        ambiguous = {short: listed for short, listed in ambiguous.items() if ids & set(listed)}
        defaults = {short: each for short, each in defaults.items() if each in ids}
    described = [{key: value for key, value in asdict(device).items() if key != "note"} for device in shown]
    is_one = name is not None and len(shown) == 1
    if is_one:
        described[0] |= _describe_use(shown[0])
    if as_json:
        found = {"devices": described, "ambiguous": ambiguous, "defaults": defaults}
        show_json(found)
    elif is_one:
        click.echo(report.format_device(described[0]))
    else:
        chosen = {short.replace("-", "") for short in defaults}
        click.echo(report.format_devices(shown, [short for short in ambiguous if short not in chosen], defaults))


def _describe_use(device: Device) -> dict[str, Any]:
    """What plans and predictions know of a device: its price, what joins several, what was measured on it."""
    from flopcalc.hardware.prices import find_price
    from flopcalc.hardware.tables import list_tables
    from flopcalc.planning.network import load_interconnects
    from flopcalc.prediction.kernels.constants import load_predictor

    price = find_price(device, None)
    return {
        "price": None if price is None else price._asdict(),
        "interconnects": [
            {"id": each.id, "name": each.name, "source": each.source}
            for each in load_interconnects().values()
            if device.id in each.devices
        ],
        "tables": list(list_tables().get(device.id, ())),
        "has_predictor": load_predictor(device.id) is not None,
    }
