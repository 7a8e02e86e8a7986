"""Live training steps in; what an analytic count is multiplied by out: factor = measured ÷ analytic, and its source.

Four sources. `estimate` measures nothing. `profiler` counts some steps with torch.profiler. `smart` measures a step of
each workload class now and then: with the GPU's own counters where they can be read, else with the operator counter on
a copy that takes no memory. `hybrid` samples the GPU's counters, and reads NVML's gauge; the profiler replaces
them. All methods but wants() cost nothing unless a step is measured, and none leaves an instrument open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcalc.monitor.instruments import Copy, Counters, NotMeasured, Profiler, find_torch_device, is_profiled

if TYPE_CHECKING:
    from flopcalc.monitor.messages import Say
    from flopcalc.monitor.settings import Settings

# Measured ÷ analytic outside of these is a flaw of the measurement; tiny shapes do execute 1.4 times what they need.
LOWEST, HIGHEST = 0.5, 2.5
_MOST_SIZES = 4096  # of batches that are known
MOVED = 0.02  # a factor that moved by more is said
_MOST_KINDS = 16  # workload classes that are measured


class Counts(NamedTuple):
    """The analytic FLOPs of one whole optimizer step."""

    model: int | None
    full: int | None  # what an operator counter sees: every pair, recomputation included
    hardware: int | None
    own: int | None = None  # of `full`, the training passes of the model that is copied; None: all of it


class Factor(NamedTuple):
    """Measured ÷ analytic, and by what."""

    value: float
    source: str
    is_of_model: bool = True  # False: of what kernels execute, blocks and padding included; not of what the model needs


_ESTIMATE = Factor(1.0, "estimate")


# Steps that are not to be measured, from one number to below another, their workload class and factor. A plain tuple:
# one is taken apart in every step.
Calm = tuple[int, int, Hashable, Factor]


# --- Sources ----------------------------------------------------------------------------------------------------------


class FactorSource:
    """Where a run's factor comes from; this one measures nothing."""

    name = "estimate"
    measures = False  # whether wants() is to be asked

    def __init__(self, settings: Settings, model: object, say: Say) -> None:
        self.settings = settings
        self._model = model
        self._say = say
        self.settled: dict[Hashable, range] = {}  # workload class -> steps of which wants() would say no
        self.calm: dict[Hashable, Calm] = {}  # sizes of a batch -> the same, and what else is known of such a step
        self._factors: dict[Hashable, Factor] = {}
        self._absolute: dict[Hashable, int] = {}

    def unsettle(self) -> None:
        """When steps are due, or what was measured, has changed."""
        self.settled.clear()
        self.calm.clear()

    def keep_calm(self, sizes: Hashable, kind: Hashable) -> None:
        """Batches of these sizes are of this workload class, whose steps are settled."""
        if len(self.calm) >= _MOST_SIZES:
            self.calm.clear()
        steps = self.settled[kind]
        self.calm[sizes] = (steps.start, steps.stop, kind, self.factor(kind))

    def wants(self, step: int, kind: Hashable, frequency: int) -> bool:  # noqa: ARG002 - what the others need
        """Whether this step is to be measured; on the hot path."""
        return False

    def start(self) -> None:
        """A step that was wanted begins."""

    def stop(self, step: int, kind: Hashable, counts: Counts | None, batches: Sequence[Mapping[str, object]]) -> None:
        """It is over: the whole optimizer step, with its analytic counts and its micro-batches."""

    def cancel(self) -> None:
        """It raised: no instrument stays open, and nothing is kept."""

    def factor(self, kind: Hashable) -> Factor:  # noqa: ARG002
        """For steps of this workload class."""
        return _ESTIMATE

    def absolute(self, kind: Hashable) -> int | None:
        """FLOPs of a step of this workload class as last measured: used if there is no analytic count."""
        return self._absolute.get(kind)

    def gauge(self) -> dict[str, float]:
        """How busy the device was since the last call, by metric."""
        return {}

    def close(self) -> None:
        self.cancel()


