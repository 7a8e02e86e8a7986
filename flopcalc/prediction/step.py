"""Predict one step: a model, a workload and a device in; seconds with an interval, what bounds them and why, out."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flopcalc.core.estimate.binding import bind_config as bind
from flopcalc.core.estimate.counted import KERNELS
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.estimate.utilization import check_positive, hfu, mfu
from flopcalc.core.recipe.recipe import join_recipe
from flopcalc.core.workload.workload import Workload
from flopcalc.data import find_data_dir, find_user_dir
from flopcalc.errors import DeviceError, FlopcalcError, RecipeError, WorkloadError, format_nearest, format_value
from flopcalc.hardware.devices import Device, find_device, parse_dtype
from flopcalc.prediction.floors import Floors, describe_execution, find_floors
from flopcalc.prediction.machine import STREAMED, Machine, Timed, slow_down
from flopcalc.prediction.memory import (
    Memory,
    can_resize,
    find_capacity,
    largest_batch,
    predict_memory,
    resize_batch,
)
from flopcalc.prediction.tensors import has_sdpa
from flopcalc.prediction.timeline import Place, Segment, Stack, find_place, order, run
from flopcalc.prediction.work import OPTIMIZERS, Attention, Moved, Product, Work, count_calls, make_work
from flopcalc.units import format_bytes

__all__ = ["OPTIMIZERS", "Prediction", "StepTime", "find_largest_batch", "predict", "predict_estimate"]

_EXPERTS = 0.03  # relative error that experts add: rows are dealt out unevenly, and HF changes their code often
# What another machine of the measured kind adds: clocks and power limits of devices, and CPUs, which differ far more.
_OTHER = {"device": 0.04, "host": 0.2}
_UNTYPED = 1.5  # how much wider where only operators tell the host's time, and no model of the type was measured
_BEFORE_READS, _AFTER_IMAGES = 0.6, 0.4  # before the layers; what is read back there stands at 0.5
_LONGEST = {"causal": 8192, "window": 8192, "full": 4096, "decode": 4000}  # mask -> most keys in measure/alone.py
_BEYOND = 2  # times the longest that was measured: a note says so
_FAR = 0.5  # of the device's time, in sizes with no measured call near them: a note says so
_EAGER = ("gpt_oss",)  # without SDPA in HF, beside types that were recorded with eager attention alone
_COUNTING = ("kernel ", "tile padding ")  # an estimate's notes on how HFU's FLOPs were counted, not on the workload
_NEAR = 0.8  # a host that takes this much of the device's time may hold it up
_WAKE = 15  # operators that the host queues before a device that ran empty has enough to do, from prefills of the fit
_UNMEASURED = 0.35  # relative half width where published figures scale what was measured elsewhere
_DTYPES = ("bf16", "fp16", "tf32", "fp32")
_FUSED = ("pointwise", "copy", "cast", "reduce", "norm", "cat", "fill")  # kinds that a compiler joins to others


class StepTime(NamedTuple):
    """Seconds of a step: the likeliest, and the bounds that nine of ten measurements should lie in."""

    low: float
    mid: float
    high: float


class Piece(NamedTuple):
    """Seconds of one module's work of one kind."""

    module: str
    group: str
    kind: str  # products, attention, memory, optimizer
    seconds: float
    error: float  # seconds
    place: Place = Place(0)
    launches: float = 0.0
    is_joined: bool = False  # a compiler joins it to others
    is_streamed: bool = False  # memory alone bounds it, whatever the clock

    def slow_down(self, slower: float) -> float:
        """Seconds at a clock that makes others take so many times longer."""
        return self.seconds if self.is_streamed else self.seconds * slower


class Prediction(NamedTuple):
    """What a step will take, and what the figure rests on."""

    step_time_s: StepTime
    bound: str  # device or host
    device_s: float
    host_s: float
    mfu: float
    hfu: float
    tokens_per_s: float
    breakdown: dict[str, float]  # kind -> seconds; they add up to the likeliest time
    modules: dict[str, float]  # module -> seconds on the device
    memory: Memory | None
    advice: str
    evidence: dict[str, Any]
    notes: tuple[str, ...]
    fits: bool | None = None  # None: the memory was not asked for, or the device's is not known
    floors: Floors | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_time_s": self.step_time_s._asdict(),
            "bound": self.bound,
            "device_s": self.device_s,
            "host_s": self.host_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens_per_s": self.tokens_per_s,
            "breakdown": {**self.breakdown, "modules": self.modules},
            "memory_bytes": {**self.memory.to_dict(), "fits": self.fits} if self.memory else None,
            "floors": self.floors.to_dict() if self.floors else None,
            "advice": self.advice,
            "evidence": self.evidence,
            "notes": list(self.notes),
        }


