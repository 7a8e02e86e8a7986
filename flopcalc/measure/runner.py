"""Jobs go in, one result per row comes out: each job in a process of its own, so that no failure touches another.

A job names a Python function and its rows. The function is called once in a fresh process and gives back a function
of one row; the parent then asks for row after row. A row that raises, runs out of memory, hangs or kills its process
becomes a failed result, and the next rows go on, in a new process where that is needed. Results stand in a journal
(one JSON line each, on disk before the next row begins), so the same call again runs only what is missing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import IO, Any, NamedTuple, TextIO

from flopcalc.errors import FlopcalcError, format_value

Json = dict[str, Any]
_RESTART = ("killed", "exit", "timeout")  # a start that ended so may go well the next time
_DETAIL_CHARACTERS = 500
_TAIL_LINES = 6
_POLL_S = 0.25
_END_S = 10.0  # a worker that was told to end gets this long before it is killed


class RunnerError(FlopcalcError):
    """A run that cannot start or go on: folder in use, other settings in its journal, disk full."""


class RowError(Exception):
    """Raised by a row's function when the row cannot be measured; its text is the whole detail."""


class Job(NamedTuple):
    """What one process does: `call` ('package.module:function') is given `args`, then row after row."""

    id: str
    call: str
    args: Json
    rows: Mapping[str, Any]  # row id -> its parameters (JSON), in order
    timeout_s: float = 120.0  # of one row
    start_timeout_s: float = 300.0  # of the call itself: imports, building a model
    expected_s: float = 0.0  # of the whole job, for the time left; 0: not known
    env: Mapping[str, str] = {}

    def key(self, row: str) -> str:
        """Changes when a row's meaning does, so that a journal's result is not taken for another question's."""
        text = json.dumps([self.call, self.args, self.rows[row]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Result(NamedTuple):
    """What became of one row."""

    job: str
    row: str
    key: str
    status: str  # ok, failed
    reason: str | None
    detail: str | None
    data: Any
    seconds: float

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


class Outcome(NamedTuple):
    """All results there are, in the order of the jobs; `stopped` if Ctrl-C ended the run before the last row."""

    results: tuple[Result, ...]
    stopped: bool
    ran: int  # rows that were run now, not found in the journal
    ran_jobs: frozenset[str]  # the jobs that these rows belong to


def make_command_job(id: str, argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Job:
    """A job of one row that runs a command; the last line of its output that is JSON is the result."""
    return Job(id, f"{__name__}:start_command", {}, {"run": {"argv": list(argv)}}, timeout_s, env=env or {})


def run_jobs(
    jobs: Sequence[Job],
    folder: str,
    *,
    identity: Json | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Run what the folder's journal lacks; `identity` (device, versions) must be the one the journal began with."""
    names = [job.id for job in jobs]
    if len(set(names)) != len(names):
        raise RunnerError(f"two jobs share an id: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    os.makedirs(folder, exist_ok=True)
    with _lock(folder), Journal(folder, identity or {}, fresh) as journal, _Interrupt() as interrupt:
        known = {(result.job, result.row): result for result in journal.results}
        found = {}
        for job in jobs:
            for row in job.rows:
                result = known.get((job.id, row))
                if result and result.key == job.key(row) and (result.is_ok or not retry_failed):
                    found[job.id, row] = result
        progress = progress or Progress(None)
        progress.begin(jobs, found)
        ran = 0
        ran_jobs = set()
        try:
            for job in jobs:
                pending = [row for row in job.rows if (job.id, row) not in found]
                for result in _run_job(job, pending, folder, interrupt, progress):
                    journal.append(result)
                    found[result.job, result.row] = result
                    ran += 1
                    ran_jobs.add(job.id)
                    progress.note(result)
                if interrupt.asked:
                    break
        finally:
            progress.end()
        ordered = tuple(found[job.id, row] for job in jobs for row in job.rows if (job.id, row) in found)
        return Outcome(ordered, len(ordered) < sum(len(job.rows) for job in jobs), ran, frozenset(ran_jobs))


def _run_job(job: Job, pending: list[str], folder: str, interrupt: _Interrupt, progress: Progress) -> Iterator[Result]:
    worker: _Worker | None = None
    try:
        for index, row in enumerate(pending):
            if interrupt.asked:
                return
            start = time.monotonic()
            if worker is None:
                progress.tick(job.id)
                worker = _Worker(job, folder)
                failure = worker.wait_ready(progress)
                tried = ""
                if failure is not None and failure[0] in _RESTART:
                    if interrupt.asked:
                        return
                    tried = ", tried twice"
                    worker = _Worker(job, folder)
                    failure = worker.wait_ready(progress)
                if failure is not None:
                    # The call itself fails, not a row: every row that is left would meet the same end.
                    reason, detail = failure
                    for each in pending[index:]:
                        yield _fail(job, each, reason, f"worker did not start{tried}: {detail}", start)
                    return
            answer = worker.run(job.rows[row], progress)
            if answer.get("status") == "ok":
                seconds = round(time.monotonic() - start, 3)
                yield Result(job.id, row, job.key(row), "ok", None, None, answer.get("data"), seconds)
            else:
                yield _fail(job, row, answer["reason"], answer["detail"], start)
            if answer.get("ends"):
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()


def _fail(job: Job, row: str, reason: str, detail: str, start: float) -> Result:
    return Result(job.id, row, job.key(row), "failed", reason, detail, None, round(time.monotonic() - start, 3))


# --- one worker process, seen from the parent -------------------------------------------------------------------------
class _Worker:
    """A spawned process in a session of its own: requests go to its stdin, answers come on a pipe of their own."""

    def __init__(self, job: Job, folder: str) -> None:
        self._timeout_s = job.timeout_s
        self._start_timeout_s = job.start_timeout_s
        logs = os.path.join(folder, "logs")
        os.makedirs(logs, exist_ok=True)
        self._log = os.path.join(logs, f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in job.id)}.log")
        reader, writer = os.pipe()
        # The child must find what the parent finds, also when the parent's path was changed by hand (pytest).
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            with open(self._log, "ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "flopcalc.measure.runner", str(writer)],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(writer,), start_new_session=True,
                    env={**os.environ, "PYTHONPATH": path, **job.env},
                )  # fmt: skip
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._answers = reader
        self._buffer = b""
        self._send({"call": job.call, "args": job.args})

    def wait_ready(self, progress: Progress) -> tuple[str, str] | None:
        """None when the worker is ready, else why it is not."""
        answer = self._receive(self._start_timeout_s, progress)
        if answer.get("status") == "ok":
            return None
        self.close()
        return answer["reason"], answer["detail"]

    def run(self, parameters: Any, progress: Progress) -> Json:
        self._send({"row": parameters})
        return self._receive(self._timeout_s, progress)

    def _send(self, request: Json) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: the answer says how
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, timeout_s: float, progress: Progress) -> Json:
        """The next answer; a death or a hang is an answer too, and ends the worker."""
        deadline = time.monotonic() + timeout_s
        has_ended = False
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], 0 if has_ended else _POLL_S)
            if ready:
                piece = os.read(self._answers, 1 << 16)
                self._buffer += piece
                if not piece:
                    return self._describe_death()
            elif has_ended:
                return self._describe_death()
            elif self._process.poll() is not None:
                has_ended = True  # once more round: an answer may still lie in the pipe
            elif time.monotonic() > deadline:
                self.kill()
                return {"reason": "timeout", "detail": f"no answer within {timeout_s:g} s", "ends": True}
            progress.tick()
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: Json = json.loads(line)
        return answer

    def _describe_death(self) -> Json:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        tail = self._read_tail()
        if code < 0:
            name = signal.Signals(-code).name if -code in {int(s) for s in signal.Signals} else str(-code)
            hint = " (the kernel's out-of-memory killer, or a person)" if -code == signal.SIGKILL else ""
            detail = f"process ended by {name}{hint}"
            return {"reason": "killed", "detail": f"{detail}{': ' + tail if tail else ''}", "ends": True}
        detail = f"process ended with code {code}"
        return {"reason": "exit", "detail": f"{detail}{': ' + tail if tail else ''}", "ends": True}

    def _read_tail(self) -> str:
        with suppress(OSError), open(self._log, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - 4096))
            lines = log.read().decode("utf-8", "replace").split("\n")
            return _shorten(" | ".join(line.strip() for line in lines if line.strip()).split(" | ")[-_TAIL_LINES:])
        return ""

    def kill(self) -> None:
        """End the whole group: what the worker started goes with it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let an idle worker end by itself, then end what is left of its group."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            self._process.wait()
            if self._answers >= 0:
                os.close(self._answers)
                self._answers = -1


def _shorten(lines: Sequence[str]) -> str:
    text = " | ".join(lines)
    return text if len(text) <= _DETAIL_CHARACTERS else "…" + text[-_DETAIL_CHARACTERS:]


# --- the worker process itself ----------------------------------------------------------------------------------------
class _Requests:
    """Reads the parent's requests; if the parent goes away in the middle of a row, the whole group ends."""

    def __init__(self) -> None:
        import queue

        self.is_busy = False
        self._queue: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._queue.put(json.loads(line))
        if self.is_busy and os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        self._queue.put(None)

    def next(self) -> Json | None:
        self.is_busy = False
        request = self._queue.get()
        self.is_busy = request is not None
        return request


