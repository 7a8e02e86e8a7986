"""A diffusers pipeline's config: the class, what it does by itself, and the configs of its parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.core.spec.expressions import MissingNameError, evaluate, evaluate_truth
from flopcalc.core.spec.merge import check_keys
from flopcalc.core.spec.spec import find_spec
from flopcalc.data import find_data_file, list_data_files, load_toml
from flopcalc.errors import ConfigError, SpecError, format_nearest, format_value

_KEYS = {
    "source", "denoiser", "steps", "guidance", "encodes_negative", "text", "read", "width", "height", "frames",
    "given", "defaults", "encoders", "passed", "alternate",
}  # fmt: skip
DENOISERS = ("transformer", "unet")  # folders of a pipeline


class Pipeline(NamedTuple):
    """What a pipeline's class does: which parts it has, and what it takes where nothing is said."""

    name: str
    source: str
    denoiser: str  # the part that runs at every step
    steps: int
    guidance: bool  # whether a plain call runs the denoiser a second time, on an empty prompt
    encoders: tuple[tuple[str, str], ...]  # text encoder -> expression: its length
    values: Values
    tables: Mapping[str, Any]

    @property
    def reads_text(self) -> bool:
        return "text" in self.tables

    def count_text(self) -> int:
        """The length of the text that a plain call is padded to."""
        return self.size("text") if self.reads_text else 0

    def count_read(self, text: int) -> int:
        """Positions of text that the denoiser reads."""
        return self.size("read", text) if "read" in self.tables else text

    def count_encoded(self, expression: str, text: int) -> int:
        return _check_whole(evaluate(expression, self.values.with_text(text)), expression)

    def list_uncounted(self, config: Mapping[str, Any]) -> list[str]:
        """What is said of the pipeline's other parts: a second denoiser, and what nothing describes."""
        known = {self.denoiser, "vae", *(name for name, _ in self.encoders)}
        found = []
        for name, part in config.items():
            if name in known or not isinstance(part, Mapping):
                continue
            if name != self.tables.get("alternate"):
                found.append(f"{name} ({part.get('_class_name')}) is not counted")
            elif _list_sizes(part) == _list_sizes(config[self.denoiser]):
                said = f"{name} has the sizes of {self.denoiser} and runs some of its steps"
                found.append(f"{said}: its parameters are not counted")
            else:
                raise ConfigError(f"{name} has other sizes than {self.denoiser}, which is not described")
        return found

    def count_given(self, frames: int) -> int:
        """Frames that the VAE encodes for the denoiser to start from: an image's, or a whole video's."""
        given = self.tables.get("given")
        return 0 if given is None else _check_whole(evaluate(str(given), self.values.with_text(0, frames)), "given")

    def list_passed(self) -> dict[str, bool]:
        """Keys that the denoiser's config gets from the pipeline: they say how it is called."""
        passed = self.tables.get("passed", {})
        return {key: evaluate_truth(str(text), self.values) for key, text in passed.items()}

    def encodes_negative(self) -> bool:
        """Whether guidance encodes a second, empty prompt."""
        return evaluate_truth(str(self.tables.get("encodes_negative", "true")), self.values)

    def size(self, key: str, text: int = 0) -> int:
        """One of its expressions, as a whole number; 1 frame where it says none."""
        if key == "frames" and key not in self.tables:
            return 1
        try:
            return _check_whole(evaluate(str(self.tables[key]), self.values.with_text(text)), key)
        except MissingNameError as error:
            raise ConfigError(f"{self.name}: missing key {error.name!r}, needed for its {key}") from None


class Values:
    """The names in a pipeline's expressions: keys of its config, dotted into its parts, `text` and `frames`."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], text: int = 0, frames: int = 1) -> None:
        self._config, self._defaults = config, defaults
        self._sizes = {"text": text, "frames": frames}

    def with_text(self, text: int, frames: int = 1) -> Values:
        return Values(self._config, self._defaults, text, frames)

    def lookup(self, name: str) -> Any:
        if name in self._sizes:
            return self._sizes[name]
        part, _, key = name.partition(".")
        inner = self._config.get(part)
        if key and isinstance(inner, Mapping):
            value = inner.get(key)
            spec = find_spec(str(inner.get("_class_name"))) if value is None else None
            value = spec.defaults.get(key) if spec is not None else value
        else:
            value = inner if inner is not None else self._defaults.get(name)
        if value is None:
            raise MissingNameError(name)
        return value


# Classes that diffusers builds in place of an older one, by the kind of its norms.
_OLD = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}


def name_class(config: Mapping[str, Any]) -> str:
    """The class that diffusers builds for a config."""
    name = str(config["_class_name"])
    return _OLD.get(str(config.get("norm_type")), name) if name == "Transformer2DModel" else name


def is_pipeline(config: Mapping[str, Any]) -> bool:
    """Whether a config is a pipeline's, not a model's: parts of it are named by their folders."""
    return str(config.get("_class_name", "")).endswith("Pipeline")


def read_pipeline(config: Mapping[str, Any], where: str) -> Pipeline:
    """The pipeline that a config names; one whose class is not described is an error."""
    name = str(config["_class_name"])
    path = find_data_file("pipelines", name)
    if path is None:
        known = list_data_files("pipelines")
        raise ConfigError(
            f"{where}: pipeline {format_value(name)} is not described.{format_nearest(name, known)} Give the folder of "
            f"its denoiser, as transformer/ or unet/. Known: {', '.join(known)}"
        )
    tables = load_toml(path)
    check_keys(tables, _KEYS, path)
    try:
        denoiser, encoders = str(tables["denoiser"]), tables.get("encoders", {})
        found = Pipeline(
            name, str(tables["source"]), denoiser, int(tables["steps"]), bool(tables["guidance"]),
            tuple((str(part), str(text)) for part, text in encoders.items()),
            Values(config, tables.get("defaults", {})), tables,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{path}: no pipeline: {type(error).__name__} {error}") from None
    if not isinstance(config.get(denoiser), Mapping):
        raise ConfigError(f"{where}: {name} needs its {denoiser}'s config ({denoiser}/config.json)")
    return found


def read_folder(index: Mapping[str, Any], folder: str, read: Any) -> dict[str, Any]:
    """The config of a pipeline whose model_index.json was read, with those of its parts' config.json."""
    config = dict(index)
    for part, entry in index.items():
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            continue
        del config[part]
        is_inside = part not in ("", ".", "..") and os.path.basename(part) == part  # never another folder's config
        path = os.path.join(folder, part, "config.json")
        if is_inside and isinstance(entry[1], str) and os.path.isfile(path):
            own = read(path)
            config[part] = {**own, "_class_name": name_class({**own, "_class_name": entry[1]})}
    return config


def _list_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def find_denoiser(folder: str) -> str | None:
    """The config.json of a denoiser in a folder that has no file about the whole."""
    paths = (os.path.join(folder, part, "config.json") for part in DENOISERS)
    return next((path for path in paths if os.path.isfile(path)), None)


def _check_whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or getattr(value, "denominator", None) != 1 or not 0 <= value < 10**6:
        raise ConfigError(f"{what} must be a whole number, not {format_value(value)}")
    return int(value)
