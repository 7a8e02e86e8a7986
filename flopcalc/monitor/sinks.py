"""Records in; a JSONL file, W&B, TensorBoard and MLflow out, each by a thread that training never waits for."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import re
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from flopcalc.monitor.keys import CORE, DATASET_PREFIX, rename

if TYPE_CHECKING:
    from flopcalc.monitor.settings import Settings

Record = Mapping[str, Any]
Say = Callable[[str], object]

LOG_NAME = "flopcalc.jsonl"
# A record that a sink refuses this often is dropped; the next one may be better.
ATTEMPTS = 5
LONGEST_RETRY_S = 60.0
# A queue of this many records is worked on before the next poll.
LONG_QUEUE = 500
# MLflow's own limit for one request, mlflow/utils/validation.py: MAX_METRICS_PER_BATCH.
MLFLOW_BATCH = 1000


class Sink:
    """One place that records go to; every method is called by one thread, and may raise or hang."""

    name: str
    install: str = ""  # what to install when open() lacks a library
    steps_only: bool = True  # "start", "event" and "end" records are for the log alone
    waits_for: tuple[type[BaseException], ...] = ()  # errors that pass with time: the record is never given up

    def open(self, say: Say) -> None:
        """Called before the first record, again when it raised."""

    def write(self, record: Record) -> None:
        """Take one record; when it raised, the same record comes again."""
        raise NotImplementedError

    def flush(self) -> None:
        """Bring what was taken to where others can read it."""

    def unsaved(self) -> int:
        """Records taken that flush() would still have to write, the one that failed last among them."""
        return 0

    def close(self) -> None:
        """The last call."""


class JsonlSink(Sink):
    """One JSON object a line, appended; a reader of the file sees whole lines up to the last save."""

    name = "jsonl"
    steps_only = False
    waits_for = (OSError,)  # a full disk: records wait in the queue

    def __init__(self, path: str | os.PathLike[str], save_every: int) -> None:
        self._path = os.path.abspath(path)  # the program may change its folder later
        self._save_every = save_every
        self._say: Say = _say_nothing
        self._fd: int | None = None
        self._lines: deque[bytes] = deque()  # not written yet
        self._sent_bytes = 0  # how much of the first of them is in the file
        self._start: bytes | None = None
        self._taken: Record | None = None
        self._said_gone = False

    def open(self, say: Say) -> None:
        self._say = say

    def write(self, record: Record) -> None:
        if record is not self._taken:  # else only the saving failed
            line = _encode(_plain(record)).encode() + b"\n"
            if record.get("type") == "start":
                self._start = line
            self._lines.append(line)
            self._taken = record
        if len(self._lines) >= self._save_every or record.get("type", "step") != "step":
            self._save()
        self._taken = None

    def flush(self) -> None:
        self._save()

    def unsaved(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _save(self) -> None:
        if not self._lines:
            return
        try:
            fd = self._reach_file()
            data, sent = b"".join(self._lines), self._sent_bytes
            try:
                while sent < len(data):
                    count = os.write(fd, memoryview(data)[sent:])
                    if count == 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    sent += count
            finally:
                # A line that went out in part is completed by the next save, not written twice.
                while self._lines and sent >= len(self._lines[0]):
                    sent -= len(self._lines.popleft())
                self._sent_bytes = sent
        except OSError as error:  # os.write does not say which file
            raise OSError(error.errno, error.strerror, self._path) from None

    def _reach_file(self) -> int:
        """The file under our path, open for appending at the start of a line; made again when it was deleted."""
        if self._fd is not None:
            if _is_at(self._fd, self._path):
                return self._fd
            self.close()
            self._sent_bytes = 0
            if self._start is not None and self._start not in self._lines:
                self._lines.appendleft(self._start)  # without it the new file would not say what run it is of
            if not self._said_gone:
                self._said_gone = True
                self._say(f"{self._path} was deleted or moved while the monitor wrote to it: begun again")
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_size:
                os.lseek(fd, -1, os.SEEK_END)
                if os.read(fd, 1) != b"\n":  # a process was killed while it wrote
                    os.write(fd, b"\n")
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        return fd


class WandbSink(Sink):
    """Numbers to the active W&B run; `init`: where there is none, to one of our own."""

    name = "wandb"
    install = "pip install wandb"

    def __init__(self, settings: Settings, output_dir: str, *, init: bool) -> None:
        self._settings = settings
        self._output_dir = output_dir
        self._init = init
        (self._axis,) = rename({"global_step": 0}, settings.key_style)
        self._own: Any = None
        self._run: Any = None
        self._known: set[str] = set()
        self._say: Say = _say_nothing
        self._said_gone = False

    def open(self, say: Say) -> None:
        self._say = say
        if not self._init:
            return
        wandb: Any = importlib.import_module("wandb")
        if wandb.run is not None:
            return
        os.makedirs(self._output_dir, exist_ok=True)
        settings = self._settings
        self._own = wandb.init(
            project=settings.wandb_project, entity=settings.wandb_entity, name=settings.wandb_name,
            mode=settings.wandb_mode, dir=self._output_dir,
        )  # fmt: skip

    def write(self, record: Record) -> None:
        run = _active_wandb_run()
        if run is None:
            if self._init and not self._said_gone:  # else W&B was not asked for, only a run that is active anyway
                self._said_gone = True
                self._say("the W&B run was finished before the monitor was closed: it does not get the later records")
            return
        settings = self._settings
        numbers = _numbers(record)
        if settings.wandb_reduced_logging:
            numbers = {key: value for key, value in numbers.items() if key in CORE}
        if not settings.wandb_log_dataset_metrics:
            numbers = {key: value for key, value in numbers.items() if not key.startswith(DATASET_PREFIX)}
        numbers = rename(numbers, settings.key_style)
        # No step=: W&B refuses steps that run backwards, so ours would fight the user's own. An x-axis for exactly our
        # keys, not for training/*, under which the user may log without global_step.
        axis = self._axis
        if run is not self._run:
            run.define_metric(axis)
            self._run, self._known = run, {axis}
        for key in numbers.keys() - self._known:
            if "*" not in key:  # a pattern to W&B
                run.define_metric(key, step_metric=axis)
            self._known.add(key)
        if numbers:
            run.log(numbers)

    def close(self) -> None:
        if self._own is not None and self._own is _active_wandb_run():
            self._own.finish()


class TensorboardSink(Sink):
    """Numbers to an event file, by torch's writer or tensorboardX."""

    name = "tensorboard"
    install = "pip install tensorboard"

    def __init__(self, settings: Settings, output_dir: str) -> None:
        self._folder = os.path.abspath(settings.tensorboard_dir or os.path.join(output_dir, "tensorboard"))
        self._style = settings.key_style
        self._writer: Any = None

    def open(self, say: Say) -> None:  # noqa: ARG002
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            module = importlib.import_module("tensorboardX")
        self._writer = module.SummaryWriter(self._folder, flush_secs=30)

    def write(self, record: Record) -> None:
        numbers = _numbers(record)
        step = numbers.pop("global_step", None)
        for key, value in rename(numbers, self._style).items():
            self._writer.add_scalar(key, value, step, walltime=record.get("time"))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MlflowSink(Sink):
    """Numbers to the active MLflow run; where there is none, to one of our own.

    By run id through a client: MLflow's `active_run` and `log_metrics` hold for one thread, and ours is another.
    """

    name = "mlflow"
    install = "pip install mlflow"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._run_id: str | None = None
        self._own = False
        self._client: Any = None
        self._metric: Any = None

    def open(self, say: Say) -> None:  # noqa: ARG002
        mlflow: Any = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        # Of any thread; releases without this function have one active run for all of them.
        fluent = importlib.import_module("mlflow.tracking.fluent")
        run = getattr(fluent, "_get_latest_active_run", mlflow.active_run)()
        self._run_id = run.info.run_id if run is not None else os.environ.get("MLFLOW_RUN_ID")
        if self._run_id is not None:
            self._client = mlflow.MlflowClient()
            return
        self._client = mlflow.MlflowClient(tracking_uri=self._settings.mlflow_tracking_uri)
        self._run_id = self._client.create_run(self._find_experiment()).info.run_id
        self._own = True

    def write(self, record: Record) -> None:
        numbers = _numbers(record)
        step = int(numbers.pop("global_step", 0))
        time_ms = int(record.get("time", time.time()) * 1000)
        metrics = [
            self._metric(_mlflow_key(key), value, time_ms, step)
            for key, value in rename(numbers, self._settings.key_style).items()
        ]
        for start in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MLFLOW_BATCH], synchronous=True)

    def close(self) -> None:
        if self._own:
            self._client.set_terminated(self._run_id)

    def _find_experiment(self) -> str:
        """The id of the experiment in the settings, else of MLflow's own variables, else of its default."""
        name = self._settings.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(name))


