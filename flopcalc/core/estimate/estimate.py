"""Estimator and Estimate: a bound model in; FLOPs of one step out, exact ints at once, the breakdown when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack, cast, runtime_checkable

from flopcalc.base.errors import FlopcalcError, WorkloadError, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.presentation import find_presenter
from flopcalc.base.rows import Rows, Table, shorten
from flopcalc.base.units import check_size, format_flops, format_share
from flopcalc.base.vocabulary import (
    BY,
    CONVENTIONS,
    By,
    Convention,
    Kernel,
    Phase,
    PickedKernel,
    Recompute,
    check_flag,
    check_word,
)
from flopcalc.core.count.flops import NO_FLOPS, Flops
from flopcalc.core.count.products import CountedRow, Weights
from flopcalc.core.estimate.inputs import PLAIN, CallMedia, Inputs, check_no_sampling, make_load, read_call
from flopcalc.core.estimate.model_counts import Identity, ModelCounts
from flopcalc.core.model.ops import Op, join
from flopcalc.core.spec.spec import PARTS
from flopcalc.core.workload.workload import Media, Workload, make_workload
from flopcalc.hardware.devices import Device

if TYPE_CHECKING:  # of a diffusion pipeline alone
    from flopcalc.core.estimate.sampling import Sampling


@runtime_checkable
class Estimator(ModelCounts, Protocol):
    """A model bound once, counted from its spec or traced: call it with a workload."""

    only_length: int | None = None  # of a traced module that has a batch and no length

    def __call__(
        self,
        batch_size: int = 1,
        seq_len: int | None = None,
        *,
        lengths: Iterable[int] | None = None,
        batch: Mapping[str, object] | None = None,
        phase: Phase = "train",
        context: int | None = None,
        logits: int | str | None = None,
        decoder_seq_len: int | None = None,
        **media: Unpack[CallMedia],
    ) -> Estimate:
        """FLOPs of one step on this workload; a batch's values on a device are not read (that would stall it).

        Images, videos and audio are those of the whole batch: `images` are files or (width, height) in pixels,
        `image_grid_thw` the same in patches; `audio` is in seconds, `clips` the same in frames of the model's feature
        extractor. `text` is the length without their tokens, instead of `seq_len`.
        """
        if isinstance(batch, (int, str)) and batch_size == 1:  # an option's own name is taken too
            batch_size = cast("int", batch)
        elif type(batch_size) is not int and isinstance(batch_size, Mapping):
            raise WorkloadError("a batch of tensors is given by name: batch=…")
        elif batch is not None:
            others = (seq_len, lengths, context, decoder_seq_len, *media.values())
            if type(batch_size) is not int or batch_size != 1 or any(other is not None for other in others):
                raise WorkloadError("batch already says sizes, lengths and images: give it alone")
            check_no_sampling(self.source.name, phase)
            return self.estimate_batch(batch, phase=phase, logits=logits, read_device=False)
        if not PLAIN.issuperset(media):
            sizes = {
                "batch_size": batch_size, "seq_len": seq_len, "lengths": lengths, "decoder_seq_len": decoder_seq_len,
                "phase": phase, "context": context, "logits": logits,
            }  # fmt: skip
            estimate, notes = self.estimate_inputs(read_call({**sizes, **media}))
            return estimate.add_notes(notes) if notes else estimate
        # A training loop calls this at every step: grids and clips are taken as they are.
        check_no_sampling(self.source.name, phase)
        load = make_workload(
            batch_size,
            self.only_length if seq_len is None else seq_len,
            lengths=lengths,
            phase=phase,
            context=context,
            logits=logits,
            decoder_seq_len=decoder_seq_len,
            **cast("Media", media),
        )
        if load.grids and self.vision is not None and self.vision.kind == "tiles":
            for grid in load.grids:
                self.vision.check_tiles(grid, "image_grid_thw")
        return self.estimate(load)

    def estimate_inputs(self, inputs: Inputs) -> tuple[Estimate, list[str]]:
        """FLOPs of one step on such samples, and notes on what was assumed."""
        load, notes = make_load(self, inputs)
        return self.estimate(load), notes

    def estimate(self, load: Workload, notes: tuple[str, ...] = ()) -> Estimate: ...

    def estimate_batch(
        self,
        batch: Mapping[str, object],
        *,
        phase: Phase = "train",
        logits: int | str | None = None,
        read_device: bool = True,
    ) -> Estimate: ...

    def change(
        self,
        *,
        recompute: Recompute | None = None,
        convention: Convention | None = None,
        attention_kernel: Kernel | None = None,
        compute: str | None = None,
        device: Device | None = None,
    ) -> Estimator: ...


class Term(NamedTuple):
    """One workload on one model, and how often it runs."""

    estimator: Estimator
    load: Workload
    times: int


class ModuleRow(NamedTuple):
    """FLOPs of a module, or of all modules whose paths differ only in the layer's number."""

    path: str
    kind: str
    copies: int
    forward: int
    backward: int
    recompute: int
    clipping: int
    parameters: int