def _serve(descriptor: int) -> int:
    os.set_inheritable(descriptor, False)  # a grandchild must not hold the pipe open
    _die_with_parent()
    with os.fdopen(descriptor, "w") as answers:

        def send(answer: Json) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        requests = _Requests()
        request = requests.next()
        if request is None:
            return 0
        try:
            measure = load_function(request["call"])(request["args"])
        except BaseException as error:
            send(_describe_error(error))
            raise
        send({"status": "ok"})
        while (request := requests.next()) is not None:
            answer = _answer(measure, request["row"])
            send(answer)
            if answer.get("ends"):
                return 0
    return 0


def _answer(measure: Callable[[Any], Any], parameters: Any) -> Json:
    try:
        return {"status": "ok", "data": measure(parameters)}
    except Exception as error:
        answer = _describe_error(error)
        error.__traceback__ = None  # it holds the failed row's tensors
    _free_memory()
    return answer


def _describe_error(error: BaseException) -> Json:
    import traceback

    text = " ".join(str(error).split())
    detail = text if isinstance(error, RowError) else f"{type(error).__name__}: {text}"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_oom = "OutOfMemoryError" in kinds or isinstance(error, MemoryError) or "can't allocate memory" in text
    if not isinstance(error, RowError):
        traceback.print_exception(error)  # into the job's log
    # After an error on the device itself, nothing more can be run in this process.
    ends = "AcceleratorError" in kinds or ("CUDA error" in text and not is_oom)
    reason = "oom" if is_oom else "exception"
    return {"status": "failed", "reason": reason, "detail": detail[:_DETAIL_CHARACTERS], "ends": ends}


