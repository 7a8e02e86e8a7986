"""Entries of the training thread go in; metrics, records and sums for other ranks come out, off that thread."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from flopcalc._version import __version__
from flopcalc.base.errors import FlopcalcError
from flopcalc.base.files import open_regular, parse_object
from flopcalc.monitor.batch import BatchWork
from flopcalc.monitor.device import DeviceQueue
from flopcalc.monitor.keys import CORE, DATASET_PREFIX, LOG_NAME, SCHEMA
from flopcalc.monitor.messages import Messages
from flopcalc.monitor.meter import UNKNOWN, Formats, Meter, MeteredStep, Pass, split_by_dataset
from flopcalc.monitor.model import WatchedModel
from flopcalc.monitor.passes import count_pass
from flopcalc.monitor.power import PowerMeter
from flopcalc.monitor.ranks import GatheredInterval, Side, combine, open_side
from flopcalc.monitor.records import VALUES, DatasetMetrics, DueRecord, LostTime
from flopcalc.monitor.settings import Settings
from flopcalc.monitor.sinks import Outbox, make_sinks
from flopcalc.monitor.step import SeenStep
from flopcalc.monitor.values import ValueReader

GOODPUT_NAME = "goodput.json"
_GOODPUT_S = 5.0  # the file is written no more often
_DROPPED_S = 0.01  # so long a monitor that was not closed waits for its last values
_SLICE_S = 1e-4  # so long a thread digests at once
_LOCK_S = 1.0  # a caller waits no longer for the worker
_MOST_ENTRIES = 20_000  # kept for a worker that does not come: then the oldest go
_NO_BATCH = (
    "a step was seen without its batch, so its FLOPs are not known: give the live model (model=, attach), or the batch "
    "(with monitor.step(batch), log_step(attention_mask=…)); a model that was compiled in place hides its inputs, give "
    "what torch.compile returned; a model in eval() mode does not train: call model.train()"
)


class StepWorker:
    """All slow work on steps; a worker thread calls `digest`, and so does a caller who asks for metrics."""

    def __init__(
        self, settings: Settings, output_dir: str, log_file: str | None, messages: Messages, clock: Callable[[], int]
    ) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.entries: deque[DueRecord | LostTime | DatasetMetrics] = deque(maxlen=_MOST_ENTRIES)
        self._lost_steps = self._lost_records = 0  # which were never digested; one entry may be both
        self._deadline_s = math.inf  # of time.monotonic: what is not digested by then is dropped
        self.meter = Meter(settings)
        self.model = WatchedModel(settings, self.meter, messages.say)
        self.metrics: dict[str, Any] = dict.fromkeys(CORE, math.nan)
        self.device: DeviceQueue | None = None
        self.power: PowerMeter | None = None
        self.rank, self.world = 0, 1
        self.outbox: Outbox | None = None
        self.side: Side | None = None
        self._output_dir = output_dir
        self._log_file = log_file
        self._messages = messages
        self._say = messages.say
        self._clock = clock
        self._created, self._created_s = clock(), time.time()
        self._lock = threading.RLock()  # reentrant: a signal handler may close the monitor while it digests
        self._goodput_at_s = -math.inf
        self._owes_goodput = False
        self._logged_before = 0  # the last step that an earlier run wrote into the same log
        self.has_begun = False

    # --- Opening and closing ----------------------------------------------------------------------------------------

    def open_log(self) -> None:
        if self.outbox is not None or self.rank != 0:
            return
        self._logged_before = _read_last_step(self._log_file or os.path.join(self._output_dir, LOG_NAME))
        self.outbox = Outbox(make_sinks(self.settings, self._output_dir, self._log_file), self._say)
        self._messages.outbox = self.outbox

    def open_source(self) -> None:
        self.model.open_source(self.rank)

    def open_side(self) -> None:
        if self.world > 1:
            self.meter.scope = f"rank {self.rank} of {self.world}"
        if self.side is None and self.settings.distributed_enabled and "torch" in sys.modules:
            self.side = open_side(self._say, self.settings.side_timeout_s)
        self.meter.has_others = self.side is not None

    def begin(self, number: int) -> None:
        """The first step is over: all is known that the log's first line says."""
        self.has_begun = True
        self.model.settle_peak()
        if 1 < number <= self._logged_before:  # resumed before the last logged step: those are done again
            self.meter.redone_until = self._logged_before
        if self.outbox is None:
            return
        intake = self.model.intake if self.model.has_formula else None
        estimator = intake.estimator if intake is not None else None
        peak = self.meter.peak
        self.outbox.put(
            {
                "type": "start",
                "schema": SCHEMA,
                "version": __version__,
                "time": time.time(),
                "model": estimator.source.name if estimator is not None else None,
                "parameters": estimator.parameters()["total"] if estimator is not None else None,
                "device": peak.device,
                "peak_flops_per_s": peak.flops_per_s,
                "dtype": peak.dtype,
                "mode": self.settings.mode,
                "world": self.world,
                "settings": asdict(self.settings),
            }
        )

    def finish_side(self) -> None:
        """The last, shorter interval; the other ranks are ending too, and are given a moment."""
        if self.side is None:
            return
        side, self.side = self.side, None
        for number, sums in self.meter.take_intervals(is_end=True):
            side.post(number, sums)
        self._combine(side.close())
        if self.meter.is_unreported:
            self._write_record(make_plain_record(self.meter.last_number, self._clock()))

    def finish_log(self, timeout_s: float) -> None:
        if self.outbox is None:
            return
        self._write_goodput()
        goodput = self.meter.goodput.describe(self._elapsed_s())
        end = {"type": "end", "time": time.time(), "steps": self.meter.steps, "goodput": goodput}
        dropped = self._count_dropped()
        self.outbox.put({**end, "dropped": dropped} if dropped else end)
        self.outbox.close(timeout_s)

    # --- Entries ----------------------------------------------------------------------------------------------------

    def add(self, entry: DueRecord | LostTime | DatasetMetrics) -> None:
        """On the training thread: queue what happened; if too many wait, the oldest is dropped."""
        if len(self.entries) == self.entries.maxlen:
            self.drop_oldest()
        self.entries.append(entry)

    def drop_oldest(self) -> None:
        self._lose(self.entries.popleft())
        self._say(
            f"steps come faster than they are counted: {_MOST_ENTRIES} wait, and the oldest are dropped", "overfull"
        )

    def finish(self, timeout_s: float) -> None:
        """The training is over: digest what is left, for so long at most, and say how much was dropped."""
        self._deadline_s = time.monotonic() + timeout_s
        self.digest(timeout_s)
        left = list(self.entries)
        self.entries.clear()
        for entry in left:
            self._lose(entry)
        if dropped := self._count_dropped():
            self._say(
                f"{dropped} records were dropped, and their steps are in no sum: steps came faster than they are "
                f"counted, and close() waits {timeout_s:g} s at most",
                "dropped",
            )

    def _lose(self, entry: DueRecord | LostTime | DatasetMetrics) -> None:
        self._lost_steps += isinstance(entry, SeenStep)
        self._lost_records += isinstance(entry, DueRecord) and entry.values is not None

    def _count_dropped(self) -> int:
        """A step and its record are one entry, or two: then each is counted once."""
        return max(self._lost_steps, self._lost_records)

    def digest(self, within_s: float = math.inf) -> None:
        """Turn what is ready into metrics, in its order, for `within_s` at most."""
        deadline_s = min(self._deadline_s, time.monotonic() + within_s)
        while self._digest_some(deadline_s):
            time.sleep(0)  # let another thread go on: else Python makes it wait for 5 ms

    def _digest_some(self, deadline_s: float) -> bool:
        """Digest a few entries; whether more are ready, and there is time."""
        if not self._lock.acquire(timeout=_LOCK_S):
            return False  # the worker holds it, and is slow
        has_more = False
        try:
            end_s = min(deadline_s, time.monotonic() + _SLICE_S)
            while self.entries and self.entries[0].is_ready:
                if time.monotonic() >= end_s:
                    has_more = end_s < deadline_s
                    break
                self._try(self.entries.popleft())
            if not has_more:
                self._exchange()
            problems, self.meter.problems = self.meter.problems, {}
        finally:
            self._lock.release()
        for once, problem in problems.items():
            self._say(problem, once)
        return has_more

    def _try(self, entry: object) -> None:
        """One entry that cannot be digested is said once, and takes no other with it."""
        for digest in (self._add, self._report):
            try:
                digest(entry)
            except Exception as error:
                self._say(f"a step could not be digested: {type(error).__name__}: {error}", "fail digest")

    def _add(self, entry: object) -> None:
        if isinstance(entry, SeenStep):
            self.meter.add(self._make_step(entry))
        elif isinstance(entry, LostTime):
            self.meter.goodput.lose(entry.cause, entry.seconds)
        elif isinstance(entry, DatasetMetrics):
            self.meter.add_datasets(entry.values)

    def _report(self, entry: object) -> None:
        if not isinstance(entry, DueRecord):
            return
        if entry.values is not None:
            self._write_record(entry)
        if self.device is not None and not entry.is_lost:
            self.device.give_back(entry.copies)

    def _write_record(self, entry: DueRecord) -> None:
        given = entry.values if entry.values is not None else ()
        values = {"global_step": entry.number} | {
            key: self._read(value, entry.is_lost) for key, value in zip(VALUES, given, strict=True)
        }
        source = self.model.source
        gauge = source.gauge() if source is not None and self.meter.is_detail_due() else {}
        gauge |= self.power.values if self.power is not None else {}
        elapsed_s = max(0, entry.ended_ns - self._created) / 1e9
        record, details = self.meter.report(values, elapsed_s, gauge)
        self.metrics = {**self._keep_lasting(), **record, **details}
        if self.outbox is not None:
            skip = ("wandb",) if entry.skip_wandb else ()
            self.outbox.put({"type": "step", "time": self._created_s + elapsed_s, **record}, skip=skip)
        self._owes_goodput = self._owes_goodput or "goodput/share" in record

    def refresh_power(self) -> None:
        """On the worker's thread alone."""
        if self.power is not None:
            self.power.refresh()

    def _keep_lasting(self) -> dict[str, Any]:
        """What the next record does not replace: all else is of the same steps."""
        lasting = (DATASET_PREFIX, "perf/tensor_active", "perf/sm_active", "perf/dram_active")
        return {key: value for key, value in self.metrics.items() if key.startswith(lasting)}

    def _read(self, value: Any, is_lost: bool) -> float:
        """A number that the loop gave, or the copy of it that has arrived from the device; NaN where it is none."""
        if type(value) is float:
            return value
        if value is None or is_lost:
            return math.nan
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            self._say(f"a value given for the record is no number, and left out: {value!r:.60}: {error}", "value type")
            return math.nan

    def _make_step(self, entry: SeenStep) -> MeteredStep:
        works = self._count(entry)
        wall_s = entry.wall_ns / 1e9
        data_s = min(max(0, entry.data_ns), entry.wall_ns) / 1e9  # a part of it
        passes = self._count_passes(entry)
        step = MeteredStep(
            entry.number, wall_s, data_s, entry.device_s, measured=entry.is_measured, passes=passes, owes=entry.owes
        )
        factor = entry.factor
        if factor is not None:
            model_factor = factor.value if factor.is_of_model else 1.0
            step = step._replace(factor=factor.value, model_factor=model_factor, source=factor.source)
        if works is None:
            absolute = None if self.model.has_formula else self.model.find_absolute(entry.sizes)
            if absolute is None:
                return step._replace(factor=1.0, model_factor=1.0, source="none")
            self.meter.convention = "full"  # what runs, as counters see it
            source = f"{self.settings.mode}: measured"
            return step._replace(model=absolute, hardware=absolute, factor=1.0, model_factor=1.0, source=source)
        return step._replace(
            model=self._share(work.model for work in works),
            hardware=self._share(UNKNOWN if work.hardware is None else work.hardware for work in works),
            tokens=self._share_number(work.tokens for work in works),
            padded_tokens=self._share_number(work.padded_tokens for work in works),
            samples=self._share_number(work.samples for work in works),
            images=self._share_number(work.images for work in works),
            datasets=self._split(entry.dataset, works),
        )

    def _count_passes(self, entry: SeenStep) -> tuple[Pass, ...]:
        """The passes of a step that do not train."""
        found = []
        for seen in entry.passes:
            model: Formats | None = None
            hardware: Formats | None = None
            try:
                if not (entry.is_lost and (entry.copies or entry.held)):
                    model, hardware = count_pass(seen)
                    shared = seen.model.shared if seen.model is not None else 1
                    model, hardware = _divide(model, shared), None if hardware is None else _divide(hardware, shared)
            except FlopcalcError as error:
                reason = f"a {seen.name} pass cannot be counted, so perf/mfu_step is not known: {error}"
                self._say(f"step {entry.number}: {reason}", _without_digits(reason))
            found.append(Pass(seen.name, model, hardware, seen.seconds, seen.is_in_step))
        if entry.owes:
            self._say(
                f"perf/mfu_step is not known: a {entry.owes} runs outside of this process's models, and its FLOPs were "
                "not given: monitor.add_pass(…)",
                "owes",
            )
        return tuple(found)

    def _split(
        self, dataset: str | Sequence[str] | None, works: Sequence[BatchWork]
    ) -> tuple[tuple[str, int, float], ...]:
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

    def _share(self, values: Iterable[Formats]) -> Formats:
        """This rank's part of what several ranks work on together; exact while nobody shares it."""
        total: dict[str, float] = {}
        for each in values:
            for name, flops in each.items():
                total[name] = total.get(name, 0) + flops
        return _divide(total, self.model.shared)

    def _share_number(self, values: Iterable[float]) -> float:
        total, ranks = sum(values), self.model.shared
        return total if ranks == 1 else total / ranks

    def _count(self, entry: SeenStep) -> list[BatchWork] | None:
        """FLOPs of each micro-batch; None where they cannot be known, and a warning says why."""
        if self.model.intake is None or (entry.is_lost and (entry.copies or entry.held)):
            return None
        if not entry.batches or not entry.is_whole:
            self._say(_NO_BATCH, "no batch")
            return None
        works = []
        try:
            for model, snapshot in entry.batches:
                if model.intake is None:
                    return None
                if snapshot is not None:
                    works.append(model.intake.count(snapshot))
        except FlopcalcError as error:
            reason = f"its batch cannot be counted, so its MFU is not known: {error}"
            self._say(f"step {entry.number}: {reason}", _without_digits(reason))
            return None
        for work in works:
            for note in work.notes:
                self._say(note, _without_digits(note))
        return works

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

    def _combine(self, found: Sequence[GatheredInterval]) -> None:
        for gathered in found:
            combined = combine(gathered, self.world, self.settings.straggler_factor)
            self.meter.take_combined(combined)
            if combined.reasons:
                self._say(f"MFU of all ranks is not known: {'; '.join(combined.reasons)}", "ranks unknown")

    # --- Files ------------------------------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        return max(0, self._clock() - self._created) / 1e9

    def refresh_goodput(self) -> None:
        """Write the file again where it is due; the worker alone waits for the disk."""
        if self._owes_goodput and self._elapsed_s() - self._goodput_at_s >= _GOODPUT_S:
            self._write_goodput()

    def _write_goodput(self) -> None:
        """Where the time went, as a file of its own, replaced as a whole."""
        if self.outbox is None:
            return
        self._owes_goodput = False
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


