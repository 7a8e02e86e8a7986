"""What was recorded of a model type's operators: its file, its signatures, and the sizes and sums in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import FlopcalcError, SpecError, format_value
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.formats.formats import Formats
from flopcalc.core.model.ops import Attend, Chain, Op, Stage, iterate
from flopcalc.core.workload.sums import (
    Either,
    Expression,
    Frames,
    InDecoder,
    Logits,
    Minus,
    Pairs,
    Sum,
    Tokens,
    Windows,
)
from flopcalc.core.workload.workload import Workload

# An expression is a sum of terms: letter * [coefficient *] feature [* size [* size]], in bytes.
# x: the model's dtype; f: float32; l: int64; i: int32; o: one byte; n: a bare number.
_BYTES = {"f": 4, "l": 8, "i": 4, "o": 1, "n": 1}


def sign(chain: Chain) -> str:
    """What kind of layer a chain is: its ops by name, with what changes their operators."""
    return " ".join(dict.fromkeys(_sign_op(op) for op in iterate(chain)))


def _sign_op(op: Op) -> str:
    flags = ("+bias" if op.bias else "") + ("+tied" if op.tied else "")
    if isinstance(op, Attend):
        flags += "+window" if isinstance(op.rows, Pairs) and op.rows.window else ""
        flags += "+panes" if isinstance(op.rows, Windows) else ""
        flags += "+grouped" if op.kv_heads < op.heads else ""
    return f"{op.kind}:{op.name}{flags}"


def sign_layer(stage: Stage, chain: Chain, switches: str = "") -> str:
    """As sign, of one of a stage's layers; the language model's with its switches."""
    return f"{sign(chain)} {switches}".rstrip() if stage.group == "language" else sign(chain)


def sign_outside(stages: Iterable[Stage], switches: str = "") -> str:
    """As sign, of everything that is not a repeated layer."""
    parts = [f"{stage.path}[{sign(stage.layers[0])}]" for stage in stages if not stage.repeated]
    return " ".join([*parts, switches]).rstrip()


# What a language model's config says that changes HF's operators though no op shows it: a key, and its other names.
SWITCHES: dict[str, tuple[str, ...]] = {
    "hidden_act": ("hidden_activation", "activation_function"),
    "attention_dropout": ("attn_pdrop", "attention_probs_dropout_prob"),
    "hidden_dropout": ("resid_pdrop", "residual_dropout", "dropout", "hidden_dropout_prob", "dropout_rate"),
    "embedding_dropout": ("embd_pdrop",),
    "use_parallel_residual": (),
    "partial_rotary_factor": ("rotary_pct",),
    "position_embedding_type": (),
}
OUTSIDE = ("embedding_dropout", "partial_rotary_factor")  # what is outside of layers has these alone
DISTANCES = {"hidden_act": 4}  # of variants that differ: an activation may be seven operators or one
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "swish": "silu"}  # one operator all the same


def find_language(config: Mapping[str, object]) -> tuple[str, Mapping[str, Any]]:
    """The language model's type and its config, which lies inside another where there is a tower."""
    inner = config.get("text_config")
    own = inner if isinstance(inner, Mapping) else config
    return str(own.get("model_type", config.get("model_type"))), own


def read_switches(config: Mapping[str, object]) -> dict[str, Any]:
    """Those switches that a language model's config sets."""
    tables = [config]
    for key in ("rope_parameters", "rope_scaling"):  # for all layers, or for each of their kinds
        table = config.get(key)
        if isinstance(table, Mapping):
            tables += [table, *(inner for inner in table.values() if isinstance(inner, Mapping))]
    found = {
        key: [table[name] for name in (key, *names) for table in tables if table.get(name) is not None]
        for key, names in SWITCHES.items()
    }
    return {key: values[0] for key, values in found.items() if values}


def sign_switches(config: Mapping[str, object], usual: Mapping[str, Mapping[str, object]]) -> str:
    """The switches that a config sets otherwise than is usual: model type of the language -> switch -> value."""
    name, own = find_language(config)
    given, known = read_switches(own), usual.get(name, {})
    said = {key: (_say_switch(key, given.get(key, value)), _say_switch(key, value)) for key, value in known.items()}
    return " ".join(f"{key}={value}" for key, (value, other) in said.items() if value != other)


def _say_switch(key: str, value: object) -> str:
    """A switch's value so far as it matters: any dropout is one."""
    if key.endswith("dropout") or key.startswith("use_"):
        return "on" if is_on(value) else "off"
    if isinstance(value, str):
        return _ACTIVATIONS.get(value, value)
    return f"{value:g}" if isinstance(value, float) else format_value(value)


def is_on(value: Any) -> bool:
    try:
        return bool(float(value))
    except (TypeError, ValueError):
        return bool(value)


_ATTRIBUTES = ("n_in", "n_out", "size", "heads", "qk", "v", "copies", "active", "times")


