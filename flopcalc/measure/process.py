"""A task goes in, its results come out row by row: one job run in worker processes, seen from the parent.

Nothing here waits: whoever runs several jobs asks each for what is new when its pipe speaks or its deadline passes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flopcalc.measure.jobs import Job, Json, Result, RunnerError, Task, make_failure
from flopcalc.measure.worker import TAIL_LINES, read_children, shorten

_RESTART = ("killed", "exit", "timeout")  # a start that ended so may go well the next time
_END_S = 10.0  # a worker that was told to end gets this long before it is killed
_LOG_BYTES = 1 << 20  # of a log that comes back from another machine


class JobRun:
    """One job under way. Ask `advance` whenever `fileno` can be read or `deadline` (monotonic) has passed."""

    def __init__(self, task: Task, env: Mapping[str, str]) -> None:
        self.task = task
        self.is_done = False
        self.began_s = time.monotonic()
        self.deadline = 0.0
        self._env = env
        self._pending = list(task.rows)
        self._is_stopped = False
        self._starts = 0  # in a row, without success
        self._start_worker()

    @property
    def job(self) -> Job:
        return self.task.job

    @property
    def guard(self) -> int:
        """The process above all that this job runs."""
        return self._worker.pid

    @property
    def is_ending(self) -> bool:
        """All its results are told; only its processes are still to end."""
        return self._state == "ending" and not self._pending

    def fileno(self) -> int:
        return self._worker.fileno()

    def advance(self) -> list[Result]:
        """The results that are new; after the last one the worker is ended, and then `is_done`."""
        answer = self._worker.receive()
        if answer is None:
            if time.monotonic() < self.deadline:
                return []
            answer = {"reason": "timeout", "detail": f"no answer within {self._limit_s:g} s"}
            if self._state == "ending" and not self._worker.is_killed:
                self._worker.kill()
                self._set_limit(_END_S)
                return []
            if self._state == "ending":
                self._worker.abandon()  # not even SIGKILL ends it: it sits in a system call
            else:
                self._worker.kill()
        if self._state == "starting":
            return self._take_start(answer)
        if self._state == "row":
            return self._take_row(answer)
        self._finish()
        return []

    def stop(self) -> None:
        """Begin no other row than the one that runs."""
        self._is_stopped = True
        del self._pending[0 if self._state == "ending" else 1 :]

    def kill(self) -> None:
        """Have it ended now, whatever it does; close() waits for that."""
        self._pending.clear()
        self._worker.kill()

    def close(self) -> None:
        if not self.is_done:
            self.kill()
            self._worker.wait(_END_S)
            self._worker.abandon()
            self.is_done = True

    def _start_worker(self) -> None:
        self._state = "starting"
        self._starts += 1
        self._row_began_s = time.monotonic()
        self._worker = _Worker(self.task, self._env)
        self._set_limit(self.job.start_timeout_s)

    def _take_start(self, answer: Json) -> list[Result]:
        if answer.get("status") == "ok":
            self._starts = 0
            self._begin_row()
            return []
        results = []
        if self._starts == 2 or answer["reason"] not in _RESTART:
            # The call itself fails, not a row: every row that is left would meet the same end.
            tried = ", tried twice" if self._starts == 2 else ""
            detail = f"worker did not start{tried}: {answer['detail']}"
            results = [self._fail(row, answer["reason"], detail) for row in self._pending]
            self._pending.clear()
        elif self._is_stopped:
            self._pending.clear()
        self._end_worker()
        return results

    def _begin_row(self) -> None:
        self._state = "row"
        self._worker.send({"row": self.job.rows[self._pending[0]]})
        self._set_limit(self.job.timeout_s)

    def _take_row(self, answer: Json) -> list[Result]:
        row = self._pending.pop(0)
        if answer.get("status") == "ok":
            seconds = round(time.monotonic() - self._row_began_s, 3)
            result = Result(self.job.id, row, self.job.key(row), "ok", None, None, answer.get("data"), seconds)
        else:
            result = self._fail(row, answer["reason"], answer["detail"])
        if self._pending and not answer.get("ends") and not self._worker.is_killed and not self._worker.has_ended:
            self._row_began_s = time.monotonic()
            self._begin_row()
        else:
            self._end_worker()
        return [result]

    def _fail(self, row: str, reason: str, detail: str) -> Result:
        return make_failure(self.job, row, reason, detail, time.monotonic() - self._row_began_s)

    def _end_worker(self) -> None:
        self._state = "ending"
        self._worker.finish_requests()
        self._set_limit(_END_S)
        if self._worker.has_ended:
            self._finish()

    def _finish(self) -> None:
        """The worker is gone, and its memory with it: only now may another take its place."""
        self._worker.abandon()
        if self._pending:
            self._start_worker()
        else:
            self.is_done = True

    def _set_limit(self, seconds: float) -> None:
        self._limit_s = seconds
        self.deadline = time.monotonic() + seconds


class _Worker:
    """A guard with its worker, in a session of their own: requests go to stdin, answers come on a pipe of their own."""

    def __init__(self, task: Task, env: Mapping[str, str]) -> None:
        self.is_killed = False
        self.has_ended = False
        self._log = task.log
        self._buffer = b""
        self._ooms = _read_oom_kills()
        # The child must find what the parent finds, also when the parent's path was changed by hand (pytest).
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        answers_reader, answers_writer = os.pipe()
        life_reader, life_writer = os.pipe()
        try:
            with open(task.log, "ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "flopcalc.measure.worker", str(answers_writer), str(life_reader)],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(answers_writer, life_reader),
                    start_new_session=True, env={**os.environ, "PYTHONPATH": path, **env, **task.job.env},
                )  # fmt: skip
        except BaseException as error:
            os.close(answers_reader)
            os.close(life_writer)
            if isinstance(error, OSError):
                raise RunnerError(
                    f"{task.job.id} cannot be started, its log is {task.log}: {error.strerror}; "
                    "what was done is kept, run again to go on"
                ) from None
            raise
        finally:
            os.close(answers_writer)
            os.close(life_reader)
        os.set_blocking(answers_reader, False)
        self._answers = answers_reader
        self._life = life_writer
        self.send({"call": task.job.call, "args": task.job.args})

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._answers

    def send(self, request: Json) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: the answer says how
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def finish_requests(self) -> None:
        """Let an idle worker end by itself."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def receive(self) -> Json | None:
        """The next answer, or the worker's death as one; None if there is neither yet."""
        while b"\n" not in self._buffer:
            try:
                piece = os.read(self._answers, 1 << 16)
            except BlockingIOError:
                return None
            if not piece:
                return self._describe_death()
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: Json = json.loads(line)
        return answer

    def kill(self) -> None:
        """Let the guard end the worker and all that it started."""
        if not self.is_killed:
            self.is_killed = True
            os.close(self._life)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended by itself or by the guard's hand, at most so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def abandon(self) -> None:
        """End the guard too, and close everything that leads there."""
        self.finish_requests()
        self.kill()
        if self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _describe_death(self) -> Json:
        # The guard holds the pipe until its last moment: there is hardly anything to wait for.
        self.has_ended = True
        code = self._process.wait()
        tail = self._read_tail()
        if code < 0:
            name = signal.Signals(-code).name if -code in {int(s) for s in signal.Signals} else str(-code)
            is_oom = -code == signal.SIGKILL and _read_oom_kills() > self._ooms
            reason = "oom" if is_oom else "killed"
            hint = " (the kernel was out of memory)" if is_oom else " (by a person?)" if -code == signal.SIGKILL else ""
            detail = f"process ended by {name}{hint}"
        else:
            reason = "exit"
            detail = f"process ended with code {code}"
        return {"reason": reason, "detail": f"{detail}{': ' + tail if tail else ''}"}

    def _read_tail(self) -> str:
        with suppress(OSError), open(self._log, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - 4096))
            lines = log.read(4096).decode("utf-8", "replace").split("\n")
            return shorten([line.strip() for line in lines if line.strip()][-TAIL_LINES:])
        return ""


