"""What is known in, text out: families, presets, coverage and devices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flopcalc.base.rows import shorten
from flopcalc.base.spelling import spell
from flopcalc.base.text_table import format_grid, format_text
from flopcalc.base.units import format_number, format_parameters

if TYPE_CHECKING:
    from flopcalc.core.model.names import LaunchIds
    from flopcalc.core.spec.coverage import Coverage
    from flopcalc.core.spec.registries import Registry
    from flopcalc.hardware.devices import Device

Entry = dict[str, Any]


def format_models(families: Sequence[Entry], presets: Sequence[Entry]) -> str:
    """Families and presets, a table each."""
    lines: list[str] = []
    if families:
        count = len({entry["model_type"] for entry in families})
        lines.append(f"{count} model type{'s' * (count != 1)} in {len(families)} class{'es' * (len(families) != 1)}")
        rows = [[entry["model_type"], entry["architecture"], entry["input"]] for entry in families]
        lines.append(format_grid(["model_type", "architecture", "input"], rows))
    if presets:
        if families:
            lines.append("")
        lines.append(f"{len(presets)} presets ({spell('json')} shows where each was read)")
        table = [
            [entry["name"], entry["model_type"], format_parameters(entry["parameters"]), ", ".join(entry["aliases"])]
            for entry in presets
        ]
        lines.append(format_grid(["preset", "model_type", "parameters", "also called"], table))
    return "\n".join(lines)


def format_family(family: Entry) -> str:
    """A family in full."""
    return _format_facts(family["model_type"], _describe_family(family))


def _describe_family(family: Entry) -> dict[str, str]:
    return {
        "class": family["architecture"],
        "input": family["input"],
        "counted by": f"spec {family['spec']}",
        "read in": family["reference"],
    }


def format_preset(preset: Entry, families: Sequence[Entry], like: Sequence[Entry]) -> str:
    """A preset in full, and the names of those `like` it."""
    counts, others = preset["parameters_by_kind"], [each["name"] for each in like if each["name"] != preset["name"]]
    kinds = [f"{value:,} {kind}" for kind, value in counts.items() if kind != "total" and value != counts["total"]]
    total = f"{format_parameters(counts['total'])} = {counts['total']:,}"
    facts = {
        "also called": ", ".join(preset["aliases"]),
        "hub id": preset["hub_id"] or "",
        "model type": preset["model_type"],
        **(_describe_family(families[0]) if families else {}),
        "parameters": "; ".join([total, *kinds]),
        "context": f"{preset['context']:,} tokens" if preset["context"] else "no limit known",
        **_describe_config(preset["config"]),
    }
    for key in ("preprocessor", "video_preprocessor"):
        if preset[key]:
            facts[key.replace("_", " ")] = _join(preset[key])
    return _format_facts(preset["name"], {**facts, "source": preset["source"], "see also": ", ".join(others)})


def _describe_config(config: Mapping[str, object]) -> dict[str, str]:
    """The config's plain values as one fact, and each part of it (vision_config) as one of its own."""
    parts = {key: value for key, value in config.items() if isinstance(value, dict)}
    return {
        "config": _join({key: value for key, value in config.items() if key not in parts}),
        **{key.replace("_", " "): _join(value) for key, value in parts.items()},
    }


def _join(values: Mapping[str, object]) -> str:
    """'hidden_size 3584, …'; a long list is shortened."""
    return ", ".join(f"{key} {shorten(json.dumps(value, ensure_ascii=False))}" for key, value in values.items())


def _format_facts(title: str, facts: Mapping[str, str]) -> str:
    shown = {label: text for label, text in facts.items() if text}
    width = max(map(len, shown)) + 2
    return "\n".join([title, *(format_text(text, label.ljust(width), " " * width) for label, text in shown.items())])


def format_coverage(coverage: Coverage, registries: Sequence[Registry], launched: Sequence[LaunchIds]) -> str:
    """Model types with a spec and without one, then registries and the ids of launch files."""
    title = f"{coverage.release}: what has a spec, of all that it names ({spell('json')} lists them)"
    lines = [format_text(title)]
    rows = [
        [mapping.auto_class, mapping.supported, len(mapping.entries), len(mapping.entries) - mapping.apart]
        for mapping in coverage.mappings
    ]
    header = ["mapping", "with a spec", "types", "that make images or videos"]
    shown = 4 if any(mapping.apart for mapping in coverage.mappings) else 3
    lines.append(format_grid(header[:shown], [row[:shown] for row in rows]))
    missing: dict[tuple[str, str], str] = {}
    for mapping in coverage.mappings:
        for entry in mapping.entries:
            if entry.spec is None:
                missing[(entry.model_type, entry.architecture)] = entry.reason or "not written yet"
    if missing:
        lines.append(f"\nWithout a spec ({spell('trace', True)} counts many of them from HF's own code):")
        lines.append(format_grid(["model_type", "class", "why"], [[*key, why] for key, why in sorted(missing.items())]))
    for registry in registries:
        lines += _format_registry(registry)
    if launched:
        title = "Model ids in published launch files and of the hub's tasks: those that find a preset"
        lines += ["", format_text(f"{title}; {spell('download', True)} reads the config of others")]
        rows = [
            [each.framework, each.date, len(each.presets) - len(each.missing), len(each.presets)] for each in launched
        ]
        lines.append(format_grid(["in", "date", "found", "all"], rows))
        found = {name: preset for each in launched for name, preset in each.presets.items()}
        rows = [[name, found[name] or "-"] for name in sorted(found, key=str.lower)]
        lines += ["", format_grid(["id", "preset"], rows)]
    return "\n".join(lines)


def _format_registry(registry: Registry) -> list[str]:
    """How many ids or classes of a registry are counted, then those that are not, with the reason."""
    share = f"{100 * registry.supported / registry.total:.1f} %"
    lines = ["", format_text(f"{registry.name}, {registry.date}: what it registers, and what is counted")]
    rows: list[list[object]] = [[registry.unit, registry.supported, registry.total, share]]
    if registry.untold:
        rows.append([f"{registry.unit} of an unknown type", "-", len(registry.untold), "-"])
    rows += [[group, "-", len(names), "-"] for group, names in registry.apart.items()]
    lines.append(format_grid(["", "counted", "all", "share"], rows, keys=1))
    missing = sorted((item for item in registry.items if item.spec is None), key=lambda item: (-item.size, item.name))
    if missing:
        lines.append("")
        table = [[item.name, item.size, item.reason or "not written yet"] for item in missing]
        lines.append(format_grid(["not counted", registry.unit, "why"], table, keys=1))
    return lines


def format_devices(shown: Sequence[Device], ambiguous: Sequence[str], defaults: Mapping[str, str]) -> str:
    """A table of devices, the short names that stand for one, and those that fit several."""
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
    title = f"Dense peaks in TFLOP/s, memory in GB, bandwidth in GB/s ({spell('json')} shows the sources)"
    lines = [format_text(title), format_grid(["id", "name", "bf16", "fp16", "fp8", "memory", "GB/s"], rows)]
    if defaults:
        taken = ", ".join(f"{short} = {device_id}" for short, device_id in defaults.items())
        lines.append(format_text(f"Short names: {taken}", rest="  "))
    if ambiguous:
        lines.append(format_text(f"Ambiguous short names: {', '.join(ambiguous)}", rest="  "))
    return "\n".join(lines)


def format_device(device: dict[str, Any]) -> str:
    """A device in full."""
    price = device["price"]
    predicted = "from steps measured on it" if device["has_predictor"] else "from its published figures"
    return _format_facts(
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
