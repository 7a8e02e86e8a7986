"""The process of one job: the job on stdin, then row after row over a channel: ids in, JSON answers out."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from queue import SimpleQueue

from flopcalc.base.errors import FlopcalcError
from flopcalc.measure.jobs.job import Json, RowError

DETAIL_CHARACTERS = 500
_PLACE_LINES = 3  # of code, in the detail of an exception


def serve(descriptor: int) -> int:
    """Call the job's function, then measure one row per request until the request is null."""
    os.set_inheritable(descriptor, False)
    channel = Connection(descriptor)
    # A forked copy must not hold it: the runner sees the end of this process by the end of the channel.
    os.register_at_fork(after_in_child=channel.close)
    requests: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, the kernel kills this process, not the runner

    def send(answer: Json) -> None:
        channel.send_bytes(json.dumps(answer).encode())

    job = json.load(sys.stdin)
    try:
        measure = resolve_name(job["call"])(job["args"])
    except BaseException as error:
        send(_describe_error(error))
        return 1
    send({"status": "ok"})
    while (row := requests.get()) is not None:
        answer = _answer(measure, job["rows"][row])
        send(answer)
        if answer.get("ends"):
            break
    return 0


def _listen(channel: Connection, requests: SimpleQueue[str | None]) -> None:
    with suppress(EOFError, OSError):
        while True:
            requests.put(json.loads(channel.recv_bytes()))
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
    gc.collect()
    if torch := sys.modules.get("torch"):
        with suppress(Exception):
            torch.cuda.empty_cache()
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


def clean_line(text: str) -> str:
    """One printable line: no colours, cursor moves or line ends."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
