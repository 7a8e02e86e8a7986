"""The one reader of files and texts from outside: regular files up to a stated size; YAML, TOML, JSON with limits."""

from __future__ import annotations

import math
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, BinaryIO

from flopcalc.base.errors import FlopcalcError, format_value

# The largest files that are read, by what they hold; what is larger is no such file.
MAX_TOML_BYTES = 2_000_000  # tomllib reads about 1 MB in a second
MAX_JSON_BYTES = 16_000_000
MAX_YAML_BYTES = 500_000  # PyYAML reads about 100 kB in a second
MAX_CSV_BYTES = 10_000_000
MAX_TABLE_BYTES = 50_000_000
MAX_LOG_BYTES = 500_000_000
# What a table of settings may hold.
MAX_ENTRIES = 10_000
MAX_DEPTH = 50
MAX_KEY_PARTS = 200
_BETWEEN_KEYS = r"[^\w\s.\"'-]"
_LONG_NUMBER = re.compile(r"0[xob][0-9a-fA-F_]{3000}")  # Python reads it, and cannot print it
# YAML 1.2's core schema, with 1.1's yes, no, on and off: every framework reads those as PyYAML does.
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
_PART_AGE_S = 3600.0
_FLOAT = "__float__"  # transformers 5.22: configuration_utils.py
_MOST_CHARACTERS = 300  # of a path in an error
# Opening a pipe without a writer would wait for one, and a terminal could become this process's own.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


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
        return read_bytes(path, limit, error).decode().removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        raise error(f"{os.fspath(path)}: not UTF-8 text: {problem.reason} at byte {problem.start}") from None


def read_csv(path: str, most_rows: int, error: type[FlopcalcError]) -> list[dict[str, str]]:
    """The rows of a CSV table by the names in its first line; what a row lacks is empty."""
    import csv
    from itertools import islice

    lines = read_text(path, MAX_CSV_BYTES, error).splitlines()
    try:
        rows = list(islice(csv.DictReader(lines, restval=""), most_rows + 1))
    except csv.Error as problem:
        raise error(f"{path}: not a CSV table: {problem}") from None
    if len(rows) > most_rows:
        raise error(f"{path}: more than {most_rows:,} rows, the most that are read: give a part of them")
    return rows


def parse_json(text: str, is_unique: bool = False) -> Any:
    """The value of a JSON text; also what transformers writes for infinities and NaN: {"__float__": "Infinity"}."""
    import json

    def build(pairs: list[tuple[str, Any]]) -> Any:
        if is_unique:
            check_unique(name for name, _ in pairs)
        word = pairs[0][1] if len(pairs) == 1 and pairs[0][0] == _FLOAT else None
        return float(word) if word in ("Infinity", "-Infinity", "NaN") else dict(pairs)

    return json.loads(text, object_pairs_hook=build if is_unique or _FLOAT in text else None)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text."""
    # The parser's memory grows with the square of a key's parts.
    if text.count(".") > MAX_KEY_PARTS and any(
        piece.count(".") > MAX_KEY_PARTS for line in text.split("\n") for piece in re.split(_BETWEEN_KEYS, line)
    ):
        raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts")
    if _LONG_NUMBER.search(text):
        raise ValueError("a number of more than 3,000 digits")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid TOML: {error}") from None


def parse_yaml(text: str, is_unique: bool = False) -> Any:
    """The value of a YAML text with YAML 1.2's scalars; an ImportError without PyYAML."""
    import yaml

    if _LONG_NUMBER.search(text):
        raise ValueError("a number of more than 3,000 digits")
    try:
        loader = _make_loader()(text)
        node = loader.get_single_node()
        check_entries(node)  # before tables are merged: few words can ask for billions of entries
        loader.is_unique = is_unique
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, LookupError, RecursionError) as problem:
        mark = getattr(problem, "problem_mark", None)
        reason = getattr(problem, "problem", None) or (str(problem).splitlines() or [type(problem).__name__])[0]
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"not valid YAML: {reason[:200]}{where}") from None


@cache
def _make_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        is_unique = False

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if self.is_unique and isinstance(node, yaml.MappingNode):
                keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
                check_unique((key.value for key in keys), [key.start_mark.line + 1 for key in keys])
            return super().construct_mapping(node, deep)

        def construct_int(self, node: Any) -> int:
            text = self.construct_scalar(node)
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

        def construct_float(self, node: Any) -> float:
            text = self.construct_scalar(node).lower()
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    Loader.yaml_implicit_resolvers = {}
    Loader.yaml_constructors = {None: Loader.construct_undefined}
    for name, pattern in _SCALARS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), None)
    for name in ("null", "bool", "str", "seq", "map"):
        Loader.add_constructor(f"tag:yaml.org,2002:{name}", getattr(Loader, f"construct_yaml_{name}"))
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_int)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_float)
    return Loader


def check_unique(names: Iterable[str], lines: list[int] | None = None) -> None:
    """An error for a key that stands twice: parsers keep the last one and say nothing."""
    seen = set()
    for place, name in enumerate(names):
        if name in seen:
            raise ValueError(f"{f'line {lines[place]}: ' if lines else ''}key {name!r:.60} stands twice")
        seen.add(name)


def check_entries(value: object) -> None:
    """An error for a table with too many entries; those of a table that is named twice count twice."""
    if _count_entries(value, {}) > MAX_ENTRIES:
        raise ValueError(f"more than {MAX_ENTRIES:,} entries, the most that is read")


def _count_entries(value: object, known: dict[int, float], depth: int = 0) -> float:
    """Entries of a table, or of a node of YAML, with those of the tables inside."""
    inner = getattr(value, "value", value)
    if not isinstance(inner, (dict, list, tuple)):
        return 1
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} tables or lists inside one another")
    if id(value) not in known:
        known[id(value)] = math.inf  # until it is counted: one that holds itself has no end
        inside = inner.values() if isinstance(inner, dict) else inner
        known[id(value)] = 1 + sum(
            _count_entries(each, known, depth + (not isinstance(inner, tuple))) for each in inside
        )
    return known[id(value)]


def parse_object(line: str | bytes) -> dict[str, Any]:
    """The object in a line of JSON; an empty one where there is none."""
    import json

    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json(path: str | os.PathLike[str], limit: int, error: type[FlopcalcError]) -> Any:
    """A JSON file's value."""
    text = read_text(path, limit, error)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{os.fspath(path)}: not valid JSON: {str(problem)[:200]}") from None


def format_json(value: Any, indent: int | None = 2) -> str:
    """JSON text for others to read: a number that is not finite is null, and a note says so."""
    import json

    with suppress(ValueError):
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    odd: list[str] = []
    plain = json.loads(json.dumps(value), parse_constant=odd.append)  # append gives None
    table = plain[0] if isinstance(plain, list) and plain else plain
    if isinstance(table, dict):
        table["notes"] = [*table.get("notes", ()), f"null stands for {len(odd)} numbers that are not finite"]
    return json.dumps(plain, indent=indent, ensure_ascii=False)


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
