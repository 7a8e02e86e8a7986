"""`flopcalc models` and `flopcalc devices`: what is known, with its sources."""

from __future__ import annotations

import json

import click

from flopcalc.api import bind
from flopcalc.cli.command import Command
from flopcalc.core.model.config import load_preset
from flopcalc.core.spec.coverage import describe_specs, load_coverage
from flopcalc.data import list_data_files, load_toml
from flopcalc.grids import format_grid
from flopcalc.hardware.devices import load_devices
from flopcalc.units import format_number, format_parameters


@click.command(cls=Command)
@click.option("--coverage", is_flag=True, help="Every type of transformers' auto mappings, with its spec or why none.")
@click.option("--json", "as_json", is_flag=True, help="All of it, with sources.")
def models(coverage: bool, as_json: bool) -> None:
    """What is supported: families and presets."""
    if coverage:
        _show_coverage(as_json)
        return
    described_specs = describe_specs()
    # A spec that another takes instead of itself for some class (llama4-causal) is no model type of its own.
    bases = {
        variant: name
        for name, described in described_specs.items()
        for variant in described.spec.variants.values()
        if variant.startswith(f"{name}-")
    }
    families = [
        {
            "model_type": bases.get(name, name),
            "spec": name,
            "architecture": described.spec.architecture,
            "input": described.inputs,
            "reference": described.spec.source,
        }
        for name, described in described_specs.items()
    ]
    presets = []
    aliases: dict[str, list[str]] = {}
    for name, path in list_data_files("presets").items():
        tables = load_toml(path)
        if "alias" in tables:
            aliases.setdefault(tables["alias"], []).append(name)
            continue
        source = load_preset(path)
        presets.append(
            {
                "name": name,
                "model_type": source.config["model_type"],
                "parameters": bind(source).parameters()["total"],
                "hub_id": tables.get("hub_id"),
                "source": source.reference,
            }
        )
    for preset in presets:
        preset["aliases"] = aliases.get(str(preset["name"]), [])
    if as_json:
        click.echo(json.dumps({"families": families, "presets": presets}, indent=2, ensure_ascii=False))
        return
    count = len({entry["model_type"] for entry in families})
    click.echo(f"{count} model types in {len(families)} classes")
    rows = [[entry["model_type"], entry["architecture"], entry["input"]] for entry in families]
    click.echo(format_grid(["model_type", "architecture", "input"], rows))
    click.echo(f"\n{len(presets)} presets (--json shows where each was read)")
    table = []
    for preset in presets:
        also = preset["aliases"]
        assert isinstance(also, list)
        table.append(
            [preset["name"], preset["model_type"], format_parameters(int(str(preset["parameters"]))), ", ".join(also)]
        )
    click.echo(format_grid(["preset", "model_type", "parameters", "also called"], table))


def _show_coverage(as_json: bool) -> None:
    found = load_coverage()
    if as_json:
        mappings = [
            {
                "auto_class": mapping.auto_class,
                "supported": mapping.supported,
                "types": [entry._asdict() for entry in mapping.entries],
            }
            for mapping in found.mappings
        ]
        click.echo(json.dumps({"release": found.release, "mappings": mappings}, indent=2, ensure_ascii=False))
        return
    click.echo(f"{found.release}: model types with a spec, of those in its auto mappings (--json lists them)")
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


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="All of it, with sources.")
def devices(as_json: bool) -> None:
    """Known devices and their dense peaks."""
    known, ambiguous = load_devices()
    if as_json:
        shown = {"devices": [device._asdict() for device in known], "ambiguous": ambiguous}
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    rows = [
        [
            device.id,
            device.name,
            *(format_number(device.peak_tflops.get(dtype)) for dtype in ("bf16", "fp16", "fp8")),
            format_number(device.memory_gb),
            format_number(device.bandwidth_gb_per_s),
        ]
        for device in known
    ]
    click.echo("Dense peaks in TFLOP/s, memory in GB, bandwidth in GB/s (--json shows the sources)")
    click.echo(format_grid(["id", "name", "bf16", "fp16", "fp8", "memory", "GB/s"], rows))
    click.echo("Ambiguous short names: " + ", ".join(ambiguous))
