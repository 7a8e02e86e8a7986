"""A preset's name, a path, a hub id, a mapping, a HF config or a HF model in; a plain config dict out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from flopcalc.base.data import describe_install, find_data_file, get_stem, load_toml
from flopcalc.base.errors import ConfigError, find_nearest, format_value
from flopcalc.base.files import MAX_JSON_BYTES, open_regular, read_json, read_path, read_text
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.core.model.components import (
    DENOISERS,
    SCHEDULER,
    find_denoiser,
    is_pipeline,
    name_class,
    read_entry,
    read_folder,
)
from flopcalc.core.model.live import unwrap
from flopcalc.core.spec.aliases import list_types, map_config, name_family
from flopcalc.core.spec.merge import list_pipelines

PIPELINE_FILES = ("model_index.json", "modular_model_index.json")  # of diffusers

ADAPTER = "adapter_config.json"
_LATER_SHARD = r"-(?!00001)\d{5}-of-\d{5}\.gguf$"  # the first one is used for a model that is cut
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "feature_extractor_config.json")


@frozen()
class Source(Value):
    """A model's config and where it came from."""

    name: str
    config: dict[str, Any]
    where: str  # for error messages
    preprocessor: dict[str, Any] | None = None
    reference: str = ""  # what the dims were read from
    module: Any = None  # the live model, if one was given
    video_preprocessor: dict[str, Any] | None = None
    note: str = ""  # what a reader should know of where it came from
    head: str = ""  # the head that was asked for; empty: the one of its class
    stored: str = ""  # the format of a preset's published weights, which it is counted in if asked for
    weights: object = ""  # the format that a file keeps its weights in; empty: the config says it
    lora: dict[str, Any] | None = None  # an adapter's settings, as a recipe takes them
    mtp: int | bool | None = None  # layers of multi-token prediction that were asked for; True: as many as it has
    hub_id: str = ""  # of a preset


def load_config(
    model: object, *, download: bool = False, model_type: str | None = None, own: Collection[str] = ()
) -> Source:
    """Find and read a model's config; nothing is downloaded unless asked, no remote code is ever run.

    `model_type` says which family it is, whatever the config says. A config of a foreign type is mapped onto the
    known family of its alias, unless the type is among `own`, those that the user has specs for.
    """
    source = _find_source(model, download)
    if model_type is not None:
        if not isinstance(model_type, str):
            raise ConfigError(f"model_type must be the name of a family, not {format_value(model_type)}")
        if is_pipeline(source.config) and model_type in list_pipelines():
            named = {**source.config, "_class_name": model_type}
        else:
            named = name_family(source.config, model_type, source.where)
        source = source.replace(config=named)
    return _map_known(_checked(source), own)


def _map_known(source: Source, own: Collection[str]) -> Source:
    if source.config["model_type"] in own:
        return source
    config, notes = map_config(source.config, source.where)
    if config is source.config:
        return source
    return source.replace(config=config, note="; ".join(filter(None, (source.note, *notes))))


def _find_source(model: object, download: bool) -> Source:
    if isinstance(model, Source):
        return model
    if isinstance(model, (str, os.PathLike)):
        return _load_named(model, download)
    if isinstance(model, Mapping):
        return Source("config", dict(model), "config")
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "named_parameters"):
        name = type(model).__name__
        plain = _plain(config)
        if plain.get("model_type") is None and (found := _find_class(model)) is not None:  # diffusers' class says it
            plain = {**plain, "_class_name": found}
        return Source(name, plain, f"config of {name}", reference="live model", module=model)
    parts = getattr(model, "components", None)
    if config is not None and isinstance(parts, Mapping):
        return _read_pipeline(model, parts)
    if hasattr(model, "to_dict"):
        name = type(model).__name__
        return Source(name, _plain(model), name, reference="HF config object")
    if hasattr(model, "named_parameters"):
        raise ConfigError(
            f"{type(model).__name__} is a module without a config: bind(module, example_batch) in Python traces it, "
            "with the arguments of its forward, such as {'x': tensor}"
        )
    raise ConfigError(
        "a model is a preset's name, a path, a mapping, a HF config, a HF model or a diffusers pipeline, not "
        f"{type(model).__name__}"
    )


