"""Predict one step: a model, a workload and a device in; seconds with an interval, what bounds them and why, out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flopcalc.base.errors import (
    RecipeError,
    WorkloadError,
)
from flopcalc.base.presentation import find_presenter
from flopcalc.base.rows import Rows, shorten
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_positive, format_bytes, format_seconds, read_number
from flopcalc.base.vocabulary import CallKernel, Execution, Kernel, Optimizer, check_flag, check_word
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.estimate.notes import describe_inferred
from flopcalc.core.estimate.utilization import Utilization, hfu, mfu
from flopcalc.core.model.ops import iterate
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.devices import Device, find_device, parse_dtype
from flopcalc.hardware.prices import Rate
from flopcalc.prediction.build_work import count_calls, make_work
from flopcalc.prediction.clock import Clock, Event, StepTime
from flopcalc.prediction.execution_options import (
    change,
    check_optimizer,
    check_timed,
    choose_execution,
    describe_formats,
    find_kernel,
    match_dtype,
    settle_estimate,
)
from flopcalc.prediction.kernels.defaults import DeviceDefaults
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.memory.peak import (
    Memory,
    can_resize,
    count_state_bytes,
    find_capacity,
    largest_batch,
    predict_memory,
    resize_batch,
)
from flopcalc.prediction.moe_versions import FREE, RECORDED, USUAL, is_routed, parse_version
from flopcalc.prediction.roofline import Floors, describe_execution, find_floors, format_rate
from flopcalc.prediction.watts import Energy, Power, Range, find_energy, find_power_model

__all__ = ["Prediction", "StepTime", "find_largest_batch", "predict_estimate"]

_COUNTING = ("kernel ", "tile padding ")  # an estimate's notes on how HFU's FLOPs were counted, not on the workload


class TimeRow(NamedTuple):
    """Seconds of a kind of work, or of a module on the device; `share` of the sum of all rows."""

    name: str
    seconds: float
    share: float


class Prediction(NamedTuple):
    """What a step will take, and what the figure rests on."""

    step_time_s: StepTime
    bound: str  # device or host
    device_s: float
    host_s: float
    mfu: float
    hfu: float
    tokens_per_s: float | None  # None: the step has images alone, or makes them
    breakdown: dict[str, float]  # kind -> seconds; they add up to the likeliest time
    modules: dict[str, float]  # module -> seconds on the device
    memory: Memory | None
    advice: str
    evidence: dict[str, Any]
    notes: tuple[str, ...]
    fits: bool | None = None  # None: the memory was not asked for, or the device's is not known
    execution: Execution = "eager"
    floors: Floors | None = None
    model: str = ""
    device: str = ""
    dtype: str = ""
    workload: str = ""  # in words
    capacity: int | None = None  # bytes that tensors can fill; None as for `fits`
    events: tuple[Event, ...] = ()  # what host and device do, if it was asked for
    # Decoding in eager code: seconds of a token, and in addition of a new length.
    generate: dict[str, float] | None = None
    gpus: int = 1  # that run such a step each; tokens per second are of all of them
    global_batch: int = 0  # sequences of a step, on all GPUs
    routing: str | None = None  # of a model with experts
    power: Power | None = None  # of one GPU; None where its power limit is not known
    pause_s: float = 0.0  # after each step
    pue: float | None = None
    grid_g_per_kwh: float | None = None
    price: Rate | None = None
    sample: str = "samples"  # what a diffusion model's are
    optimizer: Optimizer | None = None  # of a training step

    @property
    def energy(self) -> Energy | None:
        """What a step takes on all GPUs."""
        seconds = Range(*(value + self.pause_s for value in self.step_time_s))
        tokens = (self.tokens_per_s or 0.0) * seconds.mid
        return find_energy(self.power, seconds, tokens, self.gpus, self.pue, self.grid_g_per_kwh)

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / (self.step_time_s.mid + self.pause_s)

    @property
    def rate(self) -> tuple[float, str]:
        """Tokens per second, or samples where there are no tokens; and which of them."""
        return (self.samples_per_s, self.sample) if self.tokens_per_s is None else (self.tokens_per_s, "tokens")

    @property
    def usd(self) -> Range | None:
        """What a sample costs, or a million tokens where there are tokens."""
        seconds = Range(*(value + self.pause_s for value in self.step_time_s))
        made = self.rate[0] * seconds.mid / (1e6 if self.tokens_per_s else 1.0)
        return seconds.scale(self.price.usd_per_gpu_hour * self.gpus / (3600 * made)) if self.price else None

    def describe_rate(self) -> str:
        return f"{format_rate(self.rate[0])} {self.rate[1]}/s"

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "workload": self.workload,
            "device": self.device,
            "dtype": self.dtype,
            "step_time_s": self.step_time_s._asdict(),
            "execution": self.execution,
            "optimizer": self.optimizer,
            "routing": self.routing,
            "bound": self.bound,
            "device_s": self.device_s,
            "host_s": self.host_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "breakdown": {**self.breakdown, "modules": self.modules},
            "memory_bytes": (
                {**self.memory.to_dict(), "fits": self.fits, "capacity": self.capacity} if self.memory else None
            ),
            "energy": energy.to_dict() if (energy := self.energy) else None,
            "floors": self.floors.to_dict() if self.floors else None,
            "price": None if self.price is None else self.price._asdict(),
            "usd": None
            if (usd := self.usd) is None
            else usd._asdict(),  # of what `tokens_per_s` or `samples_per_s` counts
            "generate": self.generate,
            "advice": self.advice,
            "evidence": self.evidence,
            "gpus": self.gpus,
            "global_batch": self.global_batch,
            "notes": list(self.notes),
        }

    def rows(self, by: str = "kind") -> Rows[TimeRow]:
        """Seconds by kind of work (they add up to the likeliest time) or by module (on the device)."""
        parts = self.breakdown if check_word(by, ("kind", "module"), "rows by") == "kind" else self.modules
        whole = sum(parts.values())
        return Rows(TimeRow(name, seconds, seconds / whole if whole else 0.0) for name, seconds in parts.items())

    def to_pandas(self, by: str = "kind") -> Any:
        """The rows as a pandas DataFrame."""
        return self.rows(by).to_pandas()

    def __repr__(self) -> str:
        return f"Prediction({self.describe()})"

    def describe(self) -> str:
        """The answer in one line."""
        low, mid, high = (format_seconds(value) for value in self.step_time_s)
        fit = "" if self.fits is not False else "; does not fit"
        return (
            f"{shorten(self.model)}, {shorten(self.workload)} on {self.device} in {self.dtype}, {self.execution}: step "
            f"{mid} ({low} to {high}), bound by the {self.bound}, MFU {100 * self.mfu:.1f} %, "
            f"{self.describe_rate()}{fit}"
        )

    def _repr_html_(self) -> str:
        return find_presenter().show_prediction(self)


def predict_estimate(
    estimate: Estimate,
    *,
    device: str,
    dtype: str | None = None,
    optimizer: Optimizer = "adamw",
    execution: Execution | None = None,
    compiled: bool = False,
    memory: bool = True,
    attention_kernel: Kernel = "auto",
    host_factor: float = 1.0,
    pause_s: float = 0.0,
    advise: bool = True,
    transformers: str | None = None,
    timeline: bool = False,
    clip_gradients: bool = False,
    hf_trainer: bool = False,
) -> Prediction:
    """Time, utilization and memory of the step whose FLOPs were counted, on one device.

    `host_factor` is your CPU's slowdown relative to the calibrated host. `pause_s` is how long the host does something
    else after each step, while the device finishes its queue. The step's time does not include the pause; shares,
    tokens per second and the breakdown do. `transformers` is the version whose code runs. With `timeline` the result
    has `events`, for `save_trace`.
    """
    chosen = choose_execution(execution, check_flag(compiled, "compiled"))
    memory, advise, timeline = (
        check_flag(flag, name) for flag, name in ((memory, "memory"), (advise, "advise"), (timeline, "timeline"))
    )
    host_factor = check_positive(host_factor, "the host's factor")
    pause_s = read_number(pause_s, "pause_s", or_zero=True)
    check_optimizer(optimizer)
    if any(estimator.origin == "trace" for estimator, _, _ in estimate.terms):
        raise WorkloadError("a traced model has no op list to predict from: it needs a spec")
    for estimator, _, _ in estimate.terms:
        check_timed(estimator)
    if dtype is not None:
        # A narrow format is refused.
        find_kernel(find_device(device), parse_dtype(dtype), attention_kernel)
        estimate = match_dtype(estimate, dtype)
    kind = estimate.terms[0].estimator.formats.attention
    kernel = find_kernel(find_device(device), kind, attention_kernel)
    machine = Machine(device, kind)
    if any(estimator.recipe.clipping != "none" for estimator, _, _ in estimate.terms):
        raise RecipeError(f"per-sample clipping is counted, not predicted: leave {spell('clipping')} out")
    passes = estimate.passes
    estimate, kernel, notes = settle_estimate(estimate, kernel, chosen, is_asked=attention_kernel != "auto")
    version = parse_version(transformers) if transformers is not None else USUAL
    in_trainer, clips = check_flag(hf_trainer, "hf_trainer"), check_flag(clip_gradients, "clip_gradients")
    settings = _Settings(machine, optimizer, chosen, kernel, host_factor, pause_s, version, timeline, in_trainer, clips)
    if host_factor != 1 and chosen in ("graphs", "fused"):
        notes.append(f"execution {chosen} has no host time for each operator, so a host factor changes nothing")
    if chosen == "graphs":
        seconds = _make_clock(estimate, settings, is_captured=True).step_s()
        notes.append(f"a graph of HF's own kernels, captured without torch.compile, takes {format_seconds(seconds)}")
    parts = list(estimate.terms)
    prediction = _predict(estimate, settings)
    if chosen == "eager" and parts[0].load.phase == "decode" and machine.is_measured:
        tokens = sum(count_calls(load) * times for _, load, times in parts)
        prediction = _add_generate(prediction, tokens, host_factor, machine.fitted)
    settings = settings._replace(has_events=False)
    if transformers is None and has_routed(estimate) and chosen != "fused":
        prediction = _cover_versions(prediction, _predict(estimate, settings._replace(transformers=RECORDED)))
    floors = find_floors(estimate, machine.device, None, machine.width, optimizer)
    low, mid, high = prediction.step_time_s
    least = max(floors.compute_s, floors.bandwidth_s or 0.0)  # no step is shorter
    prediction = prediction._replace(
        notes=(*prediction.notes, describe_execution(chosen, parts[0].load.phase)),
        floors=floors,
        step_time_s=StepTime(max(low, min(mid, least)), mid, high),
    )
    if any(term.estimator.is_diffusion for term in parts):
        memory = False
        states = count_state_bytes(optimizer, machine.width) if parts[0].load.phase == "train" else 0
        held = sum(each.total_bytes for each in estimate.weights) + estimate.parameters["trainable"] * states
        notes.append(
            f"memory: at least {format_bytes(held)} for weights, gradients and optimizer states; activations of "
            "diffusion models are not predicted: no tensors of theirs were recorded"
            + f"; {spell('parts', 'denoiser')} leaves out what is encoded beforehand"
            * (states > 0 < len(parts) - 1)
        )
        prediction = _compare_weights(prediction, held, machine.device)
        floors = floors._replace(tokens_per_s=None)
        sample = "videos" if any(frames > 1 for term in parts for frames, *_ in term.load.grids) else "images"
        prediction = prediction._replace(tokens_per_s=None, floors=floors, sample=sample)  # people count these
    if len(passes) > 1:
        notes.append(
            "passes of a step, each alone: "
            + ", ".join(
                f"{name} {format_seconds(_predict(each, settings).step_time_s.mid)}" for name, each in passes.items()
            )
            + "; all of them in HF's code, the rollout too"
        )
    if memory:
        prediction = _add_memory(prediction, _hold(settings, parts, passes), machine.device)
    notes += [prediction.power.describe()] if prediction.power is not None else []
    notes += [machine.device.note] if machine.device.note else []
    notes += describe_formats(estimate.terms[0].estimator.formats, optimizer)
    notes += describe_inferred(estimate.terms[0].estimator)
    notes += [note for note in estimate.notes if not note.startswith(_COUNTING) and note not in notes]
    prediction = prediction._replace(notes=(*prediction.notes, *notes))
    if advise and prediction.fits is False and prediction.memory is not None:
        return prediction._replace(advice=_advise_fit(parts, settings))
    return prediction._replace(advice=_advise(estimate, prediction, settings)) if advise else prediction


def find_largest_batch(
    estimate: Estimate, *, device: str, dtype: str | None = None, optimizer: Optimizer = "adamw",
    attention_kernel: Kernel = "auto", execution: Execution = "eager",
) -> int | None:  # fmt: skip
    """The largest micro-batch of the same samples that fits, 0 if none does; None where samples differ."""
    estimate = estimate if dtype is None else match_dtype(estimate, dtype)
    kind = estimate.terms[0].estimator.formats.attention
    kernel = find_kernel(find_device(device), kind, attention_kernel)
    estimate, kernel, _ = settle_estimate(estimate, kernel, execution, is_asked=attention_kernel != "auto")
    (estimator, load, times), *others = estimate.terms
    settings = _Settings(Machine(device, kind), optimizer, execution, kernel, 1.0)
    return settings.find_largest(estimator, load, times) if not others else None


class _Settings(NamedTuple):
    """How a step runs, not what it computes."""

    machine: Machine
    optimizer: Optimizer
    execution: Execution
    kernel: CallKernel
    host_factor: float
    pause_s: float = 0.0
    transformers: str = USUAL
    has_events: bool = False
    in_trainer: bool = False
    clips: bool = False

    @property
    def is_compiled(self) -> bool:
        return self.execution in ("compiled", "graphs")

    def find_memory(self, parts: Sequence[tuple[Estimator, Workload, int]], *, is_scored: bool = False) -> Memory:
        """The largest micro-batch's."""
        is_adding = sum(times for _, load, times in parts if load.phase == "train") > 1
        found = [
            predict_memory(estimator, load, is_adding=is_adding, is_scored=is_scored, **self.memory_settings)
            for estimator, load, _ in parts
        ]
        return max(found, key=lambda memory: memory.peak)

    def find_largest(self, estimator: Estimator, load: Workload, times: int) -> int | None:
        """The largest micro-batch of the same samples that fits; None where they differ or memory is not known."""
        if not can_resize(load) or self.machine.device.memory_gb is None:
            return None
        try:
            found, _ = largest_batch(
                estimator,
                lambda rows: resize_batch(load, rows),
                self.machine.device,
                is_adding=times > 1,
                **self.memory_settings,
            )
        except WorkloadError:  # not even one
            return 0
        return found

    @property
    def memory_settings(self) -> dict[str, Any]:
        return {
            "dtype": self.machine.dtype,
            "optimizer": self.optimizer,
            "attention": self.kernel,
            "execution": self.execution,
        }


