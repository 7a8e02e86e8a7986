"""A preset's name, a path, a hub id, a mapping, a HF config or a HF model in; a plain config dict out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flopcalc.data import find_data_file, list_data_files, load_toml
from flopcalc.errors import ConfigError, format_nearest

MAX_JSON_BYTES = 16_000_000


class Source(NamedTuple):
    """A model's config and where it came from."""

    name: str
    config: dict[str, Any]
    where: str  # for error messages
    preprocessor: dict[str, Any] | None = None
    reference: str = ""  # what the dims were read from
    module: Any = None  # the live model, if one was given


def load_config(model: Any, *, download: bool = False) -> Source:
    """Find and read a model's config; nothing is downloaded unless asked, no remote code is ever run."""
    if isinstance(model, Source):
        return model
    if isinstance(model, (str, Path)):
        return _load_named(model, download)
    if isinstance(model, Mapping):
        return _checked(Source("config", dict(model), "config"))
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "named_parameters"):
        name = type(model).__name__
        return _checked(Source(name, _plain(config), f"config of {name}", reference="live model", module=model))
    if hasattr(model, "to_dict"):
        name = type(model).__name__
        return _checked(Source(name, _plain(model), name, reference="HF config object"))
    raise ConfigError(
        f"a model is a preset's name, a path, a mapping, a HF config or a HF model, not {type(model).__name__}"
    )


def _plain(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if not hasattr(config, "to_dict"):
        raise ConfigError(f"{type(config).__name__} has no to_dict(): pass a mapping instead")
    return dict(config.to_dict())


def _checked(source: Source) -> Source:
    model_type = source.config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{source.where}: needs \"model_type\", a string; found {model_type!r}")
    return source


def _load_named(model: str | Path, download: bool) -> Source:
    text = str(model)
    if not text or "\0" in text:
        raise ConfigError("the model's name is empty" if not text else "the model's name holds a NUL character")
    is_name = isinstance(model, str) and "/" not in text and os.sep not in text and not text.endswith(".json")
    if is_name:
        preset = find_data_file("presets", text.lower())
        if preset is not None:
            return load_preset(preset)
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _load_folder(path, text)
        if path.is_file():
            return _checked(Source(path.stem, _load_json(path), str(path), _load_beside(path), str(path)))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{text[:200]}: cannot be read: {error}") from None
    if text.count("/") == 1 and not text.startswith((".", "/")):
        return _load_hub(text, download)
    if is_name:
        near = format_nearest(text, list_data_files("presets"))
        raise ConfigError(f"no preset, file or folder {text[:100]!r}.{near} `flopcalc models` lists the presets")
    raise ConfigError(f"{text[:200]!r}: no such file or folder, and no preset of that name")


def load_preset(path: Path) -> Source:
    """A preset file, following one alias."""
    tables = load_toml(path)
    alias = tables.get("alias")
    if alias is not None:
        target = find_data_file("presets", str(alias))
        if target is None:
            raise ConfigError(f"{path}: alias of {alias!r}, which is no preset")
        path, tables = target, load_toml(target)
    config = tables.get("config")
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a preset needs a [config] table, or alias = \"…\" of one that has it")
    # TOML has no null, which a published config may give on purpose (no sliding window, say).
    config = {**config, **dict.fromkeys(tables.get("null_keys", ()))}
    reference = str(tables.get("source", ""))
    return _checked(Source(path.stem, config, f"preset {path.stem}", tables.get("preprocessor"), reference))


def _load_folder(folder: Path, name: str) -> Source:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json in this folder")
    return _checked(Source(folder.name or name, _load_json(path), str(path), _load_beside(path), str(path)))


def _load_beside(path: Path) -> dict[str, Any] | None:
    beside = path.parent / "preprocessor_config.json"
    return _load_json(beside) if beside.is_file() else None


def _load_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_JSON_BYTES} bytes, so no config.json")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, not an object")
    return data


def _load_hub(hub_id: str, download: bool) -> Source:
    config = _find_cached(hub_id, "config.json")
    if config is None and download:
        return _download(hub_id)
    if config is None:
        raise ConfigError(f"{hub_id!r} is neither a path nor in the local Hugging Face cache; --download fetches it")
    preprocessor = _find_cached(hub_id, "preprocessor_config.json")
    return _checked(
        Source(hub_id, _load_json(config), str(config), _load_json(preprocessor) if preprocessor else None, str(config))
    )


def _find_cached(hub_id: str, filename: str) -> Path | None:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if reference.is_file():
        path = folder / "snapshots" / reference.read_text().strip() / filename
        return path if path.is_file() else None
    found = sorted(folder.glob(f"snapshots/*/{filename}"))
    return found[-1] if found else None


def _download(hub_id: str) -> Source:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ConfigError("--download needs huggingface_hub: pip install 'flopcalc[measure]'") from None
    try:
        path = Path(hf_hub_download(hub_id, "config.json"))
    except Exception as error:  # the hub client raises many kinds; all mean that there is no config to read
        raise ConfigError(f"{hub_id}: download failed: {str(error).splitlines()[0][:200]}") from None
    try:
        preprocessor = _load_json(Path(hf_hub_download(hub_id, "preprocessor_config.json")))
    except Exception:  # text models have none
        preprocessor = None
    return _checked(Source(hub_id, _load_json(path), str(path), preprocessor, f"downloaded from {hub_id}"))
