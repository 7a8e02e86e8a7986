"""Steps go in, one by one; rates, MFU, goodput and records come out. No framework here, and no clock of its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from flopcalc.monitor.keys import PASS_PREFIX
from flopcalc.monitor.ranks import MeanStep, Sums
from flopcalc.monitor.settings import Settings

CAUSES = ("start", "data", "rollout", "eval", "checkpoint", "stall", "measure", "redone", "other")
Formats = Mapping[str, float]  # number format -> FLOPs
UNKNOWN: Formats = {"": math.nan}
_RECENT = 64  # steps whose median a stall is compared with
_MOST_DATASETS = 100  # of more of them a record holds those that changed since the last one


class DevicePeak(NamedTuple):
    """What a share is taken of."""

    flops_per_s: float = math.nan
    device: str | None = None
    dtype: str | None = None
    bf16_flops_per_s: float = math.nan  # of the same device


class Peaks:
    """The dense peak of every number format on one device; each is found when it is first asked for."""

    def __init__(self, find: Callable[[str], DevicePeak] | None = None) -> None:
        self._find = find
        self._known: dict[str, DevicePeak] = {}

    def find(self, name: str) -> DevicePeak:
        if name not in self._known:
            self._known[name] = self._find(name) if self._find is not None else DevicePeak()
        return self._known[name]

    def combine(self, flops: Formats) -> DevicePeak:
        """One peak in place of all: the rate at which FLOPs, each at the peak of its format, take the least time."""
        names = sorted((name for name in flops if name), key=lambda name: -flops[name])
        peaks = [self.find(name) for name in names]
        if len(peaks) == 1:
            return peaks[0]
        if not peaks:
            return next(iter(self._known.values()), DevicePeak())
        seconds = sum(flops[name] / peak.flops_per_s for name, peak in zip(names, peaks, strict=True))
        kinds = dict.fromkeys(peak.dtype or name for name, peak in zip(names, peaks, strict=True))
        rate = _divide(sum(flops[name] for name in names), seconds)
        return DevicePeak(rate, peaks[0].device, "+".join(kinds), peaks[0].bf16_flops_per_s)


class Pass(NamedTuple):
    """Forward passes of one kind in a step, other than those that train."""

    name: str
    model: Formats | None  # FLOPs by number format; None: not known
    hardware: Formats | None
    seconds: float
    is_in_step: bool = True  # its time is a part of the step's


class MeteredStep(NamedTuple):
    """One optimizer step on this rank."""

    number: int
    wall_s: float  # from the end of the step before, without what was lost in between
    data_s: float = 0.0  # of it, before the first forward pass
    device_s: float = math.nan  # from its first kernel to its last, on the device's own clock
    model: Formats = UNKNOWN  # FLOPs of its training passes, by number format; ints where they are known
    hardware: Formats = UNKNOWN
    tokens: float = math.nan
    padded_tokens: float = math.nan
    samples: float = math.nan
    images: float = math.nan
    measured: bool = False  # under a profiler or counters: its time is not a step's
    factor: float = 1.0  # measured ÷ analytic, of what is executed
    model_factor: float = 1.0  # the same of what the model needs: 1 where kernels' own blocks and padding were measured
    source: str = "estimate"
    datasets: tuple[tuple[str, int, float], ...] = ()  # name, samples, tokens
    passes: tuple[Pass, ...] = ()  # that do not train
    owes: str = ""  # a pass whose FLOPs nobody gave

    @property
    def model_flops(self) -> float:
        return sum(self.model.values())

    @property
    def hardware_flops(self) -> float:
        return sum(self.hardware.values())

    @property
    def other_s(self) -> float:
        """The time inside passes that do not train."""
        return sum(each.seconds for each in self.passes if each.is_in_step)

    @property
    def rollout_s(self) -> float:
        return sum(each.seconds for each in self.passes if each.is_in_step and each.name == "rollout")


class PassSums:
    """Sums over passes of one kind."""

    def __init__(self) -> None:
        self.model: dict[str, float] = {}
        self.hardware: dict[str, float] = {}
        self.seconds = 0.0

    def add(self, model: Formats, hardware: Formats, seconds: float) -> None:
        _add_formats(self.model, model)
        _add_formats(self.hardware, hardware)
        self.seconds += seconds


class Window:
    """Sums over steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.wall_s = self.data_s = self.device_s = self.other_s = 0.0
        self.device_steps = 0  # whose device time was taken
        self.device_model: dict[str, float] = {}  # FLOPs of those
        self.model: dict[str, float] = {}
        self.hardware: dict[str, float] = {}
        self.others: dict[str, float] = {}  # FLOPs of passes that do not train, in the time of the steps
        self.passes: dict[str, PassSums] = {}
        self.tokens: float = 0
        self.padded_tokens: float = 0
        self.samples: float = 0
        self.images: float = 0

    def add(self, step: MeteredStep) -> None:
        self.steps += 1
        self.wall_s += step.wall_s
        self.data_s += step.data_s
        model = _scale(step.model, step.model_factor)
        if math.isfinite(step.device_s):
            self.device_steps += 1
            self.device_s += step.device_s
            _add_formats(self.device_model, model)
        _add_formats(self.model, model)
        hardware = _scale(step.hardware, step.factor)
        _add_formats(self.hardware, hardware)
        self.tokens += step.tokens
        self.padded_tokens += step.padded_tokens
        self.samples += step.samples
        self.images += step.images
        if step.owes:
            _add_formats(self.others, UNKNOWN)
        if not step.passes:
            return
        self.other_s += step.other_s
        for each in step.passes:
            flops = UNKNOWN if each.model is None else each.model
            self.passes.setdefault(each.name, PassSums()).add(flops, each.hardware or UNKNOWN, each.seconds)
            if each.is_in_step:
                _add_formats(self.others, flops)

    @property
    def device_step_s(self) -> float:
        """The mean device time of a step."""
        return self.device_s / self.device_steps if self.device_steps else math.nan

    def find_peaks(self, peaks: Peaks) -> tuple[DevicePeak, DevicePeak, DevicePeak]:
        """Of the FLOPs that the model needs, of those that hardware executes, and of all passes."""
        model = peaks.combine(self.model)
        together = dict(self.model)
        _add_formats(together, self.others)
        return model, peaks.combine(self.hardware), peaks.combine(together)

    def to_sums(self, peaks: Peaks) -> Sums:
        model, hardware, step = self.find_peaks(peaks)
        return Sums(
            self.steps,
            sum(self.model.values()),
            sum(self.hardware.values()),
            self.tokens,
            self.padded_tokens,
            self.samples,
            self.images,
            self.wall_s,
            self.steps * self.device_step_s,
            model.flops_per_s,
            self.other_s,
            sum(self.others.values()),
            hardware.flops_per_s,
            step.flops_per_s,
        )

    def mean(self, peaks: Peaks, scope: str) -> MeanStep:
        """The mean step of this rank alone."""
        n = self.steps or math.nan
        model, hardware, step = self.find_peaks(peaks)
        return MeanStep(
            self.steps,
            sum(self.model.values()) / n,
            sum(self.hardware.values()) / n,
            self.tokens / n,
            self.padded_tokens / n,
            self.samples / n,
            self.images / n,
            self.wall_s / n,
            self.device_step_s,
            model.flops_per_s,
            None,
            (),
            scope,
            (),
            1,
            self.other_s / n,
            sum(self.others.values()) / n,
            hardware.flops_per_s,
            step.flops_per_s,
        )