def make_plain_record(step: int, ended_ns: int) -> DueRecord:
    """A record without a loop's own values."""
    entry = DueRecord()
    entry.number, entry.values = step, (None,) * len(VALUES)
    entry.ended_ns, entry.is_past = ended_ns, True
    return entry


def finish_dropped(worker: StepWorker, values: ValueReader, hooks: list[Any], count_s: float, close_s: float) -> None:
    """A monitor that nobody holds any more, and nobody closed: its log is finished, its hooks and sinks go."""
    if worker.pid != os.getpid():
        return
    for handle in hooks:
        handle.remove()
    parts: tuple[Callable[[], None], ...] = (
        lambda: values.finish(_DROPPED_S),
        lambda: worker.finish(count_s),
        worker.finish_side,
        lambda: worker.finish_log(close_s),
        worker.model.close,
    )
    for part in parts:
        with suppress(Exception):
            part()


def _divide(flops: Formats, ranks: int) -> Formats:
    return flops if ranks == 1 else {name: each / ranks for name, each in flops.items()}


def _without_digits(text: str) -> str:
    """What a warning is said once for: the same with other sizes is the same."""
    return re.sub(r"\d+", "#", text)


def _read_last_step(path: str) -> int:
    """The last step of a log that is already there; 0 without one."""
    try:
        with open_regular(path, FlopcalcError) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read(65536).splitlines()
    except (FlopcalcError, OSError):
        return 0
    for line in reversed(lines):
        record = parse_object(line)
        if record.get("type") == "step" and isinstance(record.get("global_step"), int):
            return int(record["global_step"])
    return 0
