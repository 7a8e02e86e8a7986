"""A batch as given to the model goes in; its shapes and host values come out at once, its FLOPs later."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from flopcalc.api import bind
from flopcalc.base.errors import WorkloadError
from flopcalc.base.vocabulary import Convention, Counting, Kernel, Phase
from flopcalc.core.count.flops import NO_FLOPS, Flops
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import is_denoiser
from flopcalc.core.model.live import strip, unwrap
from flopcalc.core.workload.sums import Logits
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.routing import Routing
from flopcalc.monitor.messages import Say
from flopcalc.monitor.values import is_tensor, read_held

# Of these, shapes alone count.
_SHAPES = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "decoder_input_ids",
    "decoder_inputs_embeds",
)
# Of these, values count: they are small, and read while they are on the host.
_VALUES = (
    "attention_mask",
    "position_ids",
    "cu_seqlens",
    "cu_seq_lens_q",
    "cu_seqlens_q",
    "image_grid_thw",
    "video_grid_thw",
    "logits_to_keep",
)
# What makes a workload class of its own.
_CLASSES = {
    **{name: name for name in ("pixel_values", "pixel_values_videos", "input_features", "input_values")},
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q"), "packed"),
}
_DECODER_VALUES = ("labels", "decoder_attention_mask")
# TRL's head (add_fused_lm_head in trl/trainer/utils.py): it forms no logits tensor, and forms logits anew in backward.
_FUSED = "fused_lm_head"
_SCORED = ("shift_labels", "labels")  # where they are not -100, logits are needed
_IGNORED = -100
_KEPT = 4096  # counted workloads that are kept
_KERNELS: dict[str, Kernel] = {"eager": "eager", "flash_attention_2": "flash", "flash_attention_3": "flash"}


_new = tuple.__new__  # as a named tuple's constructor, without its call in Python


class Fetcher(Protocol):
    """Brings values from the device, now or later."""

    def take(self, name: str, tensor: Any, holder: Any) -> Any: ...


class TensorShape:
    """Replaces a tensor of which only the shape counts."""

    __slots__ = ("shape",)

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return int(self.shape[0])


class Snapshot(NamedTuple):
    """What is kept of a batch on the training thread."""

    key: tuple[tuple[str, Any], ...]  # the shape of everything that counts
    values: Mapping[str, Any]  # of what counts by its values, those: on the host, or on their way there
    head: LabelHead | None = None  # None: the model's own


class LabelHead(NamedTuple):
    """A head that is given labels, and forms logits where it wants to."""

    labels: Any
    is_shifted: bool  # each label is at the position whose logits predict it
    is_compact: bool  # logits are formed where there are labels alone


Formats = Mapping[str, float]  # number format -> FLOPs


class BatchWork(NamedTuple):
    """What one micro-batch asked for: FLOPs by the number format that they are computed in, and sizes."""

    load: Workload
    model: Formats
    hardware: Formats | None  # of a traced model it is not known
    tokens: int
    padded_tokens: int
    samples: int
    images: int
    notes: tuple[str, ...] = ()

    @property
    def model_flops(self) -> float:
        return sum(self.model.values())

    @property
    def hardware_flops(self) -> float | None:
        return None if self.hardware is None else sum(self.hardware.values())


class Intake:
    """Reads batches for one bound model."""

    def __init__(self, estimator: Estimator, context_parallel: int = 1, fp32: str = "fp32") -> None:
        self.estimator = estimator
        self.context_parallel = context_parallel
        self._fp32 = fp32  # what float32 is computed in: tf32 where torch may
        vision = estimator.vision.dims if estimator.vision is not None else None
        table = vision.spec.vision if vision is not None else {}
        own = [str(table[word]) for word in ("flattened", "sizes", "canvas") if table.get(word)]
        audio = [estimator.audio.key] if estimator.audio is not None and estimator.audio.axis is not None else []
        own += [estimator.audio.key] if estimator.audio is not None and estimator.audio.axis is None else []
        latents = getattr(estimator, "latents", None)  # of a diffusion model
        audio += [latents.key, latents.text_key] if latents is not None else []
        traced = list(getattr(getattr(estimator, "traced", None), "axes", ()))
        self._counts_by = {  # name -> whether values count, or the shape alone
            **dict.fromkeys((*_SHAPES, *audio, *traced), False),
            **dict.fromkeys((*_VALUES, *own, *(_DECODER_VALUES if estimator.has_decoder else ())), True),
        }
        self._plain: OrderedDict[Hashable, BatchWork] = OrderedDict()
        self._counted: OrderedDict[Hashable, dict[str, int]] = OrderedDict()
        self._kinds: dict[Hashable, Hashable] = {}  # workload classes of batches of text, by shape and names
        self._eager: Estimator | None = None
        self.counts_tokens = True  # a later stage of a pipeline is given the same ones once more

    def take(self, batch: Mapping[str, object], fetcher: Fetcher | None, holder: object) -> Snapshot:
        """A snapshot. On the training thread: values on the device are fetched for the holder, and not waited for."""
        key: list[tuple[str, object]] = []
        values: dict[str, object] = {}
        for name, value in batch.items():
            by_value = self._counts_by.get(name)
            if by_value is None or value is None:
                continue
            shape = getattr(value, "shape", None)
            key.append((name, shape))
            if not by_value and shape is not None:
                continue
            if name == "position_ids" and batch.get("attention_mask") is not None:
                continue  # with a mask, HF does not keep documents apart
            if name == "attention_mask" and shape is not None and len(shape) != 2:
                continue
            if fetcher is not None and getattr(value, "is_cuda", False):
                value = fetcher.take(name, value, holder)
            else:
                value = copy_value(value)
            values[name] = value
        head = _take_head(batch, fetcher, holder) if batch.get(_FUSED) else None
        return _new(Snapshot, (tuple(key), values, head))

    def classify(self, batch: Mapping[str, object]) -> Hashable:
        """The workload class that a measured factor holds for: the length's power of two, and inputs besides text."""
        sizes = (getattr(batch.get("input_ids"), "shape", None), *batch)
        kind = self._kinds.get(sizes)
        if kind is None:
            kind = self._classify(batch)
            if sizes[0] is not None and _CLASSES.keys().isdisjoint(batch):  # else values decide: they may be None
                if len(self._kinds) >= _KEPT:
                    self._kinds.clear()
                self._kinds[sizes] = kind
        return kind

    def is_told_by(self, sizes: Hashable) -> bool:
        """Whether these sizes alone, the shape of the text and the names of a batch, determine its workload class."""
        return sizes in self._kinds

    def _classify(self, batch: Mapping[str, object]) -> Hashable:
        ids = batch.get("input_ids")
        if ids is None:
            ids = batch.get("inputs_embeds")
        shape = getattr(ids, "shape", None)
        if shape is None and isinstance(ids, Sequence) and ids:
            shape = (0, len(ids[0]))
        found: list[Hashable] = [int(shape[1]).bit_length() if shape is not None and len(shape) > 1 else 0]
        for name, value in batch.items():
            if name in _CLASSES and value is not None:
                found.append(_CLASSES[name])
        return tuple(found)

    def count(self, snapshot: Snapshot, phase: Phase = "train") -> BatchWork:
        """FLOPs and sizes of a snapshot whose copies have arrived."""
        if snapshot.values or snapshot.head is not None:
            return self._count(snapshot, phase)
        found = self._plain.get((phase, snapshot.key))
        if found is None:
            found = self._plain[phase, snapshot.key] = self._count(snapshot, phase)
            if len(self._plain) > _KEPT:
                self._plain.popitem(last=False)
        return found

    def count_generated(self, prompt: BatchWork, new: int, lengths: Sequence[int]) -> BatchWork:
        """A prompt, then `new` tokens for each row, one by one; of these a row needs `lengths`."""
        load, rows = prompt.load, prompt.load.rows
        if self.estimator.has_decoder or self.estimator.origin == "trace":
            raise WorkloadError("what an encoder-decoder or a traced module generates is not counted")
        model: Counter[str] = Counter(prompt.model)
        hardware: Counter[str] = Counter(prompt.hardware or {})
        contexts = load.documents if load.documents is not None and len(load.documents) == rows else (load.seq,) * rows
        for (context, length), times in Counter(zip(contexts, lengths, strict=True)).items():
            if length:
                alone = Workload(1, length, phase="decode", context=context)
                model.update({name: times * flops for name, flops in self._find("own", alone).items()})
        if new:
            hardware.update(self._find("hardware", Workload(rows, new, phase="decode", context=load.seq)))
        return prompt._replace(model=model, hardware=hardware)

    def count_lengths(
        self, prompts: Sequence[int], completions: Sequence[int], generates: bool
    ) -> tuple[Formats, Formats | None]:
        """FLOPs of sequences that were run elsewhere, without padding: generated, or run through as a whole."""
        model: Counter[str] = Counter()
        hardware: Counter[str] = Counter()
        for (prompt, new), times in Counter(zip(prompts, completions, strict=True)).items():
            loads = [Workload(1, prompt + new, phase="forward")]
            if generates:
                loads = [Workload(1, prompt, phase="prefill")] if prompt else []
                if new > 1:  # the last one is never fed
                    loads.append(Workload(1, new - 1, phase="decode", context=prompt))
            for load in loads:
                model.update({name: times * flops for name, flops in self._find("own", load).items()})
                if self.estimator.origin != "trace":
                    hardware.update({name: times * flops for name, flops in self._find("hardware", load).items()})
        return model, None if self.estimator.origin == "trace" else hardware

    def count_eager(self, work: BatchWork, head: LabelHead | None = None) -> int:
        """What an operator counter sees of it: every pair, and what is recomputed."""
        if self.estimator.origin == "trace":
            return sum(self._find("own", work.load).values())
        return sum(self._find("eager", work.load, head).values())

    def _count(self, snapshot: Snapshot, phase: Phase) -> BatchWork:
        values = {
            name: TensorShape(shape) for name, shape in snapshot.key if shape is not None and name != "position_ids"
        }  # positions count by their values alone
        values |= {name: read_held(name, value) for name, value in snapshot.values.items()}
        if self.context_parallel > 1:
            values = self._join_chunks(values)
        estimate = self.estimator.estimate_batch(values, phase=phase, read_device=False)
        load = estimate.terms[0][1]
        head = snapshot.head if self.estimator.origin != "trace" and load.decoder is None else None
        model = self._find("own", load, head)
        hardware = self._find("hardware", load, head) if self.estimator.origin != "trace" else None
        padded = load.rows * load.seq + (load.decoder.rows * load.decoder.seq if load.decoder is not None else 0)
        samples = len(load.documents) if load.layout == "packed" and load.documents is not None else load.rows
        tokens = self.estimator.count_tokens(load)
        padded += tokens - load.tokens  # latents are not padded
        sizes = (tokens, padded, samples, len(load.all_grids)) if self.counts_tokens else (0, 0, 0, 0)
        return BatchWork(load, model, hardware, *sizes, estimate._notes)

    def _find(self, kind: str, load: Workload, head: LabelHead | None = None) -> dict[str, int]:
        """FLOPs by format: `own` convention, `hardware`, or hardware with the eager kernel."""
        key = (kind, load) if head is None else None
        found = self._counted.get(key) if key is not None else None
        if found is None:
            estimator = self.estimator
            if kind == "eager":
                if self._eager is None:
                    self._eager = bind_eager(estimator)
                estimator = self._eager
            convention = estimator.convention if kind == "own" else "hardware"
            if head is None:
                flops = estimator.count_formats(load, convention)
            else:
                flops = _count_head(estimator, load, convention, head)
            found = {}
            for name, each in flops.items():
                name = self._fp32 if name == "fp32" else name
                found[name] = found.get(name, 0) + each.total
        if key is not None:
            self._counted[key] = found
            if len(self._counted) > _KEPT:
                self._counted.popitem(last=False)
        return found

    def _join_chunks(self, values: Mapping[str, object]) -> dict[str, Any]:
        """Under context parallelism a rank holds one chunk of every sequence; attention runs over all of it."""
        found = {}
        for name, value in values.items():
            if name in ("attention_mask", "position_ids"):
                continue  # of the chunk alone
            if name in ("input_ids", "inputs_embeds") and isinstance(value, TensorShape):
                shape = list(value.shape)
                shape[1] *= self.context_parallel
                value = TensorShape(shape)
            found[name] = value
        return found


