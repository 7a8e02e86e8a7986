"""A traced model: exact polynomials of the workload, solved from a few traces, in place of a spec; no torch here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypedDict

from flopcalc._version import __version__
from flopcalc.base.data import find_version
from flopcalc.base.errors import FlopcalcError, WorkloadError, format_value
from flopcalc.base.files import MAX_TABLE_BYTES, read_json, write_whole
from flopcalc.base.spelling import spell
from flopcalc.base.validate import FromZero, Keys, Rule, find_fault
from flopcalc.base.vocabulary import Component, Convention, Kernel, Phase, PipelinePhase, Recompute
from flopcalc.core.count.flops import Flops
from flopcalc.core.count.products import Block, CountedRow, Passes, Product, Row, Weights
from flopcalc.core.estimate.estimate import Estimate, Estimator, Term
from flopcalc.core.estimate.model_counts import Identity
from flopcalc.core.formats.formats import FormatOptions, make_formats
from flopcalc.core.formats.quantization import has_quantization
from flopcalc.core.formats.stored import make_plain
from flopcalc.core.model.config import Source
from flopcalc.core.model.heads import name_head
from flopcalc.core.model.ops import TracedModule
from flopcalc.core.recipe.recipe import Recipe
from flopcalc.core.spec.expressions import Names, evaluate, find_names
from flopcalc.core.spec.spec import Spec
from flopcalc.core.workload.batch import read_batch
from flopcalc.core.workload.sums import Once
from flopcalc.core.workload.workload import Workload, check_load, make_workload
from flopcalc.hardware.devices import Device

SCHEMA = 2
MAX_DECODED = 100_000
MAX_TRACED_LAYERS = 1000
MAX_SIBLINGS = 64  # sizes of one module that are traced each by itself
_LIBRARIES = ("torch", "transformers", "peft")
WHY_FULL = (
    "traced: what HF's code executes (convention full); what the model needs (model) and what fused kernels "
    "execute (hardware) cannot be seen in a trace"
)


class Polynomials(NamedTuple):
    """Per phase and kind of workload: FLOPs of every module as exact sums of coefficient x monomial."""

    phase: Phase
    has_images: bool
    monomials: tuple[str, ...]  # expressions in b, n, c, images, patches, pairs
    rows: dict[str, tuple[tuple[Fraction, ...], ...]]  # module path -> forward, backward, recompute coefficients
    reached: int = 0  # the largest length (or number of cached keys) at which it was checked
    limit: int = 0  # a window or chunk of the config that is too large to trace beyond; 0: none


class TracedModel(NamedTuple):
    """What is kept of a traced model."""

    name: str
    model_type: str
    parameters: dict[str, int]  # total and trainable; a trace cannot see how many one token reaches
    made_with: dict[str, str]
    visual: dict[str, Any]  # how images fill the sequence: {} for a text model
    polynomials: tuple[Polynomials, ...]
    # Of the example batch: 'b', 'n' or the size that it had, per axis; None in older files, where it is not known.
    axes: dict[str, list[str | int | None]]


class TracedEstimator(Estimator):
    """An Estimator whose FLOPs come from traced polynomials."""

    origin = "trace"

    def __init__(
        self,
        traced: TracedModel,
        source: Source,
        recipe: Recipe,
        asked: FormatOptions = FormatOptions(),  # noqa: B008
        retrace: Callable[[Mapping[str, tuple[int, ...]]], TracedEstimator] | None = None,
    ) -> None:
        made_with = ", ".join(f"{library} {version}" for library, version in traced.made_with.items())
        self.traced = traced
        self.source = source
        self.recipe = recipe
        self.convention = "full"
        self.attention_kernel = "eager"
        self.vision = self.audio = None
        self.stages = ()
        self.has_decoder = self.has_text_encoder = False
        self.mtp = 0
        self.head, self.renamed = str(name_head(source)), None
        self._totals: dict[tuple[str, bool], tuple[tuple[Fraction, ...], ...]] = {}
        self._retrace = retrace  # at other sizes of axes that were not solved for; None: the module is not at hand
        self._siblings: dict[tuple[Hashable, ...], TracedEstimator] = {}
        kinds = {kind for axes in traced.axes.values() for kind in axes if isinstance(kind, str)}
        self._has_length = not traced.axes or "n" in kinds or bool(traced.visual)
        self.only_length = None if self._has_length else 1
        empty: dict[str, Any] = {name: {} for name in Spec._names}
        self.spec = Spec(**{
            **empty, "name": traced.model_type, "file": "", "architecture": traced.name,
            "source": f"traced with {made_with}", "required": (), "stacks": [], "is_tower": False, "has_sdpa": True,
        })  # fmt: skip
        # A trace knows no module's weights, so the model has one format throughout.
        plain = {key: value for key, value in source.config.items() if not isinstance(value, Mapping)}
        self.formats = make_formats(plain, source.where, asked, has_adapters=bool(recipe.adapters))
        self.identity = Identity(f"trace {id(traced)}", recipe, "full", "eager", self.formats)

    def estimate(self, load: Workload, notes: tuple[str, ...] = ()) -> Estimate:
        if not check_load(load).seq:
            raise WorkloadError(f"{spell('seq')} is missing: the length that the language model sees per sample")
        if load.decoder is not None or load.clips:
            raise WorkloadError("traced: one length alone was solved for, without a decoder's length or audio")
        self._check_grids(load)
        if not self._has_length and load.seq != 1:
            raise WorkloadError(f"traced: the module has a batch and no length: leave {spell('seq')} out")
        return Estimate((Term(self, load, 1),), self.count(load, "full"), notes)

    def change(
        self,
        *,
        recompute: Recompute | None = None,
        convention: Convention | None = None,
        attention_kernel: Kernel | None = None,
        compute: str | None = None,
        device: Device | None = None,
    ) -> TracedEstimator:
        if recompute or convention != "full" or attention_kernel != "eager" or compute or device:
            raise FlopcalcError(WHY_FULL)
        return self

    def estimate_batch(
        self,
        batch: Mapping[str, object],
        *,
        phase: Phase = "train",
        logits: int | str | None = None,
        read_device: bool = True,
    ) -> Estimate:
        """FLOPs of one step on a real batch; without input_ids its sizes are read as the example's were.

        A size that was not solved for is traced anew where it differs, never scaled.
        """
        if not isinstance(batch, Mapping):
            raise WorkloadError(f"batch must be a mapping as given to the model, not {format_value(batch)}")
        other = self._find_sibling(batch)
        if other is not None:
            return other.estimate_batch(batch, phase=phase, logits=logits, read_device=read_device)
        if "input_ids" in batch or "inputs_embeds" in batch:
            load, notes = read_batch(batch, phase=phase, logits=logits, read_device=read_device)
            return self.estimate(load, tuple(notes))
        sizes: dict[str, int] = {}
        for name, axes in self.traced.axes.items():
            for kind, size in zip(axes, getattr(batch.get(name), "shape", ()), strict=False):
                if isinstance(kind, str) and sizes.setdefault(kind, int(size)) != size:
                    raise WorkloadError(f"{name}: axis {kind!r} is {size}, elsewhere in the batch {sizes[kind]}")
        if set(sizes) != ({"b", "n"} if self._has_length else {"b"}):
            raise WorkloadError(f"the batch needs what the model was traced with: {', '.join(self.traced.axes)}")
        return self.estimate(make_workload(sizes["b"], sizes.get("n", 1), phase=phase, logits=logits))

    def _find_sibling(self, batch: Mapping[str, object]) -> TracedEstimator | None:
        """The same module traced at the sizes of this batch; None where they are those of the example."""
        shapes: dict[str, tuple[int, ...]] = {}
        changed = ""
        for name, axes in self.traced.axes.items():
            shape = getattr(batch.get(name), "shape", None)
            if shape is None or not axes:
                continue
            shape = tuple(int(size) for size in shape)
            if len(shape) != len(axes):
                raise WorkloadError(f"{name} has {len(shape)} axes, and was traced with {len(axes)}")
            for at, (kind, size) in enumerate(zip(axes, shape, strict=True)):
                if isinstance(kind, int) and kind != size:
                    changed = changed or f"{name}: axis {at} is {size}, and was traced at {kind}"
            shapes[name] = tuple(size if isinstance(kind, int) else -1 for kind, size in zip(axes, shape, strict=True))
        if not changed:
            return None
        key = tuple(sorted(shapes.items()))
        if key not in self._siblings:
            if self._retrace is None:
                raise WorkloadError(f"{changed}: bind the module again with an example of this size")
            if len(self._siblings) >= MAX_SIBLINGS:
                raise WorkloadError(f"{changed}: {MAX_SIBLINGS} other sizes were traced already, bind the module again")
            self._siblings[key] = self._retrace(shapes)
        return self._siblings[key]

    def count(self, load: Workload, convention: Convention) -> Flops:
        found = self._find(load, convention)
        values = [_sum_monomial(text, load) for text in found.monomials]
        key = (found.phase, found.has_images)
        if key not in self._totals:
            self._totals[key] = _add_rows(found)
        return _sum_terms("the model", self._totals[key], values)

    def count_formats(self, load: Workload, convention: Convention) -> dict[str, Flops]:
        return {self.formats.attention: self.count(load, convention)}

    def count_weights(self) -> list[Weights]:
        total, plain = self.traced.parameters["total"], make_plain(self.formats.model)
        return [Weights(plain.name, total, plain.count_bytes(1, total)[0])]

    def rows(self, load: Workload, convention: Convention) -> list[CountedRow]:
        found = self._find(load, convention)
        values = [_sum_monomial(text, load) for text in found.monomials]
        return [_make_row(path, _sum_terms(path, coefficients, values)) for path, coefficients in found.rows.items()]

    def parameters(self) -> dict[str, int]:
        return dict(self.traced.parameters)

    def notes(self, load: Workload) -> list[str]:
        notes = [WHY_FULL]
        if has_quantization(self.source.config):
            own = self.formats.attention
            notes.append(
                f"traced: the quantization_config is not read, all is taken as {own}; {spell('compute')} says otherwise"
            )
        if load.documents is not None:
            notes.append("traced: the batch counts as full rows, padding and packed documents included")
        reached = self._find(load, "full").reached
        if load.seq + load.context > reached:
            notes.append(f"traced: the polynomial was checked up to length {reached}")
        return notes

    def _check_grids(self, load: Workload) -> None:
        merge = int(self.traced.visual.get("merge", 1))
        for t, h, w in load.all_grids:
            if not self.traced.visual.get("tokens") and (t != 1 or h % merge or w % merge):
                raise WorkloadError(f"traced: grid {t},{h},{w} must be 1,H,W with H and W multiples of {merge}")
        visual = self.count_visual_tokens(load)
        if visual > load.tokens:
            raise WorkloadError(f"{visual} visual tokens do not fit in {load.tokens} tokens")

    def count_visual_tokens(self, load: Workload) -> int:
        visual = self.traced.visual
        if visual.get("tokens"):
            return int(visual["tokens"]) * len(load.all_grids)
        merge = int(visual.get("merge", 1))
        return sum(t * h * w for t, h, w in load.all_grids) // merge**2

    def _find(self, load: Workload, convention: Convention) -> Polynomials:
        if convention != "full":
            raise FlopcalcError(WHY_FULL)
        has_images = bool(load.all_grids)
        if load.logits not in ("all", "last" if load.phase == "prefill" else "all"):
            raise WorkloadError(f"traced: logits {load.logits} were not traced; all of them for {load.phase}")
        for found in self.traced.polynomials:
            if found.phase == load.phase and found.has_images == has_images:
                if found.limit and load.seq + load.context > found.limit:
                    raise WorkloadError(
                        f"traced: length {load.seq + load.context} is beyond a window or chunk of {found.limit}, or "
                        "the longest that the module takes, where the count changes its form and nothing was traced"
                    )
                return found
        known = ", ".join(f"{p.phase}{' with images' if p.has_images else ''}" for p in self.traced.polynomials)
        raise WorkloadError(
            f"traced for {known}; not for {load.phase}{' with images' if has_images else ''}: trace it again for that"
        )


def _add_rows(found: Polynomials) -> tuple[tuple[Fraction, ...], ...]:
    """Coefficients of the whole model."""
    many = range(len(found.monomials))
    return tuple(
        tuple(sum((rows[way][i] for rows in found.rows.values()), Fraction(0)) for i in many) for way in range(3)
    )


def _sum_terms(path: str, coefficients: tuple[tuple[Fraction, ...], ...], values: list[int]) -> Flops:
    sums = [sum((c * v for c, v in zip(each, values, strict=True) if c), Fraction(0)) for each in coefficients]
    if any(value.denominator != 1 or value < 0 for value in sums):
        raise WorkloadError(f"traced: the polynomial of {path!r} gives {format_value(sums)} here: outside what holds")
    return Flops(int(sums[0]), int(sums[1]))  # convention full leaves out what is recomputed


def _make_row(path: str, flops: Flops) -> CountedRow:
    passes = (Passes(), Passes(0, 1))
    products = tuple(Product("traced", Once(), each, at) for each, at in zip(flops[:2], passes, strict=True))
    row = Row(TracedModule(name="", part=_guess_part(path), rows=Once()), products)
    return CountedRow(Block(path, None, "language", ()), row, (1, 1))


_PART_HINTS: tuple[tuple[Component, tuple[str, ...]], ...] = (
    ("lm_head", ("lm_head", "embed_out", "output_projection")), ("projector", ("projector", "merger", "connector")),
    ("vision", ("vision", "visual")), ("audio", ("audio",)), ("router", ("router", "mlp.gate.")),
    ("ssm", ("mixer", "mamba", "linear_attn")), ("mlp", ("mlp", "expert", "feed_forward", "fc1", "fc2")),
    ("attention_projections", ("attn.", "attention.")), ("attention_scores", ("attn", "attention")),
)  # fmt: skip


def _guess_part(path: str) -> Component:
    """A component from the module's path; a trace knows names only."""
    words = f"{path.lower()}."
    return next((part for part, hints in _PART_HINTS if any(hint in words for hint in hints)), "other")