def predict(
    model: Any,
    *,
    device: str,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    compiled: bool = False,
    attention_kernel: str = "auto",
    recipe: Mapping[str, Any] | Any = None,
    lora: Any = None,
    recompute: str | None = None,
    spec: Any = None,
    grad_accum: int = 1,
    host_factor: float = 1.0,
    pause_s: float = 0.0,
    memory: bool = True,
    advise: bool = True,
    **workload: Any,
) -> Prediction:
    """Time, utilization and memory of one step of HF's model on one device; `workload` as estimate_flops takes it.

    `host_factor` says how many times longer than the measured machine's CPU yours takes for the same Python; `pause_s`
    how long it does something else after each step, while the device works off what is queued. The pause is no part of
    the step's time, but of what shares, tokens per second and the breakdown are of.
    """
    for name in ("convention", "freeze", "train_only", "clipping"):
        if name in workload:
            where = "the recipe: recipe={...}" if name != "convention" else "estimate_flops; MFU and HFU have their own"
            raise WorkloadError(f"{name} is no part of the workload: it belongs to {where}")
    _check_keywords(workload)
    kernel = _find_kernel(find_device(device, needs_all=True), parse_dtype(dtype), attention_kernel)
    estimator = bind(
        model, recipe=join_recipe(recipe, lora, recompute), convention="hardware", attention_kernel=kernel,
        device=device, dtype=dtype, spec=spec,
    )  # fmt: skip
    batch = workload.pop("batch", None)
    if batch is not None:
        estimate = estimator.estimate_batch(batch, **workload)
    else:
        estimate = estimator(workload.pop("batch_size", 1), workload.pop("seq_len", None), **workload)
    if type(grad_accum) is not int or grad_accum < 1:
        raise WorkloadError(f"grad_accum is a whole number of at least 1, not {format_value(grad_accum)}")
    phase = estimate.terms[0][1].phase
    if grad_accum > 1 and phase != "train":
        raise WorkloadError(f"grad_accum belongs to phase train, not {phase}")
    return predict_estimate(
        estimate * grad_accum, device=device, dtype=dtype, optimizer=optimizer, compiled=compiled, memory=memory,
        attention_kernel=attention_kernel, host_factor=host_factor, pause_s=pause_s, advise=advise,
    )  # fmt: skip


def _check_keywords(workload: Mapping[str, Any]) -> None:
    """Only what an estimator takes, and of a real batch what the batch does not say itself."""
    known = list(inspect.signature(Estimator.__call__).parameters)[1:]
    if workload.get("batch") is not None:
        alone = list(inspect.signature(Estimator.estimate_batch).parameters)[1:]
        if any(name in known and name not in alone for name in workload):
            raise WorkloadError("batch already says sizes, lengths and images: give it alone")
        known = alone
    for name in workload:
        if name not in known:
            own = inspect.signature(predict).parameters.values()
            options = [*known, *(each.name for each in own if each.kind is each.KEYWORD_ONLY)]
            near = format_nearest(name, options)
            raise WorkloadError(f"keyword {name!r} unknown.{near} Known: {', '.join(options)}")


