"""The process of one job: the task on stdin, then row after row over a socket, one JSON line each way."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from flopcalc.errors import FlopcalcError, format_value
from flopcalc.measure.jobs.job import Json, RowError, RunnerError

DETAIL_CHARACTERS = 500
_PLACE_LINES = 3  # of code, in the detail of an exception


def serve(descriptor: int) -> int:
    """Call the job's function, then measure one row per request until the request is null."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    requests: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, the kernel kills this process, not the runner

    def send(answer: Json) -> None:
        channel.sendall(json.dumps(answer).encode() + b"\n")

    task = json.load(sys.stdin)
    try:
        measure = load_function(task["call"])(task["args"])
    except BaseException as error:
        send(_describe_error(error))
        return 1
    send({"status": "ok"})
    while (row := requests.get()) is not None:
        answer = _answer(measure, task["rows"][row])
        send(answer)
        if answer.get("ends"):
            break
    return 0


def _listen(channel: socket.socket, requests: SimpleQueue[str | None]) -> None:
    with suppress(OSError), channel.makefile("rb") as lines:
        for line in lines:
            requests.put(json.loads(line))
    # Only the runner holds the other end: it has ended, so this job ends with everything that it started.
    os.killpg(0, signal.SIGKILL)


def _answer(measure: Callable[[object], object], parameters: object) -> Json:
    try:
        answer = {"status": "ok", "data": measure(parameters)}
        json.dumps(answer)  # a result that is not JSON is a failure of this row
        return answer
    except Exception as error:
        answer = _describe_error(error)
        error.__traceback__ = None  # it holds the tensors of the failed row
    _free_memory()
    return answer


def _describe_error(error: BaseException) -> Json:
    text = clean_line(str(error))
    detail = text if isinstance(error, RowError) else f"{type(error).__name__}: {text}"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_oom = "OutOfMemoryError" in kinds or isinstance(error, MemoryError) or "can't allocate memory" in text
    if not isinstance(error, RowError):
        with suppress(OSError):  # the disk of the log is full
            traceback.print_exception(error)  # into the log of the job
    # After an error of the device itself, nothing more can run in this process.
    ends = "AcceleratorError" in kinds or ("CUDA error" in text and not is_oom)
    place = "" if is_oom or isinstance(error, RowError | FlopcalcError) else _describe_place(error)
    detail = detail[:DETAIL_CHARACTERS] + place
    return {"status": "failed", "reason": "oom" if is_oom else "exception", "detail": detail, "ends": ends}


def _describe_place(error: BaseException) -> str:
    """The last lines of code that raised, innermost first; the full traceback is in the log."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
    lines = [
        f"{os.path.basename(each.filename)}:{each.lineno} {each.line or each.name}"
        for each in reversed(frames[-_PLACE_LINES:])
    ]
    return f" [{clean_line(' < '.join(lines))[:DETAIL_CHARACTERS]}]" if lines else ""


def _free_memory() -> None:
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
    """One printable line: no colours, cursor moves or line ends."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