def _read_pipeline(pipeline: Any, parts: Mapping[str, object]) -> Source:
    """A live pipeline of diffusers: its own settings, and the configs of its models; the denoiser is the live model."""
    classes = [each.__name__ for each in type(pipeline).__mro__]
    described = list_pipelines()
    name = next((each for each in classes if each in described), classes[0])
    config = {key: value for key, value in dict(pipeline.config).items() if not isinstance(value, (list, tuple))}
    config |= {"_class_name": name, **_read_parts(parts)}
    module = next((parts[part] for part in DENOISERS if parts.get(part) is not None), None)
    return Source(classes[0], config, f"config of {classes[0]}", reference="live model", module=module)


def _read_parts(parts: Mapping[Any, object]) -> dict[str, Any]:
    """The configs of a live pipeline's models, each with its class and the format that its parameters are in."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        config = getattr(part, "config", None)
        if nets := getattr(part, "nets", ()):  # several ControlNets
            found[name] = [*_read_parts(dict(enumerate(nets))).values()]
        if name == SCHEDULER and isinstance(config, Mapping):
            found[name] = {"_class_name": type(part).__name__, **config}
        if config is None or not hasattr(part, "named_parameters"):
            continue
        plain = _plain(config)
        plain["_class_name"] = _find_class(part) or type(part).__name__
        dtype = getattr(part, "dtype", None)
        found[name] = plain if dtype is None else {**plain, "dtype": str(dtype)}
    return found


def _find_class(module: object) -> str | None:
    """The class of a live module, or the one it extends, that a spec of diffusers' classes describes."""
    names = (each.__name__ for each in type(unwrap(module)).__mro__)
    return next((name for name in names if find_data_file("specs", name)), None)


def is_denoiser(module: object) -> bool:
    """Whether a live module is a diffusers model that a spec describes."""
    return _find_class(module) is not None


def _plain(config: object) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if not hasattr(config, "to_dict"):
        raise ConfigError(f"{type(config).__name__} has no to_dict(): pass a mapping instead")
    return dict(config.to_dict())


def _checked(source: Source) -> Source:
    model_type = source.config.get("model_type")
    if model_type is None and isinstance(source.config.get("_class_name"), str):  # diffusers names the class instead
        model_type = name_class(source.config)
        source = source.replace(config={**source.config, "model_type": model_type})
    if model_type is None:
        source = _name_type(source)
        model_type = source.config.get("model_type")
    if model_type is None and "_use_default_values" in source.config:  # diffusers' own mark
        what = (
            f"{source.name} has no spec (`flopcalc models --coverage diffusers` lists those that have): trace it with "
            "bind(model, example_batch)"
            if source.module is not None
            else f"{source.where}: a config of diffusers without its class: give the model itself, or add _class_name "
            "(as config.json has it)"
        )
        raise ConfigError(what)
    if not isinstance(model_type, str) or not model_type:
        if model_type is None:
            raise ConfigError(_describe_untyped(source))
        raise ConfigError(f'{source.where}: needs "model_type", a string; found {format_value(model_type)}')
    return source


def _describe_untyped(source: Source) -> str:
    """The error for a config that says neither its type nor its class, with the nearest family if there is one."""
    from flopcalc.core.model.classes import suggest_type

    near = suggest_type(source.config)
    hint = "says which family it is" if near is None else "would count it as the family that its keys suit"
    return f'{source.where}: no "model_type" and no "architectures": {spell("model_type", near or "TYPE")} {hint}'


def _name_type(source: Source) -> Source:
    """A config without model_type with the one of the class that it names, if that is known."""
    from flopcalc.core.model.classes import find_type, find_untyped  # imported lazily: few configs need it

    named = source.config.get("architectures")
    if not isinstance(named, (list, tuple)) or not named:
        found = "timm_wrapper" if "pretrained_cfg" in source.config else find_untyped(source.config)
        if found is None:
            return source
        config, note = {**source.config, "model_type": found}, f"no model_type: taken as {found}, by its keys"
        return source.replace(config=config, note="; ".join(filter(None, (source.note, note))))
    found = find_type(str(named[0]))
    if found is None:
        raise ConfigError(
            f"{source.where}: no model_type, and class {format_value(named[0])} is of no known family: "
            f"{spell('model_type', 'TYPE')} says which it is"
        )
    note = f"no model_type: taken as {found}, from class {named[0]}"
    config = {**source.config, "model_type": found}
    return source.replace(config=config, note="; ".join(filter(None, (source.note, note))))


