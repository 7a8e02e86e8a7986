"""One job in a process of its own, seen from the parent: a job in, its results out row by row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Pipe

from flopcalc.measure.jobs.job import Job, Json, Result, make_failure, make_result
from flopcalc.measure.jobs.worker import DETAIL_CHARACTERS, clean_line

_RESTART = ("killed", "exit", "timeout")  # a start that ended like this may work the second time
_END_S = 10.0  # time to exit, before a worker is killed and after it
_TAIL_BYTES, _TAIL_LINES = 4096, 6  # of the log, for the detail of a failure


class JobRun:
    """One job under way. Call `advance` when the worker's channel has something, and now and then."""

    def __init__(self, job: Job, log: str, env: Mapping[str, str]) -> None:
        self.is_done = False
        self.is_stopped = False  # set it to begin no other row
        self._steps = self._run(job, log, env)
        next(self._steps)  # starts the first worker

    def advance(self) -> Iterator[Result]:
        """The new results, without waiting. The next row begins when its predecessor was taken from here."""
        for result in self._steps:
            if result is None:
                return
            yield result
        self.is_done = True

    def close(self) -> None:
        """Kill what runs, and wait for its end."""
        self._steps.close()

    def _run(self, job: Job, log: str, env: Mapping[str, str]) -> Generator[Result | None, None, None]:
        """Yields None while it waits for the worker."""
        pending = list(job.rows)
        starts = 0  # in a row, without success
        while pending:
            began_s = time.monotonic()
            starts += 1
            with Worker(job, log, env) as self.worker:
                answer = yield from self.worker.wait(job.start_timeout_s)
                if answer["status"] == "ok":
                    starts = 0
                    while pending and not answer.get("ends"):
                        self.worker.send(pending[0])
                        answer = yield from self.worker.wait(job.timeout_s)
                        yield make_result(job, pending.pop(0), answer, time.monotonic() - began_s)
                        began_s = time.monotonic()
                        if self.is_stopped:
                            pending.clear()
                elif starts == 2 or answer["reason"] not in _RESTART:
                    # The call itself fails, so every row that is left would fail in the same way.
                    detail = f"worker did not start{', tried twice' if starts == 2 else ''}: {answer['detail']}"
                    for row in pending:
                        yield make_result(job, row, {**answer, "detail": detail}, time.monotonic() - began_s)
                    pending.clear()
                elif self.is_stopped:
                    pending.clear()
                if answer.get("reason") != "timeout":
                    # Let it end by itself, so that its buffers and exit handlers run.
                    self.worker.send(None)
                    yield from self.worker.wait(_END_S)


class Worker:
    """A process in a session and process group of its own; leaving the context kills the group.

    The channel carries row ids one way and answers the other. The worker ends itself when the channel closes, so that
    it does not outlive the runner, even if the runner is killed. The other way round, the channel closes when the
    worker ends.
    """

    def __init__(self, job: Job, log: str, env: Mapping[str, str]) -> None:
        self._log = log
        self._oom_kills = _read_oom_kills()
        request = {"call": job.call, "args": {**job.args, **job.where}, "rows": job.rows}
        # The child must find the modules that the parent finds (pytest changes sys.path), and with -P none that only
        # lie in the current folder.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.channel, other_end = Pipe()
        with other_end, open(log, "ab") as output, tempfile.TemporaryFile() as stdin:
            self._log_start = output.tell()
            stdin.write(json.dumps(request).encode())  # a file: a pipe could block
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flopcalc.measure.jobs.worker", str(other_end.fileno())],
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=[other_end.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, **env},
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):  # a process inside a system call of a driver may not end
            self._process.wait(_END_S)

    def send(self, row: str | None) -> None:
        with suppress(OSError):  # it has died: wait() says how
            self.channel.send_bytes(json.dumps(row).encode())

    def wait(self, limit_s: float) -> Generator[None, None, Json]:
        """The next answer, or a failure: the process ended, or the time is over."""
        self.deadline_s = time.monotonic() + limit_s
        while True:
            yield None
            if self.channel.poll():
                try:
                    return dict(json.loads(self.channel.recv_bytes()))
                except (EOFError, OSError):
                    return self._describe_end()
            if time.monotonic() >= self.deadline_s:
                return make_failure("timeout", f"no answer within {limit_s:g} s")

    def _describe_end(self) -> Json:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return make_failure("exit", "process closed its channel and did not end")
        if code >= 0:
            reason, detail = "exit", f"process ended with code {code}"
        else:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            is_oom = -code == signal.SIGKILL and _read_oom_kills() > self._oom_kills
            reason = "oom" if is_oom else "killed"
            hint = " (the kernel was out of memory)" if is_oom else " (by a person?)" if -code == signal.SIGKILL else ""
            detail = f"process ended by {name}{hint}"
        tail = _read_tail(self._log, self._log_start)
        return make_failure(reason, f"{detail}: {tail}" if tail else detail)


def _read_tail(log: str, start: int) -> str:
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
