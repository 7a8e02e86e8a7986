"""The one reader of files that a user names or may have put somewhere: regular files only, up to a stated size."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from typing import Any, BinaryIO

from flopcalc.base.errors import FlopcalcError, format_value

# The largest files that are read, by what they hold; what is larger is no such file.
MAX_TOML_BYTES = 10_000_000
MAX_JSON_BYTES = 16_000_000
MAX_YAML_BYTES = 500_000  # PyYAML reads about 100 kB in a second
MAX_TABLE_BYTES = 50_000_000
MAX_LOG_BYTES = 500_000_000
_PART_AGE_S = 3600.0
_FLOAT = "__float__"  # transformers 5.22: configuration_utils.py
_MOST_CHARACTERS = 300  # of a path in an error
# Opening a pipe without a writer would wait for one, and a terminal could become this process's own.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = (
    (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def read_path(path: object, what: str, error: type[FlopcalcError]) -> str:
    """The text of a path; an error for an object that only claims to be one."""
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except Exception:  # whatever its __fspath__ does
        raise error(f"{what} must be a path, not {format_value(path)}") from None


def open_regular(path: str | os.PathLike[str], error: type[FlopcalcError]) -> BinaryIO:
    """A regular file, open for reading; an error in words for everything else."""
    name = os.fsdecode(path)
    shown = name if len(name) <= _MOST_CHARACTERS else name[:_MOST_CHARACTERS] + "…"
    descriptor = -1
    try:
        _check_regular(shown, os.stat(name).st_mode, error)  # before it is opened: opening a device may act on it
        descriptor = os.open(name, _FLAGS)
        _check_regular(shown, os.fstat(descriptor).st_mode, error)  # again: the name may mean another file by now
        return open(descriptor, "rb")
    except error:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{shown}: cannot be read: {reason}") from None


def _check_regular(name: str, mode: int, error: type[FlopcalcError]) -> None:
    if stat.S_ISDIR(mode):
        raise error(f"{name}: cannot be read: Is a directory")
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise error(f"{name}: cannot be read: it is {kind}, not a regular file")


def read_bytes(path: str | os.PathLike[str], limit: int, error: type[FlopcalcError]) -> bytes:
    """A regular file's content, of at most `limit` bytes."""
    with open_regular(path, error) as file:
        try:
            is_small = os.fstat(file.fileno()).st_size <= limit
            data = file.read(limit + 1) if is_small else b""
        except OSError as problem:
            raise error(f"{os.fspath(path)}: cannot be read: {problem.strerror or problem}") from None
    if not is_small or len(data) > limit:
        raise error(f"{os.fspath(path)}: larger than {limit} bytes, the most that is read")
    return data


def read_text(path: str | os.PathLike[str], limit: int, error: type[FlopcalcError]) -> str:
    """The same as text; a mark of the byte order at its start is left out."""
    try:
        return read_bytes(path, limit, error).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{os.fspath(path)}: not UTF-8 text: {problem.reason} at byte {problem.start}") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text; also what transformers writes for infinities and NaN: {"__float__": "Infinity"}."""
    import json

    return json.loads(text, object_hook=_read_float if _FLOAT in text else None)


def _read_float(table: dict[str, Any]) -> Any:
    word = table.get(_FLOAT) if len(table) == 1 else None
    return float(word) if word in ("Infinity", "-Infinity", "NaN") else table


def read_json(path: str | os.PathLike[str], limit: int, error: type[FlopcalcError]) -> Any:
    """A JSON file's value."""
    text = read_text(path, limit, error)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{os.fspath(path)}: not valid JSON: {str(problem)[:200]}") from None


def write_whole(path: str, text: str) -> None:
    """Replace a file as a whole or not at all; an OSError where it fails. A pipe or a device takes it as it comes."""
    path = os.path.realpath(path)  # a link stays one
    if os.path.exists(path) and not os.path.isfile(path):  # to rename over a device would remove it
        # Without blocking, so that a pipe without a reader is an error; with it again once it is open.
        number = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        with open(number, "w", encoding="utf-8") as stream:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(number, True)
            stream.write(text)
        return
    _remove_parts(os.path.dirname(path))
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):
            os.unlink(part)


def _remove_parts(folder: str) -> None:
    """Remove what killed processes left: parts of files that nobody has written to for an hour."""
    for name in os.listdir(folder) if os.access(folder, os.R_OK) else ():
        pieces = name.rsplit(".", 2)
        if len(pieces) == 3 and pieces[1].isdigit() and pieces[2] == "part":
            path = os.path.join(folder, name)
            with suppress(OSError):
                if os.stat(path).st_mtime < time.time() - _PART_AGE_S:
                    os.unlink(path)
