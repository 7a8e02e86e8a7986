"""What a sink is, and what all of them share: a record's numbers, and how errors are described."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

Record = Mapping[str, Any]
Say = Callable[[str], object]


class Sink:
    """One place that records go to; every method is called by one thread, and may raise or hang."""

    name: str
    install: str = ""  # what to install when open() lacks a library
    steps_only: bool = True  # "start", "event" and "end" records are for the log alone
    waits_for: tuple[type[BaseException], ...] = ()  # errors that pass with time: the record is never given up

    def open(self, say: Say) -> None:
        """Called before the first record, again when it raised."""

    def write(self, record: Record) -> None:
        """Take one record; when it raised, the same record comes again."""
        raise NotImplementedError

    def flush(self) -> None:
        """Bring what was taken to where others can read it."""

    def unsaved(self) -> int:
        """Records taken that flush() would still have to write, the one that failed last among them."""
        return 0

    def close(self) -> None:
        """The last call."""


def say_nothing(message: str) -> None:
    """For a sink that is not open, and an outbox without sinks."""


def describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def find_numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record as services take them; the time is theirs to keep."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if key == "time" or isinstance(value, bool) or not isinstance(value, Real):
            continue
        number = float(value)  # FLOPs of one step may pass 2^63, which no service stores as an int
        if math.isfinite(number):
            numbers[key] = int(number) if key == "global_step" else number
    return numbers
