"""A batch as given to the model goes in; its shapes and host values come out at once, its FLOPs later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import is_denoiser
from flopcalc.core.model.live import strip, unwrap
from flopcalc.core.workload.workload import Workload
from flopcalc.errors import WorkloadError
from flopcalc.monitor.device import Device
from flopcalc.monitor.messages import Say
from flopcalc.monitor.values import is_tensor

# Of these, shapes alone count.
_SHAPES = (
    "input_ids", "inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "input_values",
    "decoder_input_ids", "decoder_inputs_embeds",
)  # fmt: skip
# Of these, values count: they are small, and read while they are on the host.
_VALUES = (
    "attention_mask", "position_ids", "cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "image_grid_thw", "video_grid_thw",
    "logits_to_keep",
)  # fmt: skip
# What makes a workload class of its own.
_CLASSES = {
    **{name: name for name in ("pixel_values", "pixel_values_videos", "input_features", "input_values")},
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q"), "packed"),
}
_DECODER_VALUES = ("labels", "decoder_attention_mask")
_KEPT = 4096  # counted workloads that are kept
_KERNELS = {"eager": "eager", "flash_attention_2": "flash", "flash_attention_3": "flash"}


class Shape:
    """Stands for a tensor of which only the shape counts."""

    __slots__ = ("shape",)

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return int(self.shape[0])


class Snapshot(NamedTuple):
    """What is kept of a batch on the training thread."""

    key: tuple[tuple[str, Any], ...]  # the shape of everything that counts
    values: Mapping[str, Any]  # of what counts by its values, those: on the host, or on their way there


class Work(NamedTuple):
    """What one micro-batch asked for."""

    load: Workload
    model_flops: int
    hardware_flops: int | None  # of a traced model it is not known
    tokens: int
    padded_tokens: int
    samples: int
    images: int
    notes: tuple[str, ...] = ()


class Intake:
    """Reads batches for one bound model."""

    def __init__(self, estimator: Estimator, context_parallel: int = 1) -> None:
        self.estimator = estimator
        self.context_parallel = context_parallel
        vision = estimator.vision.dims if estimator.vision is not None else None
        table = vision.spec.vision if vision is not None else {}
        own = [str(table[word]) for word in ("flattened", "sizes", "canvas") if table.get(word)]
        audio = [estimator.audio.key] if estimator.audio is not None else []
        latents = getattr(estimator, "latents", None)  # of a diffusion model
        audio += [latents.key, latents.text_key] if latents is not None else []
        traced = list(getattr(getattr(estimator, "traced", None), "axes", ()))
        self._counts_by = {  # name -> whether values count, or the shape alone
            **dict.fromkeys((*_SHAPES, *audio, *traced), False),
            **dict.fromkeys((*_VALUES, *own, *(_DECODER_VALUES if estimator.has_decoder else ())), True),
        }
        self._plain: OrderedDict[Hashable, Work] = OrderedDict()
        self._counted: OrderedDict[Hashable, tuple[int, int | None]] = OrderedDict()
        self._kinds: dict[Hashable, Hashable] = {}  # workload classes of batches of text, by shape and names
        self._eager: Estimator | None = None

    def take(self, batch: Mapping[str, Any], device: Device | None, copies: list[Any]) -> Snapshot:
        """A snapshot. On the training thread: values on the device are added to `copies`, and not waited for."""
        key: list[tuple[str, Any]] = []
        values: dict[str, Any] = {}
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
            if device is not None and getattr(value, "is_cuda", False):
                value = device.fetch(value)
                copies.append(value)
            else:
                value = _copy(value)
            values[name] = value
        return Snapshot(tuple(key), values)

    def classify(self, batch: Mapping[str, Any]) -> Hashable:
        """The workload class, which a measured factor holds for: the length's power of two, and what is beside text."""
        sizes = (getattr(batch.get("input_ids"), "shape", None), *batch)
        kind = self._kinds.get(sizes)
        if kind is None:
            kind = self._classify(batch)
            if sizes[0] is not None and _CLASSES.keys().isdisjoint(batch):  # else values decide: they may be None
                if len(self._kinds) >= _KEPT:
                    self._kinds.clear()
                self._kinds[sizes] = kind
        return kind

    def _classify(self, batch: Mapping[str, Any]) -> Hashable:
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

    def count(self, snapshot: Snapshot) -> Work:
        """FLOPs and sizes of a snapshot whose copies have arrived."""
        if snapshot.values:
            return self._count(snapshot)
        found = self._plain.get(snapshot.key)
        if found is None:
            found = self._plain[snapshot.key] = self._count(snapshot)
            if len(self._plain) > _KEPT:
                self._plain.popitem(last=False)
        return found

    def count_eager(self, work: Work) -> int:
        """What an operator counter sees of it: every pair, and what is recomputed."""
        if self.estimator.origin == "trace":
            return sum(self.estimator.count(work.load, "full"))
        if self._eager is None:
            self._eager = bind_eager(self.estimator)
        return sum(self._eager.count(work.load, "hardware"))

    def _count(self, snapshot: Snapshot) -> Work:
        values = {name: Shape(shape) for name, shape in snapshot.key if shape is not None} | dict(snapshot.values)
        if self.context_parallel > 1:
            values = self._join_chunks(values)
        estimate = self.estimator.estimate_batch(values, read_device=False)
        load = estimate.terms[0][1]
        found = self._counted.get(load)
        if found is None:
            hardware = None
            if self.estimator.origin != "trace":
                hardware = sum(self.estimator.count(load, "hardware"))
            found = self._counted[load] = (estimate.total, hardware)
            if len(self._counted) > _KEPT:
                self._counted.popitem(last=False)
        padded = load.rows * load.seq + (load.decoder.rows * load.decoder.seq if load.decoder is not None else 0)
        samples = len(load.documents) if load.layout == "packed" and load.documents is not None else load.rows
        tokens = self.estimator.count_tokens(load)
        padded += tokens - load.tokens  # latents are not padded
        return Work(load, *found, tokens, padded, samples, len(load.all_grids), estimate._notes)

    def _join_chunks(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Under context parallelism a rank holds one chunk of every sequence; attention runs over all of it."""
        found = {}
        for name, value in values.items():
            if name in ("attention_mask", "position_ids"):
                continue  # of the chunk alone
            if name in ("input_ids", "inputs_embeds") and isinstance(value, Shape):
                shape = list(value.shape)
                shape[1] *= self.context_parallel
                value = Shape(shape)
            found[name] = value
        return found


def _copy(value: Any) -> Any:
    """The value as it is now: the loop may fill the same tensor, array or list anew."""
    if is_tensor(value):  # on a device that is not CUDA it is not read, and a note of the count says so
        if not value.is_cpu:
            return value
        return value.detach().clone() if value.requires_grad else value.clone()
    return value.copy() if hasattr(value, "copy") else value


def bind_live(model: Any, device: str | None, dtype: str | None) -> Estimator:
    """The estimator of what the monitor was given: an Estimator, a live model as it stands, a config or a name."""
    if isinstance(model, Estimator):
        return model
    if not hasattr(model, "named_parameters"):
        return bind(model, device=device, dtype=dtype or "bf16")
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if config is None or not (getattr(config, "model_type", None) or is_denoiser(inner)):
        raise WorkloadError(
            f"{type(inner).__name__} is no Hugging Face model: give model=flopcalc.bind(module, example_batch), which "
            "traces it, or mfu_calculation_mode profiler, which measures it"
        )
    kernel = _KERNELS.get(str(getattr(config, "_attn_implementation", None)), "auto")
    live = strip(model)  # PEFT's wrapper stays: its adapters are read
    if getattr(live, "config", None) is None:
        live = inner
    return bind(live, device=device, dtype=dtype or "bf16", attention_kernel=kernel)


def bind_eager(estimator: Estimator) -> Estimator:
    """The same model as an operator counter sees it: hardware with the eager kernel."""
    return estimator.change(convention="hardware", attention_kernel="eager")


class HostBatches:
    """Batches of watched loaders, which are on the host when the model's own inputs no longer are."""

    def __init__(self, say: Say) -> None:
        self.latest: Mapping[str, Any] | None = None  # the model has not run on it yet
        self._runs_ahead = False
        self._say = say

    def add(self, batch: Any) -> None:
        if self.latest is not None and not self._runs_ahead:
            self._runs_ahead = True
            self._say(
                "a watched loader gave a second batch before the model ran on the first: which one it runs on cannot "
                "be known, so batches are read where the model gets them"
            )
        self.latest = batch if isinstance(batch, Mapping) and not self._runs_ahead else None

    def take_alike(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The watched batch where the model was given that, and not a part of it; else what the model was given."""
        watched, self.latest = self.latest, None
        if watched is None:
            return batch
        shapes = [
            (getattr(watched[name], "shape", None), getattr(batch[name], "shape", None))
            for name in watched.keys() & batch.keys()
        ]
        return watched if all(ours == theirs for ours, theirs in shapes) else batch


class Watched:
    """A loader whose batches are seen while they are on the host."""

    def __init__(self, loader: Iterable[Any], see: Callable[[Any], None]) -> None:
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
