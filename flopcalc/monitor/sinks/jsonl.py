"""Records to a JSONL file: one object a line, appended, in whole lines."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import deque
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from flopcalc.monitor.sinks.base import Record, Say, Sink, say_nothing


class JsonlSink(Sink):
    """One JSON object a line, appended; a reader of the file sees whole lines up to the last save."""

    name = "jsonl"
    steps_only = False
    waits_for = (OSError,)  # a full disk: records wait in the queue

    def __init__(self, path: str | os.PathLike[str], save_every: int) -> None:
        self._path = os.path.abspath(path)  # the program may change its folder later
        self._save_every = save_every
        self._say: Say = say_nothing
        self._fd: int | None = None
        self._lines: deque[bytes] = deque()  # not written yet
        self._sent_bytes = 0  # how much of the first of them is in the file
        self._start: bytes | None = None
        self._taken: Record | None = None
        self._said_gone = False

    def open(self, say: Say) -> None:
        self._say = say

    def write(self, record: Record) -> None:
        if record is not self._taken:  # else only the saving failed
            line = _encode(_plain(record)).encode() + b"\n"
            if record.get("type") == "start":
                self._start = line
            self._lines.append(line)
            self._taken = record
        if len(self._lines) >= self._save_every or record.get("type", "step") != "step":
            self.flush()
        self._taken = None

    def unsaved(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def flush(self) -> None:
        if not self._lines:
            return
        try:
            fd = self._reach_file()
            data, sent = b"".join(self._lines), self._sent_bytes
            try:
                while sent < len(data):
                    count = os.write(fd, memoryview(data)[sent:])
                    if count == 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    sent += count
            finally:
                # A line that went out in part is completed by the next save, not written twice.
                while self._lines and sent >= len(self._lines[0]):
                    sent -= len(self._lines.popleft())
                self._sent_bytes = sent
        except OSError as error:  # os.write does not say which file
            raise OSError(error.errno, error.strerror, self._path) from None

    def _reach_file(self) -> int:
        """The file under our path, open for appending at the start of a line; made again when it was deleted."""
        if self._fd is not None:
            if _is_at(self._fd, self._path):
                return self._fd
            self.close()
            self._sent_bytes = 0
            if self._start is not None and self._start not in self._lines:
                self._lines.appendleft(self._start)  # without it the new file would not say what run it is of
            if not self._said_gone:
                self._said_gone = True
                self._say(f"{self._path} was deleted or moved while the monitor wrote to it: begun again")
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        # Whoever put a link where our file was may mean another file.
        follows = getattr(os, "O_NOFOLLOW", 0) if self._said_gone else 0
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | follows, 0o666)
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_size:
                os.lseek(fd, -1, os.SEEK_END)
                if os.read(fd, 1) != b"\n":  # a process was killed while it wrote
                    os.write(fd, b"\n")
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        return fd


def _is_at(fd: int, path: str) -> bool:
    """Whether the open file is still the one under this path."""
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return os.path.samestat(os.fstat(fd), found)


_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: making one takes as long as a record
_AS_IT_IS = (str, int, bool, type(None))


def _plain(value: Any) -> Any:
    """The value as JSON knows it: null where a number is not finite, a text where it is no number."""
    kind = type(value)
    if kind is float:  # most of them
        return value if math.isfinite(value) else None
    if kind is dict:
        return {str(key): each if type(each) in _AS_IT_IS else _plain(each) for key, each in value.items()}
    if kind is int or value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in value]
    return str(value)
