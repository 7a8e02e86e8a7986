"""A runner's requests go in on stdin, answers come out on a pipe: the two processes that run one job's function.

The runner starts the guard; the guard forks the worker, which calls the job's function, and waits for two things. If
the worker ends, the guard ends what it left behind and ends in the same way. If the runner goes away or closes the
life line (a pipe that only the runner holds), the guard ends the worker with all that it started. So no end of the
runner, not even SIGKILL, leaves a process behind, and no hang of the worker can prevent that.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from flopcalc.errors import FlopcalcError, format_value
from flopcalc.measure.jobs.job import Json, RowError, RunnerError

DETAIL_CHARACTERS = 500
_PLACE_LINES = 3
TAIL_LINES = 6
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def serve(answers: int, life: int) -> int:
    """Be the guard and its worker; both return here, each with its own exit code."""
    os.set_inheritable(answers, False)  # a program that the worker starts must not hold the pipes open
    os.set_inheritable(life, False)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # a runner that ignores it hands that on, and no end could be waited for
    # Processes whose parent ends are handed to the guard, also those with a session of their own.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()
    if worker:
        return _guard(worker, life)
    os.close(life)
    return _work(answers, guard)


# --- the guard --------------------------------------------------------------------------------------------------------
def _guard(worker: int, life: int) -> int:
    # The answers stay open here without being used: the runner reads their end when the guard has done its work.
    with suppress(OSError):
        os.setpgid(worker, worker)  # done by the worker too: whoever comes first
    _replace_stdin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: _end_group(worker))
    threading.Thread(target=_end_with_runner, args=(worker, life), daemon=True).start()
    status = 0
    ended = 0
    while ended != worker:
        ended, status = os.waitpid(-1, 0)
    _end_group(worker)
    while children := read_children(os.getpid()):
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _end_like(-code)
    return code


def _end_with_runner(worker: int, life: int) -> None:
    os.read(life, 1)  # nothing is ever written: this returns when no one holds the other end
    _end_group(worker)


def _end_group(worker: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)


def _end_like(number: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker left its core file, if any; one is enough
    with suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def read_children(pid: int) -> list[int]:
    """Linux: the direct children of a process; elsewhere, or when it has ended, none."""
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def _replace_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _prctl(option: int, value: int) -> None:
    import ctypes

    with suppress(OSError, AttributeError):  # Linux only; elsewhere the life line does it alone
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value))


# --- the worker -------------------------------------------------------------------------------------------------------
def _work(descriptor: int, guard: int) -> int:
    with suppress(OSError):
        os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
    if os.getppid() != guard:
        return 1  # it was, before that
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the machine is out of memory, the kernel takes this process and not its runner
    requests = os.fdopen(os.dup(0), "rb")
    _replace_stdin()
    with requests, os.fdopen(descriptor, "w") as answers:

        def send(answer: Json) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        line = requests.readline()
        if not line:
            return 0
        request = json.loads(line)
        try:
            measure = load_function(request["call"])(request["args"])
        except BaseException as error:
            send(_describe_error(error))
            return 1
        send({"status": "ok"})
        for line in requests:
            answer = _answer(measure, json.loads(line)["row"])
            send(answer)
            if answer.get("ends"):
                return 0
    return 0


def _answer(measure: Callable[[Any], Any], parameters: Any) -> Json:
    try:
        answer = {"status": "ok", "data": measure(parameters)}
        json.dumps(answer)  # a result that cannot be sent is this row's failure
        return answer
    except Exception as error:
        answer = _describe_error(error)
        error.__traceback__ = None  # it holds the failed row's tensors
    _free_memory()
    return answer


def _describe_error(error: BaseException) -> Json:
    import traceback

    text = clean_line(str(error))
    detail = text if isinstance(error, RowError) else f"{type(error).__name__}: {text}"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_oom = "OutOfMemoryError" in kinds or isinstance(error, MemoryError) or "can't allocate memory" in text
    if not isinstance(error, RowError):
        with suppress(OSError):  # the log's disk is full
            traceback.print_exception(error)  # into the job's log
    # After an error on the device itself, nothing more can be run in this process.
    ends = "AcceleratorError" in kinds or ("CUDA error" in text and not is_oom)
    reason = "oom" if is_oom else "exception"
    place = "" if is_oom or isinstance(error, (RowError, FlopcalcError)) else _describe_place(error)
    return {"status": "failed", "reason": reason, "detail": detail[:DETAIL_CHARACTERS] + place, "ends": ends}


def _describe_place(error: BaseException) -> str:
    """The last lines of code that an error came through, innermost first; whole folders are in the log."""
    import traceback

    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
    lines = [
        f"{os.path.basename(each.filename)}:{each.lineno} {each.line or each.name}"
        for each in reversed(frames[-_PLACE_LINES:])
    ]
    return f" [{clean_line(' < '.join(lines))[:DETAIL_CHARACTERS]}]" if lines else ""


def _free_memory() -> None:
    import gc

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(Exception):
            torch.cuda.empty_cache()


def load_function(call: str) -> Callable[[Any], Any]:
    """'package.module:function' -> the function."""
    module, _, name = call.partition(":")
    function = getattr(import_module(module), name, None)
    if not callable(function):
        raise RunnerError(f"job function {format_value(call)} does not exist")
    return function  # type: ignore[no-any-return]


def clean_line(text: str) -> str:
    """One line that a terminal shows as it is: without colours, cursor moves and line ends."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def shorten(lines: list[str]) -> str:
    """The lines as one, its end if it is long."""
    text = " | ".join(lines)
    return text if len(text) <= DETAIL_CHARACTERS else "…" + text[-DETAIL_CHARACTERS:]


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), int(sys.argv[2])))