class _MeasuringSource(FactorSource):
    """What the measuring sources share: when a step is due, and what is believed."""

    measures = True

    def __init__(self, settings: Settings, model: object, say: Say) -> None:
        super().__init__(settings, model, say)
        self._measured_at: dict[Hashable, int] = {}  # workload class -> step
        self._latest: Factor | None = None
        self._explain("not measured yet")
        self._is_off = False

    def factor(self, kind: Hashable) -> Factor:
        return self._factors.get(kind) or self._latest or self._estimated

    def _explain(self, why: str) -> None:
        """Why a factor is still the estimate's."""
        self.unsettle()
        self._why = why
        self._estimated = Factor(1.0, f"{self.name}: estimate ({why})")

    def _is_due(self, step: int, kind: Hashable, last: int | None, every: int) -> bool:
        """The first step, then the first one at or past each multiple."""
        if last is None:
            return True
        first = last // every * every
        if not first <= step < first + every:
            return True
        self.settled[kind] = range(first, first + every)
        return False

    def _turn_off(self, reason: str) -> None:
        """Nothing can measure here: the estimate it is, from now on."""
        self._is_off = True
        self._explain(reason)
        self._say(
            f"{self.name}: on the estimate from here on, which is exact for a model that a spec describes: {reason}",
            f"{self.name} off",
        )

    def _keep(
        self, step: int, kind: Hashable, measured: int, expected: int | None, by: str, is_of_model: bool = True
    ) -> bool:
        """Take a measurement in, or say why it is not believed."""
        if measured <= 0:
            self._refuse(f"{by} counted nothing at step {step}", f"{self.name} {by} zero")
            return False
        if not expected:
            self._absolute[kind] = measured
            self._explain("no analytic count to compare with")
            return True
        value = measured / expected
        if not LOWEST <= value <= HIGHEST:
            self._refuse(
                f"{by} counted {measured} FLOPs at step {step} where {expected} are expected, {value:.3f} times that: "
                f"outside {LOWEST} to {HIGHEST} it is not believed",
                f"{self.name} {by} range",
            )
            return False
        old = self._factors.get(kind)
        prefix = "" if by == self.name else f"{self.name}: "
        self._factors[kind] = self._latest = Factor(value, f"{prefix}{by} at step {step}", is_of_model)
        self._absolute[kind] = measured
        if old is not None and abs(value / old.value - 1) > MOVED:
            self._say(
                f"{self.name}: measured ÷ analytic moved from {old.value:.4f} ({old.source}) to {value:.4f} "
                f"({by} at step {step}): what runs has changed, or one of the two is wrong",
                f"{self.name} moved {step}",
            )
        return True

    def _fail(self, error: NotMeasured) -> None:
        if error.is_final:
            self._turn_off(str(error))
        else:
            self._refuse(str(error), f"{self.name}: {error}")

    def _refuse(self, reason: str, once: str) -> None:
        if self._latest is None:
            self._explain(reason)
        kept = "the estimate stands" if self._latest is None else f"the factor of before stands ({self._latest.source})"
        self._say(f"{self.name}: {reason}; {kept}", once)


class ProfilerSource(_MeasuringSource):
    """One step in N under torch.profiler; between them the last factor."""

    name = "profiler"

    def __init__(self, settings: Settings, model: object, say: Say) -> None:
        super().__init__(settings, model, say)
        self._profiler = Profiler(model)
        self._is_open = False

    def wants(self, step: int, kind: Hashable, frequency: int) -> bool:
        if self._is_off or not self._is_due(step, kind, self._measured_at.get(None), frequency):
            return False
        return not is_profiled()

    def start(self) -> None:
        try:
            self._profiler.start()
        except NotMeasured as error:
            self._fail(error)
        else:
            self._is_open = True

    def stop(
        self,
        step: int,
        kind: Hashable,
        counts: Counts | None,
        batches: Sequence[Mapping[str, object]],  # noqa: ARG002
    ) -> None:
        self._measured_at[None] = step
        self.unsettle()
        if not self._is_open:
            return
        self._is_open = False
        try:
            flops = self._profiler.stop()
        except NotMeasured as error:
            self._fail(error)
            return
        self._keep(step, kind, flops, counts.full if counts is not None else None, "profiler")

    def cancel(self) -> None:
        self._is_open = False
        self._profiler.cancel()