def _make_clock(estimate: Estimate, settings: _Settings, is_captured: bool = False) -> Clock:
    """The work of all micro-batches, timed."""
    machine = settings.machine
    clock = Clock(machine, settings.execution, is_captured)
    for i, (estimator, load, times) in enumerate(estimate.terms):
        steps = "none" if i else settings.optimizer  # one optimizer's step for all micro-batches
        work = make_work(
            estimator,
            load,
            optimizer=steps,
            dtype_bytes=machine.width,
            kernel=settings.kernel,
            execution=settings.execution,
            transformers=settings.transformers,
            in_trainer=settings.in_trainer,
            clips=(settings.clips or settings.in_trainer) and not i,
        )
        clock.add(work, times, load)
    return clock


def _predict(estimate: Estimate, settings: _Settings) -> Prediction:
    """Time alone."""
    machine = settings.machine
    clock = _make_clock(estimate, settings)
    pace = settings.host_factor, settings.pause_s
    seconds, bound = clock.interval(*pace), clock.bound(*pace)
    events = tuple(clock.list_events(*pace)) if settings.has_events else ()
    share: dict[str, Any] = {"device": machine.device.id}
    whole = seconds.mid + settings.pause_s
    model = find_power_model(machine.device)
    return Prediction(
        seconds,
        bound,
        clock.device_s(),
        clock.host_s() * settings.host_factor,
        _share(mfu(estimate, whole, **share)),
        _share(hfu(estimate, whole, **share)),
        estimate.tokens / whole if estimate.tokens else None,
        clock.breakdown(whole),
        clock.modules(),
        None,
        "",
        {**clock.evidence(), "transformers": settings.transformers},
        tuple(clock.notes(bound)),
        execution=settings.execution,
        model=estimate.terms[0].estimator.source.name,
        device=machine.device.id,
        dtype=machine.dtype,
        workload=estimate.describe(),
        events=events,
        global_batch=estimate.global_batch,
        routing=estimate.terms[0].estimator.routing_name,
        power=None if model is None else model.find(clock.find_shares(whole)),
        pause_s=settings.pause_s,
        optimizer=settings.optimizer if estimate.terms[0].load.phase == "train" else None,
    )


