"""Memory of one step on one device: a model, a workload and an optimizer in, bytes of every kind and their peak out.

A step's peak is the largest of a few moments: the backward pass of the loss, of each stage's first and last layer (what
lies between them is linear), and the optimizer's step; without training, the widest of a layer, a tower or the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.workload.workload import Workload
from flopcalc.errors import DeviceError, RecipeError, WorkloadError, format_nearest, format_value
from flopcalc.hardware.devices import Device, find_device, parse_dtype
from flopcalc.prediction.operators import list_operators
from flopcalc.prediction.tensors import FLOAT, Step
from flopcalc.units import format_bytes, format_share

__all__ = [
    "OPTIMIZERS",
    "Memory",
    "Shards",
    "can_resize",
    "find_capacity",
    "format_memory",
    "largest_batch",
    "predict_memory",
    "resize_batch",
    "shard_zero",
]

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}
# cuBLAS takes this much per thread that multiplies, on Hopper and later; autograd's is a thread of its own.
_CUBLAS_BYTES = 32 << 20
# A device's "GB" are GiB, of which 1.5 % is not for use and half a GiB is taken by the driver's context; of the rest
# the caching allocator loses some to holes (measured: 4 to 7 % where nothing pressed, less near the limit).
_FREE = 0.985
_CONTEXT_BYTES = 512 << 20
_FILLED = 0.97
_MOST = 1 << 24


class Optimizer(NamedTuple):
    """What an optimizer keeps per trainable parameter, and what its step needs beside."""

    states: int  # numbers per parameter
    state_bytes: int  # of each number; 0: as the parameter's own
    copies: int  # copies of all trainable parameters, during the step


OPTIMIZERS = {
    "adamw": Optimizer(2, 0, 0),  # fused: one kernel, no temporaries
    "adamw-foreach": Optimizer(2, 0, 1),  # square roots of all second moments at once
    "adamw-8bit": Optimizer(2, 1, 0),
    "lion": Optimizer(1, 0, 0),
    "sgd": Optimizer(0, 0, 0),
    "sgd-momentum": Optimizer(1, 0, 0),
}


class Shards(NamedTuple):
    """Into how many equal parts each kind is divided among devices."""

    weights: int = 1
    gradients: int = 1
    states: int = 1


def shard_zero(stage: int, ranks: int) -> Shards:
    """ZeRO: stage 1 divides the optimizer's states, 2 gradients too, 3 weights too."""
    if stage not in (0, 1, 2, 3):
        raise RecipeError(f"ZeRO stage {format_value(stage)} unknown; known: 0, 1, 2, 3")
    if ranks < 1:
        raise RecipeError(f"ZeRO over {format_value(ranks)} ranks: give at least 1")
    return Shards(ranks if stage > 2 else 1, ranks if stage > 1 else 1, ranks if stage > 0 else 1)


class Memory(NamedTuple):
    """Bytes on one device: the most of each kind in a step, and what is there at once at the peak."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # what autograd keeps, or without training the widest moment of a layer
    logits: int
    workspace: int
    kv_cache: int
    inputs: int
    peak: int
    moment: str  # loss, backward, optimizer, forward
    at_peak: dict[str, int]  # kind -> bytes; their sum is the peak
    notes: tuple[str, ...] = ()

    def fits(self, device: str | Device) -> bool:
        """Whether the peak fits into the device's memory."""
        return self.peak <= find_capacity(device)

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "at_peak": dict(self.at_peak), "notes": list(self.notes)}


_KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace", "kv_cache", "inputs")


def find_capacity(device: str | Device) -> int:
    """Bytes of a device that tensors can fill."""
    found = find_device(device) if isinstance(device, str) else device
    if found.memory_gb is None:
        raise DeviceError(f"{found.name} has no known memory; add memory_gb to it in your own devices.toml")
    return int((found.memory_gb * (1 << 30) * _FREE - _CONTEXT_BYTES) * _FILLED)


def predict_memory(
    estimator: Estimator,
    load: Workload,
    *,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    attention: str = "sdpa",
    master_weights: bool = False,
    gradient_dtype: str | None = None,
    shards: Shards = Shards(),  # noqa: B008
    is_adding: bool = False,
) -> Memory:
    """Bytes of one step of HF's model in eager mode; the recipe (what trains, what is recomputed) is the estimator's.

    `attention` is eager, sdpa or one of its kernels; `master_weights` keeps a float32 copy of what trains, and states
    in float32; `is_adding`: gradients of several micro-batches add up, so they stay all the while.
    """
    step = Step(estimator, load, _count_bytes(dtype), attention)
    if load.phase != "train" or not estimator.parameters()["trainable"]:
        return _infer(step, shards)
    if optimizer not in OPTIMIZERS:
        near = format_nearest(str(optimizer), OPTIMIZERS)
        raise RecipeError(f"optimizer {format_value(optimizer)} unknown.{near} Known: {', '.join(OPTIMIZERS)}")
    gradient_bytes = _count_bytes(gradient_dtype) if gradient_dtype is not None else 0
    return _train(step, OPTIMIZERS[optimizer], master_weights, gradient_bytes, shards, is_adding)


