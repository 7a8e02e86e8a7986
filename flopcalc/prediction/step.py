"""Predict one step: a model, a workload and a device in; seconds with an interval, what bounds them and why, out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.errors import RecipeError, WorkloadError, format_nearest, format_value
from flopcalc.estimate import Estimate, Estimator, bind
from flopcalc.prediction.machine import Machine
from flopcalc.prediction.memory import Memory, predict_memory
from flopcalc.prediction.work import OPTIMIZERS, Work, make_work
from flopcalc.utilization import check_positive, hfu, mfu
from flopcalc.workload import Workload

__all__ = ["OPTIMIZERS", "Prediction", "StepTime", "predict", "predict_estimate"]

_EXPERTS = 0.08  # relative error that experts add: rows are dealt out unevenly, and HF changes their code often
# How much host and device overlap where they are near each other, from steps of the fit: a training step's passes are
# unlike, and the device's queue is shorter than a step; forward passes are alike all through.
_OVERLAP = {"train": 4, "forward": 12}
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
    is_joined: bool = False  # a compiler joins it to others


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
            "memory_bytes": self.memory.to_dict() if self.memory else None,
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
    spec: Any = None,
    grad_accum: int = 1,
    host_factor: float = 1.0,
    memory: bool = True,
    advise: bool = True,
    **workload: Any,
) -> Prediction:
    """Time, utilization and memory of one step of HF's model on one device; `workload` as estimate_flops takes it.

    `host_factor` says how many times longer than the measured machine's CPU yours takes for the same Python.
    """
    estimator = bind(
        model, recipe=recipe, convention="hardware", attention_kernel=attention_kernel, device=device, dtype=dtype,
        spec=spec,
    )  # fmt: skip
    batch = workload.pop("batch", None)
    if batch is not None:
        estimate = estimator.estimate_batch(batch, **workload)
    else:
        estimate = estimator(workload.pop("batch_size", 1), workload.pop("seq_len", None), **workload)
    if type(grad_accum) is not int or grad_accum < 1:
        raise WorkloadError(f"grad_accum is a whole number of at least 1, not {format_value(grad_accum)}")
    return predict_estimate(
        estimate * grad_accum, device=device, dtype=dtype, optimizer=optimizer, compiled=compiled, memory=memory,
        is_eager=attention_kernel == "eager", host_factor=host_factor, advise=advise,
    )  # fmt: skip


def predict_estimate(
    estimate: Estimate,
    *,
    device: str,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    compiled: bool = False,
    memory: bool = True,
    is_eager: bool = False,
    host_factor: float = 1.0,
    advise: bool = True,
) -> Prediction:
    """The step whose FLOPs were counted: as `predict`."""
    check_positive(host_factor, "the host's factor")
    if optimizer not in OPTIMIZERS:
        near = format_nearest(str(optimizer), OPTIMIZERS)
        raise RecipeError(f"optimizer {format_value(optimizer)} unknown.{near} Known: {', '.join(OPTIMIZERS)}")
    machine = Machine(device, dtype)
    parts: list[tuple[Estimator, Workload, int]] = list(estimate.terms)
    if any(estimator.recipe.clipping != "none" for estimator, _, _ in parts):
        raise RecipeError("per-sample clipping is counted, not predicted: leave --clipping out")
    if any(estimator.origin == "trace" for estimator, _, _ in parts):
        raise WorkloadError("a traced model has no op list to predict from: it needs a spec")
    clock = Clock(machine, compiled)
    width = 4 if machine.dtype in ("fp32", "tf32") else 2
    for i, (estimator, load, times) in enumerate(parts):
        steps = "none" if i else optimizer  # one optimizer's step for all micro-batches
        work = make_work(estimator, load, optimizer=steps, is_eager=is_eager, dtype_bytes=width)
        clock.add(work, times, load)
    device_s, host_s = clock.device_s(), clock.host_s() * host_factor
    mid = _join(device_s, host_s, parts[0][1].phase)
    bound = "device" if device_s >= host_s else "host"
    error = clock.error(bound)
    seconds = StepTime(mid * (1 - error), mid, mid * (1 + error) * (1 + clock.late(bound)))
    found = _find_memory(parts, machine, optimizer, is_eager) if memory else None
    share: dict[str, Any] = {"device": device, "dtype": machine.dtype}
    tokens = estimate.tokens
    prediction = Prediction(
        seconds,
        bound,
        device_s,
        host_s,
        _share(mfu(estimate, mid, **share)),
        _share(hfu(estimate, mid, **share)),
        tokens / mid,
        clock.breakdown(mid),
        clock.modules(),
        found,
        "",
        clock.evidence(),
        tuple(clock.notes()),
    )
    if not advise:
        return prediction
    return prediction._replace(
        advice=_advise(estimate, prediction, machine, optimizer, compiled, is_eager, host_factor)
    )


def _share(found: Any) -> float:
    return float(found.value) if found.value is not None else math.nan


def _join(device_s: float, host_s: float, phase: str) -> float:
    """Host and device overlap, but not wholly where they are near each other: a smooth maximum."""
    high, low = max(device_s, host_s), min(device_s, host_s)
    power = _OVERLAP["train" if phase == "train" else "forward"]
    return float(high * (1 + (low / high) ** power) ** (1 / power))


class Clock:
    """Adds up the times of a step's work."""

    def __init__(self, machine: Machine, compiled: bool) -> None:
        self.machine, self.compiled = machine, compiled
        self.constants = machine.constants
        self.pieces: list[Piece] = []
        self.launches = 0.0
        self.flops = 0.0
        self.host: list[tuple[dict[str, float], float, str, int]] = []
        self.is_recorded = True
        self.has_experts = False
        self.found_notes: dict[str, None] = {}

    def add(self, work: Work, times: int, load: Workload) -> None:
        fused = self.constants["compiled"]["moved"] if self.compiled else 1.0
        for product in work.products:
            timed = self.machine.time_product(product)
            self._put(product.module, product.group, "products", timed.seconds, timed.error, product.calls * times)
            self.flops += product.flops * times
            self.has_experts = self.has_experts or product.copies > 1
        for call in work.attention:
            timed = self.machine.time_attention(call)
            self._put(call.module, call.group, "attention", timed.seconds, timed.error, call.calls * times)
        for moved in work.moved:
            is_optimizer = moved.direction == "optimizer"
            timed = self.machine.time_moved(moved)
            is_joined = moved.kind.startswith(_FUSED) and not is_optimizer
            kind = "optimizer" if is_optimizer else "memory"
            self._put(
                moved.module, moved.group, kind, timed.seconds * (fused if is_joined else 1.0), timed.error,
                moved.calls * (1 if is_optimizer else times), is_joined,
            )  # fmt: skip
        calls = load.seq if load.phase == "decode" else 1
        once = {name: many for name, many in work.dispatched.items() if name.startswith("optimizer ")}
        each = {name: many for name, many in work.dispatched.items() if name not in once}
        self.host += [(each, times, load.phase, calls), (once, 1, load.phase, 0)]
        self.is_recorded = self.is_recorded and work.is_recorded
        self.found_notes |= dict.fromkeys(work.notes)

    def _put(
        self, module: str, group: str, kind: str, seconds: float, error: float, calls: float, is_joined: bool = False
    ) -> None:  # fmt: skip
        if calls:
            self.pieces.append(Piece(module, group, kind, seconds * calls, seconds * calls * error, is_joined))
            self.launches += calls * (self.constants["compiled"]["moved"] if self.compiled and is_joined else 1.0)

    def busy_s(self) -> float:
        """Seconds in which the device computes, at the clock that the power limit leaves."""
        busy = sum(piece.seconds for piece in self.pieces)
        if not busy:
            return 0.0
        start, slope = self.constants["power"]
        rate = self.flops / busy / self.machine.peak
        return float(busy * (1 + slope * max(0.0, rate - start)))

    def device_s(self) -> float:
        share, gap = self.constants["gaps"]
        return float(self.busy_s() * (1 + share) + self.launches * gap)

    def host_s(self) -> float:
        if self.compiled:
            return float(self.launches * self.constants["compiled"]["launch_s"])
        total = 0.0
        for dispatched, times, phase, calls in self.host:
            total += host_seconds(self.constants["host"], dispatched, phase, calls) * times
        return total

    def error(self, bound: str) -> float:
        """Relative half width: errors of many operators average out in part, those they share do not."""
        floor = self.constants["error"]
        if bound == "host":
            return float(floor["host"]) if self.is_recorded else 2 * float(floor["host"])
        total = sum(piece.seconds for piece in self.pieces)
        if not self.machine.is_measured:
            return 0.35
        apart = math.sqrt(sum(piece.error**2 for piece in self.pieces)) / total if total else 0.0
        wide = float(floor["device"]) + apart + (_EXPERTS if self.has_experts else 0.0)
        wide += float(floor["compiled"]) if self.compiled else 0.0
        return wide if self.is_recorded else 2 * wide

    def late(self, bound: str) -> float:
        """How much later than its likeliest time a step may come, beyond the error: a busy host only delays."""
        return float(self.constants["error"]["late"]) if bound == "host" else 0.0

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
        total = sum(piece.seconds for piece in self.pieces) or 1.0
        provenance = machine.constants.get("provenance", {})
        return {
            "device": machine.device.id,
            "is_measured": machine.is_measured,
            "measured_on": provenance.get("device_id"),
            "torch": provenance.get("torch"),
            "date": provenance.get("date"),
            "commit": provenance.get("commit"),
            "operators_recorded": self.is_recorded,
            "far_share": sum(p.seconds for p in self.pieces if p.error > 0.09 * p.seconds) / total,
        }

    def notes(self) -> list[str]:
        notes = list(self.found_notes)
        device = self.machine.device
        if self.has_experts:
            notes.append("experts are taken as evenly loaded")
        if not self.machine.is_measured:
            measured = self.machine.constants.get("provenance", {}).get("device_id", "another device")
            notes.insert(
                0,
                f"{device.name} in {self.machine.dtype} was not measured: published peaks, with the shapes measured on "
                f"{measured}; `flopcalc calibrate` on one brings this to the measured standard",
            )
        elif not self.compiled:
            notes.append(
                "host time is of the measured machine's CPU; --host-factor tells how many times longer yours takes"
            )
        return notes


