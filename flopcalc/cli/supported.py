"""Model types and presets as data: read from model_specs/catalogue.json, or computed where the user has their own."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcalc.base.data import find_data_dir, find_user_dir, get_stem, list_data_files, load_toml
from flopcalc.base.errors import ConfigError, format_nearest, format_value
from flopcalc.core.model.names import find_preset

if TYPE_CHECKING:
    from flopcalc.core.estimate.estimate import Estimator
    from flopcalc.core.model.config import Source

Entry = dict[str, Any]
FILE = "catalogue.json"  # made by docs/make_models.py: binding every preset takes seconds


class Catalogue(NamedTuple):
    """What is supported."""

    families: list[Entry]
    presets: list[Entry]

    def find(self, text: str) -> Catalogue:
        """The preset of exactly this name, alias or hub id and its model type; else all that have it in their names."""
        wanted = _plain(text)
        if "/" in text and (named := find_preset(text)) is not None:
            wanted = _plain(get_stem(named.path))
        for preset in self.presets:
            if wanted in [_plain(name) for name in (preset["name"], preset["hub_id"], *preset["aliases"]) if name]:
                return self._take_one(preset)
        families = [entry for entry in self.families if _contains(wanted, entry["model_type"], entry["spec"])]
        presets = self.list_like(text)
        if not families and not presets:
            known = [*(entry["name"] for entry in self.presets), *(entry["model_type"] for entry in self.families)]
            near = format_nearest(text, known)
            raise ConfigError(
                f"no model type or preset has {format_value(text)} in its name.{near} `flopcalc models` lists all"
            )
        return self._take_one(presets[0]) if len(presets) == 1 else Catalogue(families, presets)

    def list_like(self, text: str) -> list[Entry]:
        """The presets that have it in their names."""
        return [
            entry
            for entry in self.presets
            if _contains(_plain(text), entry["name"], entry["hub_id"], entry["model_type"], *entry["aliases"])
        ]

    def _take_one(self, preset: Entry) -> Catalogue:
        return Catalogue([entry for entry in self.families if entry["spec"] == preset["spec"]], [preset])


def load_catalogue() -> Catalogue:
    """Everything that is supported; computed, in seconds, where the user's folder has specs or presets."""
    for folder in ("specs", "presets"):
        own = os.path.join(find_user_dir(), folder)
        if os.path.isdir(own) and any(name.endswith(".toml") for name in os.listdir(own)):
            return make_catalogue()
    with open(os.path.join(find_data_dir(), FILE), encoding="utf-8") as file:
        return Catalogue(**json.load(file))


def make_catalogue() -> Catalogue:
    """The same from the files of all specs and presets."""
    from flopcalc.core.spec.coverage import describe_specs

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
    presets: dict[str, Entry] = {}
    aliases: dict[str, list[str]] = {}
    for name, path in list_data_files("presets").items():
        tables = load_toml(path)
        if "alias" in tables:
            aliases.setdefault(tables["alias"], []).append(name)
        else:
            presets[name] = _describe_preset(name, path, tables.get("hub_id"))
    for name, preset in presets.items():
        preset["aliases"] = aliases.get(name, [])
    return Catalogue(families, list(presets.values()))


def _describe_preset(name: str, path: str, hub_id: str | None) -> Entry:
    from flopcalc.core.model.config import load_preset

    source = load_preset(path)
    estimator = _bind(source)
    return {
        "name": name,
        "model_type": source.config.get("model_type") or source.config["_class_name"],
        "parameters": estimator.parameters()["total"],
        "hub_id": hub_id,
        "source": source.reference,
        "spec": estimator.spec.name,
    }


def describe_whole(preset: Entry) -> Entry:
    """A preset with everything that is known of it."""
    from flopcalc.core.estimate.counted import CountedEstimator
    from flopcalc.core.model.config import load_config

    source = load_config(preset["name"])
    estimator = _bind(source)
    return {
        **preset,
        "parameters_by_kind": estimator.parameters(),
        "context": (estimator.model.position_limit if isinstance(estimator, CountedEstimator) else 0) or None,
        "config": source.config,
        "preprocessor": source.preprocessor,
        "video_preprocessor": source.video_preprocessor,
    }


def _bind(source: Source) -> Estimator:
    from flopcalc.api import bind

    return bind(source)


def _contains(wanted: str, *names: str | None) -> bool:
    return any(wanted in _plain(name) for name in names if name)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()