def predict_estimate(
    estimate: Estimate,
    *,
    device: str,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    compiled: bool = False,
    memory: bool = True,
    attention_kernel: str = "auto",
    host_factor: float = 1.0,
    pause_s: float = 0.0,
    advise: bool = True,
) -> Prediction:
    """The step whose FLOPs were counted: as `predict`."""
    check_positive(host_factor, "the host's factor")
    if not isinstance(pause_s, (int, float)) or not 0 <= pause_s < math.inf:
        raise WorkloadError(f"pause_s is a number of seconds, 0 or more, not {format_value(pause_s)}")
    if optimizer not in OPTIMIZERS:
        near = format_nearest(str(optimizer), OPTIMIZERS)
        raise RecipeError(f"optimizer {format_value(optimizer)} unknown.{near} Known: {', '.join(OPTIMIZERS)}")
    kernel = _find_kernel(find_device(device, needs_all=True), parse_dtype(dtype), attention_kernel)
    machine = Machine(device, dtype)
    if any(estimator.recipe.clipping != "none" for estimator, _, _ in estimate.terms):
        raise RecipeError("per-sample clipping is counted, not predicted: leave --clipping out")
    if any(estimator.origin == "trace" for estimator, _, _ in estimate.terms):
        raise WorkloadError("a traced model has no op list to predict from: it needs a spec")
    estimate, kernel, notes = _settle_kernel(estimate, kernel, is_asked=attention_kernel != "auto")
    settings = _Settings(machine, optimizer, compiled, kernel, host_factor, pause_s)
    parts = list(estimate.terms)
    prediction = _predict(estimate, settings)
    prediction = prediction._replace(
        notes=(*prediction.notes, describe_execution(compiled, parts[0].load.phase)),
        floors=find_floors(estimate, machine.device, machine.dtype, machine.width, optimizer),
    )
    if memory:
        prediction = _add_memory(prediction, settings.find_memory(parts), machine.device)
        notes += ["memory is the eager step's: a compiled one keeps less"] if compiled else []
    notes += [note for note in estimate.notes if not note.startswith(_COUNTING)]
    prediction = prediction._replace(notes=(*prediction.notes, *notes))
    if advise and prediction.fits is False:
        return prediction._replace(advice=_advise_fit(parts, settings))
    return prediction._replace(advice=_advise(estimate, prediction, settings)) if advise else prediction


def find_largest_batch(
    estimate: Estimate, *, device: str, dtype: str = "bf16", optimizer: str = "adamw", attention_kernel: str = "auto"
) -> int | None:  # fmt: skip
    """The largest micro-batch of the same samples that fits, 0 if none does; None where samples differ."""
    kernel = _find_kernel(find_device(device, needs_all=True), parse_dtype(dtype), attention_kernel)
    estimate, kernel, _ = _settle_kernel(estimate, kernel, is_asked=attention_kernel != "auto")
    (estimator, load, times), *others = estimate.terms
    settings = _Settings(Machine(device, dtype), optimizer, False, kernel, 1.0)
    return settings.find_largest(estimator, load, times) if not others else None


class _Settings(NamedTuple):
    """How a step runs, beside what it computes."""

    machine: Machine
    optimizer: str
    compiled: bool
    kernel: str
    host_factor: float
    pause_s: float = 0.0

    def find_memory(self, parts: Sequence[tuple[Estimator, Workload, int]]) -> Memory:
        """The largest micro-batch's."""
        is_adding = sum(times for _, _, times in parts) > 1
        found = [
            predict_memory(estimator, load, is_adding=is_adding, **self.memory_settings)
            for estimator, load, _ in parts
        ]  # fmt: skip
        return max(found, key=lambda memory: memory.peak)

    def find_largest(self, estimator: Estimator, load: Workload, times: int) -> int | None:
        """The largest micro-batch of the same samples that fits; None where they differ or memory is not known."""
        if not can_resize(load) or self.machine.device.memory_gb is None:
            return None
        try:
            found, _ = largest_batch(
                estimator, lambda rows: resize_batch(load, rows), self.machine.device, is_adding=times > 1,
                **self.memory_settings,
            )  # fmt: skip
        except WorkloadError:  # not even one
            return 0
        return found

    @property
    def memory_settings(self) -> dict[str, Any]:
        optimizer = "sgd" if self.optimizer == "none" else self.optimizer
        return {"dtype": self.machine.dtype, "optimizer": optimizer, "attention": self.kernel}


def _find_kernel(device: Device, dtype: str, kernel: str) -> str:
    """The attention kernel that runs: the one asked for, or what SDPA picks; refused where there is none."""
    if dtype not in _DTYPES:
        raise DeviceError(f"steps are predicted in {', '.join(_DTYPES)}, not in {dtype}")
    if dtype not in device.peak_tflops:
        known = [name for name in _DTYPES if name in device.peak_tflops]
        raise DeviceError(
            f"{device.name} has no known {dtype} peak, so no step can be predicted; "
            + (f"it has {', '.join(known)}: give --dtype" if known else "add one in your own devices.toml")
        )
    if kernel not in KERNELS:
        near = format_nearest(str(kernel), KERNELS)
        raise RecipeError(f"attention kernel {format_value(kernel)} unknown.{near} Known: {', '.join(KERNELS)}")
    is_wide = dtype in ("fp32", "tf32")
    if is_wide and kernel in ("flash", "cudnn"):
        raise RecipeError(f"kernel {kernel} takes bf16 and fp16, not {dtype}; SDPA then picks efficient")
    if kernel != "auto":
        return kernel
    return "efficient" if is_wide else device.sdpa or "flash"


