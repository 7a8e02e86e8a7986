"""Steps go in, one by one; rates, MFU, goodput and records come out. No framework here, and no clock of its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from flopcalc.monitor.ranks import Combined, Sums
from flopcalc.monitor.settings import Settings

CAUSES = ("start", "data", "eval", "checkpoint", "stall", "measure", "redone", "other")
_RECENT = 64  # steps whose median a stall is compared with
_MOST_DATASETS = 100  # of more of them a record holds those that changed since the last one


class Peak(NamedTuple):
    """What a share is taken of."""

    flops_per_s: float = math.nan
    device: str | None = None
    dtype: str | None = None


class Step(NamedTuple):
    """One optimizer step on this rank."""

    number: int
    wall_s: float  # from the end of the step before, without what was lost in between
    data_s: float = 0.0  # of it, before the first forward pass
    device_s: float = math.nan  # from its first kernel to its last, on the device's own clock
    model_flops: float = math.nan  # an int where it is known
    hardware_flops: float = math.nan
    tokens: float = math.nan
    padded_tokens: float = math.nan
    samples: float = math.nan
    images: float = math.nan
    measured: bool = False  # under a profiler or counters: its time is not a step's
    factor: float = 1.0  # measured ÷ analytic, of what is executed
    model_factor: float = 1.0  # the same of what the model needs: 1 where kernels' own blocks and padding were measured
    source: str = "estimate"
    datasets: tuple[tuple[str, int, float], ...] = ()  # name, samples, tokens


class Window:
    """Sums over steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.wall_s = self.data_s = self.device_s = 0.0
        self.device_steps = 0  # whose device time was taken
        self.device_flops: float = 0  # of those
        self.model_flops: float = 0
        self.hardware_flops: float = 0
        self.tokens: float = 0
        self.padded_tokens: float = 0
        self.samples: float = 0
        self.images: float = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.wall_s += step.wall_s
        self.data_s += step.data_s
        if math.isfinite(step.device_s):
            self.device_steps += 1
            self.device_s += step.device_s
            self.device_flops += _scale(step.model_flops, step.model_factor)
        self.model_flops += _scale(step.model_flops, step.model_factor)
        self.hardware_flops += _scale(step.hardware_flops, step.factor)
        self.tokens += step.tokens
        self.padded_tokens += step.padded_tokens
        self.samples += step.samples
        self.images += step.images

    @property
    def device_step_s(self) -> float:
        """The mean device time of a step."""
        return self.device_s / self.device_steps if self.device_steps else math.nan

    def to_sums(self, peak_flops_per_s: float) -> Sums:
        return Sums(
            self.steps, self.model_flops, self.hardware_flops, self.tokens, self.padded_tokens, self.samples,
            self.images, self.wall_s, self.steps * self.device_step_s, peak_flops_per_s,
        )  # fmt: skip

    def mean(self, peak_flops_per_s: float, scope: str) -> Combined:
        """The mean step of this rank alone."""
        n = self.steps or math.nan
        return Combined(
            self.steps, self.model_flops / n, self.hardware_flops / n, self.tokens / n, self.padded_tokens / n,
            self.samples / n, self.images / n, self.wall_s / n, self.device_step_s, peak_flops_per_s, None, (),
            scope, (),
        )  # fmt: skip