def has_routed(estimate: Estimate) -> bool:
    """Whether a router sends rows to experts."""
    stages = [stage for estimator, _, _ in estimate.terms for stage in estimator.stages]
    chains = [chain for stage in stages for chain in stage.kinds]
    return any(is_routed(op) for chain in chains for op in iterate(chain))


def _cover_versions(found: Prediction, newer: Prediction) -> Prediction:
    """A prediction whose interval also covers newer versions of transformers, with a note of the difference."""
    low, mid, high = found.step_time_s
    less = mid - newer.step_time_s.mid
    note = (
        f"experts as in transformers {USUAL}, which masks routed rows; {FREE} and newer do not and take "
        f"{format_seconds(less)} less: {spell('transformers')} sets the version; the interval covers both"
    )
    seconds = StepTime(min(low, newer.step_time_s.low), mid, high)
    return found._replace(step_time_s=seconds, notes=(*found.notes, note))


def _add_generate(prediction: Prediction, tokens: int, host_factor: float, fitted: DeviceDefaults) -> Prediction:
    """With the time of a token in HF's generate, and what a new length adds."""
    token_s, new_s = fitted.generate_slower * prediction.step_time_s.mid / tokens, fitted.new_length_s * host_factor
    note = (
        f"HF's generate takes about {format_seconds(token_s)} a token, and about {format_seconds(new_s)} more at each "
        "length that cuDNN meets first (four models measured)"
    )
    found = {"token_s": token_s, "new_length_s": new_s}
    return prediction._replace(generate=found, notes=(*prediction.notes, note))


