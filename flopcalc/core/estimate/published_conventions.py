"""Other people's FLOPs: the formulas of quoted_conventions.toml, evaluated over the exact sums of a bound model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import FlopcalcError, SpecError, format_nearest, format_value
from flopcalc.base.vocabulary import CONVENTIONS, Convention
from flopcalc.core.count.flops import Flops
from flopcalc.core.count.products import CountedRow
from flopcalc.core.model.config import Source
from flopcalc.core.model.ops import Attend, Embed, Linear
from flopcalc.core.spec.expressions import MissingNameError, evaluate
from flopcalc.core.spec.spec import PARTS, Spec, find_key, find_spec
from flopcalc.core.workload.expression_units import get_decoder
from flopcalc.core.workload.pairs import causal_pairs
from flopcalc.core.workload.sums import Either, Expression, InDecoder, Pairs, Sum
from flopcalc.core.workload.workload import Workload

_FILE = "quoted_conventions.toml"
_KEYS = {"counts", "leaves_out", "source", "url", "date", "terms"}
_OPTIONAL = {"types", "otherwise", "mtp", "published_rows"}
# Query-key pairs as formulas take them. needed: under the mask; half: half a square, windows exactly; area: half a
# square, windows as an area; span, reach: every query with the keys that the last one sees; square, whole: every pair.
# half, reach and whole go by document, area, span and square by row.
PAIRS = ("needed", "half", "reach", "whole", "area", "span", "square")
_BY_DOCUMENT = ("half", "reach", "whole")
# What a layer multiplies in its forward pass, adapters left out: no quoted formula knows them.
_ROLES = ("base", "scores", "values", "activations")
_TOWERS = ("vision", "audio", "projector")
# Where a model with towers keeps the config of its language model.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config.text_config")


class PublishedConvention(NamedTuple):
    """One convention: its formula as terms that add up, what it counts, and where it was read."""

    name: str
    terms: Mapping[str, str]
    counts: str
    leaves_out: str
    source: str
    url: str
    date: str
    types: tuple[str, ...] = ()  # model types that the source has a formula for; none: all
    otherwise: str = ""  # what the source itself does with others
    mtp: str = "0"  # layers of multi-token prediction that the source's own settings train
    published_rows: int = 0  # of docs/published.md that count in it: among equals the commonest is named first


class FormulaEstimator(Protocol):
    """What a formula asks of an estimator."""

    origin: str
    source: Source
    spec: Spec

    def rows(self, load: Workload, convention: Convention) -> list[CountedRow]: ...

    def count(self, load: Workload, convention: Convention) -> Flops: ...

    def parameters(self) -> dict[str, int]: ...


class QuotedFile(NamedTuple):
    """The file: conventions in its order, shared definitions, and what a model copies for multi-token prediction."""

    conventions: Mapping[str, PublishedConvention]
    names: Mapping[str, list[str]]


# What is quoted, where the convention that it is quoted in was asked for.
_SHARES = {
    "hfu": " The convention of an HFU is hardware.",
    "mfu": " The convention of an MFU is model, unless who quotes it says another, such as palm or 6nd.",
}


@cache
def load_quoted() -> QuotedFile:
    """The shipped conventions, checked."""
    path = os.path.join(find_data_dir(), _FILE)
    tables = load_toml(path)
    names = {
        name: [value] if isinstance(value, str) else list(value) for name, value in tables.pop("names", {}).items()
    }
    conventions: dict[str, PublishedConvention] = {}
    for name, table in tables.items():
        if wrong := (_KEYS - set(table)) | (set(table) - _KEYS - _OPTIONAL):
            raise SpecError(f"{path}: {name}: {', '.join(sorted(wrong))}: missing or not known")
        conventions[name] = PublishedConvention(name, **{**table, "types": tuple(table.get("types", ()))})
    return QuotedFile(conventions, names)


def find_quoted(name: object) -> PublishedConvention:
    """The convention of a name, or an error with the nearest names."""
    known = load_quoted().conventions
    if isinstance(name, str) and name.lower() in known:
        return known[name.lower()]
    near = _SHARES.get(name.lower()) or format_nearest(name, known) if isinstance(name, str) else ""
    raise FlopcalcError(f"no convention {format_value(name)}.{near} Known: {', '.join(known)}")


def count_quoted(estimator: FormulaEstimator, load: Workload, name: str, mtp: int | None = None) -> dict[str, int]:
    """FLOPs of one step under a quoted convention, term by term; `mtp`: layers of multi-token prediction that train."""
    quoted = find_quoted(name)
    if estimator.origin == "trace":
        if name == "full":
            return {"total": estimator.count(load, "full").total}
        raise FlopcalcError(f"convention {name} needs a model's layers: of a traced model only full is known")
    scope = QuotedScope(estimator, load, quoted.mtp if mtp is None else str(mtp))
    return {term: scope.evaluate_whole(text, f"convention {name}, {term}") for term, text in quoted.terms.items()}


class QuotedScope:
    """The names of a formula: dims, parameters, tokens, and forward FLOPs by part, of one model on one workload."""

    def __init__(
        self, estimator: FormulaEstimator, load: Workload, mtp: str = "0", names: Mapping[str, list[str]] | None = None
    ) -> None:
        self._estimator = estimator
        self._load = load
        self._mtp = mtp
        self._names = {**load_quoted().names, **(names or {})}

    def evaluate_whole(self, text: str, what: str) -> int:
        """The value of an expression that must be a whole number of at least 0."""
        try:
            value = evaluate(text, self)
        except MissingNameError as error:
            raise FlopcalcError(f"{what}: {self._estimator.source.name} has no one {error.name}") from None
        if isinstance(value, bool) or getattr(value, "denominator", None) != 1 or value < 0:
            raise SpecError(f"{what}: {text!r} is {format_value(value)}, not a whole number")
        return int(value)

    def lookup(self, name: str) -> Any:
        if name in self._facts:
            return self._facts[name]
        if name in self._names:
            value = self._facts[name] = self._first(name)
            return value
        head, _, rest = name.partition(".")
        if head == "config":
            return self._read_config(name, rest)
        if head == "exact" and rest in CONVENTIONS:
            return self._estimator.count(self._load, rest).total
        if head == "mtp" and rest in self._mtp_sums:
            return self._mtp_sums[rest]
        raise MissingNameError(name)

    def _first(self, name: str) -> Any:
        """The first entry of a shared definition whose names all have values."""
        for text in self._names[name]:
            try:
                return evaluate(text, self)
            except MissingNameError:
                continue
        raise MissingNameError(name)

    def _read_config(self, name: str, key: str) -> Any:
        """A key of the config, or of its language model's; else the default that the spec has for it."""
        places = list(_list_configs(self._estimator))
        for config, spec in places:
            for each in (key, *spec.renamed.get(key, ())):
                found, value = find_key(config, each)
                if found and value is not None:
                    return value
        for _, spec in places:
            if spec.defaults.get(key) is not None:
                return spec.defaults[key]
        raise MissingNameError(name)

    @cached_property
    def _rows(self) -> list[CountedRow]:
        return self._estimator.rows(self._load, "model")

    @cached_property
    def _main(self) -> str:
        """The path of the stack with the most layers of the language model."""
        sizes: dict[str, int] = {}
        for block in {id(row.block): row.block for row in self._rows}.values():
            if block.group == "language" and block.layers is not None:
                sizes[block.path] = sizes.get(block.path, 0) + len(block.layers)
        return max(sizes, key=lambda path: sizes[path], default="")

    @cached_property
    def _facts(self) -> dict[str, Any]:
        load, parameters = self._load, self._estimator.parameters()
        decoder = load.decoder
        facts: dict[str, object] = {
            "model_type": self._estimator.source.config["model_type"],
            "passes": 3 if load.phase == "train" else 1,
            "tokens": load.tokens,
            "positions": load.rows * load.seq + (decoder.rows * decoder.seq if decoder is not None else 0),
            "seq": decoder.seq if decoder is not None else load.seq,
            "patches": sum(t * h * w for t, h, w in load.all_grids),
            "total": parameters["total"],
            "active": parameters["active"],
            **_fold_parameters(self._rows),
            **_fold_layers(self._rows, self._main),
            **_fold_flops([(row, row.block.copies) for row in self._rows], load),
        }
        facts.update(_find_dims(self._rows))
        return facts

    @cached_property
    def _mtp_sums(self) -> dict[str, int]:
        """Sums of the layers that multi-token prediction adds, each a copy of a layer of the main stack."""
        depth = self.evaluate_whole(self._mtp, "multi-token prediction")
        copied = self.lookup("mtp_layers") if depth else []
        skipped = tuple(self.lookup("mtp_skipped"))
        rows = [
            (row, depth * copied.count(layer))
            for row in self._rows
            if row.block.path == self._main and not row.row.op.name.startswith(skipped)
            for layer in dict.fromkeys(copied)
            if layer in (row.block.layers or ())
        ]
        active = sum((row.row.parameters - row.row.inactive) * times for row, times in rows)
        sums = _fold_flops(rows, self._load)
        return {
            "depth": depth,
            "active": active,
            # A layer with a scan has one convolution.
            "ssm_layers": sum(times for row, times in rows if row.row.op.part == "ssm" and row.row.op.kind == "conv"),
            **sums,
        }