def _scale(flops: float, factor: float) -> float:
    return flops if factor == 1.0 else flops * factor  # an exact count stays one


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
        self.peak = Peak()
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
        self._last: Step | None = None
        self._last_detail = 0
        self._datasets: dict[str, list[float]] = {}  # samples and tokens
        self._dataset_tokens: float = 0  # of all of them
        self._changed: dict[str, None] = {}  # datasets that no record holds as they are
        self._dataset_values: dict[str, dict[str, float]] = {}
        self._last_datasets = 0
        self.scope = "this process"
        self.has_others = False  # ranks to send sums to
        self.combined: Combined | None = None  # of all ranks, once they have answered
        self.is_unreported = False  # no record holds them yet
        self.problems: dict[str, str] = {}  # for the monitor to say; key: what it is said once for

    def add(self, step: Step) -> None:
        """One more step. The first ones, measured ones and those without a time are in no rate."""
        self._add(step)
        self.steps += 1
        # By steps seen, so that all ranks cut at the same one.
        if self.has_others and self.steps % self.settings.detail_every == 0:
            self._close_interval()

    def _close_interval(self) -> None:
        window, self._interval = self._interval, Window()
        number = -(-self.steps // self.settings.detail_every)
        self._due.append((number, window.to_sums(self.peak.flops_per_s)))

    def _add(self, step: Step) -> None:
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

    def _settle(self, step: Step) -> None:
        """Goodput: data and stalls are lost time, and so is work that an earlier run had done."""
        work = step.wall_s - step.data_s
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

    def lose(self, cause: str, seconds: float) -> None:
        self.goodput.lose(cause, seconds)

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

    def take_combined(self, found: Combined) -> None:
        """What all ranks did in one interval, scaled by this rank's measured factor."""
        self.is_unreported = True
        last = self._last
        if last is not None:
            found = found._replace(
                model_flops=_scale(found.model_flops, last.model_factor),
                hardware_flops=_scale(found.hardware_flops, last.factor),
            )
        self.combined = found

    def report(
        self, values: Mapping[str, Any], elapsed_s: float, gauge: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """A record: rates since the last report, the values given, and what is due of details and datasets."""
        window, self._window = self._window, Window()
        self.is_unreported = False
        found = self._mean(window)
        record = {**values, **_list_rates(found), **self._context(found)}
        if self.is_detail_due():
            self._last_detail = self.steps
            detail, self._detail = self._detail, Window()
            record |= self._details(detail, elapsed_s, gauge or {})
        if self.steps - self._last_datasets >= self.settings.dataset_metrics_every:
            self._last_datasets = self.steps
            record |= self._describe_datasets()
        share = record["perf/mfu"]
        if share > 1:
            self.problems["above 1"] = (
                f"MFU is {share:.3f}, above 1: the peak ({self.peak.flops_per_s:g} FLOP/s of {self.peak.device}, "
                f"{self.peak.dtype}), the step time or the count is wrong"
            )
        return record

    @property
    def last_number(self) -> int:
        return self._last.number if self._last is not None else 0

    def is_detail_due(self) -> bool:
        return self.steps - self._last_detail >= self.settings.detail_every

    def _mean(self, window: Window) -> Combined:
        """The mean step: of all ranks where they have answered, else of this one."""
        return self.combined if self.combined is not None else window.mean(self.peak.flops_per_s, self.scope)

    def _context(self, found: Combined) -> dict[str, Any]:
        last = self._last
        return {
            "perf/source": last.source if last is not None else "none",
            "perf/convention": self.convention,
            "perf/peak_flops_per_s": self.peak.flops_per_s,
            "perf/device": self.peak.device,
            "perf/dtype": self.peak.dtype,
            "perf/scope": found.scope,
            "perf/steps": found.steps,
        }

    def _details(self, window: Window, elapsed_s: float, gauge: Mapping[str, float]) -> dict[str, Any]:
        last, found = self._last, self._mean(window)
        # Of one rank exactly of the steps whose device time was taken.
        device_mfu = _divide(found.model_flops, found.device_s * found.peak_flops_per_s)
        if self.combined is None:
            device_mfu = _divide(window.device_flops, window.device_s * self.peak.flops_per_s)
        record: dict[str, Any] = {
            "perf/hfu": _divide(found.hardware_flops, found.wall_s * found.peak_flops_per_s),
            "perf/device_mfu": device_mfu,
            "perf/device_step_time": found.device_s,
            "perf/tflops_per_gpu": _divide(found.model_flops, found.wall_s * found.ranks) / 1e12,
            "perf/padded_tokens_per_second": _divide(found.padded_tokens, found.wall_s),
            "perf/images_per_second": _divide(found.images, found.wall_s),
            "perf/data_time": _divide(window.data_s, window.steps),
            "perf/model_flops": last.model_flops if last is not None else math.nan,
            "perf/hardware_flops": last.hardware_flops if last is not None else math.nan,
            "perf/factor": last.factor if last is not None else math.nan,
        }  # fmt: skip
        if self.combined is not None:
            record["perf/slowest_rank_step_time"] = found.wall_s
            record["perf/stragglers"] = list(found.stragglers)
        goodput = self.goodput.describe(elapsed_s)
        record["goodput/share"] = goodput["share"]
        record |= {f"goodput/{key}": value for key, value in goodput.items() if key.startswith("lost_")}
        return record | dict(gauge)

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


def _list_rates(found: Combined) -> dict[str, Any]:
    share = _divide(found.model_flops, found.wall_s * found.peak_flops_per_s)
    return {
        "perf/mfu": share,
        "perf/mfu_percent": 100 * share,
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
