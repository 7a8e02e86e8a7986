"""A hub id, or a name that is no file, finds the preset with its sizes; an unknown word in it finds none.

The last words of a quantized release (-AWQ, -Q4_K_M.gguf) say how its weights are stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir, get_stem, list_data_files, load_toml
from flopcalc.base.errors import SpecError
from flopcalc.base.files import MAX_TOML_BYTES, read_text

_KEY = r"""(?m)^(hub_id|alias)\s*=\s*["']([^"']+)["']"""


class NamedPreset(NamedTuple):
    """The preset that a name stands for."""

    path: str
    shared: str  # what it has in common with the model of that name
    quantized: dict[str, Any] | None = None  # of a quantized release: what it `says`, and its `config` or `weights`


def find_preset(name: str) -> NamedPreset | None:
    """The preset of a hub id, else of its name without words that change no sizes (model_specs/hub_names.toml)."""
    return _Names().find(name)


def list_names() -> dict[str, str]:
    """Every preset and alias, and the last part of every hub id -> the preset."""
    named = _Names()
    own = {preset: preset for preset in named.files}
    return {**own, **{tail: preset for each, preset in named.ids.items() if (tail := each.split("/")[-1]) not in own}}


class _Names:
    """All names that presets are found by."""

    def __init__(self) -> None:
        self.files = list_data_files("presets")
        self.rules = load_toml(os.path.join(find_data_dir(), "hub_names.toml"))
        self.ids, self.reduced = dict[str, str](), dict[str, str](self.rules["same"])
        named = _read_ids(self.files)
        for preset, hub_id in named.items():
            self.ids[hub_id] = preset
            self.reduced[self._reduce(hub_id, self.rules["words"])] = preset
        self.reduced |= {preset: preset for preset in named}

    def find(self, name: str) -> NamedPreset | None:
        exact = self.ids.get(name.lower())
        if exact is not None:
            return NamedPreset(self.files[exact], "same config")
        whole = self._reduce(name, ())
        preset = self.reduced.get(self._reduce(name, self.rules["words"]))
        if preset is not None:
            is_other = whole in self.rules["different"]
            return None if is_other else NamedPreset(self.files[preset], "same layer sizes")
        kinds, maker = self.rules["quantized"], name.partition("/")[0].lower()
        named = re.sub(rf"(-({'|'.join(self.rules['beside'])}))+$", "", whole)
        ending = max((each for each in kinds if named.endswith((f"-{each}", f".{each}"))), key=len, default=None)
        base = self.find(named[: -len(ending) - 1]) if ending else None
        return base and base._replace(quantized=kinds.get(f"{maker}/{ending}", kinds[ending]))

    def _reduce(self, name: str, words: Collection[str]) -> str:
        """'meta-llama/Meta-Llama-3-8B-Instruct' -> 'llama-3-8b'; a name without a figure (modernbert-base) stays."""
        bare = name.rpartition("/")[2].lower().removesuffix(".gguf").replace(":", "-")
        whole = re.sub(r"(?<=\d)_(?=\d)", ".", bare).replace("_", "-")
        for prefix in self.rules["prefixes"]:
            whole = whole.removeprefix(prefix)
        first, *others = whole.split("-")
        reduced = "-".join([first, *(word for word in others if word not in words)])
        return reduced if re.search(r"\d", reduced) else whole


class LaunchIds(NamedTuple):
    """The model ids in a framework's published launch files, and the preset of each that has one."""

    framework: str
    source: str
    commit: str
    date: str
    presets: dict[str, str | None]

    @property
    def missing(self) -> list[str]:
        return [each for each, preset in self.presets.items() if preset is None]


def load_launch_ids() -> list[LaunchIds]:
    """Every framework of model_specs/launch_ids.toml."""
    tables, names = load_toml(os.path.join(find_data_dir(), "launch_ids.toml"))["frameworks"], _Names()
    return [
        LaunchIds(
            entry["name"],
            entry["source"],
            entry["commit"],
            entry["date"],
            {each: get_stem(found.path) if (found := names.find(each)) else None for each in entry["ids"]},
        )
        for entry in tables
    ]


def _read_ids(files: dict[str, str]) -> dict[str, str]:
    """Preset -> its hub id in small letters, else its own name; aliases are left out, for they name a family."""
    found = {}
    for preset, path in files.items():
        with suppress(SpecError):  # another preset that cannot be read is not this model's fault
            keys = dict(
                re.findall(_KEY, read_text(path, MAX_TOML_BYTES, SpecError))
            )  # far faster than parsing them all
            if "alias" not in keys:
                found[preset] = keys.get("hub_id", preset).lower()
    return found