def _settle_kernel(estimate: Estimate, kernel: str, *, is_asked: bool) -> tuple[Estimate, str, list[str]]:
    """The kernel that HF's own code runs, the FLOPs under it, and what is to be said: some types have no SDPA."""
    kinds = [_name_type(estimator) for estimator, _, _ in estimate.terms if not _has_sdpa(estimator)]
    if not kinds or kernel == "eager":
        return estimate, kernel, []
    if is_asked:
        return estimate, kernel, [f"HF has no SDPA for {kinds[0]}: kernel {kernel} is timed beside eager's operators"]
    changed = sum(
        (_change(estimator, kernel="eager") or estimator).estimate(load) * times
        for estimator, load, times in estimate.terms
    )
    return changed or estimate, "eager", [f"HF has no SDPA for {kinds[0]}: attention is eager, as plain products"]


def _name_type(estimator: Estimator) -> str:
    return str(estimator.source.config["model_type"])


def _has_sdpa(estimator: Estimator) -> bool:
    """As has_sdpa, and of types that were never recorded, some that HF gives none."""
    return _name_type(estimator) not in _EAGER and has_sdpa(estimator)


def _predict(estimate: Estimate, settings: _Settings) -> Prediction:
    """Time alone."""
    machine, compiled = settings.machine, settings.compiled
    clock = Clock(machine, compiled)
    for i, (estimator, load, times) in enumerate(estimate.terms):
        steps = "none" if i else settings.optimizer  # one optimizer's step for all micro-batches
        work = make_work(
            estimator, load, optimizer=steps, dtype_bytes=machine.width, kernel=settings.kernel,
        )  # fmt: skip
        clock.add(work, times, load)
    device_s, host_s = clock.device_s(), clock.host_s() * settings.host_factor
    mid = clock.step_s(settings.host_factor, settings.pause_s)
    bound = "device" if device_s >= host_s else "host"
    error = clock.error(bound, clock.host_share(mid, settings.host_factor, settings.pause_s))
    seconds = StepTime(mid * (1 - error), mid, mid * (1 + error) * (1 + clock.late(bound, settings.host_factor)))
    share: dict[str, Any] = {"device": machine.device.id, "dtype": machine.dtype}
    whole = mid + settings.pause_s
    return Prediction(
        seconds,
        bound,
        device_s,
        host_s,
        _share(mfu(estimate, whole, **share)),
        _share(hfu(estimate, whole, **share)),
        estimate.tokens / whole,
        clock.breakdown(whole),
        clock.modules(),
        None,
        "",
        clock.evidence(),
        tuple(clock.notes(bound)),
    )


def _add_memory(prediction: Prediction, memory: Memory, device: Device) -> Prediction:
    """With memory, and a note first where it does not fit."""
    if device.memory_gb is None:
        note = f"whether it fits is not known: {device.name} has no memory_gb in devices.toml"
        return prediction._replace(memory=memory, notes=(*prediction.notes, note))
    capacity = find_capacity(device)
    if memory.peak <= capacity:
        return prediction._replace(memory=memory, fits=True)
    note = (
        f"does not fit: the step needs {format_bytes(memory.peak)}, {device.name} has {format_bytes(capacity)} for "
        "tensors; the time is as if it did"
    )
    return prediction._replace(memory=memory, fits=False, notes=(note, *prediction.notes))


def _share(found: Any) -> float:
    return float(found.value) if found.value is not None else math.nan


_NOTHING = Segment()