def copy_value(value: Any) -> Any:
    """The value as it is now: the loop may fill the same tensor, array or list anew."""
    if is_tensor(value):  # on a device that is not CUDA it is not read, and a note of the count says so
        if not value.is_cpu:
            return value
        return value.detach().clone() if value.requires_grad else value.clone()
    return value.copy() if hasattr(value, "copy") else value


def count_scored(batch: Mapping[Any, Any]) -> int | None:
    """How many logits a head forms that forms them where there are labels alone; this waits for the device."""
    head = _take_head(batch, None, None) if batch.get(_FUSED) else None
    return int((_cut_labels(head) != _IGNORED).sum()) if head is not None and head.is_compact else None


def _take_head(batch: Mapping[str, object], fetcher: Fetcher | None, holder: object) -> LabelHead | None:
    """Labels decide where the head forms logits."""
    name = next((each for each in _SCORED if batch.get(each) is not None), None)
    if name is None:
        return None
    labels = batch[name]
    if not (getattr(labels, "is_cuda", False) or getattr(labels, "is_cpu", False)):
        return None  # it cannot be read: every position counts
    is_compact = bool(getattr(labels, "is_cuda", False))
    if fetcher is not None and is_compact:
        labels = fetcher.take(name, labels, holder)
    else:
        labels = copy_value(labels)
    return LabelHead(labels, name == "shift_labels", is_compact)