def _load_named(model: str | os.PathLike[str], download: bool, is_base: bool = False) -> Source:
    text = read_path(model, "a model", ConfigError)
    if not text or "\0" in text:
        raise ConfigError("the model's name is empty" if not text else "the model's name holds a NUL character")
    is_name = isinstance(model, str) and "/" not in text and os.sep not in text and not text.endswith(".json")
    if is_name:
        preset = find_data_file("presets", text) or find_data_file("presets", text.lower())
        if preset is not None:
            return load_preset(preset)
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return _load_folder(path, download, is_base)
    if os.path.isfile(path) and os.path.basename(path) in PIPELINE_FILES:
        return _load_pipeline(os.path.basename(os.path.dirname(os.path.abspath(path))), path)
    if os.path.isfile(path):
        return _load_file(path, download, is_base)
    if text.count("/") == 1 and not text.startswith((".", "/")):
        return _load_hub(text, download, is_base)
    if is_name:
        source = _load_by_name(text)
        if source is not None:
            return source
        near = " `flopcalc compare A B` takes several models." if "," in text else _describe_near(text)
        raise ConfigError(f"no preset, file or folder {text[:100]!r}.{near} `flopcalc models` lists the presets")
    raise ConfigError(f"{text[:200]!r}: no such file or folder, and no preset of that name")


def _describe_near(name: str) -> str:
    """The presets nearest to a name that is none, those that begin with it first; or the type of its first words."""
    from flopcalc.core.model.names import list_names  # reads all presets: only where a name is refused

    presets = list_names()
    start = re.sub(r"[-_. ]", "", name.lower())
    longer = [preset for preset in presets if len(start) > 2 and re.sub(r"[-._]", "", preset).startswith(start)][:3]
    words = re.split("[-_. ]", name[:100].lower())
    types = {each.replace("-", "_"): each for each in list_types()}
    found = next((types[key] for many in range(len(words), 0, -1) if (key := "_".join(words[:many])) in types), None)
    first = name[:1].lower()
    alike = [each for each in presets if each[0] == first and find_nearest(words[0], re.split("[-.]", each)[:1])]
    near = find_nearest(name, presets if longer else alike)
    named = list(dict.fromkeys(presets[each] for each in (*longer, *near)))
    counted = f" Models of type {found} are counted from their config.json: give that file, or its folder."
    return (f" Did you mean {', '.join(named[:3])}?" if named else "") + counted * (found is not None and not longer)


def load_preset(path: str) -> Source:
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
        raise ConfigError(f'{path}: a preset needs a [config] table, or alias = "…" of one that has it')
    null_keys = tables.get("null_keys", [])
    if not isinstance(null_keys, list):
        raise ConfigError(f"{path}: null_keys must be a list of config keys")
    for key in ("preprocessor", "video_preprocessor"):
        if not isinstance(tables.get(key, {}), dict):
            raise ConfigError(f"{path}: [{key}] must be a table")
    # TOML has no null, which a published config may give on purpose (no sliding window, say).
    config = {**config, **dict.fromkeys(map(str, null_keys))}
    name = get_stem(path)
    return Source(
        name,
        config,
        f"preset {name}",
        tables.get("preprocessor"),
        str(tables.get("source", "")),
        video_preprocessor=tables.get("video_preprocessor"),
        stored=str(tables.get("stored", "")),
        hub_id=str(tables.get("hub_id", "")),
    )