class Clock:
    """Adds up the times of a step's work."""

    def __init__(self, machine: Machine, compiled: bool) -> None:
        self.machine, self.compiled = machine, compiled
        self.constants = machine.constants
        self.pieces: list[Piece] = []
        self.flops = 0.0
        self.hosted: list[Hosted] = []
        self.times = 1
        self.stacks: tuple[Stack, ...] = ()
        self.phase = "train"
        self.is_recorded = True
        self.has_experts = False
        self.is_typed = True  # what the family's code costs the host was measured
        self.long_keys = (0, 0)  # of attention far longer than any measured; the longest that was
        self.found_notes: dict[str, None] = {}

    def add(self, work: Work, times: int, load: Workload) -> None:
        """A micro-batch's work, so many times."""
        is_first = not self.stacks
        self.phase, self.times, self.stacks = load.phase, max(self.times, times), work.stacks
        self._add_device(work, times)
        self._add_host(work, times, count_calls(load), is_first)
        self.is_recorded = self.is_recorded and work.is_recorded
        self.found_notes |= dict.fromkeys(work.notes)

    def _add_device(self, work: Work, times: int) -> None:
        for product in work.products:
            timed = self.machine.time_product(product)
            self._put(product, "products", timed, product.calls * times, is_again=product.is_again)
            self.flops += product.flops * times
            self.has_experts = self.has_experts or product.copies > 1
        for call in work.attention:
            timed = self.machine.time_attention(call)
            self._put(call, "attention", timed, call.calls * times, is_again=call.is_again)
            self.flops += call.flops * times
            longest = _LONGEST.get(call.mask, max(_LONGEST.values()))
            if call.keys > _BEYOND * longest:
                self.long_keys = max(self.long_keys, (call.keys, longest))
        for moved in work.moved:
            timed = self.machine.time_moved(moved)
            if moved.direction == "optimizer":
                if moved.kind not in self.constants["optimizer"]:
                    self.found_notes[f"{moved.kind} was not measured: its bytes at the fused one's speed"] = None
                self._put(moved, "optimizer", timed, moved.calls, is_streamed=True)
            else:
                self._put(
                    moved, "memory", timed, moved.calls * times, is_again=moved.is_again,
                    is_joined=moved.kind.startswith(_FUSED), is_streamed=moved.kind in STREAMED,
                )  # fmt: skip

    def _put(
        self, each: Product | Attention | Moved, kind: str, timed: Timed, calls: float, *, is_again: bool = False,
        is_joined: bool = False, is_streamed: bool = False,
    ) -> None:  # fmt: skip
        if calls:
            place = find_order(each.module, each.group, "again" if is_again else each.direction, self.stacks)
            launches = calls * (self.constants["compiled"]["moved"] if self.compiled and is_joined else 1.0)
            seconds = timed.seconds * launches
            error = seconds * timed.error
            self.pieces.append(
                Piece(each.module, each.group, kind, seconds, error, place, launches, is_joined, is_streamed)
            )

    def _add_host(self, work: Work, times: int, calls: int, is_first: bool) -> None:
        host, phase = self.constants["host"], name_phase(self.phase)
        per_call, per_unit = host[phase]
        per_checkpoint, per_again = host["again"]
        types = host["types"].get(work.model_type, {})
        has_images = any(each.group == "vision" for each in work.hosted)
        seen = name_factor("forward", "vision", self.phase)
        asked = (phase, seen) if has_images else (phase,)
        self.is_typed = self.is_typed and all(name in types for name in asked)
        for each in work.hosted:
            many = each.many * (times if each.way != "optimizer" else 1)
            seconds = many * find_unit(each.way, each.kind, host["units"]) * per_unit
            _, factor = types.get(name_factor(each.way, each.group, self.phase), (0.0, 1.0))
            seconds *= factor
            if each.way == "again":
                seconds += many * (per_again + each.is_checkpoint * per_checkpoint)
            place = find_order(each.module, each.group, each.way, work.stacks, is_host=True)
            self.hosted.append(Hosted(place, seconds, many if each.kind == "read" else 0.0))
        # What a call takes beside its operators (masks, caches) comes before the layers; the rest is an optimizer's. It
        # comes before what is read back there, but after what is read where images enter the text.
        last = max((i for i, stack in enumerate(work.stacks) if stack.layers), default=0)
        before = last - (_AFTER_IMAGES if has_images else _BEFORE_READS)
        per_call, _ = types.get(phase, (per_call, 1.0))
        plain = min(per_call, types.get("forward", host["forward"])[0])
        self.hosted.append(Hosted(Place(0, before), calls * times * plain, 0.0))
        if is_first:
            self.hosted.append(Hosted(Place(2), calls * (per_call - plain), 0.0))

    def busy_s(self) -> float:
        """Seconds in which the device computes, at the clock that the power limit leaves."""
        slower = self.slower()
        return sum(piece.slow_down(slower) for piece in self.pieces)

    def slower(self) -> float:
        """How many times longer the power limit makes what the clock bounds."""
        if not self.machine.is_measured:  # what such a device keeps up is taken from what others were seen to
            return 1.0
        return slow_down(self.constants["power"], self.rate())

    def rate(self) -> float:
        """Share of the peak that products and attention keep up at the full clock, the optimizer's time aside."""
        seconds = sum(piece.seconds for piece in self.pieces if piece.kind != "optimizer")
        return self.flops / seconds / self.machine.peak if seconds else 0.0

    def clocked_s(self) -> float:
        """Seconds, at the full clock, of what a lower one slows down."""
        return sum(piece.seconds for piece in self.pieces if not piece.is_streamed)

    def device_s(self) -> float:
        return float(self.busy_s() + self.launches * self.constants["gaps"][name_mode(self.phase)])

    @property
    def launches(self) -> float:
        return sum(piece.launches for piece in self.pieces)

    def host_s(self) -> float:
        """Seconds in which the host dispatches a step, if it never waited."""
        if self.compiled:
            return float(self.launches * self.constants["compiled"]["launch_s"])
        return sum(each.seconds for each in self.hosted)

    def step_s(self, host_factor: float = 1.0, pause_s: float = 0.0) -> float:
        """Seconds of a step on a host that takes so many times longer, and that pauses after each step."""
        device_s = self.device_s()
        if self.compiled or not self.pieces:
            return max(device_s - pause_s, self.host_s() * host_factor)
        slower, gap_s = self.slower(), self.constants["gaps"][name_mode(self.phase)]
        found: dict[Place, Segment] = {}
        many = self.times
        for piece in self.pieces:
            at = found.get(piece.place, _NOTHING)
            share = 1 if piece.place.way == 2 else many
            found[piece.place] = at._replace(
                device_s=at.device_s + (piece.slow_down(slower) + piece.launches * gap_s) / share,
                launches=at.launches + piece.launches / share,
            )
        for each in self.hosted:
            at = found.get(each.place, _NOTHING)
            share = 1 if each.place.way == 2 else many
            found[each.place] = at._replace(
                host_s=at.host_s + each.seconds * host_factor / share, waits=at.waits + each.waits / share
            )
        # Micro-batches come one after another; where they are many, all but a few are alike.
        once = order({place: at for place, at in found.items() if place.way < 2}, self.stacks)
        last = [at for place, at in sorted(found.items()) if place.way == 2]
        shown = min(many, 3)
        wake_s = _WAKE * self.constants["host"][name_phase(self.phase)][1] * host_factor
        total = run([*(once * shown), *last], pause_s, wake_s)
        return total + (many - shown) * run(once, 0.0, wake_s) if many > shown else total

    def host_share(self, mid: float, host_factor: float = 1.0, pause_s: float = 0.0) -> float:
        """How far a step of `mid` seconds follows its host, 0 to 1: how much longer on one that takes 20 % longer."""
        if not mid:
            return 0.0
        other = self.step_s(host_factor * (1 + _OTHER["host"]), pause_s)
        return min(1.0, max(0.0, (other / mid - 1) / _OTHER["host"]))

    def error(self, bound: str, host_share: float = 0.0) -> float:
        """Relative half width: errors of many operators average out in part, those they share do not."""
        floor = self.constants["error"]
        if not self.machine.is_measured:
            return _UNMEASURED if self.is_recorded else 1.5 * _UNMEASURED
        wide = float(floor[bound])
        if not self.machine.is_own:
            mixed = host_share * _OTHER["host"] + (1 - host_share) * _OTHER["device"]
            wide += max(_OTHER[bound], mixed)
        times = 1.0 if self.is_recorded else 2.0
        if bound == "device":
            total = sum(piece.seconds for piece in self.pieces)
            wide += math.sqrt(sum(piece.error**2 for piece in self.pieces)) / total if total else 0.0
            wide += _EXPERTS if self.has_experts else 0.0
            wide += float(floor["compiled"]) if self.compiled else 0.0
        elif not self.is_typed and not self.compiled:
            times = max(times, _UNTYPED)
        return min(wide * times, 1.5 * _UNMEASURED)

    def late(self, bound: str, host_factor: float) -> float:
        """How much later than its likeliest time a step may come, beyond the error: a busy host only delays."""
        is_near = bound == "host" or self.host_s() * host_factor > _NEAR * self.device_s()
        return float(self.constants["error"]["late"]) if is_near else 0.0

    def breakdown(self, mid: float) -> dict[str, float]:
        found = dict.fromkeys(("products", "attention", "memory", "optimizer"), 0.0)
        for piece in self.pieces:
            found[piece.kind] += piece.seconds
        found["launches"] = max(0.0, self.device_s() - sum(found.values()))
        found["host"] = max(0.0, mid - self.device_s())
        return found

    def modules(self) -> dict[str, float]:
        """Seconds on the device by module, its layers together, most first."""
        found: dict[str, float] = {}
        for piece in self.pieces:
            found[piece.module or "model"] = found.get(piece.module or "model", 0.0) + piece.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def evidence(self) -> dict[str, Any]:
        machine = self.machine
        provenance = machine.constants.get("provenance", {})
        return {
            "device": machine.device.id,
            "is_measured": machine.is_measured,
            "is_own_machine": machine.is_measured and machine.is_own,
            "measured_on": provenance.get("device_id"),
            "torch": provenance.get("torch"),
            "date": provenance.get("date"),
            "commit": provenance.get("commit"),
            "predictor": {
                "origin": "own" if machine.is_own else "shipped",
                "path": _find_path(machine),
                "device": provenance.get("device_id"),
                "date": provenance.get("date"),
            },
            "operators_recorded": self.is_recorded,
            "host_measured": machine.is_measured and self.is_typed,
            "far_share": self.far_share(),
        }

    def far_share(self) -> float:
        """Share of the device's time that is of calls unlike measured ones."""
        total = sum(piece.seconds for piece in self.pieces) or 1.0
        return sum(piece.seconds for piece in self.pieces if piece.error > 0.09 * piece.seconds) / total

    def notes(self, bound: str) -> list[str]:
        notes = list(self.found_notes)
        if self.has_experts:
            notes.append("experts are taken as evenly loaded")
        if not self.machine.is_measured:
            notes.insert(0, _tell_unmeasured(self.machine))
        elif self.machine.dtype != "bf16":
            notes.append(f"measured in bf16; {self.machine.dtype} is taken as alike")
        if self.long_keys[0]:
            notes.append(
                "attention over {:,} keys lies beyond what was measured, at most {:,}: the interval may be too "
                "narrow".format(*self.long_keys)
            )
        # Experts have no calls nearby at any size, but a formula fitted to theirs, and a note of their own.
        if bound == "device" and self.machine.is_measured and not self.has_experts and self.far_share() > _FAR:
            notes.append(
                f"{100 * self.far_share():.0f} % of the device's time is of sizes with no measured call near them: "
                "formulas alone tell it"
            )
        if self.machine.is_measured and self.is_recorded and not self.is_typed and not self.compiled:
            notes.append("what this model type's own code takes on the host was not measured: its operators alone tell")
        if self.compiled:
            notes.append("compiled times rest on two measured models")
        else:
            notes.append(
                "host time is of the measured machine's CPU; --host-factor tells how many times longer yours takes"
            )
        return notes


