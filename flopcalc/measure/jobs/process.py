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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from flopcalc.measure.jobs.job import Job, Json, Result, RunnerError, Task, make_failure
from flopcalc.measure.jobs.worker import TAIL_LINES, clean_line, read_children, shorten

_RESTART = ("killed", "exit", "timeout")  # a start that ended so may go well the next time
_END_S = 10.0  # a worker that was told to end gets this long before it is killed
POLL_S = 0.25  # so late at the most is seen what no pipe tells
_LOG_BYTES = 1 << 20  # of a log that comes back from another machine
_ANSWER_BYTES = 16 << 20  # of one row
_MARK = "FLOPCALC_GUARD"  # variable that every process below a guard carries


class JobRun:
    """One job under way. Ask `advance` whenever `wait_for` says that there may be news."""

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

    def watch(self, poll: select.poll) -> None:
        self._worker.watch(poll)

    def advance(self) -> list[Result]:
        """The results that are new; after the last one the worker is ended, and then `is_done`."""
        if self._state == "ending":
            self._await_end()
            return []
        if self._state == "between":
            self._go_on()
            return []
        answer = self._worker.receive()
        if answer is None:
            if time.monotonic() < self.deadline:
                return []
            answer = {"reason": "timeout", "detail": f"no answer within {self._limit_s:g} s"}
            self._worker.kill()
        return self._take_start(answer) if self._state == "starting" else self._take_row(answer)

    def stop(self) -> None:
        """Begin no other row than the one that runs."""
        self._is_stopped = True
        del self._pending[1 if self._state in ("starting", "row") else 0 :]

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
        if answer.get("ends") or self._worker.is_killed or self._worker.has_ended:
            self._end_worker()
        else:
            self._state = "between"  # the result is kept before anything else begins
            self._set_limit(0.0)
        return [result]

    def _go_on(self) -> None:
        if not self._pending:
            self._end_worker()
        elif self._worker.is_gone():
            self._finish()  # it answered and died: that is no failure of the next row
        else:
            self._row_began_s = time.monotonic()
            self._begin_row()

    def _fail(self, row: str, reason: str, detail: str) -> Result:
        return make_failure(self.job, row, reason, detail, time.monotonic() - self._row_began_s)

    def _end_worker(self) -> None:
        self._state = "ending"
        self._worker.finish_requests()
        self._set_limit(_END_S)
        if self._worker.has_ended:
            self._finish()

    def _await_end(self) -> None:
        if self._worker.is_gone():
            self._finish()
        elif time.monotonic() >= self.deadline:
            if self._worker.is_killed:
                self._finish()  # not even SIGKILL ends it: it sits in a system call
            else:
                self._worker.kill()
                self._set_limit(_END_S)

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


def wait_for(runs: Sequence[JobRun], timeout_s: float) -> None:
    """Until one of them has news or one's time is over; at most so long."""
    poll = select.poll()  # select() takes no descriptor above 1023
    for run in runs:
        run.watch(poll)
    now = time.monotonic()
    limit_s = min([timeout_s, *(run.deadline - now for run in runs)])
    poll.poll(max(0.0, limit_s) * 1000)