def _scale(flops: Formats, factor: float) -> Formats:
    # An exact count stays one.
    return flops if factor == 1.0 else {name: each * factor for name, each in flops.items()}


def _add_formats(sums: dict[str, float], flops: Formats) -> None:
    for name, each in flops.items():
        sums[name] = sums.get(name, 0) + each


def _divide(a: float, b: float) -> float:
    """A rate; not a number where it cannot be had, never a silent 0."""
    return a / b if b > 0 and math.isfinite(b) else math.nan


class Goodput:
    """Where the time went: productive seconds, and those lost by cause."""

    def __init__(self) -> None:
        self.productive_s = 0.0
        self.lost_s: dict[str, float] = dict.fromkeys(CAUSES, 0.0)

    def lose(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self.lost_s[cause if cause in CAUSES else "other"] += seconds

    def describe(self, elapsed_s: float) -> dict[str, float]:
        """Share of the elapsed time, and seconds by cause; what no event explains is other."""
        known = self.productive_s + sum(self.lost_s.values())
        rest = max(0.0, elapsed_s - known)
        found = {
            "share": _divide(self.productive_s, elapsed_s),
            "elapsed_s": elapsed_s,
            "productive_s": self.productive_s,
        }
        for cause in CAUSES:
            found[f"lost_{cause}_s"] = self.lost_s[cause] + (rest if cause == "other" else 0.0)
        return found


class Meter:
    """Adds steps up between reports."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.peaks = Peaks()
        self.peak = DevicePeak()  # of the format of most products, if it is known before they are counted
        self.convention = "model"
        self.goodput = Goodput()
        self.redone_until = 0  # steps up to this one were done before by an earlier run
        self.steps = 0
        self._first_left = settings.skip_first
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._measured_in_a_row = 0
        self._usual_s = math.inf  # of the recent ones the median
        self._window = Window()
        self._detail = Window()
        self._interval = Window()
        self._due: deque[tuple[int, Sums]] = deque(maxlen=256)
        self._last: MeteredStep | None = None
        self._last_detail = 0
        self._datasets: dict[str, list[float]] = {}  # samples and tokens
        self._dataset_tokens: float = 0  # of all of them
        self._changed: dict[str, None] = {}  # datasets that no record holds as they are
        self._dataset_values: dict[str, dict[str, float]] = {}
        self._last_datasets = 0
        self.scope = "this process"
        self.has_others = False  # ranks to send sums to
        self.has_stages = False  # of a pipeline, whose first one counts for all
        self.combined: MeanStep | None = None  # of all ranks, once they have answered
        self.is_unreported = False  # no record holds them yet
        self.problems: dict[str, str] = {}  # for the monitor to say; key: what it is said once for

    def add(self, step: MeteredStep) -> None:
        """One more step. The first ones, measured ones and those without a time are in no rate."""
        self._add(step)
        self.steps += 1
        # By steps seen, so that all ranks cut at the same one.
        if self.has_others and self.steps % self.settings.detail_every == 0:
            self._close_interval()

    def _close_interval(self) -> None:
        window, self._interval = self._interval, Window()
        number = -(-self.steps // self.settings.detail_every)
        self._due.append((number, window.to_sums(self.peaks)))

    def _add(self, step: MeteredStep) -> None:
        self._last = step
        for name, samples, tokens in step.datasets:
            sums = self._datasets.setdefault(name, [0, 0])
            sums[0] += samples
            sums[1] += tokens
            self._dataset_tokens += tokens
            self._changed[name] = None
        if not step.wall_s > 0:
            self.problems["step time"] = (
                f"step {step.number} took {step.wall_s:g} s: the clock stood still or ran backwards; it is in no rate"
            )
            return
        if self._first_left > 0:
            self._first_left -= 1
            self.goodput.lose("start", step.wall_s)
            return
        self._measured_in_a_row = self._measured_in_a_row + 1 if step.measured else 0
        if self._measured_in_a_row == _RECENT:
            self.problems["measured"] = (
                f"{_RECENT} steps in a row were measured, and a measured step has no time of its own, so MFU is not "
                "known: measure less often (monitoring.flops_profile_freq, smart_mode.recalibration_frequency)"
            )
        if step.measured:
            usual = min(median(self._recent), step.wall_s) if self._recent else step.wall_s
            self.goodput.lose("measure", step.wall_s - usual)
            self.goodput.productive_s += usual
            return
        self._settle(step)
        self._window.add(step)
        self._detail.add(step)
        if self.has_others:
            # Rank 0's factor scales the sum of all ranks.
            self._interval.add(step._replace(factor=1.0, model_factor=1.0))

    def _settle(self, step: MeteredStep) -> None:
        """Goodput: data, rollouts and stalls are lost time, and so is work that an earlier run had done."""
        rollout_s = min(step.rollout_s, step.wall_s - step.data_s)
        work = step.wall_s - step.data_s - rollout_s
        self.goodput.lose("rollout", rollout_s)
        if step.number <= self.redone_until:
            self.goodput.lose("redone", work)
            self.goodput.lose("data", step.data_s)
            return
        usual = self._usual_s
        self._recent.append(work)
        if len(self._recent) < _RECENT or self.steps % 8 == 0:  # a median costs as much as all the rest
            self._usual_s = median(self._recent) if len(self._recent) >= 8 else math.inf
        stalled = work - usual if work > self.settings.stall_factor * usual else 0.0
        self.goodput.lose("stall", stalled)
        self.goodput.lose("data", step.data_s)
        self.goodput.productive_s += work - stalled

    def add_datasets(self, values: Mapping[str, Mapping[str, float]]) -> None:
        for name, found in values.items():
            self._dataset_values.setdefault(str(name), {}).update(found)
            self._changed[str(name)] = None

    def take_intervals(self, is_end: bool = False) -> list[tuple[int, Sums]]:
        """Numbered sums for the other ranks, of every detail_every steps; at the end also of the rest."""
        if is_end and self._interval.steps:
            self._close_interval()
        due = list(self._due)
        self._due.clear()
        return due

    def take_combined(self, found: MeanStep) -> None:
        """What all ranks did in one interval, scaled by this rank's measured factor."""
        self.is_unreported = True
        last = self._last
        if last is not None:
            found = found._replace(
                model_flops=_scale_number(found.model_flops, last.model_factor),
                hardware_flops=_scale_number(found.hardware_flops, last.factor),
            )
        self.combined = found

    def report(
        self, values: Mapping[str, object], elapsed_s: float, gauge: Mapping[str, float] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A record, and details that are not due: all values that are compared are of the same steps.

        A record holds rates since the last report, the values given, and what is due of details and datasets.
        """
        window, self._window = self._window, Window()
        self.is_unreported = False
        # The mean step: of all ranks where they have answered, else of this one.
        found = self.combined if self.combined is not None else window.mean(self.peaks, self.scope)
        peak = window.find_peaks(self.peaks)[0]
        record = {**values, **_list_rates(found), **self._context(found, peak), **self._split_passes(window)}
        record["perf/mfu_of_bf16_peak"] = _divide(
            found.model_flops, found.train_s * peak.bf16_flops_per_s * found.ranks
        )
        if self.has_others:
            own = window.mean(self.peaks, self.scope)
            # Where a pipeline's stages do not know their parts, the first counts the FLOPs of all, the others none.
            flops = math.nan if self.has_stages else own.model_flops
            record["perf/rank_mfu"] = _divide(flops, own.train_s * own.peak_flops_per_s)
            record["perf/rank_step_time"] = own.wall_s
        details = self._details(window, found, elapsed_s) | dict(gauge or {})
        if self.is_detail_due():
            self._last_detail = self.steps
            self._detail = Window()
            record |= details
            details = {}
        if self.steps - self._last_datasets >= self.settings.dataset_metrics_every:
            self._last_datasets = self.steps
            record |= self._describe_datasets()
        share = record["perf/mfu"]
        if share > 1:
            self.problems["above 1"] = (
                f"MFU is {share:.3f}, above 1: the peak ({found.peak_flops_per_s:g} FLOP/s of {peak.device}, "
                f"{peak.dtype}), the step time or the count is wrong"
            )
        return record, details

    @property
    def last_number(self) -> int:
        return self._last.number if self._last is not None else 0

    def is_detail_due(self) -> bool:
        return self.steps - self._last_detail >= self.settings.detail_every

    def _context(self, found: MeanStep, peak: DevicePeak) -> dict[str, Any]:
        last = self._last
        if peak.dtype is None:
            peak = self.peak
        return {
            "perf/source": last.source if last is not None else "none",
            "perf/convention": self.convention,
            "perf/peak_flops_per_s": peak.flops_per_s,
            "perf/device": peak.device,
            "perf/dtype": peak.dtype,
            "perf/scope": found.scope,
            "perf/steps": found.steps,
        }

    def _split_passes(self, window: Window) -> dict[str, float]:
        """Means of a step on this rank, by pass, where a step is more than training.

        Without a step that has a time (one that was measured has none) the FLOPs of the last step alone.
        """
        is_timed = window.steps > 0
        if not is_timed and self._last is not None:
            window = Window()
            window.add(self._last)
        if not window.passes:
            return {}
        train = PassSums()
        train.add(window.model, window.hardware, window.wall_s - window.other_s)
        found: dict[str, float] = {}
        for name, sums in {"train": train, **window.passes}.items():
            flops, executed = sum(sums.model.values()), sum(sums.hardware.values())
            rate = self.peaks.combine(sums.model).flops_per_s
            many = window.steps
            found[f"{PASS_PREFIX}{name}/flops"] = flops if many == 1 else flops / many
            found[f"{PASS_PREFIX}{name}/hardware_flops"] = executed if many == 1 else executed / many
            if is_timed:
                found[f"{PASS_PREFIX}{name}/seconds"] = sums.seconds / many
                found[f"{PASS_PREFIX}{name}/mfu"] = _divide(flops, sums.seconds * rate)
        return found

    def _details(self, window: Window, found: MeanStep, elapsed_s: float) -> dict[str, Any]:
        last, detail = self._last, self._detail
        # Few steps have device times: of one rank all of them since the last details.
        device_mfu = _divide(found.model_flops, found.device_s * found.peak_flops_per_s)
        device_s = found.device_s
        if self.combined is None:
            rate = self.peaks.combine(detail.device_model).flops_per_s
            device_mfu = _divide(sum(detail.device_model.values()), detail.device_s * rate)
            device_s = detail.device_step_s
        record: dict[str, object] = {
            "perf/hfu": _divide(found.hardware_flops, found.train_s * found.hardware_peak),
            "perf/device_mfu": device_mfu,
            "perf/device_step_time": device_s,
            "perf/tflops_per_gpu": _divide(found.model_flops, found.train_s * found.ranks) / 1e12,
            "perf/padded_tokens_per_second": _divide(found.padded_tokens, found.wall_s),
            "perf/images_per_second": _divide(found.images, found.wall_s),
            "perf/data_time": _divide(window.data_s, window.steps),
            "perf/model_flops": last.model_flops if last is not None else math.nan,
            "perf/hardware_flops": last.hardware_flops if last is not None else math.nan,
            "perf/factor": last.factor if last is not None else math.nan,
        }
        if self.combined is not None:
            record["perf/slowest_rank_step_time"] = found.wall_s
            record["perf/stragglers"] = list(found.stragglers)
        goodput = self.goodput.describe(elapsed_s)
        record["goodput/share"] = goodput["share"]
        record |= {f"goodput/{key}": value for key, value in goodput.items() if key.startswith("lost_")}
        return record

    def _describe_datasets(self) -> dict[str, float]:
        names, self._changed = self._changed, {}
        if len(self._datasets) + len(self._dataset_values) <= _MOST_DATASETS:
            names = dict.fromkeys((*self._datasets, *self._dataset_values))
        found: dict[str, float] = {}
        for name in names:
            if name in self._datasets:
                samples, tokens = self._datasets[name]
                found[f"dataset/{name}/samples"] = samples
                found[f"dataset/{name}/tokens"] = tokens
                found[f"dataset/{name}/share"] = _divide(tokens, self._dataset_tokens)
            for key, value in self._dataset_values.get(name, {}).items():
                found[f"dataset/{name}/{key}"] = value
        return found


def _scale_number(flops: float, factor: float) -> float:
    return flops if factor == 1.0 else flops * factor


def _list_rates(found: MeanStep) -> dict[str, Any]:
    share = _divide(found.model_flops, found.train_s * found.peak_flops_per_s)
    together = found.model_flops + found.other_flops
    return {
        "perf/mfu": share,
        "perf/mfu_percent": 100 * share,
        "perf/mfu_step": _divide(together, found.wall_s * found.step_peak),
        "perf/step_time": found.wall_s,
        "perf/steps_per_second": _divide(1, found.wall_s),
        "perf/tokens_per_second": _divide(found.tokens, found.wall_s),
        "perf/samples_per_second": _divide(found.samples, found.wall_s),
    }


def split_by_dataset(dataset: str | Sequence[str], lengths: Sequence[int]) -> tuple[tuple[str, int, float], ...]:
    """(name, samples, tokens) of sequences: of one name, or of a name for each."""
    if isinstance(dataset, str):
        return ((dataset, len(lengths), sum(lengths)),)
    found: dict[str, tuple[int, float]] = {}
    for name, length in zip(dataset, lengths, strict=True):
        samples, tokens = found.get(str(name), (0, 0))
        found[str(name)] = (samples + 1, tokens + length)
    return tuple((name, samples, tokens) for name, (samples, tokens) in found.items())