def can_resize(load: Workload) -> bool:
    """Whether all rows of a batch are alike, so that there can be more or fewer of them."""
    parts = (load.grids, load.videos, load.clips)
    is_even = load.documents is None and load.rows > 0 and not any(len(part) % load.rows for part in parts)
    return is_even and (load.decoder is None or can_resize(load.decoder))


def resize_batch(load: Workload, rows: int) -> Workload:
    """The same workload with another number of rows, each with its images, videos and clips."""
    grids, videos, clips = (part[: len(part) // load.rows] * rows for part in (load.grids, load.videos, load.clips))
    decoder = resize_batch(load.decoder, rows) if load.decoder is not None else None
    return load.replace(rows=rows, grids=grids, videos=videos, clips=clips, decoder=decoder)


def largest_batch(
    estimator: Estimator, make_load: Callable[[int], Workload], device: str | Device, **settings: Any
) -> tuple[int, Memory]:
    """The largest batch whose step fits, with its memory; `make_load` gives the workload of a batch size."""
    capacity = find_capacity(device)

    def predict(batch: int) -> Memory:
        return predict_memory(estimator, make_load(batch), **settings)

    best = predict(1)
    if best.peak > capacity:
        name = (find_device(device) if isinstance(device, str) else device).name
        raise WorkloadError(
            f"even a batch of 1 needs {format_bytes(best.peak)}, {format_bytes(best.peak - capacity)} more than the "
            f"{format_bytes(capacity)} that {name} has for it: shorten the sequence, recompute, train less, or shard"
        )
    low, high = 1, 2
    while high <= _MOST and (found := predict(high)).peak <= capacity:
        low, high, best = high, 2 * high, found
    while high - low > 1:
        middle = (low + high) // 2
        found = predict(middle)
        if found.peak <= capacity:
            low, best = middle, found
        else:
            high = middle
    return low, best


def format_memory(memory: Memory, device: str | Device | None = None) -> str:
    """A plain table: the most of each kind, what is there at the peak, and whether it fits."""
    lines = [f"{'':12}  {'most':>12}  {'at the peak':>12}  {'share':>7}"]
    for kind in _KINDS:
        most, there = getattr(memory, kind), memory.at_peak.get(kind, 0)
        if most or there:
            shown = format_bytes(there) if there else "-"
            share = format_share(there, memory.peak)
            lines.append(f"{kind.replace('_', ' '):12}  {format_bytes(most):>12}  {shown:>12}  {share:>7}")
    lines.append(f"{'peak':12}  {'':12}  {format_bytes(memory.peak):>12}  in {_MOMENTS[memory.moment]}")
    if device is not None:
        found = find_device(device) if isinstance(device, str) else device
        if found.memory_gb is None:
            return "\n".join([*lines, f"{found.name}: its memory is not known, so nor is whether this fits"])
        capacity = find_capacity(found)
        words = "fits" if memory.peak <= capacity else f"too much by {format_bytes(memory.peak - capacity)}"
        lines.append(f"{found.name}: {words}; {format_bytes(capacity)} for tensors, {found.memory_gb:g} GB in all")
    return "\n".join(lines)


_MOMENTS = {
    "loss": "the backward pass of the loss",
    "backward": "the backward pass of the layers",
    "optimizer": "the optimizer's step",
    "forward": "the forward pass",
}


def _count_bytes(dtype: str) -> int:
    kind = parse_dtype(dtype)
    if kind not in _DTYPE_BYTES:
        raise DeviceError(f"memory is predicted for {', '.join(_DTYPE_BYTES)}, not for weights in {kind}")
    return _DTYPE_BYTES[kind]


def _train(
    step: Step, optimizer: Optimizer, master: bool, gradient_bytes: int, shards: Shards, is_adding: bool
) -> Memory:  # fmt: skip
    trainable = sum(step.read_blocks()[0].values())
    weights = -(-step.count_weights() // shards.weights)
    state_bytes = optimizer.state_bytes or (FLOAT if master else step.trained_bytes)
    states = trainable * (optimizer.states * state_bytes + (FLOAT if master else 0))
    states = -(-states // shards.states)
    each = gradient_bytes or step.trained_bytes
    gradients = -(-trainable * each // shards.gradients)
    found = list_operators(step.estimator, step.load, step.attention, step.bytes)
    if not is_adding:
        step.notes.append("gradients are freed before the forward pass; where several passes add them up they stay")
    if step.estimator.recipe.clipping != "none":
        step.notes.append("gradients per sample, which clipping needs, are left out")
    step.notes += found.notes
    numbers = step.count_logits()
    parts, outside = step.list_parts(found, each)
    # log_softmax keeps its result, in float32 unless what was saved is less; its backward holds that, the loss's
    # gradient and its own at once.
    is_float = outside >= numbers * FLOAT or outside < numbers * step.bytes
    logits = numbers * (FLOAT if is_float else step.bytes)
    outside = max(0, outside - logits)
    kept = outside + sum(part.kept for part in parts)
    workspace = 2 * _CUBLAS_BYTES + _count_gathered(step, shards, each)
    inputs = step.count_inputs(True)
    base = {"weights": weights, "optimizer": states, "workspace": workspace, "inputs": inputs}
    moments: list[tuple[str, dict[str, int]]] = []

    def add(moment: str, gradients: int, activations: int, logits: int = 0) -> None:
        if is_adding:
            gradients = max(gradients, trainable * each)
        divided = -(-gradients // shards.gradients)
        there = {**base, "gradients": divided, "activations": activations, "logits": logits}
        moments.append((moment, {kind: there.get(kind, 0) for kind in _KINDS}))

    add("loss", 0, kept, 3 * logits)
    done, left = 0, kept - outside  # what no stage holds belongs to the logits, but for a few masks
    waiting: dict[str, int] = {}  # first gradients of shared weights, kept until the second is there
    for part in reversed(parts):
        if part.extra:
            share, own = part.kept // part.layers, part.gradients // part.layers
            before = done + sum(waiting.values())
            add("backward", before, left + part.extra)
            add("backward", before + own * (part.layers - 1), left - share * (part.layers - 1) + part.extra)
        left -= part.kept
        done += part.gradients
        if part.name in waiting:  # both gradients and their sum
            del waiting[part.name]
            add("backward", done + 2 * part.table + sum(waiting.values()), left)
        elif part.table:
            waiting[part.name] = part.table if not part.gradients else 0
    add("optimizer", trainable * each, 0)
    moments[-1][1]["optimizer"] += -(-trainable * optimizer.copies * step.trained_bytes // shards.states)
    moment, there = max(moments, key=lambda entry: sum(entry[1].values()))
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=states,
        activations=kept,
        logits=3 * logits,
        workspace=workspace,
        kv_cache=0,
        inputs=inputs,
        peak=sum(there.values()),
        moment=moment,
        at_peak=there,
        notes=tuple(step.notes),
    )


def _infer(step: Step, shards: Shards) -> Memory:
    weights = -(-step.count_weights() // shards.weights)
    cache = step.count_cache() if step.load.phase in ("prefill", "decode") else 0
    inputs = step.count_inputs(False)
    logits = step.count_logits() * step.bytes
    found = list_operators(step.estimator, step.load, step.attention, step.bytes)
    step.notes += found.notes
    layer, tower, head = step.find_widest(found)
    base = {"weights": weights, "workspace": _CUBLAS_BYTES, "kv_cache": cache, "inputs": inputs}
    if step.load.phase == "decode":
        layer += step.copied_cache
    moments = [
        {**base, "activations": layer},
        {**base, "kv_cache": 0, "activations": tower},
        {**base, "activations": head, "logits": logits},
    ]
    there = max(moments, key=lambda entry: sum(entry.values()))
    return Memory(
        weights=weights,
        gradients=0,
        optimizer=0,
        activations=max(layer, tower),
        logits=logits,
        workspace=_CUBLAS_BYTES,
        kv_cache=cache,
        inputs=inputs,
        peak=sum(there.values()),
        moment="forward",
        at_peak={kind: there.get(kind, 0) for kind in _KINDS},
        notes=tuple(step.notes),
    )


def _count_gathered(step: Step, shards: Shards, gradient_bytes: int) -> int:
    """Whole weights of the layer at work and of the next one, and a layer's whole gradients before they are cut."""
    widest = step.find_largest_layer()
    weights = 2 * widest * step.bytes if shards.weights > 1 else 0
    return weights + (widest * gradient_bytes if shards.gradients > 1 else 0)