def _cut_labels(head: LabelHead) -> Any:
    """The labels that logits are scored with."""
    given = read_held("labels", head.labels)
    return given if head.is_shifted else given[:, 1:]


def _count_head(estimator: Estimator, load: Workload, convention: Convention, head: LabelHead) -> dict[str, Flops]:
    """FLOPs where the head forms as many logits as it needs (model), or as it does (full, hardware).

    FLOPs are linear in the logits, so two counts show what one of them costs.
    """
    labels = _cut_labels(head)
    needed = int((labels != _IGNORED).sum())
    formed = needed if convention == "model" or head.is_compact else labels.shape[0] * labels.shape[1]
    counting: Counting = "model" if convention == "model" else "full"
    few, more = load.replace(logits=1), load.replace(logits=2)
    first, step = (Logits().count(each, counting) for each in (few, more))
    step -= first
    if not step:
        raise WorkloadError("sequences of one token have no labels to predict")
    low, high = estimator.count_formats(few, convention), estimator.count_formats(more, convention)
    found = {}
    for name, flops in high.items():
        base = low.get(name, NO_FLOPS)
        one = [(b - a) // step for a, b in zip(base, flops, strict=True)]
        each = [a + (formed - first) * slope for a, slope in zip(base, one, strict=True)]
        if convention == "hardware" and load.phase == "train":
            each[2] += one[0] * formed  # formed again in the backward pass
        found[name] = Flops(*each)
    return found


def bind_live(
    model: Any,
    device: str | None,
    compute: str | None = None,
    autocast: str | None = None,
    is_plain: bool = False,
    routing: Routing | None = None,
) -> Estimator:
    """The estimator of what the monitor was given: an Estimator, a live model as it stands, a config or a name.

    `is_plain`: of a live model the config alone, without adapters.
    """
    if isinstance(model, Estimator):
        return model
    formats: dict[str, Any] = {
        "compute": compute,
        "autocast": autocast if compute is None else None,
        "routing": routing,
    }
    if not hasattr(model, "named_parameters"):
        return bind(model, device=device, **formats)
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if config is None or not (getattr(config, "model_type", None) or is_denoiser(inner)):
        raise WorkloadError(
            f"{type(inner).__name__} is no Hugging Face model: give model=flopcalc.bind(module, example_batch), which "
            "traces it, or mfu_calculation_mode profiler, which measures it"
        )
    kernel = _KERNELS.get(str(getattr(config, "_attn_implementation", None)), "auto")
    if is_plain:
        return bind(config, device=device, attention_kernel=kernel, **formats)
    live = strip(model, is_whole=True)  # PEFT's wrapper stays: its adapters are read
    if getattr(live, "config", None) is None:
        live = inner
    return bind(live, device=device, attention_kernel=kernel, **formats)


def bind_eager(estimator: Estimator) -> Estimator:
    """The same model as an operator counter sees it: hardware with the eager kernel."""
    return estimator.change(convention="hardware", attention_kernel="eager")


class HostBatches:
    """Batches of watched loaders, which are on the host when the model's own inputs no longer are."""

    def __init__(self, say: Say) -> None:
        self.latest: Mapping[str, Any] | None = None  # the model has not run on it yet
        self._runs_ahead = False
        self._say = say

    def add(self, batch: object) -> None:
        if self.latest is not None and not self._runs_ahead:
            self._runs_ahead = True
            self._say(
                "a watched loader gave a second batch before the model ran on the first: which one it runs on cannot "
                "be known, so batches are read where the model gets them"
            )
        self.latest = batch if isinstance(batch, Mapping) and not self._runs_ahead else None

    def take_alike(self, batch: Mapping[str, object]) -> Mapping[str, Any]:
        """The watched batch where the model was given that, and not a part of it; else what the model was given."""
        watched, self.latest = self.latest, None
        if watched is None:
            return batch
        shapes = [
            (getattr(watched[name], "shape", None), getattr(batch[name], "shape", None))
            for name in watched.keys() & batch.keys()
        ]
        return watched if all(ours == theirs for ours, theirs in shapes) else batch


class WatchedLoader:
    """A loader whose batches are seen while they are on the host."""

    def __init__(self, loader: Iterable[object], see: Callable[[object], None]) -> None:
        self._loader = loader
        self._see_batch = see

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._see_batch(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)
