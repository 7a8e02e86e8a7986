"""`flopcalc models` and `flopcalc devices`: what is known, all of it or one thing in full, with its sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from flopcalc.cli.command import Command
from flopcalc.cli.options import complete_device, complete_model
from flopcalc.errors import ConfigError, format_value
from flopcalc.grids import format_grid, format_text
from flopcalc.units import format_number, format_parameters

if TYPE_CHECKING:
    from flopcalc.cli.supported import Catalogue, Entry
    from flopcalc.core.spec.registries import Item, Registry
    from flopcalc.hardware.devices import Device


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_model, metavar="[NAME]")
@click.option(
    "--coverage",
    is_flag=True,
    help="Every model type in transformers and public registries: its spec, or why there is none.",
)
@click.option("--json", "as_json", is_flag=True, help="All of it, with sources.")
def models(name: str | None, coverage: bool, as_json: bool) -> None:
    """Supported model families and presets.

    NAME lists those with NAME in their name. If there is only one, it is shown in full. Examples:

      flopcalc models qwen

      flopcalc models qwen2-vl-7b
    """
    if coverage:
        _show_coverage(name, as_json)
        return
    from flopcalc.cli.supported import describe_whole, load_catalogue

    found = load_catalogue()
    if name is not None:
        found = found.find(name)
        if len(found.presets) == 1:
            found = found._replace(presets=[describe_whole(found.presets[0])])
    if as_json:
        click.echo(json.dumps(found._asdict(), indent=2, ensure_ascii=False))
    elif name is not None and len(found.presets) == 1:
        _show_preset(found.presets[0], found.families)
    elif len(found.families) == 1 and not found.presets:
        _show_facts(found.families[0]["model_type"], _describe_family(found.families[0]))
    else:
        _list_models(found)


def _list_models(found: Catalogue) -> None:
    if found.families:
        count = len({entry["model_type"] for entry in found.families})
        click.echo(f"{count} model type{'s' * (count != 1)} in {len(found.families)} class{'es' * (count != 1)}")
        rows = [[entry["model_type"], entry["architecture"], entry["input"]] for entry in found.families]
        click.echo(format_grid(["model_type", "architecture", "input"], rows))
    if found.presets:
        if found.families:
            click.echo("")
        click.echo(f"{len(found.presets)} presets (--json shows where each was read)")
        table = [
            [entry["name"], entry["model_type"], format_parameters(entry["parameters"]), ", ".join(entry["aliases"])]
            for entry in found.presets
        ]
        click.echo(format_grid(["preset", "model_type", "parameters", "also called"], table))


def _describe_family(family: Entry) -> dict[str, str]:
    return {
        "class": family["architecture"],
        "input": family["input"],
        "counted by": f"spec {family['spec']}",
        "read in": family["reference"],
    }


def _show_preset(preset: Entry, families: list[Entry]) -> None:
    counts = preset["parameters_by_kind"]
    others = [f"{value:,} {kind}" for kind, value in counts.items() if kind != "total" and value != counts["total"]]
    total = f"{format_parameters(counts['total'])} = {counts['total']:,}"
    facts = {
        "also called": ", ".join(preset["aliases"]),
        "hub id": preset["hub_id"] or "",
        "model type": preset["model_type"],
        **(_describe_family(families[0]) if families else {}),
        "parameters": "; ".join([total, *others]),
        "context": f"{preset['context']:,} tokens" if preset["context"] else "no limit known",
        **_describe_config(preset["config"]),
    }
    for key in ("preprocessor", "video_preprocessor"):
        if preset[key]:
            facts[key.replace("_", " ")] = _join(preset[key])
    _show_facts(preset["name"], {**facts, "source": preset["source"]})


def _describe_config(config: Mapping[str, object]) -> dict[str, str]:
    """The config's plain values as one fact, and each part of it (vision_config) as one of its own."""
    parts = {key: value for key, value in config.items() if isinstance(value, dict)}
    return {
        "config": _join({key: value for key, value in config.items() if key not in parts}),
        **{key.replace("_", " "): _join(value) for key, value in parts.items()},
    }


def _join(values: Mapping[str, object]) -> str:
    """'hidden_size 3584, …'; a long list is shortened."""
    return ", ".join(f"{key} {_shorten(json.dumps(value, ensure_ascii=False))}" for key, value in values.items())


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"


def _show_facts(title: str, facts: Mapping[str, str]) -> None:
    click.echo(title)
    shown = {label: text for label, text in facts.items() if text}
    width = max(map(len, shown)) + 2
    for label, text in shown.items():
        click.echo(format_text(text, label.ljust(width), " " * width))