def _hold(
    settings: _Settings, parts: Sequence[tuple[Estimator, Workload, int]], passes: Mapping[str, Estimate]
) -> Memory:
    """A step's memory, with the weights of a reference or teacher, which are there all the while.

    With adapters the model itself is its reference.
    """
    is_alike = len({each.terms[0].estimator.source.name for each in passes.values()}) == 1  # no teacher
    memory = settings.find_memory(parts, is_scored=is_alike and len(passes) > 1)
    if "reference" not in passes or (is_alike and parts[0][0].recipe.lora is not None):
        return memory
    held = sum(each.total_bytes for each in passes["reference"].weights)
    return memory._replace(
        weights=memory.weights + held,
        peak=memory.peak + held,
        at_peak={**memory.at_peak, "weights": memory.at_peak["weights"] + held},
    )


def _add_memory(prediction: Prediction, memory: Memory, device: Device) -> Prediction:
    """With memory, and a note first where it does not fit."""
    if device.memory_gb is None:
        note = f"whether it fits is not known: {device.name} has no memory_gb in devices.toml"
        return prediction._replace(memory=memory, notes=(*prediction.notes, note))
    capacity = find_capacity(device)
    if memory.peak <= capacity:
        return prediction._replace(memory=memory, fits=True, capacity=capacity)
    note = (
        f"does not fit: the step needs {format_bytes(memory.peak)}, {device.name} has {format_bytes(capacity)} for "
        "tensors; the time is as if it did"
    )
    return prediction._replace(memory=memory, fits=False, capacity=capacity, notes=(note, *prediction.notes))