class _WithCounters(_MeasuringSource):
    """Sources that read the GPU's counters while they can."""

    def __init__(self, settings: Settings, model: object, say: Say) -> None:
        super().__init__(settings, model, say)
        self._counters: Counters | None = Counters(model, settings.dtype)
        self._are_proven = False  # the counters saw this model's products once
        self._warm: set[Hashable] = set()

    def _warms_up(self, kind: Hashable) -> bool:
        """The first step of its shapes may tune kernels, which runs products of their own: the next one is counted."""
        if kind in self._warm or self._counters is None:
            return False
        self._warm.add(kind)
        return self._counters.is_on_gpu()

    def _drop_counters(self, reason: str) -> None:
        counters, self._counters = self._counters, None
        if counters is not None:
            counters.close()
            self._lost_counters(reason)

    def _lost_counters(self, reason: str) -> None:
        raise NotImplementedError

    def _start_counters(self) -> bool:
        if self._counters is None:
            return False
        try:
            self._counters.start()
        except NotMeasured as error:
            self._drop_counters(str(error))
            return False
        return True

    def _stop_counters(self, step: int, kind: Hashable, expected: int | None) -> bool:
        """Whether there is an answer for this kind; where not, another dtype or another instrument is next."""
        counters = self._counters
        if counters is None:
            return False
        try:
            flops = counters.stop()
        except NotMeasured as error:
            self._drop_counters(str(error))
            return False
        is_short = not flops or (expected is not None and flops < LOWEST * expected)
        if is_short and not self._are_proven:
            if not counters.try_next():
                self._drop_counters(
                    f"the tensor counters saw {flops} FLOPs at step {step} where {expected} are expected"
                )
            return False
        self._are_proven = True
        self._keep(step, kind, flops, expected, counters.name, is_of_model=False)
        return True

    def cancel(self) -> None:
        if self._counters is not None:
            self._counters.cancel()

    def close(self) -> None:
        self.cancel()
        if self._counters is not None:
            self._counters.close()


class SmartSource(_WithCounters):
    """One measured step of each workload class, measured again every so often; the estimate times that between them."""

    name = "smart"

    def __init__(self, settings: Settings, model: object, say: Say) -> None:
        super().__init__(settings, model, say)
        self._copy = Copy(model)
        self._is_counting = False
        self._is_first = True
        if not settings.calibration_enabled:
            self._is_off = True
            self._explain("smart_mode.calibration_enabled is false")

    def factor(self, kind: Hashable) -> Factor:
        return self._factors.get(kind) or self._estimated  # another class's factor says nothing of this one

    def wants(self, step: int, kind: Hashable, frequency: int) -> bool:
        if self._is_off:
            return False
        last = self._measured_at.get(kind)
        if last is not None:
            every = self.settings.recalibration_frequency or frequency
            return self._is_due(step, kind, last, every) and not is_profiled()
        is_first, self._is_first = self._is_first, False
        if is_first and not self.settings.initial_profiling:
            self._measured_at[kind] = step  # as if: the next is due at a multiple
            self.unsettle()
            return False
        if len(self._measured_at) >= _MOST_KINDS:
            self._say(
                f"smart: more than {_MOST_KINDS} workload classes: the others are not measured, their factor is 1",
                "smart kinds",
            )
            return False
        return not self._warms_up(kind) and not is_profiled()

    def start(self) -> None:
        self._is_counting = self._start_counters()
        if not self._is_counting:
            self._copy.prepare()  # before the step

    def stop(self, step: int, kind: Hashable, counts: Counts | None, batches: Sequence[Mapping[str, object]]) -> None:
        is_counting, self._is_counting = self._is_counting, False
        self._measured_at[kind] = step
        self.unsettle()
        expected = counts.hardware if counts is not None else None
        if is_counting and counts is not None and expected is None:
            self._drop_counters("this model's hardware FLOPs have no analytic count to compare with")
            is_counting = False
        if is_counting:
            if self._stop_counters(step, kind, expected):
                return
            if self._counters is not None:  # another dtype's counter is tried at the next step
                del self._measured_at[kind]
                return
        try:
            flops = self._copy.count(batches)
        except NotMeasured as error:
            self._fail(error)
            return
        expected = None
        if counts is not None:
            expected = counts.full if counts.own is None else counts.own
        self._keep(step, kind, flops, expected, self._copy.name)

    def _lost_counters(self, reason: str) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():  # without a GPU nobody expects its counters
            self._say(f"smart: no hardware counters ({reason}): on the operator counter", "smart counters")

    def cancel(self) -> None:
        self._is_counting = False
        super().cancel()