def _load_folder(folder: str, download: bool = False, is_base: bool = False) -> Source:
    path = os.path.join(folder, "config.json")
    name = os.path.basename(os.path.abspath(folder))
    for file in PIPELINE_FILES:
        if os.path.isfile(index := os.path.join(folder, file)):
            return _load_pipeline(name, index)
    denoiser = path if os.path.isfile(path) else find_denoiser(folder)
    if denoiser is not None:
        return _load_with_processors(name, denoiser)
    held = sorted(os.listdir(folder))
    files = [file for file in held if file.endswith(".gguf") and not re.search(_LATER_SHARD, file)]
    if ADAPTER in held:
        return _load_adapter(name, os.path.join(folder, ADAPTER), download, is_base)
    if len(files) == 1:
        return _load_gguf(os.path.join(folder, files[0]))
    if files:
        raise ConfigError(f"{folder}: several GGUF files and no config.json: name one of {', '.join(files[:6])}")
    beside = [file for file in held if file.endswith(_PROCESSORS) or file.startswith("tokenizer")]
    if beside:
        raise ConfigError(
            f"{folder}: no config.json in this folder, only a processor or tokenizer ({', '.join(beside[:4])}): the "
            "model's sizes are missing; add the config.json of the model that it belongs to"
        )
    raise ConfigError(f"{folder}: no config.json in this folder, and no {PIPELINE_FILES[0]}")


def _load_pipeline(name: str, index: str) -> Source:
    """A diffusers pipeline: its index, and the config.json of every part."""
    config = read_folder(_load_json(index), os.path.dirname(index), _load_json, _find_cached)
    return Source(name, config, index, None, index)


def _load_file(path: str, download: bool, is_base: bool) -> Source:
    """A config.json, an adapter's config, or a GGUF file."""
    if os.path.basename(path) == ADAPTER:
        return _load_adapter(os.path.basename(os.path.dirname(os.path.abspath(path))), path, download, is_base)
    if path.endswith(".gguf") or not path.endswith((".json", ".toml")):
        with open_regular(path, ConfigError) as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            return _load_gguf(path)
    return _load_with_processors(get_stem(path), path)


def _load_gguf(path: str) -> Source:
    from flopcalc.core.model.gguf import load_gguf  # imported lazily: few files need it

    found = load_gguf(path)
    return Source(
        get_stem(path), found.config, path, reference=path, note="; ".join(found.notes), weights=found.weights
    )


def _load_adapter(name: str, path: str, download: bool, is_base: bool) -> Source:
    """The base model of an adapter, with its LoRA settings; an adapter of an adapter is refused."""
    if is_base:
        raise ConfigError(f"{path}: an adapter too; give base_model_name_or_path of a whole model")
    from flopcalc.core.model.adapters import read_adapter

    adapter = read_adapter(_load_json(path), path)
    beside = os.path.join(os.path.dirname(os.path.abspath(path)), adapter.base)
    try:
        base = _load_named(beside if os.path.isdir(beside) else adapter.base, download, is_base=True)
    except ConfigError as error:
        raise ConfigError(f"{path}: its base: {error}") from None
    note = "; ".join(filter(None, (adapter.note, base.note)))
    return base.replace(name=name or base.name, note=note, lora=adapter.lora, head=adapter.head)


def _load_with_processors(name: str, path: str) -> Source:
    """A config.json and the processors' files next to it; a video's falls back to the image's, as in transformers."""
    folder = os.path.dirname(path)
    config = _load_json(path)
    beside = os.path.join(folder, "hf_quant_config.json")  # modelopt's own file
    if config.get("quantization_config") is None and os.path.isfile(beside):
        config["quantization_config"] = _load_json(beside)
    images, videos = (_load_beside(folder, prefix) for prefix in ("", "video_"))
    return Source(name, config, path, images, path, video_preprocessor=images if videos is None else videos)


def _load_beside(folder: str, prefix: str) -> dict[str, Any] | None:
    """A processor's settings: those inside processor_config.json, where transformers 5 saves them, come first."""
    whole = os.path.join(folder, "processor_config.json")
    if os.path.isfile(whole):
        inner = _load_json(whole).get(f"{prefix or 'image_'}processor")
        if isinstance(inner, dict):
            return inner
    beside = os.path.join(folder, f"{prefix}preprocessor_config.json")
    return _load_json(beside) if os.path.isfile(beside) else None


def _load_json(path: str) -> dict[str, Any]:
    data = read_json(path, MAX_JSON_BYTES, ConfigError)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, not an object")
    return data