def _read_oom_kills(path: str = "/proc/vmstat") -> int:
    """How many processes the kernel ended for want of memory since it started; 0 where it does not say."""
    with suppress(OSError), open(path) as file:
        for line in file:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def read_tree_bytes(pid: int) -> int | None:
    """Resident memory of all processes below one; None where the system does not tell."""
    total = 0
    found = False
    waiting = read_children(pid)
    while waiting:
        child = waiting.pop()
        waiting += read_children(child)
        with suppress(OSError), open(f"/proc/{child}/statm") as file:
            total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found = True
    return total if found else None


def run_task(task: Json) -> Json:
    """What a machine of an engine runs: one task, with the same care as at home; its results and its log come back."""
    import socket
    import tempfile

    job = Job(**task["job"])
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="flopcalc-") as folder:
        log = os.path.join(folder, "log")
        run = JobRun(Task(job, tuple(task["rows"]), log), {})
        try:
            while not run.is_done:
                select.select([run], [], [], max(0.0, run.deadline - time.monotonic()))
                results += run.advance()
        finally:
            run.close()
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    return {"results": [result._asdict() for result in results], "log": text, "place": socket.gethostname()}


def dump_task(task: Task) -> dict[str, Any]:
    """The same as plain data, for a machine that may have another flopcalc's classes."""
    job = task.job._asdict()
    return {"job": {**job, "rows": dict(job["rows"]), "env": dict(job["env"])}, "rows": list(task.rows)}