class _Worker:
    """A guard with its worker, in a session of their own: requests go to stdin, answers come on a pipe of their own."""

    def __init__(self, task: Task, env: Mapping[str, str]) -> None:
        self.is_killed = False
        self.has_ended = False
        self._log = task.log
        self._unsent = b""
        self._buffer = bytearray()
        self._searched = 0  # so much of the buffer holds no end of a line
        self._ooms = _read_oom_kills()
        self._mark = os.urandom(8).hex()
        try:
            self._start(task, env)
        except OSError as error:
            raise RunnerError(
                f"{task.job.id} cannot be started, its log is {task.log}: {error.strerror}; "
                "what was done is kept, run again to go on"
            ) from None
        job = task.job
        self.send({"call": job.call, "args": {**job.args, **job.where} if job.where else job.args})

    def _start(self, task: Task, env: Mapping[str, str]) -> None:
        # The child must find what the parent finds, also when the parent's path was changed by hand (pytest), and (-P)
        # nothing else that lies in the current folder.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {**os.environ, "PYTHONPATH": path, **env, **task.job.env, _MARK: self._mark}
        self._answers, answers_writer = _make_pipe()
        # A file object closes itself: should an interrupt hit before anyone knows of this worker, its guard ends it.
        life_reader, self._life = _make_pipe()
        try:
            with answers_writer, life_reader, open(task.log, "ab") as log:
                self._log_start = log.tell()
                pipes = (answers_writer.fileno(), life_reader.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "flopcalc.measure.jobs.worker", *map(str, pipes)],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=pipes, start_new_session=True,
                    env=variables, bufsize=0,
                )  # fmt: skip
        except BaseException:
            self._answers.close()
            self._life.close()
            raise
        assert self._process.stdin is not None
        self._requests = self._process.stdin
        # Nothing that a worker does or leaves undone may hold up its runner.
        os.set_blocking(self._answers.fileno(), False)
        os.set_blocking(self._requests.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, poll: select.poll) -> None:
        poll.register(self._answers, select.POLLIN)
        if self._unsent:
            poll.register(self._requests, select.POLLOUT)

    def send(self, request: Json) -> None:
        self._unsent += json.dumps(request).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        """As much as the pipe takes now; the rest goes with the next look at it."""
        while self._unsent:
            try:
                sent = os.write(self._requests.fileno(), self._unsent)
            except BlockingIOError:
                return
            except BrokenPipeError:  # it died: the answer says how
                sent = len(self._unsent)
            self._unsent = self._unsent[sent:]

    def finish_requests(self) -> None:
        """Let an idle worker end by itself."""
        self._unsent = b""
        self._requests.close()

    def receive(self) -> Json | None:
        """The next answer, or the worker's death as one; None if there is neither yet."""
        self._push()
        # Asked before the pipe is read: what the dead wrote is in it by then.
        is_over = self._process.poll() is not None
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > _ANSWER_BYTES:
                self.kill()
                return {"reason": "exception", "detail": f"the answer is longer than {_ANSWER_BYTES >> 20} MiB"}
            try:
                piece = os.read(self._answers.fileno(), 1 << 16)
            except BlockingIOError:  # a guard that was killed may leave someone who holds the pipe
                return self._describe_death() if is_over else None
            if not piece:
                return self._describe_death()
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return self._parse(line)

    def _parse(self, line: bytes) -> Json:
        answer: Any = None
        with suppress(ValueError, RecursionError):
            answer = json.loads(line)
        if isinstance(answer, dict) and (answer.get("status") == "ok" or {"reason", "detail"} <= answer.keys()):
            return answer
        self.kill()  # someone else writes into its pipe: nothing from there can be believed
        text = clean_line(line[:100].decode("utf-8", "replace"))
        return {"reason": "exception", "detail": f"the worker's answer cannot be read: {text}"}

    def is_gone(self) -> bool:
        """Whether guard and worker have ended; what they still say is thrown away."""
        is_over = self._process.poll() is not None
        with suppress(BlockingIOError):
            for _ in range(16):  # one that never stops to write is not waited for here
                if not os.read(self._answers.fileno(), 1 << 16):
                    self.wait(_END_S)  # the guard holds the pipe until its last moment
                    return True
        return is_over

    def kill(self) -> None:
        """Let the guard end the worker and all that it started."""
        self.is_killed = True
        self._life.close()

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
        if self._process.wait() < 0:
            _end_marked(self._mark)  # a guard that was killed has ended no one
        self._answers.close()

    def _describe_death(self) -> Json:
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
            # A progress bar rewrites its line: each state of it counts as one.
            lines = [clean_line(line) for line in log.read(4096).decode("utf-8", "replace").splitlines()]
            return shorten([line for line in lines if line][-TAIL_LINES:])
        return ""


def _make_pipe() -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return open(reader, "rb", 0), open(writer, "wb", 0)


def _end_marked(mark: str) -> None:
    """Linux: end all processes that carry the mark, and wait for that a little; elsewhere it cannot be done."""
    give_up_s = time.monotonic() + 2.0
    while (pids := _find_marked(f"{_MARK}={mark}".encode())) and time.monotonic() < give_up_s:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _find_marked(variable: bytes) -> list[int]:
    found = []
    with suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # not ours, or gone
                if variable in file.read().split(b"\0"):
                    found.append(int(name))
    return found


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
                wait_for([run], POLL_S)
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
    return {
        "job": {**job, "rows": dict(job["rows"]), "env": dict(job["env"]), "where": dict(job["where"])},
        "rows": list(task.rows),
    }
