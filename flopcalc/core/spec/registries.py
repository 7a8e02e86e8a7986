"""Which ids and classes of public registries are counted, by which spec or alias, and why the others are not."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir, list_data_files, load_toml
from flopcalc.core.spec.aliases import find_alias, list_aliases
from flopcalc.core.spec.coverage import load_coverage
from flopcalc.core.spec.spec import find_spec, load_spec

FOLDER = "registries"
_APART = ("drafts", "generic")  # groups of classes that are no models of their own
# Endings of the classes that specs describe: what is left is the family's name.
_ENDINGS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForPreTraining",
    "ForImageClassification",
    "ForSpeechSeq2Seq",
    "WithLMHeadModel",
    "Model",
)


class Item(NamedTuple):
    """A registry's own type with its ids, or one class."""

    name: str
    architectures: tuple[str, ...]
    size: int  # ids, or 1 for a class
    spec: str | None  # the spec or alias that counts it
    reason: str | None  # why none does
    ids: tuple[str, ...] = ()


class Registry(NamedTuple):
    """A dated snapshot of what a registry names."""

    name: str
    source: str
    commit: str
    date: str
    unit: str  # what is counted: ids, or architectures
    items: tuple[Item, ...]
    untold: tuple[str, ...]  # ids whose class the registry does not name
    apart: dict[str, tuple[str, ...]]  # drafts, and classes that stand for any model

    @property
    def total(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def supported(self) -> int:
        return sum(item.size for item in self.items if item.spec is not None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "registry": self.name, "source": self.source, "commit": self.commit, "date": self.date, "unit": self.unit,
            "supported": self.supported, "total": self.total, "share": self.supported / self.total,
            "types": [{**item._asdict(), "architectures": list(item.architectures), "ids": list(item.ids)}
                      for item in self.items],
            "untold": list(self.untold),
            **{group: list(names) for group, names in self.apart.items()},
        }  # fmt: skip


def load_registries() -> list[Registry]:
    """Every snapshot in model_specs/registries, each entry with what counts it or the reason why nothing does."""
    files = list_data_files(FOLDER)
    told = load_toml(files.pop("classes"))
    classes = _Classes(told.get("same", {}))
    reasons: dict[str, str] = told.get("reasons", {})
    return [_read(load_toml(path), classes, reasons) for path in files.values()]


def _read(tables: dict[str, Any], classes: _Classes, reasons: dict[str, str]) -> Registry:
    items: list[Item] = []
    untold: list[str] = []
    for entry in tables.get("types", ()):
        names, ids = tuple(entry["architectures"]), tuple(entry["ids"])
        if not names:
            untold += ids
            continue
        model_type = entry.get("model_type")
        found = classes.find_type(model_type) if model_type is not None else classes.find_any(names)
        told = (entry["name"], *names) if model_type is None else (model_type, entry["name"], *names)
        why = None if found else next((reasons[key] for key in told if key in reasons), None)
        items.append(Item(entry["name"], names, len(ids), found, why, ids))
    groups: dict[str, list[str]] = tables.get("groups", {})
    for name in (name for group, names in groups.items() if group not in _APART for name in names):
        found = classes.find(name)
        items.append(Item(name, (name,), 1, found, None if found else reasons.get(name)))
    apart = {group: tuple(groups[group]) for group in _APART if group in groups}
    return Registry(
        tables["registry"],
        tables["source"],
        tables["commit"],
        tables["date"],
        tables["unit"],
        tuple(items),
        tuple(untold),
        apart,
    )


class _Classes:
    """Class names and the specs or aliases that count them, read from the data as it is now."""

    def __init__(self, same: dict[str, str]) -> None:
        self.same = same
        self.known: dict[str, str] = {}
        for name, path in list_data_files("specs").items():
            spec = load_spec(path)
            if spec.is_tower:
                continue
            self.known[_plain(spec.architecture)] = name
            self.known.update({_plain(each): variant for each, variant in spec.variants.items()})
        for mapping in load_coverage().mappings:
            for entry in mapping.entries:
                if entry.spec is not None:
                    self.known.setdefault(_plain(entry.architecture), entry.spec)
        self.stems = {_plain(_cut(name, _ENDINGS)): spec for name, spec in self._list_written()}
        path = os.path.join(find_data_dir(), "heads.toml")
        self.endings: dict[str, str] = load_toml(path)["endings"] if os.path.isfile(path) else {}
        self.aliased = {
            foreign: (alias.name, known)
            for alias in list_aliases().values()
            if alias.witness
            for foreign, known in alias.architectures.items()
        }

    @staticmethod
    def _list_written() -> list[tuple[str, str]]:
        written = [
            (entry.architecture, entry.spec) for mapping in load_coverage().mappings for entry in mapping.entries
        ]
        written += [(load_spec(path).architecture, name) for name, path in list_data_files("specs").items()]
        return [(name, spec) for name, spec in written if spec is not None]

    def find_any(self, names: tuple[str, ...]) -> str | None:
        return next((found for name in names if (found := self.find(name)) is not None), None)

    def find_type(self, model_type: str) -> str | None:
        """A model type that the snapshot distinguishes from others with the same class."""
        alias = find_alias(model_type)
        if alias is not None:
            return alias.name if alias.witness else None
        spec = find_spec(model_type)
        return spec.name if spec is not None and not spec.is_tower else None

    def find(self, name: str) -> str | None:
        """What counts a class: a spec, an alias whose known class is counted, or a head on a body that is."""
        if name in self.aliased:
            alias, known = self.aliased[name]
            return alias if self.find_known(self.same.get(known, known)) is not None else None
        return self.find_known(self.same.get(name, name))

    def find_known(self, name: str) -> str | None:
        found = self.known.get(_plain(name))
        if found is not None:
            return found
        ending = max((each for each in self.endings if name.endswith(each)), key=len, default=None)
        if ending is None or self.endings[ending] == "lm":
            return None
        stem = _plain(name.removesuffix(ending))
        return self.stems.get(stem) or self.stems.get(stem.removesuffix("text"))


def _cut(name: str, endings: tuple[str, ...]) -> str:
    ending = max((each for each in endings if name.endswith(each)), key=len, default="")
    return name.removesuffix(ending)


def _plain(name: str) -> str:
    """Remote code and releases differ in underscores and case alone."""
    return name.replace("_", "").lower()