def list_sizes(stages: tuple[Stage, ...], chain: Chain | None) -> dict[str, int]:
    """Every size that an expression may name: those of the own layer bare, those of the whole model after a slash."""
    sizes: dict[str, int] = {}
    if chain is not None:
        _add_sizes(sizes, "", chain)
    for stage in stages:
        if stage.layers:
            _add_sizes(sizes, f"/{stage.path}:" if stage.repeated else f"/{stage.path}.", stage.layers[0])
    return sizes


def _add_sizes(sizes: dict[str, int], path: str, chain: Chain) -> None:
    for op in iterate(chain):
        name = f"/{op.name[1:]}" if op.name.startswith("/") else path + op.name if op.name else path[:-1]
        name = name.replace("*", "#")
        for attribute in _ATTRIBUTES:
            value = getattr(op, attribute, 0)
            if value > 1 or (attribute in ("n_in", "n_out", "size") and value):
                sizes.setdefault(f"{name}.{attribute}", value)
        if isinstance(op, Attend):
            sizes.setdefault(f"{name}.kv", op.kv_heads)
        if op.kind == "embed":
            sizes["width"] = op.size


def list_windows(estimator: Estimator, keys: int) -> list[int]:
    """Windows of attention that are no longer than the keys: HF then hands a mask to SDPA."""
    return [
        op.rows.window
        for stage in estimator.stages
        for chain in stage.kinds
        for op in iterate(chain)
        if isinstance(op, Attend) and isinstance(op.rows, Pairs) and 0 < op.rows.window <= keys
    ]