def host_seconds(constants: Mapping[str, Any], dispatched: Mapping[str, float], phase: str, calls: int) -> float:
    """Seconds in which the host dispatches a step's operators; in phases without gradients, all calls together."""
    features = host_features(dispatched, calls)
    weights = constants[name_phase(phase)]
    plain = sum(weight * feature for weight, feature in zip(weights, features, strict=True))
    return float(plain + constants.get("again", 0.0) * count_again(dispatched))


def name_phase(phase: str) -> str:
    """The phases that the host's time is told apart by: with gradients, without, and with a growing cache."""
    return phase if phase in ("train", "decode") else "forward"


def count_again(dispatched: Mapping[str, float]) -> float:
    """Operators with a kernel that checkpointing runs again."""
    quiet = ("view", "make", "module", "node")
    return sum(many for name, many in dispatched.items() if name.startswith("again ") and name.split()[1] not in quiet)


# What the host spends on each thing, in units of an operator that launches a kernel. Set by hand: fitted one by one on
# a dozen steps of a noisy host they come out at random; the unit itself is fitted.
_HOST_UNITS = {"view": 0.4, "make": 0.4, "module": 2.0, "node": 0.3}
_HOST_TENSOR = 2.0  # of an optimizer


def host_features(dispatched: Mapping[str, float], calls: int) -> tuple[float, float]:
    """What host time is made of: calls of the model, and all that they dispatch in units of one operator."""
    units = 0.0
    for name, many in dispatched.items():
        way, _, kind = name.partition(" ")
        units += many * (_HOST_TENSOR if way == "optimizer" else _HOST_UNITS.get(kind, 1.0))
    return float(calls), units