@lru_cache(maxsize=65536)
def _sum_monomial(text: str, load: Workload) -> int:
    """A monomial's value; in decoding its sum over the new tokens, each with all before it cached."""
    grids = load.all_grids
    fixed = {
        "b": load.rows,
        "images": len(grids),
        "patches": sum(t * h * w for t, h, w in grids),
        "pairs": sum(t * (h * w) ** 2 for t, h, w in grids),
    }
    calls: Iterable[tuple[int, int]] = [(load.seq, 0)]
    if load.phase == "decode":
        if load.seq > MAX_DECODED:
            raise WorkloadError(f"traced: each new token is counted by itself, at most {MAX_DECODED:,}, not {load.seq}")
        calls = [(1, load.context + j) for j in range(load.seq)]
    return sum(int(evaluate(text, Names({**fixed, "n": n, "c": c}))) for n, c in calls)


# --- The cache on disk ------------------------------------------------------------------------------------------------


def find_cache_dir() -> str:
    """Where traces are kept: $FLOPCALC_CACHE, else $XDG_CACHE_HOME/flopcalc."""
    chosen = os.environ.get("FLOPCALC_CACHE")
    if chosen:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "flopcalc")


def make_key(identity: Mapping[str, object]) -> str:
    """A file's name for whatever decides a trace: config, recipe, library versions, kind of workload."""
    import hashlib  # imported lazily: few commands trace

    text = json.dumps({"schema": SCHEMA, **identity}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def read_versions() -> dict[str, str]:
    """Versions of the libraries that a trace depends on, without importing them."""
    versions = {name: find_version(name) for name in _LIBRARIES}
    return {"flopcalc": __version__, **{name: version for name, version in versions.items() if version}}


def make_trace_key(source: Source, recipe: Recipe, phase: PipelinePhase, has_images: bool) -> str:
    """The name under which the trace of a config is kept."""
    identity = {"config": source.config, "recipe": recipe.to_dict(), "phase": phase, "images": has_images}
    return make_key({**identity, **read_versions()})


_MONOMIAL_NAMES = {"b", "n", "c", "images", "patches", "pairs"}
_is_coefficient = re.compile(r"-?[0-9]{1,60}(/[1-9][0-9]{0,59})?").fullmatch
_Coefficients = list[Annotated[str, Rule(lambda text: _is_coefficient(text) is not None, "is no number")]]


class SavedPolynomials(TypedDict):
    """Polynomials in a file: coefficients are text."""

    phase: Phase
    has_images: bool
    monomials: list[str]
    # The root has no name
    rows: Annotated[dict[str, tuple[_Coefficients, _Coefficients, _Coefficients]], Keys(names=".*")]
    reached: FromZero
    limit: FromZero


class SavedTrace(TypedDict):
    """A kept trace."""

    schema: int
    name: str
    model_type: str
    parameters: Annotated[
        dict[str, int],
        Keys(("total", "trainable")),
        Rule(lambda sizes: all(size >= 0 for size in sizes.values()), "holds no counts"),
    ]
    made_with: dict[str, str]
    visual: Annotated[dict[str, Any], Keys(names=".*"), Rule(lambda sizes: _are_sizes(sizes), "holds no sizes")]
    axes: Annotated[dict[str, list[Any]], Keys(names=".*")]
    polynomials: list[SavedPolynomials]


def _are_sizes(sizes: dict[str, object]) -> bool:
    """Whether images' tokens are a size or not known, and their merge is a size."""
    given = {name: 0 if size is None else size for name, size in sizes.items()}
    return all(type(size) is int and 0 <= size < 10**9 for size in given.values()) and bool(sizes.get("merge", 1))


def check_layers(source: Source) -> None:
    """Refuse a config whose layers would take minutes to build and to run one by one."""
    waiting = [source.config]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            is_count = isinstance(key, str) and ("layer" in key or "depth" in key)
            if is_count and isinstance(value, int) and value > MAX_TRACED_LAYERS:
                raise FlopcalcError(
                    f"{source.where}: {key} is {format_value(value)}: a trace runs every layer, at most "
                    f"{MAX_TRACED_LAYERS:,} of them"
                )


def load_trace(key: str) -> TracedModel | None:
    """A kept trace, or None: a file that is missing, cut short or of another schema is traced anew."""
    path = os.path.join(find_cache_dir(), "traces", f"{key}.json")
    try:
        data = read_json(path, MAX_TABLE_BYTES, FlopcalcError)
    except FlopcalcError:
        return None
    if find_fault(data, SavedTrace) or data["schema"] != SCHEMA:
        return None
    if not all(_is_solved(entry) for entry in data["polynomials"]):
        return None
    return _make_traced(data)


def _is_solved(entry: dict[str, Any]) -> bool:
    """Whether every row has a coefficient for each monomial, and each monomial is one that a workload gives."""
    count = len(entry["monomials"])
    try:
        are_known = all(find_names(text) <= _MONOMIAL_NAMES for text in entry["monomials"])
    except FlopcalcError:
        return False
    return are_known and all(len(each) == count for rows in entry["rows"].values() for each in rows)


def _make_traced(data: dict[str, Any]) -> TracedModel:
    polynomials = tuple(
        Polynomials(
            entry["phase"],
            entry["has_images"],
            tuple(entry["monomials"]),
            {
                name: tuple(tuple(Fraction(value) for value in each) for each in coefficients)
                for name, coefficients in entry["rows"].items()
            },
            entry["reached"],
            entry["limit"],
        )
        for entry in data["polynomials"]
    )
    return TracedModel(
        data["name"],
        data["model_type"],
        data["parameters"],
        data["made_with"],
        data["visual"],
        polynomials,
        data["axes"],
    )


def save_trace(key: str, traced: TracedModel) -> str | None:
    """Keep a trace; a disk that refuses costs the next call a new trace, not this one its answer: then why."""
    folder = os.path.join(find_cache_dir(), "traces")
    data = {
        "schema": SCHEMA,
        **{
            field: getattr(traced, field)
            for field in ("name", "model_type", "parameters", "made_with", "visual", "axes")
        },
        "polynomials": [
            {
                "phase": entry.phase,
                "has_images": entry.has_images,
                "monomials": entry.monomials,
                "reached": entry.reached,
                "limit": entry.limit,
                "rows": {name: [[str(v) for v in each] for each in rows] for name, rows in entry.rows.items()},
            }
            for entry in traced.polynomials
        ],
    }
    path = os.path.join(folder, f"{key}.json")
    try:
        os.makedirs(folder, exist_ok=True)
        write_whole(path, json.dumps(data))
    except OSError as error:
        return f"the trace could not be kept in {folder}: {error.strerror}"
    return None
