"""TrainingMonitor: a training loop's steps go in, on the hot path only as time stamps and shapes; metrics come out."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from flopcalc.core.model.live import strip
from flopcalc.errors import FlopcalcError
from flopcalc.monitor.batch import (
    Copies,
    Intake,
    Shape,
    Snapshot,
    bind_live,
    find_whole,
    is_tensor,
    name_arguments,
)
from flopcalc.monitor.digest import VALUES, Digester, NoteEntry, ReportEntry, StepEntry, find_kind, make_plain_report
from flopcalc.monitor.hooks import Caller, DtypeHook, Running, StepContext, Watched
from flopcalc.monitor.keys import CORE
from flopcalc.monitor.lane import STEPS, Lane, RunEntry, keep
from flopcalc.monitor.modes import make_source
from flopcalc.monitor.place import (
    find_dtype,
    find_known_device,
    find_layout,
    find_peak,
    find_rank,
    guess_dtype,
    is_capturing,
)
from flopcalc.monitor.settings import DEFAULT_FREQ, Settings, load_settings
from flopcalc.monitor.timing import Flight, Marks

_POLL_S = 1.0  # the worker looks this often
_CLOSE_S = 5.0  # close waits no longer for the device, nor for a sink
_clock: Callable[[], int] = time.perf_counter_ns
# Before all atexit hooks, where Python has that: a tracker's own hook would have ended its connection by then.
_at_exit: Callable[..., Any] = getattr(threading, "_register_atexit", atexit.register)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(method: _Method) -> _Method:
    """After construction nothing raises: an error inside becomes one warning, and training goes on."""

    @wraps(method)
    def run(self: TrainingMonitor, *args: Any, **kwargs: Any) -> Any:
        if self._is_off or os.getpid() != self._pid:  # closed, a copy, or the child of a fork
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._fail(method.__name__, error)
            return None

    return run  # type: ignore[return-value]


class _Open:
    """The step that is under way."""

    __slots__ = (
        "batches", "data_ns", "dataset", "is_given", "is_measured", "kwargs", "seen", "sizes", "snapshots", "start",
        "waiting",
    )  # fmt: skip

    def __init__(self, data_ns: int, start: Any) -> None:
        self.data_ns = data_ns
        self.start = start
        self.seen = 0  # micro-batches, those that could not be read among them
        self.snapshots: list[Snapshot | None] = []
        self.sizes: list[Hashable] = []  # of its micro-batches, where the model has no formula
        self.waiting: list[Any] = []
        self.batches: list[Mapping[str, Any]] = []  # only of a step that is measured
        self.dataset: str | Sequence[str] | None = None
        self.kwargs: Mapping[str, Any] | None = None  # of its last forward pass, while the step is looked at
        self.is_given = False  # the loop gave the batch: forward passes are not read
        self.is_measured = False

    def get_sizes(self) -> Hashable:
        """All sizes of the step; empty where some are not known."""
        return tuple(self.sizes) if len(self.sizes) == self.seen and all(self.sizes) else ()


class _Quick:
    """Has what every step needs at hand, not in the long dict of the monitor's attributes."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running = Running()