def _free_memory() -> None:
    import gc

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(Exception):
            torch.cuda.empty_cache()


def _die_with_parent() -> None:
    """Linux: the kernel ends this process when its parent dies, however that dies."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def load_function(call: str) -> Callable[[Any], Any]:
    """'package.module:function' -> the function."""
    module, _, name = call.partition(":")
    function = getattr(import_module(module), name, None)
    if not callable(function):
        raise RunnerError(f"job function {format_value(call)} does not exist")
    return function  # type: ignore[no-any-return]


def start_command(_args: Json) -> Callable[[Json], Any]:
    """The function of a command job: run it in this process's group, take the last JSON line it prints."""

    def run(parameters: Json) -> Any:
        done = subprocess.run(parameters["argv"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
        lines = done.stdout.decode("utf-8", "replace").splitlines()
        sys.stdout.write("\n".join(lines) + "\n")
        if done.returncode:
            raise RowError(f"command ended with code {done.returncode}: {_shorten(lines[-_TAIL_LINES:])}")
        for line in reversed(lines):
            with suppress(ValueError):
                return json.loads(line)
        raise RowError(f"command printed no JSON line: {_shorten(lines[-_TAIL_LINES:])}")

    return run


# --- journal and lock -------------------------------------------------------------------------------------------------
class Journal:
    """Results on disk, one JSON line each, behind a first line that says what run they belong to."""

    def __init__(self, folder: str, identity: Json, fresh: bool = False) -> None:
        self.path = os.path.join(folder, "journal.jsonl")
        self.results: list[Result] = []
        if fresh:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        self._file: IO[bytes] = open(self.path, "ab+")  # noqa: SIM115 - closed in __exit__
        try:
            self._read(identity)
        except BaseException:
            self._file.close()
            raise

    def _read(self, identity: Json) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break  # a write that was cut off: that row runs again
            try:
                entry = json.loads(line)
                if number == 0:
                    self._check(entry["run"], identity)
                else:
                    self.results.append(Result(**entry))
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, RunnerError):
                    raise
                raise RunnerError(
                    f"{self.path}: line {number + 1} is damaged ({error}): run with --fresh to start again"
                ) from None
            end += len(line)
        self._file.truncate(end)
        if end == 0:
            self._write({"run": identity})

    def _check(self, stored: Json, identity: Json) -> None:
        for name in sorted(stored.keys() | identity.keys()):
            if stored.get(name) != identity.get(name):
                raise RunnerError(
                    f"{self.path} was begun with {name} = {format_value(stored.get(name))}, now it is "
                    f"{format_value(identity.get(name))}: run with --fresh to start again, or choose another folder"
                )

    def append(self, result: Result) -> None:
        self._write(result._asdict())
        self.results.append(result)

    def _write(self, entry: Json) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            what = "disk full" if error.errno == errno.ENOSPC else error.strerror
            raise RunnerError(f"{self.path}: {what}; the rows before it are kept, run again to go on") from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()


@contextmanager
def _lock(folder: str) -> Iterator[None]:
    """One run per folder; the kernel frees the lock when its process ends, so none is ever stale."""
    path = os.path.join(folder, "lock")
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise RunnerError(
                f"{folder} is in use by another run (process {holder}): wait for it, or stop it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class _Interrupt:
    """Ctrl-C once: stop after the current row. Twice: stop now."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        sys.stderr.write(
            "\nstopping after the current row; Ctrl-C again stops at once. The same command goes on later.\n"
        )

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


# --- progress ---------------------------------------------------------------------------------------------------------
class Progress:
    """One line on a stream: rows done, failed, time left; rewritten on a terminal, repeated every few seconds else."""

    def __init__(self, stream: TextIO | None, every_s: float = 5.0) -> None:
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._every_s = 0.5 if self._is_terminal else every_s
        self._shown = 0.0
        self._start = time.monotonic()
        self._width = 0

    def begin(self, jobs: Sequence[Job], found: Mapping[tuple[str, str], Result]) -> None:
        self._start = time.monotonic()
        self._total = sum(len(job.rows) for job in jobs)
        self._left = {job.id: sum((job.id, row) not in found for row in job.rows) for job in jobs}
        self._expected = {job.id: job.expected_s / max(len(job.rows), 1) for job in jobs}
        self._spent: dict[str, list[float]] = {job.id: [] for job in jobs}
        self._failed = sum(not result.is_ok for result in found.values())
        self._job = jobs[0].id if jobs else ""

    def note(self, result: Result) -> None:
        self._job = result.job
        self._left[result.job] -= 1
        self._spent[result.job].append(result.seconds)
        self._failed += not result.is_ok
        self.tick()

    def estimate_left_s(self) -> float:
        """Seconds left: rows so far of a job where there are some, else what was expected of it."""
        left = 0.0
        known = [s for spent in self._spent.values() for s in spent]
        for job, rows in self._left.items():
            spent = self._spent[job]
            each = (
                sum(spent) / len(spent) if spent else self._expected[job] or (sum(known) / len(known) if known else 0)
            )
            left += rows * each
        return left

    def tick(self, job: str | None = None) -> None:
        self._job = job or self._job
        now = time.monotonic()
        if self._stream is not None and now - self._shown >= self._every_s:
            self._shown = now
            self._show()

    def _show(self) -> None:
        assert self._stream is not None
        done = self._total - sum(self._left.values())
        failed = f", {self._failed} failed" if self._failed else ""
        spent = _format_time(time.monotonic() - self._start)
        left = _format_time(self.estimate_left_s())
        text = f"{self._job}: {done}/{self._total} rows{failed}, {spent} so far, {left} left"
        if self._is_terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def end(self) -> None:
        if self._stream is not None:
            self._show()
            if self._is_terminal:
                self._stream.write("\n")
            self._stream.flush()


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


if __name__ == "__main__":
    # Served by the module that jobs import, not by this copy of it: the RowError they raise is that module's.
    sys.exit(import_module("flopcalc.measure.runner")._serve(int(sys.argv[1])))