def _compare_weights(prediction: Prediction, held: int, device: Device) -> Prediction:
    """With a note first where weights and states alone, of all parts of a pipeline, do not fit."""
    if device.memory_gb is None or held <= (capacity := find_capacity(device)):
        return prediction
    note = (
        f"does not fit: weights and states alone take {format_bytes(held)}, {device.name} has {format_bytes(capacity)} "
        "for tensors; the time is as if they did"
    )
    return prediction._replace(fits=False, capacity=capacity, notes=(note, *prediction.notes))


def _share(found: Utilization) -> float:
    return float(found.value) if found.value is not None else math.nan


def _advise_fit(parts: Sequence[tuple[Estimator, Workload, int]], settings: _Settings) -> str:
    """What would make a step fit that does not."""
    device = settings.machine.device
    (estimator, load, times), *others = parts
    if load.phase == "train" and estimator.recipe.recompute == "none":
        changed = [(change(each, recompute="full"), other, many) for each, other, many in parts]
        again = [(each, other, many) for each, other, many in changed if each is not None]
        if len(again) == len(parts) and settings.find_memory(again).fits(device):
            return f"recomputation ({spell('recompute', 'full')}): the step then fits"
    # One row is the smallest batch, and it does not fit.
    if not others and load.rows > 1 and (most := settings.find_largest(estimator, load, times)):
        return f"a smaller batch: {most} is the largest that fits"
    if load.phase == "train":
        return "several devices: `flopcalc plan` finds a layout that fits"
    return f"several devices that share the model (`flopcalc serving` with {spell('tp', 'N')}): one does not hold it"