class TrainingMonitor(_Quick):
    """MFU and its like of a training loop. It cannot raise, wait for the device, or change a result.

    `model` is the live model (its forward passes are then seen), or what `flopcalc.bind` takes or returns
    (then batches come by `step(batch)`). `config` is a mapping or a YAML, TOML or JSON file. Only a bad config raises.
    """

    _is_off = True  # of a copy, until __init__ has run
    _pid = -1

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        config: Mapping[str, Any] | str | os.PathLike[str] | Settings | None = None,
        log_file: str | os.PathLike[str] | None = None,
        flops_profile_freq: int = DEFAULT_FREQ,
        *,
        model: Any = None,
    ) -> None:
        super().__init__()
        self.settings, problems = load_settings(config, flops_profile_freq)
        self.output_dir = os.fspath(output_dir)
        log_path = os.fspath(log_file) if log_file is not None else None
        try:
            self._set_up(log_path, problems, model)
        except Exception as error:
            self._is_off, self._pid = True, -1  # as a copy
            _warn(f"the monitor could not be made, and is off: {type(error).__name__}: {error}")

    def _set_up(self, log_path: str | None, problems: Sequence[str], model: Any) -> None:
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._is_off = False
        self._said: set[str] = set()
        self._to_warn: deque[str] = deque(maxlen=100)
        self._wake = threading.Event()
        self._worker: threading.Thread | None = None
        self._marks = Marks()
        self._flight = Flight(self._marks)
        self._copies = Copies() if self._marks.are_real else None
        # Threads of sinks hold on to it, and must not hold the monitor and its model.
        self._say_weakly = _WeakSay(self)
        self._digester = Digester(self.settings, self.output_dir, log_path, self._say_weakly, lambda: _clock())
        self._digester.copies = self._copies
        self._boundary = _clock()  # where the time of the next step begins
        self._open: _Open | None = None
        self._lane_kwargs: Mapping[str, Any] | None = None  # what the last forward pass was given, by name alone
        self._keeps_tensors = True  # until a loop writes into one that it had given
        self._is_inside = False  # of a `with step()`
        self._held: tuple[int | None, dict[str, Any], bool] | None = None  # a block's record, until its end
        self._is_ended = False  # a step is over and not reported yet
        self._owes_report = False  # and nobody else will
        self._latest: Any = None  # a watched loader's last batch
        self._runs_ahead = False  # that loader reads ahead of the model
        self._number = 0
        self._frequency = self.settings.frequency(None)
        self._is_started = self._has_begun_log = False
        self._logged_before = 0  # the last step that an earlier run wrote into the same log
        self._pipeline = 1
        self._dtype: str | None = self.settings.dtype
        self._model: Any = None
        self._given: Any = None
        self._hooks: list[Any] = []
        for problem in problems:
            self.say(problem)
        if model is not None:
            self.attach(model)
        _at_exit(_close_at_exit, weakref.ref(self))
        weakref.finalize(self, _finish_dropped, self._digester, self._hooks, self._pid).atexit = False

    # --- What a loop calls ------------------------------------------------------------------------------------------

    @_guarded
    def attach(self, model: Any) -> None:
        """See every training forward pass of this module, whatever is wrapped around the model or inside it."""
        self._leave_lane()
        self._is_started = self._is_started and model is self._model
        if not hasattr(model, "register_forward_pre_hook"):
            self._given = model
        elif model is not self._model:
            self._drop_hooks()
            if self._model is not None:  # what was measured or seen of another model says nothing of this one
                self._catch_up()
                self._digester.forget_model()
                self._dtype = self.settings.dtype
            self._model = model
            self._hang_hooks(model)

    @_guarded
    def begin_step(self, batch: Any = None, *, dataset: str | Sequence[str] | None = None) -> None:
        """A step begins; without this call its first training forward pass begins it.

        `batch` is what the model is given, or a list of micro-batches: best while it is on the host.
        """
        self._leave_lane()
        self._settle_report()
        if self._open is not None and self._open.is_given:  # begun, and never ended: the loop gave it up
            self._abandon()
        opened = self._begin()
        opened.dataset = dataset
        if batch is None:
            return
        batches = batch if isinstance(batch, (list, tuple)) else [batch]
        if self._model is not None and not all(isinstance(each, Mapping) for each in batches):
            return  # what the model is given can be read
        opened.is_given = True
        for each in batches:
            self._note(opened, each)

    @_guarded
    def end_step(self, step: int | None = None) -> None:
        """An optimizer step is over."""
        self._end(step)

    @_guarded
    def report(
        self,
        step: int | None = None,
        *,
        epoch: Any = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        skip_wandb: bool = False,
    ) -> None:
        """Send a record: rates over the steps since the last one, and these values; tensors may be on the device."""
        self._leave_lane()
        self._send(self._make_record(step, epoch, loss, grad_norm, learning_rate), skip_wandb, is_late=True)

    def step(self, batch: Any = None, *, dataset: str | Sequence[str] | None = None) -> StepContext:
        """One optimizer step as a block."""
        return StepContext(self, batch, dataset)

    def log_step(
        self,
        step: int,
        epoch: Any,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        attention_mask: Any = None,
        skip_wandb: bool = False,
    ) -> None:
        """An optimizer step is over, and this is its record. Inside or after `with monitor.step()` only the record."""
        running = self._running
        # Here and in hooks.py everything is written out: a call costs more than what it would do.
        if running.calls and not running.is_on and not running.is_broken and type(step) is int:
            try:
                now = running.clock()
                if type(epoch) is not running.epoch_type:
                    epoch = keep(epoch)
                if type(loss) is not running.loss_type:
                    loss = keep(loss)
                if type(grad_norm) is not running.norm_type:
                    grad_norm = keep(grad_norm)
                if type(learning_rate) is not running.rate_type:
                    learning_rate = keep(learning_rate)
                running.rows.append((
                    step, running.begun, now, running.calls, skip_wandb, epoch, loss, grad_norm, learning_rate,
                ))  # fmt: skip
                running.calls = 0
                if step >= running.until or now > running.until_ns:
                    self._leave_lane()
                    running.lane, running.count = None, -1  # also where the child of a fork trains
                return
            except Exception as error:
                self._fail("log_step", error)
                self._leave_lane()
        self._log_step(step, epoch, loss, grad_norm, learning_rate, attention_mask, skip_wandb)

    @_guarded
    def _log_step(
        self, step: int, epoch: Any, loss: Any, grad_norm: Any, learning_rate: Any, mask: Any, skip_wandb: bool
    ) -> None:
        """The long way."""
        record = self._make_record(step, epoch, loss, grad_norm, learning_rate)
        if self._is_inside:
            self._see_mask(self._open, mask)
            self._held = (step, record, skip_wandb)
            return
        is_late = self._is_ended
        opened = None
        if not is_late:
            opened = self._begin()
            self._see_mask(opened, mask)
            self._end(step)
        self._send(record, skip_wandb, is_late)
        if opened is not None and (
            self._keeps_tensors or not any(map(is_tensor, (epoch, loss, grad_norm, learning_rate)))
        ):
            self._enter_lane(opened, epoch, loss, grad_norm, learning_rate)

    @_guarded
    def mark_lost(self, cause: str) -> None:
        """The time since the last step or mark went into `cause` (eval, checkpoint, …): it is in no step's time."""
        self._leave_lane()
        self._lose_since(cause, self._boundary)

    @contextmanager
    def pause(self, cause: str) -> Iterator[None]:
        """Time inside is lost to `cause`, and in no step's time."""
        before = _clock()
        try:
            yield
        finally:
            self._lose_since(cause, before)

    @_guarded
    def log_datasets(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Metrics per dataset, as {"coco": {"loss": 1.2}}; sent every dataset_metrics_every steps."""
        self._leave_lane()
        found = {
            str(name): {str(key): self._read_now(value) for key, value in each.items()} for name, each in values.items()
        }
        self._digester.entries.append(NoteEntry(lambda: self._digester.meter.add_datasets(found)))

    @_guarded
    def set_phase(self, name: str) -> None:
        """warmup, main or finetune: how often modes measure from now on."""
        self._leave_lane()
        self._frequency = self.settings.frequency(name)

    def watch(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The same batches; each is read while it is still on the host, before the loop moves it."""
        return Watched(loader, self._see_batch)

    def metrics(self) -> dict[str, Any]:
        """The last values; what is not known is NaN, and a warning said why."""
        if self._is_copy():
            return dict.fromkeys(CORE, math.nan)
        self._catch_up()
        return dict(self._digester.metrics)

    def say(self, message: str, once: str | None = None) -> None:
        """One warning, however often it happens; it also stands in the log."""
        try:
            key = once if once is not None else message
            if self._is_copy() or key in self._said:
                return
            self._said.add(key)
            self._to_warn.append(message)
            lane = self._lane
            number = lane.rows[-1][0] if lane is not None and lane.rows else self._number
            event = {"type": "event", "message": message, "global_step": number, "time": time.time()}
            if self._digester.outbox is not None:
                self._digester.outbox.put(event)
            self._warn_pending()
        except Exception:
            return

    def close(self) -> None:
        """Send what is left, and let go of the model. Safe to call twice."""
        if self._is_copy() or self._is_off:
            return
        digester = self._digester
        for part in (
            self._finish_steps, digester.finish_side, lambda: digester.finish_log(_CLOSE_S), self._let_go,
            self._warn_pending,
        ):  # fmt: skip
            try:
                part()
            except Exception as error:
                self._fail("close", error)
        self._is_off = True

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _memo: dict[int, Any]) -> TrainingMonitor:
        return _make_idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_idle, ()

    # --- The hot path -----------------------------------------------------------------------------------------------

    @property
    def _lane(self) -> Lane | None:
        """Of steps that repeat the last one."""
        return self._running.lane

    def _enter_lane(self, opened: _Open, *values: Any) -> None:
        """Where the next step may be like this one, and there is nothing to read or to measure in it."""
        digester = self._digester
        first = opened.snapshots[0] if opened.snapshots else None
        kwargs, opened.kwargs = opened.kwargs, None
        if (
            first is None
            or not first.key
            or first.values
            or kwargs is None
            or opened.is_given
            or opened.is_measured
            or opened.dataset
        ):
            return
        if digester.intake is None or digester.source is None or any(each != first for each in opened.snapshots):
            return
        until = self._number + STEPS
        every = digester.source.period(first.kind, self._frequency)
        if every is None:
            return
        if every:
            until = min(until, (self._number // every + 1) * every - 1)
        if type(kwargs.get(first.key[0][0])) is not self._running.kind:  # no call would be found alike
            return
        if until > self._number and all(hasattr(kwargs.get(name), "shape") for name, _ in first.key):
            lane = digester.lane = Lane(kwargs, first, digester.intake, self._boundary)
            lane.factor = digester.source.factor(first.kind)
            lane.open(self._running, until, _clock, values)

    @_guarded
    def _leave_lane(self) -> None:
        """Hand over the steps that were only noted; a step that is under way goes on the long way."""
        running = self._running
        lane, running.lane, running.count = running.lane, None, -1
        calls, running.calls, running.rows = running.calls, 0, []
        self._digester.lane = None
        if lane is None:
            return
        self._boundary = lane.end
        if lane.rows:
            self._number = lane.rows[-1][0]
            entry = RunEntry(lane, self._copies, _clock())
            if entry.is_overwritten:
                self._keeps_tensors = False
                self.say(
                    "a tensor given to log_step was written into afterwards, or cannot be read any more: a few of its "
                    "values are not known"
                )
            if entry.waiting:
                entry.end = self._marks.mark()
            self._is_ended = False
            self._digester.entries.append(entry)
            self._flight.add(entry)
            self._flight.poll()
            self._warn_pending()
        if calls:
            self._open = _Open(running.begun - self._boundary, None)
            self._open.seen = calls
            self._open.snapshots = [lane.snapshot] * calls

    def _begin(self) -> _Open:
        if self._lane is not None:
            self._leave_lane()
        if self._open is None:
            if not self._is_started:
                self._start_up()
            self._is_ended = False
            self._open = _Open(_clock() - self._boundary, self._marks.mark())
        return self._open

    def _note(self, opened: _Open, batch: Any) -> None:
        """One micro-batch of the step."""
        digester = self._digester
        kind: Hashable = ()
        opened.seen += 1
        if not isinstance(batch, Mapping):
            self.say(
                f"a batch of type {type(batch).__name__} cannot be read, so its FLOPs are not known: give a mapping as "
                "the model takes it",
                "batch type",
            )
            return
        if digester.intake is not None:
            if self._is_later_stage(batch):
                opened.snapshots.append(None)
                return
            snapshot, waiting = digester.intake.take(batch, self._copies)
            opened.snapshots.append(snapshot)
            opened.waiting += waiting
            kind = snapshot.kind
        else:
            opened.sizes.append(tuple((name, each.shape) for name, each in batch.items() if hasattr(each, "shape")))
        source = digester.source
        if opened.seen == 1 and source is not None and source.wants(self._number + 1, kind, self._frequency):
            opened.is_measured = True
            source.start()
        if opened.is_measured:
            opened.batches.append(batch)

    @_guarded
    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> None:
        """The model's forward pass begins."""
        if self._copies is not None and is_capturing():
            return
        if self._open is None:
            self._settle_report()
        opened = self._begin()
        self._lane_kwargs = None if args or self._latest is not None else kwargs
        if opened.is_given:
            return
        batch = {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs
        watched, self._latest = self._latest, None
        if watched is not None and _are_alike(watched, batch):
            batch = watched
        if self._running.is_unended:
            self._forget_failed(opened)
        self._running.is_on = True
        self._note(opened, batch)

    def _forget_failed(self, opened: _Open) -> None:
        """The last forward pass raised, and the loop went on: it is no part of the step."""
        self._running.is_on = self._running.is_broken = False
        if not opened.seen:
            return
        opened.seen -= 1
        del opened.snapshots[opened.seen :], opened.sizes[opened.seen :], opened.batches[:]
        if opened.is_measured and self._digester.source is not None:
            opened.is_measured = False
            self._digester.source.cancel()

    @_guarded
    def _see_batch(self, batch: Any) -> None:
        self._leave_lane()
        if self._latest is not None and not self._runs_ahead:
            self._runs_ahead = True
            self.say(
                "a watched loader gave a second batch before the model ran on the first: which one it runs on cannot "
                "be told, so batches are read where the model gets them"
            )
        self._latest = batch if isinstance(batch, Mapping) and not self._runs_ahead else None

    @_guarded
    def _see_dtype(self, module: Any) -> None:
        self._dtype = find_dtype(module)
        self._bind()

    def _see_mask(self, opened: _Open | None, mask: Any) -> None:
        """Without a batch or a model, the mask alone says how long the sequences are."""
        if mask is not None and opened is not None and not opened.snapshots:
            shape = getattr(mask, "shape", None)
            self._note(opened, {"input_ids": Shape(shape) if shape is not None else mask, "attention_mask": mask})

    def _end(self, step: int | None) -> None:
        opened = self._begin()
        self._open = None
        opened.kwargs, self._lane_kwargs = self._lane_kwargs, None
        if self._running.is_unended:
            self._forget_failed(opened)
        number = self._number = int(step) if step is not None else self._number + 1
        end = self._marks.mark()
        now = _clock()
        entry = StepEntry(number, now - self._boundary, opened.data_ns, opened.start, end)
        self._boundary = now
        self._is_ended = True
        entry.waiting, entry.dataset, entry.intake = opened.waiting, opened.dataset, self._digester.intake
        entry.sizes = opened.get_sizes()
        if len(opened.snapshots) == opened.seen:  # else a part of the step is not known, and so the step is not
            entry.snapshots = opened.snapshots
        if opened.is_measured:
            entry.is_measured = True
            self._stop_measuring(number, opened)
        if self._digester.source is not None:
            entry.factor = self._digester.source.factor(entry.kind)
        if not self._has_begun_log:
            self._begin_log(number)
        self._digester.entries.append(entry)
        self._flight.add(entry)
        self._flight.poll()
        if self._to_warn:
            self._warn_pending()

    def _stop_measuring(self, number: int, opened: _Open) -> None:
        """The measured step is over: here, and only here, the device is waited for."""
        source = self._digester.source
        if source is None:
            return
        try:
            if self._copies is not None:
                import torch

                torch.cuda.synchronize()
            counts = self._digester.count_measured(opened.snapshots)
            source.stop(number, find_kind(opened.snapshots), counts, opened.batches)
            self._digester.keep_absolute(opened.get_sizes())
        except Exception as error:
            self._fail("measuring", error)
        finally:
            self._lose_since("measure", self._boundary)

    def _make_record(self, step: int | None, epoch: Any, loss: Any, grad_norm: Any, rate: Any) -> dict[str, Any]:
        """The loop's own values; made before the step's last mark, which then vouches for copies that are under way."""
        return {
            "global_step": int(step) if step is not None else None,
            "training/loss": self._read_later(loss),
            "training/lr": self._read_later(rate),
            "training/grad_norm": self._read_later(grad_norm),
            "training/epoch": self._read_later(epoch),
        }

    def _send(self, record: dict[str, Any], skip_wandb: bool, is_late: bool = False) -> None:
        self._is_ended = self._owes_report = False
        if record["global_step"] is None:
            record["global_step"] = self._number
        # Digested after its step; a mark of its own is needed only for copies that were queued after that step's.
        end = self._marks.mark() if is_late and any(is_tensor(value) for value in record.values()) else None
        entry = ReportEntry(record, ("wandb",) if skip_wandb else (), end, self._boundary)
        self._digester.entries.append(entry)
        self._flight.add(entry)

    def _read_now(self, value: Any) -> float:
        """A number that is on the host."""
        if is_tensor(value) and value.device.type != "cpu":
            self.say(f"a dataset's value on {value.device} is not read: give a number", "dataset value")
            return math.nan
        found = self._read_later(value)
        return float(found)

    def _read_later(self, value: Any) -> Any:
        """A number; of a tensor on the device a copy that will arrive."""
        if type(value) is float:
            return value
        if value is None:
            return math.nan
        try:
            if is_tensor(value):
                whole = find_whole(value)
                if whole is None:
                    raise ValueError("ranks would have to talk to know it; give .full_tensor()")
                if whole.is_cuda and self._copies is not None and not is_capturing():
                    return self._copies.take(whole)
                if whole.device.type != "cpu":
                    self.say(f"a value on {whole.device} is not read: that would stall the device", "value device")
                    return math.nan
                value = whole
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            self.say(f"a value given for the record is no number, and left out: {value!r:.60}: {error}", "value type")
            return math.nan

    # --- `with step()` ----------------------------------------------------------------------------------------------

    @_guarded
    def _enter(self, batch: Any, dataset: Any) -> None:
        self._is_inside = True
        self.begin_step(batch, dataset=dataset)

    @_guarded
    def _leave(self, has_failed: bool) -> None:
        self._is_inside = False
        held, self._held = self._held, None
        if has_failed:
            self._abandon()
            self._lose_since("other", self._boundary)
            return
        self._end(held[0] if held is not None else None)
        self._owes_report = held is None
        if held is not None:
            self._send(*held[1:])

    @_guarded
    def _hold(self, step: int | None, skip_wandb: bool, *values: Any) -> None:
        record = self._make_record(step, *values)
        if self._held is not None:  # what is given later adds to it
            before = self._held
            given = [key for key, value in zip(VALUES, values, strict=True) if value is not None]
            record = before[1] | {key: record[key] for key in given}
            step, skip_wandb = before[0] if step is None else step, before[2] or skip_wandb
            record["global_step"] = step
        self._held = (step, record, skip_wandb)

    def _abandon(self) -> None:
        """The step raised: it is no step."""
        opened, self._open = self._open, None
        self._running.is_on = self._running.is_broken = False
        if opened is not None and opened.is_measured and self._digester.source is not None:
            self._digester.source.cancel()

    def _settle_report(self) -> None:
        """A block's step that nobody reported is reported without values."""
        if self._owes_report:
            self._is_ended = self._owes_report = False
            entry = make_plain_report(self._number, self._boundary)
            self._digester.entries.append(entry)
            self._flight.add(entry)

    # --- Once, at the first step ------------------------------------------------------------------------------------

    def _hang_hooks(self, model: Any) -> None:
        inner = strip(model)
        self._running.watch(self, model, name_arguments(inner.forward))
        if Caller.fits(model):
            self._hooks.append(Caller(self._running, model))
        else:
            self._hooks.append(model.register_forward_pre_hook(self._running.see, with_kwargs=True))
            self._hooks.append(model.register_forward_hook(self._running.done))
        linear = next((each for each in inner.modules() if type(each).__name__.endswith("Linear")), None)
        if self._dtype is None and linear is not None and next(linear.parameters(recurse=False), None) is not None:
            hook = DtypeHook(self)
            hook.handle = linear.register_forward_pre_hook(hook)
            self._hooks.append(hook.handle)

    def _start_up(self) -> None:
        """Bind the model, open log, source and side channel; each may fail by itself."""
        self._is_started = True
        self._digester.rank, self._digester.world = find_rank()
        for part in (self._open_log, self._bind, self._open_source, self._digester.open_side, self._start_worker):
            try:
                part()
            except Exception as error:
                self._fail(part.__name__.strip("_"), error)

    def _open_log(self) -> None:
        self._logged_before = self._digester.open_log()

    def _bind(self) -> None:
        """The analytic count of the model as it stands; once more when the dtype of its products is seen."""
        digester = self._digester
        if self._dtype is not None:
            digester.meter.peak = find_peak(self.settings, self._model, self._dtype, self.say)
        model = self._given if self._given is not None else self._model
        if model is None:
            self._explain("no model was given: TrainingMonitor(…, model=model), or monitor.attach(model)")
            return
        tensor, context, self._pipeline = find_layout(self.settings, self._model, self.say)
        digester.shared = tensor * context
        device = find_known_device(self.settings) if self._dtype is not None else None
        try:
            estimator = bind_live(model, device, self._dtype)
        except FlopcalcError as error:
            self._explain(str(error))
            return
        digester.intake = Intake(estimator, context)
        digester.meter.convention = estimator.convention

    def _explain(self, reason: str) -> None:
        if self.settings.mode == "estimate" or self._model is None:
            self.say(f"FLOPs cannot be counted, so MFU is not known: {reason}", "no count")
        else:
            self.say(f"MFU is known only of steps as large as one that was measured: {reason}", "no count")

    def _is_later_stage(self, batch: Mapping[str, Any]) -> bool:
        """A pipeline's later stages are given activations: the first one counts for all."""
        if self._pipeline == 1:
            return False
        ids = batch.get("input_ids")
        return ids is None or len(getattr(ids, "shape", ())) != 2

    def _open_source(self) -> None:
        # One rank measures; the sums of all are scaled by its factor.
        settings = self.settings if self._digester.rank == 0 else replace(self.settings, mode="estimate")
        if self._digester.source is None:
            self._digester.source = make_source(settings, self._model, self._say_weakly)

    def _start_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(
                target=_work, args=(weakref.ref(self), self._wake), name="flopcalc-monitor", daemon=True
            )
            self._worker.start()

    def _begin_log(self, number: int) -> None:
        """At the end of the first step, when all is known that the log's first line tells."""
        self._has_begun_log = True
        digester = self._digester
        if math.isnan(digester.meter.peak.flops_per_s) and self._dtype is None:
            dtype = guess_dtype(self.settings, self._model, self.say)
            if dtype is not None:
                digester.meter.peak = find_peak(self.settings, self._model, dtype, self.say)
        if 1 < number <= self._logged_before:  # resumed before the last logged step: those are done again
            digester.meter.redone_until = self._logged_before
        digester.write_start()

    # --- Off the hot path -------------------------------------------------------------------------------------------

    @_guarded
    def _catch_up(self) -> None:
        """Everything that the device is done with becomes metrics now, on the caller's time."""
        self._leave_lane()
        self._settle_report()
        self._flight.poll(1_000_000)
        self._digester.digest()
        self._warn_pending()

    def _finish_steps(self) -> None:
        self._leave_lane()
        self._abandon()
        self._settle_report()
        deadline = time.monotonic() + _CLOSE_S
        while self._flight.poll(1_000_000) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._flight.give_up()
        self._digester.digest()

    def _let_go(self) -> None:
        self._wake.set()
        self._drop_hooks()
        self._digester.close_source()

    def _drop_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._running.let_go()

    @_guarded
    def _lose_since(self, cause: str, before: int) -> None:
        if self._lane is not None:
            self._leave_lane()  # what is lost comes after those steps
        now = _clock()
        self._boundary += now - before
        self._digester.entries.append(NoteEntry(lambda: self._digester.meter.lose(cause, (now - before) / 1e9)))

    # --- When something goes wrong ----------------------------------------------------------------------------------

    def _is_copy(self) -> bool:
        return self._pid != os.getpid()

    def _fail(self, where: str, error: BaseException) -> None:
        name = where.strip("_")
        self.say(
            f"the monitor failed in {name} and goes on without it: {type(error).__name__}: {error}", f"fail {name}"
        )

    def _warn_pending(self) -> None:
        """Filters of warnings belong to the thread that trains: what another one had to say waits for it."""
        if threading.get_ident() == self._thread:
            while self._to_warn:
                _warn(self._to_warn.popleft())


def _are_alike(watched: Mapping[str, Any], batch: Mapping[str, Any]) -> bool:
    """Whether the model is given the watched batch, not a part of it."""
    shapes = [
        (getattr(watched[name], "shape", None), getattr(batch[name], "shape", None))
        for name in watched.keys() & batch.keys()
    ]
    return all(ours == theirs for ours, theirs in shapes)


def _warn(message: str) -> None:
    """A warning, even where warnings are made errors: then it is printed instead."""
    try:
        warnings.warn(f"flopcalc: {message}", RuntimeWarning, stacklevel=2)
    except Exception:
        with suppress(Exception):
            print(f"flopcalc: {message}", file=sys.stderr)


def _work(reference: weakref.ref[TrainingMonitor], wake: threading.Event) -> None:
    """The worker: looks now and then, and ends with its monitor."""
    while not wake.wait(_POLL_S):
        monitor = reference()
        if monitor is None or monitor._is_off:
            return
        try:
            monitor._digester.digest()
        except Exception as error:
            monitor._fail("worker", error)
        del monitor


def _make_idle() -> TrainingMonitor:
    """What a copy or a pickle of a monitor is: one that does nothing."""
    monitor = TrainingMonitor.__new__(TrainingMonitor)
    _Quick.__init__(monitor)
    return monitor


class _WeakSay:
    """A monitor's `say`, without holding the monitor."""

    def __init__(self, monitor: TrainingMonitor) -> None:
        self._monitor = weakref.ref(monitor)

    def __call__(self, message: str, once: str | None = None) -> None:
        monitor = self._monitor()
        if monitor is not None:
            monitor.say(message, once)


def _finish_dropped(digester: Digester, hooks: list[Any], pid: int) -> None:
    """A monitor that nobody holds any more, and nobody closed: its log is finished, its hooks and sinks go."""
    if pid != os.getpid():
        return
    for handle in hooks:
        handle.remove()
    lane = digester.lane
    if lane is not None and lane.rows:
        with suppress(Exception):
            entry = RunEntry(lane, None, _clock())
            entry.is_ready = True
            digester.entries.append(entry)
    for part in (digester.digest, digester.finish_side, lambda: digester.finish_log(_CLOSE_S), digester.close_source):
        with suppress(Exception):
            part()


def _close_at_exit(reference: weakref.ref[TrainingMonitor]) -> None:
    monitor = reference()
    if monitor is not None:
        monitor.close()