def _find_path(machine: Machine) -> str:
    """The file that the constants come from."""
    folder = find_user_dir() if machine.is_own else find_data_dir()
    return os.path.join(folder, "predictors", f"{machine.constants['provenance']['device_id']}.json")


def _tell_unmeasured(machine: Machine) -> str:
    measured = machine.constants.get("provenance", {}).get("device_id", "another device")
    if measured == machine.device.id:
        return (
            f"{machine.device.name} in {machine.dtype} was not measured: published peaks, with the shapes measured in "
            "bf16"
        )
    return (
        f"{machine.device.name} was not measured: published peaks, with the shapes measured on {measured}; `flopcalc "
        "calibrate --predictor` on one brings this to the measured standard"
    )


class Hosted(NamedTuple):
    """What the host does for one module."""

    place: Place
    seconds: float
    waits: float  # times that it reads a value from the device


def find_order(module: str, group: str, way: str, stacks: tuple[Stack, ...], *, is_host: bool = False) -> Place:
    """Where in a step: the forward pass, then the backward pass in the other order, then the optimizer."""
    if way == "optimizer":  # the host goes through all tensors before the first is stepped
        return Place(2, 0.0 if is_host else 1.0)
    stage, inner = find_place(module, group, stacks)
    return Place(0, stage, inner) if way == "forward" else Place(1, -stage, -inner)