def _list_configs(estimator: FormulaEstimator) -> Iterator[tuple[dict[str, Any], Spec]]:
    """The config of a model and that of the language model inside it, each with its spec."""
    yield estimator.source.config, estimator.spec
    for key in _INNER:
        _, inner = find_key(estimator.source.config, key)
        if isinstance(inner, dict):
            yield inner, find_spec(str(inner.get("model_type", ""))) or estimator.spec


def _fold_parameters(rows: Iterable[CountedRow]) -> dict[str, int]:
    """Parameters of look-up tables, of towers, and of a table that the head shares."""
    sums = dict.fromkeys(("embedding", "tied", "tower_parameters", "tower_embedding", "tower_weights"), 0)
    for counted in rows:
        op, copies = counted.row.op, counted.block.copies
        is_tower = counted.block.group in _TOWERS
        if isinstance(op, Embed):
            sums["tower_embedding" if is_tower else "embedding"] += counted.row.parameters * copies
        if is_tower:
            sums["tower_parameters"] += (counted.row.parameters - counted.row.inactive) * copies
            sums["tower_weights"] += op.weight_size * copies if isinstance(op, Linear) else 0
        if op.part == "lm_head" and op.tied is not None:
            sums["tied"] += op.n_in * op.n_out
    return sums


def _fold_layers(rows: Iterable[CountedRow], main: str) -> dict[str, int]:
    """Layers of the main stack: all, and those with attention, with a scan, with experts."""
    found: dict[str, set[int]] = {"layers": set(), "attention_layers": set(), "ssm_layers": set(), "moe_layers": set()}
    for counted in rows:
        if counted.block.path != main or counted.block.layers is None:
            continue
        op, layers = counted.row.op, set(counted.block.layers)
        found["layers"] |= layers
        if isinstance(op, Attend):
            found["attention_layers"] |= layers
        if op.part == "ssm":
            found["ssm_layers"] |= layers
        if op.part == "mlp" and op.copies > 1:
            found["moe_layers"] |= layers
    return {name: len(layers) for name, layers in found.items()}