def _load_hub(hub_id: str, download: bool, is_base: bool) -> Source:
    """A hub id's config: from the local cache, downloaded if asked for, else of the preset that it names."""
    read_adapter = partial(_load_adapter, download=download, is_base=is_base)
    readers: dict[str, Callable[[str, str], Source]] = {
        "config.json": _load_with_processors,
        **dict.fromkeys(PIPELINE_FILES, _load_pipeline),
        ADAPTER: read_adapter,
    }
    for file, read in readers.items():
        cached = _find_cached(hub_id, file)
        if cached is not None:
            return read(hub_id, cached)
    if download:
        return _download(hub_id, read_adapter)
    source = _load_by_name(hub_id)
    if source is None:
        raise ConfigError(
            f"{hub_id[:200]!r} is not a path, not in the local Hugging Face cache, and has no preset; "
            f"{spell('download', True)} fetches it.{_describe_near(hub_id.rpartition('/')[2])}"
        )
    return source


def _load_by_name(name: str) -> Source | None:
    """The preset that has a hub id, or that a model's name stands for, with a note."""
    from flopcalc.core.model.names import find_preset  # imported lazily: a preset's own name needs no search

    found = find_preset(name)
    if found is None:
        return None
    source = load_preset(found.path)
    hub_id = name if "/" in name else source.hub_id
    note = f"{name} is counted as preset {source.name} ({found.shared})"
    if (quantized := found.quantized) is not None:
        note += f", {quantized['says']}"
        config = {**source.config, "quantization_config": quantized.get("config")}
        weights = quantized.get("weights", "")
        source = source.replace(config=config, weights=weights, stored=quantized.get("stored", weights))
    return source.replace(hub_id=hub_id, note=note)


def _find_cached(hub_id: str, filename: str) -> str | None:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    folder = os.path.join(cache, f"models--{hub_id.replace('/', '--')}")
    snapshots = os.path.join(folder, "snapshots")
    commits = sorted(os.listdir(snapshots)) if os.path.isdir(snapshots) else []
    with suppress(ConfigError):  # a reference that cannot be read says nothing
        named = read_text(os.path.join(folder, "refs", "main"), 1000, ConfigError).strip()
        commits = [named] if named in commits else commits
    for commit in reversed(commits):
        path = os.path.join(folder, "snapshots", commit, filename)
        if os.path.isfile(path):
            return path
    return None


def _download(hub_id: str, read_adapter: Callable[[str, str], Source]) -> Source:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        from flopcalc.core.model.names import find_preset

        preset = find_preset(hub_id)
        other = (
            f"; without {spell('download', True)}, preset {get_stem(preset.path)} is used" if preset is not None else ""
        )
        raise ConfigError(
            f"{spell('download', True)} needs huggingface_hub: {describe_install('hub')}{other}"
        ) from None
    try:
        path = hf_hub_download(hub_id, "config.json")
    except Exception as error:  # the hub client raises many kinds; all mean that there is no config to read
        with suppress(Exception):
            return _download_pipeline(hub_id, hf_hub_download)
        adapter = None
        with suppress(Exception):  # its repository has no config.json
            adapter = hf_hub_download(hub_id, ADAPTER)
        if adapter is not None:
            return read_adapter(hub_id, adapter)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{hub_id}: download failed: {reason[:200]}") from None
    for file in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        with suppress(Exception):  # text models have none
            hf_hub_download(hub_id, file)
    return _load_with_processors(hub_id, path).replace(reference=f"downloaded from {hub_id}")


def _download_pipeline(hub_id: str, download: Any) -> Source:
    """A diffusers pipeline's index, and its parts' configs."""
    try:
        index = download(hub_id, PIPELINE_FILES[0])
    except Exception:  # of many kinds: there is none
        index = download(hub_id, PIPELINE_FILES[1])
    for part, entry in _load_json(index).items():
        with suppress(Exception):  # schedulers and tokenizers have no config.json
            _, repo, inner = read_entry(part, entry)
            download(repo or hub_id, os.path.join(inner, "config.json"))
    return _load_pipeline(hub_id, index).replace(reference=f"downloaded from {hub_id}")
