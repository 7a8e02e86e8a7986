"""Records in; each sink gets them from a queue and a thread of its own, for which training never waits."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from flopcalc.monitor.sinks.base import Record, Say, Sink, describe, say_nothing

# A record that a sink refuses this often is dropped; the next one may be better.
ATTEMPTS = 5
LONGEST_RETRY_S = 60.0
# A queue of this many records is worked on before the next poll.
LONG_QUEUE = 500
# What a sink has taken and not written is written after this long: a killed process loses no more.
LONGEST_UNSAVED_S = 2.0
# What the last moments of a training do not change: a folder or a link in a file's place, or no right to write there.
LASTING = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO)


class Outbox:
    """Hands records to sinks. Nothing here raises, and only flush and close wait, for no longer than their limit."""

    def __init__(
        self, sinks: Sequence[Sink], say: Say, *, limit: int = 10_000, poll_s: float = 1.0, retry_s: float = 1.0
    ) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._queues = [_Queue(sink, say, limit, poll_s, retry_s) for sink in sinks]

    def put(self, record: Record, *, skip: Collection[str] = ()) -> None:
        """Queue a record, which nobody changes after this, for every sink but those named in `skip`."""
        if self._closed or os.getpid() != self._pid:  # a forked child has our queues, but no threads
            return
        for queue in self._queues:
            if queue.sink.name not in skip:
                queue.put(record)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Whether nothing waits any more to be written, after at most that long."""
        if self._closed or os.getpid() != self._pid:
            return True
        deadline_s = time.monotonic() + timeout_s
        tickets = [(queue, queue.ask()) for queue in self._queues]
        written = [queue.wait(ticket, deadline_s) for queue, ticket in tickets]
        return all(written)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush and end; a sink that is not ready by then is left behind with its thread. Whether all was written."""
        if self._closed or os.getpid() != self._pid:
            return True
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        for queue in self._queues:
            queue.ask(closing=True)
        written = [queue.end(deadline_s) for queue in self._queues]
        return all(written)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what another process unpickles, has no sinks: two writers would write everything twice."""
        return Outbox, ((), say_nothing)


class _Queue:
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
        self._saved_s = time.monotonic()  # when the sink had nothing left to write
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
                if self._opened and (self._done < self._tried or self._is_overdue()):
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
                self._say(f"sink {self.sink.name} did not close: {describe(error)}")

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

    def _is_overdue(self) -> bool:
        now = time.monotonic()
        if not self.sink.unsaved():
            self._saved_s = now
        return now - self._saved_s >= LONGEST_UNSAVED_S

    def _fail(self, error: BaseException) -> None:
        sink = self.sink
        is_missing = not self._opened and isinstance(error, ImportError)
        if is_missing or (self._closing and getattr(error, "errno", None) in LASTING):
            with self._lock:
                self._lost += 0 if is_missing else len(self._queue) + max(self._current is not None, sink.unsaved())
                self._dead = True
                self._current = None
                self._queue.clear()
                self._changed.notify_all()
            self._say(
                f"sink {sink.name} is left out: {error}; {sink.install}"
                if is_missing
                else f"sink {sink.name}: {describe(error)}"
            )
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
                f"sink {sink.name}: {describe(error)}; training goes on, up to {self._limit} records are kept and "
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
        with contextlib.suppress(Exception):  # warnings are errors here, and nobody is left to read one
            self._say_to(message)