def make_sinks(
    settings: Settings, output_dir: str | os.PathLike[str], log_file: str | os.PathLike[str] | None = None
) -> list[Sink]:
    """The sinks of the settings, none of them opened; a log file that was asked for by name is always among them."""
    folder = os.path.abspath(output_dir)
    names = ("jsonl", "wandb") if settings.sinks is None else settings.sinks
    if log_file is not None and "jsonl" not in names:
        names = ("jsonl", *names)
    makers: dict[str, Callable[[], Sink]] = {
        "jsonl": lambda: JsonlSink(log_file or os.path.join(folder, LOG_NAME), settings.save_every),
        "wandb": lambda: WandbSink(settings, folder, init=settings.sinks is not None),
        "tensorboard": lambda: TensorboardSink(settings, folder),
        "mlflow": lambda: MlflowSink(settings),
    }
    return [makers[name]() for name in names]


class Outbox:
    """Hands records to sinks. Nothing here raises, and only flush and close wait, for as long as they are told."""

    def __init__(
        self, sinks: Sequence[Sink], say: Say, *, limit: int = 10_000, poll_s: float = 1.0, retry_s: float = 1.0
    ) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._lanes = [_Lane(sink, say, limit, poll_s, retry_s) for sink in sinks]

    def put(self, record: Record, *, skip: Collection[str] = ()) -> None:
        """Queue a record, which nobody changes after this, for every sink but those named in `skip`."""
        if self._closed or os.getpid() != self._pid:  # a forked child has our queues, but no threads
            return
        for lane in self._lanes:
            if lane.sink.name not in skip:
                lane.put(record)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Whether nothing waits any more to be written, after at most that long."""
        if self._closed or os.getpid() != self._pid:
            return True
        deadline_s = time.monotonic() + timeout_s
        tickets = [(lane, lane.ask()) for lane in self._lanes]
        written = [lane.wait(ticket, deadline_s) for lane, ticket in tickets]
        return all(written)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush and end; a sink that is not ready by then is left behind with its thread. Whether all was written."""
        if self._closed or os.getpid() != self._pid:
            return True
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.ask(closing=True)
        written = [lane.end(deadline_s) for lane in self._lanes]
        return all(written)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what another process unpickles, has no sinks: two writers would write everything twice."""
        return Outbox, ((), _say_nothing)


class _Lane:
    """One sink, its queue and its thread. The thread looks about once a second; a record does not wake it."""

    def __init__(self, sink: Sink, say: Say, limit: int, poll_s: float, retry_s: float) -> None:
        self.sink = sink
        self._say_to = say
        self._limit, self._poll_s, self._retry_s = limit, poll_s, retry_s
        self._long = min(LONG_QUEUE, max(1, limit // 2))
        # Reentrant: a signal handler may close the monitor while the same thread is inside put.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Under the lock:
        self._queue: deque[Record] = deque(maxlen=limit)
        self._current: Record | None = None  # with the sink; counts as queued
        self._asked = self._done = 0  # flushes
        self._closing = self._abandoned = self._dead = False
        self._lost = 0
        # Of the thread alone:
        self._opened = False
        self._tried = 0  # the last flush asked for that was begun
        self._attempts = 0  # of the current record
        self._failures = 0  # in a row
        self._flush_failed = False  # the last of them was no record's
        self._said_recovered = False
        self._lost_said = 0
        # Of whoever is first:
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"flopcalc-{sink.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._dead = True
            self._say(f"sink {sink.name} is left out: {error}")

    def put(self, record: Record) -> None:
        if self._dead or (self.sink.steps_only and record.get("type", "step") != "step"):
            return
        with self._lock:
            full = len(self._queue) == self._limit
            self._lost += full  # the deque drops its oldest
            self._queue.append(record)
            if len(self._queue) == self._long:
                self._changed.notify_all()
        if full and not self._warned:
            self._warned = True
            self._say(
                f"sink {self.sink.name} does not keep up: {self._limit} records wait for it, and the oldest are dropped"
            )

    def ask(self, *, closing: bool = False) -> int:
        """Ask the thread to write everything now; the number to wait for."""
        with self._lock:
            self._closing = self._closing or closing
            self._asked += 1
            self._changed.notify_all()
            return self._asked

    def wait(self, ticket: int, deadline_s: float) -> bool:
        with self._lock:
            return self._changed.wait_for(
                lambda: self._done >= ticket or self._dead, max(0.0, deadline_s - time.monotonic())
            )

    def end(self, deadline_s: float) -> bool:
        """After ask(closing=True): wait for the thread, then leave it. Whether it wrote all that it was given."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            late = self._thread.is_alive()
            if late:
                self._abandoned = True
                if self._done < self._asked:  # else only the sink's own close() takes long
                    self._lost += len(self._queue) + max(self._current is not None, self.sink.unsaved())
                self._queue.clear()
                self._changed.notify_all()
            unsaid = self._lost - self._lost_said
        if unsaid:
            self._say(f"sink {self.sink.name}: {self._lost} records were not written")
        return not late and not self._lost

    def _run(self) -> None:
        while True:
            with self._lock:
                # After a failure only a new request cuts the waiting short, not a long queue.
                if self._failures:
                    self._changed.wait_for(lambda: self._asked != self._tried or self._abandoned, self._pause_s())
                else:
                    self._changed.wait_for(
                        lambda: len(self._queue) >= self._long or self._asked != self._tried or self._abandoned,
                        self._poll_s,
                    )
                if self._abandoned:
                    break
                self._tried = self._asked
            try:
                worked = self._drain()
                if self._done < self._tried and self._opened:
                    self.sink.flush()
                    worked = worked or self._flush_failed
            except BaseException as error:  # SystemExit of a library, too, ends with this record
                self._fail(error)
                if self._dead:
                    return
                continue
            if worked:  # an empty queue proves nothing
                self._failures = 0
                self._flush_failed = False
                self._say_recovered()
            with self._lock:
                self._done = self._tried
                self._changed.notify_all()
                if self._closing and not self._queue:
                    break
        if self._opened:
            try:
                self.sink.close()
            except BaseException as error:
                self._say(f"sink {self.sink.name} did not close: {_describe(error)}")

    def _drain(self) -> bool:
        """Write what is queued now, not what comes meanwhile, so that a flush ends. Whether there was any."""
        worked = False
        for _ in range(len(self._queue) + (self._current is not None)):
            with self._lock:
                if self._abandoned:
                    break
                if self._current is None:
                    self._current, self._attempts = self._queue.popleft(), 0
                record = self._current
            if not self._opened:
                self.sink.open(self._say)
                self._opened = True
            self.sink.write(record)
            if not self.sink.unsaved():
                self._failures = 0
            worked = True
            with self._lock:
                self._current = None
        return worked

    def _fail(self, error: BaseException) -> None:
        sink = self.sink
        if not self._opened and isinstance(error, ImportError):
            with self._lock:
                self._dead = True
                self._current = None
                self._queue.clear()
                self._changed.notify_all()
            self._say(f"sink {sink.name} is left out: {error}; {sink.install}")
            return
        self._failures += 1
        self._attempts += 1
        self._flush_failed = self._current is None
        if self._attempts >= ATTEMPTS and not isinstance(error, sink.waits_for):
            with self._lock:
                self._lost += self._current is not None
                self._current = None
        if not self._warned:
            self._warned = True
            self._say(
                f"sink {sink.name}: {_describe(error)}; training goes on, up to {self._limit} records are kept and "
                "tried again"
            )

    def _say_recovered(self) -> None:
        if self._warned and not self._said_recovered:
            self._said_recovered = True
            self._lost_said = self._lost
            self._say(f"sink {self.sink.name} works again, {self._lost} records lost")

    def _pause_s(self) -> float:
        """Twice as long after each failure; not while someone waits for the end."""
        doublings = 0 if self._closing else min(self._failures - 1, 30)
        return float(min(self._retry_s * 2**doublings, LONGEST_RETRY_S))

    def _say(self, message: str) -> None:
        with contextlib.suppress(Exception):  # warnings turned into errors: there is nobody left to tell
            self._say_to(message)


