"""One task in a process of its own, seen from the parent: a task in, its results out row by row."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress

from flopcalc.measure.jobs.job import Json, Result, RunnerError, Task, make_failure, make_result
from flopcalc.measure.jobs.worker import DETAIL_CHARACTERS, clean_line

_RESTART = ("killed", "exit", "timeout")  # a start that ended like this may work the second time
_END_S = 10.0  # time to exit, before a worker is killed and after it
_TAIL_BYTES, _TAIL_LINES = 4096, 6  # of the log, for the detail of a failure
_ENDING_POLL_S = 0.02


class TaskRun:
    """One task under way. `advance` never blocks; it returns what is new since the last call."""

    def __init__(self, task: Task, env: Mapping[str, str]) -> None:
        self.task = task
        self.is_done = False
        self.is_stopped = False  # set it to begin no other row
        self.worker: _Worker | None = None
        self._steps = self._run(env)

    def advance(self) -> list[Result]:
        try:
            return next(self._steps)
        except StopIteration:
            self.is_done = True
            return []

    def kill(self) -> None:
        if self.worker is not None:
            self.worker.kill()

    def close(self) -> None:
        """Kill what runs, and wait for its end."""
        self._steps.close()
        self.is_done = True

    def _run(self, env: Mapping[str, str]) -> Generator[list[Result], None, None]:
        """The runner resumes this after it has stored what was yielded: a row begins when the one before is kept."""
        job = self.task.job
        pending = list(self.task.rows)
        starts = 0  # in a row, without success
        while pending:
            began_s = time.monotonic()
            starts += 1
            with _Worker(self.task, pending, env) as self.worker:
                answer = yield from self.worker.wait(job.start_timeout_s)
                if answer["status"] == "ok":
                    starts = 0
                    while pending and not answer.get("ends") and not self.worker.has_ended():
                        self.worker.send(pending[0])
                        answer = yield from self.worker.wait(job.timeout_s)
                        yield [make_result(job, pending.pop(0), answer, time.monotonic() - began_s)]
                        began_s = time.monotonic()
                        if self.is_stopped:
                            pending.clear()
                elif starts == 2 or answer["reason"] not in _RESTART:
                    # The call itself fails, so every row that is left would fail in the same way.
                    detail = f"worker did not start{', tried twice' if starts == 2 else ''}: {answer['detail']}"
                    failed = {**answer, "detail": detail}
                    yield [make_result(job, row, failed, time.monotonic() - began_s) for row in pending]
                    pending.clear()
                elif self.is_stopped:
                    pending.clear()
                if answer.get("reason") != "timeout":
                    yield from self.worker.finish()


def wait_for(runs: Iterable[TaskRun], timeout_s: float) -> None:
    """Return when a worker says something, at the latest after the timeout."""
    poll = select.poll()  # select() takes no descriptor above 1023
    for run in runs:
        if run.worker is None or run.worker.is_ending:
            timeout_s = min(timeout_s, _ENDING_POLL_S)  # the end of a process is seen by asking for it
        else:
            poll.register(run.worker.channel, select.POLLIN)
    poll.poll(timeout_s * 1000)


class _Worker:
    """A process in a session and process group of its own; leaving the context kills the group.

    The socket carries row ids one way and answers the other. The worker ends itself when the socket closes, so that it
    does not outlive the runner, even if the runner is killed.
    """

    def __init__(self, task: Task, rows: Iterable[str], env: Mapping[str, str]) -> None:
        self.is_ending = False
        self._log = task.log
        self._buffer = bytearray()
        self._oom_kills = _read_oom_kills()
        job = task.job
        request = {"call": job.call, "args": {**job.args, **job.where} if job.where else job.args}
        request["rows"] = {row: job.rows[row] for row in rows}
        # The child must find the modules that the parent finds (pytest changes sys.path), and with -P none that only
        # lie in the current folder.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {**os.environ, "PYTHONPATH": path, **env, **job.env}
        self.channel, other_end = socket.socketpair()
        try:
            with other_end, open(task.log, "ab") as log, tempfile.TemporaryFile() as stdin:
                self._log_start = log.tell()
                stdin.write(json.dumps(request).encode())  # a file: a pipe could block
                stdin.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "flopcalc.measure.jobs.worker", str(other_end.fileno())],
                    stdin=stdin, stdout=log, stderr=log, pass_fds=[other_end.fileno()], start_new_session=True,
                    env=variables,
                )  # fmt: skip
        except OSError as error:
            self.channel.close()
            raise RunnerError(
                f"{job.id} cannot be started, its log is {task.log}: {error.strerror}; "
                "what was done is kept, run again to go on"
            ) from None
        self.channel.setblocking(False)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):  # a process inside a system call of a driver may not end
            self._process.wait(_END_S)

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def send(self, row: str | None) -> None:
        with suppress(OSError):  # it has died: wait() says how
            self.channel.send(json.dumps(row).encode() + b"\n")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, limit_s: float) -> Generator[list[Result], None, Json]:
        """The next answer, or a failure: the process ended, or the time is over."""
        self.deadline_s = time.monotonic() + limit_s
        while True:
            has_ended = self.has_ended()  # asked before reading: everything it wrote is there by then
            if (line := self._receive()) is not None:
                with suppress(ValueError):
                    return dict(json.loads(line))
                return make_failure("exception", f"the answer of the worker cannot be read: {line[:100]!r}")
            if has_ended:
                return make_failure(*self._describe_end())
            if time.monotonic() >= self.deadline_s:
                return make_failure("timeout", f"no answer within {limit_s:g} s")
            yield []

    def finish(self) -> Generator[list[Result], None, None]:
        """Let it end by itself, so that its buffers and exit handlers run."""
        self.send(None)
        self.is_ending = True
        deadline_s = time.monotonic() + _END_S
        while not self.has_ended() and time.monotonic() < deadline_s:
            yield []

    def _receive(self) -> bytes | None:
        with suppress(BlockingIOError, ConnectionError):
            while not self._buffer.endswith(b"\n"):  # the worker sends one line, then waits for a request
                piece = self.channel.recv(1 << 16)
                self._buffer += piece
                if not piece:
                    self.is_ending = True
                    return None
            line = bytes(self._buffer)
            self._buffer.clear()
            return line
        return None

    def _describe_end(self) -> tuple[str, str]:
        code = self._process.returncode
        if code >= 0:
            reason, detail = "exit", f"process ended with code {code}"
        else:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            is_oom = -code == signal.SIGKILL and _read_oom_kills() > self._oom_kills
            reason = "oom" if is_oom else "killed"
            hint = " (the kernel was out of memory)" if is_oom else " (by a person?)" if -code == signal.SIGKILL else ""
            detail = f"process ended by {name}{hint}"
        tail = read_tail(self._log, self._log_start)
        return reason, f"{detail}{': ' + tail if tail else ''}"


def read_tail(log: str, start: int) -> str:
    """The last lines of a log as one; empty if there is nothing after `start`."""
    with suppress(OSError), open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        lines = [clean_line(line) for line in file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()]
        text = " | ".join([line for line in lines if line][-_TAIL_LINES:])
        return text if len(text) <= DETAIL_CHARACTERS else "…" + text[-DETAIL_CHARACTERS:]
    return ""


def _read_oom_kills(path: str = "/proc/vmstat") -> int:
    """How many processes the kernel has killed to free memory; 0 where it does not say."""
    with suppress(OSError), open(path) as file:
        for line in file:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