def list_features(estimator: Estimator, load: Workload) -> dict[str, int]:
    """Every sum of the workload that an expression may name; in decoding, of one call in the middle."""
    is_decode = load.phase == "decode"
    call = find_call(load)
    rows, seq, past = load.rows, call.seq, call.context if is_decode else 0
    keys = seq + past
    features = {
        "one": 1,
        "tokens": rows * seq,
        "logits": Logits().count(call, "full"),
        "rows": rows,
        "seq": seq,
        "pairs": rows * seq * keys,
        "square": seq * keys,
        "keys": keys,
        "cached": rows * keys,
        "past": rows * past,
        "padded": rows * (seq + 1),
    }
    windows = list_windows(estimator, keys)
    if is_decode and windows:  # a full window's cache: what it keeps, and with the new row
        features |= {"held": rows * (min(windows) - 1), "filled": rows * min(windows)}
    if load.decoder is not None:
        made = load.decoder.seq
        features |= {"made": rows * made, "made_seq": made, "made_pairs": rows * made**2, "made_square": made**2}
        features |= {"crossed": rows * made * seq, "crossed_square": made * seq}
    if load.all_grids:
        grids = load.all_grids
        features |= {
            "images": len(grids),
            "patches": sum(t * h * w for t, h, w in grids),
            "visual": estimator.count_visual_tokens(load),
            "frames": sum(t for t, _, _ in grids),
            "sights": sum(t * h * w for t, h, w in grids) ** 2,
        }
    if estimator.is_diffusion and load.all_grids:
        both = estimator.count_tokens(load)  # text and latents of all samples
        features |= {"both": both, "joint": both // rows, "places": both // rows - seq}
    for stage in estimator.stages:
        for op in iterate(stage.layers[0]) if stage.layers else ():
            name = _name_sum(op.rows)
            if name in features or isinstance(op.rows, (Tokens, Pairs, Logits)):
                continue
            features[name] = op.rows.count(call, "full")
            if isinstance(op.rows, Windows):
                side = op.rows.side
                features["panes"] = sum(t * -(-h // side) * -(-w // side) for t, h, w in load.all_grids)
    return features


def find_call(load: Workload) -> Workload:
    """One call of the model: in decoding the one in the middle, else the whole step."""
    # An encoder of audio has no tokens, so no earlier ones either.
    return load.replace(seq=1, context=load.context + max(0, load.seq - 1) // 2) if load.phase == "decode" else load


def _name_sum(rows: Sum) -> str:
    """A sum as the recorded expressions name it."""
    if isinstance(rows, Expression):
        return f"sum:{rows.unit}:{rows.text}".replace("*", "#").replace(" ", "").replace("+", "&")
    if isinstance(rows, Either):
        return f"either:{_name_sum(rows.needed)}:{_name_sum(rows.executed)}"
    if isinstance(rows, Minus):
        return f"minus:{_name_sum(rows.rows)}:{_name_sum(rows.less)}"
    if isinstance(rows, Frames):
        return "seen"
    return "decoder" if isinstance(rows, InDecoder) else type(rows).__name__.lower()


class Scope(NamedTuple):
    """Values of what expressions name."""

    features: Mapping[str, int]
    sizes: Mapping[str, int]
    dtype_bytes: int = 2
    module: str = ""  # whose own sizes an expression names by a dot alone

    def evaluate(self, text: str) -> int:
        """The bytes (or the number) that an expression stands for."""
        total: int | Fraction = 0
        for letter, coefficient, names in _parse(text):
            value = coefficient * (self.dtype_bytes if letter == "x" else _BYTES[letter])
            for name in names:
                found = self.features.get(name)
                value *= self._size(name) if found is None else found
            total += value
        return round(total)

    def _size(self, name: str) -> int:
        for full in (self.module + name, f"/{self.module}{name}") if name[0] == "." else (name,):
            if full in self.sizes:
                return self.sizes[full]
        raise MissingSizeError(name)

    def lacks_own(self, name: str) -> bool:
        """Whether a missing size is of the scope's own module, or of one beside it, and all sizes there are missing."""
        owner = self.module if name[0] == "." else name.strip("/").rpartition(".")[0]
        places = [f"{place}." for place in (owner, owner.rpartition(".")[0]) if place]
        known = [size.removeprefix("/") for size in self.sizes]
        return any(
            f"{self.module}.".startswith(place) and not any(size.startswith(place) for size in known)
            for place in places
        )


@lru_cache(maxsize=8192)
def _parse(text: str) -> tuple[tuple[str, int | Fraction, tuple[str, ...]], ...]:
    """(letter, coefficient, names) of every term."""
    terms = []
    for term in text.split(" + ") if text else ():
        letter, *names = term.split("*")
        coefficient: int | Fraction = 1
        while names and (names[0][0].isdigit() or names[0][0] in "~-"):
            number = Fraction(names.pop(0).removeprefix("~"))
            coefficient *= int(number) if number.denominator == 1 else number
        terms.append((letter, coefficient, tuple(names)))
    return tuple(terms)


class MissingSizeError(FlopcalcError):
    """An expression names what this model does not have."""


# --- files ----------------------------------------------------------------------------------------------------------
_AGAIN = "install flopcalc again, or record it again with python -m lab.operators"


@cache
def load_file(name: str) -> dict[str, Any] | None:
    """The recording of a model type, or None."""
    path = find_file(name)
    if not os.path.isfile(path):
        return None
    data = _read_json(path)
    if "same" in data:
        path = find_file(str(data["same"]))
        data = _read_json(path)
    try:
        return unpack(data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else error
        raise SpecError(f"{path}: damaged: {told}; {_AGAIN}") from None


def find_file(name: str) -> str:
    return os.path.join(find_data_dir(), "operators", f"{name}.json")


def _read_json(path: str) -> dict[str, Any]:
    try:
        data = read_json(path, MAX_JSON_BYTES, SpecError)
    except SpecError as error:
        raise SpecError(f"{error}; {_AGAIN}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}: holds {format_value(data)}, not a recording; {_AGAIN}")
    return data


def unpack(data: dict[str, Any]) -> dict[str, Any]:
    """A file's tables with every number replaced by what it stands for; each row and list of modules is there once."""
    rows, kept, layouts = data["rows"], data["kept_rows"], data["layouts"]
    parts = {
        key: {
            path: {
                kind: {
                    where: dict(zip(layouts[first], blocks, strict=True)) for where, (first, *blocks) in places.items()
                }
                for kind, places in kinds.items()
            }
            for path, kinds in stages.items()
        }
        for key, stages in data["parts"].items()
    }
    return {
        "usual": {name: dict(table) for name, table in data.get("usual", {}).items()},
        "signatures": data["signatures"],
        "blocks": [[rows[number] for number in block] for block in data["blocks"]],
        "parts": parts,
        "kept": [[kept[number] for number in block] for block in data["kept"]],
        "saved": data["saved"],
    }


# --- what PEFT's adapters add -----------------------------------------------------------------------------------------
# Direction, kind, calls, bytes read, bytes written.
Table = list[tuple[str, str, int, str, str]]


@cache
def _load(name: str) -> Table:
    """Adapters in float32, or the same under autocast, which brings their input back to the half-precision format."""
    tables = read_json(os.path.join(find_data_dir(), "adapter_operators.json"), MAX_JSON_BYTES, SpecError)
    return [(way, kind, calls, reads, writes) for way, kind, calls, reads, writes in tables[name]]


def is_adapter_cast(formats: Formats, dtype_bytes: int) -> bool:
    """Whether adapters are in float32 with a half-precision model: inputs are cast for them."""
    return dtype_bytes != 4 and formats.adapter in ("", "fp32")


def find_adapter_table(formats: Formats, dtype_bytes: int) -> Table:
    """What an adapter adds, by its own format and the model's: what is alike is not cast."""
    if is_adapter_cast(formats, dtype_bytes):
        return _load("autocast" if formats.autocast else "float32")
    return [  # adapters in the model's own format
        (way, kind.removesuffix("_mixed"), many, reads.replace("f*", "x*"), writes.replace("f*", "x*"))
        for way, kind, many, reads, writes in _load("float32")
        if kind != "cast"
    ]
