"""Memory of one step on a device, alone or one of many: bytes of every kind in the fullest moment, and their peak.

A step's peak is the largest of a few moments: the backward pass of the loss, of each stage's first and last layer (what
lies between them is linear), and the optimizer's step; without training, the widest of a layer, a tower or the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from flopcalc.base.errors import DeviceError, WorkloadError
from flopcalc.base.units import format_bytes
from flopcalc.base.vocabulary import CAST_FORMATS, Execution, Kernel, RecordedAttention
from flopcalc.base.vocabulary import Optimizer as OptimizerName
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.workload.sums import Logits
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.devices import Device, find_device, parse_dtype
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.memory.inference import Serving
from flopcalc.prediction.memory.shards import Shards, cut_parts, divide_held, sum_held
from flopcalc.prediction.memory.tensors import FLOAT, Part, SplitBytes, Step
from flopcalc.prediction.operators import Operators, list_operators
from flopcalc.prediction.work import ProductCall

__all__ = [
    "MOMENTS",
    "Cut",
    "Memory",
    "Shards",
    "Tensors",
    "can_resize",
    "count_memory",
    "count_peak",
    "cut_step",
    "find_capacity",
    "largest_batch",
    "list_tensors",
    "predict_memory",
    "resize_batch",
]

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}
# cuBLAS takes this much per thread that multiplies, on Hopper and later; autograd's is a thread of its own.
_CUBLAS_BYTES = 32 << 20
_CONTEXT_BYTES = 512 << 20  # of the driver
_MOST = 1 << 24
_FREED = "gradients are freed before the forward pass; where several passes add them up they stay"


class Optimizer(NamedTuple):
    """What an optimizer keeps per trainable parameter, and what its step needs in addition."""

    states: int  # numbers per parameter
    state_bytes: int  # of each number; 0: as the parameter's own
    copies: int  # copies of all trainable parameters, during the step
    gradient_bytes: int = 0  # 0: as the parameter's own
    has_master: bool = False  # a float32 copy of narrower parameters, and gradients in one buffer that stays
    block: int = 0  # numbers of a state that share a float32 scale


_STATES = {
    "adamw": Optimizer(2, 0, 0),  # fused: one kernel, no temporaries
    "adamw-foreach": Optimizer(2, 0, 1),  # square roots of all second moments at once
    "adamw-master": Optimizer(2, FLOAT, 0, FLOAT, True),
    "adamw-32bit": Optimizer(2, FLOAT, 0),  # bitsandbytes: float32 states of narrower parameters
    "adamw-8bit": Optimizer(2, 1, 0, block=256),  # bitsandbytes and torchao: a float32 scale per 256 numbers
    "adamw-fp8": Optimizer(2, 1, 0, block=256),
    "adamw-offload": Optimizer(0, 0, 0),  # its states, and float32 copies of the weights, are on the host
    "lion": Optimizer(1, 0, 0),
    "sgd": Optimizer(0, 0, 0),
    "sgd-momentum": Optimizer(1, 0, 0),
    "none": Optimizer(0, 0, 0),
}


def count_state_bytes(optimizer: OptimizerName, width: int) -> int:
    """Bytes of gradient, states and master copy of a trainable parameter of `width` bytes."""
    chosen = _STATES[optimizer]
    return (chosen.gradient_bytes or width) + chosen.states * (chosen.state_bytes or width) + FLOAT * chosen.has_master


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
    per_parameter: Mapping[str, int] = {}  # bytes of each that trains, by kind; a scale of several numbers left out

    def fits(self, device: str | Device) -> bool:
        """Whether the peak fits into the device's memory."""
        return self.peak <= find_capacity(device)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "at_peak": dict(self.at_peak),
            "notes": list(self.notes),
            "per_parameter": dict(self.per_parameter),
        }

    def describe_parameter(self) -> str:
        """Bytes that a trained parameter takes, before ZeRO."""
        parts = [f"{name} {size}" for name, size in self.per_parameter.items()]
        return f"{sum(self.per_parameter.values())} bytes per trained parameter ({', '.join(parts)})"

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.at_peak.items() if size)
        return f"Memory(peak {format_bytes(self.peak)} in {MOMENTS[self.moment]}: {parts})"


_KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace", "kv_cache", "inputs")
# Where a step holds most, in words.
MOMENTS = {
    "loss": "the backward pass of the loss",
    "backward": "the backward pass of the layers",
    "optimizer": "the optimizer's step",
    "forward": "the forward pass",
}


def find_capacity(device: str | Device) -> int:
    """Bytes of a device that tensors can fill."""
    found = find_device(device) if isinstance(device, str) else device
    if found.memory_gb is None:
        raise DeviceError(f"{found.name} has no known memory; add memory_gb to it in your own devices.toml")
    known = load_defaults().work
    return int((found.memory_gb * (1 << 30) * known.free_share - _CONTEXT_BYTES) * known.filled_share)


class Tensors(NamedTuple):
    """What a training step holds on a device alone, before anything is cut."""

    parts: tuple[Part, ...]  # the stages, in order of execution
    outside: int  # bytes saved outside of all of them
    loss: int  # bytes of logits, and of their gradients, at the loss
    inputs: int
    largest: SplitBytes  # parameters of the largest layer, which ZeRO gathers
    dtype_bytes: int
    trained_bytes: int  # of a parameter that trains
    gradient_bytes: int
    optimizer: Optimizer
    notes: tuple[str, ...]
    dequantized: int = 0  # bytes of the largest weight that is brought to 16 bits to be multiplied
    # Of fused kernels that add weight gradients to a buffer as they make them (Megatron-LM, Transformer Engine):
    dummies: tuple[
        ProductCall, ...
    ] = ()  # products of layers, one of each shape: autograd gets an unused gradient for them
    head: int = 0  # bytes of the head's weight, which has such a gradient too, while its backward pass runs
    stream: int = 0  # bytes of the tensor that the head reads

    @property
    def state_bytes(self) -> int:
        """Of a parameter: the optimizer's states, and the float32 copy of a narrower one."""
        return self.optimizer.states * (self.optimizer.state_bytes or self.trained_bytes) + (
            FLOAT if self.optimizer.has_master and self.trained_bytes < FLOAT else 0
        )

    def __hash__(self) -> int:  # a few numbers suffice: one is looked up for every layout of a plan
        return hash((self.outside, self.loss, self.inputs))


def predict_memory(
    estimator: Estimator,
    load: Workload,
    *,
    dtype: str | None = None,
    optimizer: OptimizerName = "adamw",
    attention: Kernel | RecordedAttention = "sdpa",
    execution: Execution = "eager",
    shards: Shards = Shards(),  # noqa: B008
    is_adding: bool = False,
    is_scored: bool = False,
) -> Memory:
    """Bytes of one step; the recipe (what trains, what is recomputed) is the estimator's.

    `attention` is eager, sdpa or one of its kernels; `execution` eager keeps what HF's code does, others what fused
    kernels do; `is_adding`: gradients of several micro-batches add up, so they stay all the while. Number formats are
    the estimator's; `dtype` takes another for all that is plain.
    """
    if not estimator.trains(load):
        estimator, width, _ = _match_dtype(estimator, dtype, execution)
        how: Execution = "fused" if execution == "fused" else "eager"
        return _infer(Serving(estimator, load, width, attention, how), shards)
    tensors = list_tensors(
        estimator, load, dtype=dtype, optimizer=optimizer, attention=attention, execution=execution, is_scored=is_scored
    )
    return count_memory(tensors, shards, is_adding=is_adding)