def _show_coverage(name: str | None, as_json: bool) -> None:
    from flopcalc.core.spec.coverage import load_coverage
    from flopcalc.core.spec.registries import load_registries

    found = load_coverage()
    registries = load_registries()
    if name is not None:
        registries = [
            registry._replace(items=items)
            for registry in registries
            if (items := tuple(item for item in registry.items if _is_named(item, name.lower())))
        ]
        kept = [
            mapping._replace(entries=tuple(entry for entry in mapping.entries if name.lower() in entry.model_type))
            for mapping in found.mappings
        ]
        found = found._replace(mappings=tuple(mapping for mapping in kept if mapping.entries))
        if not found.mappings and not registries:
            raise ConfigError(f"no model type of {found.release} has {format_value(name)} in its name")
    if as_json:
        mappings = [
            {
                "auto_class": mapping.auto_class,
                "supported": mapping.supported,
                "types": [entry._asdict() for entry in mapping.entries],
            }
            for mapping in found.mappings
        ]
        shown = {
            "release": found.release, "mappings": mappings, "registries": [each.to_dict() for each in registries],
        }  # fmt: skip
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    title = f"{found.release}: model types with a spec, of those in its auto mappings (--json lists them)"
    click.echo(format_text(title))
    rows = [[mapping.auto_class, mapping.supported, len(mapping.entries)] for mapping in found.mappings]
    click.echo(format_grid(["mapping", "with a spec", "types"], rows))
    missing: dict[tuple[str, str], str] = {}
    for mapping in found.mappings:
        for entry in mapping.entries:
            if entry.spec is None:
                missing[(entry.model_type, entry.architecture)] = entry.reason or "not written yet"
    if missing:
        click.echo("\nWithout a spec (--trace counts many of them from HF's own code):")
        click.echo(format_grid(["model_type", "class", "why"], [[*key, why] for key, why in sorted(missing.items())]))
    for registry in registries:
        _show_registry(registry)


def _is_named(item: Item, text: str) -> bool:
    return any(text in each.lower() for each in (item.name, *item.architectures, *item.ids))


def _show_registry(registry: Registry) -> None:
    """How many ids or classes of a registry are counted, then those that are not, with the reason."""
    share = f"{100 * registry.supported / registry.total:.1f} %"
    click.echo("")
    click.echo(format_text(f"{registry.name}, {registry.date}: what it registers, and what is counted"))
    rows: list[list[object]] = [[registry.unit, registry.supported, registry.total, share]]
    if registry.untold:
        rows.append([f"{registry.unit} of an unknown type", "-", len(registry.untold), "-"])
    rows += [[group, "-", len(names), "-"] for group, names in registry.apart.items()]
    click.echo(format_grid(["", "counted", "all", "share"], rows, keys=1))
    missing = sorted((item for item in registry.items if item.spec is None), key=lambda item: (-item.size, item.name))
    if missing:
        click.echo("")
        table = [[item.name, item.size, item.reason or "not written yet"] for item in missing]
        click.echo(format_grid(["not counted", registry.unit, "why"], table, keys=1))


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

    known, ambiguous = load_devices()
    shown = list(known)
    if name is not None:
        shown = match_devices(name) or [find_device(name, needs_all=True)]  # which says what is like it
        ids = {device.id for device in shown}
        ambiguous = {short: listed for short, listed in ambiguous.items() if ids & set(listed)}
    described = [asdict(device) for device in shown]
    is_one = name is not None and len(shown) == 1
    if is_one:
        described[0] |= _describe_use(shown[0])
    if as_json:
        click.echo(json.dumps({"devices": described, "ambiguous": ambiguous}, indent=2, ensure_ascii=False))
    elif is_one:
        _show_device(described[0])
    else:
        _list_devices(shown, list(ambiguous))


def _list_devices(shown: list[Device], ambiguous: list[str]) -> None:
    rows = [
        [
            device.id,
            device.name,
            *(format_number(device.peak_tflops.get(dtype)) for dtype in ("bf16", "fp16", "fp8")),
            format_number(device.memory_gb),
            format_number(device.bandwidth_gb_per_s),
        ]
        for device in shown
    ]
    title = "Dense peaks in TFLOP/s, memory in GB, bandwidth in GB/s (--json shows the sources)"
    click.echo(format_text(title))
    click.echo(format_grid(["id", "name", "bf16", "fp16", "fp8", "memory", "GB/s"], rows))
    if ambiguous:
        click.echo(format_text(f"Ambiguous short names: {', '.join(ambiguous)}", rest="  "))


def _describe_use(device: Device) -> dict[str, Any]:
    """What plans and predictions know of a device: its price, what joins several, what was measured on it."""
    from flopcalc.hardware.tables import list_tables
    from flopcalc.planning.money import find_price
    from flopcalc.planning.network import load_interconnects
    from flopcalc.prediction.constants import load_predictor

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


def _show_device(device: dict[str, Any]) -> None:
    price = device["price"]
    predicted = "from steps measured on it" if device["has_predictor"] else "from its published figures"
    _show_facts(
        device["id"],
        {
            "name": device["name"],
            "also called": ", ".join(device["aliases"]),
            "dense peaks": ", ".join(f"{dtype} {peak:g}" for dtype, peak in device["peak_tflops"].items()) + " TFLOP/s",
            "memory": f"{format_number(device['memory_gb'])} GB",
            "bandwidth": f"{format_number(device['bandwidth_gb_per_s'])} GB/s",
            "power": f"{format_number(device['tdp_w'])} W",
            "SDPA's kernel": device["sdpa"] or "not known",
            "price": "not known"
            if price is None
            else f"{price['usd_per_gpu_hour']:g} USD per GPU-hour, {price['source']}",
            "interconnect": "; ".join(f"{each['id']}: {each['name']}" for each in device["interconnects"])
            or "not known",
            "predictions": predicted,
            "tables": ", ".join(device["tables"]) or "none",
            "source": f"{device['source']} ({device['date']})",
        },
    )
