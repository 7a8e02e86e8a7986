"""Which model types of transformers' auto mappings, and which classes of diffusers, are counted, and why others not."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir, list_data_files, load_toml
from flopcalc.core.spec.merge import list_pipelines
from flopcalc.core.spec.spec import Spec, find_spec, load_spec


class CoveredType(NamedTuple):
    """One model type of a mapping."""

    model_type: str
    architecture: str  # the HF class that the mapping names
    spec: str | None  # the spec that counts this class
    reason: str | None  # why there is none


class AutoMapping(NamedTuple):
    """One auto mapping of transformers."""

    name: str
    auto_class: str
    entries: tuple[CoveredType, ...]
    left_out: tuple[str, ...] = ()  # reasons of what makes no images or videos by itself: audio, blocks of other models

    @property
    def supported(self) -> int:
        return sum(entry.spec is not None for entry in self.entries)

    @property
    def apart(self) -> int:
        return sum(entry.spec is None and entry.reason in self.left_out for entry in self.entries)


class Coverage(NamedTuple):
    """All mappings of one release."""

    release: str
    mappings: tuple[AutoMapping, ...]


DIFFUSERS = "coverage_diffusers"
PIPELINES = "pipelines"  # a mapping whose types are pipelines, each with the class of its denoiser


def load_coverage(name: str = "coverage") -> Coverage:
    """The mappings of model_specs/coverage.toml, each type with its spec or the reason why it has none."""
    tables = load_toml(os.path.join(find_data_dir(), f"{name}.toml"))
    reasons: dict[str, str] = tables.get("reasons", {})
    described = list_pipelines() if PIPELINES in tables["mappings"] else {}
    mappings = tuple(
        AutoMapping(
            name,
            mapping["auto_class"],
            tuple(
                _find(model_type, architecture, reasons.get(model_type))
                if name != PIPELINES
                else _find_pipeline(model_type, architecture, reasons.get(model_type), described)
                for model_type, architecture in mapping["types"].items()
            ),
            tuple(tables.get("apart", ())),
        )
        for name, mapping in tables["mappings"].items()
    )
    return Coverage(tables["release"], mappings)


def _find(model_type: str, architecture: str, reason: str | None) -> CoveredType:
    spec = find_spec(model_type)
    if spec is None:
        return CoveredType(model_type, architecture, None, reason)
    if spec.architecture == architecture:
        return CoveredType(model_type, architecture, spec.name, None)
    return CoveredType(model_type, architecture, spec.variants.get(architecture), reason)


def _find_pipeline(name: str, denoiser: str, reason: str | None, described: Collection[str]) -> CoveredType:
    if name in described:
        return CoveredType(name, denoiser, name, None)
    has_spec = find_spec(denoiser) is not None
    return CoveredType(name, denoiser, None, reason or (None if has_spec else f"no spec of {denoiser or 'its parts'}"))


class SpecSummary(NamedTuple):
    """A spec for readers: what it takes, and what it was derived from."""

    spec: Spec
    inputs: str
    parents: tuple[str, ...]


def describe_specs() -> dict[str, SpecSummary]:
    """Every spec that is a model by itself, by name."""
    found = {}
    for name, path in list_data_files("specs").items():
        spec = load_spec(path)
        if spec.is_tower:
            continue
        kinds = [*(["images"] if spec.vision else []), *(["audio"] if spec.audio else [])]
        kinds = kinds if spec.vision.get("text") == "none" else ["text", *kinds]
        found[name] = SpecSummary(spec, ", ".join(kinds), tuple(_list_parents(path)))
    return found


def _list_parents(path: str) -> list[str]:
    parents: list[str] = []
    tables: dict[str, Any] = load_toml(path)
    files = list_data_files("specs")
    while "extends" in tables:
        parents.append(tables["extends"])
        tables = load_toml(files[tables["extends"]])
    return parents