def list_tensors(
    estimator: Estimator,
    load: Workload,
    *,
    dtype: str | None = None,
    optimizer: OptimizerName = "adamw",
    attention: Kernel | RecordedAttention = "sdpa",
    execution: Execution = "eager",
    is_light: bool = False,
    expert_imbalance: float = 1.0,
    is_scored: bool = False,
) -> Tensors:
    """What one training step holds; `is_light`: results of norms and activation functions are made again.

    `is_scored`: log probabilities and their gradient in the place of a loss on labels, row by row, as TRL has them.

    `expert_imbalance`: how many times the mean number of rows experts get, in fused kernels.
    """
    estimator, width, is_small = _match_dtype(estimator, dtype, execution)
    imbalance = expert_imbalance if execution == "fused" else 1.0
    step = Step(estimator, load, width, attention, execution, 1 if is_small else width, is_light, imbalance)
    step.notes.append(_FREED)
    chosen = _STATES[optimizer]
    each = chosen.gradient_bytes or step.trained_bytes
    found = Operators((), (), (), True)
    if execution == "eager":
        found = list_operators(estimator, load, step.attention, step.bytes)
    if estimator.recipe.clipping != "none":
        step.notes.append("gradients per sample, which clipping needs, are left out")
    step.notes += found.notes
    numbers = step.count_logits()
    # Gradients that stay in one buffer are added to it by the product that makes them.
    parts, outside = step.list_parts(found, 0 if chosen.has_master else each)
    dummies: tuple[ProductCall, ...] = ()
    head = stream = 0
    if execution == "fused":
        loss = numbers * step.bytes  # logits, which the fused loss turns into their gradient
        products = make_work(
            estimator, load, optimizer="none", dtype_bytes=width, kernel="", execution=execution
        ).products
        heads = [each for each in products if each.part == "lm_head" and each.direction == "forward"]
        stream = sum(each.size.m * each.size.k * step.bytes for each in heads)
        if chosen.has_master:
            head = sum(each.size.n * each.size.k * step.bytes for each in heads if estimator.recipe.lora is None)
            dummies = _list_dummies(products)
    elif execution != "eager":
        loss = numbers * (step.bytes + FLOAT)  # logits, and their gradient before it is narrowed
    else:
        # log_softmax keeps its result, in float32 unless what was saved is less; its backward holds that, the loss's
        # gradient and its own at once. Under autocast it may stay narrow beside a wide copy, which has a gradient.
        is_both = estimator.formats.autocast != "" and outside >= numbers * (step.bytes + FLOAT)
        is_float = outside >= numbers * FLOAT or outside < numbers * step.bytes
        logits = numbers * (step.bytes + FLOAT if is_both else FLOAT if is_float else step.bytes)
        outside, loss = max(0, outside - logits), logits + numbers * FLOAT if is_both else 3 * logits
        if is_scored:  # the recorded loss reads every position
            outside, loss = (
                max(0, outside + logits - logits * load.tokens // Logits().count(load, "full")),
                2 * numbers * (FLOAT if estimator.formats.autocast else step.bytes),
            )
    return Tensors(
        tuple(parts),
        outside,
        loss,
        step.count_inputs(True),
        step.find_largest_layer(),
        step.bytes,
        step.trained_bytes,
        each,
        chosen,
        tuple(step.notes),
        step.count_dequantized(),
        dummies,
        head,
        stream,
    )


def _list_dummies(products: Sequence[ProductCall]) -> tuple[ProductCall, ...]:
    """One product of each shape that makes a weight's gradient, those of heads and routers aside."""
    made = [each for each in products if each.direction == "wgrad" and each.part not in ("lm_head", "head", "router")]
    return tuple({(each.size.n, each.size.k, each.split.side): each for each in made}.values())


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


def _match_dtype(estimator: Estimator, dtype: str | None, execution: Execution) -> tuple[Estimator, int, bool]:
    """The estimator in a format, the bytes of its activations, and whether inputs of products are kept in fp8."""
    kind = None if dtype is None else parse_dtype(dtype)
    if kind in CAST_FORMATS and execution == "fused":
        return estimator, _count_bytes(estimator.formats.attention), True
    formats = estimator.formats
    if kind is not None and kind != formats.attention:
        width = _count_bytes(kind)
        return estimator.change(compute=kind), width, False
    is_small = (formats.compute or "bf16") in CAST_FORMATS and execution == "fused"
    return estimator, _count_bytes(formats.attention), is_small


def _count_bytes(kind: str) -> int:
    if kind not in _DTYPE_BYTES:
        raise DeviceError(f"memory is predicted for {', '.join(_DTYPE_BYTES)}, not for weights in {kind}")
    return _DTYPE_BYTES[kind]


class _Moment(NamedTuple):
    """Bytes at a moment of a training step, without those that are always there."""

    name: str
    gradients: SplitBytes  # before ZeRO
    activations: int
    logits: int = 0


class Cut(NamedTuple):
    """Bytes that a device holds of a step before ZeRO divides it, without parameters."""

    weights: SplitBytes
    trained: SplitBytes  # parameters
    kept: int
    loss: int
    inputs: int
    dummies: int
    moments: tuple[_Moment, ...]  # of the loss and the backward pass


@lru_cache(maxsize=4096)
def _take_parts(tensors: Tensors, shards: Shards) -> tuple[Part, ...]:
    """The stages that a device has, each with its layers that are here; layouts that cut them differently share it."""
    found = []
    for part in tensors.parts:
        if not part.is_language:
            if shards.has_last if part.is_last else shards.has_first:
                found.append(part)
        elif shards.layers[0]:
            here, whole = shards.layers
            weights, trained, kept = shards.take_layers(part)
            layers, outputs = max(1, part.layers * here // whole), part.outputs * here // whole
            found.append(part._replace(layers=layers, weights=weights, trained=trained, kept=kept, outputs=outputs))
    return tuple(found)


@lru_cache(maxsize=256)
def _count_dummies(tensors: Tensors, tensor: int) -> int:
    """Bytes of the unused gradients: one tensor for each shape on a device of those that share a layer."""
    shapes = set()
    for each in tensors.dummies:
        n, k, side = each.size.n, each.size.k, each.split.side
        n = -(-n // tensor) if side == "column" else n
        k = -(-k // tensor) if side == "row" else k
        shapes.add((n, k))
    return sum(n * k for n, k in shapes) * tensors.dtype_bytes


def cut_step(tensors: Tensors, shards: Shards) -> Cut:
    """What a device holds without ZeRO, moment by moment; `shards` says what of the step is there."""
    each, cut = tensors.gradient_bytes, shards.tensor * shards.sequence
    taken = _take_parts(
        tensors, Shards(layers=shards.layers, has_first=shards.has_first, has_last=shards.has_last, kinds=shards.kinds)
    )
    parts = cut_parts(shards, taken, tensors.dtype_bytes)
    outside = round(tensors.outside / cut * shards.in_flight) if shards.has_last else 0
    kept = outside + sum(part.kept.total for part in parts)
    # The head reads whole rows, and makes their gradient, where devices that share a layer spread them.
    gathered = (1 + (shards.tensor > 1 and shards.is_spread)) * tensors.stream // shards.sequence
    loss = -(-tensors.loss // cut) + tensors.head // shards.tensor + gathered if shards.has_last else 0
    moments = [_Moment("loss", SplitBytes(), kept, loss)]
    dense = other = 0  # gradients that are there
    left = kept - outside  # what no stage holds belongs to the logits, except a few masks
    waiting: dict[str, int] = {}  # first gradients of shared weights, kept until the second is there
    for part in reversed(parts):
        if part.extra:
            share = part.kept.total // part.layers
            before = dense + sum(waiting.values())
            moments.append(_Moment("backward", SplitBytes(before, other), left + part.extra))
            own, plain_own = (
                number * each // part.layers * (part.layers - 1) for number in (part.trained.total, part.trained.dense)
            )
            gradients = SplitBytes(before + plain_own, other + own - plain_own)
            moments.append(_Moment("backward", gradients, left - share * (part.layers - 1) + part.extra))
        left -= part.kept.total
        dense, other = dense + part.trained.dense * each, other + part.trained.other * each
        if part.name in waiting:  # both gradients and their sum
            del waiting[part.name]
            gradients = SplitBytes(dense + 2 * part.table + sum(waiting.values()), other)
            moments.append(_Moment("backward", gradients, left))
        elif part.table:
            waiting[part.name] = part.table if not part.trained.total else 0
    return Cut(
        sum_held(part.weights for part in parts),
        sum_held(part.trained for part in parts),
        kept,
        loss,
        tensors.inputs // shards.sequence if shards.has_first else 0,
        _count_dummies(tensors, shards.tensor),
        tuple(moments),
    )


def count_memory(tensors: Tensors, shards: Shards = Shards(), *, is_adding: bool = False) -> Memory:  # noqa: B008
    """The fullest moment of a training step on one device."""
    cut = cut_step(tensors, shards)
    moment, there = _find_peak(tensors, cut, shards, is_adding)
    stays, each = is_adding or tensors.optimizer.has_master, tensors.gradient_bytes
    return Memory(
        weights=there["weights"],
        gradients=divide_held(SplitBytes(cut.trained.dense * each, cut.trained.other * each), shards.divide(2)),
        optimizer=_count_states(tensors, cut, shards),
        activations=cut.kept,
        logits=cut.loss,
        workspace=there["workspace"],
        kv_cache=0,
        inputs=cut.inputs,
        peak=sum(there.values()),
        moment=moment,
        at_peak={kind: there.get(kind, 0) for kind in _KINDS},
        notes=tuple(note for note in tensors.notes if not stays or note != _FREED),
        per_parameter={"weight": tensors.trained_bytes, "gradient": each, "states": tensors.state_bytes},
    )


def count_peak(tensors: Tensors, cut: Cut, shards: Shards, *, is_adding: bool = False) -> int:
    """The peak of count_memory alone, of a step that cut_step has cut."""
    return sum(_find_peak(tensors, cut, shards, is_adding)[1].values())


def _count_states(tensors: Tensors, cut: Cut, shards: Shards) -> int:
    """Bytes of the optimizer's states and of the float32 copy of narrower parameters."""
    optimizer, by = tensors.optimizer, shards.divide(1)
    states = divide_held(cut.trained, by, tensors.state_bytes)
    if optimizer.block:
        scales = SplitBytes(*(-(-number // optimizer.block) for number in cut.trained))
        states += divide_held(scales, by, optimizer.states * FLOAT)
    return states


def _find_peak(tensors: Tensors, cut: Cut, shards: Shards, is_adding: bool) -> tuple[str, dict[str, int]]:
    """The fullest moment and what each kind takes in it: ZeRO divides what a device holds without it."""
    optimizer, each = tensors.optimizer, tensors.gradient_bytes
    trained, second = cut.trained, shards.divide(2)
    stays = is_adding or optimizer.has_master
    whole = SplitBytes(trained.dense * each, trained.other * each)
    gradients = divide_held(whole, second)
    copies = divide_held(trained, shards.divide(1), optimizer.copies * tensors.trained_bytes)
    # Name, gradients (all of them where they stay), activations, logits, what the optimizer adds.
    most = ("optimizer", gradients, 0, 0, copies)
    total, all_ = gradients + copies, whole.dense + whole.other
    for name, (dense, other), activations, logits in reversed(cut.moments):
        if stays and dense + other < all_:
            there = gradients
        else:
            there = -(-dense // second[0]) - (-other // second[1])
        if (sum_ := there + activations + logits) >= total:
            most, total = (name, there, activations, logits, 0), sum_
    name, there, activations, logits, added = most
    workspace = 2 * _CUBLAS_BYTES + _count_gathered(tensors, shards) + tensors.dequantized + cut.dummies
    weights = divide_held(cut.weights, shards.divide(3))
    states = _count_states(tensors, cut, shards) + added
    sizes = (weights, there, states, activations, logits, workspace, 0, cut.inputs)
    return name, dict(zip(_KINDS, sizes, strict=True))


def _infer(step: Serving, shards: Shards) -> Memory:
    weights = divide_held(sum_held(step.count_weights().values()), shards.divide(3))
    cache = step.count_cache() if step.load.phase in ("prefill", "decode") else 0
    inputs = step.count_inputs(False)
    logits = step.count_logits() * step.bytes
    found = Operators((), (), (), True)
    if not step.is_fused:
        found = list_operators(step.estimator, step.load, step.attention, step.bytes)
    step.notes += found.notes
    layer, tower, head = step.find_widest(found)
    workspace = _CUBLAS_BYTES + step.count_dequantized()
    base = {"weights": weights, "workspace": workspace, "kv_cache": cache, "inputs": inputs}
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
        workspace=workspace,
        kv_cache=cache,
        inputs=inputs,
        peak=sum(there.values()),
        moment="forward",
        at_peak={kind: there.get(kind, 0) for kind in _KINDS},
        notes=tuple(step.notes),
    )


def _count_gathered(tensors: Tensors, shards: Shards) -> int:
    """Whole weights of the layer at work and of the next one, and a layer's whole gradients before they are cut."""
    largest = shards.cut_weights(tensors.largest).total
    weights = 2 * largest * tensors.dtype_bytes if max(shards.divide(3)) > 1 else 0
    return weights + (largest * tensors.dtype_bytes if max(shards.divide(2)) > 1 else 0)