def name_phase(phase: str) -> str:
    """The phases that the host's time is told apart by: with gradients, without, and with a growing cache."""
    return phase if phase in ("train", "decode") else "forward"


def name_mode(phase: str) -> str:
    """With gradients or without: kernels follow each other more closely in a forward pass, and one thread works."""
    return "train" if phase == "train" else "forward"


def name_factor(way: str, group: str, phase: str) -> str:
    """The factor of a model type that an operator's time on the host has; an optimizer's is everybody's."""
    if way == "optimizer":
        return way
    if group in ("vision", "projector"):
        return f"vision {name_mode(phase)}"
    return name_phase(phase)


def find_unit(way: str, kind: str, units: Mapping[str, float]) -> float:
    """What the host takes for an operator, in units of an addition; one where that is not known.

    Of a kind that was not measured by itself (cat_strided_wide), the next wider one (cat_strided, cat).
    """
    if way == "optimizer":
        kind = "tensor"
    elif way == "backward" and f"{kind}_backward" in units:
        kind += "_backward"
    while kind and kind not in units:
        kind = kind.rpartition("_")[0]
    return units.get(kind, 1.0)


def _advise_fit(parts: Sequence[tuple[Estimator, Workload, int]], settings: _Settings) -> str:
    """What would make a step fit that does not."""
    device = settings.machine.device
    (estimator, load, times), *others = parts
    if load.phase == "train" and estimator.recipe.recompute == "none":
        changed = [(_change(each, recompute="full"), other, many) for each, other, many in parts]
        again = [(each, other, many) for each, other, many in changed if each is not None]
        if len(again) == len(parts) and settings.find_memory(again).fits(device):
            return "recomputation (--recompute full): the step then fits"
    if not others and (most := settings.find_largest(estimator, load, times)):
        return f"a smaller batch: {most} is the largest that fits"
    if load.phase == "train":
        return "several devices: `flopcalc plan` finds a layout that fits"
    return "several devices that share the model: one does not hold it"


