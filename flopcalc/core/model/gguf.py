"""The header of a GGUF file becomes a config: dims from its metadata, biases and formats from its list of tensors."""

from __future__ import annotations

import math
import os
import re
import struct
from collections import Counter
from typing import Any, BinaryIO, NamedTuple

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import ConfigError, format_nearest, format_value
from flopcalc.base.files import open_regular
from flopcalc.base.spelling import spell

MAGIC = b"GGUF"
_MOST_BYTES = 256 << 20  # of a header: vocabularies of a million words take 30 MB
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")  # as llama.cpp names the files of a model that is cut
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.weight$")  # its layer, and which it is
_PLAIN = ("fp32", "fp16", "bf16")
_MOST_SHARDS = 1000
_MOST_ENTRIES = 100_000  # of metadata, or tensors: the largest models have some thousands
_MOST_VALUES = 4_000_000  # of all arrays together: words and merges of a vocabulary, with room
_KEPT = 4096  # entries of an array that may be read; longer ones are vocabularies
# Numbers of the types of values: format for struct.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
    """One entry of a file's list of tensors."""

    shape: tuple[int, ...]
    type: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Header(NamedTuple):
    """What stands before the weights."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


class TensorTypes(NamedTuple):
    """What tensors are stored in; a row is a tensor, its layers and a format, and that of no tensor is of the rest."""

    rows: tuple[tuple[str, tuple[int, ...], str], ...]


class GgufModel(NamedTuple):
    """A config from a header, the formats of its weights, and notes."""

    config: dict[str, Any]
    weights: TensorTypes | str  # one format, or those of all tensors
    notes: tuple[str, ...]


def load_tables() -> dict[str, Any]:
    """What is known of GGUF's names."""
    return load_toml(os.path.join(find_data_dir(), "gguf.toml"))


# --- the header -------------------------------------------------------------------------------------------------------
class _GgufReader:
    """Reads little-endian values one after the other."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.file, self.path, self.left, self.values_left = file, path, _MOST_BYTES, _MOST_VALUES

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ConfigError(f"{self.path}: a GGUF header of more than {_MOST_BYTES} bytes is damaged")
        self.left -= count
        data = self.file.read(count)
        if len(data) != count:
            raise ConfigError(f"{self.path}: its GGUF header ends too early")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self) -> int:
        found = int(self.number("Q"))
        if found > _MOST_BYTES:
            raise ConfigError(f"{self.path}: its GGUF header is damaged: {found} entries")
        return found

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 2:
            raise ConfigError(f"{self.path}: its GGUF header has a value of type {kind}, which is not known")
        inner, many = self.number("I"), self.count()
        self.values_left -= many
        if self.values_left < 0:
            raise ConfigError(f"{self.path}: its GGUF header is damaged: more than {_MOST_VALUES} values in arrays")
        if inner in _SCALARS and many > _KEPT:
            self.take(struct.calcsize(f"<{_SCALARS[inner]}") * many)
            return [None] * many
        kept = [self.value(inner, depth + 1) for _ in range(min(many, _KEPT))]
        for _ in range(many - len(kept)):  # strings: each says its own length
            self.value(inner, depth + 1)
        return kept + [None] * (many - len(kept))


def read_header(path: str) -> Header:
    """The metadata and the list of tensors; no weight is read."""
    with open_regular(path, ConfigError) as file:
        reader = _GgufReader(file, path)
        if reader.take(4) != MAGIC:
            raise ConfigError(f"{path}: not a GGUF file")
        version = reader.number("I")
        if version not in (2, 3):
            raise ConfigError(f"{path}: GGUF version {version} is not known; 2 and 3 are")
        tensors, entries = reader.count(), reader.count()
        if max(tensors, entries) > _MOST_ENTRIES:
            raise ConfigError(f"{path}: its GGUF header is damaged: {max(tensors, entries)} entries")
        values = {}
        for _ in range(entries):
            key = reader.text()
            values[key] = reader.value(reader.number("I"))
        found = {}
        for _ in range(tensors):
            name = reader.text()
            dims = reader.number("I")
            if dims > 8:
                raise ConfigError(f"{path}: its GGUF header is damaged: a tensor of {dims} dimensions")
            shape = tuple(reader.number("Q") for _ in range(dims))
            found[name] = Tensor(shape, reader.number("I"))
            reader.number("Q")  # where its weights begin
        return Header(values, found)


# --- its config -------------------------------------------------------------------------------------------------------
def load_gguf(path: str) -> GgufModel:
    """The config that a GGUF file's header describes."""
    header, missing = _read_shards(path)
    tables = load_tables()
    name = header.values.get("general.architecture")
    known = tables["architectures"]
    if not isinstance(name, str) or name not in known:
        near = format_nearest(str(name), known)
        raise ConfigError(
            f"{path}: GGUF architecture {format_value(name)} is not known.{near} Known: {', '.join(known)}; the "
            f"model's config.json can be counted instead, with {spell('model_type', 'TYPE')} if its type is foreign"
        )
    entry = known[name]
    config: dict[str, object] = {"model_type": entry["model_type"]}
    for key, source in {**tables["keys"], **entry.get("keys", {})}.items():
        value = header.values.get(f"{name}.{source}")
        if value is not None and not (source.startswith("expert") and not value):
            config[key] = _flatten(value, key, path)
    if "experts" in entry and config.get("num_local_experts"):
        config["model_type"] = entry["experts"]
    config |= _read_tensors(header, tables, config, not missing)
    weights, notes = _find_types(header, tables)
    if missing:
        notes.append(
            f"without {', '.join(missing[:3])}: a head of its own and biases are taken from the family's defaults"
        )
    told = f"read from a GGUF header: architecture {name} is counted as {config['model_type']}"
    return GgufModel(config, weights, (told, *notes))


