"""Results of a run go in, the same results come back after any end of the process: the journal and lock of a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from flopcalc.errors import format_value
from flopcalc.measure.jobs import Json, Result, RunnerError


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
def lock_folder(folder: str) -> Iterator[None]:
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