def _find_memory(
    parts: list[tuple[Estimator, Workload, int]], machine: Machine, optimizer: str, is_eager: bool
) -> Memory:  # fmt: skip
    """The largest micro-batch's."""
    found = [
        predict_memory(
            estimator, load, dtype=machine.dtype, optimizer="sgd" if optimizer == "none" else optimizer,
            attention="eager" if is_eager else "sdpa",
        )
        for estimator, load, _ in parts
    ]  # fmt: skip
    return max(found, key=lambda memory: memory.peak)


def _advise(
    estimate: Estimate,
    now: Prediction,
    machine: Machine,
    optimizer: str,
    compiled: bool,
    is_eager: bool,
    host_factor: float,
) -> str:
    """The one change that makes most of the tokens per second, of those that can be predicted."""
    tried: list[tuple[float, str]] = []
    given: dict[str, Any] = {"device": machine.device.id, "dtype": machine.dtype, "memory": False, "advise": False}

    def gain(text: str, changed: Estimate, **options: Any) -> None:
        base: dict[str, Any] = {
            "optimizer": optimizer, "compiled": compiled, "is_eager": is_eager, "host_factor": host_factor,
        }  # fmt: skip
        after = predict_estimate(changed, **given, **(base | options))
        tried.append((after.tokens_per_s / now.tokens_per_s - 1, text))

    if not compiled:
        gain("compile the model (--compile)", estimate, compiled=True)
    if is_eager:
        gain("fused attention in place of eager", estimate, is_eager=False)
    if optimizer == "adamw-foreach":
        gain("the fused optimizer", estimate, optimizer="adamw")
    (estimator, load, times), *others = estimate.terms
    if not others and load.documents is None and load.rows and now.memory is not None and load.seq:
        double = load.replace(rows=load.rows * 2, grids=load.grids * 2, videos=load.videos * 2, clips=load.clips * 2)
        memory = _find_memory([(estimator, double, times)], machine, optimizer, is_eager)
        if machine.device.memory_gb is None or memory.fits(machine.device):
            gain("a batch twice as large", estimator.estimate(double) * times)
    if estimator.recipe.recompute != "none" and load.phase == "train":
        plain = Estimator(
            estimator.source, estimator.recipe._replace(recompute="none"), estimator.convention,
            estimator.attention_kernel,
        )  # fmt: skip
        memory = _find_memory([(plain, load, times)], machine, optimizer, is_eager)
        if machine.device.memory_gb is None or memory.fits(machine.device):
            gain("no recomputation: the activations fit", plain.estimate(load) * times)
    best = max(tried, default=(0.0, ""))
    if best[0] < 0.02:
        return "nothing that can be predicted here would help by more than 2 %"
    return f"{best[1]}: {100 * best[0]:.0f} % more tokens per second"
