"""The results of a run on disk: one JSON line each, and a lock so that one run at a time uses a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO

from flopcalc.base.errors import format_value
from flopcalc.base.files import MAX_LOG_BYTES, read_bytes
from flopcalc.base.spelling import spell
from flopcalc.base.validate import find_fault
from flopcalc.measure.jobs.job import Json, Result, RunnerError


class Journal:
    """Results on disk; the first line of the file says to which run they belong."""

    def __init__(self, folder: str, identity: Json, fresh: bool = False) -> None:
        self.path = os.path.join(folder, "journal.jsonl")
        self.results: list[Result] = []  # those found
        if fresh:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        is_there = os.path.exists(self.path)
        end = self._read(read_bytes(self.path, MAX_LOG_BYTES, RunnerError) if is_there else b"", identity)
        self._file = open(self.path, "ab")  # noqa: SIM115 - see close
        self._file.truncate(end)
        self._first: list[Json] = [] if self.results else [{"run": identity}]  # written with the first result

    def _read(self, data: bytes, identity: Json) -> int:
        """Take the results; returns where the next one is to be written."""
        stored: Json = {}
        end = 0
        for number, line in enumerate(BytesIO(data)):
            if not line.endswith(b"\n"):
                break  # the process was killed while writing: that row runs again
            try:
                entry = json.loads(line)
                if number == 0:
                    stored = dict(entry["run"])
                else:
                    if fault := find_fault(entry, Result):
                        raise ValueError(fault.lstrip(".: "))
                    self.results.append(Result(**entry))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RunnerError(
                    f"{self.path}: line {number + 1} is damaged ({error}): run with {spell('fresh')} to start again"
                ) from None
            end += len(line)
        for name in sorted(stored.keys() | identity.keys()) if self.results else ():
            if stored.get(name) != identity.get(name):
                raise RunnerError(
                    f"{self.path} was begun with {name} = {format_value(stored.get(name))}, now it is "
                    f"{format_value(identity.get(name))}: run with {spell('fresh')} to start again, or choose another "
                    "folder"
                )
        return end if self.results else 0

    def append(self, result: Result) -> None:
        for entry in (*self._first, result._asdict()):
            self._file.write(json.dumps(entry).encode() + b"\n")
        self._first = []
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # a full disk has been said
            self._file.close()


@contextmanager
def lock_folder(folder: str) -> Iterator[None]:
    """One run per folder; the kernel frees the lock when its process ends, so it is never stale."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "ab+", 0) as file:  # unbuffered: a full disk cannot fail the close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).decode("ascii", "replace").strip() or "unknown"
            raise RunnerError(
                f"{folder} is in use by another run (process {holder}): wait for it, or stop it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        yield


@contextmanager
def explain_disk_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except ConnectionError:  # a cluster's
        raise
    except OSError as error:
        where, what = error.filename or folder, describe_error(error)
        raise RunnerError(
            f"{where}: {what}; make room or choose another folder, and run again: what was done is kept"
        ) from None


def describe_error(error: OSError) -> str:
    return "disk full" if error.errno == errno.ENOSPC else error.strerror or str(error)
