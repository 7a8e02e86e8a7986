"""A batch as given to the model goes in; its shapes and host values come out at once, its FLOPs later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.live import strip, unwrap
from flopcalc.core.workload.workload import Workload
from flopcalc.errors import WorkloadError

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
_BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
_KINDS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
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
    """What is kept of a batch on the hot path."""

    key: tuple[tuple[str, Any], ...]  # the shape of everything that counts
    kind: Hashable  # the workload class: what a measured factor holds for
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


class Copies:
    """Small device tensors on their way to the host: queued behind the step's work, read once that is over."""

    def __init__(self) -> None:
        self._free: dict[Hashable, list[Any]] = {}

    def take(self, tensor: Any) -> Any:
        """A pinned host tensor that will hold the values; nothing waits."""
        import torch

        free = self._free.get((tensor.shape, tensor.dtype))
        if free:
            held = free.pop()
        else:
            with torch.inference_mode(False):  # it is written into again, maybe outside of that
                held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return held.copy_(tensor.detach(), non_blocking=True)

    def give_back(self, held: Any) -> None:
        free = self._free.setdefault((held.shape, held.dtype), [])
        if len(free) < 16 and len(self._free) < 256:
            free.append(held)


def is_tensor(value: Any) -> bool:
    return hasattr(value, "is_cuda") and hasattr(value, "detach")


def find_whole(tensor: Any) -> Any:
    """The tensor without its graph; of a distributed one what is here, if that is all of it; None if it is not.

    To read the others ranks would have to talk, and one that has no monitor would never answer.
    """
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        if not all(each.is_replicate() for each in placements):
            return None
        tensor = tensor.to_local()
    return tensor.detach() if tensor.requires_grad else tensor


class Intake:
    """Reads batches for one bound model."""

    def __init__(self, estimator: Estimator, context_parallel: int = 1) -> None:
        self.estimator = estimator
        self.context_parallel = context_parallel
        vision = estimator.vision.dims if estimator.vision is not None else None
        table = vision.spec.vision if vision is not None else {}
        own = [str(table[word]) for word in ("flattened", "sizes", "canvas") if table.get(word)]
        audio = [estimator.audio.key] if estimator.audio is not None else []
        traced = list(getattr(getattr(estimator, "traced", None), "axes", ()))
        self._counts_by = {  # name -> whether values count, or the shape alone
            **dict.fromkeys((*_SHAPES, *audio, *traced), False),
            **dict.fromkeys((*_VALUES, *own, *(_DECODER_VALUES if estimator.has_decoder else ())), True),
        }
        self._kinds: dict[Hashable, Hashable] = {}
        self._plain: OrderedDict[Hashable, Work] = OrderedDict()
        self._counted: OrderedDict[Hashable, tuple[int, int | None]] = OrderedDict()
        self._eager: Estimator | None = None

    def take(self, batch: Mapping[str, Any], copies: Copies | None) -> tuple[Snapshot, list[Any]]:
        """A snapshot, and the copies it waits for; hot path: no value of a device is read here."""
        parts: list[tuple[str, Any]] = []
        values: dict[str, Any] = {}
        waiting: list[Any] = []
        for name, value in batch.items():
            by_value = self._counts_by.get(name)
            if by_value is None or value is None:
                continue
            shape = getattr(value, "shape", None)
            parts.append((name, shape))
            if not by_value and shape is not None:
                continue
            if name == "position_ids" and batch.get("attention_mask") is not None:
                continue  # with a mask, HF does not keep documents apart
            if name == "attention_mask" and shape is not None and len(shape) != 2:
                continue
            if is_tensor(value):
                if value.is_cuda and copies is not None:
                    value = copies.take(value)
                    waiting.append(value)
                elif value.device.type == "cpu":
                    value = value.detach().clone()  # the loop may fill the same tensor anew
            elif hasattr(value, "copy"):  # or the same array, or list
                value = value.copy()
            values[name] = value
        key = tuple(parts)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) > _KEPT:
                self._kinds.clear()
            kind = self._kinds[key] = _find_kind(key, batch)
        return Snapshot(key, kind, values), waiting

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
        return Work(load, *found, load.tokens, padded, samples, len(load.all_grids), estimate._notes)

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


def _find_kind(key: Iterable[tuple[str, Any]], batch: Mapping[str, Any]) -> Hashable:
    """The workload class: the length's power of two, what is in it beside text, and how documents lie."""
    shapes = dict(key)
    shape: Sequence[int] = shapes.get("input_ids") or shapes.get("inputs_embeds") or ()
    if not shape and isinstance(batch.get("input_ids"), Sequence):
        shape = (0, len(batch["input_ids"][0]))
    length = int(shape[1]).bit_length() if len(shape) > 1 else 0
    marks = [name for name in _KINDS if name in shapes]
    if any(name in shapes for name in _BOUNDS):
        marks.append("packed")
    return (length, *marks)


def bind_live(model: Any, device: str | None, dtype: str | None) -> Estimator:
    """The estimator of what the monitor was given: an Estimator, a live model as it stands, a config or a name."""
    if isinstance(model, Estimator):
        return model
    if not hasattr(model, "named_parameters"):
        return bind(model, device=device, dtype=dtype or "bf16")
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if config is None or not getattr(config, "model_type", None):
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


def name_arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a forward's positional arguments."""
    import inspect

    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ("input_ids",)
    return tuple(each.name for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