class HybridSource(_WithCounters):
    """Hardware counters on sampled steps and NVML's gauge; else the profiler, else the estimate."""

    name = "hybrid"

    def __init__(self, settings: Settings, model: object, say: Say) -> None:
        super().__init__(settings, model, say)
        self._profiler: Profiler | None = Profiler(model) if settings.fallback_to_profiler else None
        self._open: str = ""
        self._gauge: Any = None
        self._is_gauge_tried = False
        if not settings.hardware_counters_enabled:
            self._drop_counters("hybrid_mode.hardware_counters_enabled is false")

    def wants(self, step: int, kind: Hashable, frequency: int) -> bool:
        if self._is_off or not self._is_due(step, kind, self._measured_at.get(None), frequency):
            return False
        return not self._warms_up(kind) and not is_profiled()

    def start(self) -> None:
        self._open = ""
        if self._start_counters():
            self._open = "counters"
        elif self._profiler is not None:
            try:
                self._profiler.start()
            except NotMeasured as error:
                self._drop_profiler(str(error))
            else:
                self._open = "profiler"

    def stop(
        self,
        step: int,
        kind: Hashable,
        counts: Counts | None,
        batches: Sequence[Mapping[str, object]],  # noqa: ARG002
    ) -> None:
        is_open, self._open = self._open, ""
        if is_open == "counters":
            expected = counts.hardware if counts is not None else None
            if counts is not None and expected is None:
                self._drop_counters("this model's hardware FLOPs have no analytic count to compare with")
            elif self._stop_counters(step, kind, expected):
                self._measured_at[None] = step
                self.unsettle()
            return  # where not, what is next is tried at the next step
        self._measured_at[None] = step
        self.unsettle()
        if is_open == "profiler" and self._profiler is not None:
            try:
                flops = self._profiler.stop()
            except NotMeasured as error:
                if error.is_final:
                    self._drop_profiler(str(error))
                else:
                    self._refuse(str(error), f"hybrid: {error}")
                return
            self._keep(step, kind, flops, counts.full if counts is not None else None, "profiler")

    def _lost_counters(self, reason: str) -> None:
        reason = f"no hardware counters ({reason})"
        if self._profiler is None:
            self._turn_off(f"{reason}, and hybrid_mode.fallback_to_profiler is false")
            return
        self._explain(reason)
        self._say(f"hybrid: {reason}: on the profiler", "hybrid counters")

    def _drop_profiler(self, reason: str) -> None:
        self._profiler = None
        self._turn_off(f"{self._why}; no profiler ({reason})")

    def gauge(self) -> dict[str, float]:
        if not self._is_gauge_tried:
            self._is_gauge_tried = True
            self._gauge = self._open_gauge()
        if self._gauge is None:
            return {}
        activity = self._gauge.read()
        if activity is None:
            return {}
        if activity.reason is not None:
            self._say(f"hybrid: no gauge of the device: {activity.reason}", "hybrid gauge")
        shares = {"tensor": activity.tensor, "sm": activity.sm, "dram": activity.dram}
        return {f"perf/{part}_active": share for part, share in shares.items() if share is not None}

    def _open_gauge(self) -> Any:
        from flopcalc.measure.counters import gpm

        torch = sys.modules.get("torch")
        device = find_torch_device(self._model)
        if torch is None or not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
            return None  # no GPU at work: nothing that a gauge could show
        try:
            index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
            # NVML numbers GPUs without regard to CUDA_VISIBLE_DEVICES; the uuid is the same on both sides.
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            return gpm.Gauge(index, None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}")
        except Exception as error:  # GaugeUnavailable, or whatever a driver does
            self._say(f"hybrid: no gauge of the device: {error}", "hybrid gauge")
            return None

    def cancel(self) -> None:
        self._open = ""
        super().cancel()
        if self._profiler is not None:
            self._profiler.cancel()

    def close(self) -> None:
        super().close()
        gauge, self._gauge = self._gauge, None
        if gauge is not None:
            with suppress(Exception):
                gauge.close()


_SOURCES: dict[str, Callable[[Settings, Any, Say], FactorSource]] = {
    "estimate": FactorSource,
    "profiler": ProfilerSource,
    "smart": SmartSource,
    "hybrid": HybridSource,
}


def make_source(settings: Settings, model: object, say: Say) -> FactorSource:
    """The source of the settings' mode; `model` is the live one, wrapped as it may be."""
    return _SOURCES[settings.mode](settings, model, say)