def _change(estimator: Estimator, *, recompute: str = "", kernel: str = "") -> Estimator | None:
    """The same model under another recomputation or kernel; None where it cannot be made again, as some live models."""
    try:
        return estimator.change(recompute=recompute, attention_kernel=kernel)
    except FlopcalcError:
        return None


def _advise(estimate: Estimate, now: Prediction, settings: _Settings) -> str:
    """The one change that makes most of the tokens per second, of those that can be predicted."""
    tried: list[tuple[float, str]] = []
    device = settings.machine.device

    def gain(text: str, changed: Estimate, **options: Any) -> None:
        after = _predict(changed, settings._replace(**options))
        tried.append((after.tokens_per_s / now.tokens_per_s - 1, text))

    def fits(estimator: Estimator, load: Workload, times: int) -> bool:
        return device.memory_gb is None or settings.find_memory([(estimator, load, times)]).fits(device)

    if not settings.compiled:
        gain("compile the model (--compile)", estimate, compiled=True)
    if settings.kernel == "eager" and _has_sdpa(estimate.terms[0][0]):
        kernel = _find_kernel(device, settings.machine.dtype, "auto")
        gain("fused attention in place of eager", estimate, kernel=kernel)
    if settings.optimizer == "adamw-foreach":
        gain("the fused optimizer", estimate, optimizer="adamw")
    (estimator, load, times), *others = estimate.terms
    if not others and now.memory is not None and can_resize(load):
        double = resize_batch(load, 2 * load.rows)
        if fits(estimator, double, times):
            gain("a batch twice as large", estimator.estimate(double) * times)
    if estimator.recipe.recompute != "none" and load.phase == "train" and not others:
        plain = _change(estimator, recompute="none")
        if plain is not None and fits(plain, load, times):
            gain("no recomputation: the activations fit", plain.estimate(load) * times)
    best = max(tried, default=(0.0, ""))
    if best[0] < 0.02:
        return "nothing that can be predicted here would help by more than 2 %"
    return f"{best[1]}: {100 * best[0]:.0f} % more tokens per second"