def _find_dims(rows: Iterable[CountedRow]) -> dict[str, int]:
    """Dims of the language model that have one value in all its layers."""
    found: dict[str, set[int]] = {}
    for counted in rows:
        op = counted.row.op
        if counted.block.group != "language":
            continue
        if isinstance(op, Attend) and op.part == "attention_scores":
            for name, value in (("heads", op.heads), ("kv_heads", op.kv_heads), ("qk_dim", op.qk), ("v_dim", op.v)):
                found.setdefault(name, set()).add(value)
        elif op.part == "lm_head" and op.n_out:
            found.setdefault("hidden", set()).add(op.n_in)
            found.setdefault("vocab", set()).add(op.n_out)
        elif op.copies > 1:
            found.setdefault("experts", set()).add(op.copies)
            found.setdefault("experts_per_token", set()).add(op.active)
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def _fold_flops(rows: Iterable[tuple[CountedRow, int]], load: Workload) -> dict[str, int]:
    """Forward FLOPs by part; of attention scores, by how pairs are taken."""
    sums = {part: 0 for part in PARTS if part != "attention_scores"} | {f"attention.{how}": 0 for how in PAIRS}
    sums["tower_square"] = 0
    image_pairs = sum((t * h * w) ** 2 for t, h, w in load.all_grids)
    for counted, copies in rows:
        for product, value in zip(counted.row.products, counted.values, strict=True):
            if product.role not in _ROLES:
                continue
            flops = product.flops * product.passes.forward * copies
            if counted.row.op.part == "vision" and isinstance(counted.row.op, Attend):
                sums["tower_square"] += flops * image_pairs
            if counted.row.op.part != "attention_scores":
                sums[counted.row.op.part] += flops * value
                continue
            for how in PAIRS:
                sums[f"attention.{how}"] += flops * _count_double_pairs(product.rows, load, how) // 2
    return sums


def _count_double_pairs(rows: Sum, load: Workload, how: str) -> int:
    """Twice the query-key pairs, for half a square of an odd length is no whole number."""
    if how == "needed" or load.phase == "decode":
        return 2 * rows.count(load, "model")
    if isinstance(rows, InDecoder):
        return _count_double_pairs(rows.inner, get_decoder(load), how)
    lengths = {load.seq: load.rows}
    if how in _BY_DOCUMENT and load.documents is not None:
        lengths = Counter(load.documents)
    if isinstance(rows, Pairs):
        return sum(many * _double_pairs(length, rows, how) for length, many in lengths.items())
    if isinstance(rows, (Either, Expression)) and how != "area":
        if how in ("square", "whole"):
            return 2 * rows.count(load, "full")
        if how in ("span", "reach"):
            return sum(2 * many * length * _count_last(rows, load, length) for length, many in lengths.items())
    return 2 * rows.count(load, "model")


def _double_pairs(length: int, pairs: Pairs, how: str) -> int:
    seen = min(pairs.window or length, length)
    if how in ("square", "whole") or pairs.mask == "full":
        return 2 * length * length
    if how == "half":
        return length * length if seen == length else 2 * causal_pairs(length, seen)
    return 2 * length * seen - (seen * seen if how == "area" else 0)


def _count_last(rows: Sum, load: Workload, length: int) -> int:
    """Pairs of the last query of a sequence."""
    whole, before = (
        rows.count(load.replace(rows=1, seq=size, documents=None, layout="unpadded"), "model") if size > 0 else 0
        for size in (length, length - 1)
    )
    return whole - before