class PartRow(NamedTuple):
    """FLOPs of a component, or of a kind of operation."""

    name: str
    forward: int
    backward: int
    recompute: int
    clipping: int


@frozen()
class Estimate(Value):
    """FLOPs of one step: exact ints at once, the breakdown when asked for."""

    terms: tuple[Term, ...]
    flops: Flops
    _notes: tuple[str, ...] = ()
    pipeline: Sampling | None = None  # of a diffusion pipeline
    gpus: int = 1  # that share the step
    replicas: int = 1  # micro-batches that run at once, on a GPU or a group of GPUs each
    passes: Mapping[str, Estimate] = {}  # of a step that has others than its own: see objective.py; never changed
    _own_notes: tuple[str, ...] = ()  # true of this step alone, not of a sum or a multiple

    @property
    def trained(self) -> Estimate:
        """The pass that trains, of a step with others; else the whole."""
        return self.passes.get("train", self)

    @property
    def forward(self) -> int:
        return self.flops.forward

    @property
    def backward(self) -> int:
        return self.flops.backward

    @property
    def recompute(self) -> int:
        return self.flops.recompute

    @property
    def clipping(self) -> int:
        return self.flops.clipping

    @property
    def total(self) -> int:
        return self.flops.total

    @property
    def convention(self) -> Convention:
        return self.terms[0][0].convention

    @property
    def attention_kernel(self) -> PickedKernel:
        return self.terms[0][0].attention_kernel

    @property
    def tokens(self) -> int:
        """Real tokens that the language model sees; of a step with several passes, those that it trains on."""
        return sum(estimator.count_tokens(load) * times for estimator, load, times in self.trained.terms)

    @property
    def per_token(self) -> int:
        """Whole FLOPs of the step per token; 0 where it has images alone."""
        return self.total // self.tokens if self.tokens else 0

    def __add__(self, other: Estimate) -> Estimate:
        if not isinstance(other, Estimate):
            return NotImplemented
        if other.convention != self.convention:
            raise FlopcalcError(f"cannot add FLOPs of convention {other.convention} to {self.convention}")
        if self.convention == "hardware" and other.attention_kernel != self.attention_kernel:
            raise FlopcalcError(f"cannot add FLOPs of kernel {other.attention_kernel} to {self.attention_kernel}")
        if (other.gpus, other.replicas) != (self.gpus, self.replicas):
            steps = [f"{each.gpus} GPUs in {each.replicas} groups" for each in (other, self)]
            raise FlopcalcError(f"cannot add a step of {steps[0]} to one of {steps[1]}")
        terms, notes = _merge_terms(self.terms + other.terms), tuple(dict.fromkeys(self._notes + other._notes))
        return Estimate(terms, self.flops + other.flops, notes, None, self.gpus, self.replicas)

    def __radd__(self, other: object) -> Estimate:
        return self if other == 0 else NotImplemented  # sum() starts from 0

    def __mul__(self, times: int) -> Estimate:
        if type(times) is not int:
            return NotImplemented
        if times < 1:
            raise FlopcalcError(f"an estimate can be multiplied by a whole number of at least 1, not {times}")
        terms = tuple(term._replace(times=term.times * times) for term in self.terms)
        pipeline = self.pipeline.times(times) if self.pipeline else None
        passes = {name: each * times for name, each in self.passes.items()}
        return Estimate(terms, self.flops * times, self._notes, pipeline, self.gpus, self.replicas, passes)

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Estimate) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.forward, self.backward, self.recompute, self.clipping, self.convention))

    def add_notes(self, notes: Iterable[str], own: Iterable[str] = ()) -> Estimate:
        """The same estimate with more notes, and `own` ones that a sum or a multiple of it leaves out."""
        return self.replace(_notes=(*self._notes, *notes), _own_notes=(*self._own_notes, *own))

    def spread(self, gpus: int, replicas: int) -> Estimate:
        """The step of a whole job: `replicas` such steps at once, on all its GPUs."""
        return (self * replicas).replace(gpus=gpus, replicas=replicas)

    @property
    def global_batch(self) -> int:
        """Sequences (of a model without text, samples) of a step, on all GPUs."""
        terms = self.terms[:1] if self.pipeline is not None else self.trained.terms
        is_step = self.pipeline is None or self.pipeline.phase == "train"
        joined = 1 if self.pipeline is None else self.pipeline.joined
        return sum(load.rows // joined * (times if is_step else self.replicas) for _, load, times in terms)

    def move(self, device: Device) -> Estimate:
        """The same work on a device: its kernel where none was asked for, and what was measured on it."""
        if all(each.identity.device == device.id or each.origin != "spec" for each, _, _ in self.terms):
            return self
        moved = sum(each.change(device=device).estimate(load) * times for each, load, times in self.terms) or self
        passes = {name: each.move(device) for name, each in self.passes.items()}
        return moved.replace(gpus=self.gpus, replicas=self.replicas, passes=passes)

    def total_under(self, convention: Convention) -> int:
        """The total FLOPs of the same work under another convention."""
        check_word(convention, CONVENTIONS, "convention")
        return sum(sum(estimator.count(load, convention)) * times for estimator, load, times in self.terms)

    def under(self, name: str, *, mtp: int | None = None) -> int:
        """FLOPs of the same step under a convention that people quote, such as palm, 6nd or megatron.

        `mtp` is the number of layers of multi-token prediction that train; default: what the formula's source takes.
        """
        return sum(self.terms_under(name, mtp=mtp).values())

    def terms_under(self, name: str, *, mtp: int | None = None) -> dict[str, int]:
        """As `under`, term by term of the convention's formula."""
        from flopcalc.core.estimate.published_conventions import count_quoted  # imported lazily: few calls need it

        depth = None if mtp is None else check_size(mtp, "mtp", 0)
        sums: dict[str, int] = {}
        for estimator, load, times in self.terms:
            for term, flops in count_quoted(estimator, load, name, depth).items():
                sums[term] = sums.get(term, 0) + flops * times
        return sums

    @property
    def totals(self) -> dict[str, int | None]:
        """The total under every convention; None where it cannot be known (of a traced model, all but full)."""
        known = ("full",) if any(estimator.origin == "trace" for estimator, _, _ in self.terms) else CONVENTIONS
        return {convention: self.total_under(convention) if convention in known else None for convention in CONVENTIONS}

    def by_component(self) -> dict[str, Flops]:
        """Component -> forward, backward, recomputed, clipping FLOPs; all components, in a fixed order."""
        return {**dict.fromkeys(PARTS, NO_FLOPS), **self._sum_by(lambda op: op.part)}

    def by_kind(self) -> dict[str, Flops]:
        """Kind of operation (linear, conv, attend, …) -> forward, backward, recomputed, clipping FLOPs."""
        return self._sum_by(lambda op: op.kind)

    def by_pass(self) -> dict[str, Flops]:
        """Pass -> FLOPs: train, and what an objective adds (reference, rollout, score)."""
        return {name: each.flops for name, each in (self.passes or {self.terms[0].load.phase: self}).items()}

    def by_dtype(self, convention: Convention | None = None) -> dict[str, Flops]:
        """Number format -> FLOPs of the products that are computed in it, most first; under the own convention."""
        counted_as = self.convention if convention is None else check_word(convention, CONVENTIONS, "convention")
        sums: dict[str, Flops] = {}
        for estimator, load, times in self.terms:
            for name, flops in estimator.count_formats(load, counted_as).items():
                sums[name] = sums.get(name, NO_FLOPS) + flops * times
        return dict(sorted(sums.items(), key=lambda item: -item[1].total))

    @property
    def weights(self) -> list[Weights]:
        """Parameters and bytes of the model by the format that they are stored in; of all that train, if several."""
        by_format: dict[str, Weights] = {}
        for estimator in {each.identity: each for each, _, _ in self.trained.terms}.values():
            for held in estimator.count_weights():
                by_format[held.format] = by_format.get(held.format, Weights(held.format, 0, 0)).add(held)
        return sorted(by_format.values(), key=lambda held: -held.total_bytes)

    def _sum_by(self, key: Callable[[Op], str]) -> dict[str, Flops]:
        sums: dict[str, Flops] = {}
        for counted, flops, times, _ in self._rows():
            name = key(counted.row.op)
            sums[name] = sums.get(name, NO_FLOPS) + flops * (counted.block.copies * times)
        return sums

    def by_module(self, depth: int | None = None, *, per_layer: bool = False) -> Rows[ModuleRow]:
        """Rows per module path, layers folded into '*' unless per_layer, cut to `depth` names."""
        check_flag(per_layer, "per_layer")
        if depth is not None:
            check_size(depth, "depth")
        modules: dict[str, _ModuleSum] = {}
        stages: dict[str, int] = {}
        for (block, row, _), flops, times, is_first in self._rows():
            layers: tuple[int | None, ...] = block.layers if block.layers is not None else (None,)
            groups = [(layer,) for layer in layers] if per_layer else [layers]
            for group in groups:
                prefix = block.path
                if block.layers is not None:
                    prefix += f".{group[0]}" if per_layer else ".*"
                path = join(prefix, row.op.name)
                names = path.split(".")
                cut = ".".join(names[:depth]) if depth is not None else path
                # Layers that count alike come together: their place in the model puts them back in order.
                place = (stages.setdefault(block.path, len(stages)), group[0] or 0, len(modules))
                entry = modules.setdefault(cut, _ModuleSum(place))
                entry.flops += flops * (len(group) * times)
                entry.kinds.add(row.op.kind if cut == path else "module")
                entry.layers.update(group if "*" in cut.split(".") else (None,))
                if is_first:
                    entry.parameters += row.parameters * len(group)
        ordered = sorted(modules.items(), key=lambda item: item[1].place) if per_layer else modules.items()
        return Rows(
            ModuleRow(
                path,
                next(iter(entry.kinds)) if len(entry.kinds) == 1 else "module",
                len(entry.layers),
                *entry.flops,
                entry.parameters,
            )
            for path, entry in ordered
        )

    def _rows(self) -> Iterator[tuple[CountedRow, Flops, int, bool]]:
        """Every row, the FLOPs of one layer of it, how often it runs, and whether its model is met first."""
        seen: set[Identity] = set()
        for estimator, load, times in self.terms:
            is_first = estimator.identity not in seen
            seen.add(estimator.identity)
            for counted in estimator.rows(load, estimator.convention):
                flops = counted.flops
                yield counted, flops if load.phase == "train" else Flops(flops.forward), times, is_first

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of the model that trains; of all models, where estimates of several were added."""
        counts = [each.parameters() for each in {each.identity: each for each, _, _ in self.trained.terms}.values()]
        keys = [key for key in ("total", "active", "trainable") if all(key in each for each in counts)]
        return {key: sum(each[key] for each in counts) for key in keys}  # a trace does not know the active ones

    @property
    def notes(self) -> list[str]:
        notes = [*self._notes, *self._own_notes]
        trained = {estimator.identity: load.phase for estimator, load, _ in self.trained.terms}
        for estimator, load, _ in self.terms:
            if self.passes and load.phase != trained.get(estimator.identity, load.phase):
                continue  # another pass of the model that trains
            notes += [note for note in estimator.notes(load) if note not in notes]
        return notes + self._describe_extras()

    def _describe_extras(self) -> list[str]:
        """What recomputation and clipping execute in the whole step, where the convention leaves it out."""
        executed, left_out = NO_FLOPS, NO_FLOPS
        hooks: dict[str, int] = {}
        for estimator, load, times in self.terms:
            recipe = estimator.recipe
            is_plain = recipe.recompute == "none" and recipe.clipping == "none"
            if estimator.origin == "trace" or load.phase != "train" or is_plain:
                continue
            flops = estimator.count(load, "hardware") * times
            executed += flops
            left_out += flops if estimator.convention != "hardware" else NO_FLOPS
            for tower, extra in estimator.count_hooks(load).items():
                hooks[tower] = hooks.get(tower, 0) + extra * times
        notes = []
        for what, extra in (("recomputation", left_out.recompute), ("clipping", left_out.clipping)):
            if extra:
                notes.append(f"{what} would add {format_flops(extra)} ({extra:,}) under convention hardware")
        for tower, extra in hooks.items():
            notes.append(
                f"gradient checkpointing makes the input of the frozen {tower} tower require a gradient, so its "
                f"backward pass runs for nothing: {format_flops(extra)}, {format_share(extra, executed.total)} of the "
                "FLOPs under convention hardware; model.disable_input_require_grads() after "
                "gradient_checkpointing_enable() saves them (with use_reentrant=False)"
            )
        return notes

    def to_dict(self, depth: int | None = None) -> dict[str, Any]:
        """The object that `flopcalc estimate --json` prints, without mfu, hfu and run, which need more than a step."""
        from flopcalc._version import __version__

        estimator = self.terms[0][0]
        notes = self.notes
        if self.recompute:
            notes.append("the backward of components and modules includes what is recomputed in the backward pass")
        if self.clipping:
            notes.append("the backward of components and modules includes what clipping adds")
        return {
            "schema": 1,
            "version": __version__,
            "model": {
                "name": estimator.source.name,
                "model_type": estimator.source.config["model_type"],
                "spec": estimator.spec.name,
                "source": estimator.origin,
                "reference": estimator.spec.source,
                "head": estimator.head,
                "mtp": estimator.mtp,
            },
            "workload": _describe(self),
            **({"pipeline": self.pipeline.to_dict()} if self.pipeline is not None else {}),
            "recipe": estimator.recipe.to_dict(),
            "convention": self.convention,
            "attention_kernel": self.attention_kernel,
            "routing": estimator.routing_name,
            "flops": {
                "forward": self.forward,
                "backward": self.backward,
                "recompute": self.recompute,
                "clipping": self.clipping,
                "total": self.total,
            },
            **({"passes": {name: flops._asdict() for name, flops in self.by_pass().items()}} if self.passes else {}),
            "gpus": self.gpus,
            "global_batch": self.global_batch,
            "totals": self.totals,
            "components": [
                # What is recomputed and what clips runs in the backward pass, or right after it: counted there, so
                # that components sum to the total.
                {"name": name, "forward": forward, "backward": sum(rest)}
                for name, (forward, *rest) in self.by_component().items()
                if forward or any(rest)
            ],
            "modules": [
                {
                    "path": row.path,
                    "kind": row.kind,
                    "count": row.copies,
                    "forward": row.forward,
                    "backward": row.backward + row.recompute + row.clipping,
                    "parameters": row.parameters,
                }
                for row in self.by_module(depth)
            ],
            "parameters": self.parameters,
            "formats": {
                **estimator.formats.to_dict(),
                "products": [
                    {"name": name, "forward": forward, "backward": sum(rest)}
                    for name, (forward, *rest) in self.by_dtype().items()
                ],
                "weights": [held._asdict() for held in self.weights],
            },
            "mfu": None,
            "hfu": None,
            "run": None,
            "notes": notes,
        }

    def __format__(self, style: str) -> str:
        return format(self.total, style) if style else str(self)  # f"{estimate:,}" is its total

    def __repr__(self) -> str:
        estimator, load, times = self.terms[0]
        name = shorten(estimator.source.name)
        more = f" and {len(self.terms) - 1} more" if len(self.terms) > 1 else ""
        repeated = f" x {times}" if times > 1 else ""
        return (
            f"Estimate({format_flops(self.total)}: forward {format_flops(self.forward)}, backward "
            f"{format_flops(self.backward)}; {name}, {_describe_size(load)} {load.phase}{repeated}"
            f"{more}; convention {self.convention})"
        )

    def breakdown(self, by: By, depth: int | None = None) -> Table:
        """Headers and exact, named rows of one breakdown; components and kinds without work are left out."""
        check_word(by, BY, "by")
        if by == "module":
            headers = ["path", "kind", "count", "forward", "backward", "recompute", "clipping", "parameters"]
            return Table(headers, self.by_module(depth))
        sums = {
            "component": self.by_component, "kind": self.by_kind, "dtype": self.by_dtype, "pass": self.by_pass,
        }[by]()  # fmt: skip
        headers = [by, "forward", "backward", "recompute", "clipping"]
        return Table(headers, Rows(PartRow(name, *row) for name, row in sums.items() if any(row)))

    def to_pandas(self, by: By = "component", depth: int | None = None) -> Any:
        """The exact rows of a breakdown (by component, module, kind, dtype or pass) as a pandas DataFrame."""
        return self.breakdown(by, depth).to_pandas()

    def table(self, by: By = "component", depth: int | None = None) -> Table:
        """A breakdown as people read it: headers, and rows of rounded counts with their shares."""
        return find_presenter().make_table(self, by, depth)

    def describe(self) -> str:
        """The work in one line: phase, sizes, what trains."""
        return find_presenter().describe_work(self)

    def _repr_html_(self) -> str:
        return find_presenter().show_estimate(self)


def check_estimate(value: object) -> Estimate:
    """An Estimate, or an error that says what was given in its place."""
    if not isinstance(value, Estimate):
        raise FlopcalcError(f"an estimate is what estimate_flops() gives, not {format_value(value)}")
    return value


def check_tokens(estimate: Estimate, what: str) -> Estimate:
    """A step that has tokens, or an error that names what is counted in them."""
    if not check_estimate(estimate).tokens:
        raise WorkloadError(f"{what} is counted in tokens, and this step has images alone")
    return estimate


def _describe_size(load: Workload) -> str:
    return f"{load.rows} x {load.seq}" if load.seq or load.decoder is not None else describe_grids(load)


def describe_grids(load: Workload) -> str:
    """'2 images', '1 clip' or both: what a model without text reads."""
    counts = ((len(load.grids), "image"), (len(load.videos), "clip"))
    return " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in counts if count) or "no images"


def _merge_terms(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """The same workload on the same model several times is one term with a count."""
    merged: dict[tuple[Identity, Workload], Term] = {}
    for term in terms:
        key = (term.estimator.identity, term.load)
        before = merged.get(key)
        merged[key] = term if before is None else before._replace(times=before.times + term.times)
    return tuple(merged.values())


class _ModuleSum:
    """What by_module adds up for one path."""

    def __init__(self, place: tuple[int, int, int]) -> None:
        self.place = place
        self.kinds: set[str] = set()
        self.layers: set[int | None] = set()
        self.flops = NO_FLOPS
        self.parameters = 0


def _describe(estimate: Estimate) -> dict[str, Any]:
    """The workload in numbers: sizes of the first term, totals over all."""
    _, load, times = estimate.terms[0]
    is_mixed = len({other.layout for _, other, _ in estimate.trained.terms}) > 1
    is_step = estimate.pipeline is None or estimate.pipeline.phase == "train"
    images = patches = visual = 0
    joined = 1 if estimate.pipeline is None else estimate.pipeline.joined
    # Of a pipeline, the first part's: all of them work on the same images.
    for estimator, other, copies in estimate.terms[:1] if estimate.pipeline is not None else estimate.trained.terms:
        copies = 1 if estimate.pipeline is not None and estimate.pipeline.phase != "train" else copies
        images += len(other.all_grids) // joined * copies
        patches += estimator.count_patches(other) // joined * copies
        visual += estimator.count_visual_tokens(other) // joined * copies
    return {
        "batch": load.rows // joined,
        "seq": load.seq,
        "lengths": list(load.documents) if load.documents is not None else None,
        "layout": "mixed" if is_mixed else load.layout,
        "grad_accum": times // estimate.replicas if is_step else 1,
        "tokens": estimate.tokens,
        "images": images,
        "patches": patches,
        "visual_tokens": visual,
        "phase": load.phase if estimate.pipeline is None else estimate.pipeline.phase,
        "context": (load.decoder or load).context if load.phase == "decode" else None,
        "logits": load.logits,
        **({"decoder_seq": load.decoder.seq} if load.decoder is not None else {}),
        **({"clips": list(load.clips)} if load.clips else {}),
    }