def _read_shards(path: str) -> tuple[Header, list[str]]:
    """A model's header, and its shards that are not there. The first has all metadata, each has its own tensors."""
    found = _SHARD.search(path)
    if found is None:
        return read_header(path), []
    stem, count = path[: found.start()], int(found[1])
    shards = [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, min(count, _MOST_SHARDS) + 1)]
    there = [shard for shard in shards if os.path.isfile(shard)]
    headers = [read_header(shard) for shard in there]
    if not headers or there[0] != shards[0]:
        raise ConfigError(f"{path}: the first of {count} shards has the model's sizes, and is not beside it")
    missing = [os.path.basename(shard) for shard in shards if shard not in there]
    return Header(
        headers[0].values, {name: each for header in headers for name, each in header.tensors.items()}
    ), missing


def _flatten(value: object, key: str, path: str) -> Any:
    """A list with a number per layer is one number, if all are alike."""
    if not isinstance(value, list):
        return value
    if value and not isinstance(value[0], list) and all(each == value[0] for each in value):
        return value[0]
    raise ConfigError(f"{path}: {key} differs from layer to layer in this file, which its config cannot say")


def _read_tensors(header: Header, tables: dict[str, Any], config: dict[str, object], is_whole: bool) -> dict[str, Any]:
    """What only the tensors show: the vocabulary, whether the head is tied, biases."""
    found: dict[str, Any] = {}
    words = header.tensors.get("token_embd.weight")
    if words is not None and len(words.shape) == 2:
        found["vocab_size"] = int(words.shape[1])
    elif "vocab_size" not in config:
        tokens = header.values.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            found["vocab_size"] = len(tokens)
    if header.tensors and is_whole:
        found["tie_word_embeddings"] = "output.weight" not in header.tensors
        found |= {key: name in header.tensors for name, key in tables["tensors"].items()}
    return found


def _find_types(header: Header, tables: dict[str, Any]) -> tuple[TensorTypes | str, list[str]]:
    """The formats of a file's tensors, or the plain one of most; nothing if that is unknown. And a note."""
    sizes: Counter[str] = Counter()
    layers: dict[tuple[str, str], list[int]] = {}
    known = {int(number): entry for number, entry in tables["types"].items()}
    for name, tensor in header.tensors.items():
        place = _TENSOR.match(name)
        if place is not None and len(tensor.shape) > 1:
            entry = known.get(tensor.type, {"name": f"type {tensor.type}", "stored": ""})
            layers.setdefault((place[2], entry["name"]), []).append(int(place[1] or 0))
            sizes[entry["name"]] += tensor.size if place[1] else 0
    if not sizes:
        return "", []
    stored = {entry["name"]: str(entry["stored"]) for entry in known.values()}
    names = [name for name, _ in sizes.most_common()]
    most = stored.get(names[0], "")
    if not most or most in _PLAIN:
        how = f": counted as {most}" if most else ", which are no formats here: counted in bf16"
        return most, [f"weights are {', '.join(names)}{how}; {spell('weights')} says another"]
    counted = (*tables["modules"], "token_embd", "output")
    own = {(tensor, name): at for (tensor, name), at in layers.items() if tensor in counted and name in stored}
    rows = tuple((tensor, tuple(at), stored[name]) for (tensor, name), at in own.items())
    alike = [f"{key[0]} in {key[1]}" for key in layers if key not in own and key[1] not in ("F32", names[0])]
    how = f"; counted as {names[0]}: {', '.join(alike)}" if alike else ""
    note = f"weights are {', '.join(names)}, every tensor counted in its own{how}; {spell('weights')} says another"
    return TensorTypes((*rows, ("", (), most))), [note]
