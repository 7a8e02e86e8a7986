"""TrainingMonitor: a training loop's steps go in, as time stamps, shapes and small values; metrics come out."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flopcalc.base.errors import format_nearest
from flopcalc.monitor.batch import HostBatches, Intake, TensorShape, WatchedLoader
from flopcalc.monitor.device import DeviceQueue, find_device
from flopcalc.monitor.digest import StepWorker, finish_dropped, make_plain_record
from flopcalc.monitor.keys import CORE
from flopcalc.monitor.messages import Messages, guarded, warn
from flopcalc.monitor.meter import DevicePeak
from flopcalc.monitor.model import WatchedModel
from flopcalc.monitor.modes import FactorSource
from flopcalc.monitor.pass_calls import PassCalls
from flopcalc.monitor.pass_log import PassLog
from flopcalc.monitor.passes import count_measured
from flopcalc.monitor.place import find_rank
from flopcalc.monitor.power import PowerMeter
from flopcalc.monitor.records import DatasetMetrics, DueRecord, LostTime
from flopcalc.monitor.settings import DEFAULT_FREQ, Settings, TrainingPhase, check_path, load_settings
from flopcalc.monitor.step import SeenStep
from flopcalc.monitor.values import ValueReader

_POLL_S = 0.25  # the worker looks this often
_WORK_S = 1.0  # and counts so long at most before it looks again
_MARK_NS, _MARK_STEPS = 8_000_000_000, 64  # how often a step is marked on the device, and the device is asked
_CLOSE_S = 5.0  # close waits no longer for the device, nor for a sink
_COUNT_S = 5.0  # nor for what is to be counted
_CATCH_UP_S = 0.25  # and metrics() does not count for longer
_JOIN_S = 1.0  # and for a thread that was asked to end
_clock: Callable[[], int] = time.perf_counter_ns
# Before all atexit hooks, where Python has that: a tracker's own hook would have ended its connection by then.
_at_exit: Callable[..., Any] = getattr(threading, "_register_atexit", atexit.register)
_made: weakref.WeakSet[TrainingMonitor] = weakref.WeakSet()


class TrainingMonitor(PassCalls):
    """Logs MFU, HFU and other metrics of a training loop. It cannot raise, wait for the device, or change a result.

        monitor = TrainingMonitor("out", model=model)
        monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=1e-3)  # after each optimizer step

    `model` is the live model, whose forward passes it then sees. Or it is what `flopcalc.bind` takes or returns; then
    give batches with `step(batch)`. `config` is a mapping or a YAML, TOML or JSON file. Only a bad config raises.
    """

    _is_off = True  # of a copy, until __init__ has run
    _pid = -1

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        config: Mapping[str, object] | str | os.PathLike[str] | Settings | None = None,
        log_file: str | os.PathLike[str] | None = None,
        flops_profile_freq: int = DEFAULT_FREQ,
        *,
        model: object = None,
    ) -> None:
        self.settings, problems = load_settings(config, flops_profile_freq)
        self.output_dir = check_path(output_dir, "output_dir")
        log_path = check_path(log_file, "log_file") if log_file is not None else None
        try:
            self._set_up(log_path, problems, model)
        except Exception as error:
            self._is_off, self._pid = True, -1  # as a copy
            warn(f"the monitor could not be made, and is off: {type(error).__name__}: {error}")

    def _set_up(self, log_path: str | None, problems: Sequence[str], model: object) -> None:
        self._pid = os.getpid()
        self._is_off = False
        self._wake = threading.Event()
        self._worker: threading.Thread | None = None
        self._messages = Messages()
        self._digester = StepWorker(self.settings, self.output_dir, log_path, self._messages, lambda: _clock())
        self._trained = self._digester.model  # the first model; it trains
        self._models = [self._trained]
        self._trained.clock, self._trained.lose = lambda: _clock(), weakref.WeakMethod(self._lose_since)
        self._passes = PassLog(lambda: _clock())
        self._given: dict[int, tuple[Any, Intake]] = {}  # models of passes that ran elsewhere
        self._owes = ""  # a pass that runs elsewhere, and that nobody gave
        self._device: DeviceQueue | None = None
        self._marked_ns, self._marked_step = -_MARK_NS, 0  # when a step was marked on the device
        self._boundary = _clock()  # where the time of the next step begins
        self._open: SeenStep | None = None  # the step that is under way
        self._is_inside = False  # of a `with step()`
        self._is_ended = False  # a step is over and not reported yet
        self._owes_report = False  # and nobody else will
        self._watched = HostBatches(self._messages.say)
        self._values = ValueReader(self._messages.say)
        self._number = 0
        self._thread, self._threads = 0, set[int]()  # whose step ended last, and all that ended one
        self._frequency = self.settings.frequency(None)
        self._is_started = False
        self._hooks: list[Any] = []
        for problem in problems:
            self.say(problem)
        if model is not None:
            self.attach(model)
        _made.add(self)
        _at_exit(_close_at_exit, weakref.ref(self))
        dropped = weakref.finalize(self, finish_dropped, self._digester, self._values, self._hooks, _COUNT_S, _CLOSE_S)
        dropped.atexit = False

    # --- What a loop calls ------------------------------------------------------------------------------------------

    @guarded
    def attach(self, model: object) -> None:
        """See every forward pass of this module, whatever is wrapped around the model or inside it.

        A list names several: the first trains, others may train too, or be a reference, a teacher, a reward model.
        """
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        if not models:
            return
        first, trained = models[0], self._trained
        self._is_started = self._is_started and first is trained.live and len(models) == 1
        if not hasattr(first, "register_forward_pre_hook"):
            trained.given = first
        elif first is not trained.live:
            self._drop_hooks()
            if trained.live is not None:
                self._catch_up()
                trained.close()
                self._digester.meter.peak = DevicePeak()
                trained = self._trained = self._digester.model = self._make_model(is_first=True)
            self._models = [trained]
            self._watch(trained, first)
        for other in models[1:]:
            if hasattr(other, "register_forward_pre_hook") and all(other is not each.live for each in self._models):
                self._models.append(self._make_model(is_first=False))
                self._watch(self._models[-1], other)

    def _make_model(self, is_first: bool) -> WatchedModel:
        made = WatchedModel(self.settings, self._digester.meter, self._messages.say, is_first)
        made.clock, made.lose = lambda: _clock(), weakref.WeakMethod(self._lose_since)
        return made

    def _watch(self, model: WatchedModel, live: object) -> None:
        from flopcalc.monitor.hooks import register_hooks  # which imports torch

        model.look_at(live)
        looks_inside = model is self._trained and model.seen is None
        self._hooks += register_hooks(self, model, looks_inside)

    @guarded
    def begin_step(self, batch: object = None, *, dataset: str | Sequence[str] | None = None) -> None:
        """A step begins; without this call its first training forward pass begins it.

        `batch` is what the model is given, or a list of micro-batches: best while it is on the host.
        """
        if self._open is not None and self._open.is_given:  # begun, and never ended: the loop gave it up
            self._abandon()
        seen = self._open or self._begin()
        seen.dataset = dataset
        if batch is None:
            return
        batches = batch if isinstance(batch, (list, tuple)) else [batch]
        if self._trained.live is not None and not all(isinstance(each, Mapping) for each in batches):
            return  # what the model is given can be read
        seen.is_given = True
        for each in batches:
            self._note_given(seen, each)

    @guarded
    def end_step(self, step: int | None = None) -> None:
        """An optimizer step is over."""
        self._end(self._open or self._begin(), step)

    @guarded
    def report(
        self,
        step: int | None = None,
        *,
        epoch: object = None,
        loss: object = None,
        grad_norm: object = None,
        learning_rate: object = None,
        skip_wandb: bool = False,
    ) -> None:
        """Send a record: rates over the steps since the last one, and these values; tensors may be on the device."""
        self._report(step, (epoch, loss, grad_norm, learning_rate), skip_wandb)

    def step(
        self, batch: object = None, *, dataset: str | Sequence[str] | None = None, **unknown: object
    ) -> StepContext:
        """One optimizer step as a block. An unknown name is said and left out."""
        if unknown:
            self._say_unknown("step", unknown, ("batch", "dataset"))
        return StepContext(self, batch, dataset)

    @guarded
    def log_step(
        self,
        step: int,
        epoch: object = None,
        loss: object = None,
        grad_norm: object = None,
        learning_rate: object = None,
        attention_mask: object = None,
        skip_wandb: bool = False,
    ) -> None:
        """An optimizer step is over, and this is its record. Inside or after `with monitor.step()` only the record."""
        given = (epoch, loss, grad_norm, learning_rate)
        if self._is_inside:
            if attention_mask is not None:
                self._see_mask(self._open or self._begin(), attention_mask)
            self._fill(step, given, skip_wandb)
        elif self._is_ended:
            self._report(step, given, skip_wandb)
        else:
            seen = self._open or self._begin()
            if attention_mask is not None:
                self._see_mask(seen, attention_mask)
            seen.values = self._values.read(given, seen)
            if skip_wandb:
                seen.skip_wandb = True
            self._end(seen, step)

    @guarded
    def mark_lost(self, cause: str) -> None:
        """The time since the last step or mark went into `cause` (eval, checkpoint, …): it is in no step's time."""
        self._lose_since(cause, self._boundary)

    @contextmanager
    def pause(self, cause: str) -> Iterator[None]:
        """Time inside is lost to `cause`, and in no step's time."""
        before = _clock()
        try:
            yield
        finally:
            self._lose_since(cause, before)

    @guarded
    def log_datasets(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Metrics per dataset, as {"coco": {"loss": 1.2}}; sent every dataset_metrics_every steps."""
        read = self._values.read_number
        found = {str(name): {str(key): read(value) for key, value in each.items()} for name, each in values.items()}
        self._digester.add(DatasetMetrics(found))

    @guarded
    def record_routing(self, path: str | os.PathLike[str]) -> None:
        """Write to a JSON file how many rows each expert gets in the next training pass; `routing` reads it.

        Rank 0 writes. Nothing waits for the device: counts stay there until a thread of their own reads them.
        """
        file, live = check_path(path, "path"), self._trained.live
        if find_rank()[0] == 0:
            from flopcalc.monitor.routing import record_routing  # which imports torch

            self._hooks += record_routing(live, file, self.say)

    @guarded
    def set_phase(self, name: TrainingPhase) -> None:
        """warmup, main or finetune: how often modes measure from now on."""
        self._frequency = self.settings.frequency(name)
        if self._trained.source is not None:
            self._trained.source.unsettle()

    def watch(self, loader: Iterable[object]) -> Iterable[Any]:
        """The same batches; each is read while it is still on the host, before the loop moves it."""
        return WatchedLoader(loader, self._see_batch)

    def metrics(self) -> dict[str, Any]:
        """The last values; what is not known is NaN, and a warning said why."""
        if self._is_copy():
            return dict.fromkeys(CORE, math.nan)
        self._catch_up()
        return dict(self._digester.metrics)

    def say(self, message: str, once: str | None = None) -> None:
        """One warning, however often it happens; the log has it too."""
        if not self._is_copy():
            self._messages.say(message, once)

    def close(self) -> None:
        """Send what is left, and let go of the model. Safe to call twice."""
        if self._is_copy() or self._is_off:
            return
        worker = self._digester
        for part in (
            self._finish_steps,
            self._stop_worker,
            worker.finish_side,
            lambda: worker.finish_log(_CLOSE_S),
            self._drop_hooks,
            self._trained.close,
            self._messages.warn_pending,
        ):
            try:
                part()
            except Exception as error:
                self._fail("close", error)
        self._is_off = True

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _memo: dict[int, object]) -> TrainingMonitor:
        return _make_idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_idle, ()

    # --- Inside a step: every function called here is paid for in every step ----------------------------------------

    def _begin(self) -> SeenStep:
        """A step begins."""
        if not self._is_started:
            self._start_up()
        if self._owes_report:
            self._settle_report()
        self._is_ended = False
        now = _clock()
        first = self._passes.find_first(now) if self._passes.passes else now
        seen = self._open = SeenStep(first - self._boundary)
        device = self._device
        if device is not None and (
            now - self._marked_ns >= _MARK_NS or self._number - self._marked_step >= _MARK_STEPS
        ):
            self._marked_ns, self._marked_step = now, self._number
            seen.start = device.mark()
            if seen.start is not None and (device.marked or self._values.copied):  # no forward pass came to ask
                self._values.look()
        return seen

    def _see_mask(self, seen: SeenStep, mask: object) -> None:
        """Without a batch or a model, the mask alone says how long the sequences are."""
        if not seen.batches:
            shape = getattr(mask, "shape", None)
            self._note_given(
                seen, {"input_ids": TensorShape(shape) if shape is not None else mask, "attention_mask": mask}
            )

    def _note_given(self, seen: SeenStep, batch: Any) -> None:
        """A micro-batch that the loop gave."""
        is_readable = self._device is None or not self._device.is_capturing()
        if isinstance(batch, Mapping) and is_readable:
            trained, source = self._trained, self._trained.source
            if seen.kind is None and source is not None and source.measures:
                self._ask_source(seen, source, batch)
            seen.batches.append((trained, trained.take(batch, self._device, seen)))
            if seen.is_measured:
                seen.live_batches.append(batch)
            return
        seen.is_whole = False
        if is_readable:
            self.say(
                f"a batch of type {type(batch).__name__} cannot be read, so its FLOPs are not known: give a mapping as "
                "the model takes it",
                "batch type",
            )

    def _end(self, seen: SeenStep, step: int | None) -> None:
        """A step is over: it goes to the digest."""
        self._open = None
        trained = self._trained
        seen.number = self._number = self._messages.step = int(step) if step is not None else self._number + 1
        if seen.start is not None:
            self._mark_end(seen)
        now = _clock()
        seen.wall_ns, self._boundary = max(0, now - self._boundary), now  # another thread may have moved it
        if threading.get_ident() != self._thread:
            self._see_thread()
        if self._passes.is_used:
            self._passes.move_to(seen)
        if self._owes:
            seen.owes = self._owes
        for model in self._models:
            model.open_calls = 0
        if seen.is_measured:
            self._stop_measuring(seen)
        source = trained.source
        if seen.factor is None and source is not None and source.measures:
            seen.factor = source.factor(seen.kind or ())
        if not self._digester.has_begun:
            self._digester.begin(seen.number)
        self._is_ended = seen.values is None
        self._hand_over(seen)

    def _mark_end(self, seen: SeenStep) -> None:
        """Copies held values after the mark."""
        if self._device is not None and not self._device.is_capturing():
            seen.end = self._device.mark()
            self._values.hand_over(seen.end)

    def _hand_over(self, entry: DueRecord) -> None:
        entry.ended_ns = self._boundary
        device = self._device
        if device is not None and (entry.copies or entry.end is not None or entry.passes):
            device.waiting.append(entry)
            if entry.end is not None:
                device.marked.append(entry)
        else:
            entry.is_past = True
        entries = self._digester.entries
        if len(entries) == entries.maxlen:
            self._digester.drop_oldest()
        entries.append(entry)
        if self._messages.pending:
            self._messages.warn_pending()

    def _report(self, step: int | None, given: Sequence[object], skip_wandb: bool) -> None:
        """The record of steps that are over."""
        self._is_ended = self._owes_report = False
        entry = DueRecord()
        entry.number = int(step) if step is not None else self._number
        entry.values, entry.skip_wandb = self._values.read(given, entry), skip_wandb
        self._hand_over(entry)

    # --- Steps that are measured ------------------------------------------------------------------------------------

    def _ask_source(
        self, seen: SeenStep, source: FactorSource, batch: Mapping[str, Any], sizes: Hashable = None
    ) -> None:
        """Whether this step is to be measured; if batches of these sizes are not for a while, that is kept."""
        step, kind = self._number + 1, self._trained.classify(batch)
        seen.kind = kind
        if step not in source.settled.get(kind, ()) and source.wants(step, kind, self._frequency):
            self._start_measuring(seen, source)
        elif kind in source.settled and self._trained.is_told_by(sizes):
            source.keep_calm(sizes, kind)

    def _start_measuring(self, seen: SeenStep, source: FactorSource) -> None:
        """Before the first forward pass of a step that is to be measured."""
        if self._device is None or not self._device.is_capturing():
            source.start()
            seen.is_measured, seen.live_batches = True, []
            seen.measured_from = len(self._passes.passes)

    def _stop_measuring(self, seen: SeenStep) -> None:
        """The measured step is over: here, and only here, the device is waited for."""
        source = self._trained.source
        if source is None:
            return
        try:
            if seen.open_passes:  # one raised, and was measured too
                seen.is_measured = False
                source.cancel()
                return
            if self._device is not None:
                import torch

                self._values.collect()
                torch.cuda.synchronize()
                self._values.finish_copied()
            counts = count_measured(seen, self._messages.say)
            source.stop(seen.number, seen.kind or (), counts, seen.live_batches)
            self._trained.keep_absolute(seen.sizes)
        except Exception as error:
            self._fail("measuring", error)
        finally:
            seen.live_batches.clear()
            self._lose_since("measure", self._boundary)

    # --- `with step()`, loaders -------------------------------------------------------------------------------------

    @guarded
    def _enter(self, batch: Any, dataset: Any) -> None:
        self._is_inside = True
        self.begin_step(batch, dataset=dataset)

    @guarded
    def _leave(self, has_failed: bool) -> None:
        self._is_inside = False
        if has_failed:
            self._abandon()
            self._lose_since("other", self._boundary)
            return
        seen = self._open or self._begin()
        self._owes_report = seen.values is None
        self._end(seen, seen.number if seen.number >= 0 else None)

    @guarded
    def _fill(self, step: int | None, given: Sequence[object], skip_wandb: bool) -> None:
        """Values of the step that is under way; what is given later adds to it."""
        seen = self._open or self._begin()
        if step is not None:
            seen.number = int(step)
        before = seen.values if seen.values is not None else (None,) * len(given)
        found = self._values.read(given, seen)
        seen.values = [old if new is None else new for new, old in zip(found, before, strict=True)]
        seen.skip_wandb = seen.skip_wandb or skip_wandb

    def _abandon(self) -> None:
        """The step raised: it is no step."""
        seen, self._open = self._open, None
        if seen is not None and seen.is_measured and self._trained.source is not None:
            self._trained.source.cancel()

    def _settle_report(self) -> None:
        """A block's step that nobody reported is reported without values."""
        if self._owes_report:
            self._is_ended = self._owes_report = False
            self._digester.add(make_plain_record(self._number, self._boundary))

    @guarded
    def _see_batch(self, batch: object) -> None:
        self._watched.add(batch)

    @guarded
    def _see_inside(self, module: object) -> None:
        self._trained.see_inside(module)
        for other in self._models[1:]:
            other.seen = self._trained.seen
            other.bind()

    # --- Once, at the first step ------------------------------------------------------------------------------------

    def _start_up(self) -> None:
        """Bind the model, open log, source and side channel; each may fail by itself."""
        self._is_started = True
        worker = self._digester
        worker.rank, worker.world = find_rank()
        for part in (
            self._find_device,
            worker.open_log,
            self._bind,
            worker.open_source,
            worker.open_side,
            self._start_worker,
        ):
            try:
                part()
            except Exception as error:
                self._fail(part.__name__, error)

    def _bind(self) -> None:
        for model in self._models:
            model.bind()

    def _find_device(self) -> None:
        if self._device is None:
            self._device = self._digester.device = found = find_device()
            self._values.use(found)
            uuid = found.find_uuid() if found is not None else None
            if uuid is not None:
                self._digester.power = PowerMeter(uuid)

    def _start_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(
                target=_work, args=(weakref.ref(self), self._wake), name="flopcalc-monitor", daemon=True
            )
            self._worker.start()

    # --- Between steps -------------------------------------------------------------------------------------------

    @guarded
    def _catch_up(self) -> None:
        """Everything that the device is done with becomes metrics now, on the caller's time."""
        self._settle_report()
        self._values.poll()
        self._digester.digest(_CATCH_UP_S)
        self._messages.warn_pending()

    def _finish_steps(self) -> None:
        self._abandon()
        self._settle_report()
        self._values.finish(_CLOSE_S)
        self._digester.finish(_COUNT_S)

    def _stop_worker(self) -> None:
        """A thread that is still in torch when the interpreter ends would abort the process."""
        self._wake.set()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(_JOIN_S)

    def _drop_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    @guarded
    def _lose_since(self, cause: str, before: int) -> None:
        lost = max(0, _clock() - before)
        self._passes.lose(cause, before)
        self._boundary += lost
        self._digester.add(LostTime(cause, lost / 1e9))

    # --- When something goes wrong ----------------------------------------------------------------------------------

    def _see_thread(self) -> None:
        """A loop may move to another thread; threads that take turns are several loops."""
        self._thread = threading.get_ident()
        if self._thread in self._threads:
            self.say(
                "steps of several threads are counted as those of one loop: if they are several loops, give each a "
                "monitor of its own",
                "threads",
            )
        self._threads.add(self._thread)

    def _is_copy(self) -> bool:
        return self._pid != os.getpid()

    def _say_unknown(self, call: str, unknown: Mapping[str, object], known: Sequence[str]) -> None:
        """Arguments of the loop that do not exist: no reason to end a training."""
        for name in unknown:
            self.say(f"{call} has no argument {name!r}, left out.{format_nearest(name, known)}", f"{call} {name}"[:80])

    def _fail(self, where: str, error: BaseException) -> None:
        name = where.strip("_")
        self.say(
            f"the monitor failed in {name} and goes on without it: {type(error).__name__}: {error}", f"fail {name}"
        )


class StepContext:
    """`with monitor.step(batch) as step:` — one optimizer step; `step.log(loss=…)` adds values to its record."""

    def __init__(self, monitor: TrainingMonitor, batch: object, dataset: object) -> None:
        self._monitor = monitor
        self._batch = batch
        self._dataset = dataset

    def log(
        self,
        *,
        loss: object = None,
        grad_norm: object = None,
        learning_rate: object = None,
        epoch: object = None,
        step: int | None = None,
        skip_wandb: bool = False,
        **unknown: object,
    ) -> None:
        """Values for this step's record; tensors may be on the device. An unknown name is said and left out."""
        if unknown:
            self._monitor._say_unknown("step.log", unknown, ("loss", "grad_norm", "learning_rate", "epoch", "step"))
        self._monitor._fill(step, (epoch, loss, grad_norm, learning_rate), skip_wandb)

    def __enter__(self) -> StepContext:
        batch, self._batch = self._batch, None
        self._monitor._enter(batch, self._dataset)
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        self._monitor._leave(kind is not None)


def _work(reference: weakref.ref[TrainingMonitor], wake: threading.Event) -> None:
    """The worker: looks now and then, and ends with its monitor."""
    while not wake.wait(_POLL_S):
        monitor = reference()
        if monitor is None or monitor._is_off:
            return
        try:
            monitor._values.copy_handed()
            monitor._values.take_in()
            monitor._digester.digest(_WORK_S)
            monitor._digester.refresh_goodput()
            monitor._digester.refresh_power()
        except Exception as error:
            monitor._fail("worker", error)
        del monitor


def _switch_off_in_child() -> None:
    """The child of a fork has no part in the monitor's threads and files."""
    for monitor in _made:
        monitor._is_off = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_off_in_child)


def _make_idle() -> TrainingMonitor:
    """What a copy or a pickle of a monitor is: one that does nothing."""
    return TrainingMonitor.__new__(TrainingMonitor)


def _close_at_exit(reference: weakref.ref[TrainingMonitor]) -> None:
    monitor = reference()
    if monitor is not None:
        monitor.close()
