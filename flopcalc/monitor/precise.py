"""A live model, a batch size, a length and a step time in; its MFU out, with the FLOPs measured on this very model."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError, format_nearest, format_value
from flopcalc.base.units import check_positive, check_size
from flopcalc.base.vocabulary import Convention
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.estimate.utilization import find_ideal_time, find_peak, share_peak
from flopcalc.core.model.live import strip, unwrap
from flopcalc.hardware.devices import find_detected, parse_dtype
from flopcalc.monitor.batch import bind_eager, bind_live
from flopcalc.monitor.instruments import (
    Copy,
    Counters,
    NotMeasured,
    Profiler,
    find_torch_device,
    is_profiled,
    list_tensor_dtypes,
)
from flopcalc.monitor.modes import HIGHEST, LOWEST, Counts
from flopcalc.monitor.settings import MODES

# Smart's factors: a model -> what trains and is recomputed -> the factor and where it comes from.
_smart: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[float, str, str | None]]] = weakref.WeakKeyDictionary()


class MeasuredMfu(float):
    """A share of the peak, never clamped, NaN where it is not known; `note` says why, or what is special."""

    source: str
    convention: Convention
    flops: int | None  # of the step
    peak_flops_per_s: float | None  # of one device
    device: str | None
    note: str | None

    def __new__(
        cls,
        value: float,
        source: str = "none",
        convention: Convention = "model",
        flops: int | None = None,
        peak_flops_per_s: float | None = None,
        device: str | None = None,
        note: str | None = None,
    ) -> MeasuredMfu:
        made = super().__new__(cls, value)
        made.source, made.convention, made.flops = source, convention, flops
        made.peak_flops_per_s, made.device, made.note = peak_flops_per_s, device, note
        return made

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"MeasuredMfu({float(self)!r}, {parts})"


class _MeasuredFlops(NamedTuple):
    """FLOPs of a step, with where they come from."""

    flops: int
    source: str
    convention: Convention = "model"
    note: str | None = None


def calculate_mfu_with_profiler(
    model: object,
    batch_size: int,
    seq_length: int,
    step_time: float,
    *,
    device: str | None = None,
    dtype: object = None,
    peak: float | Mapping[str, float] | None = None,
) -> MeasuredMfu:
    """MFU of a training step that took `step_time` seconds; torch.profiler counts a step of the same size, run here."""
    return calculate_precise_mfu(
        model, batch_size, seq_length, step_time, "profiler", device=device, dtype=dtype, peak=peak
    )


def calculate_precise_mfu(
    model: object,
    batch_size: int,
    seq_length: int,
    step_time: float,
    measurement_mode: str = "smart",
    *,
    device: str | None = None,
    dtype: object = None,
    peak: float | Mapping[str, float] | None = None,
) -> MeasuredMfu:
    """MFU of a step that took `step_time` seconds, under convention model: the analytic count times a measured factor.

    `estimate` runs nothing. `profiler` and `hybrid` run one step of random tokens on the model, forward and backward,
    and restore gradients and modes. `smart` measures a model once and keeps the factor. It uses the GPU's counters if
    it can, else a copy of the model that takes no memory. The peak is `peak`, else that of `device`, else that of the
    GPU in this machine.
    """
    if measurement_mode not in MODES:
        near = format_nearest(str(measurement_mode), MODES)
        raise FlopcalcError(
            f"measurement_mode {format_value(measurement_mode)} unknown.{near} Known: {', '.join(MODES)}"
        )
    rate: float | None = None
    name: str | None = device
    try:
        check_positive(step_time, "step_time")
        check_size(batch_size, "batch_size")
        check_size(seq_length, "seq_length")
        kind = parse_dtype(dtype) if dtype is not None else _find_dtype(model)
        name, rate, missing = find_peak(device or "auto", kind, peak)
        binding = _Binding(model, _find_known(name), kind if dtype is not None else None, _find_autocast())
        found = _measure(binding, batch_size, seq_length, measurement_mode, kind)
        formats = {kind: found.flops} if dtype is not None else _split(binding, batch_size, seq_length, found, kind)
        ideal = find_ideal_time(formats, device=device or "auto", dtype=dtype, peak=peak)
    except (FlopcalcError, NotMeasured) as error:
        return _warn(MeasuredMfu(math.nan, peak_flops_per_s=rate, device=name, note=str(error)))
    except Exception as error:  # a step that fails here says nothing of the caller's own: NaN, and why
        text = (str(error).splitlines() or [""])[0][:300]
        note = f"the step could not be measured: {type(error).__name__}: {text}"
        return _warn(MeasuredMfu(math.nan, peak_flops_per_s=rate, device=name, note=note))
    if rate is None:
        note = f"{missing} (here: device=…, peak=…)"
        return _warn(MeasuredMfu(math.nan, found.source, found.convention, found.flops, None, name, note))
    share = share_peak(ideal, "MFU", step_time)
    value = math.nan if share.value is None else share.value
    rate = share.peak_flops_per_s
    notes = "; ".join(each for each in (found.note, ideal.note) if each) or None
    made = MeasuredMfu(value, found.source, found.convention, found.flops, rate, name, notes)
    if value > 1:
        made.note = f"MFU is {value:.3f}, above 1: the peak, the step time or the batch is wrong"
        _warn(made)
    return made


def _warn(made: MeasuredMfu) -> MeasuredMfu:
    warnings.warn(f"flopcalc: {made.note}", RuntimeWarning, stacklevel=3)
    return made


def _find_dtype(model: object) -> str:
    if not hasattr(model, "parameters"):
        return "bf16"
    import torch

    if torch.is_autocast_enabled("cuda"):
        return parse_dtype(torch.get_autocast_dtype("cuda"))
    first = next((each for each in model.parameters() if each.is_floating_point()), None)
    if first is not None and first.dtype == torch.float32 and "tf32" in list_tensor_dtypes(None):
        return "tf32"
    return "fp32" if first is None else parse_dtype(first.dtype)


def _find_known(name: str | None) -> str | None:
    """A device whose kernels were measured; others are counted by the formulas alone."""
    found = None if name is None else find_detected(name)
    return None if found is None else found.id


# --- The four modes ---------------------------------------------------------------------------------------------------


class _Binding(NamedTuple):
    """A model, and what its products are computed in."""

    model: Any
    device: str | None  # whose kernels were measured
    compute: str | None  # as asked
    autocast: str | None

    def bind(self) -> Estimator:
        return bind_live(self.model, self.device, self.compute, self.autocast)


def _find_autocast() -> str | None:
    """What autocast computes in, where the caller has it on."""
    torch = sys.modules.get("torch")
    for place in ("cuda", "cpu"):
        if torch is not None and torch.is_autocast_enabled(place):
            name = parse_dtype(torch.get_autocast_dtype(place))
            return name if name in ("bf16", "fp16") else None
    return None


def _split(binding: _Binding, batch: int, seq: int, found: _MeasuredFlops, kind: str) -> dict[str, float]:
    """FLOPs by number format, in the shares of the analytic count; of one format without it."""
    try:
        estimator = binding.bind()
        estimate = estimator(batch, seq, decoder_seq_len=seq if estimator.has_decoder else None)
    except FlopcalcError:
        return {kind: found.flops}
    formats: dict[str, float] = {}
    for name, flops in estimate.by_dtype().items():
        name = kind if name == "fp32" and kind == "tf32" else name
        formats[name] = formats.get(name, 0) + flops.total
    if len(formats) == 1:
        return dict.fromkeys(formats, found.flops)
    return {name: flops * found.flops / estimate.total for name, flops in formats.items()}


def _measure(binding: _Binding, batch: int, seq: int, mode: str, dtype: str) -> _MeasuredFlops:
    counts: Counts | None = None
    model = binding.model
    try:
        counts = _count(binding, batch, seq)
    except FlopcalcError:
        if mode == "estimate" or not hasattr(model, "parameters"):
            raise
    if mode == "estimate":
        assert counts is not None
        assert counts.model is not None
        return _MeasuredFlops(counts.model, "estimate")
    if not hasattr(model, "parameters"):
        raise FlopcalcError(
            f"measurement_mode {mode!r} needs a live model, not {format_value(model)}: mode 'estimate' takes it"
        )
    if mode == "profiler":
        return _scale(_run_profiler(model, batch, seq), counts, "full", "profiler")
    if mode == "hybrid":
        return _measure_hybrid(model, batch, seq, counts, dtype)
    return _measure_smart(model, batch, seq, counts, dtype)


def _count(binding: _Binding, batch: int, seq: int) -> Counts:
    """The analytic counts of a plain training step."""
    estimator = binding.bind()
    estimate = estimator(batch, seq, decoder_seq_len=seq if estimator.has_decoder else None)
    load = estimate.terms[0][1]
    if estimator.origin == "trace":
        return Counts(estimate.total, sum(estimator.count(load, "full")), None)
    eager = sum(bind_eager(estimator).count(load, "hardware"))
    return Counts(estimate.total, eager, sum(estimator.count(load, "hardware")))


def _scale(
    measured: int, counts: Counts | None, convention: Convention, source: str, note: str | None = None
) -> _MeasuredFlops:
    """The model's FLOPs times measured ÷ analytic; without an analytic count, what was measured.

    What the GPU's counters see beyond the analytic count are blocks and padding, which the model does not need: noted.
    """
    expected = getattr(counts, convention) if counts is not None else None
    if counts is None or counts.model is None or not expected:
        if measured <= 0:
            raise FlopcalcError(f"{source}: nothing was counted")
        return _MeasuredFlops(measured, source, convention, note)
    value = measured / expected
    if not LOWEST <= value <= HIGHEST:
        raise FlopcalcError(
            f"{source} counted {measured} FLOPs where {expected} are expected ({convention}): outside {LOWEST} to "
            f"{HIGHEST} times that it is not believed"
        )
    if convention == "hardware":
        seen = f"the counters saw {value:.4f} times the analytic hardware FLOPs"
        return _MeasuredFlops(counts.model, source, "model", f"{note}; {seen}" if note else seen)
    return _MeasuredFlops(round(counts.model * value), source, "model", note)


def _measure_hybrid(model: object, batch: int, seq: int, counts: Counts | None, dtype: str) -> _MeasuredFlops:
    problems = []
    try:
        return _scale(_run_counters(model, batch, seq, dtype), counts, "hardware", "hybrid: cupti")
    except (NotMeasured, FlopcalcError) as error:
        problems.append(f"no hardware counters ({error})")
    try:
        note = problems[0]
        return _scale(_run_profiler(model, batch, seq), counts, "full", "hybrid: profiler", note)
    except (NotMeasured, FlopcalcError) as error:
        problems.append(f"no profiler ({error})")
    if counts is None or counts.model is None:
        raise FlopcalcError(f"nothing could count this model: {'; '.join(problems)}")
    return _MeasuredFlops(counts.model, "hybrid: estimate", note="; ".join(problems))


def _measure_smart(model: Any, batch: int, seq: int, counts: Counts | None, dtype: str) -> _MeasuredFlops:
    if counts is None or counts.model is None:  # no factor without an analytic count
        return _scale(*_measure_once(model, batch, seq, counts, dtype))
    kept = _smart.setdefault(model, {})
    state = (
        dtype,
        tuple(parameter.requires_grad for parameter in model.parameters()),
        tuple(getattr(each, "gradient_checkpointing", False) for each in model.modules()),
    )
    if state not in kept:
        try:
            found = _scale(*_measure_once(model, batch, seq, counts, dtype))
        except (NotMeasured, FlopcalcError) as error:
            return _MeasuredFlops(counts.model, "smart: estimate", note=str(error))
        kept[state] = (found.flops / counts.model, found.source, found.note)
    value, source, note = kept[state]
    return _MeasuredFlops(round(counts.model * value), source, note=note)


def _measure_once(
    model: object, batch: int, seq: int, counts: Counts | None, dtype: str
) -> tuple[int, Counts | None, Convention, str]:
    if counts is None or counts.hardware is not None:
        try:
            return _run_counters(model, batch, seq, dtype), counts, "hardware", "smart: cupti"
        except NotMeasured:  # the operator counter is as exact
            pass
    flops = Copy(model).count([_make_batch(model, batch, seq, "cpu")])
    return flops, counts, "full", "smart: operator counter"


# --- One real step ----------------------------------------------------------------------------------------------------


def _run_profiler(model: object, batch: int, seq: int) -> int:
    if is_profiled():
        raise NotMeasured("another torch.profiler is on: two cannot run at once")
    return _run_under(Profiler(model), model, batch, seq, warm_up=False)


def _run_counters(model: object, batch: int, seq: int, dtype: str) -> int:
    counters = Counters(model, dtype)
    if not counters.is_on_gpu():
        raise NotMeasured("the model is not on a CUDA device")
    try:
        flops = _run_under(counters, model, batch, seq, warm_up=True)
    finally:
        counters.close()
    if not flops:
        raise NotMeasured(f"the {dtype} tensor cores did nothing")
    return flops


def _run_under(instrument: Counters | Profiler, model: object, batch: int, seq: int, warm_up: bool) -> int:
    """One training step of random tokens; the random numbers that follow are those that would have followed anyway."""
    import torch

    from flopcalc.measure.counters.witnessed import ready_step, synchronize

    live = strip(model)
    device = find_torch_device(live)
    inputs = _make_batch(live, batch, seq, device)
    with (
        torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []),
        ready_step(live, inputs, "train") as step,
    ):
        if warm_up:
            step()
            synchronize(live)
        return _count_step(instrument, step)


def _count_step(instrument: Counters | Profiler, step: Callable[[], None]) -> int:
    instrument.start()
    try:
        step()
    except BaseException:
        instrument.cancel()
        raise
    return instrument.stop()


def _make_batch(model: object, batch: int, seq: int, device: Any) -> dict[str, Any]:
    from flopcalc.measure.hf.models import make_batch

    config = getattr(unwrap(model), "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise FlopcalcError(f"{type(unwrap(model)).__name__} is no Hugging Face model: a batch for it cannot be made")
    made = make_batch(config, {"batch": batch, "seq": seq})
    return {name: tensor.to(device) for name, tensor in made.items()}
