"""Entries of the hot path go in, in their order; metrics, records and sums for other ranks come out, off that path."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flopcalc._version import __version__
from flopcalc.errors import FlopcalcError
from flopcalc.monitor.batch import Copies, Intake, Snapshot, Work, is_tensor
from flopcalc.monitor.keys import CORE, SCHEMA
from flopcalc.monitor.meter import Meter, Peak, Step, split_by_dataset
from flopcalc.monitor.modes import Counts, Factor, Source
from flopcalc.monitor.ranks import Gathered, Say, Side, combine, open_side
from flopcalc.monitor.settings import Settings
from flopcalc.monitor.sinks import LOG_NAME, Outbox, make_sinks

if TYPE_CHECKING:
    from flopcalc.monitor.lane import Row, RunEntry

VALUES = ("training/epoch", "training/loss", "training/grad_norm", "training/lr")  # that a loop gives
GOODPUT_NAME = "goodput.json"
_GOODPUT_S = 5.0  # the file is written no more often
_LOCK_S = 1.0  # a caller waits no longer for the worker
_MOST_ENTRIES = 100_000  # kept for a worker that does not come: then the oldest go
_NO_BATCH = (
    "a step was seen without its batch, so its FLOPs are not known: give the live model (model=, attach), or the batch "
    "(with monitor.step(batch), log_step(attention_mask=…)); a model that was compiled in place hides its inputs, give "
    "what torch.compile returned; a model in eval() mode does not train: call model.train()"
)


class StepEntry:
    """One optimizer step; ready when the device has passed `end`."""

    __slots__ = (
        "data_ns", "dataset", "device_s", "end", "factor", "intake", "is_lost", "is_measured", "is_ready", "number",
        "sizes", "snapshots", "start", "waiting", "wall_ns",
    )  # fmt: skip

    def __init__(self, number: int, wall_ns: int, data_ns: int, start: Any, end: Any) -> None:
        self.number = number
        self.wall_ns = wall_ns
        self.data_ns = data_ns
        self.start, self.end = start, end
        self.snapshots: Sequence[Snapshot | None] = ()  # None: a pipeline stage that saw no text
        self.sizes: Hashable = ()  # of a model without a formula: what a measurement holds for
        self.waiting: Sequence[Any] = ()  # copies that arrive before `end`
        self.dataset: str | Sequence[str] | None = None
        self.factor: Factor | None = None  # measured ÷ analytic, as it was known when the step ended
        self.intake: Intake | None = None  # of the model that was trained
        self.is_measured = False
        self.device_s = math.nan
        self.is_ready = self.is_lost = False

    @property
    def kind(self) -> Hashable:
        return find_kind(self.snapshots)


class ReportEntry:
    """A record is due, with values of which some may still be on their way from the device."""

    __slots__ = ("at_ns", "device_s", "end", "is_lost", "is_ready", "skip", "start", "time", "values")

    def __init__(self, values: dict[str, Any], skip: tuple[str, ...], end: Any, at_ns: int) -> None:
        self.values = values
        self.at_ns = at_ns
        self.time = time.time()
        self.skip = skip
        self.start, self.end = None, end
        self.device_s = math.nan
        self.is_ready = self.is_lost = False


class NoteEntry:
    """Something to do when its turn comes."""

    __slots__ = ("is_ready", "run")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.is_ready = True


def find_kind(snapshots: Sequence[Snapshot | None]) -> Hashable:
    """The workload class of a step: that of its first micro-batch."""
    first = snapshots[0] if snapshots else None
    return first.kind if first is not None else ()


class Digester:
    """Everything that may take its time; `digest` is called by a worker, and by whoever asks for metrics."""

    def __init__(
        self, settings: Settings, output_dir: str, log_file: str | None, say: Say, clock: Callable[[], int]
    ) -> None:
        self.settings = settings
        self.entries: deque[Any] = deque(maxlen=_MOST_ENTRIES)
        self.meter = Meter(settings)
        self.metrics: dict[str, Any] = dict.fromkeys(CORE, math.nan)
        self.intake: Intake | None = None
        self.source: Source | None = None
        self.copies: Copies | None = None
        self.shared = 1  # ranks that work on one batch together
        self.rank, self.world = 0, 1
        self.outbox: Outbox | None = None
        self.side: Side | None = None
        self._output_dir = output_dir
        self._log_file = log_file
        self._say = say
        self._clock = clock
        self._created = clock()
        self._lock = threading.Lock()
        self._absolute: dict[Hashable, int] = {}
        self._goodput_at_s = -math.inf
        self.lane: Any = None  # steps that were only noted; handed over here if their monitor is dropped

    # --- Opening and closing ----------------------------------------------------------------------------------------

    def open_log(self) -> int:
        """Open the sinks; returns the last step that an earlier run wrote into the same log, 0 without one."""
        if self.outbox is not None or self.rank != 0:
            return 0
        path = self._log_file or os.path.join(self._output_dir, LOG_NAME)
        logged = _read_last_step(path)
        self.outbox = Outbox(make_sinks(self.settings, self._output_dir, self._log_file), self._say)
        return logged

    def open_side(self) -> None:
        if self.world > 1:
            self.meter.scope = f"rank {self.rank} of {self.world}"
        if self.side is None and self.settings.distributed_enabled and "torch" in sys.modules:
            self.side = open_side(self._say, self.settings.side_timeout_s)
        self.meter.has_others = self.side is not None

    def write_start(self) -> None:
        """The log's first line: what the run is."""
        if self.outbox is None:
            return
        estimator = self.intake.estimator if self.intake is not None else None
        peak = self.meter.peak
        self.outbox.put({
            "type": "start", "schema": SCHEMA, "version": __version__, "time": time.time(),
            "model": estimator.source.name if estimator is not None else None,
            "parameters": estimator.parameters()["total"] if estimator is not None else None,
            "device": peak.device, "peak_flops_per_s": peak.flops_per_s, "dtype": peak.dtype,
            "mode": self.settings.mode, "world": self.world, "settings": asdict(self.settings),
        })  # fmt: skip

    def finish_side(self) -> None:
        """The last, shorter interval; the other ranks are ending too, and are given a moment."""
        if self.side is None:
            return
        side, self.side = self.side, None
        for number, sums in self.meter.take_intervals(is_end=True):
            side.post(number, sums)
        self._combine(side.close())
        if self.meter.is_untold:
            self._write_record(make_plain_report(self.meter.last_number, self._clock()))

    def finish_log(self, timeout_s: float) -> None:
        if self.outbox is None:
            return
        self._write_goodput()
        goodput = self.meter.goodput.describe(self._elapsed_s())
        self.outbox.put({"type": "end", "time": time.time(), "steps": self.meter.steps, "goodput": goodput})
        self.outbox.close(timeout_s)

    def keep_absolute(self, sizes: Hashable) -> None:
        """Without a formula, what was measured holds for steps of the same sizes, and for no others."""
        found = self.source.absolute(()) if self.source is not None and self.intake is None else None
        # A measurement that failed leaves the one before.
        if found is not None and sizes and (not self._absolute or found != next(reversed(self._absolute.values()))):
            self._absolute[sizes] = found

    def forget_model(self) -> None:
        self.close_source()
        self.source = self.intake = None
        self.meter.peak = Peak()
        self._absolute.clear()

    def close_source(self) -> None:
        if self.source is not None:
            self.source.close()

    # --- Entries ----------------------------------------------------------------------------------------------------

    def digest(self) -> None:
        """Turn what is ready into metrics, in its order."""
        if not self._lock.acquire(timeout=_LOCK_S):
            return  # the worker is at it, and slow
        try:
            while self.entries and self.entries[0].is_ready:
                self._try(self._digest_one, self.entries.popleft())
            self._exchange()
            problems, self.meter.problems = self.meter.problems, {}
        finally:
            self._lock.release()
        for once, problem in problems.items():
            self._say(problem, once)

    def _try(self, digest: Callable[..., None], *given: Any) -> None:
        """One entry that cannot be digested is said once, and takes no other with it."""
        try:
            digest(*given)
        except Exception as error:
            self._say(f"a step could not be digested: {type(error).__name__}: {error}", "fail digest")

    def _digest_one(self, entry: Any) -> None:
        if isinstance(entry, NoteEntry):
            entry.run()
        elif isinstance(entry, StepEntry):
            self.meter.add(self._make_step(entry))
        elif isinstance(entry, ReportEntry):
            self._write_record(entry)
        else:
            self._digest_run(entry)

    def _digest_run(self, entry: RunEntry) -> None:
        """Steps that are alike are counted once."""
        alike: dict[int, Step] = {}
        for row, report in entry.list_reports(self.copies):
            self._try(self._add_alike, entry, row, alike)
            self._try(self._write_record, report)

    def _add_alike(self, entry: RunEntry, row: Row, alike: dict[int, Step]) -> None:
        step = alike.get(row.calls)
        if step is None:
            step = alike[row.calls] = self._make_step(entry.make_step(row.calls))
        wall_s, data_s = _find_times(row.now_ns - row.boundary_ns, row.begun_ns - row.boundary_ns)
        self.meter.add(step._replace(number=row.number, wall_s=wall_s, data_s=data_s))

    def _write_record(self, entry: ReportEntry) -> None:
        values = {
            key: value if type(value) is float else self._arrive(value, entry.is_lost)
            for key, value in entry.values.items()
        }
        gauge = self.source.gauge() if self.source is not None and self.meter.is_detail_due() else {}
        record = self.meter.report(values, (entry.at_ns - self._created) / 1e9, gauge)
        self.metrics.update(record)
        if self.outbox is not None:
            self.outbox.put({"type": "step", "time": entry.time, **record}, skip=entry.skip)
        if "goodput/share" in record and self._elapsed_s() - self._goodput_at_s >= _GOODPUT_S:
            self._write_goodput()

    def _arrive(self, value: Any, is_lost: bool) -> float:
        """A value that the loop gave, or the copy of it that has arrived from the device; NaN where it is no number."""
        if value is None or (is_lost and is_tensor(value)):
            return math.nan
        if type(value) is float or type(value) is int:
            return value
        try:
            found = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            self._say(f"a value given for the record is no number, and left out: {value!r:.60}: {error}", "value type")
            return math.nan
        if is_tensor(value) and self.copies is not None and value.is_pinned():
            self.copies.give_back(value)
        return found

    def _make_step(self, entry: StepEntry) -> Step:
        works = self._count_entry(entry)
        if self.copies is not None and not entry.is_lost:
            for held in entry.waiting:
                self.copies.give_back(held)
        wall_s, data_s = _find_times(entry.wall_ns, entry.data_ns)
        step = Step(entry.number, wall_s, data_s, entry.device_s, measured=entry.is_measured)
        factor = entry.factor
        if factor is not None:
            model_factor = factor.value if factor.is_of_model else 1.0
            step = step._replace(factor=factor.value, model_factor=model_factor, source=factor.source)
        if works is None:
            absolute = self._absolute.get(entry.sizes) if entry.intake is None else None
            if absolute is None:
                return step._replace(factor=1.0, model_factor=1.0, source="none")
            self.meter.convention = "full"  # what runs, as counters see it
            source = f"{self.settings.mode}: measured"
            return step._replace(
                model_flops=absolute, hardware_flops=absolute, factor=1.0, model_factor=1.0, source=source
            )
        return step._replace(
            model_flops=self._share(work.model_flops for work in works),
            hardware_flops=self._share(
                math.nan if work.hardware_flops is None else work.hardware_flops for work in works
            ),
            tokens=self._share(work.tokens for work in works),
            padded_tokens=self._share(work.padded_tokens for work in works),
            samples=self._share(work.samples for work in works),
            images=self._share(work.images for work in works),
            datasets=self._split(entry.dataset, works),
        )

    def _split(self, dataset: str | Sequence[str] | None, works: Sequence[Work]) -> tuple[tuple[str, int, float], ...]:
        if dataset is None:
            return ()
        loads = [work.load for work in works]
        lengths = [n for load in loads for n in (load.documents or (load.seq,) * load.rows)]
        if not isinstance(dataset, str) and len(dataset) != len(lengths):
            self._say(
                f"dataset names {len(dataset)} sequences of a step that has {len(lengths)}: such steps are in no "
                "dataset's metrics",
                "dataset length",
            )
            return ()
        return split_by_dataset(dataset, lengths)

    def _share(self, values: Iterable[float]) -> float:
        """This rank's part of what several ranks work on together; exact while nobody shares it."""
        total = sum(values)
        return total if self.shared == 1 else total / self.shared

    def _count_entry(self, entry: StepEntry) -> list[Work] | None:
        """FLOPs of each micro-batch; None where they cannot be known, and a warning says why."""
        if entry.intake is None or (entry.is_lost and entry.waiting):
            return None
        if not entry.snapshots:
            self._say(_NO_BATCH, "no batch")
            return None
        try:
            works = _count(entry.intake, entry.snapshots)
        except FlopcalcError as error:
            reason = f"its batch cannot be counted, so its MFU is not known: {error}"
            self._say(f"step {entry.number}: {reason}", _without_digits(reason))
            return None
        for work in works:
            for note in work.notes:
                self._say(note, _without_digits(note))
        return works

    def count_measured(self, snapshots: Sequence[Snapshot | None]) -> Counts | None:
        """What the measured step should have counted, in the ways that counters count."""
        if self.intake is None:
            return None
        try:
            works = _count(self.intake, snapshots)
            eager = [self.intake.count_eager(work) for work in works]
        except FlopcalcError as error:
            self._say(f"the measured batch cannot be counted: {error}", "no work")
            return None
        if not works:
            return None
        hardware = [work.hardware_flops for work in works]
        return Counts(sum(work.model_flops for work in works), sum(eager), _sum_known(hardware))

    # --- Other ranks ------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Sums to and from the other ranks, once per interval; nobody is waited for."""
        if self.side is None:
            return
        if not self.side.is_current():  # another group was made since
            self.side.close()
            self.side = self.meter.combined = None
            self.open_side()
            return
        for number, sums in self.meter.take_intervals():
            self.side.post(number, sums)
        self._combine(self.side.collect())

    def _combine(self, found: Sequence[Gathered]) -> None:
        for gathered in found:
            combined = combine(gathered, self.world, self.settings.straggler_factor)
            self.meter.take_combined(combined)
            if combined.reasons:
                self._say(f"MFU of all ranks is not known: {'; '.join(combined.reasons)}", "ranks unknown")

    # --- Files ------------------------------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        return (self._clock() - self._created) / 1e9

    def _write_goodput(self) -> None:
        """Where the time went, as a file of its own, replaced as a whole."""
        if self.outbox is None:
            return
        self._goodput_at_s = self._elapsed_s()
        path = os.path.join(self._output_dir, GOODPUT_NAME)
        found = {
            key: value if math.isfinite(value) else None
            for key, value in self.meter.goodput.describe(self._elapsed_s()).items()
        }
        try:
            os.makedirs(self._output_dir, exist_ok=True)
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump({"schema": SCHEMA, "steps": self.meter.steps, **found}, file, indent=2)
                file.write("\n")
            os.replace(f"{path}.new", path)
        except OSError as error:
            self._say(f"goodput cannot be written to {path}: {error}", "goodput file")


def make_plain_report(step: int, at_ns: int) -> ReportEntry:
    """A record without a loop's own values."""
    return ReportEntry({"global_step": step, **dict.fromkeys(VALUES, math.nan)}, (), None, at_ns)


def _find_times(wall_ns: int, data_ns: int) -> tuple[float, float]:
    """Seconds of a step, and of its wait for data, which is a part of them."""
    return wall_ns / 1e9, min(max(0, data_ns), max(0, wall_ns)) / 1e9


def _count(intake: Intake, snapshots: Sequence[Snapshot | None]) -> list[Work]:
    return [intake.count(each) for each in snapshots if each is not None]


def _sum_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _without_digits(text: str) -> str:
    """What a warning is said once for: the same with other sizes is the same."""
    return re.sub(r"\d+", "#", text)


def _read_last_step(path: str) -> int:
    """The last step of a log that is already there; 0 without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 65536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, Mapping) and record.get("type") == "step" and isinstance(record.get("global_step"), int):
            return int(record["global_step"])
    return 0