def _advise(estimate: Estimate, now: Prediction, settings: _Settings) -> str:
    """The one change that makes most of the tokens per second, of those that can be predicted."""
    tried: list[tuple[float, str]] = []
    device = settings.machine.device

    def gain(text: str, changed: Estimate, **options: Any) -> None:
        after = _predict(changed, settings._replace(**options))
        tried.append((after.samples_per_s / now.samples_per_s - 1, text))

    def fits(estimator: Estimator, load: Workload, times: int) -> bool:
        return device.memory_gb is None or settings.find_memory([(estimator, load, times)]).fits(device)

    if settings.execution == "eager":
        gain(f"compile the model ({spell('compile', True)})", estimate, execution="compiled")
    if settings.kernel == "eager" and estimate.terms[0][0].spec.has_sdpa:
        kernel = find_kernel(device, settings.machine.dtype, "auto")
        gain("fused attention in place of eager", estimate, kernel=kernel)
    if settings.optimizer == "adamw-foreach":
        gain("the fused optimizer", estimate, optimizer="adamw")
    (estimator, load, times), *others = estimate.terms
    if not others and now.memory is not None and can_resize(load):
        double = resize_batch(load, 2 * load.rows)
        if fits(estimator, double, times):
            gain("a batch twice as large", estimator.estimate(double) * times)
    if estimator.recipe.recompute != "none" and load.phase == "train" and not others:
        plain = change(estimator, recompute="none")
        if plain is not None and fits(plain, load, times):
            gain("no recomputation: the activations fit", plain.estimate(load) * times)
    best = max(tried, default=(0.0, ""))
    if best[0] < 0.02:
        return "nothing that can be predicted here would help by more than 2 %"
    return f"{best[1]}: {100 * best[0]:.0f} % more {now.rate[1]} per second"