def _say_nothing(message: str) -> None:
    """For an outbox without sinks."""


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _active_wandb_run() -> Any:
    """The run that wandb.log would write to; W&B is not imported for it."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _is_at(fd: int, path: str) -> bool:
    """Whether the open file is still the one under this path."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(os.fstat(fd), found)


_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: making one takes as long as a record
_AS_IT_IS = (str, int, bool, type(None))


def _plain(value: Any) -> Any:
    """The value as JSON knows it: null where a number is not finite, a text where it is no number."""
    kind = type(value)
    if kind is float:  # most of them
        return value if math.isfinite(value) else None
    if kind is dict:
        return {str(key): each if type(each) in _AS_IT_IS else _plain(each) for key, each in value.items()}
    if kind is int or value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in value]
    return str(value)


def _numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record as services take them; the time is theirs to keep."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if key == "time" or isinstance(value, bool) or not isinstance(value, Real):
            continue
        number = float(value)  # FLOPs of one step may pass 2^63, which no service stores as an int
        if math.isfinite(number):
            numbers[key] = int(number) if key == "global_step" else number
    return numbers


def _mlflow_key(key: str) -> str:
    """A name that MLflow takes: its characters, no empty or dotted part, at most 250 of them."""
    parts = re.sub(r"[^\w./ :-]+", "_", key).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:250] or "_"
